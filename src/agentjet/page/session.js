// The session of this tab: from the one-time code of `agentjet open`, from another tab, or from a token.
import { Problem, request, url } from "./api.js";
import { session, signedOut } from "./store.js";
import { DEFAULT_RUN, go } from "./route.js";

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
