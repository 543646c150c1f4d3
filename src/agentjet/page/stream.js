// Feeds the store from the event stream. One visible tab of a run reads the stream and passes on what it fetched.
import { Problem, get, request, url } from "./api.js";
import { effect, untracked } from "./vendor/ui.js";
import { connection, forget, health, pulse, run, session, status, steps, waiting } from "./store.js";

const SILENCE_MS = 40_000;    // The server sends a comment every 15 s.
const STORED_MS = 2000;       // Between two looks at a run of `agentjet look`.
const RETRY_SECONDS = [1, 1, 2, 3];
const REFUSED_SECONDS = 30;   // A run may begin later.
// What an event of a kind changes. Any other kind changes the status only.
const CHANGES = {
  quiet: ["status", "health", "waiting"], // 15 s without an event: silences grow.
  step: ["status", "steps", "health", "waiting"],
  episode: ["status", "waiting"],
  group: ["status", "waiting"],
  rollback: ["status", "all_steps", "health", "waiting"],
};
const ALL = ["status", "waiting", "health", "all_steps"]; // The short ones first.
const SIGNALS = { status, steps, health, waiting, pulse, connection };

const pause = (ms, signal) => new Promise((done) => {
  const timer = setTimeout(done, ms);
  signal.addEventListener("abort", () => { clearTimeout(timer); done(); }, { once: true });
});

// Yields { id, event, data } of a stream of server-sent events, and {} for the comment that nothing is new.
export async function* parseEvents(body, onBytes = () => {}) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      onBytes();
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const fields = {};
        for (const line of block.split("\n")) {
          const [, name, text] = line.match(/^(\w+): ?(.*)$/) ?? [];
          if (name) fields[name] = text;
        }
        if (fields.data || block.startsWith(": nothing new")) yield fields;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Returns the steps with newer ones appended.
export function joined(known, more) {
  if (!known?.versions.length) return more;
  const old = known.versions.length;
  const added = more.versions.length;
  const metrics = {};
  for (const name of new Set([...Object.keys(known.metrics), ...Object.keys(more.metrics)])) {
    metrics[name] = [
      ...(known.metrics[name] ?? Array(old).fill(null)), ...(more.metrics[name] ?? Array(added).fill(null)),
    ];
  }
  return { versions: [...known.versions, ...more.versions], times: [...known.times, ...more.times], metrics };
}

// The reader of one tab. `tell` receives { name: value } of the signals that changed, until `signal` aborts.
class Reader {
  constructor(tell, signal) {
    this.tell = (changed) => { if (!signal.aborted) tell(changed); }; // The page shows another run by now.
    this.signal = signal;
    this.dirty = new Set();
    this.counts = { ...pulse.peek() };
    this.busy = null;
  }

  // `first`: the first refresh, if it was begun.
  async run(first = null) {
    for (let attempt = 0; !this.signal.aborted; attempt += 1) {
      try {
        await (first ?? this.refresh(ALL));
        first = null;
        await this.follow(() => { attempt = 0; });
      } catch (error) {
        if (this.signal.aborted) return;
        if (error instanceof Problem && error.status === 401) return;
        const isRefused = [403, 404].includes(error.status);
        const seconds = isRefused ? REFUSED_SECONDS : RETRY_SECONDS[Math.min(attempt, RETRY_SECONDS.length - 1)];
        const state = isRefused ? "refused" : "reconnecting";
        this.tell({ connection: { state, seconds, problem: error.detail ?? "The stream ended." } });
        await pause(seconds * 1000, this.signal);
      }
    }
  }

  async follow(onOpen) {
    const ended = new AbortController();
    const signal = AbortSignal.any([this.signal, ended.signal]);
    let silence;
    const alive = () => {
      clearTimeout(silence);
      silence = setTimeout(() => ended.abort(), SILENCE_MS);
    };
    try {
      const response = await request("GET", url("/events", { form: "tick", after: status.peek()?.last_event ?? 0 }), { signal });
      onOpen();
      this.tell({ connection: { state: "live", seconds: 0, problem: null } });
      alive();
      for await (const { data } of parseEvents(response.body, alive)) this.onTick(data ? JSON.parse(data) : { kinds: { quiet: 1 } });
    } finally {
      clearTimeout(silence);
      ended.abort();
    }
    throw new Problem(0, "stream_ended", "The server closed the stream.");
  }

  onTick({ kinds, last_event: at }) {
    for (const [kind, count] of Object.entries(kinds)) {
      for (const name of CHANGES[kind] ?? ["status"]) this.dirty.add(name);
      this.counts[kind] = (this.counts[kind] ?? 0) + count;
    }
    this.counts.at = at;
    this.busy ??= this.drain().finally(() => { this.busy = null; });
  }

  async drain() {
    while (this.dirty.size && !this.signal.aborted) {
      const names = [...this.dirty];
      this.dirty.clear();
      await this.refresh(names).catch(() => {}); // The stream ends, too, if the server does not answer.
    }
  }

  async refresh(names) {
    const newest = names.includes("all_steps") ? null : steps.peek()?.versions.at(-1) ?? null;
    const wanted = new Set(names.map((name) => (name === "all_steps" ? "steps" : name)));
    const changed = { pulse: { ...this.counts } };
    const fetchOne = async (name) => {
      const query = { at: this.counts.at, ...(name === "steps" && { after: newest }) };
      const value = await get(`/${name}`, query, { signal: this.signal });
      changed[name] = name === "steps" && newest ? joined(steps.peek(), value) : value;
    };
    const results = await Promise.allSettled([...wanted].map(fetchOne));
    const failed = results.find((result) => result.status === "rejected" && !(result.reason.status === 404));
    this.tell(changed);
    if (failed) throw failed.reason;
  }
}

function apply(changed) {
  for (const [name, value] of Object.entries(changed)) SIGNALS[name].value = value;
}

// Follows a run until `signal` aborts, as the leader or from the messages of the leader.
function followRun(name, signal) {
  const channel = new BroadcastChannel(`agentjet/${name}`);
  signal.addEventListener("abort", () => channel.close());
  const tell = (changed) => {
    apply(changed);
    channel.postMessage({ changed });
  };
  channel.onmessage = ({ data }) => {
    if (data.changed) apply(data.changed);
    else if (data.ask && reader) tell(Object.fromEntries(Object.entries(SIGNALS).map(([key, one]) => [key, one.peek()])));
  };
  // Read before it is known who leads. The leader's stream begins after the events that were read here.
  const first = new Reader(apply, signal).refresh(ALL);
  first.catch(() => {}); // The leader reports it.
  let reader = null;
  const lead = () => {
    reader = new Reader(tell, signal);
    return reader.run(first);
  };
  if (!navigator.locks) { // Without a secure context, each visible tab reads the stream.
    lead();
    return;
  }
  navigator.locks.request(`agentjet/${name}`, { signal }, lead).catch(() => {});
  channel.postMessage({ ask: true });
}

// Reads a run of `agentjet look`, which has no event stream, and again when its journal has grown.
async function readStored(signal) {
  const reader = new Reader(apply, signal);
  const problem = await reader.refresh(ALL).then(() => null, (error) => error);
  if (!signal.aborted) connection.value = { state: "stored", seconds: 0, problem: problem?.detail ?? null };
  for (;;) {
    await pause(STORED_MS, signal);
    if (signal.aborted) return;
    const now = await get("/status", {}, { signal }).catch(() => null);
    if (!now || now.last_event === status.peek()?.last_event) continue;
    reader.onTick({ kinds: { step: 1, episode: 1, group: 1 }, last_event: now.last_event });
  }
}

let paused = false;
let restart = () => {};

// Stops or resumes the stream by hand.
export function togglePause() {
  paused = !paused;
  restart();
}

// Follows the run of the page from now on. A hidden tab does not read.
export function start() {
  let following = null;
  let shown = "";
  restart = () => {
    following?.abort();
    following = null;
    const name = run.peek();
    if (name !== shown) forget();
    shown = name;
    if (!session.peek() || document.hidden) return;
    if (paused) {
      connection.value = { state: "paused", seconds: 0, problem: null };
      return;
    }
    following = new AbortController();
    connection.value = { state: "connecting", seconds: 0, problem: null };
    if (session.peek().live === false) readStored(following.signal);
    else followRun(name, following.signal);
  };
  document.addEventListener("visibilitychange", restart);
  effect(() => {
    run.value;
    session.value;
    untracked(restart);
  });
}
