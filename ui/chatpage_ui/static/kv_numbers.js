/**
 * The numbers above the memory map.
 *
 * Invariant: both bars count blocks: those that are there once, against those it would take if every holder had its own.
 */

import { bytes, count, h } from "./dom.js";
import { plural } from "./words.js";

export class KvNumbers {
  constructor() {
    this.used = meter("In use now");
    this.own = meter("This conversation");
    this.facts = h("dl", { class: "cp-kv-facts" });
  }

  get elements() {
    return [this.used.element, this.own.element, this.facts];
  }

  /** Show what the server counts. */
  show(stats, blocks, paths) {
    const inBytes = (numBlocks) => bytes(numBlocks * stats.bytes_per_block);
    const numEntries = blocks.reduce((sum, block) => sum + block.ref_count, 0);
    this.used.show(stats.blocks_used, numEntries, inBytes, "Nothing is being written.");
    const all = plural(paths.numPaths, "branch", "branches");
    const branches = paths.numHeld < paths.numPaths ? `${count(paths.numHeld)} of ${all} in memory` : all;
    this.own.show(paths.numBlocks, paths.numEntries, inBytes, "Nothing of it is in memory.", branches);
    const facts = [
      ["Cached, evictable", count(stats.blocks_cached), inBytes(stats.blocks_cached)],
      ["Free", count(stats.blocks_blank), inBytes(stats.blocks_blank)],
      ["Blocks shared", count(stats.blocks_shared), `${count(stats.rows_shared)} rows`],
      ["Rows wasted", count(stats.rows_wasted), percentOf(stats.rows_wasted, stats.blocks_used * stats.block_size)],
      ["Hit rate", percentOf(stats.cached_tokens, stats.prompt_tokens) || "–", ""],
      ["Copies", count(stats.num_block_copies), bytes(stats.copied_bytes)],
    ];
    const line = JSON.stringify(facts);
    if (line === this.facts.dataset.shown) return;
    this.facts.dataset.shown = line;
    const shown = ([name, value, more]) => h(
      "div",
      {},
      h("dt", {}, name),
      h("dd", {}, h("b", {}, value), more && h("span", {}, more)),
    );
    this.facts.replaceChildren(...facts.map(shown));
  }
}

/** Return a share in percent, or "" of nothing. */
function percentOf(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)} %` : "";
}

/** Return a bar that compares blocks that are there with those it would take without sharing. */
function meter(name) {
  const title = h("span", {}, name);
  const value = h("span", { class: "cp-kv-meter-value" });
  const bar = h("span", { class: "cp-kv-meter-bar" }, h("i"));
  const text = h("span", { class: "cp-kv-meter-text" });
  const element = h("div", { class: "cp-kv-meter" }, h("div", { class: "cp-kv-meter-head" }, title, value), bar, text);
  const show = (numBlocks, numWithout, inBytes, nothing, of = "") => {
    const numSaved = Math.max(0, numWithout - numBlocks);
    const share = numWithout ? numBlocks / numWithout : 0;
    element.classList.toggle("is-empty", !numBlocks);
    value.textContent = numBlocks ? inBytes(numBlocks) : "";
    bar.firstChild.style.width = `${100 * share}%`;
    title.textContent = numBlocks && of ? `${name}, ${of}` : name;
    const saved = numSaved ? `saved ${inBytes(numSaved)}, ${Math.round(100 * (1 - share))} %` : "nothing saved";
    text.textContent = numBlocks ? `${inBytes(numWithout)} without sharing: ${saved}` : nothing;
  };
  return { element, show };
}
