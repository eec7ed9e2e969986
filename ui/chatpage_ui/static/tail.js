/**
 * Plain text that grows, at a cost that does not grow with it.
 *
 *     [ piece ][ piece ][ last piece, to which is added ]
 *
 * Invariants: the pieces joined are the text, in the document and when it is copied. Only the last one changes; the others are laid
 * out and painted where they are in sight. A cut moves nothing on the screen: it is made after a newline, or where a line begins
 * anyway; only a long text that comes at once is cut after spaces. A piece in which something is selected is not cut.
 */

import { h } from "./dom.js";

const MOST = 1_200; // characters of a piece

let hasSelection = false; // asking the selection has the document laid out, so it is asked when it changes
document.addEventListener("selectionchange", () => (hasSelection = !getSelection().isCollapsed));

export class Tail {
  #node; // the text of the last piece
  #due = MOST; // the length at which it is cut

  constructor() {
    this.element = h("div", { class: "cp-tail" });
    this.set("");
  }

  get isEmpty() {
    return this.element.childElementCount === 1 && !this.#node.data;
  }

  /** How much is laid out again when something is added. */
  get cost() {
    return this.#node.data.length;
  }

  /** Show another text. */
  set(text) {
    this.element.replaceChildren();
    let rest = text;
    while (rest.length > 2 * MOST) {
      const at = placeIn(rest.slice(0, MOST));
      this.#begin(rest.slice(0, at));
      rest = rest.slice(at);
    }
    this.#begin(rest);
  }

  /** Add to the end. */
  append(added) {
    this.#node.appendData(added);
    if (this.#node.length > this.#due && !isSelected(this.#node)) this.#cut();
  }

  /** Whether something in it is selected. */
  get isSelected() {
    return isSelected(this.element);
  }

  #begin(text) {
    this.#node = document.createTextNode(text);
    this.#due = Math.max(MOST, text.length);
    this.element.append(h("span", { class: "cp-piece" }, this.#node));
  }

  #cut() {
    const { data } = this.#node;
    const at = afterNewline(data) || lastLineOf(this.#node);
    if (!at) {
      this.#due = data.length + MOST; // it is not shown, or one line
      return;
    }
    this.#node.deleteData(at, data.length - at);
    this.#begin(data.slice(at));
  }
}

/** Return where the last line of a text begins as it is shown, or 0. */
function lastLineOf(node) {
  const range = document.createRange();
  const boxOf = (at) => {
    range.setStart(node, at);
    range.setEnd(node, at + 1);
    return [...range.getClientRects()].at(-1);
  };
  const last = boxOf(node.length - 1);
  const isEarlier = (box) => box && box.bottom <= last.top + last.height / 2;
  if (!last || !isEarlier(boxOf(0))) return 0;
  let before = 0; // a place in an earlier line
  let at = node.length - 1; // a place in the last one
  while (at - before > 1) {
    const middle = (before + at) >> 1;
    if (isEarlier(boxOf(middle))) before = middle;
    else at = middle;
  }
  return /[\uDC00-\uDFFF]/.test(node.data[at]) ? at - 1 : at;
}

/** Return the place after the last newline, if that is in the second half of a text, or 0. */
function afterNewline(text) {
  const at = text.lastIndexOf("\n") + 1;
  return at > text.length / 2 ? at : 0;
}

/** Return where to cut a text that has not been laid out: after a newline, a space, or a whole character. */
function placeIn(text) {
  const space = text.search(/\s\S*$/) + 1;
  if (afterNewline(text)) return afterNewline(text);
  if (space > text.length / 2) return space;
  return /[\uD800-\uDBFF]$/.test(text) ? text.length - 1 : text.length;
}

function isSelected(node) {
  if (!hasSelection) return false;
  const selection = getSelection();
  return selection.rangeCount > 0 && selection.getRangeAt(0).intersectsNode(node);
}
