/**
 * The socket of `chatpage.v1`, kept open.
 *
 * Invariants: what is followed is followed again after every break, from the last number that was seen, so nothing is missed and
 * nothing comes twice. A question that was not answered is asked again; each kind of question can be asked twice without harm
 * (a run is created once per client_msg_id). A connection that says nothing for `SILENCE_MS` counts as broken.
 *
 * Events: "message" (detail: the message), "state" (detail: {state, retryAt}).
 */

import { newId } from "./dom.js";

const PING_MS = 15_000;
const SILENCE_MS = 40_000;
const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 5_000;
const SERVER_GOES = 1012;
const REFUSED = 1008;

export class RequestError extends Error {
  constructor({ code, message, retryable }) {
    super(message);
    this.code = code;
    this.retryable = retryable;
  }
}

export class Connection extends EventTarget {
  #socket = null;
  #topics = new Map(); // key -> {fields, seen}
  #waiting = new Map(); // ref -> {message, resolve, reject}
  #pause = FIRST_PAUSE_MS;
  #timer = 0;
  #heard = 0;

  constructor(url) {
    super();
    this.url = url;
    this.clientId = newId();
    this.state = "connecting";
    this.welcome = null;
    addEventListener("online", () => this.retry());
    document.addEventListener("visibilitychange", () => document.hidden || this.#check());
    setInterval(() => this.#check(), PING_MS);
  }

  get isOpen() {
    return this.state === "open";
  }

  open() {
    clearTimeout(this.#timer);
    const socket = (this.#socket = new WebSocket(this.url, ["chatpage.v1"]));
    socket.onopen = () => socket.send(JSON.stringify({ type: "hello", client_id: this.clientId }));
    socket.onmessage = (event) => socket === this.#socket && this.#take(JSON.parse(event.data));
    socket.onclose = (event) => socket === this.#socket && this.#lost(event.code);
  }

  /** Connect now, if there is no connection. */
  retry() {
    if (this.isOpen || (this.#socket && this.#socket.readyState === WebSocket.OPEN)) return;
    this.#drop();
    this.open();
  }

  /** Follow a run, a conversation or the memory; `seen` is the last number one has, null: everything. */
  follow(fields, seen = null) {
    const topic = { fields, seen };
    this.#topics.set(keyOf(fields), topic);
    if (this.isOpen) this.#subscribe(topic);
  }

  /** Note that the server follows a run for us already, because we created it. */
  adopt(fields, seen = null) {
    if (!this.#topics.has(keyOf(fields))) this.#topics.set(keyOf(fields), { fields, seen });
  }

  isFollowing(fields) {
    return this.#topics.has(keyOf(fields));
  }

  unfollow(fields) {
    if (this.#topics.delete(keyOf(fields)) && this.isOpen) this.#send({ type: "unsubscribe", ...fields });
  }

  /** Send, if there is a connection; for what is of no use later. */
  tell(message) {
    if (this.isOpen) this.#send(message);
  }

  /** Ask, again after a break if need be, and return the answer, or throw a RequestError. */
  ask(message) {
    const ref = message.client_msg_id ?? newId();
    const question = message.client_msg_id ? message : { ...message, ref };
    return new Promise((resolve, reject) => {
      this.#waiting.set(ref, { message: question, resolve, reject });
      if (this.isOpen) this.#send(question);
    });
  }

  #take(message) {
    this.#heard = performance.now();
    switch (message.type) {
      case "welcome":
        this.#welcomed(message);
        return;
      case "pong":
        return;
      case "error":
        if (message.code === "restarting") return; // it is asked, or followed, again when the server is back
        this.#answer(message.ref, (waiting) => waiting.reject(new RequestError(message)));
        break;
      case "plan.result":
        this.#answer(message.ref, (waiting) => waiting.resolve(message));
        break;
      case "run.created":
        this.#answer(message.client_msg_id, (waiting) => {
          this.adopt({ run_id: message.run_id });
          waiting.resolve(message);
        });
        break;
      default:
        this.#note(message);
    }
    this.dispatchEvent(new CustomEvent("message", { detail: message }));
  }

  #answer(ref, then) {
    const waiting = this.#waiting.get(ref);
    if (!waiting) return;
    this.#waiting.delete(ref);
    then(waiting);
  }

  /** Remember how far a topic has been read. */
  #note(message) {
    if (message.type === "tree.patch") {
      const topic = this.#topics.get(keyOf({ conversation_id: message.conversation_id }));
      if (topic) topic.seen = message.version;
    } else if (message.run_id !== undefined) {
      const key = keyOf({ run_id: message.run_id });
      const topic = this.#topics.get(key);
      if (topic) topic.seen = message.seq;
      if (message.type === "run.done") this.#topics.delete(key);
    }
  }

  #welcomed(message) {
    this.welcome = message;
    this.#pause = FIRST_PAUSE_MS;
    this.#setState("open");
    for (const topic of this.#topics.values()) this.#subscribe(topic);
    for (const { message: question } of this.#waiting.values()) this.#send(question);
    this.dispatchEvent(new CustomEvent("message", { detail: message }));
  }

  #subscribe(topic) {
    const after = topic.seen === null ? {} : { after_seq: topic.seen };
    this.#send({ type: "subscribe", ref: keyOf(topic.fields), ...topic.fields, ...after });
  }

  #send(message) {
    this.#socket.send(JSON.stringify(message));
  }

  #lost(code) {
    this.#drop();
    const pause = this.#pause * (0.75 + Math.random() / 2);
    this.#pause = Math.min(2 * this.#pause, LONGEST_PAUSE_MS);
    this.#timer = setTimeout(() => this.open(), pause);
    this.#setState(code === SERVER_GOES ? "restarting" : code === REFUSED ? "refused" : "offline");
  }

  #drop() {
    clearTimeout(this.#timer);
    const socket = this.#socket;
    this.#socket = null;
    if (socket) {
      socket.onopen = socket.onmessage = socket.onclose = null;
      socket.close();
    }
  }

  /** Ask for a sign of life; after sleep a socket may look open and be dead. */
  #check() {
    if (!this.isOpen) return;
    if (performance.now() - this.#heard > SILENCE_MS) this.#lost(0);
    else this.#send({ type: "ping", t: performance.now() });
  }

  #setState(state) {
    this.state = state;
    this.dispatchEvent(new CustomEvent("state", { detail: { state } }));
  }
}

/** Return the name of a topic; an error about a subscription carries it as its `ref`. */
export function keyOf({ run_id, conversation_id }) {
  if (run_id) return `run ${run_id}`;
  return conversation_id ? `conversation ${conversation_id}` : "kv";
}
