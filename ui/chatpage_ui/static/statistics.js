/** The model and what the engine did, in the right sidebar; counts are the engine's, since its start. */

import { bytes, count, h } from "./dom.js";
import { modelName } from "./words.js";

export function mountStatistics(modelHost, statisticsHost, app) {
  const table = h("tbody");
  statisticsHost.append(
    h("details", { class: "cp-statistics", open: true }, h("summary", {}, "Statistics"), h("table", {}, table)),
  );
  const show = (stats) => {
    const used = stats.blocks_used * stats.bytes_per_block;
    const alone = (stats.rows_without_sharing / stats.block_size) * stats.bytes_per_block;
    const rows = [
      ["Running, waiting", `${count(stats.num_running)}, ${count(stats.num_waiting)}`],
      ["Tokens written", count(stats.generated_tokens)],
      ["Prompt tokens", count(stats.prompt_tokens)],
      ["of these shared", stats.prompt_tokens ? `${((100 * stats.cached_tokens) / stats.prompt_tokens).toFixed(1)} %` : "–"],
      ["Memory in use", bytes(used)],
      ["without sharing", bytes(alone)],
      ["Copies on write", `${count(stats.num_block_copies)} (${bytes(stats.copied_bytes)})`],
    ];
    table.replaceChildren(...rows.map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, value))));
  };
  app.connection.follow({ kv: true });
  app.connection.addEventListener("message", ({ detail }) => {
    if (detail.type === "kv.stats") show(detail);
    if (detail.type === "welcome") {
      const { name, max_model_len: length } = detail.model;
      modelHost.replaceChildren(
        h("p", { class: "cp-model" }, h("b", { title: name }, modelName(name)), h("span", {}, `context of ${count(length)} tokens`)),
      );
    }
  });
}
