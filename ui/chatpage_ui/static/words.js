/** How the panels name things in few words. */

import { count } from "./dom.js";

export const ROLES = { user: "You", assistant: "Model", system: "System", tool: "Tool" };

export function roleOf(node) {
  return ROLES[node.role] ?? node.role;
}

/** Return the beginning of a text in one line. */
export function firstWords(text, length = 40) {
  const words = text.slice(0, 4 * length).replace(/\s+/g, " ").trim();
  return words.length > length ? `${words.slice(0, length).trimEnd()}…` : words;
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
