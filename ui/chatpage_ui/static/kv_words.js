/** What a block is, in words: for those who point at it, and for those who hear it. */

import { firstWords, plural, roleOf } from "./words.js";

const MOST_NAMED = 4;

/**
 * Describe a block.
 * @param {object} block of the block map
 * @param {{conversation: ?object, paths: KvPaths, blockSize: number}} context
 * @returns {{head: string, lines: Array<[string, string]>}} lines: name and text
 */
export function describeBlock(block, { conversation, paths, blockSize }) {
  const sharers = block.ref_count > 1 ? `, shared by ${block.ref_count}` : "";
  const words = (id) => `${roleOf(conversation.nodes.get(id))}: “${firstWords(conversation.textOf(id)) || "…"}”`;
  const messages = paths.nodesOf(block.id).filter((id) => conversation?.nodes.has(id)).map(words);
  const times = ([name, number]) => (number > 1 ? `${number} × ${name}` : name);
  const holders = countedHolders(block.holders, conversation).map(times);
  const branches = paths.numPathsOf(block.id);
  const lines = [["Rows", `${block.num_rows} of ${blockSize}`], ...listed("Holds", messages), ...listed("Held by", holders)];
  if (branches) lines.push(["Lies on", `${plural(branches, "branch", "branches")} of this conversation`]);
  return { head: `Block ${block.id}: ${block.state}${sharers}`, lines };
}

function countedHolders(holders, conversation) {
  const numbers = new Map();
  for (const holder of holders) {
    const name = holderName(holder, conversation);
    numbers.set(name, (numbers.get(name) ?? 0) + 1);
  }
  return [...numbers];
}

/** Return lines under one name, the first few of them. */
function listed(name, texts) {
  const lines = texts.slice(0, MOST_NAMED).map((text) => [name, text]);
  if (texts.length > MOST_NAMED) lines.push([name, `and ${texts.length - MOST_NAMED} more`]);
  return lines;
}

function holderName({ kind, conversation_id: conversationId, node_id: nodeId, sample }, conversation) {
  if (kind === "pin") return "a pinned prompt";
  if (kind === "warm") return "a prompt made ready";
  if (kind === "other") return "somebody else";
  if (!conversation || conversationId !== conversation.id) return "another conversation";
  const words = conversation.nodes.has(nodeId) ? firstWords(conversation.textOf(nodeId)) : "";
  return words ? `sample ${sample + 1}: “${words}”` : `sample ${sample + 1}`;
}
