/**
 * Conversations from and to files.
 *
 * Invariant: every file that was given is accounted for in the report: what it added, or why it added nothing.
 */

import { ApiError, request } from "./api.js";
import { count, h, icon, iconButton } from "./dom.js";
import { titleOf } from "./conversation_list.js";

const SUFFIXES = { markdown: "md", sillytavern: "jsonl" };
const MOST_REASONS = 100;

/** Save one conversation as a file. */
export async function exportConversation(app, conversation, format) {
  try {
    const response = await fetch(`/api/export?${new URLSearchParams({ format, id: conversation.id })}`);
    if (!response.ok) throw new ApiError(response.status, (await response.json()).error);
    const file = await response.blob();
    const isEmpty = file.size < 8 && JSON.parse((await file.text()) || "[]").length === 0;
    if (isEmpty) app.toast("Nothing to export: this format holds accepted replies only, and there are none.");
    else save(URL.createObjectURL(file), `${fileName(titleOf(conversation))}.${SUFFIXES[format] ?? "json"}`);
  } catch (error) {
    app.fail(error);
  }
}

/** Save all conversations as one file, which the browser writes while it comes. */
export function exportAll() {
  save("/api/export?format=chatpage", "conversations.json");
}

function save(url, name) {
  const link = h("a", { href: url, download: name });
  link.click();
  if (url.startsWith("blob:")) setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

function fileName(title) {
  return title.replace(/[\\/:*?"<>|\s\u0000-\u001f]+/g, " ").trim().slice(0, 80) || "conversation";
}

/** Files that come in: by a button, or dropped on the sidebar. */
export class Importer {
  #isBusy = false;

  constructor(app, area) {
    this.app = app;
    this.input = h(
      "input",
      { type: "file", multiple: true, hidden: true, accept: ".json,.jsonl,application/json", onchange: () => this.#picked() },
    );
    this.button = iconButton(
      "upload",
      "Import conversations",
      () => this.input.click(),
      { text: "Import", class: "cp-side-action" },
    );
    this.report = h("section", { class: "cp-import", "aria-label": "Import", hidden: true });
    this.hint = h("div", { class: "cp-drop-hint", "aria-hidden": "true" }, icon("upload"), "Drop files to import them");
    this.#acceptDrops(area);
  }

  #picked() {
    const files = [...this.input.files];
    this.input.value = "";
    this.take(files);
  }

  #acceptDrops(area) {
    let depth = 0;
    const mark = (isOver) => area.classList.toggle("is-dropping", isOver);
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    area.addEventListener("dragenter", (event) => hasFiles(event) && mark(++depth > 0));
    area.addEventListener("dragleave", (event) => hasFiles(event) && mark((depth = Math.max(0, depth - 1)) > 0));
    area.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
    area.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      mark((depth = 0) > 0);
      this.take([...event.dataTransfer.files]);
    });
  }

  /** Import files one after the other, and say what came of it. */
  async take(files) {
    if (!files.length || this.#isBusy) return;
    this.#isBusy = true;
    this.button.disabled = true;
    const total = { ids: [], added: 0, grown: 0, unchanged: 0, skipped: 0, skips: [] };
    for (const [i, file] of files.entries()) {
      this.#say(
        h("span", { class: "cp-spinner", "aria-hidden": "true" }),
        `Importing ${file.name}${files.length > 1 ? ` (${i + 1} of ${files.length})` : ""}…`,
      );
      await this.#one(file, total, files.length > 1);
    }
    this.#isBusy = false;
    this.button.disabled = false;
    this.#show(total);
    this.app.listChanged();
  }

  async #one(file, total, isNamed) {
    const where = (place) => (isNamed ? `${file.name}: ${place}` : place);
    try {
      const result = await request("POST", "/api/import", file);
      total.ids.push(...result.conversation_ids);
      total.added += result.num_added;
      total.grown += result.num_grown;
      total.unchanged += result.num_unchanged;
      total.skipped += result.num_skipped;
      total.skips.push(...result.skips.map((skip) => ({ where: where(skip.where), reason: skip.reason })));
    } catch (error) {
      total.skipped += 1;
      total.skips.push({ where: file.name, reason: error.message });
    }
  }

  #say(...content) {
    this.report.hidden = false;
    this.report.replaceChildren(h("p", { class: "cp-import-line", role: "status" }, ...content));
  }

  #show(total) {
    const numbers = ["added", "grown", "unchanged", "skipped"].map((name) =>
      h(
        "div",
        { class: `cp-import-number ${name === "skipped" && total.skipped ? "is-bad" : ""}` },
        h("b", {}, count(total[name])),
        h("span", {}, name),
      ),
    );
    const reasons = total.skips.slice(0, MOST_REASONS).map(({ where, reason }) => h("li", {}, h("b", {}, where), ` ${reason}`));
    const numMore = total.skipped - reasons.length;
    if (numMore > 0) reasons.push(h("li", {}, `and ${count(numMore)} more`));
    const list = h("ul", { class: "cp-import-skips" }, ...reasons);
    const open = () => this.app.openConversation(total.ids[0]);
    this.report.replaceChildren(
      h(
        "div",
        { class: "cp-import-head" },
        h("h3", {}, "Imported"),
        iconButton("close", "Close the report", () => (this.report.hidden = true)),
      ),
      h("div", { class: "cp-import-numbers", role: "status" }, ...numbers),
      total.ids.length === 1 ? h("button", { type: "button", class: "cp-link", onclick: open }, "Open the conversation") : "",
      reasons.length ? h("details", {}, h("summary", {}, "What was skipped, and why"), list) : "",
    );
  }
}
