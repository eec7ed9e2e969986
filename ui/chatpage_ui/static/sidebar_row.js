/**
 * One conversation in the sidebar: its title, its menu, and the editors of title and tags.
 *
 * Invariant: an element stays the same as long as its conversation is listed, so focus, an open menu and a half-written title
 * survive every refresh of the list.
 */

import { h, icon, iconButton } from "./dom.js";
import { popover } from "./feedback.js";
import { titleOf } from "./conversation_list.js";
import { openMenu } from "./menu.js";

const MAX_TITLE = 1000;
const MAX_TAG = 100;
export const FORMATS = [
  ["chatpage", "chatpage"],
  ["markdown", "Markdown"],
  ["chatgpt", "ChatGPT"],
  ["sharegpt", "ShareGPT"],
  ["openwebui", "Open WebUI"],
  ["sillytavern", "SillyTavern"],
];

export class SidebarRow {
  #shown = null; // what the element was made from
  #input = null; // while the title is edited

  /**
   * @param {object} conversation
   * @param {{open, rename, pin, tag, export, remove, restore, allTags}} actions what can be done with a conversation
   */
  constructor(conversation, actions) {
    this.conversation = conversation;
    this.actions = actions;
    this.title = h("span", { class: "cp-row-title", dir: "auto" });
    this.tags = h("span", { class: "cp-row-tags" });
    this.pin = h("span", { class: "cp-row-pin", title: "Pinned" }, icon("pin"));
    this.button = h(
      "button",
      { type: "button", class: "cp-row-open", tabIndex: -1, onclick: () => this.#press() },
      h("span", { class: "cp-row-live", "aria-hidden": "true" }),
      h("span", { class: "cp-row-text" }, this.title, this.tags),
      this.pin,
    );
    this.more = iconButton(
      "more",
      "",
      () => this.openMenu(),
      { class: "icon-button cp-row-more", "aria-haspopup": "menu", tabIndex: -1 },
    );
    this.element = h(
      "li",
      { class: "cp-row", "data-id": conversation.id, oncontextmenu: (event) => this.#context(event) },
      this.button,
      this.more,
    );
    this.update(conversation);
  }

  get isEditing() {
    return this.#input !== null;
  }

  /** Show what the conversation is now. */
  update(conversation) {
    this.conversation = conversation;
    const shown = JSON.stringify([conversation.title, conversation.tags, conversation.is_pinned, conversation.is_deleted]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    this.title.textContent = titleOf(conversation);
    this.title.classList.toggle("is-empty", !conversation.title.trim());
    this.button.title = titleOf(conversation);
    this.pin.hidden = !conversation.is_pinned || Boolean(conversation.is_deleted);
    this.tags.hidden = !conversation.tags.length;
    this.tags.replaceChildren(...conversation.tags.map((tag) => h("span", { class: "cp-row-tag" }, tag)));
    const name = `Actions for ${titleOf(conversation)}`;
    this.more.title = "Actions";
    this.more.setAttribute("aria-label", name);
    this.element.classList.toggle("is-deleted", Boolean(conversation.is_deleted));
  }

  /** Mark it as the one that is open, and whether something is written in it. */
  mark(isOpen, isWriting) {
    if (isOpen) this.button.setAttribute("aria-current", "page");
    else this.button.removeAttribute("aria-current");
    this.element.classList.toggle("is-open", isOpen);
    this.element.classList.toggle("is-writing", isOpen && isWriting);
  }

  setReachable(isReachable) {
    this.button.tabIndex = this.more.tabIndex = isReachable ? 0 : -1;
  }

  focus() {
    this.button.focus();
  }

  #press() {
    if (this.conversation.is_deleted) this.openMenu(this.button);
    else this.actions.open(this.conversation);
  }

  #context(event) {
    if (this.isEditing) return;
    event.preventDefault();
    this.openMenu();
  }

  /** Open the menu. */
  openMenu(anchor = this.more) {
    const { conversation, actions } = this;
    if (conversation.is_deleted) {
      openMenu(
        anchor,
        "Deleted conversation",
        [{ label: "Restore", icon: "redo", action: () => actions.restore(conversation) }],
      );
      return;
    }
    openMenu(anchor, `Actions for ${titleOf(conversation)}`, [
      { label: "Rename", icon: "edit", hint: "F2", action: () => this.rename() },
      { label: conversation.is_pinned ? "Unpin" : "Pin", icon: "pin", action: () => actions.pin(conversation) },
      { label: "Tags", icon: "tag", action: () => this.editTags() },
      {
        label: "Export as",
        icon: "download",
        items: FORMATS.map(([format, label]) => ({ label, action: () => actions.export(conversation, format) })),
      },
      { label: "Delete", icon: "trash", hint: "Del", isBad: true, action: () => actions.remove(conversation) },
    ]);
  }

  /** Edit the title in its place: Enter or leaving keeps it, Escape does not. */
  rename() {
    if (this.isEditing || this.conversation.is_deleted) return;
    const before = this.conversation.title;
    const input = h("input", {
      class: "cp-row-input",
      value: before,
      "aria-label": "Title",
      dir: "auto",
      maxlength: String(MAX_TITLE),
      onblur: () => end(true),
      onkeydown: (event) => {
        event.stopPropagation();
        if (event.isComposing) return;
        if (event.key !== "Enter" && event.key !== "Escape") return;
        event.preventDefault(); // else the key presses what gets the focus next
        end(event.key === "Enter", true);
      },
    });
    const end = (isKept, hasFocus = false) => {
      if (this.#input !== input) return;
      this.#input = null;
      input.replaceWith(this.button);
      this.more.hidden = false;
      if (hasFocus) this.focus();
      const title = input.value.trim();
      if (isKept && title !== before) this.actions.rename(this.conversation, title);
    };
    this.#input = input;
    this.more.hidden = true;
    this.button.replaceWith(input);
    input.focus();
    input.select();
  }

  /** Edit the tags; each change is kept at once. */
  editTags() {
    const { actions } = this;
    const listId = `cp-tags-${this.conversation.id}`;
    const chips = h("div", { class: "cp-tag-chips" });
    const input = h(
      "input",
      { class: "cp-field", placeholder: "Add a tag", "aria-label": "Add a tag", list: listId, maxlength: String(MAX_TAG) },
    );
    const known = h("datalist", { id: listId }, ...actions.allTags().map((tag) => h("option", { value: tag })));
    let tags = [...this.conversation.tags];
    const show = () => chips.replaceChildren(
      ...tags.map((tag) => removable(tag, () => set(tags.filter((other) => other !== tag)))),
    );
    const set = async (changed) => {
      const before = tags;
      tags = changed;
      show();
      input.focus();
      if (await actions.tag(this.conversation, changed)) return;
      tags = before; // the server has said why
      show();
    };
    const add = () => {
      const added = input.value.split(",").map((tag) => tag.trim()).filter((tag) => tag && !tags.includes(tag));
      input.value = "";
      if (added.length) set([...new Set([...tags, ...added])]);
    };
    input.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.isComposing) return;
      if (event.key === "Enter" || event.key === ",") {
        event.preventDefault();
        add();
      } else if (event.key === "Backspace" && !input.value && tags.length) set(tags.slice(0, -1));
    });
    show();
    const panel = popover(
      this.more,
      "Tags",
      h("div", { class: "cp-tag-editor" }, h("h3", { class: "cp-popover-title" }, "Tags"), chips, input, known),
    );
    panel.addEventListener("beforetoggle", (event) => event.newState === "closed" && add());
    input.focus();
  }
}

function removable(tag, remove) {
  return h(
    "span",
    { class: "cp-chip" },
    h("span", {}, tag),
    iconButton("close", `Remove the tag ${tag}`, remove, { class: "cp-chip-close" }),
  );
}
