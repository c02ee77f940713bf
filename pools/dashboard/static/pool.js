// One pool: its bar, its teams, who holds, who waits. The chart of its past is in timeline.js.

import { el, named, reconcile, setAttribute, setHidden, setText, storyLink } from "./dom.js";
import { segments, teams, usage } from "./model.js";
import { amounts, causeWords, clock, duration, number, plural, stateWords } from "./words.js";
import { Rows } from "./rows.js";
import { Timeline } from "./timeline.js";

const KINDS = {
  share: "in its share",
  borrowed: "borrowed",
  leaving: "called back",
  nominated: "comes next",
};

function cell(className = "") {
  return el("td", { className });
}

export class PoolCard {
  #key = null;
  #pool = null;
  #at = 0;

  /** `page`: as main.js has it: colours, the window and the moment that are shown, and what can be done there. */
  constructor(name, page) {
    this.name = name;
    this.page = page;
    this.timeline = new Timeline(name, page);
    this.chips = el("p", { className: "chips" });
    this.keys = el("select", { on: { change: () => this.#chose() } });
    this.keyLabel = el("label", { className: "key" }, "Resource ", this.keys);
    this.trouble = el("p", { className: "trouble", hidden: true });
    this.bar = el("div", { className: "bar", role: "img" });
    this.next = el("div", { className: "bar next", role: "img" });
    this.scale = el("span");
    const legend = ["share", "borrowed", "leaving"].map((kind) =>
      el("span", { className: "legend" }, el("span", { className: `sample ${kind}`, "aria-hidden": "true" }), KINDS[kind]),
    );
    this.under = el("p", { className: "scale" }, this.scale, ...legend);
    this.teams = el("tbody");
    const heads = ["team", "priority", "held", "in share", "borrowed", "called back", "next", "reserved", "limit", "waiting"];
    const optional = new Set(["priority", "held", "limit", "next"]);
    const head = heads.map((text, index) =>
      el("th", { scope: "col", text, className: `${index ? "number" : ""}${optional.has(text) ? " wide" : ""}` }),
    );
    this.teamTable = el("table", { className: "teams" }, el("thead", {}, el("tr", {}, ...head)), this.teams);
    this.holding = new Rows(`Who holds in ${name}`, [["holds"], ["team"], ["amount"], ["since", "number"], ["state", "wide"]], {
      keyOf: (grant) => `${grant.id} ${grant.k}`,
      make: (grant) => el("tr", {}, ...this.#person(grant), cell(), cell("number"), cell("wide")),
      update: (node, grant) => this.#updateGrant(node, grant),
    });
    this.waiting = new Rows(`Who waits in ${name}`, [["waits"], ["team"], ["asks"], ["since", "number wide"], ["why", "cause"]], {
      keyOf: (item) => item.id,
      make: (item) => el("tr", {}, ...this.#person(item), cell(), cell("number wide"), el("td", {}, el("span", { className: "two-lines" }))),
      update: (node, item) => this.#updateWaiter(node, item),
    });
    this.waiting.body.className = "numbered";
    this.holdingTitle = el("h3");
    this.waitingTitle = el("h3");
    this.more = el("p", { className: "quiet", hidden: true });
    this.node = el(
      "section",
      { className: "pool", "aria-label": `Pool ${name}` },
      el("div", { className: "pool-top" }, el("h2", {}, named(name)), this.chips, this.keyLabel),
      this.trouble,
      this.bar,
      this.next,
      this.under,
      el("div", { className: "scroll-x", tabindex: "0", role: "region", "aria-label": `Teams of ${name}` }, this.teamTable),
      this.timeline.node,
      el(
        "div",
        { className: "lists" },
        el("div", {}, this.waitingTitle, this.waiting.node, this.more),
        el("div", {}, this.holdingTitle, this.holding.node),
      ),
    );
  }

  get key() {
    return this.#key;
  }

  #chose() {
    this.#key = this.keys.value;
    this.update(this.#pool, this.page.moment());
    this.timeline.draw();
  }

  /** Shows a state of the pool, at a time of the core. */
  update(pool, at) {
    this.#pool = pool;
    this.#at = at;
    const trouble = pool.unreachable ? `The pool does not answer, this is what it said last: ${pool.unreachable}` : pool.missing ?? "";
    setHidden(this.trouble, !trouble);
    setText(this.trouble, trouble);
    this.node.classList.toggle("empty", !pool.capacity);
    if (!pool.capacity) return;
    this.#updateKeys(pool);
    this.#updateBar(pool);
    this.#updateTeams(pool);
    this.#updateHolding(pool);
    this.#updateWaiting(pool);
  }

  #updateKeys(pool) {
    const keys = Object.keys(pool.capacity);
    if (!keys.includes(this.#key)) this.#key = keys.includes("gpu") ? "gpu" : keys[0] ?? null;
    reconcile(this.keys, keys, (key) => key, () => el("option"), (node, key) => {
      setText(node, key);
      setAttribute(node, "value", key);
    });
    this.keys.value = this.#key ?? "";
    setHidden(this.keyLabel, keys.length < 2);
    const chips = [
      `${number(pool.held[this.#key] ?? 0)} of ${number(pool.capacity[this.#key] ?? 0)} ${this.#key ?? ""} held`,
      plural(pool.waiting, "waits", "wait"),
      ...(pool.preempting.length ? [`${number(pool.preempting.length)} called back`] : []),
      pool.queueing,
    ];
    reconcile(this.chips, chips.map((text, index) => ({ text, index })), (chip) => chip.index, () => el("span"), (node, chip) => setText(node, chip.text));
  }

  #updateBar(pool) {
    const key = this.#key;
    const { parts, next, free, capacity, held, total } = segments(pool, key);
    const all = [...parts, ...(free > 0 ? [{ team: "", kind: "free", amount: free }] : [])];
    this.#segments(this.bar, all, total);
    const booked = next.reduce((sum, part) => sum + part.amount, 0);
    const room = Math.max(0, total - booked);
    this.#segments(this.next, booked ? [{ team: "", kind: "gap", amount: room }, ...next] : [], Math.max(total, booked));
    const words = [...parts, ...next].map((part) => `${part.team}: ${number(part.amount)} ${KINDS[part.kind]}`);
    setAttribute(this.bar, "aria-label", `${key}: ${words.join("; ") || "nobody holds any"}; ${number(free)} free of ${number(capacity)}`);
    setHidden(this.next, booked === 0);
    setAttribute(this.next, "aria-label", `booked for who comes next: ${number(booked)} ${key}`);
    const over = held > capacity ? `; ${number(held - capacity)} more are held than the capacity is now` : "";
    setText(this.scale, `${number(free)} of ${number(capacity)} ${key ?? ""} free${booked ? `; ${number(booked)} booked for who comes next` : ""}${over}`);
  }

  #segments(bar, parts, total) {
    const keyOf = (part) => `${part.kind} ${part.team}`;
    const make = (part) => {
      const label = part.kind === "gap" ? null : el("span", { className: "label" }, named(""), el("b"));
      return el("div", { className: `segment ${part.kind} ${part.team ? `team-${this.page.colours.of(part.team)}` : ""}` }, ...(label ? [label] : []));
    };
    reconcile(bar, parts, keyOf, make, (node, part) => {
      const share = `${(100 * part.amount) / (total || 1)}%`;
      if (node.style.width !== share) node.style.width = share;
      const label = node.firstChild;
      if (label === null) return;
      setText(label.firstChild, part.team || "free");
      setText(label.lastChild, number(part.amount));
      setAttribute(node, "title", `${part.team || "free"}: ${number(part.amount)} ${KINDS[part.kind] ?? ""}`);
    });
  }

  #updateTeams(pool) {
    const key = this.#key;
    const make = ([name]) => {
      const cells = ["number wide", "number wide", "number", "number", "number", "number wide", "number", "number wide", "number"].map(cell);
      return el("tr", {}, el("th", { scope: "row" }, this.#team(name)), ...cells);
    };
    const wanted = teams(pool).filter(([, team]) => team.grants || team.waiting || team.priority !== null);
    reconcile(this.teams, wanted, ([name]) => name, make, (node, [, team]) => {
      const use = usage(team, key);
      const values = [
        team.priority ?? "none",
        use.held,
        use.share,
        use.borrowed,
        use.leaving,
        use.nominated,
        use.reserved,
        team.limit[key] ?? "–",
        team.waiting,
      ];
      values.forEach((value, index) => {
        const place = node.children[index + 1];
        setText(place, typeof value === "number" ? number(value) : value);
        place.classList.toggle("zero", value === 0);
      });
    });
  }

  #team(name) {
    const swatch = el("span", { className: `swatch team-${this.page.colours.of(name)}`, "aria-hidden": "true" });
    return el("span", { className: "team", title: name }, swatch, named(name));
  }

  #person(item) {
    return [el("td", {}, storyLink(item.id)), el("td", {}, this.#team(item.requester))];
  }

  #updateHolding(pool) {
    const count = Object.values(pool.requesters).reduce((sum, team) => sum + team.grants, 0);
    setText(this.holdingTitle, `Holding: ${number(count)}`);
    this.holding.show([...(pool.grants ?? [])].reverse());
  }

  #updateGrant(node, grant) {
    const [, , amount, since, state] = node.children;
    node.classList.toggle("leaving", grant.state !== "granted");
    setText(amount, amounts(grant.amounts));
    setText(since, duration(this.#at - grant.granted_at));
    setText(state, stateWords(grant));
    setAttribute(since, "title", clock(grant.granted_at, true));
  }

  #updateWaiting(pool) {
    setText(this.waitingTitle, `Waiting: ${number(pool.waiting)}`);
    this.waiting.show(pool.queue);
    const more = pool.waiting - pool.queue.length;
    setHidden(this.more, more <= 0);
    setText(this.more, `and ${number(more)} more behind these`);
  }

  #updateWaiter(node, item) {
    const [, , amount, since, cause] = node.children;
    const words = causeWords(item.cause, item.nominated);
    node.classList.toggle("nominated", item.nominated);
    setText(amount, amounts(item.amounts));
    setText(since, duration(this.#at - item.submitted_at));
    setText(cause.firstChild, words);
    setAttribute(cause, "title", words);
    setAttribute(since, "title", clock(item.submitted_at, true));
  }
}
