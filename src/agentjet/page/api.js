// Requests to the server: `get`, `send`, and the `Problem` that both throw.
import { session, signedOut } from "./store.js";
import { DEFAULT_RUN, route } from "./route.js";

export class Problem extends Error {
  constructor(status, code, detail) {
    super(detail);
    this.status = status;
    this.code = code;
    this.detail = detail;
  }
}

const UNREACHABLE = "The server does not answer. It may be stopped or restarting.";

// Returns the URL of a control route of a run.
export function url(path, query = {}, run = route.peek().run) {
  const root = run === DEFAULT_RUN ? "swarm/v1" : `runs/${encodeURIComponent(run)}/swarm/v1`;
  const found = new URL(root + path, document.baseURI);
  for (const [name, value] of Object.entries(query)) {
    if (value !== "" && value != null) found.searchParams.set(name, value);
  }
  return found;
}

// Throws the problem of a refused response. A session that the server refuses ends.
async function refuse(response, key) {
  const problem = await response.json().catch(() => ({}));
  const detail = problem.detail ?? `The server answered ${response.status}.`;
  if (response.status === 401 && key && key === session.peek()?.key) {
    signedOut.value = detail;
    session.value = null;
  }
  throw new Problem(response.status, problem.code ?? "", detail);
}

// Sends a request with the key of the session, or with `key`. Throws `Problem`; status 0 if the server does not answer.
export async function request(method, target, { body, signal, key = session.peek()?.key, headers = {} } = {}) {
  const given = { ...headers };
  if (key) given.Authorization = `Bearer ${key}`;
  if (body !== undefined) given["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(target, {
      method, signal, headers: given, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "unreachable", UNREACHABLE);
  }
  if (!response.ok) await refuse(response, key);
  return response;
}

// Returns the JSON of `GET /swarm/v1{path}`. `run` names another run than the one of the page.
export async function get(path, query = {}, { signal, run } = {}) {
  const response = await request("GET", url(path, query, run), { signal });
  return response.json();
}

// Sends a change and returns the JSON of the answer. A repeated request with the same `once` has one effect.
export async function send(method, path, body, { once = crypto.randomUUID?.(), signal } = {}) {
  const headers = once && method === "POST" ? { "Idempotency-Key": once } : {};
  const response = await request(method, url(path), { body, signal, headers });
  return response.status === 204 ? null : response.json();
}
