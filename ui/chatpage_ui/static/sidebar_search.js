/**
 * Search over all messages, in place of the list while something is looked for.
 *
 * Invariant: the hits shown belong to the words in the field; an answer to older words is dropped.
 */

import { get } from "./api.js";
import { debounce, h, icon, iconButton } from "./dom.js";

const PAUSE_MS = 180;
const MOST = 50;

export class SidebarSearch extends EventTarget {
  #asked = 0;
  #hits = [];

  /** @param {function(string, {nodeId, highlights})} open opens a conversation at a message */
  constructor(app) {
    super();
    this.app = app;
    this.field = h("input", {
      type: "search",
      class: "cp-field cp-search-field",
      placeholder: "Search",
      "aria-label": "Search all messages",
      autocomplete: "off",
      oninput: () => this.#typed(),
      onkeydown: (event) => this.#key(event),
    });
    this.clearButton = iconButton(
      "close",
      "Clear the search",
      () => this.clear(),
      { class: "icon-button cp-search-clear", hidden: true },
    );
    this.element = h("div", { class: "cp-search", role: "search" }, icon("search"), this.field, this.clearButton);
    this.results = h(
      "div",
      {
        class: "cp-hits",
        role: "region",
        "aria-label": "Found messages",
        hidden: true,
        onkeydown: (event) => this.#walk(event),
      },
    );
    this.ask = debounce(() => this.#ask(), PAUSE_MS);
  }

  get isActive() {
    return this.field.value.trim() !== "";
  }

  focus() {
    this.field.focus();
    this.field.select();
  }

  clear() {
    this.field.value = "";
    this.#typed();
    this.field.focus();
  }

  #typed() {
    this.clearButton.hidden = !this.field.value;
    this.results.hidden = !this.isActive;
    this.dispatchEvent(new Event("toggle"));
    if (this.isActive) this.ask();
    else {
      this.ask.cancel();
      this.#asked += 1;
      this.results.replaceChildren();
    }
  }

  async #ask() {
    const ask = ++this.#asked;
    const query = this.field.value;
    try {
      const { hits } = await get(`/api/search?${new URLSearchParams({ q: query.trim(), limit: MOST })}`);
      if (ask === this.#asked) this.#show(hits, query);
    } catch (error) {
      if (ask === this.#asked) this.#say(error.message);
    }
  }

  #show(hits, query) {
    this.#hits = hits;
    if (!hits.length) return this.#say(`Nothing found for “${query.trim()}”`);
    const number = hits.length === MOST ? `The newest ${MOST} hits` : `${hits.length} ${hits.length === 1 ? "hit" : "hits"}`;
    this.results.replaceChildren(
      h("p", { class: "cp-side-note", role: "status" }, number),
      h("ul", { class: "cp-hit-list" }, ...hits.map((hit, i) => this.#hit(hit, i))),
    );
  }

  #say(text) {
    this.#hits = [];
    this.results.replaceChildren(h("p", { class: "cp-side-note", role: "status" }, text));
  }

  #hit(hit, index) {
    const isOwn = hit.role === "user";
    const button = h(
      "button",
      { type: "button", class: "cp-hit", tabIndex: index === 0 ? 0 : -1, onclick: () => this.#open(hit, button) },
      h(
        "span",
        { class: "cp-hit-head" },
        h("span", { class: "cp-hit-title", dir: "auto" }, hit.title || "Untitled"),
        h("span", { class: "cp-hit-role" }, isOwn ? "you" : hit.role === "assistant" ? "model" : hit.role),
      ),
      h("span", { class: "cp-hit-snippet", dir: "auto" }, ...marked(hit.snippet, hit.highlights)),
    );
    return h("li", {}, button);
  }

  #open(hit, button) {
    for (const other of this.results.querySelectorAll("[aria-current]")) other.removeAttribute("aria-current");
    button?.setAttribute("aria-current", "true");
    const alike = this.#hits.filter(({ conversation_id: id }) => id === hit.conversation_id);
    const highlights = alike.map(({ node_id: id }) => id);
    this.app.openConversation(hit.conversation_id, { nodeId: hit.node_id, highlights: new Set(highlights) });
  }

  #key(event) {
    if (event.isComposing) return;
    if (event.key === "Escape" && this.field.value) {
      event.preventDefault();
      event.stopPropagation();
      this.clear();
    } else if (event.key === "ArrowDown") {
      event.preventDefault();
      this.results.querySelector(".cp-hit")?.focus();
    } else if (event.key === "Enter" && this.#hits.length) this.#open(this.#hits[0], this.results.querySelector(".cp-hit"));
  }

  #walk(event) {
    const hits = [...this.results.querySelectorAll(".cp-hit")];
    const at = hits.indexOf(document.activeElement);
    if (event.key === "Escape") return this.clear();
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: hits.length - 1 }[event.key];
    if (to === undefined || at < 0) return;
    event.preventDefault();
    if (to < 0) return this.field.focus();
    const next = hits[Math.min(to, hits.length - 1)];
    for (const hit of hits) hit.tabIndex = hit === next ? 0 : -1;
    next.focus();
  }
}

/** Return a text with the parts between [start, end) as <mark>. */
export function marked(text, ranges) {
  const parts = [];
  let at = 0;
  for (const [start, end] of ranges) {
    parts.push(text.slice(at, start), h("mark", {}, text.slice(start, end)));
    at = end;
  }
  return [...parts, text.slice(at)];
}
