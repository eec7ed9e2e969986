/**
 * The picture of a tree: what is drawn for each node or pill, and the lines between them.
 *
 * Invariant: a node keeps its element as long as it is in the picture, and only what changed is touched.
 */

import { h, svg } from "./dom.js";
import { firstWords, roleOf, ROLES } from "./words.js";

export const MARGIN = 22;
const [COLUMN, ROW] = [30, 38];
const SHAPES = {
  user: "M-6.5-3.5a3 3 0 0 1 3-3h7a3 3 0 0 1 3 3v7a3 3 0 0 1-3 3h-7a3 3 0 0 1-3-3z",
  assistant: "M-7 0a7 7 0 1 0 14 0a7 7 0 1 0-14 0z",
  system: "M0-8L8 0L0 8L-8 0z",
  tool: "M-4-7h8l4 7l-4 7h-8l-4-7z",
};
const STAR = "M0-4.6l1.4 2.9 3.2.4-2.3 2.2.6 3.2L0 2.6l-2.9 1.5.6-3.2-2.3-2.2 3.2-.4z";

export class TreePicture {
  #marks = new Map(); // key of an item -> what is drawn for it
  #size = { width: 0, height: 0 };

  constructor() {
    this.edges = svg("g", { class: "cp-map-edges" });
    this.nodes = svg("g", { class: "cp-map-nodes", role: "presentation" });
    this.element = svg(
      "svg",
      { class: "cp-map-picture", role: "tree", "aria-label": "Messages and branches" },
      this.edges,
      this.nodes,
    );
  }

  /** Size of the picture at scale 1. */
  get size() {
    return this.#size;
  }

  has(key) {
    return this.#marks.has(key);
  }

  elementOf(key) {
    return this.#marks.get(key)?.element ?? null;
  }

  itemOf(key) {
    return this.#marks.get(key)?.item ?? null;
  }

  /** Draw a tree that has been laid out. */
  draw(tree, { items, width, height }, highlights) {
    const path = new Set(tree.activePath().map((node) => node.id));
    const leafId = tree.activeLeaf?.id ?? null;
    const keys = new Set();
    for (const item of items) {
      keys.add(item.key);
      this.#drawItem(tree, item, path.has(item.ids[0]), leafId, highlights);
    }
    for (const [key, mark] of this.#marks) if (!keys.has(key)) this.#erase(key, mark);
    this.#size = { width: (width - 1) * COLUMN + 2 * MARGIN, height: (height - 1) * ROW + 2 * MARGIN };
  }

  clear() {
    for (const [key, mark] of this.#marks) this.#erase(key, mark);
  }

  setScale(scale) {
    const { width, height } = this.#size;
    this.element.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.element.setAttribute("width", String(width * scale));
    this.element.setAttribute("height", String(height * scale));
  }

  #erase(key, mark) {
    mark.element.remove();
    mark.edge.remove();
    this.#marks.delete(key);
  }

  #drawItem(tree, item, isActive, leafId, highlights) {
    const mark = this.#marks.get(item.key) ?? this.#make(tree, item);
    const [x, y] = placeOf(item);
    mark.item = item;
    set(mark, "transform", `translate(${x} ${y})`);
    setEdge(mark, item, x, y, isActive);
    const node = tree.nodes.get(item.ids.at(-1));
    const states = {
      "is-active": isActive,
      "is-leaf": node.id === leafId,
      "is-hit": item.ids.some((id) => highlights.has(id)),
      "is-kept": isKept(node),
      "is-writing": tree.isWriting(node.id),
      "is-bad": node.status === "error",
      "is-partial": node.status === "interrupted" || node.status === "aborted",
    };
    const classes = [
      "cp-map-item",
      `is-${item.isPill ? "pill" : node.role}`,
      ...Object.keys(states).filter((name) => states[name]),
    ];
    set(mark, "class", classes.join(" "));
    set(mark, "aria-selected", String(isActive));
    set(mark, "aria-level", String(item.y + 1));
    this.#name(tree, mark, item, node);
  }

  /** Say what it is, in words that are made again only if something about it changed. */
  #name(tree, mark, item, node) {
    const place = item.parent ? item.parent.children.indexOf(item) : 0;
    const facts = [item.ids.length, place, item.parent?.children.length ?? 1, tree.isWriting(node.id)];
    if (mark.node === node && String(facts) === mark.facts) return;
    [mark.node, mark.facts] = [node, String(facts)];
    set(mark, "aria-label", item.isPill ? pillName(item) : nameOf(tree, node, place, facts[2]));
    if (item.isPill) mark.label.textContent = `+${item.ids.length}`;
  }

  #make(tree, item) {
    const element = svg("g", { "data-key": item.key, role: "treeitem", tabindex: "-1" });
    const label = item.isPill && svg("text", { class: "cp-map-count", "text-anchor": "middle", dy: "0.36em" });
    if (item.isPill) {
      element.setAttribute("aria-expanded", "false");
      element.append(svg("rect", { class: "cp-map-shape", x: -17, y: -9, width: 34, height: 18, rx: 9 }), label);
    } else {
      const role = tree.nodes.get(item.ids[0]).role;
      element.append(svg("circle", { class: "cp-map-area", r: 15 }), svg("circle", { class: "cp-map-halo", r: 12 }));
      element.append(svg("path", { class: "cp-map-shape", d: SHAPES[role] ?? SHAPES.tool }));
      element.append(svg("path", { class: "cp-map-star", d: STAR, transform: "translate(10 -10) scale(1.3)" }));
    }
    const mark = {
      element,
      label,
      edge: svg("path", { class: "cp-map-edge" }),
      shown: {},
      line: null,
      node: null,
      facts: null,
      item,
    };
    this.nodes.append(element);
    this.edges.append(mark.edge);
    this.#marks.set(item.key, mark);
    return mark;
  }
}

/** Return the middle of an item, in the picture at scale 1. */
export function placeOf(item) {
  return [MARGIN + item.x * COLUMN, MARGIN + item.y * ROW];
}

export function isKept(node) {
  return Boolean(node?.is_kept);
}

function nameOf(tree, node, place, numSiblings) {
  const version = numSiblings > 1 ? `, ${place + 1} of ${numSiblings}` : "";
  const state = tree.isWriting(node.id) ? ", being written" : node.status === "complete" ? "" : `, ${node.status}`;
  return `${roleOf(node)}${version}${isKept(node) ? ", kept" : ""}${state}: ${firstWords(node.text, 60) || "no text yet"}`;
}

export function pillName(item) {
  return `${item.ids.length} messages in a row`;
}

/** Set an attribute, if it changed. */
function set(mark, name, value) {
  if (mark.shown[name] === value) return;
  mark.shown[name] = value;
  mark.element.setAttribute(name, value);
}

function setEdge(mark, { parent }, x, y, isActive) {
  const [px, py] = parent ? placeOf(parent) : [x, y];
  const middle = (py + y) / 2;
  const line = `${parent ? `M${px} ${py}C${px} ${middle} ${x} ${middle} ${x} ${y}` : ""} ${isActive}`;
  if (mark.line === line) return;
  mark.line = line;
  mark.edge.setAttribute("d", line.slice(0, line.lastIndexOf(" ")));
  mark.edge.classList.toggle("is-active", isActive);
}

/** Return an entry of the legend. */
export function keyEntry(role) {
  const shape = svg(
    "svg",
    { viewBox: "-10 -10 20 20", class: `cp-map-key-shape is-${role}` },
    svg("path", { class: "cp-map-shape", d: SHAPES[role] }),
  );
  return h("span", {}, shape, ROLES[role].toLowerCase());
}
