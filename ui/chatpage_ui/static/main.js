/**
 * Puts the page together, once Gradio has made room for it.
 *
 * Invariant: whatever Gradio does to its own elements, ours are mounted once.
 */

import { App } from "./app.js";
import { Composer } from "./composer.js";
import { Connection } from "./connection.js";
import { h, icon, iconButton, memory } from "./dom.js";
import { mountDrawer } from "./drawer.js";
import { Feedback } from "./feedback.js";
import { listenToKeys, showHelp } from "./keyboard.js";
import { mountSidebar } from "./sidebar.js";
import { mountStatistics } from "./statistics.js";
import { Thread } from "./thread.js";

const HOSTS = ["cp-sidebar", "cp-canvas", "cp-right", "cp-model", "cp-statistics", "cp-param-stop", "cp-system", "cp-preset"];
const BANNERS = {
  connecting: "Connecting …",
  offline: "The connection is lost. Connecting again …",
  restarting: "The server is restarting. Answers go on from where they were …",
  refused: "The server does not know you: log in again.",
};
const GRADIO_MS = 400; // until Gradio has followed a press of its button
const BANNER_MS = 700; // a short break is nobody's business

function mount() {
  const host = document.getElementById("cp-canvas");
  const connection = new Connection(location.origin.replace(/^http/, "ws") + "/ws");
  const feedback = new Feedback(host);
  const app = new App(connection, feedback);
  globalThis.chatpage = app;
  app.host = host;
  app.thread = new Thread(app);
  app.composer = new Composer(app);
  const drawerHost = h("aside", { class: "cp-drawer-host" });
  host.append(
    h(
      "div",
      { class: "cp-layout" },
      h("div", { class: "cp-middle" }, bar(app), app.thread.element, app.composer.element),
      drawerHost,
    ),
  );
  mountDrawer(drawerHost, app);
  mountSidebar(document.getElementById("cp-sidebar"), app);
  mountStatistics(document.getElementById("cp-model"), document.getElementById("cp-statistics"), app);
  app.params.mount(document.getElementById("cp-right"));
  listenToKeys(app);
  showState(app);
  keepClear(app);
  makeRoom(host.closest(".wrap"));
  nameHandle("cp-left", "Conversations", icon("list"));
  const close = icon("close");
  close.classList.add("is-close"); // shown where the settings cover the page
  nameHandle("cp-right", "Settings", icon("sliders"), close);
  addEventListener("hashchange", () => openFromAddress(app));
  addEventListener("popstate", () => openFromAddress(app));
  connection.open();
  openFromAddress(app, memory.get("last"));
  if (matchMedia("(pointer: fine)").matches) app.composer.focus();
}

function openFromAddress(app, otherwise = null) {
  const id = new URLSearchParams(location.hash.slice(1)).get("c") ?? otherwise;
  if (id !== (app.conversation?.id ?? undefined)) app.openConversation(id);
}

/** The bar above the conversation. */
function bar(app) {
  const title = h("input", {
    class: "cp-title",
    "aria-label": "Title of the conversation",
    placeholder: "New conversation",
    onchange: () => app.rename(title.value),
    onkeydown: (event) => event.key === "Enter" && title.blur(),
  });
  const heading = h("h1", { class: "cp-visually-hidden" }, "New conversation");
  const dot = h("span", { class: "cp-dot", title: "Connecting" });
  const name = (text) => {
    heading.textContent = text || "New conversation";
    document.title = text ? `${text} · chatpage` : "chatpage";
  };
  app.addEventListener("open", () => {
    const { conversation } = app;
    title.disabled = !conversation;
    title.value = conversation?.info?.title ?? "";
    conversation?.addEventListener("tree", () => {
      if (document.activeElement !== title) title.value = conversation.info?.title ?? "";
      name(conversation.info?.title);
    });
    name(conversation?.info?.title);
  });
  app.connection.addEventListener("state", ({ detail }) => {
    dot.classList.toggle("is-open", detail.state === "open");
    dot.title = detail.state === "open" ? "Connected" : (BANNERS[detail.state] ?? "");
  });
  return h(
    "header",
    { class: "cp-bar" },
    heading,
    dot,
    title,
    iconButton("tree", "Tree of the conversation", () => app.drawer.toggle("tree")),
    iconButton("grid", "Memory", () => app.drawer.toggle("memory")),
    iconButton("help", "Keys", () => showHelp(app)),
  );
}

/** Say in the banner when there is no connection for longer than a moment. */
function showState(app) {
  let timer = 0;
  const show = (state) => {
    clearTimeout(timer);
    if (state === "open") {
      app.feedback.showBanner(null);
      return;
    }
    const retry = { label: state === "refused" ? "Log in" : "Try now", action: () => leaveOrRetry(app, state) };
    timer = setTimeout(() => app.feedback.showBanner(BANNERS[state], retry), BANNER_MS);
  };
  app.connection.addEventListener("state", ({ detail }) => show(detail.state));
  show("connecting");
}

function leaveOrRetry(app, state) {
  if (state === "refused") location.assign("/login");
  else app.connection.retry();
}

/**
 * On a narrow screen Gradio's list covers the conversation: it is closed unless the reader opened it, and when a conversation was
 * chosen. Gradio opens it when it is ready, which on a slow machine is after us.
 */
function keepClear(app) {
  const narrow = matchMedia("(max-width: 768px)");
  const sidebar = document.getElementById("cp-left");
  let isWanted = false;
  let timer = 0;
  const clear = () => {
    if (timer || isWanted || !narrow.matches || !sidebar.classList.contains("open")) return;
    sidebar.querySelector(":scope > .toggle-button").click();
    timer = setTimeout(() => ((timer = 0), clear()), GRADIO_MS); // a second press before Gradio followed would open it again
  };
  const note = ({ isTrusted, target }) => {
    if (isTrusted && target.closest(".toggle-button")) isWanted = !sidebar.classList.contains("open");
  };
  sidebar.addEventListener("click", note, true);
  new MutationObserver(clear).observe(sidebar, { attributeFilter: ["class"] });
  app.addEventListener("open", () => ((isWanted = false), clear()));
  clear();
}

/**
 * Make room for the sidebars that are open. Gradio's styles would ask by `:has()` whether anything in the frame is an open sidebar,
 * and the browser walk the whole conversation for the answer after every change of it.
 */
function makeRoom(frame) {
  const sidebars = ["cp-left", "cp-right"].map((id) => document.getElementById(id));
  const make = () => {
    if (frame.classList.contains("sidebar-parent")) frame.classList.remove("sidebar-parent"); // which is a change even if it is not there
    const isOpen = (sidebar) => sidebar.classList.contains("open");
    frame.dataset.open = sidebars.filter(isOpen).map(({ id }) => id).join(" ");
  };
  make();
  const watch = new MutationObserver(make);
  for (const element of [frame, ...sidebars]) watch.observe(element, { attributeFilter: ["class"] });
}

/** Say what Gradio's button of a sidebar is for; its own is an arrow, and looks like a way back or on. */
function nameHandle(id, label, ...icons) {
  const button = document.querySelector(`#${id} > .toggle-button`);
  button.title = label;
  button.setAttribute("aria-label", label);
  button.append(...icons);
}

function whenReady() {
  if (!HOSTS.every((id) => document.getElementById(id))) return false;
  mount();
  return true;
}

if (!whenReady()) {
  const watch = new MutationObserver(() => whenReady() && watch.disconnect());
  watch.observe(document.documentElement, { childList: true, subtree: true });
}
