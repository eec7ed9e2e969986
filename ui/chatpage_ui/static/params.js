/**
 * Sampling parameters: Gradio's inputs, the open conversation, and the next run.
 *
 * Invariants: what the inputs show is what a run gets, every value of it: they are read when it is sent. The list is the one of
 * `parameters.py`. Gradio's own way, functions given as text, would need a page that may evaluate text, and ours may not.
 */

import { debounce, memory } from "./dom.js";

const SAVE_MS = 600;
// What a new browser begins with: small models write nonsense at a temperature of 1.
const FIRST = { temperature: 0.7, top_p: 0.95 };
const PARAMETERS = [
  ["n", 1],
  ["temperature", 1],
  ["top_p", 1],
  ["top_k", 0],
  ["min_p", 0],
  ["repetition_penalty", 1],
  ["presence_penalty", 0],
  ["frequency_penalty", 0],
  ["max_tokens", 1024],
  ["seed", ""],
  ["stop", ""],
];

export class Params extends EventTarget {
  #save;
  #known = ""; // what was shown or saved last
  #isWriting = false;
  #system = memory.get("system", "");

  /** @param {(params: object) => void} save keeps the parameters with the open conversation, if there is one */
  constructor(save) {
    super();
    this.values = new Map(PARAMETERS);
    this.#save = debounce(save, SAVE_MS);
  }

  /** Begin: show what this browser remembers, and listen to the inputs below `host`. */
  mount(host) {
    this.#set("n", memory.get("samples", 1));
    this.useRemembered();
    write("cp-system", this.#system);
    addEventListener("pagehide", () => this.flush());
    host.addEventListener("input", () => this.#changed());
    host.addEventListener("change", () => this.#changed());
    // A preset changes the inputs without an event of theirs, some time after it was chosen.
    document.getElementById("cp-preset").addEventListener("focusout", () => setTimeout(() => this.#changed(), 1000));
    host.addEventListener("click", (event) => {
      if (event.target.closest("#cp-neutral")) this.neutral();
      else if (event.target.closest("button")) setTimeout(() => this.#changed(), 50); // a slider's own reset
    });
  }

  /** Show what this browser used last. */
  useRemembered() {
    this.use(memory.get("params", FIRST));
  }

  /** Save what is due, before another conversation opens. */
  flush() {
    this.#save.flush();
  }

  /** Make everything neutral; the number of samples stays. */
  neutral() {
    this.use({});
    this.#known = "";
    this.#changed();
  }

  /** Show the parameters of a conversation; what it has not set is neutral, the number of samples stays. */
  use(params) {
    this.#isWriting = true;
    for (const [name, neutral] of PARAMETERS) {
      if (name === "n") continue;
      this.#set(name, name === "stop" ? (params.stop ?? []).join("\n") : (params[name] ?? neutral));
    }
    this.#isWriting = false;
    this.#known = this.#state;
    this.dispatchEvent(new Event("change"));
  }

  get n() {
    this.#read();
    return this.values.get("n");
  }

  set n(value) {
    this.#set("n", value);
    this.#changed();
  }

  /** The system prompt of new conversations. */
  get system() {
    return read("cp-system") ?? this.#system;
  }

  /** The parameters of a run, or of a conversation. */
  get request() {
    this.#read();
    const params = {};
    for (const [name, value] of this.values) {
      if (name === "n" || value === "") continue;
      params[name] = name === "stop" ? value.split("\n").filter(Boolean) : Number(value);
    }
    return params;
  }

  get #state() {
    return JSON.stringify([...this.values]);
  }

  #changed() {
    if (this.#isWriting) return;
    this.#read();
    memory.set("system", (this.#system = this.system));
    if (this.#known === this.#state) return;
    this.#known = this.#state;
    memory.set("params", this.request);
    memory.set("samples", this.values.get("n"));
    this.#save(this.request);
    this.dispatchEvent(new Event("change"));
  }

  #set(name, value) {
    this.values.set(name, value);
    write(`cp-param-${name}`, value);
  }

  /** Take what the inputs show; what is no number is what it was before. */
  #read() {
    for (const [name, neutral] of PARAMETERS) {
      const text = read(`cp-param-${name}`);
      if (text === null) continue;
      if (neutral === "") this.values.set(name, name === "seed" && !/^\d+$/.test(text.trim()) ? "" : text.trim());
      else if (text !== "" && Number.isFinite(Number(text))) this.values.set(name, Number(text));
    }
  }
}

function inputOf(id) {
  return document.querySelector(`#${id} textarea, #${id} input[type="number"], #${id} input[type="text"], #${id} input:not([type])`);
}

function read(id) {
  return inputOf(id)?.value ?? null;
}

function write(id, value) {
  const input = inputOf(id);
  if (!input || input.value === String(value)) return;
  input.value = String(value);
  input.dispatchEvent(new Event("input", { bubbles: true }));
}
