/**
 * Text that settles into rendered markdown.
 *
 *     [ settled blocks, as HTML from the server ][ tail, as plain text that grows ]
 *
 * Invariants: every character of the message is shown once, in one of the two. A settled block is not touched again before the
 * message ends, so what is selected stays selected; a tail in which something is selected does not settle until it is not.
 */

import { post } from "./api.js";
import { h, html } from "./dom.js";
import { Tail } from "./tail.js";

const BATCH_MS = 150;
const MAX_ITEMS = 32;
const MAX_CHARACTERS = 300_000;

/** Asks the server for HTML, several texts at a time, one request after the other. */
export class Renderer {
  #queue = new Map(); // body -> {text, open}
  #isBusy = false;
  #timer = 0;

  /** Have a text rendered; a newer one of the same body replaces it. `body.rendered(item, blocks)` is called. */
  ask(body, item) {
    this.#queue.set(body, item);
    if (!this.#isBusy && !this.#timer) this.#timer = setTimeout(() => this.#send(), item.open ? BATCH_MS : 0);
  }

  forget(body) {
    this.#queue.delete(body);
  }

  async #send() {
    this.#timer = 0;
    const batch = this.#take();
    if (!batch.length) return;
    this.#isBusy = true;
    try {
      const items = batch.map(([, { text, open, inReasoning }], i) => ({ id: String(i), text, open, in_reasoning: inReasoning }));
      const answer = await post("/canvas/render", { items });
      for (const { id, blocks } of answer.items) {
        batch[Number(id)][0].rendered(batch[Number(id)][1], blocks);
        await breath();
      }
    } catch (error) {
      console.warn("The text stays as it is:", error.message);
      for (const [body] of batch) body.notRendered();
    } finally {
      this.#isBusy = false;
      if (this.#queue.size) this.#timer = setTimeout(() => this.#send(), BATCH_MS);
    }
  }

  #take() {
    const batch = [];
    let size = 0;
    for (const entry of this.#queue) {
      size += entry[1].text.length;
      if (batch.length && (batch.length === MAX_ITEMS || size > MAX_CHARACTERS)) break;
      batch.push(entry);
      this.#queue.delete(entry[0]);
    }
    return batch;
  }
}

/** Let the browser do what else is due: several long texts at once would keep it from it. */
function breath() {
  return new Promise((resolve) => setTimeout(resolve));
}

/** The text of one message. */
export class Body {
  #renderer;
  #inReasoning;
  #text = "";
  #base = 0; // where the tail begins
  #asked = 0; // how much of the text the server has seen
  #isOpen = true;
  #blocks = []; // {start, end, html, element}
  #tail = new Tail();
  #isDue = true;

  /** @param {boolean} inReasoning whether the prompt itself opened the reasoning that the text begins with */
  constructor(renderer, inReasoning = false) {
    this.#renderer = renderer;
    this.#inReasoning = inReasoning;
    this.element = h("div", { class: "cp-body", dir: "auto" }, this.#tail.element);
  }

  get text() {
    return this.#text;
  }

  /** How much is laid out again when something is added. */
  get cost() {
    return this.#tail.cost;
  }

  /** Show a text. What it shares with the one before stays as it is, and so does a selection in it. */
  set(text, isOpen) {
    this.#isOpen = isOpen;
    this.#isDue = true;
    if (text.startsWith(this.#text)) this.append(text.slice(this.#text.length));
    else this.#restart(text);
    this.#tail.element.hidden = this.#tail.isEmpty && !isOpen;
    if (isOpen) this.settle();
  }

  #restart(text) {
    for (const block of this.#blocks) block.element.remove();
    this.#blocks = [];
    this.#base = this.#asked = 0;
    this.#text = text;
    this.#showTail();
  }

  /** Add to the end. */
  append(added) {
    if (!added) return;
    this.#text += added;
    if (!this.#tail.isEmpty || added.trimStart() === added) this.#tail.append(added);
    else this.#showTail();
    if (added.includes("\n")) this.settle();
  }

  /** Have finished blocks of a growing text rendered. */
  settle() {
    if (!this.#isOpen || this.#asked === this.#text.length || this.#tail.isSelected) return;
    this.#asked = this.#text.length;
    const inReasoning = this.#inReasoning && this.#base === 0;
    this.#renderer.ask(this, { text: this.#text.slice(this.#base), open: true, base: this.#base, inReasoning });
  }

  /** The text is whole: have all of it rendered, when it comes into view. */
  finish() {
    this.#isOpen = false;
    this.#isDue = true;
  }

  /** Render a whole text now, if that has not been done. */
  show() {
    if (this.#isOpen || !this.#isDue) return;
    this.#isDue = false;
    this.#renderer.ask(this, { text: this.#text, open: false, base: 0, inReasoning: this.#inReasoning });
  }

  /** The server could not be asked: the text stays plain, and is tried again when it next comes into view. */
  notRendered() {
    this.#isDue = true;
    this.#asked = this.#base;
  }

  /** Take blocks from the server. */
  rendered(item, blocks) {
    if (item.open ? item.base !== this.#base || !this.#text.slice(this.#base).startsWith(item.text) : item.text !== this.#text) return;
    if (item.open) this.#settled(blocks.filter((block) => block.settled));
    else this.#whole(blocks);
  }

  #settled(blocks) {
    if (!blocks.length || this.#tail.isSelected || !this.#isOpen) return;
    const base = this.#base;
    for (const block of blocks) this.#add({ start: base + block.start, end: base + block.end, html: block.html }, this.#tail.element);
    this.#base = base + blocks.at(-1).end;
    this.#showTail();
  }

  #whole(blocks) {
    const old = new Map(this.#blocks.map((block) => [`${block.start} ${block.end} ${block.html}`, block]));
    const before = this.#blocks;
    this.#blocks = [];
    for (const block of blocks) {
      const same = old.get(`${block.start} ${block.end} ${block.html}`);
      if (same && same.element.isConnected) this.#blocks.push(same);
      else this.#add(block, this.#tail.element);
    }
    const kept = new Set(this.#blocks);
    for (const block of before) if (!kept.has(block)) block.element.remove();
    let previous = null;
    for (const { element } of this.#blocks) {
      // moving an element ends a selection in it, so one that is in its place stays
      const place = previous ? previous.nextSibling : this.element.firstChild;
      if (place !== element) this.element.insertBefore(element, place);
      previous = element;
    }
    this.#base = this.#text.length;
    this.#showTail();
    this.element.dispatchEvent(new CustomEvent("rendered", { bubbles: true }));
  }

  #add(block, before) {
    const element = h("div", { class: "cp-block" });
    html(element, block.html);
    this.element.insertBefore(element, before);
    this.#blocks.push({ ...block, element });
  }

  #showTail() {
    this.#tail.set(this.#text.slice(this.#base).replace(/^\s*\n/, ""));
    this.#tail.element.hidden = this.#tail.isEmpty && !this.#isOpen;
  }
}
