/**
 * The drawer beside the conversation, with the tree and the memory; on a narrow page a sheet at its lower edge.
 *
 * Invariant: a tab is built when it is first shown, and stays; what is closed is hidden, so it has no size and does not work.
 */

import { h, iconButton, memory } from "./dom.js";
import { mountKvMap } from "./kv_map.js";
import { mountTreeMap } from "./tree_map.js";

const TABS = [
  ["tree", "Tree", mountTreeMap],
  ["memory", "Memory", mountKvMap],
];
const WIDTHS = [260, 760];
const HEIGHTS = [180, 900];
const STEP = 24;

/** Fill the place of the drawer. */
export function mountDrawer(host, app) {
  app.drawer = new Drawer(host, app);
  return app.drawer;
}

class Drawer {
  #mounted = new Set();

  constructor(host, app) {
    this.app = app;
    this.host = host;
    this.tab = memory.get("drawer.tab", "tree");
    this.isOpen = memory.get("drawer.open", false);
    this.size = { width: memory.get("drawer.width", 380), height: memory.get("drawer.height", 380) };
    this.#build();
    this.#show();
  }

  /** Show a tab; if it is shown already, close. */
  toggle(tab = this.tab) {
    const isClosing = this.isOpen && tab === this.tab;
    this.isOpen = !isClosing;
    this.tab = tab;
    this.#remember();
    this.#show();
    if (this.isOpen) this.#tabButton(tab).focus({ preventScroll: true });
  }

  close() {
    this.isOpen = false;
    this.#remember();
    this.#show();
    this.app.light([]);
  }

  #build() {
    this.tabs = TABS.map(([name, label]) =>
      h(
        "button",
        {
          type: "button",
          role: "tab",
          class: "cp-drawer-tab",
          id: `cp-tab-${name}`,
          "data-tab": name,
          "aria-controls": `cp-panel-${name}`,
          onclick: () => this.#choose(name),
        },
        label,
      ),
    );
    this.panels = TABS.map(
      ([name]) => h(
        "div",
        { class: "cp-drawer-panel", role: "tabpanel", id: `cp-panel-${name}`, "aria-labelledby": `cp-tab-${name}` },
      ),
    );
    this.handle = h("div", { class: "cp-drawer-handle", role: "separator", tabindex: "0", "aria-label": "Size of the drawer" });
    const list = h(
      "div",
      { class: "cp-drawer-tabs", role: "tablist", "aria-label": "Drawer", onkeydown: (event) => this.#walk(event) },
      ...this.tabs,
    );
    this.host.classList.add("cp-drawer");
    this.host.setAttribute("aria-label", "Tree and memory");
    this.host.replaceChildren(
      this.handle,
      h("div", { class: "cp-drawer-head" }, list, iconButton("close", "Close the drawer", () => this.close())),
      ...this.panels,
    );
    this.handle.addEventListener("pointerdown", (event) => this.#drag(event));
    this.handle.addEventListener("keydown", (event) => this.#resizeByKey(event));
    new ResizeObserver(() => this.#describeHandle()).observe(this.host);
  }

  #choose(name) {
    this.tab = name;
    this.#remember();
    this.#show();
  }

  #show() {
    this.host.hidden = !this.isOpen;
    TABS.forEach(([name, , mount], i) => {
      const isShown = name === this.tab;
      this.panels[i].hidden = !isShown;
      this.tabs[i].setAttribute("aria-selected", String(isShown));
      this.tabs[i].tabIndex = isShown ? 0 : -1;
      if (isShown && this.isOpen && !this.#mounted.has(name)) {
        this.#mounted.add(name);
        mount(this.panels[i], this.app);
      }
    });
    this.#applySize();
    this.app.dispatchEvent(new CustomEvent("drawer", { detail: { isOpen: this.isOpen, tab: this.tab } }));
  }

  #tabButton(name) {
    return this.tabs.find((tab) => tab.dataset.tab === name);
  }

  #walk(event) {
    const at = TABS.findIndex(([name]) => name === this.tab);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: TABS.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const [name] = TABS[(to + TABS.length) % TABS.length];
    this.#choose(name);
    this.#tabButton(name).focus();
  }

  // -- size ----------------------------------------------------------------------------------------------------------

  /** Whether the drawer is a sheet at the lower edge; the style decides. */
  get #isSheet() {
    return getComputedStyle(this.handle).cursor === "ns-resize";
  }

  #applySize() {
    this.host.style.setProperty("--cp-drawer-width", `${this.size.width}px`);
    this.host.style.setProperty("--cp-drawer-height", `${this.size.height}px`);
  }

  #resize(name, value) {
    const [least, most] = name === "width" ? WIDTHS : HEIGHTS;
    this.size[name] = Math.round(Math.min(most, Math.max(least, value)));
    this.#applySize();
    this.#describeHandle();
  }

  #describeHandle() {
    const isSheet = this.#isSheet;
    const [least, most] = isSheet ? HEIGHTS : WIDTHS;
    const size = isSheet ? this.size.height : this.size.width;
    const values = { orientation: isSheet ? "horizontal" : "vertical", valuemin: least, valuemax: most, valuenow: size };
    for (const [name, value] of Object.entries(values)) this.handle.setAttribute(`aria-${name}`, String(value));
  }

  #drag(event) {
    event.preventDefault();
    const isSheet = this.#isSheet;
    const box = this.host.getBoundingClientRect();
    const resizeTo = ({ clientX, clientY }) => [
      isSheet ? "height" : "width",
      isSheet ? box.bottom - clientY : box.right - clientX,
    ];
    const move = (moved) => this.#resize(...resizeTo(moved));
    this.handle.setPointerCapture(event.pointerId);
    this.handle.addEventListener("pointermove", move);
    const end = () => {
      this.handle.removeEventListener("pointermove", move);
      this.#remember();
    };
    this.handle.addEventListener("lostpointercapture", end, { once: true });
  }

  #resizeByKey(event) {
    const isSheet = this.#isSheet;
    const name = isSheet ? "height" : "width";
    const step = { [isSheet ? "ArrowUp" : "ArrowLeft"]: STEP, [isSheet ? "ArrowDown" : "ArrowRight"]: -STEP }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    this.#resize(name, this.size[name] + step);
    this.#remember();
  }

  #remember() {
    memory.set("drawer.tab", this.tab);
    memory.set("drawer.open", this.isOpen);
    memory.set("drawer.width", this.size.width);
    memory.set("drawer.height", this.size.height);
  }
}
