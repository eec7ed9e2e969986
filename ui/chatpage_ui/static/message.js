/**
 * One message: its text, its place among its siblings, what can be done with it.
 *
 * Invariant: a view shows its node as the conversation has it; `update` and `append` are the only ways in, and doing is asking `app`.
 */

import { costChip, costOf } from "./cost.js";
import { showDetails } from "./details.js";
import { h, iconButton } from "./dom.js";
import { editMessage } from "./edit.js";
import { Body } from "./markdown.js";
import { showTokens } from "./token_view.js";
import { whyCut } from "./words.js";

const NAMES = { user: "You", assistant: "Assistant", system: "System prompt", tool: "Tool" };
export const SAMPLE_COUNTS = [2, 4, 8, 16];

export class MessageView {
  constructor(app, nodeId) {
    this.app = app;
    this.nodeId = nodeId;
    this.body = new Body(app.renderer, app.opensReasoning(nodeId));
    this.pager = h("span", { class: "cp-pager" });
    this.note = h("p", { class: "cp-note", hidden: true });
    this.facts = h("span", { class: "cp-facts" });
    this.chip = h("span", { class: "cp-chip-slot" });
    this.actions = h("div", { class: "cp-actions", role: "toolbar", "aria-label": "Actions on this message" });
    this.footer = h("footer", { class: "cp-message-foot" }, this.actions, this.chip, this.facts);
    this.title = h("span", { class: "cp-role" });
    this.element = h(
      "article",
      {
        class: "cp-message",
        "data-node": nodeId,
        tabindex: "-1",
        onpointerenter: () => app.hover(nodeId),
        onpointerleave: () => app.hover(null),
        onfocusin: () => app.hover(nodeId),
      },
      h("header", { class: "cp-message-head" }, this.title, this.pager),
      this.body.element,
      this.note,
      this.footer,
    );
    this.endTokens = null;
    this.#state = "";
    this.update();
  }

  #state;

  get node() {
    return this.app.conversation.nodes.get(this.nodeId);
  }

  /** Show the node as it is now. */
  update() {
    const { node, app } = this;
    if (!node) return;
    const isWriting = app.conversation.isWriting(this.nodeId);
    const siblings = app.conversation.siblingsOf(this.nodeId);
    const state = [node.status, isWriting, node.finish_reason, noteOf(app, node), node.is_kept, siblings.join(), app.isLast(this.nodeId)].join("|");
    const text = app.conversation.textOf(this.nodeId);
    if (text !== this.body.text || state !== this.#state) this.setText(text, isWriting);
    if (state === this.#state) return;
    this.#state = state;
    this.element.className = `cp-message is-${node.role} ${isWriting ? "is-writing" : ""} ${app.isLast(this.nodeId) ? "is-last" : ""}`;
    this.element.setAttribute("aria-label", `${NAMES[node.role] ?? node.role}`);
    this.element.setAttribute("aria-busy", String(isWriting));
    this.title.replaceChildren(NAMES[node.role] ?? node.role, node.is_kept ? h("span", { class: "cp-kept", title: "Kept" }, " ★") : "");
    this.#showPager(siblings);
    this.#showNote(node, isWriting);
    this.facts.textContent = isWriting ? "" : this.#factsOf(node);
    this.actions.replaceChildren(...this.#actionsOf(node, isWriting));
  }

  setText(text, isWriting) {
    this.body.set(text, isWriting);
    if (!isWriting) {
      this.body.finish();
      if (this.isVisible) this.body.show();
    }
  }

  append(added) {
    this.body.append(added);
  }

  /** The message came into view. */
  appeared() {
    this.isVisible = true;
    this.body.show();
  }

  disappeared() {
    this.isVisible = false;
  }

  light(isLit) {
    this.element.classList.toggle("is-lit", isLit);
  }

  destroy() {
    this.endTokens?.();
    this.app.renderer.forget(this.body);
    this.element.remove();
  }

  // -- head ----------------------------------------------------------------------------------------------------------

  #showPager(siblings) {
    this.pager.replaceChildren();
    if (siblings.length < 2) return;
    const { app } = this;
    const at = siblings.indexOf(this.nodeId);
    const go = (step) => app.select(siblings[(at + step + siblings.length) % siblings.length]);
    this.pager.append(
      iconButton("left", "Previous version", () => go(-1), { class: "icon-button cp-prev" }),
      h("span", { class: "cp-pager-count", "aria-label": `version ${at + 1} of ${siblings.length}` }, `${at + 1}/${siblings.length}`),
      iconButton("right", "Next version", () => go(1), { class: "icon-button cp-next" }),
      this.node.role === "assistant"
        ? iconButton("columns", "Compare side by side", () => app.compareSiblings(this.nodeId))
        : "",
    );
  }

  #showNote(node, isWriting) {
    const { app, nodeId } = this;
    const text = noteOf(app, node);
    this.note.hidden = isWriting || !text;
    this.note.replaceChildren(text);
    this.note.classList.toggle("is-bad", node.status === "error" || node.role === "user");
    if (this.note.hidden) return;
    const link = (label, action) => this.note.append(" ", h("button", { type: "button", class: "cp-link", onclick: action }, label));
    if (node.role === "assistant") link("Continue", () => app.continue(nodeId));
    if (node.role === "user") link("Answer", () => app.regenerate(nodeId));
    if (node.status === "error") link("Try again", () => app.regenerate(nodeId));
  }

  // -- foot ----------------------------------------------------------------------------------------------------------

  #factsOf(node) {
    if (node.role !== "assistant") return "";
    const rate = node.timing?.tok_s;
    return [node.num_tokens ? `${node.num_tokens} tokens` : null, Number.isFinite(rate) && rate > 0 ? `${rate.toFixed(0)} tok/s` : null, costOf(node.usage)]
      .filter(Boolean)
      .join(" · ");
  }

  #actionsOf(node, isWriting) {
    const { app, nodeId } = this;
    if (isWriting) return [iconButton("stop", "Stop", () => app.stop(nodeId), { class: "icon-button cp-stop-one with-text", text: "Stop" })];
    const again = { kind: "regenerate", parent_id: nodeId };
    const isReply = node.role === "assistant";
    return [
      iconButton("copy", "Copy", () => this.copy()),
      iconButton("edit", "Edit", () => editMessage(this)),
      ...(isReply
        ? [
            this.#costing(iconButton("redo", "Regenerate", () => app.regenerate(nodeId)), again),
            this.#samples(again),
            this.#costing(iconButton("play", "Continue", () => app.continue(nodeId)), { kind: "continue", parent_id: nodeId }),
            iconButton("words", "Words: alternatives, and branching at any of them", () => this.toggleTokens()),
          ]
        : node.role === "user"
          ? [this.#costing(iconButton("redo", "Answer again", () => app.regenerate(nodeId)), again), this.#samples(again)]
          : []),
      iconButton("fork", "Fork to a new conversation", (event) => app.forkMenu(nodeId, event.currentTarget)),
      ...(isReply ? [iconButton("star", node.is_kept ? "Do not keep" : "Keep", () => app.keep(nodeId, !node.is_kept))] : []),
      iconButton("info", "Details", (event) => showDetails(app, nodeId, event.currentTarget)),
      iconButton("trash", "Delete", () => app.remove(nodeId)),
    ];
  }

  /** The buttons for n samples at once: one click to as many columns. */
  #samples(request) {
    const buttons = SAMPLE_COUNTS.map((n) =>
      h(
        "button",
        {
          type: "button",
          class: "cp-n",
          "aria-label": `${n} samples side by side`,
          title: `${n} samples side by side`,
          "data-n": String(n),
          onclick: () => this.app.regenerate(this.nodeId, n),
        },
        `×${n}`,
      ),
    );
    return this.#costing(h("span", { class: "cp-samples", role: "group", "aria-label": "Several samples" }, ...buttons), request);
  }

  /** Show what an action would cost as soon as it is pointed at or focused. */
  #costing(element, request) {
    const show = async () => {
      const plan = await this.app.costs.of(request);
      if (plan && element.isConnected && element.matches(":hover, :focus-within, :focus")) {
        this.chip.replaceChildren(costChip(plan.prefix, { prefixBreak: plan.prefix_break, isPending: plan.is_pending }));
      }
    };
    const hide = () => this.chip.replaceChildren();
    element.addEventListener("pointerenter", show);
    element.addEventListener("focusin", show);
    element.addEventListener("pointerleave", hide);
    element.addEventListener("focusout", hide);
    return element;
  }

  // -- doing ---------------------------------------------------------------------------------------------------------

  async copy() {
    await copyText(this.app, this.app.conversation.textOf(this.nodeId));
  }

  edit() {
    if (!this.app.conversation.isWriting(this.nodeId)) editMessage(this);
  }

  /** Show the exact text, word by word, or the rendered text again. */
  toggleTokens() {
    if (this.endTokens) {
      this.endTokens();
      this.endTokens = null;
      this.body.element.hidden = false;
      return;
    }
    const container = h("div", { class: "cp-words" });
    this.body.element.after(container);
    this.body.element.hidden = true;
    const end = showTokens(this.app, this.nodeId, container);
    this.endTokens = () => {
      end();
      container.remove();
    };
  }
}

/** Return what is to be said below a reply that is not whole, or a message without one, or "". */
export function noteOf(app, node) {
  const isUnanswered = node.role === "user" && app.conversation.childrenOf(node.id).length === 0;
  if (isUnanswered) return node.detail ? `Not answered: ${node.detail}` : "Not answered.";
  return whyCut(node, app.connection.welcome?.model.max_model_len);
}

/** Copy a text and say so. */
export async function copyText(app, text) {
  try {
    await navigator.clipboard.writeText(text);
    app.toast("Copied.");
  } catch {
    app.toast("The browser did not let the page copy: select the text and copy it yourself.", { isBad: true });
  }
}

/** Copy the code of a block when its button is pressed; the button is the server's HTML. */
export function handleCopyButtons(root, app) {
  root.addEventListener("click", (event) => {
    const button = event.target.closest("button.copy");
    const code = button?.closest("figure")?.querySelector("pre");
    if (code) copyText(app, code.textContent.replace(/\n$/, ""));
  });
}

