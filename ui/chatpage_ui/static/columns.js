/**
 * The versions of one reply side by side, live.
 *
 * Invariants: one column per sibling, in their order; what they share above is shown once, by the thread. The mark stands where
 * the texts first differ, as they are shown.
 */

import { copyText, noteOf } from "./message.js";
import { costOf } from "./cost.js";
import { meanLogprob, showDetails } from "./details.js";
import { count, h, iconButton, perFrame } from "./dom.js";
import { Body } from "./markdown.js";
import { showTokens } from "./token_view.js";

const MARK = "cp-differs";
const TICK_MS = 250;
const MORE = [1, 4];

export class ColumnsView {
  #columns = new Map(); // node id -> Column
  #ticked = 0;
  #marks = []; // ranges, once more text cannot move them
  #inView = null; // node id, where they are swiped one by one

  constructor(app, parentId) {
    this.app = app;
    this.parentId = parentId;
    this.tabs = h("div", { class: "cp-column-tabs", role: "tablist", "aria-label": "Versions" });
    this.grid = h("div", { class: "cp-column-grid", role: "group", "aria-label": "Versions side by side" });
    this.grid.addEventListener("rendered", perFrame(() => this.#mark())); // what was marked may have been replaced
    this.swiped = new IntersectionObserver((entries) => this.#swiped(entries), { root: this.grid, threshold: 0.6 });
    this.title = h("span", { class: "cp-columns-title" });
    this.saved = h("span", { class: "cp-cost" });
    this.element = h(
      "section",
      { class: "cp-columns", "aria-label": "Versions side by side" },
      h(
        "header",
        { class: "cp-columns-head" },
        this.title,
        this.saved,
        h("span", { class: "cp-space" }),
        h("button", { type: "button", class: "cp-link cp-stop-all", onclick: () => app.stopAll() }, "Stop all"),
        h("button", { type: "button", class: "cp-link cp-discard-rest", onclick: () => this.#discardRest() }, "Discard the rest"),
        iconButton("close", "End the comparison", () => app.compare(null)),
      ),
      this.tabs,
      this.grid,
    );
  }

  viewOf(nodeId) {
    return this.#columns.get(nodeId) ?? null;
  }

  get views() {
    return [...this.#columns.values()];
  }

  update() {
    const { conversation } = this.app;
    const ids = conversation.childrenOf(this.parentId);
    for (const [id, column] of this.#columns) {
      if (!ids.includes(id)) {
        column.destroy();
        this.#columns.delete(id);
      }
    }
    ids.forEach((id, i) => {
      const column = this.#columns.get(id) ?? new Column(this.app, id);
      if (!this.#columns.has(id)) this.swiped.observe(column.element);
      this.#columns.set(id, column);
      column.update(i);
      if (this.grid.children[i] !== column.element) this.grid.insertBefore(column.element, this.grid.children[i] ?? null);
    });
    const writing = ids.filter((id) => conversation.isWriting(id)).length;
    this.title.textContent = writing ? `${ids.length} versions, ${writing} being written` : `${ids.length} versions`;
    this.element.querySelector(".cp-stop-all").hidden = !writing;
    this.element.querySelector(".cp-discard-rest").hidden = writing > 0 || ids.length < 2;
    this.grid.style.setProperty("--cp-count", Math.min(ids.length, 4));
    this.grid.style.setProperty("--cp-rows", ids.length > 4 ? 2 : 1);
    this.#showSaved(ids);
    this.#showTabs(ids);
    this.#mark();
  }

  /** Text has grown. */
  tick() {
    if (performance.now() - this.#ticked < TICK_MS) return;
    this.#ticked = performance.now();
    for (const column of this.#columns.values()) column.showFacts();
    const isMarked = this.#marks.length === this.#columns.size && this.#marks.every((range) => !range.collapsed);
    if (!isMarked) this.#mark();
  }

  destroy() {
    for (const column of this.#columns.values()) column.destroy();
    this.swiped.disconnect();
    CSS.highlights?.delete(MARK);
    this.element.remove();
  }

  /** Bring a version into view. */
  show(nodeId) {
    this.#columns.get(nodeId)?.element.scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" });
  }

  /** What the prompt cost for all of them together. */
  #showSaved(ids) {
    const latest = [...ids].reverse();
    const usage = latest.map((id) => this.app.conversation.runOf(id)?.run.created.prefix ?? null).find(Boolean);
    const stored = latest.map((id) => this.app.conversation.nodes.get(id)?.usage).find((one) => Number.isFinite(one?.prompt_tokens));
    const computed = usage?.computed ?? (stored ? stored.prompt_tokens - stored.cached_tokens : null);
    const cached = usage?.cached ?? stored?.cached_tokens ?? null;
    this.saved.hidden = computed === null;
    if (computed !== null) this.saved.textContent = `prompt of the last run: ${count(computed)} computed · ${count(cached)} shared`;
  }

  #showTabs(ids) {
    this.tabs.replaceChildren(
      ...ids.map((id, i) =>
        h(
          "button",
          { type: "button", role: "tab", "data-tab": id, "aria-selected": String(id === this.#inView), onclick: () => this.#columns.get(id).element.scrollIntoView({ inline: "start", block: "nearest" }) },
          String(i + 1),
        ),
      ),
    );
  }

  #swiped(entries) {
    this.#inView = entries.findLast((entry) => entry.isIntersecting)?.target.dataset.node ?? this.#inView;
    for (const tab of this.tabs.children) tab.setAttribute("aria-selected", String(tab.dataset.tab === this.#inView));
  }

  async #discardRest() {
    const { app } = this;
    const chosen = app.conversation.chosen(this.parentId);
    const rest = app.conversation.childrenOf(this.parentId).filter((id) => id !== chosen && !app.conversation.nodes.get(id).is_kept);
    if (!rest.length) {
      app.toast("There is nothing to discard: all others are kept.");
      return;
    }
    await app.removeAll(rest);
  }

  /** Mark the first place where the texts differ. */
  #mark() {
    this.#marks = [];
    if (!CSS.highlights) return;
    const bodies = this.views.map((column) => column.body.element).filter((element) => element.textContent.trim());
    if (bodies.length < 2) {
      CSS.highlights.delete(MARK);
      return;
    }
    const texts = bodies.map((element) => element.textContent);
    const shortest = Math.min(...texts.map((text) => text.length));
    let at = 0;
    while (at < shortest && texts.every((text) => text[at] === texts[0][at])) at++;
    const words = texts.map((text) => wordAt(text, at));
    const ranges = bodies.map((element, i) => words[i] && rangeOf(element, ...words[i])).filter(Boolean);
    CSS.highlights.set(MARK, new Highlight(...ranges));
    if (words.every((word, i) => word && word[1] < texts[i].length)) this.#marks = ranges;
  }
}

class Column {
  #state = "";
  #endTokens = null;

  constructor(app, nodeId) {
    this.app = app;
    this.nodeId = nodeId;
    this.body = new Body(app.renderer, app.opensReasoning(nodeId));
    this.number = h("span", { class: "cp-column-number" });
    this.facts = h("div", { class: "cp-facts" });
    this.actions = h("div", { class: "cp-actions", role: "toolbar" });
    this.note = h("p", { class: "cp-note", hidden: true });
    this.use = h("button", { type: "button", class: "cp-button cp-use", onclick: () => app.use(nodeId) }, "Use this");
    this.element = h(
      "article",
      {
        class: "cp-column",
        "data-node": nodeId,
        tabindex: "0",
        onpointerenter: () => app.hover(nodeId),
        onpointerleave: () => app.hover(null),
        onfocusin: () => app.hover(nodeId),
      },
      h("header", { class: "cp-column-head" }, this.number, h("span", { class: "cp-space" }), this.use),
      this.facts,
      h("div", { class: "cp-column-text" }, this.body.element, this.note),
      this.actions,
    );
  }

  update(index) {
    const { app, nodeId } = this;
    const { conversation } = app;
    const node = conversation.nodes.get(nodeId);
    const isWriting = conversation.isWriting(nodeId);
    const isChosen = conversation.chosen(conversation.parentOf(nodeId)) === nodeId;
    const text = conversation.textOf(nodeId);
    if (text !== this.body.text || isWriting !== this.isWriting) this.setText(text, isWriting);
    const state = [index, isWriting, isChosen, node.is_kept, node.status, node.finish_reason].join("|");
    this.showFacts();
    if (state === this.#state) return;
    this.#state = state;
    this.number.textContent = `${index + 1}${node.is_kept ? " ★" : ""}`;
    this.element.setAttribute("aria-label", `Version ${index + 1}`);
    this.element.setAttribute("aria-busy", String(isWriting));
    this.element.classList.toggle("is-writing", isWriting);
    this.element.classList.toggle("is-chosen", isChosen);
    const note = isWriting ? "" : noteOf(app, node);
    this.note.hidden = !note;
    this.note.textContent = note;
    this.actions.setAttribute("aria-label", `Actions on version ${index + 1}`);
    this.actions.replaceChildren(...this.#actionsOf(node, isWriting, Boolean(note)));
  }

  setText(text, isWriting) {
    this.isWriting = isWriting;
    this.body.set(text, isWriting);
    if (!isWriting) {
      this.body.finish();
      this.body.show();
    }
  }

  append(added) {
    this.body.append(added);
  }

  light(isLit) {
    this.element.classList.toggle("is-lit", isLit);
  }

  copy() {
    return copyText(this.app, this.app.conversation.textOf(this.nodeId));
  }

  /** Tokens, speed, and how sure the model was, as far as that is known. */
  showFacts() {
    const { conversation } = this.app;
    const node = conversation.nodes.get(this.nodeId);
    if (!node) return;
    const found = conversation.runOf(this.nodeId);
    const sample = found?.run.samples[found.sample];
    const done = sample?.done;
    let parts;
    if (sample && !done) {
      const seconds = (performance.now() - sample.startedAt) / 1000;
      parts = [`${sample.numTokens} tok`, seconds > 0.3 && sample.numTokens ? `${(sample.numTokens / seconds).toFixed(0)}/s` : null];
    } else {
      const rate = done?.tok_s ?? node.timing?.tok_s;
      const mean = done?.sum_logprob !== undefined && sample.numTokens ? done.sum_logprob / sample.numTokens : meanLogprob(node);
      parts = [
        `${node.num_tokens || sample?.numTokens || 0} tok`,
        Number.isFinite(rate) && rate > 0 ? `${rate.toFixed(0)}/s` : null,
        Number.isFinite(mean) ? `mean lp ${mean.toFixed(2)}` : null,
      ];
    }
    const text = parts.filter(Boolean).join(" · ");
    if (this.facts.textContent !== text) this.facts.textContent = text;
    this.facts.title = ["lp: log probability of a token", costOf(node.usage)].filter(Boolean).join("; ");
  }

  destroy() {
    this.#endTokens?.();
    this.app.renderer.forget(this.body);
    this.element.remove();
  }

  #actionsOf(node, isWriting, isCut) {
    const { app, nodeId } = this;
    if (isWriting) return [iconButton("stop", "Stop this one", () => app.stop(nodeId), { class: "icon-button cp-stop-one with-text", text: "Stop" })];
    const more = h(
      "span",
      { class: "cp-samples", role: "group", "aria-label": "More like this" },
      ...MORE.map((k) =>
        h(
          "button",
          {
            type: "button",
            class: "cp-n",
            title: `More like this: keep its beginning and write ${k} more`,
            "aria-label": `${k} more like this`,
            onclick: () => app.moreLike(nodeId, k),
          },
          `+${k}`,
        ),
      ),
    );
    return [
      iconButton("copy", "Copy", () => this.copy()),
      iconButton("star", node.is_kept ? "Do not keep" : "Keep", () => app.keep(nodeId, !node.is_kept), {
        "aria-pressed": String(Boolean(node.is_kept)),
      }),
      iconButton("play", isCut ? "Continue" : "Continue anyway", () => app.continue(nodeId)),
      more,
      iconButton("words", "Words: alternatives, and branching at any of them", () => this.toggleTokens()),
      iconButton("info", "Details", (event) => showDetails(app, nodeId, event.currentTarget)),
      iconButton("trash", "Discard", () => app.remove(nodeId)),
    ];
  }

  toggleTokens() {
    if (this.#endTokens) {
      this.#endTokens();
      this.#endTokens = null;
      return;
    }
    const container = h("div", { class: "cp-words" });
    this.body.element.after(container);
    this.body.element.hidden = true;
    const end = showTokens(this.app, this.nodeId, container);
    this.#endTokens = () => {
      end();
      container.remove();
      this.body.element.hidden = false;
    };
  }
}

/** Return where the word at a place of a text begins and ends, or null at its end. */
function wordAt(text, at) {
  const rest = text.slice(at).match(/^\s*\S+/);
  return rest && [at + rest[0].length - rest[0].trimStart().length, at + rest[0].length];
}

function rangeOf(element, start, end) {
  const range = document.createRange();
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  let position = 0;
  let hasStart = false;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const next = position + node.data.length;
    if (!hasStart && start < next) {
      range.setStart(node, start - position);
      hasStart = true;
    }
    if (hasStart && end <= next) {
      range.setEnd(node, end - position);
      return range;
    }
    position = next;
  }
  return null;
}
