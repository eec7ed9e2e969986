/**
 * What an action would cost, before it is done, and what it did cost.
 *
 * Invariant: the numbers are the engine's. "Computed" counts the tokens that go through the model before the first new one.
 */

import { count, h } from "./dom.js";

const FRESH_MS = 4_000;

/** Asks the server for costs, and remembers an answer for a moment. */
export class Costs {
  #known = new Map(); // key -> {at, answer}

  constructor(app) {
    this.app = app;
    app.addEventListener("open", () => this.#known.clear());
  }

  /** Return what a run would cost now (a plan.result), or null if it cannot be told. */
  async of(request) {
    const { app } = this;
    if (!app.conversation || !app.connection.isOpen) return null;
    const { conversation_id, n, ...rest } = app.requestOf(request);
    const key = JSON.stringify([conversation_id, rest]);
    const known = this.#known.get(key);
    if (known && performance.now() - known.at < FRESH_MS) return known.answer;
    const answer = app.connection.ask({ type: "plan", conversation_id, ...rest, n: 1 }).catch(() => null);
    this.#known.set(key, { at: performance.now(), answer });
    answer.then((plan) => (!plan || plan.is_pending) && this.#known.delete(key)); // it will be another one
    if (this.#known.size > 64) this.#known.delete(this.#known.keys().next().value);
    return answer;
  }
}

/**
 * Return a chip that says a cost.
 * @param {{tokens: number, cached: number, computed: number}} prefix
 * @param {{expected?: number, prefixBreak?: object, isPending?: boolean}} [options] `expected`: new tokens that must be computed
 */
export function costChip(prefix, { expected = 0, prefixBreak = null, isPending = false } = {}) {
  const isEvicted = prefix.computed > expected + 1 && !prefixBreak && !isPending;
  const why = prefixBreak
    ? `The prefix breaks at token ${count(prefixBreak.token_index)}: ${prefixBreak.reason} (${count(prefixBreak.num_tokens_lost)} tokens lost)`
    : isEvicted
      ? "Part of the history is no longer in memory and is computed again."
      : isPending
        ? "A message before it is still being written, so this may grow."
        : "Tokens to compute before the first new one, and tokens found in shared memory.";
  return h(
    "span",
    { class: `cp-cost ${isEvicted || prefixBreak ? "is-bad" : ""}`, title: why },
    h("b", {}, count(prefix.computed)),
    " to compute · ",
    h("b", {}, count(prefix.cached)),
    " shared",
    prefixBreak && h("span", { class: "cp-cost-why" }, ` · broken: ${prefixBreak.reason}`),
  );
}

/** Return the words for what a reply did cost, from its usage. */
export function costOf(usage) {
  if (!usage || !Number.isFinite(usage.prompt_tokens)) return null;
  return `${count(usage.prompt_tokens - usage.cached_tokens)} computed · ${count(usage.cached_tokens)} shared`;
}
