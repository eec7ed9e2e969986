/**
 * Keys, and the list of them.
 *
 * Invariant: a key alone does something only where nobody is typing; what destroys can be undone.
 */

import { h } from "./dom.js";

const KEYS = [
  ["/", "Write a message", (app) => app.composer.focus()],
  ["j", "Next message", (app) => walk(app, 1)],
  ["k", "Previous message", (app) => walk(app, -1)],
  ["ArrowRight", "Next version of the message", (app) => turn(app, 1), "→"],
  ["ArrowLeft", "Previous version of the message", (app) => turn(app, -1), "←"],
  ["r", "Regenerate", (app) => onReply(app, (id) => app.regenerate(id))],
  ["R", "Regenerate with 8 samples", (app) => onReply(app, (id) => app.regenerate(id, 8)), "Shift R"],
  ["v", "Compare the versions side by side", (app) => toggleCompare(app)],
  ["Enter", "Use the version (in columns)", (app) => useColumn(app)],
  ["1–9", "Use version 1 to 9 (in columns)", null],
  ["o", "Go on with the reply", (app) => onReply(app, (id) => app.continue(id))],
  ["e", "Edit", (app) => viewAt(app)?.edit?.()],
  ["c", "Copy", (app) => viewAt(app)?.copy()],
  ["w", "Words and their alternatives", (app) => viewAt(app)?.toggleTokens()],
  ["f", "Fork to a new conversation", (app) => forkAt(app)],
  ["s", "Keep, or no longer", (app) => keepAt(app)],
  ["Delete", "Delete (can be undone)", (app) => onMessage(app, (id) => app.remove(id))],
  ["Escape", "Stop all answers", (app) => app.stopAll(), "Esc"],
  ["n", "New conversation", (app) => app.openConversation(null).then(() => app.composer.focus())],
  ["g", "Search", () => document.querySelector("#cp-sidebar input[type=search]")?.focus()],
  ["t", "Tree", (app) => app.drawer?.toggle("tree")],
  ["m", "Memory", (app) => app.drawer?.toggle("memory")],
  ["?", "This list", (app) => showHelp(app)],
];

export function listenToKeys(app) {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.isComposing || event.ctrlKey || event.metaKey || event.altKey) return;
    const target = event.target;
    const isTyping = target.closest?.("input, textarea, select, [contenteditable=true], dialog, [popover]");
    if (isTyping) {
      if (event.key === "Escape" && target.closest(".cp-composer")) app.stopAll();
      return;
    }
    const isArrow = event.key.startsWith("Arrow") || event.key === "Enter";
    if (isArrow && !target.closest?.(".cp-message, .cp-column")) return;
    if (isArrow && target.closest("button, a, [role=button], [role=radio]")) return;
    if (!isArrow && target.closest?.("#cp-right, #cp-sidebar, .cp-drawer") && event.key !== "?") return;
    const number = Number(event.key);
    const columns = app.thread.columns?.views ?? [];
    if (number >= 1 && number <= columns.length) app.use(columns[number - 1].nodeId);
    else {
      const found = KEYS.find(([key]) => key === event.key);
      if (!found?.[2] || (!app.conversation && !["/", "n", "g", "t", "m", "?"].includes(event.key))) return;
      found[2](app);
    }
    event.preventDefault();
  });
}

/** Show the list of keys. */
export function showHelp(app) {
  const rows = KEYS.map(([key, what, , shown]) => h("tr", {}, h("th", { scope: "row" }, h("kbd", {}, shown ?? key)), h("td", {}, what)));
  const dialog = h(
    "dialog",
    { class: "cp-dialog cp-help", "aria-label": "Keys", onclose: () => dialog.remove() },
    h("h2", {}, "Keys"),
    h("table", {}, h("tbody", {}, ...rows)),
    h("form", { method: "dialog" }, h("div", { class: "cp-dialog-buttons" }, h("button", { class: "cp-button is-primary" }, "Close"))),
  );
  app.host.append(dialog);
  dialog.showModal();
  dialog.scrollTop = 0;
}

/** Return the view that has the focus, else that of the last message. */
function viewAt(app) {
  const nodeId = document.activeElement?.closest?.("[data-node]")?.dataset.node;
  return (nodeId && app.thread.viewOf(nodeId)) || app.thread.views.at(-1) || null;
}

function onMessage(app, work) {
  const view = viewAt(app);
  if (view) work(view.nodeId);
}

function onReply(app, work) {
  onMessage(app, (id) => app.conversation.nodes.get(id).role !== "system" && !app.conversation.isWriting(id) && work(id));
}

function walk(app, step) {
  const views = [...app.thread.views, ...(app.thread.columns?.views ?? [])];
  const at = views.findIndex((view) => view.element.contains(document.activeElement));
  const next = views[at < 0 ? views.length - 1 : Math.max(0, Math.min(views.length - 1, at + step))];
  next?.element.focus();
  next?.element.scrollIntoView({ block: "nearest" });
}

function turn(app, step) {
  const column = document.activeElement?.closest?.(".cp-column");
  if (column) {
    (step > 0 ? column.nextElementSibling : column.previousElementSibling)?.focus();
    return;
  }
  onMessage(app, (id) => {
    const siblings = app.conversation.siblingsOf(id);
    if (siblings.length > 1) app.select(siblings[(siblings.indexOf(id) + step + siblings.length) % siblings.length]);
  });
}

function toggleCompare(app) {
  if (app.comparing !== null) app.compare(null);
  else onMessage(app, (id) => app.conversation.siblingsOf(id).length > 1 && app.compareSiblings(id));
}

function useColumn(app) {
  const column = document.activeElement?.closest?.(".cp-column");
  if (column) app.use(column.dataset.node);
}

function forkAt(app) {
  const view = viewAt(app);
  const button = view?.element.querySelector("[aria-label^='Fork']") ?? view?.element;
  if (view) app.forkMenu(view.nodeId, button);
}

function keepAt(app) {
  onMessage(app, (id) => {
    const node = app.conversation.nodes.get(id);
    if (node.role === "assistant") app.keep(id, !node.is_kept);
  });
}
