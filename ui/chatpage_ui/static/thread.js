/**
 * The path that is shown, message below message, with columns where versions are compared.
 *
 * Invariants: the views are those of the active path, reused as long as their node is on it. The view follows the end of a growing
 * text only while the reader is at the end; whoever scrolled up stays where they are.
 *
 *     [ group of 8 messages ][ group ] ... [ group ][ columns ]
 *
 * The browser skips what is far from the view group by group: to ask this of every message, and to pass all of them by when one
 * grows, would cost for each of them in every frame.
 */

import { ColumnsView } from "./columns.js";
import { h, iconButton, perFrame } from "./dom.js";
import { handleCopyButtons, MessageView } from "./message.js";

const NEAR_END = 48; // pixels
const FRAME_CHARACTERS = 6_000;
const GROUP_SIZE = 8;
const TELLS = "ContentVisibilityAutoStateChangeEvent" in window; // else every message is rendered at once

export class Thread {
  #views = new Map(); // node id -> MessageView
  #groups = []; // {element, isSeen}
  #columns = null;
  #added = new Map(); // node id -> text that came since the last frame; null: replaced
  #isAtEnd = true;
  #isAtColumns = false; // nobody has moved since they were shown from their top
  #isJumping = false; // smoothly, to the end
  #top = 0; // where the view was when it was last scrolled

  constructor(app) {
    this.app = app;
    this.list = h("div", { class: "cp-messages", role: "log", "aria-label": "Conversation", "aria-live": "off" });
    this.empty = h("div", { class: "cp-empty", hidden: true });
    this.latest = iconButton("down", "Jump to latest", () => this.toEnd(true), { class: "cp-latest", hidden: true, text: "Jump to latest" });
    this.scroller = h("div", { class: "cp-scroll", tabindex: "-1", onscroll: () => this.#scrolled(), onscrollend: () => this.#jumped() }, this.list, this.empty);
    this.element = h("section", { class: "cp-thread", "aria-label": "Messages" }, this.scroller, this.latest);
    this.list.addEventListener("contentvisibilityautostatechange", (event) => this.#seen(event));
    this.flush = perFrame(() => this.#flush());
    this.refresh = perFrame(() => this.#refresh());
    new ResizeObserver(() => this.#resized()).observe(this.list);
    for (const name of ["wheel", "pointerdown", "keydown"]) {
      this.scroller.addEventListener(name, () => (this.#isAtColumns = false), { passive: true });
    }
    handleCopyButtons(this.element, app);
    app.addEventListener("open", () => this.#opened());
    app.addEventListener("compare", () => this.#compared());
  }

  /** Return the view of a node, if it is shown. */
  viewOf(nodeId) {
    return this.#views.get(nodeId) ?? this.#columns?.viewOf(nodeId) ?? null;
  }

  get views() {
    return [...this.#views.values()];
  }

  get columns() {
    return this.#columns;
  }

  light(nodeIds) {
    const lit = new Set(nodeIds);
    for (const view of [...this.views, ...(this.#columns?.views ?? [])]) view.light(lit.has(view.nodeId));
  }

  toEnd(isAsked = false) {
    this.#isAtEnd = true;
    this.#offerLatest(false);
    const behavior = isAsked && !matchMedia("(prefers-reduced-motion: reduce)").matches ? "smooth" : "instant";
    this.#isJumping = behavior === "smooth";
    this.scroller.scrollTo({ top: this.scroller.scrollHeight, behavior });
  }

  /** Bring one of the versions that stand side by side into view. */
  showVersion(nodeId) {
    this.#isAtColumns = false;
    this.#columns?.show(nodeId);
  }

  /** Bring a message into view. */
  show(nodeId) {
    this.#refresh();
    const view = this.viewOf(nodeId);
    if (!view) return;
    this.#isAtEnd = false;
    view.element.scrollIntoView({ block: "start", behavior: "instant" });
    view.element.focus({ preventScroll: true });
    this.#scrolled();
  }

  #opened() {
    for (const view of this.#views.values()) view.destroy();
    this.#views.clear();
    this.#columns?.destroy();
    this.#columns = null;
    this.#added.clear();
    this.#isAtEnd = true;
    this.#top = 0;
    const { conversation } = this.app;
    if (conversation) {
      conversation.addEventListener("tree", () => this.refresh());
      conversation.addEventListener("run", () => this.refresh());
      conversation.addEventListener("text", ({ detail }) => this.#text(detail));
    }
    this.refresh();
  }

  /** Show the columns from their top, or the end of the conversation again. */
  #compared() {
    this.#refresh();
    this.#isAtColumns = this.#columns !== null;
    if (!this.#columns) return;
    this.#isAtEnd = false;
    this.#resized();
    this.#scrolled();
  }

  /** Stay at the end, or at the top of the columns, whose height is known only when they have been laid out. */
  #resized() {
    if (this.#columns && this.#isAtColumns) this.#columns.element.scrollIntoView({ block: "start", behavior: "instant" });
    if (this.#isAtEnd && !this.#columns) this.toEnd();
  }

  #text({ nodeId, added }) {
    const before = this.#added.get(nodeId);
    this.#added.set(nodeId, added === null || before === null ? null : (before ?? "") + added);
    this.flush();
  }

  /** Show what came, within what a frame can bear: laying out a long paragraph again costs as much as it is long. */
  #flush() {
    const { conversation } = this.app;
    if (!conversation) return;
    let budget = FRAME_CHARACTERS;
    for (const [nodeId, added] of this.#added) {
      if (budget <= 0) break;
      this.#added.delete(nodeId);
      const view = this.viewOf(nodeId);
      if (!view) continue;
      const text = conversation.textOf(nodeId);
      if (added !== null && view.body.text.length + added.length === text.length) view.append(added);
      else view.setText(text, conversation.isWriting(nodeId));
      budget -= view.body.cost;
    }
    this.#columns?.tick();
    if (this.#added.size) this.flush();
  }

  #refresh() {
    const { app } = this;
    const path = app.conversation?.activePath() ?? [];
    const at = app.comparing === null ? -1 : path.findIndex((node) => app.conversation.parentOf(node.id) === (app.comparing || null));
    const shown = at < 0 ? path : path.slice(0, at);
    this.#showPath(shown);
    this.#showColumns(at < 0 ? undefined : app.comparing || null);
    this.empty.hidden = path.some((node) => node.role !== "system");
    if (!this.empty.hidden && !this.empty.firstChild) this.empty.append(...this.app.welcome());
    if (this.#isAtEnd && !this.#columns) this.toEnd();
  }

  #showPath(path) {
    const wanted = new Set(path.map((node) => node.id));
    for (const [nodeId, view] of this.#views) {
      if (wanted.has(nodeId)) continue;
      view.destroy();
      this.#views.delete(nodeId);
    }
    let previous = null;
    path.forEach((node, i) => {
      const group = this.#groupAt(Math.floor(i / GROUP_SIZE));
      if (i % GROUP_SIZE === 0) previous = null;
      const view = this.#views.get(node.id) ?? new MessageView(this.app, node.id);
      if (this.#views.has(node.id)) view.update();
      else this.#views.set(node.id, view);
      const place = previous ? previous.nextSibling : group.element.firstChild;
      if (place !== view.element) group.element.insertBefore(view.element, place);
      if (group.isSeen && !view.isVisible) view.appeared();
      previous = view.element;
    });
    for (const { element } of this.#groups.splice(Math.ceil(path.length / GROUP_SIZE))) element.remove();
  }

  #groupAt(index) {
    const group = this.#groups[index] ?? { element: h("div", { class: "cp-group" }), isSeen: !TELLS };
    if (index === this.#groups.length) {
      if (index) this.#groups[index - 1].element.after(group.element);
      else this.list.prepend(group.element);
      this.#groups.push(group);
    }
    return group;
  }

  /** Show the children of a node (null: the roots) side by side; undefined: nothing. */
  #showColumns(parentId) {
    if (this.#columns && this.#columns.parentId !== parentId) {
      this.#columns.destroy();
      this.#columns = null;
    }
    if (parentId === undefined) return;
    this.#columns ??= new ColumnsView(this.app, parentId);
    this.#columns.update();
    if (this.list.lastChild !== this.#columns.element) this.list.append(this.#columns.element);
  }

  /** The browser lays out what is near the view, and tells. */
  #seen({ target, skipped }) {
    const group = this.#groups.find(({ element }) => element === target);
    if (!group) return;
    group.isSeen = !skipped;
    for (const { dataset } of target.children) {
      const view = this.#views.get(dataset.node);
      if (skipped) view?.disappeared();
      else view?.appeared();
    }
  }

  /** The end may have moved while the view went there. */
  #jumped() {
    if (this.#isJumping && this.#isAtEnd) this.toEnd();
    this.#isJumping = false;
  }

  /** Whoever scrolls up leaves the end. A new layout does not, nor the way to the end: what grows meanwhile is followed. */
  #scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    const isUp = scrollTop < this.#top - 2;
    this.#top = scrollTop;
    const isNearEnd = scrollHeight - scrollTop - clientHeight < NEAR_END;
    if (isNearEnd) this.#isAtEnd = true;
    else if (isUp) this.#isAtEnd = false;
    this.#offerLatest(!this.#isAtEnd && !this.#columns);
  }

  #offerLatest(isOffered) {
    if (this.latest.hidden === isOffered) this.latest.hidden = !isOffered; // to set what is set already has styles computed again
  }
}
