/** How the panels name things in few words. */

import { count } from "./dom.js";

/** What the name "default" stands for. */
export const DEFAULT_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf";

export const ROLES = { user: "You", assistant: "Model", system: "System", tool: "Tool" };

export function roleOf(node) {
  return ROLES[node.role] ?? node.role;
}

/** Return the beginning of a text in one line. */
export function firstWords(text, length = 40) {
  const words = text.slice(0, 4 * length).replace(/\s+/g, " ").trim();
  return words.length > length ? `${words.slice(0, length).trimEnd()}…` : words;
}

/** Return a model's name for people: without the folders and the ending of its file. */
export function modelName(name) {
  const file = name === "default" ? DEFAULT_MODEL : name;
  return file.replace(/[/\\]+$/, "").split(/[/\\]/).at(-1).replace(/\.gguf$/i, "");
}

/**
 * Return why a reply that is not being written any more is not whole, or "".
 * @param {object} node
 * @param {number} [most] tokens of the context
 */
export function whyCut(node, most) {
  if (node.status === "aborted") return "Stopped.";
  if (node.status === "interrupted") return `Interrupted: ${node.detail ?? "the server ended while this was written"}`.replace(/\.?$/, ".");
  if (node.status === "error") return node.detail ? `Failed: ${node.detail}` : "Failed.";
  if (node.status !== "complete" || node.finish_reason !== "length") return "";
  const { prompt_tokens: prompt, completion_tokens: written } = node.usage ?? {};
  if (prompt + written >= most) return "Cut off: the context is full.";
  return written < node.params?.max_tokens ? "Cut off: there was no memory for more." : "Cut off: it reached its limit of tokens.";
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
