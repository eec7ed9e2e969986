/**
 * The conversations of the sidebar: pages of a list on the server.
 *
 * Invariant: `conversations` is what the server said last, in its order, each once. An answer that was overtaken by a newer
 * question is dropped, and one that failed changes nothing.
 *
 * Events: "change".
 */

import { get } from "./api.js";

const PAGE = 60;
const MOST = 1000; // that the server lists at once
const DAY_MS = 86_400_000;

export class ConversationList extends EventTarget {
  #asked = 0;
  #isBusy = false;

  constructor() {
    super();
    this.conversations = [];
    this.tags = [];
    this.tag = null;
    this.showsDeleted = false;
    this.isLoaded = false;
    this.isWhole = false;
  }

  /** Show others: those with a tag, or the deleted ones. */
  async show({ tag = null, showsDeleted = false }) {
    Object.assign(this, { tag, showsDeleted, conversations: [], isLoaded: false, isWhole: false });
    this.#emit();
    await this.reload();
  }

  /** Read again as many as are known, and the tags. */
  async reload() {
    const ask = ++this.#asked;
    const wanted = Math.max(PAGE, this.conversations.length);
    const found = [];
    let isWhole = false;
    while (found.length < wanted && !isWhole) {
      const limit = Math.min(MOST, wanted - found.length);
      const page = await this.#page(limit, found.length);
      isWhole = page.length < limit;
      found.push(...page);
    }
    const { tags } = await get("/api/tags");
    if (ask !== this.#asked) return;
    Object.assign(this, { conversations: unique(found), tags, isWhole, isLoaded: true });
    this.#emit();
  }

  /** Read the next page. */
  async more() {
    if (this.isWhole || !this.isLoaded || this.#isBusy) return;
    this.#isBusy = true;
    const ask = this.#asked;
    try {
      const page = await this.#page(PAGE, this.conversations.length);
      if (ask !== this.#asked) return;
      this.conversations = unique([...this.conversations, ...page]);
      this.isWhole = page.length < PAGE;
      this.#emit();
    } finally {
      this.#isBusy = false;
    }
  }

  find(id) {
    return this.conversations.find((conversation) => conversation.id === id) ?? null;
  }

  /** Show a change of one conversation at once. */
  put(conversation) {
    const at = this.conversations.findIndex(({ id }) => id === conversation.id);
    if (at < 0) return;
    this.conversations[at] = conversation;
    this.#emit();
  }

  /** Take one out of the list at once. */
  drop(id) {
    this.conversations = this.conversations.filter((conversation) => conversation.id !== id);
    this.#emit();
  }

  async #page(limit, offset) {
    const query = new URLSearchParams({ limit, offset });
    if (this.tag !== null) query.set("tag", this.tag);
    if (this.showsDeleted) query.set("deleted", "true");
    return (await get(`/api/conversations?${query}`)).conversations;
  }

  #emit() {
    this.dispatchEvent(new Event("change"));
  }
}

function unique(conversations) {
  return [...new Map(conversations.map((conversation) => [conversation.id, conversation])).values()];
}

/** Return the name of the group that a conversation stands in, on the day of `now`. */
export function groupOf(conversation, now = new Date()) {
  if (conversation.is_pinned && !conversation.is_deleted) return "Pinned";
  const when = new Date(conversation.updated_at / 1000);
  const today = new Date(now.getFullYear(), now.getMonth(), now.getDate());
  const numDays = Math.ceil((today - when) / DAY_MS);
  if (numDays <= 0) return "Today";
  if (numDays === 1) return "Yesterday";
  if (numDays <= 7) return "Previous 7 days";
  return when.toLocaleDateString("en", { month: "long", year: "numeric" });
}

export function titleOf(conversation) {
  return conversation.title.trim() || "Untitled";
}
