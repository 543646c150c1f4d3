// The causes of forks in words.
import { tokenText } from "./call.js";
import { visible } from "./format.js";

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
