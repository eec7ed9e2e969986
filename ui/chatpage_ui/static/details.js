/** The numbers of one message, in a panel beside its button. */

import { count, h } from "./dom.js";
import { popover } from "./feedback.js";
import { modelName } from "./words.js";

const UNITS = { ttft_ms: "ms", tok_s: "tok/s" };

export function showDetails(app, nodeId, anchor) {
  const node = app.conversation.nodes.get(nodeId);
  const { usage = {}, timing = {}, params = {} } = node;
  const mean = meanLogprob(node);
  const rows = [
    ["Written", new Date(node.created_at / 1000).toLocaleString()],
    ["Status", node.finish_reason ? `${node.status}, ${node.finish_reason}` : node.status],
    ["Model", node.model && modelName(node.model)],
    ["Tokens", node.num_tokens ? count(node.num_tokens) : null],
    ["Time to first token", measured(timing, "ttft_ms")],
    ["Speed", measured(timing, "tok_s")],
    ["Mean log probability", mean === null ? null : mean.toFixed(3)],
    ["Prompt", Number.isFinite(usage.prompt_tokens) ? `${count(usage.prompt_tokens)} tokens` : null],
    ["Shared", Number.isFinite(usage.cached_tokens) ? `${count(usage.cached_tokens)} tokens, not computed again` : null],
    ["Computed", Number.isFinite(usage.prompt_tokens) ? `${count(usage.prompt_tokens - usage.cached_tokens)} tokens` : null],
    ...Object.entries(params).map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value)]),
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  const table = h("table", {}, h("tbody", {}, ...rows.map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, value)))));
  popover(anchor, "Details", h("div", { class: "cp-details", tabindex: "0" }, h("h3", {}, "Details"), table));
}

/** Return the mean log probability of a reply's tokens, or null. */
export function meanLogprob(node) {
  const sum = node.timing?.sum_logprob;
  const tokens = node.usage?.completion_tokens;
  return Number.isFinite(sum) && tokens > 0 ? sum / tokens : null;
}

function measured(timing, name) {
  const value = timing[name];
  return Number.isFinite(value) && value > 0 ? `${value < 10 ? value.toFixed(1) : Math.round(value)} ${UNITS[name]}` : null;
}
