// One request: what it is at, why it waits, and its whole story from the logs.

import { ask } from "./stream.js";
import { el, named } from "./dom.js";
import { amounts, clock, duration } from "./words.js";

const AGAIN_AFTER_MS = 1500;

export class Story {
  #id = null;
  #asked = 0;
  #waits = 0;
  #timer = null;

  constructor(dialog, closed) {
    this.dialog = dialog;
    dialog.addEventListener("close", () => {
      this.#id = null;
      closed();
    });
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) dialog.close(); // beside it
    });
  }

  show(id) {
    if (this.#id === id) return;
    this.#id = id;
    this.#frame(el("p", { className: "quiet", text: "Reading the logs ..." }));
    if (!this.dialog.open) this.dialog.showModal();
    this.#ask();
  }

  close() {
    if (this.dialog.open) this.dialog.close();
  }

  /** Something changed: read again, but not all the time. */
  changed() {
    if (this.#id === null || this.#timer !== null || this.#waits > 0) return;
    this.#timer = setTimeout(() => {
      this.#timer = null;
      if (this.#id !== null) this.#ask();
    }, AGAIN_AFTER_MS);
  }

  async #ask() {
    const id = this.#id;
    const number = ++this.#asked;
    let content;
    this.#waits++;
    try {
      content = this.#content(await ask("request", { id }));
    } catch (problem) {
      content = [el("p", { className: "trouble", role: "alert", text: problem.message })];
    } finally {
      this.#waits--;
    }
    if (this.#id === id && number === this.#asked) this.#frame(...content);
  }

  #frame(...content) {
    const close = el("button", { type: "button", className: "close", on: { click: () => this.close() }, text: "Close" });
    const title = el("h2", { id: "story-id" }, "Request ", named(this.#id));
    const top = this.dialog.querySelector(".story-body")?.scrollTop ?? 0;
    const body = el("div", { className: "story-body", tabindex: "0", role: "region", "aria-label": "What is known of it" }, ...content);
    const focused = this.dialog.contains(document.activeElement) && document.activeElement.className;
    this.dialog.replaceChildren(el("div", { className: "story-top" }, title, close), body);
    body.scrollTop = top;
    if (focused === "story-body") body.focus();
    else close.focus();
  }

  #content({ view, explain, story, trouble }) {
    const nodes = [];
    if (trouble) nodes.push(el("p", { className: "trouble", text: trouble }));
    if (view !== null) nodes.push(this.#facts(view));
    for (const [pool, said] of Object.entries(explain)) {
      const text = said.unreachable ? `does not answer: ${said.unreachable}` : said.text;
      if (!text) continue;
      const place = said.position ? `${said.position} of ${said.waiting} in the queue: ` : "";
      nodes.push(el("p", { className: "why" }, el("strong", {}, named(pool)), ` ${place}${text}`));
    }
    const lines = story.map((line) =>
      el(
        "li",
        { className: line.event === "waits" ? "judged" : "" },
        el("time", { text: clock(line.at, true), title: `${line.at}` }),
        el("span", { className: "from" }, named(line.log), line.seq ? ` row ${line.seq}` : ""),
        el("span", { className: "text" }, named(line.text)),
      ),
    );
    if (lines.length) nodes.push(el("h3", { text: "Its story" }), el("ol", { className: "story" }, ...lines));
    return nodes;
  }

  #facts(view) {
    const where = view.pool ? [" in ", named(view.pool)] : view.pools.length && view.state === "queued" ? [" in ", named(view.pools.join(", "))] : [];
    const facts = [
      ["State", el("span", {}, el("strong", { text: view.nominated ? "queued, comes next" : view.state }), ...where)],
      ["Team", named(view.requester)],
      ["Asks for", document.createTextNode(amounts(view.amounts))],
      ["Submitted", document.createTextNode(clock(view.submitted_at, true))],
      ["Preemptible", document.createTextNode(view.preemptible ? `yes, ${view.retries} retries left` : "no")],
    ];
    if (view.lease_s) facts.push(["Lease", document.createTextNode(duration(view.lease_s))]);
    if (view.grace_left_s !== null && view.state === "preempting") facts.push(["Time to stop", document.createTextNode(duration(view.grace_left_s))]);
    if (view.by) facts.push(["Ended by", named(view.by)]);
    for (const [pool, cause] of Object.entries(view.causes ?? {})) facts.push([`Not in ${pool}`, document.createTextNode(cause)]);
    return el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", { text: name }), el("dd", {}, value)]));
  }
}
