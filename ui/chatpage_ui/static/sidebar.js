/**
 * The sidebar: conversations by age, and what is done with them.
 *
 * Invariant: every change goes to the server first and is read back from there, here and in the other tabs; what is shown ahead
 * of the answer is taken back if the answer is an error.
 */

import { patch, pathOf, post, remove } from "./api.js";
import { debounce, h, iconButton } from "./dom.js";
import { ConversationList, groupOf, titleOf } from "./conversation_list.js";
import { exportAll, exportConversation, Importer } from "./sidebar_files.js";
import { SidebarRow } from "./sidebar_row.js";
import { SidebarSearch } from "./sidebar_search.js";

const REFRESH_MS = 400;
const FOCUS_PAUSE_MS = 2_000;

/** Fill the place of the sidebar. */
export function mountSidebar(host, app) {
  return new Sidebar(host, app);
}

class Sidebar {
  #rows = new Map(); // conversation id -> SidebarRow
  #sections = new Map(); // name of a group -> {section, list}
  #reachable = null; // id of the row that Tab reaches
  #read = 0;
  #followed = null;

  constructor(host, app) {
    this.app = app;
    this.list = new ConversationList();
    this.search = new SidebarSearch(app);
    this.importer = new Importer(app, host);
    this.refresh = debounce(() => this.#reload(), REFRESH_MS);
    this.#build(host);
    this.list.addEventListener("change", () => this.#show());
    this.search.addEventListener("toggle", () => this.#toggleSearch());
    app.addEventListener("list", () => this.refresh());
    app.addEventListener("open", () => this.#opened());
    addEventListener("focus", () => performance.now() - this.#read > FOCUS_PAUSE_MS && this.#reload());
    this.#opened();
    this.#reload();
  }

  // -- what there is -------------------------------------------------------------------------------------------------

  #build(host) {
    this.chips = h("div", { class: "cp-tag-filter", role: "group", "aria-label": "Only with the tag", hidden: true });
    this.rows = h(
      "div",
      { class: "cp-rows", onkeydown: (event) => this.#key(event), onfocusin: (event) => this.#reach(event.target) },
    );
    this.note = h("p", { class: "cp-side-note", role: "status", hidden: true });
    this.end = h("div", { class: "cp-rows-end" });
    this.scroller = h("div", { class: "cp-side-scroll" }, this.rows, this.note, this.end);
    const fresh = iconButton(
      "plus",
      "New conversation",
      () => this.app.openConversation(null),
      { text: "New conversation", class: "cp-side-new" },
    );
    const close = iconButton("left", "Close the conversations", () => this.#uncover(), { class: "cp-side-close" });
    this.deleted = iconButton(
      "trash",
      "Deleted conversations",
      () => this.#toggleDeleted(),
      { text: "Deleted", class: "cp-side-action", "aria-pressed": "false" },
    );
    const saveAll = iconButton(
      "download",
      "Export all conversations",
      exportAll,
      { text: "Export all", class: "cp-side-action" },
    );
    this.nav = h("nav", { class: "cp-side-nav", "aria-label": "Conversations" }, this.chips, this.scroller);
    host.classList.add("cp-side");
    host.replaceChildren(
      h("div", { class: "cp-side-top" }, h("div", { class: "cp-side-line" }, close, fresh), this.search.element),
      this.nav,
      this.search.results,
      this.importer.report,
      h("div", { class: "cp-side-foot" }, this.importer.button, saveAll, this.deleted),
      this.importer.input,
      this.importer.hint,
    );
    const atEnd = (entries) => entries.at(-1).isIntersecting && this.#more();
    new IntersectionObserver(atEnd, { root: this.scroller, rootMargin: "300px" }).observe(this.end);
  }

  /** On a narrow page Gradio's sidebar covers the conversation, and its own button. */
  #uncover() {
    this.nav.closest(".sidebar.open")?.querySelector(".toggle-button")?.click();
  }

  #toggleSearch() {
    this.nav.hidden = this.search.isActive;
  }

  #toggleDeleted() {
    const showsDeleted = !this.list.showsDeleted;
    this.deleted.setAttribute("aria-pressed", String(showsDeleted));
    this.search.field.value && this.search.clear();
    this.#try(() => this.list.show({ showsDeleted }));
  }

  #toggleTag(tag) {
    this.deleted.setAttribute("aria-pressed", "false");
    this.#try(() => this.list.show({ tag: tag === this.list.tag ? null : tag }));
  }

  // -- keeping it fresh ----------------------------------------------------------------------------------------------

  async #try(work) {
    try {
      return await work();
    } catch (error) {
      this.app.fail(error);
      return null;
    }
  }

  #reload() {
    this.#read = performance.now();
    return this.#try(() => this.list.reload());
  }

  async #more() {
    await this.#try(() => this.list.more());
  }

  /** Another conversation is open: mark it, and listen to its title and its runs. */
  #opened() {
    const { conversation } = this.app;
    if (this.#followed !== conversation) {
      this.#followed = conversation;
      conversation?.addEventListener("tree", () => conversation === this.#followed && this.#heard(conversation.info));
      conversation?.addEventListener("run", () => conversation === this.#followed && this.#heardRun());
    }
    this.#mark();
    if (conversation && this.list.isLoaded && !this.list.find(conversation.id)) this.refresh();
    if (this.list.find(conversation?.id)) this.#makeReachable(conversation.id);
  }

  #heard(info) {
    const known = info && this.list.find(info.id);
    const shown = ({ title, is_pinned, tags }) => JSON.stringify([title, is_pinned, tags]);
    if (known && shown(known) !== shown(info)) {
      this.list.put({ ...known, title: info.title, is_pinned: info.is_pinned, tags: info.tags });
      this.refresh();
    }
  }

  #heardRun() {
    this.#mark();
    this.refresh(); // what was written in moves up
  }

  // -- showing it ----------------------------------------------------------------------------------------------------

  #show() {
    this.#showChips();
    const groups = new Map();
    for (const conversation of this.list.conversations) {
      const name = this.list.showsDeleted ? "Deleted" : groupOf(conversation);
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(this.#row(conversation).element);
    }
    const listed = new Set(this.list.conversations.map(({ id }) => id));
    for (const id of this.#rows.keys()) if (!listed.has(id)) this.#rows.delete(id);
    const focused = document.activeElement;
    arrange(this.rows, [...groups.keys()].map((name) => this.#section(name).section));
    for (const [name, rows] of groups) arrange(this.#section(name).list, rows);
    if (focused !== document.activeElement && focused?.isConnected && this.rows.contains(focused)) focused.focus();
    if (!listed.has(this.#reachable)) this.#makeReachable(this.list.conversations[0]?.id ?? null);
    this.#showNote();
    this.#mark();
  }

  #row(conversation) {
    let row = this.#rows.get(conversation.id);
    if (!row) {
      row = new SidebarRow(conversation, this.#actions());
      this.#rows.set(conversation.id, row);
    }
    row.update(conversation);
    row.setReachable(conversation.id === this.#reachable);
    return row;
  }

  #section(name) {
    if (!this.#sections.has(name)) {
      const list = h("ul", { class: "cp-row-list" });
      const section = h(
        "section",
        { class: "cp-row-group", "aria-label": name },
        h("h3", { class: "cp-row-heading" }, name),
        list,
      );
      this.#sections.set(name, { section, list });
    }
    return this.#sections.get(name);
  }

  #showChips() {
    const { tags, tag } = this.list;
    this.chips.hidden = !tags.length || this.list.showsDeleted;
    const chips = tags.map(({ name, num_conversations }) => {
      const number = h("span", { class: "cp-chip-count" }, String(num_conversations));
      return h(
        "button",
        { type: "button", class: "cp-chip", "aria-pressed": String(name === tag), onclick: () => this.#toggleTag(name) },
        name,
        number,
      );
    });
    const focused = [...this.chips.children].indexOf(document.activeElement);
    this.chips.replaceChildren(...chips);
    if (focused >= 0) chips[Math.min(focused, chips.length - 1)]?.focus();
  }

  #showNote() {
    const { list } = this;
    const isEmpty = !list.conversations.length;
    this.note.hidden = !isEmpty;
    if (!isEmpty) return;
    if (!list.isLoaded) this.note.textContent = "Loading…";
    else if (list.showsDeleted) this.note.textContent = "Nothing is deleted.";
    else this.note.textContent = list.tag === null ? "No conversations yet." : `No conversation has the tag “${list.tag}”.`;
  }

  #mark() {
    const open = this.app.conversation;
    for (const [id, row] of this.#rows) row.mark(id === open?.id, Boolean(open?.liveRuns.length));
  }

  // -- keys ----------------------------------------------------------------------------------------------------------

  #makeReachable(id) {
    this.#rows.get(this.#reachable)?.setReachable(false);
    this.#reachable = id;
    this.#rows.get(id)?.setReachable(true);
  }

  #reach(target) {
    const id = target.closest(".cp-row")?.dataset.id;
    if (id) this.#makeReachable(id);
  }

  #key(event) {
    const element = event.target.closest(".cp-row");
    const row = element && this.#rows.get(element.dataset.id);
    if (!row || row.isEditing || event.target.closest("[popover]")) return;
    const elements = [...this.rows.querySelectorAll(".cp-row")];
    const at = elements.indexOf(element);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: elements.length - 1 }[event.key];
    if (to !== undefined) {
      if (to < 0) this.search.focus();
      else this.#rows.get(elements[Math.min(to, elements.length - 1)].dataset.id).focus();
    } else if (event.key === "F2") row.rename();
    else if (event.key === "Delete" && !row.conversation.is_deleted) this.#remove(row.conversation);
    else if (event.key === "ArrowRight" && event.target === row.button) row.more.focus();
    else if (event.key === "ArrowLeft" && event.target === row.more) row.focus();
    else return;
    event.preventDefault();
  }

  // -- what is done with a conversation ------------------------------------------------------------------------------

  #actions() {
    return {
      open: (conversation) => this.app.openConversation(conversation.id),
      rename: (conversation, title) => this.#change(conversation, { title }),
      pin: (conversation) => this.#change(conversation, { is_pinned: !conversation.is_pinned }),
      tag: (conversation, tags) => this.#change(conversation, { tags }),
      export: (conversation, format) => exportConversation(this.app, conversation, format),
      remove: (conversation) => this.#remove(conversation),
      restore: (conversation) => this.#restore(conversation),
      allTags: () => this.list.tags.map(({ name }) => name),
    };
  }

  async #change(conversation, change) {
    this.list.put({ ...this.list.find(conversation.id), ...change });
    const done = await this.#try(() => patch(pathOf(conversation.id), change));
    this.app.listChanged();
    return done !== null;
  }

  async #remove(conversation) {
    const { id } = conversation;
    const wasOpen = this.app.conversation?.id === id;
    const next = this.#neighbour(id);
    this.list.drop(id);
    this.#rows.get(next)?.focus();
    const done = await this.#try(() => remove(pathOf(id)));
    if (done) {
      if (wasOpen) this.app.openConversation(null);
      this.app.toast(
        `Deleted “${titleOf(conversation)}”`,
        { label: "Undo", action: () => this.#restore(conversation, wasOpen) },
      );
    }
    this.app.listChanged();
  }

  async #restore(conversation, isOpened = false) {
    const done = await this.#try(() => post(pathOf(conversation.id, null, "restore")));
    if (done && this.list.showsDeleted) this.list.drop(conversation.id);
    if (done && isOpened) this.app.openConversation(conversation.id);
    else if (done) this.app.toast(`Restored “${titleOf(conversation)}”`);
    this.app.listChanged();
  }

  #neighbour(id) {
    const ids = this.list.conversations.map((conversation) => conversation.id);
    const at = ids.indexOf(id);
    return this.#rows.get(id)?.element.contains(document.activeElement) ? (ids[at + 1] ?? ids[at - 1] ?? null) : null;
  }
}

/** Give an element these children in this order, and leave alone what is in its place. */
function arrange(parent, children) {
  children.forEach((child, i) => parent.children[i] !== child && parent.insertBefore(child, parent.children[i] ?? null));
  while (parent.children.length > children.length) parent.lastElementChild.remove();
}
