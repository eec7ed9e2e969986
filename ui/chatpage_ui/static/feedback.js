/**
 * What the page says beside the conversation: toasts, the banner, questions, and words for screen readers.
 *
 * Invariant: nothing here blocks the conversation, except a question that the user asked for.
 */

import { h, iconButton } from "./dom.js";

const TOAST_MS = 4_000;
const UNDO_MS = 10_000;

export class Feedback {
  constructor(host) {
    this.toasts = h("div", { class: "cp-toasts", role: "region", "aria-label": "Notices" });
    this.live = h("div", { class: "cp-visually-hidden", role: "status", "aria-live": "polite" });
    this.banner = h("div", { class: "cp-banner", role: "status", hidden: true });
    host.prepend(this.banner);
    host.append(this.toasts, this.live);
  }

  /** Say something for a moment; with an action it stays longer. */
  toast(text, { label, action, isBad = false } = {}) {
    const same = [...this.toasts.children].find((one) => one.firstChild.textContent === text && !label);
    same?.remove(); // the newer one takes its place
    const close = () => toast.remove();
    const act = () => {
      close();
      action();
    };
    const toast = h(
      "div",
      { class: `cp-toast ${isBad ? "is-bad" : ""}`, role: isBad ? "alert" : "status" },
      h("span", {}, text),
      label && h("button", { type: "button", class: "cp-link", onclick: act }, label),
      iconButton("close", "Dismiss", close),
    );
    this.toasts.append(toast);
    while (this.toasts.children.length > 4) this.toasts.firstChild.remove();
    setTimeout(close, label || isBad ? UNDO_MS : TOAST_MS);
  }

  /** Tell about an error. */
  fail(error) {
    console.warn(error);
    this.toast(error.message || String(error), { isBad: true });
  }

  /** Tell a screen reader. */
  announce(text) {
    this.live.textContent = text;
  }

  /** Show what is happening to the connection; null: nothing. */
  showBanner(text, { label, action } = {}) {
    this.banner.hidden = text === null;
    this.banner.replaceChildren();
    if (text === null) return;
    this.banner.append(h("span", { class: "cp-spinner", "aria-hidden": "true" }), h("span", {}, text));
    if (label) this.banner.append(h("button", { type: "button", class: "cp-link", onclick: action }, label));
  }

  /** Ask; the promise holds the answer. */
  confirm(text, label) {
    return new Promise((resolve) => {
      const dialog = h(
        "dialog",
        { class: "cp-dialog", "aria-label": text, onclose: () => (dialog.remove(), resolve(dialog.returnValue === "yes")) },
        h(
          "form",
          { method: "dialog" },
          h("p", {}, text),
          h(
            "div",
            { class: "cp-dialog-buttons" },
            h("button", { value: "no", class: "cp-button" }, "Cancel"),
            h("button", { value: "yes", class: "cp-button is-primary" }, label),
          ),
        ),
      );
      this.toasts.parentElement.append(dialog);
      dialog.showModal();
    });
  }
}

/** Show a panel beside a button until something else is clicked; returns it. */
export function popover(anchor, label, ...children) {
  const panel = h("div", { class: "cp-popover", popover: "auto", role: "dialog", "aria-label": label }, ...children);
  anchor.closest(".cp-host").append(panel);
  // What the panel belongs to would scroll away from under it.
  const leave = (event) => panel.contains(event.target) || panel.hidePopover();
  document.addEventListener("scroll", leave, true);
  panel.addEventListener("toggle", (event) => {
    if (event.newState !== "closed") return;
    document.removeEventListener("scroll", leave, true);
    panel.remove();
    anchor.focus({ preventScroll: true });
  });
  panel.showPopover();
  const place = anchor.getBoundingClientRect();
  const size = panel.getBoundingClientRect();
  const left = Math.max(8, Math.min(place.left, innerWidth - size.width - 8));
  const below = place.bottom + 6;
  const top = below + size.height < innerHeight - 8 ? below : Math.max(8, place.top - size.height - 6);
  Object.assign(panel.style, { left: `${left}px`, top: `${top}px` });
  panel.querySelector("button, input, select, textarea, [tabindex]")?.focus();
  return panel;
}
