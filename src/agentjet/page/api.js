// Requests to the server: `get`, `send`, and the `Problem` that both throw; and the session in which they are sent.
import { take } from "./first.js";
import { session, signedOut } from "./store.js";
import { DEFAULT_RUN, go, route } from "./route.js";

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
    response = await (take(String(target)) ?? fetch(target, {
      method, signal, headers: given, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body),
    }));
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "unreachable", UNREACHABLE);
  }
  signal?.throwIfAborted(); // A request that `first.js` began does not end with the signal.
  if (!response.ok) await refuse(response, key);
  return response;
}

// Returns the JSON of `GET /swarm/v1{path}`. `run` names another run than the one of the page.
export async function get(path, query = {}, { signal, run } = {}) {
  const response = await request("GET", url(path, query, run), { signal });
  const value = await response.json();
  signal?.throwIfAborted();
  return value;
}

// Sends a change and returns the JSON of the answer. A repeated request with the same `once` has one effect.
export async function send(method, path, body, { once = crypto.randomUUID?.(), signal } = {}) {
  const headers = once && method === "POST" ? { "Idempotency-Key": once } : {};
  const response = await request(method, url(path), { body, signal, headers });
  return response.status === 204 ? null : response.json();
}

// ---- the session of this tab: from the one-time code of `agentjet open`, from another tab, or from a token

const STORED = "agentjet.session";
const ASK_MS = 150;
const channel = new BroadcastChannel("agentjet/session");

channel.onmessage = ({ data }) => {
  const held = session.peek();
  if (data.ask && held) channel.postMessage({ session: held });
};

function keep(held) {
  sessionStorage.setItem(STORED, JSON.stringify(held));
  session.value = held;
  signedOut.value = "";
}

function stored() {
  try {
    return JSON.parse(sessionStorage.getItem(STORED)); // The server knows whether it has ended.
  } catch {
    return null;
  }
}

// Returns the session of another tab of this server, or null.
function fromAnotherTab() {
  return new Promise((done) => {
    const ask = new BroadcastChannel("agentjet/session");
    const end = (held) => { ask.close(); done(held); };
    ask.onmessage = ({ data }) => { if (data.session) end(data.session); };
    ask.postMessage({ ask: true });
    setTimeout(end, ASK_MS, null);
  });
}

async function exchange(code) {
  const response = await request("POST", url("/sessions/exchange", {}, DEFAULT_RUN), { body: { code }, key: "" });
  keep(await response.json());
}

// Opens a session with a token of the run: the page does not keep the token. Throws `Problem`.
export async function signIn(token, role, run) {
  const response = await request("POST", url("/sessions", {}, run), { body: { role }, key: token.trim() });
  await exchange((await response.json()).code);
}

export function signOut() {
  sessionStorage.removeItem(STORED);
  session.value = null;
}

// Takes the code out of the URL, or finds a session. Call it once, before anything else reads the route.
export async function open() {
  const given = new URLSearchParams(location.hash.slice(1));
  const code = given.get("code");
  if (!code) {
    session.value = stored() ?? (await fromAnotherTab());
    return;
  }
  const path = given.get("to") ?? "/";
  go(path, {}, { replace: true }); // The code is used up now; it must not stay in the history.
  try {
    await exchange(code);
    go(path, {}, { replace: true, run: session.peek().run });
  } catch (error) {
    session.value = stored();
    if (!(error instanceof Problem)) throw error;
    signedOut.value = error.detail;
  }
}
