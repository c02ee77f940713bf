// Elements from plain data. All text goes in as text: nothing that a user named is ever read as HTML.

/** An element; `props` are attributes, but for `on` (listeners), `text`, `className` and `hidden`. */
export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "on") for (const [kind, listener] of Object.entries(value)) made.addEventListener(kind, listener);
    else if (name === "text") made.textContent = value;
    else if (name === "className") made.className = value;
    else if (name === "hidden") made.hidden = value;
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Likewise for SVG. */
export function svg(tag, props = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) made.setAttribute(name, value);
  return made;
}

/** A name that a user gave: kept apart from the direction of the text round it. */
export function named(text, className = "") {
  return el("bdi", { text, className });
}

/** A link to a request's story. */
export function storyLink(id) {
  return el("a", { href: `#request=${encodeURIComponent(id)}`, title: id }, named(id));
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

/**
 * The children of `parent` become those of `items`, in their order: kept by key where they were there before.
 * `make(item)` gives a new node, `update(node, item)` brings one up to date.
 */
export function reconcile(parent, items, keyOf, make, update) {
  const known = parent.known ?? (parent.known = new Map());
  const wanted = new Map(items.map((item) => [keyOf(item), item]));
  // what is not wanted any more goes first, so that a queue that moves up moves no other node
  for (const [key, node] of known) {
    if (!wanted.has(key)) {
      node.remove();
      known.delete(key);
    }
  }
  let place = parent.firstChild;
  for (const [key, item] of wanted) {
    let node = known.get(key);
    if (node === undefined) {
      node = make(item);
      known.set(key, node);
    }
    update(node, item);
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
  }
}
