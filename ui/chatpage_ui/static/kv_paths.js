/**
 * Which blocks hold which messages of the open conversation.
 *
 *     tokens of a path   0 ........ 15 | 16 ....... 31 | 32 ...      block_size 16
 *     block_ids             7          |      3        |  41
 *     nodes              system [0, 9)  user [9, 20)  assistant [20, 36)      so block 3 holds rows of user and assistant
 *
 * Invariant: a value, made from one answer of the server; blocks that no path names are in none of its sets.
 */

export class KvPaths {
  #nodesOf = new Map(); // block id -> Set of node ids
  #blocksOf = new Map(); // node id -> Set of block ids
  #numPathsOf = new Map(); // block id -> how many paths go through it

  /** @param {{block_size: number, paths: object[]}} answer of `POST /api/conversations/{id}/kv` */
  constructor({ block_size: size, paths } = { block_size: 1, paths: [] }) {
    this.numPaths = paths.length;
    for (const { block_ids: ids, nodes } of paths) {
      for (const id of ids) this.#numPathsOf.set(id, (this.#numPathsOf.get(id) ?? 0) + 1);
      for (const { node_id: nodeId, start, end } of nodes) {
        const last = Math.min(ids.length, Math.ceil(end / size));
        for (let i = Math.floor(start / size); i < last && start < end; i += 1) this.#note(nodeId, ids[i]);
      }
    }
    this.#count(paths);
  }

  /** A branch whose last message is not in memory takes none: that it begins like another saves nothing. */
  #count(paths) {
    const held = paths.filter(({ num_cached: size, nodes }) => size > (nodes.at(-1).start + nodes.at(-1).end) / 2);
    const taken = new Set(held.flatMap(({ block_ids: ids }) => ids));
    this.numHeld = held.length;
    // blocks that would be there if each of these branches had its own
    this.numEntries = held.reduce((sum, { block_ids: ids }) => sum + ids.length, 0) + this.numBlocks - taken.size;
  }

  #note(nodeId, blockId) {
    if (!this.#nodesOf.has(blockId)) this.#nodesOf.set(blockId, new Set());
    if (!this.#blocksOf.has(nodeId)) this.#blocksOf.set(nodeId, new Set());
    this.#nodesOf.get(blockId).add(nodeId);
    this.#blocksOf.get(nodeId).add(blockId);
  }

  get numBlocks() {
    return this.#numPathsOf.size;
  }

  has(blockId) {
    return this.#numPathsOf.has(blockId);
  }

  numPathsOf(blockId) {
    return this.#numPathsOf.get(blockId) ?? 0;
  }

  nodesOf(blockId) {
    return [...(this.#nodesOf.get(blockId) ?? [])];
  }

  blocksOf(nodeId) {
    return this.#blocksOf.get(nodeId) ?? new Set();
  }
}
