// A long list of which only the rows in sight are elements: a queue of thousands costs as much as one of ten.

import { el, reconcile, setAttribute, setHidden } from "./dom.js";

const BEYOND = 6; // rows above and below those in sight
const ROW_PX = 28; // until one was seen

export class Rows {
  #items = [];
  #rowPx = 0;
  #isDue = false;
  // as the browser last said: to ask for them while the page changes would make it lay everything out at once
  #height = 300;
  #top = 0;

  /** `columns`: [text, class]; `keyOf`, `make` and `update` as of `reconcile`. */
  constructor(title, columns, { keyOf, make, update }) {
    Object.assign(this, { keyOf, make, update });
    const head = columns.map(([text, className]) => el("th", { scope: "col", text, className: className ?? "" }));
    this.body = el("tbody");
    this.table = el("table", {}, el("thead", {}, el("tr", { "aria-rowindex": "1" }, ...head)), this.body);
    this.inner = el("div", {}, this.table);
    this.node = el("div", { className: "scroll", tabindex: "0", role: "region", "aria-label": title }, this.inner);
    this.node.addEventListener("scroll", () => {
      this.#top = this.node.scrollTop;
      this.#soon();
    });
    new ResizeObserver(([{ contentRect }]) => {
      this.#height = contentRect.height;
      this.#rowPx = this.body.firstChild?.offsetHeight ?? 0;
      this.#soon();
    }).observe(this.node);
  }

  /** These are the rows from now on. */
  show(items) {
    this.#items = items;
    this.#draw();
  }

  #soon() {
    if (this.#isDue) return;
    this.#isDue = true;
    requestAnimationFrame(() => {
      this.#isDue = false;
      this.#draw();
    });
  }

  #draw() {
    const count = this.#items.length;
    const rowPx = this.#rowPx || ROW_PX;
    const seen = Math.ceil(this.#height / rowPx);
    const top = Math.min(this.#top, count * rowPx);
    const start = Math.max(0, Math.min(Math.floor(top / rowPx) - BEYOND, count - seen - BEYOND));
    const shown = this.#items.slice(start, start + seen + 2 * BEYOND);
    const hadFocus = this.body.contains(document.activeElement);
    reconcile(this.body, shown, this.keyOf, this.make, this.update);
    if (hadFocus && !this.body.contains(document.activeElement)) this.node.focus({ preventScroll: true });
    shown.forEach((_, index) => setAttribute(this.body.children[index], "aria-rowindex", start + index + 2));
    setAttribute(this.table, "aria-rowcount", count + 1);
    setHidden(this.node, count === 0);
    setStyle(this.body, "counterReset", `place ${start}`);
    setStyle(this.table, "marginTop", `${start * rowPx}px`);
    setStyle(this.inner, "height", count > shown.length ? `${(count + 1) * rowPx}px` : "");
  }
}

function setStyle(node, name, value) {
  if (node.style[name] !== value) node.style[name] = value;
}
