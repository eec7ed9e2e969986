/**
 * What the page can do, and which conversation is open.
 *
 * Invariants: the server decides: an action asks, and what follows is what its messages say. Nothing typed is given up before the
 * server has stored it. `comparing` is the parent whose children stand side by side ("" for the root), or null.
 *
 * Events: "open" (another conversation), "list" (the list of conversations changed), "hover" (detail: {nodeId}), "compare".
 */

import { ApiError, patch, pathOf, post, remove } from "./api.js";
import { keyOf } from "./connection.js";
import { Conversation } from "./conversation.js";
import { Costs } from "./cost.js";
import { bytes, count, h, memory, newId } from "./dom.js";
import { popover } from "./feedback.js";
import { Renderer } from "./markdown.js";
import { Params } from "./params.js";

const REPEAT_MS = 400; // within this, the same again is the other half of a double click
const SPARE_BYTES = 16_384; // of a message, for all that is not its text
const SHARE_KEPT = 1 / 3; // of a reply, when more like it are asked for

export class App extends EventTarget {
  #starting = new Map(); // request as JSON -> promise of its run, until it has started
  #joined = null; // run.created of several samples whose messages have not come yet
  #opened = null; // {resolve, reject} of the conversation that is being opened

  constructor(connection, feedback) {
    super();
    this.connection = connection;
    this.feedback = feedback;
    this.conversation = null;
    this.comparing = null;
    this.highlights = new Set();
    this.renderer = new Renderer();
    this.params = new Params((params) => this.#saveParams(params));
    this.costs = new Costs(this);
    this.channel = new BroadcastChannel("chatpage");
    this.channel.onmessage = () => this.dispatchEvent(new Event("list"));
    connection.addEventListener("message", ({ detail }) => this.#take(detail));
  }

  toast(text, options) {
    this.feedback.toast(text, options);
  }

  fail(error) {
    this.feedback.fail(error);
  }

  confirm(text, label) {
    return this.feedback.confirm(text, label);
  }

  announce(text) {
    this.feedback.announce(text);
  }

  // -- which conversation --------------------------------------------------------------------------------------------

  /** Open a conversation, at a node if one is named; null: a new one, which is stored with its first message. */
  async openConversation(id, { nodeId = null, highlights = [] } = {}) {
    this.highlights = new Set(highlights);
    if (id !== null && this.conversation?.id === id) {
      if (nodeId) this.select(nodeId);
      return;
    }
    this.#leave();
    this.conversation = id === null ? null : new Conversation(id);
    this.comparing = id === null ? null : memory.get(`compare.${id}`);
    memory.set("last", id);
    const hash = id === null ? "" : `#c=${id}`;
    if (location.hash !== hash) history.pushState(null, "", hash || location.pathname + location.search);
    if (id === null) {
      this.params.useRemembered();
      this.dispatchEvent(new Event("open"));
      return;
    }
    const arrived = new Promise((resolve, reject) => (this.#opened = { resolve, reject }));
    this.connection.follow({ conversation_id: id });
    this.dispatchEvent(new Event("open"));
    try {
      await arrived;
    } catch (error) {
      if (error.code !== "replaced") this.fail(error);
      return;
    }
    this.params.use(this.conversation.info.params);
    if (nodeId) this.select(nodeId);
  }

  #leave() {
    this.params.flush();
    this.#joined = null;
    this.#opened?.reject(new ApiError(0, { code: "replaced" }));
    this.#opened = null;
    if (!this.conversation) return;
    this.connection.unfollow({ conversation_id: this.conversation.id });
    for (const run of this.conversation.liveRuns) this.connection.unfollow({ run_id: run.created.run_id });
  }

  #take(message) {
    const { conversation } = this;
    if (!conversation) return;
    if (message.type === "error") {
      if (message.ref === keyOf({ conversation_id: conversation.id })) this.#lost(message);
      else if (!message.ref) this.fail(new ApiError(0, message));
      return;
    }
    const title = conversation.info?.title;
    const isNew = message.type === "run.created" && !conversation.runs.has(message.run_id);
    conversation.take(message);
    if (message.type === "run.created" && message.conversation_id === conversation.id) {
      if (isNew && message.node_ids.length > 1) this.#joined = message;
      if (!this.connection.isFollowing({ run_id: message.run_id })) this.connection.follow({ run_id: message.run_id });
    }
    if (message.type === "tree.patch" && message.conversation_id === conversation.id) {
      this.#opened?.resolve();
      this.#opened = null;
      if (conversation.info?.title !== title) this.listChanged();
      this.#endLostComparison();
    }
    this.#join();
    if (message.type === "run.done" && message.error) this.fail(new ApiError(0, message.error));
    if (message.type === "run.done" && !conversation.liveRuns.length) this.announce("The answer is complete.");
  }

  /** Show several samples side by side, whoever asked for them, if they are written where one is reading. */
  #join() {
    const { conversation } = this;
    const [first] = this.#joined?.node_ids ?? [];
    if (!conversation.nodes.has(first)) return;
    this.#joined = null;
    const parent = conversation.parentOf(first);
    const isSeen = parent === null || conversation.activePath().some((node) => node.id === parent);
    if (this.comparing === null && isSeen) this.compare(parent ?? "");
  }

  /** End a comparison whose versions were all deleted, or are on a branch that is not shown any more. */
  #endLostComparison() {
    if (this.comparing === null) return;
    const { conversation } = this;
    const isShown = conversation.activePath().some((node) => (conversation.parentOf(node.id) ?? "") === this.comparing);
    if (!isShown) this.compare(null);
  }

  #lost(error) {
    if (this.#opened) this.#opened.reject(new ApiError(0, error));
    this.#opened = null;
    this.openConversation(null);
  }

  listChanged() {
    this.dispatchEvent(new Event("list"));
    this.channel.postMessage("list");
  }

  /** Do something on the server; an error is shown, and thrown on. */
  async #try(work) {
    try {
      return await work();
    } catch (error) {
      this.fail(error);
      throw error;
    }
  }

  #told(error) {
    this.fail(error);
    return error;
  }

  #saveParams(params) {
    const { conversation } = this;
    if (!conversation?.info) return;
    patch(pathOf(conversation.id), { params }).catch((error) => this.fail(error));
  }

  // -- looking -------------------------------------------------------------------------------------------------------

  /** Show the branch of a node. */
  select(nodeId, { isScrolled = true } = {}) {
    const { conversation } = this;
    if (!conversation?.nodes.has(nodeId)) return;
    if (this.comparing !== null) this.compare(null);
    const answer = post(pathOf(conversation.id, nodeId, "select"));
    conversation.choose(nodeId, answer);
    answer.catch((error) => this.fail(error));
    if (isScrolled) this.thread?.show(nodeId);
  }

  /** Show the children of a node ("" for the root) side by side; null ends it. */
  compare(parentId) {
    this.comparing = parentId;
    if (this.conversation) memory.set(`compare.${this.conversation.id}`, this.comparing);
    this.dispatchEvent(new Event("compare"));
  }

  /** Show the versions of a node side by side. */
  compareSiblings(nodeId) {
    this.compare(this.conversation.parentOf(nodeId) ?? "");
  }

  /** Take one of the versions that stand side by side, and go on with it. */
  use(nodeId) {
    this.compare(null);
    this.select(nodeId);
    this.composer?.focus();
  }

  hover(nodeId) {
    this.dispatchEvent(new CustomEvent("hover", { detail: { nodeId } }));
  }

  light(nodeIds) {
    this.thread?.light(nodeIds);
  }

  isLast(nodeId) {
    return this.conversation.activeLeaf?.id === nodeId;
  }

  /** Whether the prompt of a reply opened its reasoning, so that the reply itself only closes it. */
  opensReasoning(nodeId) {
    const { opens_reasoning: opens, name } = this.connection.welcome?.model ?? {};
    const node = this.conversation.nodes.get(nodeId);
    return Boolean(opens) && node?.role === "assistant" && node.model === name;
  }

  // -- runs ----------------------------------------------------------------------------------------------------------

  /** Complete the request of a run. */
  requestOf(request) {
    return { conversation_id: this.conversation.id, n: 1, ...request, params: { ...this.params.request, ...request.params } };
  }

  /** Whether a text is more than a message may have. */
  isTooLong(text) {
    const { max_input: most, max_message_bytes: size } = this.connection.welcome?.limits ?? {};
    return text.length > most || (6 * text.length > size - SPARE_BYTES && new Blob([JSON.stringify(text)]).size > size - SPARE_BYTES);
  }

  /** Start a run; with several samples they stand side by side. */
  async run(request) {
    const { conversation } = this;
    const text = (request.input ?? "") + (request.prefill ?? "");
    if (this.isTooLong(text)) {
      const { max_input: most, max_message_bytes: size } = this.connection.welcome.limits;
      const limit = text.length > most ? `${count(text.length)} characters, of at most ${count(most)}` : `more than ${bytes(size)}`;
      throw this.#told(new Error(`This is too long for one message: ${limit}. Send it in parts.`));
    }
    const key = JSON.stringify(request);
    if (this.#starting.has(key)) return this.#starting.get(key); // a double click is one click
    const message = { type: "run.create", client_msg_id: newId(), ...this.requestOf(request) };
    const starting = this.#try(() => this.connection.ask(message));
    this.#starting.set(key, starting);
    const forget = () => setTimeout(() => this.#starting.delete(key), REPEAT_MS);
    starting.then(forget, forget);
    const created = await starting;
    if (conversation === this.conversation) {
      if (created.node_ids.length > 1) this.compareSiblings(created.node_ids[0]);
      else if (this.comparing !== null && created.input_node_id) this.compare(null);
    }
    return created;
  }

  /** Where the next message goes: below the leaf that is shown. */
  parentForNext() {
    return this.conversation?.activeLeaf?.id ?? null;
  }

  nextRequest(input) {
    const parent = this.parentForNext();
    return { kind: "reply", input, ...(parent ? { parent_id: parent } : {}) };
  }

  /** Return how many tokens of the path have been through the model, as far as that is known. */
  knownTokens() {
    const { usage, num_tokens: size, role } = this.conversation?.activeLeaf ?? {};
    return role === "assistant" && Number.isFinite(usage?.prompt_tokens) ? usage.prompt_tokens + size : 0;
  }

  /** Send a message, to a new conversation if none is open. Returns when the server has stored it. */
  async send(text, { prefill = "" } = {}) {
    if (!this.conversation) await this.#try(() => this.#begin());
    const request = { ...this.nextRequest(text), n: this.params.n, ...(prefill ? { prefill } : {}) };
    const created = await this.run(request);
    this.thread?.toEnd();
    return created;
  }

  async #begin() {
    const system = this.params.system.trim();
    const made = await post("/api/conversations", { params: this.params.request, ...(system ? { system_prompt: system } : {}) });
    await this.openConversation(made.id);
    this.listChanged();
  }

  regenerate(nodeId, n = 1) {
    return this.run({ kind: "regenerate", parent_id: nodeId, n }).catch(() => null);
  }

  continue(nodeId) {
    return this.run({ kind: "continue", parent_id: nodeId }).catch(() => null);
  }

  /** Keep the beginning of a reply and write others that go on from it. */
  moreLike(nodeId, n) {
    const size = this.conversation.nodes.get(nodeId).num_tokens;
    const kept = Math.max(1, Math.floor(size * SHARE_KEPT));
    return this.run({ kind: "fork", parent_id: nodeId, branch_at_token: Math.min(kept, size), n })
      .then((created) => {
        this.compareSiblings(nodeId);
        this.thread?.showVersion(created.node_ids[0]); // the newest come last, so that no number changes
      })
      .catch(() => null);
  }

  /** Stop what writes a node; its text stays. */
  stop(nodeId) {
    const found = this.conversation.runOf(nodeId);
    if (!found || found.run.done) return;
    this.connection.tell({ type: "run.cancel", run_id: found.run.created.run_id, sample: found.sample });
  }

  stopAll() {
    const runs = this.conversation?.liveRuns ?? [];
    for (const run of runs) this.connection.tell({ type: "run.cancel", run_id: run.created.run_id });
    if (runs.length && !this.connection.isOpen) this.toast("There is no connection: the answer goes on until it is back.", { isBad: true });
  }

  // -- changes -------------------------------------------------------------------------------------------------------

  answerEdited(nodeId, text) {
    const parent = this.conversation.parentOf(nodeId);
    return this.run({ kind: "reply", input: text, n: this.params.n, ...(parent ? { parent_id: parent } : {}) });
  }

  continueEdited(nodeId, text) {
    return this.run({ kind: "regenerate", parent_id: nodeId, prefill: text });
  }

  saveEdited(nodeId, text) {
    return this.#try(() => post(pathOf(this.conversation.id, nodeId, "edit"), { text }));
  }

  keep(nodeId, isKept) {
    return this.#try(() => post(pathOf(this.conversation.id, nodeId, "keep"), { keep: isKept })).catch(() => null);
  }

  /** Delete a message and what hangs below it, with a way back. */
  remove(nodeId) {
    return this.removeAll([nodeId]);
  }

  async removeAll(nodeIds) {
    const { id } = this.conversation;
    try {
      for (const nodeId of nodeIds) await this.#try(() => remove(pathOf(id, nodeId)));
    } catch {
      return;
    }
    const undo = async () => {
      for (const nodeId of nodeIds) await this.#try(() => post(pathOf(id, nodeId, "restore"))).catch(() => null);
    };
    const what = nodeIds.length === 1 ? "Deleted the message and what follows it." : `Deleted ${nodeIds.length} messages.`;
    this.toast(what, { label: "Undo", action: undo });
  }

  rename(title) {
    if (!this.conversation) return;
    this.#try(() => patch(pathOf(this.conversation.id), { title }))
      .then(() => this.listChanged())
      .catch(() => null);
  }

  /** Offer to fork: this path alone, or everything. */
  forkMenu(nodeId, anchor) {
    const fork = async (body, panel) => {
      panel.hidePopover();
      const made = await this.#try(() => post(pathOf(this.conversation.id, null, "fork"), body)).catch(() => null);
      if (!made) return;
      this.listChanged();
      await this.openConversation(made.id);
      this.toast("Forked: the messages and their memory are shared, nothing was copied.");
    };
    const button = (label, body) => h("button", { type: "button", class: "cp-menu-item", onclick: () => fork(body, panel) }, label);
    const title = `${this.conversation.info?.title || "Conversation"} (fork)`;
    const panel = popover(
      anchor,
      "Fork to a new conversation",
      button("This path, up to here", { node_id: nodeId, title }),
      button("With all branches", { title }),
    );
  }

  /** What an empty conversation shows. */
  welcome() {
        const ideas = ["Write the first line of a story about a lighthouse.", "Name three uses for a paper clip.", "Explain a tree to a fish."];
    return [
      h("h1", {}, "What shall we explore?"),
      h("p", {}, "Every answer is a branch. Ask once, then let 2, 4 or 8 answers write themselves side by side, from the same memory."),
      h(
        "div",
        { class: "cp-ideas" },
        ...ideas.map((idea) =>
          h("button", { type: "button", class: "cp-idea", onclick: () => this.composer.fill(idea) }, idea),
        ),
      ),
    ];
  }
}
