/**
 * A menu beside a button.
 *
 * Invariant: an action runs after the menu has closed and given the focus back, so it may move the focus itself.
 */

import { h, icon } from "./dom.js";
import { popover } from "./feedback.js";

/**
 * Open a menu.
 * @param {Element} anchor what gets the focus back
 * @param {string} label
 * @param {Array<{label: string, icon?: string, hint?: string, isBad?: boolean, action?: function, items?: object[]}>} entries
 *   an entry with `items`, {label, action} each, is a small group under its label
 */
export function openMenu(anchor, label, entries) {
  let chosen = null;
  const choose = (action) => () => {
    chosen = action;
    panel.hidePopover();
  };
  const menu = h("div", { class: "cp-menu", role: "menu", "aria-label": label, onkeydown: walk });
  menu.append(...entries.map((entry) => (entry.items ? group(entry, choose) : item(entry, choose))));
  const panel = popover(anchor, label, menu);
  panel.setAttribute("role", "presentation");
  panel.classList.add("cp-menu-popover");
  anchor.setAttribute("aria-expanded", "true");
  panel.addEventListener("toggle", (event) => {
    if (event.newState !== "closed") return;
    anchor.setAttribute("aria-expanded", "false");
    chosen?.();
  });
  return panel;
}

function item(entry, choose) {
  return h(
    "button",
    {
      type: "button",
      role: "menuitem",
      tabIndex: -1,
      class: `cp-menu-entry ${entry.isBad ? "is-bad" : ""}`,
      onclick: choose(entry.action),
    },
    entry.icon ? icon(entry.icon) : h("span", { class: "cp-menu-gap" }),
    h("span", { class: "cp-menu-label" }, entry.label),
    entry.hint && h("kbd", { class: "cp-menu-hint", "aria-hidden": "true" }, entry.hint),
  );
}

function group(entry, choose) {
  const items = entry.items.map(({ label, action }) =>
    h(
      "button",
      {
        type: "button",
        role: "menuitem",
        tabIndex: -1,
        class: "cp-menu-chip",
        "aria-label": `${entry.label} ${label}`,
        onclick: choose(action),
      },
      label,
    ),
  );
  return h(
    "div",
    { class: "cp-menu-group", role: "group", "aria-label": entry.label },
    h("div", { class: "cp-menu-heading", "aria-hidden": "true" }, entry.icon && icon(entry.icon), h("span", {}, entry.label)),
    h("div", { class: "cp-menu-chips" }, ...items),
  );
}

/** Move the focus through the items with the arrow keys, Home and End. */
function walk(event) {
  const items = [...event.currentTarget.querySelectorAll("[role=menuitem]")];
  const at = items.indexOf(document.activeElement);
  const [next, previous] = [at + 1, at - 1];
  const moves = { ArrowDown: next, ArrowRight: next, ArrowUp: previous, ArrowLeft: previous, Home: 0, End: items.length - 1 };
  const to = moves[event.key];
  if (to === undefined) return;
  event.preventDefault();
  event.stopPropagation();
  items[(to + items.length) % items.length].focus();
}
