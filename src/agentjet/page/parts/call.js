// A call of `GET /episodes/{id}?form=runs`, with one entry a token in each array, and joined calls: a timeline.
import { visible } from "./format.js";

const LINE_END = /\n/g;

// Returns a function that shows a token's text: control characters are visible, and a line end has a mark.
function shownIn(text) {
  const mark = (piece) => piece.replace(LINE_END, "↵\n");
  return visible(text) === text ? mark : (piece) => mark(visible(piece));
}

// Writes [[value, count], ...] into `into` from position `at`.
function spread(runs, into, at) {
  let next = at;
  for (const [value, count] of runs) {
    into.fill(value, next, next + count);
    next += count;
  }
  return into;
}

// Returns the call with these arrays. Context comes first, then the sampled tokens.
//   shown: the text to draw; at[i] to at[i + 1]: the part of token i in it
//   sampled, trained: 1 or 0; logprobs, versions, allowed: null for context. `allowed` null: the whole vocabulary.
//   start: position of its first token in the timeline
export function readCall(call) {
  const count = call.lengths.length;
  const context = call.num_context;
  const at = new Uint32Array(count + 1);
  const pieces = new Array(count);
  const shown = shownIn(call.text);
  let from = 0;
  for (let i = 0; i < count; i += 1) {
    const to = from + call.lengths[i];
    pieces[i] = shown(call.text.slice(from, to));
    at[i + 1] = at[i] + pieces[i].length;
    from = to;
  }
  const column = (runs) => spread(runs, new Array(count).fill(null), context);
  return {
    ...call,
    id: call.call_id,
    count,
    start: call.parent === null ? 0 : call.kept,
    at,
    shown: pieces.join(""),
    sampled: new Uint8Array(count).fill(1, context),
    trained: spread(call.mask, new Uint8Array(count), context),
    logprobs: [...new Array(context).fill(null), ...call.logprobs],
    versions: column(call.versions),
    allowed: column(call.allowed),
  };
}

// Returns the shown text of token `i`.
export const tokenText = (call, i) => call.shown.slice(call.at[i], call.at[i + 1]);

// Returns the token at a position of the shown text. A token without text is skipped.
export function tokenAt(call, position) {
  let low = 0;
  let high = call.count - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (call.at[middle + 1] > position) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Yields [first, stop, tone] of the tokens from `from` to `to`, neighbours of equal tone together. `toneOf(i)` is ""
// for a token without a mark.
export function* tonedRuns(toneOf, from, to) {
  let first = from;
  let tone = "";
  for (let i = from; i <= to; i += 1) {
    const next = i < to ? toneOf(i) : "";
    if (next === tone) continue;
    if (tone) yield [first, i, tone];
    first = i;
    tone = next;
  }
}

// Returns the calls by id.
const byId = (calls) => new Map(calls.map((call) => [call.id, call]));

// Returns the calls whose end no other call continues: one for each timeline.
export function lastCalls(calls) {
  const known = byId(calls);
  const continued = new Set();
  for (const call of calls) {
    const parent = known.get(call.parent);
    if (parent && call.kept === parent.start + parent.count) continued.add(parent.id);
  }
  return calls.filter((call) => !continued.has(call.id));
}

const COLUMNS = ["sampled", "trained", "logprobs", "versions", "allowed"];

// Returns the whole timeline that ends with the call `last`, in the form of one call.
export function timelineOf(calls, last) {
  const known = byId(calls);
  const pieces = [];
  let stop = last.start + last.count;
  for (let call = last; call; call = known.get(call.parent)) {
    pieces.unshift(partOf(call, 0, Math.max(0, Math.min(call.count, stop - call.start))));
    stop = Math.min(stop, call.start);
  }
  const joined = { ...last, start: 0, count: 0, at: [0], shown: "" };
  for (const name of COLUMNS) joined[name] = pieces.flatMap((piece) => Array.from(piece[name]));
  for (const piece of pieces) {
    for (let i = 1; i <= piece.count; i += 1) joined.at.push(joined.shown.length + piece.at[i]);
    joined.shown += piece.shown;
    joined.count += piece.count;
  }
  return joined;
}

// Returns tokens `first` to `stop` of a call in the form of a call.
export function partOf(call, first, stop) {
  const from = call.at[first];
  const part = {
    ...call, count: stop - first, start: call.start + first, shown: call.shown.slice(from, call.at[stop]),
    at: Array.from(call.at.slice(first, stop + 1), (end) => end - from),
  };
  for (const name of COLUMNS) part[name] = call[name].slice(first, stop);
  return part;
}

// Returns the number of first tokens that all timelines share, by their shown texts.
export function sharedCount(timelines) {
  const [first, ...others] = timelines;
  const most = Math.min(...timelines.map((one) => one.count));
  for (let i = 0; i < most; i += 1) {
    const text = tokenText(first, i);
    if (others.some((other) => tokenText(other, i) !== text)) return i;
  }
  return most;
}

// Returns { call, index } of the sampled token whose log-probability comes after `above` in rising order, or null.
export function leastLikely(calls, above = -Infinity) {
  let found = null;
  let lowest = Infinity;
  for (const call of calls) {
    for (let i = call.num_context; i < call.count; i += 1) {
      const value = call.logprobs[i];
      if (value !== null && value > above && value < lowest) {
        lowest = value;
        found = { call, index: i };
      }
    }
  }
  return found;
}

// ---- the causes of forks in words

const CAUSES = {
  template: "the chat template writes the known history differently, for example without the reasoning",
  edit: "the agent changed its history",
  tools: "the agent offers another list of tools",
  retry: "the same request came again, because its answer did not arrive",
  role: "the first call of another role, which has a separate tree",
  branch: "a second continuation of the same history: a vote, a sub-agent or best of n",
};
const SHOWN_TOKENS = 8;

const some = (call, from) => {
  const words = [];
  for (let i = from; i < Math.min(call.count, from + SHOWN_TOKENS); i += 1) words.push(tokenText(call, i));
  return words.join("");
};

// Returns how a call continues, in one sentence. `numbers` has the number of each call by id; `parent` is a call or
// undefined.
export function continuation(call, parent, numbers) {
  if (!parent) {
    if (!call.fork) return call.start ? `Continues a call that is not kept.` : "";
    return `Begins a separate tree: ${CAUSES[call.fork] ?? call.fork}.`;
  }
  const name = `call ${numbers.get(parent.id)}`;
  if (!call.fork) return `Continues ${name}.`;
  return `Forks from ${name} after ${call.kept} tokens: ${CAUSES[call.fork] ?? call.fork}.`;
}

// Returns the texts with which the old and the new timeline differ, or null if the old one does not go on there.
export function difference(call, parent) {
  const from = parent ? call.kept - parent.start : -1;
  if (!call.fork || from < 0 || from >= parent.count || !call.count) return null;
  return { before: visible(some(parent, from)), after: visible(some(call, 0)) };
}
