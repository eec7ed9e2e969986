/**
 * The map of a conversation: its tree as a picture to walk in.
 *
 * Invariant: it is drawn at most once per frame, and only if the tree or a run changed; text that arrives moves nothing. What
 * is found, kept or being written is never hidden in a pill.
 */

import { h, iconButton, memory, perFrame, svg } from "./dom.js";
import { layoutTree } from "./tree_layout.js";
import { isKept, keyEntry, MARGIN, pillName, placeOf, TreePicture } from "./tree_picture.js";
import { firstWords, plural, roleOf } from "./words.js";

const [SMALLEST, LARGEST, STEP] = [0.15, 2, 1.25];
const TIP_LETTERS = 220;
const GLYPHS = {
  less: "M5 12h14",
  fit: "M4 9V4h5M15 4h5v5M20 15v5h-5M9 20H4v-5",
  fold: "M12 3v6M9 6l3 3 3-3M12 21v-6M9 18l3-3 3 3M5 12h14",
};

/** Fill a place with the map of the conversation that is open. */
export function mountTreeMap(host, app) {
  return new TreeMap(host, app);
}

class TreeMap {
  #itemOf = new Map(); // node id -> its item
  #unfolded = new Set(); // nodes that people took out of a pill
  #followed = null;
  #cursor = null; // key of the item that Tab reaches
  #tipId = null;
  #leafId = null;

  constructor(host, app) {
    this.app = app;
    this.scale = memory.get("tree.scale", 1);
    this.draw = perFrame(() => this.#draw());
    this.drawTip = perFrame(() => this.#showTip());
    this.#build(host);
    app.addEventListener("open", () => this.#opened());
    this.#opened();
  }

  #build(host) {
    this.picture = new TreePicture();
    this.scroller = h("div", { class: "cp-map-scroll" }, this.picture.element);
    this.tip = h("div", { class: "cp-map-tip", role: "tooltip", hidden: true });
    this.facts = h("p", { class: "cp-map-facts", role: "status" });
    this.fold = glyphButton("fold", "Collapse long chains again", () => this.#foldAgain());
    const tools = h(
      "div",
      { class: "cp-map-tools", role: "group", "aria-label": "Zoom" },
      this.fold,
      glyphButton("less", "Zoom out", () => this.#zoom(this.scale / STEP)),
      iconButton("plus", "Zoom in", () => this.#zoom(this.scale * STEP), { class: "cp-panel-button" }),
      glyphButton("fit", "Fit the whole tree", () => this.#fit()),
    );
    const key = h(
      "div",
      { class: "cp-map-key", "aria-hidden": "true" },
      ...["user", "assistant", "system"].map(keyEntry),
      h("span", {}, h("i", { class: "cp-map-key-star" }, "★"), "kept"),
    );
    this.panel = h(
      "div",
      { class: "cp-panel cp-map" },
      h("div", { class: "cp-panel-head" }, this.facts, tools),
      this.scroller,
      key,
      this.tip,
    );
    host.replaceChildren(this.panel);
    this.#listen();
  }

  #listen() {
    const { scroller } = this;
    const { element } = this.picture;
    const keyAt = (event) => event.target.closest(".cp-map-item")?.dataset.key;
    element.addEventListener("click", (event) => this.#press(keyAt(event)));
    element.addEventListener("keydown", (event) => this.#key(event));
    element.addEventListener("pointerover", (event) => event.pointerType !== "touch" && this.#point(keyAt(event)));
    element.addEventListener("pointerleave", () => this.#point(null));
    element.addEventListener("focusin", (event) => this.#focused(keyAt(event)));
    element.addEventListener("focusout", () => this.#point(null));
    scroller.addEventListener("scroll", () => this.tip.hidden || this.drawTip(), { passive: true });
    scroller.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    scroller.addEventListener("pointerdown", (event) => this.#grab(event));
  }

  #opened() {
    const { conversation } = this.app;
    if (conversation !== this.#followed) {
      this.#followed = conversation;
      this.#unfolded.clear();
      this.#leafId = this.#cursor = null;
      const changed = () => conversation === this.#followed && this.draw();
      for (const type of ["tree", "run"]) conversation?.addEventListener(type, changed);
      conversation?.addEventListener("text", (event) => event.detail.nodeId === this.#tipId && this.drawTip());
    }
    this.draw();
  }

  // -- drawing -------------------------------------------------------------------------------------------------------

  #draw() {
    const tree = this.app.conversation;
    this.panel.classList.toggle("is-empty", !tree?.nodes.size);
    if (!tree?.nodes.size) return this.#drawNothing();
    const layout = layoutTree(tree, (id) => this.#isShown(id));
    this.#itemOf = new Map(layout.items.flatMap((item) => item.ids.map((id) => [id, item])));
    this.picture.draw(tree, layout, this.app.highlights);
    this.picture.setScale(this.scale);
    this.#drawFacts(tree);
    this.fold.hidden = !this.#unfolded.size;
    this.#keepCursor(tree);
    this.#follow(tree);
  }

  #drawNothing() {
    this.picture.clear();
    this.#itemOf.clear();
    this.facts.textContent = "The branches of the conversation will grow here.";
    this.fold.hidden = true;
    this.tip.hidden = true;
  }

  #isShown(id) {
    const { conversation, highlights } = this.app;
    return this.#unfolded.has(id) || highlights.has(id) || isKept(conversation.nodes.get(id)) || conversation.isWriting(id);
  }

  #drawFacts(tree) {
    const branches = tree.leaves().length;
    this.facts.textContent = `${plural(tree.nodes.size, "message")}, ${plural(branches, "branch", "branches")}`;
  }

  // -- view ----------------------------------------------------------------------------------------------------------

  /** When another leaf is shown, bring it into view. */
  #follow(tree) {
    const leafId = tree.activeLeaf?.id ?? null;
    if (leafId === this.#leafId) return;
    this.#leafId = leafId;
    this.#reveal(this.#itemOf.get(leafId));
  }

  #reveal(item) {
    if (!item) return;
    const { scroller, scale } = this;
    const [x, y] = placeOf(item).map((at) => at * scale);
    const edge = 2 * MARGIN * scale;
    const into = (at, from, size) => (at - edge < from ? at - edge : at + edge > from + size ? at + edge - size : from);
    const left = into(x + this.#offset, scroller.scrollLeft, scroller.clientWidth);
    scroller.scrollTo(left, into(y, scroller.scrollTop, scroller.clientHeight));
  }

  /** How far a picture that is narrower than its place stands from the left. */
  get #offset() {
    return Math.max(0, (this.scroller.clientWidth - this.picture.size.width * this.scale) / 2);
  }

  #zoom(scale, around = null) {
    const { scroller } = this;
    const before = this.scale;
    const [px, py] = around ?? [scroller.clientWidth / 2, scroller.clientHeight / 2];
    const [x, y] = [(scroller.scrollLeft + px - this.#offset) / before, (scroller.scrollTop + py) / before];
    this.scale = Math.min(LARGEST, Math.max(SMALLEST, scale));
    memory.set("tree.scale", this.scale);
    this.picture.setScale(this.scale);
    scroller.scrollTo(x * this.scale + this.#offset - px, y * this.scale - py);
    this.drawTip();
  }

  #fit() {
    const { width, height } = this.picture.size;
    if (!width) return;
    this.#zoom(Math.min(1.4, this.scroller.clientWidth / width, this.scroller.clientHeight / height));
  }

  #wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const box = this.scroller.getBoundingClientRect();
    this.#zoom(this.scale * Math.exp(-event.deltaY / 300), [event.clientX - box.left, event.clientY - box.top]);
  }

  /** Drag the picture with the mouse; a finger scrolls by itself. */
  #grab(event) {
    if (event.pointerType !== "mouse" || event.button !== 0 || event.target.closest(".cp-map-item")) return;
    const { scroller } = this;
    const from = [event.clientX + scroller.scrollLeft, event.clientY + scroller.scrollTop];
    const move = (moved) => scroller.scrollTo(from[0] - moved.clientX, from[1] - moved.clientY);
    const end = () => {
      scroller.removeEventListener("pointermove", move);
      scroller.classList.remove("is-grabbed");
    };
    scroller.setPointerCapture(event.pointerId);
    scroller.classList.add("is-grabbed");
    scroller.addEventListener("pointermove", move);
    scroller.addEventListener("lostpointercapture", end, { once: true });
  }

  #foldAgain() {
    this.#unfolded.clear();
    this.draw();
  }

  // -- walking -------------------------------------------------------------------------------------------------------

  #press(key) {
    const item = this.picture.itemOf(key);
    if (!item) return;
    if (!item.isPill) return this.app.select(item.ids[0]);
    for (const id of item.ids) this.#unfolded.add(id);
    this.#cursor = item.ids[0];
    this.#draw();
    this.picture.elementOf(item.ids[0])?.focus();
  }

  #key(event) {
    const item = this.picture.itemOf(event.target.dataset.key);
    if (!item || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter" || event.key === " ") this.#press(item.key);
    else if (event.key === "Escape" && !this.tip.hidden) this.#point(null);
    else if (event.key in MOVES) this.#step(MOVES[event.key](this, item));
    else if (event.key === "+") this.#zoom(this.scale * STEP);
    else if (event.key === "-") this.#zoom(this.scale / STEP);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #step(item) {
    if (item) this.picture.elementOf(item.key).focus({ preventScroll: true });
  }

  /** The item below that shows the chosen child. */
  chosenBelow(item) {
    return this.#itemOf.get(this.app.conversation.chosen(item.ids.at(-1))) ?? null;
  }

  siblingOf(item, step) {
    const roots = () => this.app.conversation.childrenOf(null).map((id) => this.#itemOf.get(id));
    const siblings = item.parent ? item.parent.children : roots();
    return siblings[siblings.indexOf(item) + step] ?? null;
  }

  get firstItem() {
    return this.#itemOf.get(this.app.conversation.chosen(null)) ?? null;
  }

  get leafItem() {
    return this.#itemOf.get(this.app.conversation.activeLeaf?.id) ?? null;
  }

  #focused(key) {
    const element = this.picture.elementOf(key);
    if (!element) return;
    this.#setCursor(key);
    this.#reveal(this.picture.itemOf(key));
    if (element.matches(":focus-visible")) this.#point(key);
  }

  #setCursor(key) {
    this.picture.elementOf(this.#cursor)?.setAttribute("tabindex", "-1");
    this.#cursor = key;
    this.picture.elementOf(key)?.setAttribute("tabindex", "0");
  }

  #keepCursor(tree) {
    if (this.picture.has(this.#cursor)) return this.#setCursor(this.#cursor);
    const id = this.#cursor?.replace(/^\+/, "");
    this.#setCursor((this.#itemOf.get(id) ?? this.#itemOf.get(tree.activeLeaf?.id))?.key ?? null);
  }

  // -- preview -------------------------------------------------------------------------------------------------------

  #point(key) {
    this.#tipId = this.picture.itemOf(key)?.ids[0] ?? null;
    this.drawTip();
  }

  #showTip() {
    const tree = this.app.conversation;
    const item = this.#tipId && this.#itemOf.get(this.#tipId);
    this.tip.hidden = !item || !tree?.nodes.has(this.#tipId);
    if (this.tip.hidden) return;
    if (item.isPill) this.#fillTip(pillName(item), firstWords(tree.textOf(item.ids[0]), TIP_LETTERS));
    else {
      const node = tree.nodes.get(this.#tipId);
      const sample = tree.live.get(node.id);
      const tokens = sample && !sample.done ? sample.numTokens : node.num_tokens;
      const facts = [
        roleOf(node),
        tokens && plural(tokens, "token"),
        isKept(node) && "kept",
        tree.isWriting(node.id) && "being written",
        node.status === "error" && "failed",
      ];
      this.#fillTip(facts.filter(Boolean).join(" · "), firstWords(tree.textOf(node.id), TIP_LETTERS) || "No text yet");
    }
    this.#placeTip(item);
  }

  #fillTip(head, text) {
    this.tip.replaceChildren(
      h("div", { class: "cp-map-tip-head" }, head),
      h("div", { class: "cp-map-tip-text", dir: "auto" }, text),
    );
  }

  #placeTip(item) {
    const at = this.picture.elementOf(item.key).getBoundingClientRect();
    const box = this.panel.getBoundingClientRect();
    const [width, height] = [this.tip.offsetWidth, this.tip.offsetHeight];
    const x = Math.min(Math.max(8, (at.left + at.right) / 2 - box.left - width / 2), box.width - width - 8);
    const below = at.bottom - box.top + 6;
    const y = below + height < box.height - 4 ? below : at.top - box.top - height - 6;
    this.tip.style.transform = `translate(${Math.round(x)}px, ${Math.round(y)}px)`;
  }
}

const MOVES = {
  ArrowUp: (map, item) => item.parent,
  ArrowDown: (map, item) => map.chosenBelow(item),
  ArrowLeft: (map, item) => map.siblingOf(item, -1),
  ArrowRight: (map, item) => map.siblingOf(item, 1),
  Home: (map) => map.firstItem,
  End: (map) => map.leafItem,
};

function glyphButton(name, label, onclick) {
  const glyph = svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }, svg("path", { d: GLYPHS[name] }));
  return h("button", { type: "button", class: "cp-panel-button", title: label, "aria-label": label, onclick }, glyph);
}
