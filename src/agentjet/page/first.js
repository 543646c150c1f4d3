// Begins the first requests while the browser still loads the other modules: the session of a one-time code, and what
// the page then reads. `api.js` takes the responses instead of sending the same requests.
const FRESH_MS = 15_000; // Before the first quiet tick: see stream.js.
const READS = ["status", "waiting", "health", "steps"];
const OF_OVERVIEW = ["evaluations", "episodes?limit=10"];
const begun = new Map(); // From the URL of a request to its response.

// The response is there for others after `use` has seen it.
function begin(path, options, use = async () => {}) {
  const url = new URL(path, document.baseURI).href;
  const response = fetch(url, { cache: "no-store", ...options }).then((one) => use(one).then(() => one));
  response.catch(() => {}); // Who takes it reports it.
  begun.set(url, response);
}

// Returns the response to a request that was begun here, once; else undefined.
export function take(url) {
  const response = begun.get(url);
  begun.delete(url);
  return performance.now() < FRESH_MS ? response : undefined;
}

async function beginReads(exchanged, path) {
  const { key, run } = await exchanged.clone().json();
  const root = run === "default" ? "swarm/v1" : `runs/${encodeURIComponent(run)}/swarm/v1`;
  for (const name of path === "/" ? [...READS, ...OF_OVERVIEW] : READS) {
    begin(`${root}/${name}`, { headers: { Authorization: `Bearer ${key}` } });
  }
}

const given = new URLSearchParams(location.hash.slice(1));
if (given.has("code")) {
  const headers = { "Content-Type": "application/json" };
  const body = JSON.stringify({ code: given.get("code") });
  begin("swarm/v1/sessions/exchange", { method: "POST", headers, body },
    async (response) => { if (response.ok) await beginReads(response, given.get("to") || "/"); });
}
