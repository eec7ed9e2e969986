/**
 * The memory: what it holds, who shares it, and what sharing saves.
 *
 * Invariant: it asks the server only while it can be seen; an answer that fails leaves the last picture standing and says so.
 */

import { get, pathOf, post } from "./api.js";
import { count, debounce, h } from "./dom.js";
import { KINDS, KvGrid } from "./kv_grid.js";
import { KvNumbers } from "./kv_numbers.js";
import { KvPaths } from "./kv_paths.js";
import { describeBlock } from "./kv_words.js";

const POLL_MS = 1_000;
const SETTLE_MS = 400;
const MOST_PATHS = 64;

/** Fill a place with the memory map. */
export function mountKvMap(host, app) {
  return new KvMap(host, app);
}

class KvMap {
  #blocks = [];
  #stats = null;
  #paths = new KvPaths();
  #asked = 0;
  #isVisible = false;
  #isBusy = false;
  #isFollowing = false; // whether it is we who follow the numbers
  #timer = 0;
  #read = -Infinity;
  #followed = null;
  #hovered = null; // node id of a message
  #pointed = null; // index of a block

  constructor(host, app) {
    this.app = app;
    this.askPaths = debounce(() => this.#askPaths(), SETTLE_MS);
    this.#build(host);
    this.#listen();
    this.#opened();
  }

  // -- what there is -------------------------------------------------------------------------------------------------

  #build(host) {
    this.note = h("p", { class: "cp-kv-note", role: "status", hidden: true });
    this.numbers = new KvNumbers();
    this.counts = new Map(KINDS.map(([kind]) => [kind, h("b", {})]));
    const swatch = (kind) => h("i", { class: `cp-kv-swatch is-${kind}`, "aria-hidden": "true" });
    const swatches = new Map(KINDS.map(([kind]) => [kind, swatch(kind)]));
    const entry = ([kind, label]) => h("li", {}, swatches.get(kind), h("span", {}, label), this.counts.get(kind));
    this.legend = h("ul", { class: "cp-kv-legend" }, ...KINDS.map(entry));
    this.canvas = h(
      "canvas",
      {
        class: "cp-kv-canvas",
        tabindex: "0",
        role: "application",
        "aria-label": "Blocks; arrow keys move",
        "aria-describedby": "cp-kv-summary",
      },
    );
    this.frame = h("div", { class: "cp-kv-frame" }, this.canvas);
    this.rest = h("p", { class: "cp-kv-rest", hidden: true });
    this.summary = h("p", { class: "cp-visually-hidden", id: "cp-kv-summary" });
    this.spoken = h("p", { class: "cp-visually-hidden", role: "status" });
    this.tip = h("div", { class: "cp-kv-tip", "aria-hidden": "true", hidden: true });
    const head = h("div", { class: "cp-kv-head" }, this.note, ...this.numbers.elements);
    this.panel = h(
      "div",
      { class: "cp-panel cp-kv" },
      head,
      this.frame,
      this.rest,
      this.legend,
      this.summary,
      this.spoken,
      this.tip,
    );
    host.replaceChildren(this.panel);
    this.grid = new KvGrid(this.canvas, this.frame, swatches);
  }

  #listen() {
    const { app, canvas } = this;
    new IntersectionObserver((entries) => this.#setVisible(entries.at(-1).isIntersecting)).observe(this.panel);
    document.addEventListener("visibilitychange", () => this.#poll());
    app.addEventListener("open", () => this.#opened());
    app.addEventListener("hover", ({ detail }) => this.#hover(detail.nodeId));
    app.connection.addEventListener("message", ({ detail }) => detail.type === "kv.stats" && this.#pollSoon());
    canvas.addEventListener("pointermove", (event) => this.#point(this.grid.cellAt(event.offsetX, event.offsetY)));
    canvas.addEventListener("pointerleave", () => this.#point(null));
    canvas.addEventListener("blur", () => this.#leave());
    canvas.addEventListener("focus", () => canvas.matches(":focus-visible") && this.#move(this.#cursor));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    this.frame.addEventListener("scroll", () => this.#point(null), { passive: true });
  }

  #setVisible(isVisible) {
    if (isVisible === this.#isVisible) return;
    this.#isVisible = isVisible;
    const { connection } = this.app;
    if (isVisible) {
      this.#isFollowing = !connection.isFollowing({ kv: true });
      if (this.#isFollowing) connection.follow({ kv: true });
      this.askPaths();
      this.#poll();
    } else {
      if (this.#isFollowing) connection.unfollow({ kv: true });
      clearTimeout(this.#timer);
    }
  }

  #opened() {
    const { conversation } = this.app;
    if (conversation !== this.#followed) {
      this.#followed = conversation;
      this.#paths = new KvPaths();
      const changed = () => conversation === this.#followed && this.#heard();
      for (const type of ["tree", "run"]) conversation?.addEventListener(type, changed);
    }
    this.#heard();
  }

  #heard() {
    if (!this.#isVisible) return;
    this.askPaths();
    this.#pollSoon();
  }

  // -- asking --------------------------------------------------------------------------------------------------------

  get #canAsk() {
    return this.#isVisible && !document.hidden;
  }

  get #isLive() {
    return Boolean(this.app.conversation?.liveRuns.length || this.#stats?.num_running);
  }

  #pollSoon() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#poll(), Math.max(0, POLL_MS - (performance.now() - this.#read)));
  }

  async #poll() {
    clearTimeout(this.#timer);
    if (!this.#canAsk || this.#isBusy) return;
    this.#isBusy = true;
    this.#read = performance.now();
    try {
      const { stats, blocks } = await get("/api/kv");
      this.#stats = stats;
      this.#blocks = blocks;
      this.#say("");
    } catch (error) {
      this.#say(error.message);
    } finally {
      this.#isBusy = false;
    }
    this.#show();
    this.#askPaths(); // what changed may have been ours: the end of a reply is given back after it was told
    if (this.#isLive) this.#pollSoon();
  }

  async #askPaths() {
    const { conversation } = this.app;
    if (!this.#canAsk) return;
    const ask = ++this.#asked;
    if (!conversation?.nodes.size) this.#paths = new KvPaths();
    else {
      try {
        const answer = await post(pathOf(conversation.id, null, "kv"), { leaf_ids: leavesToAsk(conversation) });
        if (ask !== this.#asked || conversation !== this.#followed) return;
        this.#paths = new KvPaths(answer);
      } catch (error) {
        if (ask === this.#asked) this.#say(error.message);
        return;
      }
    }
    this.#show();
  }

  #say(text) {
    this.note.textContent = text;
    this.note.hidden = !text;
  }

  // -- showing -------------------------------------------------------------------------------------------------------

  #show() {
    if (!this.#stats) return;
    const size = this.#stats.block_size;
    const numShown = this.#numShown();
    const totals = Object.fromEntries(KINDS.map(([kind]) => [kind, 0]));
    const cells = this.#blocks.map((block) => {
      const kind = this.#kindOf(block);
      totals[kind] += 1;
      return { kind, fill: block.num_rows / size };
    });
    this.grid.cells = cells.slice(0, numShown);
    for (const [kind] of KINDS) this.counts.get(kind).textContent = count(totals[kind]);
    const numRest = cells.length - numShown;
    this.rest.hidden = numRest === 0;
    this.rest.textContent = `and ${count(numRest)} more free blocks`;
    this.numbers.show(this.#stats, this.#blocks, this.#paths);
    this.#summarise(totals);
    this.#light();
    this.#showTip();
  }

  /** Leave out the free blocks at the end, but for a few. */
  #numShown() {
    const numTouched = this.#blocks.findLastIndex((block) => block.state !== "blank") + 1;
    const shown = Math.max(256, numTouched + 64);
    return shown + 64 > this.#blocks.length ? this.#blocks.length : shown;
  }

  #kindOf({ id, state, ref_count: numHolders }) {
    if (numHolders > 2) return "shared3";
    if (numHolders === 2) return "shared2";
    if (numHolders === 1) return "used";
    if (state === "blank") return "blank";
    return this.#paths.has(id) ? "here" : "cached";
  }

  #summarise(totals) {
    const parts = KINDS.map(([kind, label]) => `${label.toLowerCase()}: ${count(totals[kind])}`);
    this.summary.textContent = `${count(this.#blocks.length)} blocks of ${this.#stats.block_size} rows. ${parts.join("; ")}.`;
  }

  // -- a block, a message --------------------------------------------------------------------------------------------

  #hover(nodeId) {
    this.#hovered = nodeId;
    if (this.#isVisible) this.#light();
  }

  /** Light the blocks of the message that is pointed at. */
  #light() {
    this.grid.lit = this.#hovered === null ? new Set() : this.#paths.blocksOf(this.#hovered);
    this.grid.draw();
  }

  #point(index) {
    if (index === this.#pointed) return;
    const had = this.#pointed !== null;
    this.#pointed = index;
    if (had || index !== null) this.app.light(index === null ? [] : this.#nodesOf(this.#blocks[index]));
    this.grid.cursor = index;
    this.grid.draw();
    this.#showTip();
  }

  #leave() {
    this.#point(null);
  }

  /** The messages that a block holds rows of, as far as they are of this conversation. */
  #nodesOf(block) {
    const nodes = this.#paths.nodesOf(block.id);
    const holders = new Set(block.holders.map(({ node_id: id }) => id));
    return nodes.length ? nodes : [...holders].filter((id) => this.app.conversation?.nodes.has(id));
  }

  /** Where the arrow keys begin: at the block that was pointed at, else at the first that holds something. */
  get #cursor() {
    return this.grid.cursor ?? Math.max(0, this.#blocks.findIndex((block) => block.state !== "blank"));
  }

  #key(event) {
    const { columns } = this.grid;
    const at = this.#cursor;
    const last = this.grid.cells.length - 1;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -at, End: last - at };
    const to = event.key in steps ? at + steps[event.key] : undefined;
    if (event.key === "Escape") this.#point(null);
    else if (to === undefined) return;
    else this.#move(to < 0 || to > last ? at : to);
    event.preventDefault();
    event.stopPropagation();
  }

  #move(index) {
    if (!this.#blocks.length) return;
    this.#point(index);
    const { frame } = this;
    const { y, size } = this.grid.rectOf(index);
    frame.scrollTop = Math.min(y, Math.max(frame.scrollTop, y + size - frame.clientHeight));
    const { head, lines } = this.#describe(this.#blocks[index]);
    this.spoken.textContent = [head, ...lines.map(([name, text]) => `${name} ${text}`)].join(". ");
  }

  #describe(block) {
    return describeBlock(block, { conversation: this.app.conversation, paths: this.#paths, blockSize: this.#stats.block_size });
  }

  #showTip() {
    const block = this.#pointed === null ? null : this.#blocks[this.#pointed];
    this.tip.hidden = !block;
    if (!block) return;
    const { head, lines } = this.#describe(block);
    let before = null;
    const rows = lines.map(([name, text]) => {
      const shown = name === before ? "" : name;
      before = name;
      return [h("dt", {}, shown), h("dd", { dir: "auto" }, text)];
    });
    this.tip.replaceChildren(h("div", { class: "cp-kv-tip-head" }, head), h("dl", {}, ...rows.flat()));
    const [panel, canvas] = [this.panel.getBoundingClientRect(), this.canvas.getBoundingClientRect()];
    const { x, y, size } = this.grid.rectOf(this.#pointed);
    const [width, height] = [this.tip.offsetWidth, this.tip.offsetHeight];
    const left = Math.min(Math.max(8, canvas.left - panel.left + x - width / 2), panel.width - width - 8);
    const above = canvas.top - panel.top + y - height - 6;
    const below = above + height + size + 12;
    const top = below + height < panel.height - 4 ? below : above;
    this.tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  }
}

/** Return the leaves to ask about: the one that is shown, those being written, then the newest. */
function leavesToAsk(conversation) {
  const active = conversation.activeLeaf?.id;
  const rank = (id) => (id === active ? 2 : conversation.isWriting(id) ? 1 : 0);
  const newest = (id) => conversation.nodes.get(id).created_at;
  return conversation
    .leaves()
    .sort((a, b) => rank(b) - rank(a) || newest(b) - newest(a))
    .slice(0, MOST_PATHS);
}
