/**
 * Where one writes.
 *
 * Invariants: a draft is kept until the server has stored the message, whatever happens in between; each conversation has its own.
 * Enter never sends while an input method composes. While one types, the prefix is computed.
 */

import { costChip } from "./cost.js";
import { count, debounce, h, iconButton, memory } from "./dom.js";
import { grow } from "./edit.js";

const WARM_MS = 500;
const PLAN_MS = 350;
const COUNTS = [1, 2, 4, 8];
const NEARLY_FULL = 0.85;

export class Composer {
  constructor(app) {
    this.app = app;
    this.input = h("textarea", {
      class: "cp-input",
      rows: 1,
      placeholder: "Write a message",
      "aria-label": "Message",
      enterkeyhint: "send",
      oninput: () => this.#typed(),
      onkeydown: (event) => this.#key(event),
    });
    this.prefill = h("input", {
      class: "cp-input cp-prefill",
      type: "text",
      placeholder: "Start the reply with …",
      "aria-label": "Start the reply with",
      hidden: true,
      oninput: () => this.#typed(),
      onkeydown: (event) => this.#key(event),
    });
    this.togglePrefill = h(
      "button",
      { type: "button", class: "cp-link", "aria-expanded": "false", onclick: () => this.#showPrefill(this.prefill.hidden) },
      "Start the reply with …",
    );
    this.samples = h(
      "span",
      { class: "cp-samples", role: "radiogroup", "aria-label": "Samples" },
      ...COUNTS.map((n) =>
        h(
          "button",
          {
            type: "button",
            class: "cp-n",
            role: "radio",
            "data-n": String(n),
            title: n === 1 ? "One answer" : `${n} answers side by side`,
            onclick: () => (app.params.n = n),
          },
          `×${n}`,
        ),
      ),
    );
    this.cost = h("span", { class: "cp-chip-slot", "aria-live": "off" });
    this.meter = h("div", { class: "cp-meter", role: "meter", "aria-label": "Context used", "aria-valuemin": "0", hidden: true });
    this.meterText = h("span", { class: "cp-meter-text" });
    this.send = iconButton("send", "Send", () => this.submit(), { class: "icon-button cp-send" });
    this.stop = iconButton("stop", "Stop", () => app.stopAll(), { class: "icon-button cp-stop", hidden: true });
    this.element = h(
      "footer",
      { class: "cp-composer" },
      h(
        "div",
        { class: "cp-composer-box" },
        this.prefill,
        h("div", { class: "cp-composer-row" }, this.input, this.stop, this.send),
        h("div", { class: "cp-composer-foot" }, this.samples, this.togglePrefill, h("span", { class: "cp-space" }), this.cost, this.meterText),
        this.meter,
      ),
    );
    this.warm = debounce(() => this.#warm(), WARM_MS);
    this.plan = debounce(() => this.#plan(), PLAN_MS);
    app.addEventListener("open", () => this.#opened());
    app.params.addEventListener("change", () => this.#showCount());
    this.#showCount();
  }

  focus() {
    this.input.focus();
  }

  /** Put a text there, to be changed or sent. */
  fill(text) {
    this.input.value = text;
    this.#typed();
    this.focus();
  }

  /** Show what goes on, after the conversation changed. */
  update() {
    const isWriting = this.app.conversation?.liveRuns.length > 0;
    if (this.stop.hidden === isWriting) {
      this.stop.hidden = !isWriting;
      this.plan();
    }
  }

  async submit() {
    const text = this.input.value;
    if (!text.trim() || this.isSending) return;
    this.isSending = true;
    this.element.classList.add("is-sending");
    try {
      await this.app.send(text, { prefill: this.prefill.hidden ? "" : this.prefill.value });
      if (this.input.value === text) this.#clear();
    } catch {
      // it has been shown; the text stays where it is
    } finally {
      this.isSending = false;
      this.element.classList.remove("is-sending");
      this.focus();
    }
  }

  get #draftKey() {
    return `draft.${this.app.conversation?.id ?? "new"}`;
  }

  #clear() {
    this.input.value = "";
    this.prefill.value = "";
    this.#showPrefill(false);
    memory.set(this.#draftKey, null);
    memory.set("draft.new", null);
    grow(this.input);
    this.plan();
  }

  #opened() {
    const draft = memory.get(this.#draftKey, "");
    if (!this.isSending) this.input.value = draft;
    grow(this.input);
    this.cost.replaceChildren();
    this.conversation = this.app.conversation;
    for (const type of ["tree", "run"]) this.conversation?.addEventListener(type, () => this.update());
    this.conversation?.addEventListener("tree", () => this.plan());
    this.update();
    this.plan();
  }

  #typed() {
    memory.set(this.#draftKey, this.input.value);
    grow(this.input, innerHeight * 0.4);
    this.warm();
    this.plan();
  }

  #key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
    event.preventDefault();
    this.submit();
  }

  #showPrefill(isShown) {
    this.prefill.hidden = !isShown;
    this.togglePrefill.setAttribute("aria-expanded", String(isShown));
    this.togglePrefill.textContent = isShown ? "Reply begins freely" : "Start the reply with …";
    if (isShown) this.prefill.focus();
  }

  #showCount() {
    for (const button of this.samples.children) {
      const isOn = Number(button.dataset.n) === this.app.params.n;
      button.setAttribute("aria-checked", String(isOn));
      button.classList.toggle("is-on", isOn);
    }
  }

  #warm() {
    const { app } = this;
    if (!app.conversation || app.conversation.liveRuns.length || app.isTooLong(this.input.value)) return;
    const parent = app.parentForNext();
    app.connection.tell({
      type: "prefix.warm",
      ref: "warm", // if it fails, so will sending, and that is told
      conversation_id: app.conversation.id,
      ...(parent ? { parent_id: parent } : {}),
      ...(this.input.value.trim() ? { draft: this.input.value } : {}),
    });
  }

  /** Show what sending would cost, and how full the context is. */
  async #plan() {
    const { app } = this;
    const asked = (this.asked = Symbol("plan"));
    const leaf = app.conversation?.activeLeaf;
    const hasDraft = Boolean(this.input.value.trim());
    const isAnswered = leaf?.role === "assistant";
    // without a draft the conversation itself is measured: what going on with its last reply begins from
    const request = hasDraft || !isAnswered ? app.nextRequest(hasDraft ? this.input.value : "…") : { kind: "continue", parent_id: leaf.id };
    const plan = leaf && !app.isTooLong(this.input.value) ? await app.costs.of(request) : null;
    if (asked !== this.asked) return;
    this.meter.hidden = !plan;
    this.meterText.replaceChildren();
    this.cost.replaceChildren();
    if (!plan) return;
    const { prefix, max_model_len: most } = plan;
    const expected = prefix.tokens - app.knownTokens();
    if (hasDraft) this.cost.append(costChip(prefix, { expected, prefixBreak: plan.prefix_break, isPending: plan.is_pending }));
    this.#showMeter(prefix, most);
  }

  #showMeter(prefix, most) {
    const share = (tokens) => `${Math.min(100, (100 * tokens) / most)}%`;
    this.meter.replaceChildren(
      h("span", { class: "is-shared", style: `width:${share(prefix.cached)}` }),
      h("span", { class: "is-private", style: `width:${share(prefix.computed)}` }),
    );
    const text = `${count(prefix.tokens)} of ${count(most)} tokens: ${count(prefix.cached)} shared, ${count(prefix.computed)} new`;
    this.meter.setAttribute("aria-valuemax", String(most));
    this.meter.setAttribute("aria-valuenow", String(prefix.tokens));
    this.meter.setAttribute("aria-valuetext", text);
    this.meter.title = text;
    const isFull = prefix.tokens > NEARLY_FULL * most;
    this.meter.classList.toggle("is-full", isFull);
    this.meterText.classList.toggle("is-bad", isFull);
    const left = most - prefix.tokens;
    this.meterText.textContent = isFull ? `Only ${count(left)} tokens of context are left` : `${count(prefix.tokens)} / ${count(most)}`;
  }
}
