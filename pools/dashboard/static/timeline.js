// Who held what when, in one pool: a chart of its capacity over time, and the list of preemptions.

import { ask } from "./stream.js";
import { el, named, reconcile, setAttribute, setHidden, setText, storyLink, svg } from "./dom.js";
import { lay, ticks } from "./model.js";
import { amounts, clock, duration, endWords, number, reasonWords } from "./words.js";

const HEIGHT = 132;
const AXIS = 18;
const LIST_MAX = 50;

export class Timeline {
  #grants = new Map();
  #rows = 0; // of the pool's log, as far as it is in #grants
  #from = null; // earliest moment that was asked for
  #asking = false;
  #again = false;
  #cut = false;
  #laid = []; // [grant, spans], kept until the grants change
  #laidFor = null;
  #width = 0; // as the browser last said
  #told = null; // preemptions that were there when the page came; later ones are said aloud

  constructor(name, page) {
    this.name = name;
    this.page = page;
    this.chart = svg("svg", { class: "chart", role: "img" });
    this.axis = svg("g", { class: "axis" });
    this.boxes = svg("g");
    this.marks = svg("g");
    this.capacity = svg("line", { class: "capacity" });
    this.cursor = svg("line", { class: "cursor" });
    this.chart.append(this.axis, this.boxes, this.capacity, this.marks, this.cursor);
    this.note = el("p", { className: "quiet", hidden: true });
    this.summary = el("summary");
    this.list = el("ol", { className: "preemptions" });
    this.details = el("details", { hidden: true }, this.summary, this.list);
    this.node = el("div", { className: "timeline" }, el("h3", { text: "Who held what" }), this.chart, this.note, this.details);
    this.chart.addEventListener("click", (event) => {
      const id = event.target.closest?.("[data-id]")?.dataset.id;
      if (id !== undefined) this.page.show(id);
    });
    new ResizeObserver(([{ contentRect }]) => {
      this.#width = contentRect.width;
      this.draw();
    }).observe(this.chart);
  }

  get grants() {
    return [...this.#grants.values()];
  }

  /** The log has grown, or another window is wanted: gets what is missing. One question at a time. */
  async follow(rows) {
    const { from, to } = this.page.window();
    if (this.#from !== null && from - this.#from > 2 * (to - from)) this.#forget(from);
    const wider = this.#from === null || from < this.#from;
    if (!wider && rows !== undefined && rows <= this.#rows) return;
    if (this.#asking) {
      this.#again = true;
      return;
    }
    this.#asking = true;
    try {
      const start = wider ? from : this.#from;
      const said = await ask("grants", { pool: this.name, from: start, to: 1e15, after: wider ? 0 : this.#rows });
      if (wider) this.#grants.clear();
      this.#rows = said.rows;
      this.#cut = said.cut;
      for (const grant of said.grants) this.#grants.set(`${grant.id} ${grant.k}`, grant);
      this.#forget(start);
      this.#sayNew();
      this.draw();
      this.page.changed();
    } catch (problem) {
      setHidden(this.note, false);
      setText(this.note, `The past can't be shown: ${problem.message}`);
    } finally {
      this.#asking = false;
    }
    if (this.#again) {
      this.#again = false;
      await this.follow();
    }
  }

  /** What was over before is not kept: a page may stay open for weeks. */
  #forget(from) {
    this.#from = from;
    for (const [key, grant] of this.#grants) if (grant.ended_at !== null && grant.ended_at < from) this.#grants.delete(key);
    this.#laidFor = null;
  }

  #sayNew() {
    const told = this.grants.filter((grant) => grant.told_at !== null);
    const before = this.#told;
    this.#told = new Set(told.map((grant) => `${grant.id} ${grant.k}`));
    if (before === null) return;
    for (const grant of told) if (!before.has(`${grant.id} ${grant.k}`)) this.page.say(preemptionWords(this.name, grant));
  }

  /** Draws the window as it is now. */
  draw() {
    const width = this.#width;
    const key = this.page.keyOf(this.name);
    if (!width || key === null || key === undefined) return;
    const { from, to } = this.page.window();
    const capacity = this.page.capacityOf(this.name, key);
    this.#layOut(key, capacity);
    const total = Math.max(capacity, ...this.#laid.flatMap(([, spans]) => spans.map(([, high]) => high)), 1);
    const view = { from, to, width, total, x: (at) => ((at - from) / (to - from || 1)) * width, y: (amount) => AXIS + (1 - amount / total) * HEIGHT };
    setAttribute(this.chart, "viewBox", `0 0 ${width} ${HEIGHT + 2 * AXIS}`);
    setAttribute(this.chart, "height", HEIGHT + 2 * AXIS);
    const seen = this.#laid.filter(([grant]) => grant.granted_at <= to && (grant.ended_at ?? Infinity) >= from);
    this.#drawAxis(view);
    this.#drawBoxes(seen, view, key);
    this.#drawLines(view, key);
    this.#drawList(seen.map(([grant]) => grant));
    const held = seen.length === 1 ? "1 grant" : `${number(seen.length)} grants`;
    setAttribute(this.chart, "aria-label", `${this.name}: ${held} from ${clock(from, true)} to ${clock(to, true)}; the tables have the same`);
    setHidden(this.note, !this.#cut);
    if (this.#cut) setText(this.note, "Older grants of this window are not drawn; the log has them.");
  }

  #layOut(key, capacity) {
    const wanted = `${key} ${capacity}`;
    if (this.#laidFor === wanted) return;
    const sorted = this.grants.sort((a, b) => a.row - b.row);
    const spans = lay(sorted, key, capacity);
    this.#laid = sorted.map((grant, index) => [grant, spans[index]]);
    this.#laidFor = wanted;
  }

  #drawAxis(view) {
    const zone = new Date().getTimezoneOffset() * 60;
    const marks = ticks(view.from - zone, view.to - zone, Math.max(2, view.width / 110)).map((at) => at + zone);
    const make = () => {
      const group = svg("g");
      group.append(svg("line", { class: "tick" }), svg("text", { class: "tick-text" }));
      return group;
    };
    reconcile(this.axis, marks, (at) => at, make, (group, at) => {
      const x = view.x(at).toFixed(1);
      const [line, text] = group.children;
      setAttribute(line, "x1", x);
      setAttribute(line, "x2", x);
      setAttribute(line, "y1", AXIS);
      setAttribute(line, "y2", AXIS + HEIGHT + 4);
      setAttribute(text, "x", Math.min(Math.max(view.x(at), 24), view.width - 24).toFixed(1));
      setAttribute(text, "y", HEIGHT + 2 * AXIS - 3);
      setText(text, view.to - view.from > 86400 ? clock(at, true).slice(0, -3) : clock(at).slice(0, view.to - view.from > 600 ? 5 : 8));
    });
  }

  #drawBoxes(seen, view, key) {
    const boxes = [];
    const marks = [];
    for (const [grant, spans] of seen) {
      const end = grant.ended_at ?? view.to;
      const told = grant.told_at ?? end;
      for (const [index, [low, high]] of spans.entries()) {
        const name = `${grant.id} ${grant.k} ${index}`;
        if (told > view.from) boxes.push({ name, grant, low, high, from: grant.granted_at, to: told, kind: "ran" });
        if (told < end) boxes.push({ name: `${name} told`, grant, low, high, from: told, to: end, kind: "told" });
      }
      if (grant.told_at !== null && grant.told_at >= view.from && spans.length) marks.push({ grant, top: spans[spans.length - 1][1] });
    }
    const make = ({ grant, kind }) => {
      const box = svg("rect", { class: `${kind} fill-${this.page.colours.of(grant.requester)}`, rx: 1.5 });
      box.dataset.id = grant.id;
      box.append(svg("title"));
      return box;
    };
    reconcile(this.boxes, boxes, (box) => box.name, make, (node, box) => {
      const left = Math.max(view.x(box.from), -2);
      const right = Math.min(view.x(box.to), view.width + 2);
      setAttribute(node, "x", left.toFixed(1));
      setAttribute(node, "width", Math.max(right - left, 1).toFixed(1));
      setAttribute(node, "y", (view.y(box.high) + 0.5).toFixed(1));
      setAttribute(node, "height", Math.max(view.y(box.low) - view.y(box.high) - 1, 1).toFixed(1));
      setText(node.firstChild, grantWords(box.grant));
    });
    const makeMark = ({ grant }) => {
      const mark = svg("path", { class: "mark" });
      mark.dataset.id = grant.id;
      mark.append(svg("title"));
      return mark;
    };
    reconcile(this.marks, marks, ({ grant }) => `${grant.id} ${grant.k}`, makeMark, (node, { grant, top }) => {
      const x = view.x(grant.told_at).toFixed(1);
      const y = view.y(top).toFixed(1);
      setAttribute(node, "d", `M${x} ${y}l-5 -8h10z`);
      setText(node.firstChild, preemptionWords(this.name, grant));
    });
  }

  #drawLines(view, key) {
    const capacity = view.y(this.page.capacityOf(this.name, key)).toFixed(1);
    for (const [name, value] of [["x1", 0], ["x2", view.width], ["y1", capacity], ["y2", capacity]]) setAttribute(this.capacity, name, value);
    const x = Math.min(view.x(this.page.moment()), view.width - 1).toFixed(1);
    for (const [name, value] of [["x1", x], ["x2", x], ["y1", AXIS - 6], ["y2", AXIS + HEIGHT + 4]]) setAttribute(this.cursor, name, value);
  }

  #drawList(seen) {
    const told = seen.filter((grant) => grant.told_at !== null).sort((a, b) => b.told_at - a.told_at);
    setHidden(this.details, told.length === 0);
    setText(this.summary, `Preemptions in this window: ${number(told.length)}`);
    const make = (grant) => {
      const when = el("button", { type: "button", className: "link when", title: "Look at this moment", on: { click: () => this.page.lookAt(grant.told_at) } });
      const [victim, asker] = [storyLink(grant.id), storyLink(grant.asker)];
      return el("li", {}, when, " ", victim, " of ", named(grant.requester), " stops for ", asker, " of ", named(grant.asker_requester), el("span"));
    };
    reconcile(this.list, told.slice(0, LIST_MAX), (grant) => `${grant.id} ${grant.k}`, make, (node, grant) => {
      setText(node.firstChild, clock(grant.told_at));
      setText(node.lastChild, `: ${reasonWords(grant.reason)}${grant.ended_at === null ? "" : `; ${endWords(grant.how, grant.why)} after ${duration(grant.ended_at - grant.told_at)}`}`);
    });
  }
}

function grantWords(grant) {
  const end = grant.ended_at === null ? "still holds" : `until ${clock(grant.ended_at)}: ${endWords(grant.how, grant.why)}`;
  return `${grant.id} of ${grant.requester}: ${amounts(grant.amounts)}, from ${clock(grant.granted_at)}, ${end}`;
}

function preemptionWords(pool, grant) {
  return `${clock(grant.told_at)}, ${pool}: ${grant.id} of ${grant.requester} stops for ${grant.asker} of ${grant.asker_requester}: ${reasonWords(grant.reason)}`;
}
