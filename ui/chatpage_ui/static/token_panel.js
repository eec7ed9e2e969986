/**
 * What else could stand at one token of a reply: the alternatives with their probabilities, and how many branches to write.
 *
 * Invariant: the token that was chosen is always among those shown, and marked.
 */

import { count, h, icon, memory } from "./dom.js";
import { popover } from "./feedback.js";

const SAMPLES = [1, 2, 4, 8];

/**
 * Open the panel beside a token.
 * @param {object} app
 * @param {Element} anchor
 * @param {{title: string, text: string, ask: function(): Promise, branch: function(?number, number)}} token
 *   `branch` gets the token to go on with, null for any, and how many branches to write
 * @returns {Element} the panel
 */
export function openAlternatives(app, anchor, { title, text, ask, branch }) {
  const choice = sampleChoice(app);
  const go = (tokenId) => {
    panel.hidePopover();
    branch(tokenId, choice.value);
  };
  const list = h("div", { class: "cp-alternatives", role: "group", "aria-label": "Alternatives", onkeydown: walk });
  const cost = h("p", { class: "cp-tokens-cost", role: "status" });
  const again = h("button", { type: "button", class: "cp-button", onclick: () => go(null) }, "Write on from here");
  const head = h("h3", { class: "cp-tokens-title" }, `${title} `, h("code", {}, visible(text)));
  const foot = h("div", { class: "cp-tokens-foot" }, choice.element, again);
  list.append(h("p", { class: "cp-tokens-note" }, "Computing …"));
  const panel = popover(anchor, `Alternatives: ${title}`, h("div", { class: "cp-tokens-panel" }, head, list, foot, cost));
  fill(list, cost, ask, go);
  return panel;
}

async function fill(list, cost, ask, go) {
  try {
    const answer = await ask();
    if (list.isConnected) showAlternatives(list, cost, answer, go);
  } catch (error) {
    list.replaceChildren(h("p", { class: "cp-tokens-note is-bad", role: "status" }, error.message));
  }
}

function showAlternatives(list, cost, { chosen, alternatives, usage }, go) {
  const isListed = alternatives.some(({ token_id: id }) => id === chosen.token_id);
  const all = isListed ? alternatives : [...alternatives, chosen];
  const rest = 1 - all.reduce((sum, { logprob }) => sum + Math.exp(logprob ?? -Infinity), 0);
  const hadFocus = list.parentElement.contains(document.activeElement);
  list.replaceChildren(
    ...all.map((alternative) => alternativeRow(alternative, alternative.token_id === chosen.token_id, go)),
    h("p", { class: "cp-alternative-rest" }, h("span", {}, "all others"), h("span", {}, percent(Math.max(0, rest)))),
  );
  const computed = usage.prompt_tokens - usage.cached_tokens;
  cost.replaceChildren(
    h("b", {}, count(usage.cached_tokens)),
    ` of ${count(usage.prompt_tokens)} tokens were in memory, ${count(computed)} computed`,
  );
  if (hadFocus) list.querySelector(".is-chosen").focus();
}

function alternativeRow({ token_id: id, text, logprob }, isChosen, go) {
  const share = Number.isFinite(logprob) ? Math.exp(logprob) : 0;
  const shown = visible(text);
  return h(
    "button",
    {
      type: "button",
      class: `cp-alternative ${isChosen ? "is-chosen" : ""}`,
      tabIndex: isChosen ? 0 : -1,
      "aria-current": isChosen ? "true" : null,
      "aria-label": `${shown}, ${percent(share)}${isChosen ? ", chosen" : ""}: branch here`,
      title: isChosen ? "Chosen: write on from here with the same word" : "Branch here with this word",
      onclick: () => go(id),
    },
    h("code", { dir: "auto" }, shown),
    h("span", { class: "cp-alternative-bar" }, h("i", { style: `width: ${(100 * share).toFixed(1)}%` })),
    h("span", { class: "cp-alternative-share" }, percent(share)),
    isChosen ? icon("check") : h("span", {}),
  );
}

/** Move through the alternatives with the arrow keys. */
function walk(event) {
  const rows = [...event.currentTarget.querySelectorAll(".cp-alternative")];
  const at = rows.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key];
  if (to === undefined || at < 0) return;
  event.preventDefault();
  event.stopPropagation();
  const next = rows[(to + rows.length) % rows.length];
  for (const row of rows) row.tabIndex = row === next ? 0 : -1;
  next.focus();
}

/** Return a choice of how many branches to write. */
function sampleChoice(app) {
  const most = app.connection.welcome?.limits.max_samples ?? SAMPLES.at(-1);
  const numbers = SAMPLES.filter((n) => n <= most);
  const choice = { value: Math.min(memory.get("branches", 1), numbers.at(-1)), element: null };
  const pick = (n) => {
    choice.value = n;
    memory.set("branches", n);
    show();
  };
  const buttons = numbers.map((n) =>
    h(
      "button",
      {
        type: "button",
        class: "cp-n",
        role: "radio",
        "aria-label": `${n} ${n === 1 ? "branch" : "branches"}`,
        onclick: () => pick(n),
      },
      `×${n}`,
    ),
  );
  const show = () =>
    buttons.forEach((button, i) => {
      const isOn = numbers[i] === choice.value;
      button.classList.toggle("is-on", isOn);
      button.setAttribute("aria-checked", String(isOn));
      button.tabIndex = isOn ? 0 : -1;
    });
  const turn = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const to = (numbers.indexOf(choice.value) + step + numbers.length) % numbers.length;
    pick(numbers[to]);
    buttons[to].focus();
  };
  choice.element = h(
    "span",
    { class: "cp-samples", role: "radiogroup", "aria-label": "How many branches", onkeydown: turn },
    ...buttons,
  );
  show();
  return choice;
}

/** Return a token's text with its spaces and line breaks to be seen. */
export function visible(text) {
  return text === "" ? "∅" : text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

/** Return a probability as people write it. */
function percent(share) {
  const value = 100 * share;
  if (!Number.isFinite(value)) return "–";
  if (value > 0 && value < 0.01) return "<0.01 %";
  return `${value >= 10 ? Math.round(value) : value >= 1 ? value.toFixed(1) : value.toFixed(2)} %`;
}
