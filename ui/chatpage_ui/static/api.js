/**
 * `/api` and `/canvas` over HTTP.
 *
 * Invariant: an answer that is no success is thrown as an ApiError with what the server says; nothing is changed by it here.
 */

export class ApiError extends Error {
  constructor(status, { code, message, version } = {}) {
    super(message || `The server answered ${status}.`);
    this.status = status;
    this.code = code;
    this.version = version;
  }
}

/** Send a request and return the JSON of the answer. */
export async function request(method, path, body) {
  const options = { method, headers: {}, keepalive: method === "PATCH" }; // a change outlives the page that made it
  if (body instanceof Blob) options.body = body;
  else if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new ApiError(0, { code: "offline", message: "The server cannot be reached; nothing was changed." });
  }
  const text = await response.text();
  let value = null;
  try {
    value = text ? JSON.parse(text) : null;
  } catch {
    throw new ApiError(response.status, { message: `The server answered ${response.status} with something that is no JSON.` });
  }
  if (!response.ok) throw new ApiError(response.status, value?.error);
  return value;
}

export const get = (path) => request("GET", path);
export const post = (path, body = {}) => request("POST", path, body);
export const patch = (path, body) => request("PATCH", path, body);
export const remove = (path) => request("DELETE", path);

/** Return the path of a conversation, or of one of its nodes, under `/api`. */
export function pathOf(conversationId, nodeId = null, action = "") {
  const conversation = `/api/conversations/${encodeURIComponent(conversationId)}`;
  const node = nodeId === null ? "" : `/nodes/${encodeURIComponent(nodeId)}`;
  return conversation + node + (action && `/${action}`);
}
