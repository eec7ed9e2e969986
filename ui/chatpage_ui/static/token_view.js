/**
 * A reply as the tokens it is made of, each a place to branch at.
 *
 * Invariants: the text is the message's own, to the character: joined, the tokens and what stands between them are the text. A
 * branch keeps the tokens [0, i) and never touches the message it comes from.
 */

import { get, pathOf } from "./api.js";
import { count, h } from "./dom.js";
import { openAlternatives, visible } from "./token_panel.js";

const NUM_ALTERNATIVES = 10;

/**
 * Show a message as tokens.
 * @param {object} app
 * @param {string} nodeId
 * @param {Element} container
 * @returns {function(): void} ends it
 */
export function showTokens(app, nodeId, container) {
  const view = new TokenView(app, nodeId, container);
  return () => view.end();
}

class TokenView {
  #tokens = [];
  #spans = [];
  #at = 0; // the token that Tab reaches
  #asked = new Map(); // token index -> promise of its alternatives
  #loaded = null; // the text that the tokens are of
  #panel = null;
  #isEnded = false;

  constructor(app, nodeId, container) {
    this.app = app;
    this.nodeId = nodeId;
    this.conversation = app.conversation;
    this.note = h("p", { class: "cp-tokens-note", role: "status" });
    this.text = h(
      "div",
      {
        class: "cp-tokens-text",
        role: "group",
        "aria-label": "Tokens",
        dir: "auto",
        onclick: (event) => this.#click(event),
        onkeydown: (event) => this.#key(event),
      },
    );
    this.text.addEventListener("focusin", (event) => this.#reach(event.target));
    this.element = h("div", { class: "cp-tokens" }, this.note, this.text);
    container.append(this.element);
    this.changed = () => this.#load();
    for (const type of ["tree", "run"]) this.conversation.addEventListener(type, this.changed);
    this.#load();
  }

  end() {
    this.#isEnded = true;
    for (const type of ["tree", "run"]) this.conversation.removeEventListener(type, this.changed);
    if (this.#panel?.isConnected) this.#panel.hidePopover();
    this.element.remove();
  }

  // -- the text ------------------------------------------------------------------------------------------------------

  /** Read the tokens, again if the message has changed. */
  async #load() {
    const text = this.conversation.textOf(this.nodeId);
    if (this.conversation.isWriting(this.nodeId)) {
      this.#loaded = null;
      this.note.textContent = "The words can be taken apart when the reply is complete.";
      this.text.replaceChildren(text);
      return;
    }
    if (text === this.#loaded) return;
    this.#loaded = text;
    this.#asked.clear();
    this.text.setAttribute("aria-busy", "true");
    if (!this.#tokens.length) this.text.replaceChildren(text);
    try {
      const { tokens } = await get(pathOf(this.conversation.id, this.nodeId, "tokens"));
      if (this.#isEnded || text !== this.#loaded) return;
      this.#show(text, tokens);
    } catch (error) {
      if (text !== this.#loaded) return;
      this.#loaded = null;
      this.note.textContent = error.message;
    } finally {
      this.text.removeAttribute("aria-busy");
    }
  }

  #show(text, tokens) {
    this.#tokens = tokens;
    this.#spans = [];
    const parts = [];
    let at = 0;
    tokens.forEach((token, i) => {
      if (token.start > at) parts.push(text.slice(at, token.start));
      this.#spans.push(this.#span(token, i, text.slice(Math.max(at, token.start), token.end)));
      parts.push(this.#spans.at(-1));
      at = Math.max(at, token.end);
    });
    this.text.replaceChildren(...parts, text.slice(at));
    this.note.textContent = `${count(tokens.length)} tokens. Pick one to see what else could stand there.`;
    this.#at = Math.min(this.#at, Math.max(0, tokens.length - 1));
    this.#spans[this.#at]?.setAttribute("tabindex", "0");
  }

  #span(token, index, text) {
    const kind = text === "" ? "is-part" : /^\s*\n/.test(text) ? "is-break" : "";
    const name = text.trim() === "" ? { "aria-label": text === "" ? "part of a character" : visible(text) } : {};
    return h(
      "span",
      {
        class: `cp-token ${kind}`,
        role: "button",
        tabindex: "-1",
        "aria-haspopup": "dialog",
        "data-index": String(index),
        ...name,
      },
      text,
    );
  }

  // -- walking -------------------------------------------------------------------------------------------------------

  #reach(target) {
    const index = this.#indexOf(target);
    if (index === null) return;
    this.#spans[this.#at]?.setAttribute("tabindex", "-1");
    this.#at = index;
    this.#spans[index].setAttribute("tabindex", "0");
  }

  #indexOf(target) {
    const span = target.closest(".cp-token");
    return span ? Number(span.dataset.index) : null;
  }

  #click(event) {
    const index = this.#indexOf(event.target);
    if (index === null || !getSelection().isCollapsed) return; // who selects text wants no panel
    this.#spans[index].focus({ preventScroll: true });
    this.#open(index);
  }

  #key(event) {
    const index = this.#indexOf(event.target);
    if (index === null || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter" || event.key === " ") this.#open(index);
    else if (event.key === "Escape") this.#leave();
    else {
      const to = this.#target(event.key, index);
      if (to === null) return;
      this.#spans[Math.min(this.#spans.length - 1, Math.max(0, to))].focus();
    }
    event.preventDefault();
    event.stopPropagation();
  }

  /** Return the token that a key leads to, or null if it leads nowhere. */
  #target(key, index) {
    if (key === "ArrowUp") return this.#lineFrom(index, -1);
    if (key === "ArrowDown") return this.#lineFrom(index, 1);
    return { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: this.#spans.length - 1 }[key] ?? null;
  }

  /** Return the nearest token on the next line, or on the one before. */
  #lineFrom(index, step) {
    const from = this.#spans[index].getBoundingClientRect();
    const distance = (box) => Math.abs(box.left + box.right - from.left - from.right);
    let best = index;
    let nearest = Infinity;
    let line = null;
    for (let i = index + step; i >= 0 && i < this.#spans.length; i += step) {
      const box = this.#spans[i].getClientRects()[0] ?? from;
      if (Math.abs(box.top - from.top) < from.height / 2) continue;
      line ??= box.top;
      if (Math.abs(box.top - line) > box.height / 2) break;
      if (distance(box) < nearest) [best, nearest] = [i, distance(box)];
    }
    return best;
  }

  #leave() {
    const view = this.app.thread?.viewOf(this.nodeId);
    view?.toggleTokens?.();
    view?.element.focus({ preventScroll: true });
  }

  // -- what else could stand there -----------------------------------------------------------------------------------

  #open(index) {
    const span = this.#spans[index];
    span.classList.add("is-open");
    this.#panel = openAlternatives(this.app, span, {
      title: `Token ${index + 1}`,
      text: this.#tokens[index].text,
      ask: () => this.#alternatives(index),
      branch: (tokenId, n) => this.#branch(index, tokenId, n),
    });
    this.#panel.addEventListener("toggle", (event) => event.newState === "closed" && span.classList.remove("is-open"));
  }

  /** Ask what else could stand at a token; an answer is kept, an error is not. */
  async #alternatives(index) {
    if (!this.#asked.has(index)) {
      const path = pathOf(this.conversation.id, this.nodeId, `tokens/${index}/alternatives?k=${NUM_ALTERNATIVES}`);
      this.#asked.set(index, get(path));
    }
    try {
      return await this.#asked.get(index);
    } catch (error) {
      this.#asked.delete(index);
      throw error;
    }
  }

  #branch(index, tokenId, n) {
    const request = { kind: "fork", parent_id: this.nodeId, branch_at_token: index, n };
    if (tokenId !== null) request.branch_token_id = tokenId;
    this.app.run(request).catch(() => null); // `run` has shown what went wrong
  }
}
