/**
 * Elements, icons and small helpers.
 *
 * Invariant: text reaches the document as text. `html` is for what the server has rendered and sanitised, and for nothing else.
 */

/**
 * Make an element.
 * @param {string} tag
 * @param {Object} [attributes] `on*` adds a listener, `class` and `data-*` as in HTML; null, undefined and false are left out
 * @param {...(Node|string|null|undefined|false)} children
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child || child === 0));
  return element;
}

/** Put sanitised HTML of the server into an element. */
export function html(element, source) {
  const template = document.createElement("template");
  template.innerHTML = source;
  element.replaceChildren(template.content);
}

const PATHS = {
  plus: "M12 5v14M5 12h14",
  send: "M5 12h14M13 6l6 6-6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v11H9zM5 15V4h10",
  edit: "M4 20h4L19 9l-4-4L4 16zM14 6l4 4",
  redo: "M20 11a8 8 0 1 0-2.3 6M20 5v6h-6",
  play: "M8 5l11 7-11 7z",
  fork: "M7 4v16M7 12c8 0 10-2 10-8M14 6l3-3 3 3",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  info: "M12 11v6M12 7.5v.5M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18z",
  words: "M4 7h16M4 12h6M13 12h7M4 17h10",
  left: "M15 5l-7 7 7 7",
  right: "M9 5l7 7-7 7",
  close: "M6 6l12 12M18 6L6 18",
  more: "M6 12h.01M12 12h.01M18 12h.01",
  check: "M5 12.5l5 5 9-11",
  star: "M12 4l2.5 5.3 5.8.7-4.3 4 1.1 5.7L12 16.9 6.9 19.7 8 14 3.7 10l5.8-.7z",
  tree: "M6 4v5a3 3 0 0 0 3 3h6a3 3 0 0 1 3 3v5M6 9v11M6 4h.01",
  grid: "M4 4h6v6H4zM14 4h6v6h-6zM4 14h6v6H4zM14 14h6v6h-6z",
  columns: "M4 5h4v14H4zM10 5h4v14h-4zM16 5h4v14h-4z",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14zM16 16l4 4",
  pin: "M9 4h6l-1 6 4 4H6l4-4zM12 14v6",
  down: "M12 5v14M6 13l6 6 6-6",
  upload: "M12 16V5M7 9l5-5 5 5M5 20h14",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  help: "M9 9a3 3 0 1 1 4 3c-1 .6-1 1-1 2M12 17.5v.5M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18z",
  tag: "M4 4h8l8 8-8 8-8-8zM8 8h.01",
  list: "M4 7h16M4 12h16M4 17h16",
  sliders: "M4 8h7M17 8h3M4 16h3M13 16h7M14 5.5v5M10 13.5v5",
};
const SVG = "http://www.w3.org/2000/svg";

/** Make an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, String(value));
  }
  element.append(...children.filter(Boolean));
  return element;
}

/** Return an icon; it has no name of its own, the button around it has. */
export function icon(name) {
  return svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }, svg("path", { d: PATHS[name] }));
}

/** Make a button with an icon and a name; `options.text` shows the name beside the icon. */
export function iconButton(name, label, onclick, options = {}) {
  const { text, ...attributes } = options;
  return h(
    "button",
    { type: "button", class: `icon-button ${text ? "with-text" : ""}`, title: label, "aria-label": label, onclick, ...attributes },
    icon(name),
    text && h("span", {}, text),
  );
}

/** Return a function that calls `work` once, `ms` after the last call; its `flush` does what is due at once. */
export function debounce(work, ms) {
  let timer = 0;
  let due = null;
  const flush = () => {
    clearTimeout(timer);
    const values = due;
    due = null;
    if (values) work(...values);
  };
  const later = (...values) => {
    clearTimeout(timer);
    due = values;
    timer = setTimeout(flush, ms);
  };
  later.cancel = () => {
    clearTimeout(timer);
    due = null;
  };
  later.flush = flush;
  return later;
}

/** Return a function that calls `work` at most once per frame. */
export function perFrame(work) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      work();
    });
  };
}

/** Return a number with thousands separated, or "–" for what is no finite number. */
export function count(value) {
  return Number.isFinite(value) ? Math.round(value).toLocaleString("en") : "–";
}

/** Return bytes as people write them. */
export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024 || unit === "GiB") return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1024;
  }
  return "–";
}

/** Return 32 random hex digits. */
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Read and write what this browser remembers; a browser that remembers nothing is no error. */
export const memory = {
  get(key, fallback = null) {
    try {
      const text = localStorage.getItem(`chatpage.${key}`);
      return text === null ? fallback : JSON.parse(text);
    } catch {
      return fallback;
    }
  },
  set(key, value) {
    try {
      if (value === null || value === "") localStorage.removeItem(`chatpage.${key}`);
      else localStorage.setItem(`chatpage.${key}`, JSON.stringify(value));
    } catch {
      // a full or forbidden storage costs a convenience, no text of a conversation
    }
  },
};
