// Who held what when, in one pool: a chart of its capacity over time, and the list of preemptions.

import { ask } from "./stream.js";
import { el, named, reconcile, setAttribute, setHidden, setText, storyLink, svg } from "./dom.js";
import { Layout, ticks } from "./model.js";
import { amounts, clock, duration, endWords, number, reasonWords } from "./words.js";

const HEIGHT = 132;
const AXIS = 18;
const LIST_MAX = 50;

const nameOf = (grant) => `${grant.id} ${grant.k}`;

export class Timeline {
  #grants = new Map();
  #rows = 0; // of the pool's log, as far as it is in #grants
  #from = null; // earliest moment that was asked for
  #asking = false;
  #again = false;
  #cut = false;
  #layout = null;
  #isNew = true; // the grants or their places are others than those drawn
  #drawn = null; // [total, px per second] as drawn
  #origin = 0; // the moment at x = 0 of the boxes, which are drawn in seconds and moved as a whole
  #width = 0; // as the browser last said
  #toldBefore = null; // preemptions that were there when the page came; later ones are said aloud

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
      const grant = event.target.grant;
      if (grant !== undefined) this.page.show(grant.id);
    });
    this.chart.addEventListener("pointerover", ({ target }) => {
      if (target.grant === undefined) return;
      if (target.firstChild === null) target.append(svg("title"));
      setText(target.firstChild, target.classList.contains("mark") ? preemptionWords(this.name, target.grant) : grantWords(target.grant));
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
      if (wider) {
        this.#grants.clear();
        this.#layout = null;
      }
      this.#rows = said.rows;
      this.#cut = said.cut;
      for (const grant of said.grants) this.#grants.set(nameOf(grant), grant);
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
    for (const [name, grant] of this.#grants) {
      if (grant.ended_at === null || grant.ended_at >= from) continue;
      this.#grants.delete(name);
      this.#layout?.forget(name);
    }
    this.#isNew = true;
  }

  #sayNew() {
    const told = this.grants.filter((grant) => grant.told_at !== null);
    const before = this.#toldBefore;
    this.#toldBefore = new Set(told.map(nameOf));
    if (before === null) return;
    for (const grant of told) if (!before.has(nameOf(grant))) this.page.say(preemptionWords(this.name, grant));
  }

  /** Draws the window as it is now. */
  draw() {
    const width = this.#width;
    const key = this.page.keyOf(this.name);
    if (!width || key === null || key === undefined) return;
    const { from, to } = this.page.window();
    const capacity = this.page.capacityOf(this.name, key);
    if (this.#layout?.key !== key || this.#layout.capacity !== capacity) {
      this.#layout = new Layout(key, capacity);
      this.#isNew = true;
    }
    if (this.#isNew) this.#layout.add(this.#grants);
    const total = Math.max(capacity, this.#layout.high, 1);
    const scale = width / (to - from || 1);
    const view = { from, to, width, total, scale, x: (at) => (at - from) * scale, y: (amount) => AXIS + (1 - amount / total) * HEIGHT };
    setAttribute(this.chart, "viewBox", `0 0 ${width} ${HEIGHT + 2 * AXIS}`);
    setAttribute(this.chart, "height", HEIGHT + 2 * AXIS);
    this.#drawAxis(view);
    this.#drawBoxes(view);
    this.#drawMarks(view);
    this.#drawLines(view, key);
    const held = this.#grants.size === 1 ? "1 grant" : `${number(this.#grants.size)} grants`;
    setAttribute(this.chart, "aria-label", `${this.name}: ${held} from ${clock(from, true)} to ${clock(to, true)}; the tables have the same`);
    setHidden(this.note, !this.#cut);
    if (this.#cut) setText(this.note, "Older grants of this window are not drawn; the log has them.");
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
      setAttribute(text, "x", Math.min(Math.max(view.x(at), 32), view.width - 32).toFixed(1));
      setAttribute(text, "y", HEIGHT + 2 * AXIS - 3);
      setText(text, view.to - view.from > 86400 ? clock(at, true).slice(0, -3) : clock(at).slice(0, view.to - view.from > 600 ? 5 : 8));
    });
  }

  /** Boxes lie in seconds, so that time moves them all at once; only what is new, or has no end yet, is touched. */
  #drawBoxes(view) {
    const isOther = this.#drawn === null || this.#drawn[0] !== view.total || view.scale < this.#drawn[1] / 2 || view.scale > this.#drawn[1] * 2;
    if (this.#isNew || isOther) {
      if (isOther) this.#origin = view.from;
      this.#drawn = [view.total, isOther ? view.scale : this.#drawn[1]];
      this.#reconcileBoxes(view, isOther);
      this.#drawList(view);
      this.#isNew = false;
    } else {
      for (const node of this.boxes.children) if (node.box.to === null) this.#stretch(node, view);
    }
    setAttribute(this.boxes, "transform", `translate(${((this.#origin - view.from) * view.scale).toFixed(2)} 0) scale(${view.scale} 1)`);
  }

  #reconcileBoxes(view, isOther) {
    const boxes = [];
    for (const [name, grant] of this.#grants) {
      const told = grant.told_at;
      for (const [index, [low, high]] of this.#layout.of(name).entries()) {
        boxes.push({ name: `${name} ${index}`, grant, low, high, from: grant.granted_at, to: told ?? grant.ended_at, kind: "ran" });
        if (told !== null) boxes.push({ name: `${name} ${index} told`, grant, low, high, from: told, to: grant.ended_at, kind: "told" });
      }
    }
    const make = ({ grant, kind }) => svg("rect", { class: `${kind} fill-${this.page.colours.of(grant.requester)}` });
    reconcile(this.boxes, boxes, (box) => box.name, make, (node, box) => {
      const before = node.box;
      const isSame = before !== undefined && before.grant === box.grant && before.low === box.low && before.high === box.high;
      node.box = box;
      node.grant = box.grant;
      if (isSame && !isOther && box.to !== null) return;
      setAttribute(node, "x", (box.from - this.#origin).toFixed(3));
      setAttribute(node, "y", (view.y(box.high) + 0.5).toFixed(1));
      setAttribute(node, "height", Math.max(view.y(box.low) - view.y(box.high) - 1, 1).toFixed(1));
      this.#stretch(node, view);
    });
  }

  /** At least a pixel, or it would not be seen. */
  #stretch(node, view) {
    const until = node.box.to ?? view.to;
    setAttribute(node, "width", Math.max(until - node.box.from, 1 / view.scale).toFixed(3));
  }

  #told(view) {
    return this.grants.filter((grant) => grant.told_at !== null && grant.told_at >= view.from && grant.told_at <= view.to);
  }

  #drawMarks(view) {
    const marks = this.#told(view).map((grant) => ({ grant, spans: this.#layout.of(nameOf(grant)) })).filter(({ spans }) => spans.length);
    const make = () => svg("path", { class: "mark", d: "M0 0l-5 -8h10z" });
    reconcile(this.marks, marks, ({ grant }) => nameOf(grant), make, (node, { grant, spans }) => {
      node.grant = grant;
      setAttribute(node, "transform", `translate(${view.x(grant.told_at).toFixed(1)} ${view.y(spans[spans.length - 1][1]).toFixed(1)})`);
    });
  }

  #drawLines(view, key) {
    const capacity = view.y(this.page.capacityOf(this.name, key)).toFixed(1);
    for (const [name, value] of [["x1", 0], ["x2", view.width], ["y1", capacity], ["y2", capacity]]) setAttribute(this.capacity, name, value);
    const x = Math.min(view.x(this.page.moment()), view.width - 1).toFixed(1);
    for (const [name, value] of [["x1", x], ["x2", x], ["y1", AXIS - 6], ["y2", AXIS + HEIGHT + 4]]) setAttribute(this.cursor, name, value);
  }

  #drawList(view) {
    const told = this.#told(view).sort((a, b) => b.told_at - a.told_at);
    setHidden(this.details, told.length === 0);
    setText(this.summary, `Preemptions in this window: ${number(told.length)}`);
    const make = (grant) => {
      const when = el("button", { type: "button", className: "link when", title: "Look at this moment", on: { click: () => this.page.lookAt(grant.told_at) } });
      const forWhom = grant.asker ? [" for ", storyLink(grant.asker), " of ", named(grant.asker_requester)] : [];
      return el("li", {}, when, " ", storyLink(grant.id), " of ", named(grant.requester), " stops", ...forWhom, el("span"));
    };
    reconcile(this.list, told.slice(0, LIST_MAX), nameOf, make, (node, grant) => {
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
  // what an operator calls back stops for nobody
  const forWhom = grant.asker ? ` for ${grant.asker} of ${grant.asker_requester}` : "";
  return `${clock(grant.told_at)}, ${pool}: ${grant.id} of ${grant.requester} stops${forWhom}: ${reasonWords(grant.reason)}`;
}
