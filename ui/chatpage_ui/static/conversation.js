/**
 * A copy of one conversation: nodes, which child is shown where, and the runs that write.
 *
 * Invariants: patches apply in order of versions, a reset replaces everything. While a run writes a node its text is the run's,
 * which is ahead of the stored one; a snapshot replaces it, a delta appends. The tree is derived: children are those with the
 * parent, oldest first, and the child shown is the chosen one, else the newest.
 *
 * Events: "tree" (nodes, choices or title changed), "text" (detail: {nodeId, added}; added null: replaced), "run" (detail:
 * {runId}; it began, a sample of it ended, or it ended).
 */

const ENDED = new Set(["stop", "length", "abort", "error"]);

export class Conversation extends EventTarget {
  constructor(id) {
    super();
    this.id = id;
    this.info = null; // the conversation without its messages
    this.version = null;
    this.nodes = new Map();
    this.choices = new Map(); // parent id, "" for the roots -> child id
    this.runs = new Map(); // run id -> {created, samples: [{nodeId, text, numTokens, sumLogprob, done}], done}
    this.live = new Map(); // node id -> its sample in the run that writes it
    this.#children = null;
  }

  #children;
  #path = null; // the active one, until the tree changes
  #choosing = new Map(); // parent id -> {version}: the conversation's own choice there is younger than earlier versions

  // -- the tree ------------------------------------------------------------------------------------------------------

  /** Return the ids of the children of a node (null: the roots), oldest first. */
  childrenOf(parentId) {
    if (!this.#children) {
      this.#children = new Map();
      const order = [...this.nodes.values()].sort((a, b) => a.created_at - b.created_at || (a.id < b.id ? -1 : 1));
      for (const node of order) {
        const parent = this.nodes.has(node.parent_id) ? node.parent_id : "";
        if (!this.#children.has(parent)) this.#children.set(parent, []);
        this.#children.get(parent).push(node.id);
      }
    }
    return this.#children.get(parentId ?? "") ?? [];
  }

  parentOf(nodeId) {
    const parent = this.nodes.get(nodeId)?.parent_id ?? null;
    return this.nodes.has(parent) ? parent : null;
  }

  siblingsOf(nodeId) {
    return this.childrenOf(this.parentOf(nodeId));
  }

  /** Return the child that is shown below a node (null: at the root), or null. */
  chosen(parentId) {
    const children = this.childrenOf(parentId);
    const choice = this.choices.get(parentId ?? "");
    return children.includes(choice) ? choice : (children.at(-1) ?? null);
  }

  /** Return the nodes that are shown, root first. */
  activePath() {
    if (!this.#path) {
      this.#path = [];
      for (let id = this.chosen(null); id !== null; id = this.chosen(id)) this.#path.push(this.nodes.get(id));
    }
    return this.#path;
  }

  get activeLeaf() {
    return this.activePath().at(-1) ?? null;
  }

  /** Return the leaf that is shown below a node. */
  leafBelow(nodeId) {
    for (let child = this.chosen(nodeId); child !== null; child = this.chosen(nodeId)) nodeId = child;
    return nodeId;
  }

  /** Return every leaf. */
  leaves() {
    return [...this.nodes.keys()].filter((id) => this.childrenOf(id).length === 0);
  }

  /**
   * Show the branch of a node at once. Until the server has answered, older choices that arrive late do not undo it.
   * @param {Promise<{version: number}>} answer of the server that was told
   */
  choose(nodeId, answer) {
    this.#path = null;
    const choice = { version: Infinity, late: [] };
    for (let id = nodeId; id !== null; id = this.parentOf(id)) {
      this.choices.set(this.parentOf(id) ?? "", id);
      this.#choosing.set(this.parentOf(id) ?? "", choice);
    }
    answer.then(
      ({ version }) => this.#chosen(choice, version),
      () => this.#chosen(choice, 0),
    );
    this.#emit("tree");
  }

  /** The server has a choice, as this version: what came meanwhile counts if it is younger. */
  #chosen(choice, version) {
    choice.version = version;
    for (const { op, version: of } of choice.late) this.#show(op, of);
    if (choice.late.length) this.#emit("tree");
    choice.late = [];
  }

  /** Show another child, unless the conversation's own choice is younger. */
  #show(op, version) {
    const parent = op.parent_id ?? "";
    const choice = this.#choosing.get(parent);
    if (choice?.version === Infinity) choice.late.push({ op, version });
    else if (version >= (choice?.version ?? 0)) this.choices.set(parent, op.child_id);
  }

  // -- text and runs -------------------------------------------------------------------------------------------------

  textOf(nodeId) {
    return this.live.get(nodeId)?.text ?? this.nodes.get(nodeId)?.text ?? "";
  }

  /** Whether a run is writing a node. */
  isWriting(nodeId) {
    const sample = this.live.get(nodeId);
    return sample ? !sample.done : this.nodes.get(nodeId)?.status === "streaming";
  }

  /** Return the run that writes or wrote a node while this page was open, with the number of its sample, or null. */
  runOf(nodeId) {
    for (const run of [...this.runs.values()].reverse()) {
      const index = run.created.node_ids.indexOf(nodeId);
      if (index >= 0) return { run, sample: index };
    }
    return null;
  }

  get liveRuns() {
    return [...this.runs.values()].filter((run) => !run.done);
  }

  /** Take a message of the server, if it is about this conversation. */
  take(message) {
    switch (message.type) {
      case "tree.patch":
        if (message.conversation_id === this.id) this.#patch(message);
        break;
      case "run.created":
        if (message.conversation_id === this.id) this.#created(message);
        break;
      case "run.snapshot":
      case "run.delta":
      case "sample.done":
      case "run.done":
        if (this.runs.has(message.run_id)) this.#run(this.runs.get(message.run_id), message);
    }
  }

  #patch({ version, ops }) {
    for (const op of ops) {
      switch (op.op) {
        case "reset":
          this.info = op.conversation;
          this.nodes = new Map(op.nodes.map((node) => [node.id, node]));
          this.choices = new Map(op.choices.map((choice) => [choice.parent_id ?? "", choice.child_id]));
          this.#choosing.clear();
          break;
        case "node":
          this.#store(op.node);
          break;
        case "remove":
          for (const id of op.node_ids) this.nodes.delete(id);
          break;
        case "choose":
          this.#show(op, version);
          break;
        case "conversation":
          this.info = op.conversation;
      }
    }
    this.version = version;
    this.#children = this.#path = null;
    this.#emit("tree");
  }

  #store(node) {
    const before = this.nodes.get(node.id);
    this.nodes.set(node.id, node);
    this.#settle(node.id);
    if (before && before.text !== node.text && !this.live.has(node.id)) this.#emit("text", { nodeId: node.id, added: null });
  }

  /** Once a run has ended and the stored node with it, the stored text counts. */
  #settle(nodeId) {
    const sample = this.live.get(nodeId);
    const node = this.nodes.get(nodeId);
    if (!sample?.done || !node || node.status === "streaming") return;
    this.live.delete(nodeId);
    if (node.text !== sample.text) this.#emit("text", { nodeId, added: null });
  }

  #created(created) {
    if (this.runs.has(created.run_id)) return;
    const samples = created.node_ids.map((nodeId) => ({
      nodeId,
      text: this.nodes.get(nodeId)?.text ?? "",
      numTokens: 0,
      sumLogprob: null,
      startedAt: performance.now(),
      done: null,
    }));
    this.runs.set(created.run_id, { created, samples, done: null });
    for (const sample of samples) this.live.set(sample.nodeId, sample);
    this.#emit("run", { runId: created.run_id });
  }

  #run(run, message) {
    const runId = run.created.run_id;
    switch (message.type) {
      case "run.snapshot":
        for (const view of message.samples) this.#replace(run.samples[view.sample], view);
        this.#emit("run", { runId });
        break;
      case "run.delta":
        for (const [index, text, numTokens, logprob] of message.d) this.#append(run.samples[index], text, numTokens, logprob);
        break;
      case "sample.done":
        run.samples[message.sample].done = message;
        this.#settle(run.samples[message.sample].nodeId);
        this.#emit("run", { runId });
        break;
      case "run.done":
        run.done = message;
        for (const sample of run.samples) {
          sample.done ??= { finish_reason: message.status === "complete" ? "stop" : "error" };
          this.#settle(sample.nodeId);
        }
        this.#emit("run", { runId });
    }
  }

  #replace(sample, view) {
    const isNew = view.text !== sample.text;
    sample.text = view.text;
    sample.numTokens = view.num_tokens;
    if (ENDED.has(view.finish_reason)) sample.done = view;
    if (isNew) this.#emit("text", { nodeId: sample.nodeId, added: null });
    this.#settle(sample.nodeId);
  }

  #append(sample, text, numTokens, logprob) {
    sample.text += text;
    sample.numTokens += numTokens;
    if (logprob !== undefined) sample.sumLogprob = (sample.sumLogprob ?? 0) + logprob;
    this.#emit("text", { nodeId: sample.nodeId, added: text });
  }

  #emit(type, detail = {}) {
    if (type === "tree") this.#path = null;
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}
