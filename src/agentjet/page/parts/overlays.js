// Overlays of tokens, keys 1 to 8. An overlay gives each token a tone, and a legend for people.
// Tones are names of CSS highlights (style/episode.css): heat-0..6, pull-0..6, kind-0..5.

const VERSION_TONES = 6;
const PROBABILITIES = [0.99, 0.9, 0.7, 0.5, 0.3, 0.1];
const UNTRAINED = {
  retry: "the same request came again, and another answer to it is trained",
  undelivered: "the answer did not reach the agent",
  side: "a rule of job.side_calls excludes the call",
};

// The tone of a probability: heat-0 is near 1, heat-6 below 0.1.
function probabilityTone(logprob) {
  const p = Math.exp(logprob);
  const step = PROBABILITIES.findIndex((bound) => p >= bound);
  return `heat-${step < 0 ? PROBABILITIES.length : step}`;
}

// The tone of an advantage: pull-0 pushes down most, pull-3 is zero, pull-6 pulls up most.
export function advantageTone(advantage) {
  const size = Math.abs(advantage);
  const steps = size < 1e-9 ? 0 : size < 0.5 ? 1 : size < 1.5 ? 2 : 3;
  return `pull-${3 + Math.sign(advantage) * steps}`;
}

// Why a whole episode is not trained: [code, words], or null if it is trained.
export function untrainedEpisode(episode, advantage) {
  if (episode.mode === "eval") return ["eval", "an evaluation episode"];
  if (episode.status === "live") return ["live", "the episode has no reward yet"];
  if (episode.status !== "finished") return [episode.status, `the episode ${episode.status}`];
  if (episode.dropped) return ["dropped", `its group was dropped: ${episode.dropped}`];
  if (episode.trained_in === null) return ["waiting", "its batch is not learned yet"];
  if (advantage === 0) return ["zero", "its advantage is 0: the rewards of its group are equal"];
  return null;
}

// The advantage of a call's episode, or of its role where rewards are by role; null if it is not known.
export const advantageOf = ({ advantage, advantages }, call) => advantage ?? advantages?.[call.role] ?? null;

// Why a token is not trained: [code, words], or null if it is trained.
export function untrainedToken(call, i, facts) {
  if (!call.sampled[i]) return ["context", "context: the agent or the template wrote it"];
  if (call.orphan) return [call.orphan, UNTRAINED[call.orphan] ?? call.orphan];
  if (!call.trained[i]) return ["masked", "the recipe leaves it out"];
  return untrainedEpisode(facts.episode, advantageOf(facts, call));
}

const REASON_TONES = { retry: "kind-0", undelivered: "kind-1", side: "kind-2", masked: "kind-3" };
const reasonTone = (code) => REASON_TONES[code] ?? "kind-4";

// The tone of a call's advantage, or "".
export function callTone(call, facts) {
  const advantage = advantageOf(facts, call);
  return advantage === null || call.orphan ? "" : advantageTone(advantage);
}

// The policy versions of an episode's sampled tokens, the oldest first.
function versionsOf({ calls }) {
  const found = new Set(calls.flatMap((call) => call.versions));
  found.delete(null);
  return [...found].sort((a, b) => a - b);
}

function versionTones(facts) {
  facts.versionTones ??= new Map(versionsOf(facts).map((version, i) => [version, `kind-${i % VERSION_TONES}`]));
  return facts.versionTones;
}

function untrainedLegend(facts) {
  const found = new Map();
  for (const call of facts.calls) {
    for (let i = call.num_context; i < call.count; i += 1) {
      const why = untrainedToken(call, i, facts);
      if (why) found.set(why[0], why[1]);
    }
  }
  return [["", "trained, or context"], ...[...found].map(([code, words]) => [reasonTone(code), words])];
}

// `facts` are { episode, calls, advantage, advantages }: `calls` from `readCall`, the others as in a group's episodes.
// legend(facts): [[tone, words], ...]; tone(call, i, facts): a tone or "".
export const OVERLAYS = [
  { key: "1", name: "words", title: "Conversation", legend: () => [], tone: () => "" },
  {
    key: "2", name: "author", title: "Written by",
    legend: () => [
      ["", "the agent and the template"], ["kind-0", "the policy, trained"], ["kind-1", "the policy, not trained"],
    ],
    tone: (call, i, facts) => (!call.sampled[i] ? "" : untrainedToken(call, i, facts) ? "kind-1" : "kind-0"),
  },
  {
    key: "3", name: "probability", title: "Probability",
    legend: () => [
      ...PROBABILITIES.map((bound, step) => [`heat-${step}`, `p at least ${bound}`]), ["heat-6", "p below 0.1"],
    ],
    tone: (call, i) => (call.logprobs[i] === null ? "" : probabilityTone(call.logprobs[i])),
  },
  {
    key: "4", name: "advantage", title: "Advantage",
    legend: (facts) => (facts.calls.every((call) => advantageOf(facts, call) === null) ? [["", "The server has no advantage for this episode."]] : [
      ["pull-0", "−1.5 and below"], ["pull-1", "−1.5 to −0.5"], ["pull-2", "−0.5 to 0"], ["pull-3", "0: no effect"],
      ["pull-4", "0 to 0.5"], ["pull-5", "0.5 to 1.5"], ["pull-6", "1.5 and above"],
    ]),
    tone: (call, i, facts) => (call.trained[i] ? callTone(call, facts) : ""),
  },
  {
    key: "5", name: "version", title: "Policy version",
    legend: (facts) => [...versionTones(facts)].map(([version, tone]) => [tone, `version ${version}`]),
    tone: (call, i, facts) => (call.versions[i] === null ? "" : versionTones(facts).get(call.versions[i])),
  },
  {
    key: "6", name: "forced", title: "Forced",
    legend: () => [
      ["", "every token was possible"], ["kind-0", "one token was possible: forced by the grammar or by top_p, top_k, min_p"],
      ["kind-1", "2 to 10 were possible"], ["kind-2", "more than 10 were possible"],
    ],
    tone: (call, i) => {
      const allowed = call.allowed[i];
      return allowed === null ? "" : allowed === 1 ? "kind-0" : allowed <= 10 ? "kind-1" : "kind-2";
    },
  },
  {
    key: "7", name: "untrained", title: "Not trained",
    legend: untrainedLegend,
    tone: (call, i, facts) => {
      const why = call.sampled[i] ? untrainedToken(call, i, facts) : null;
      return why ? reasonTone(why[0]) : "";
    },
  },
  {
    key: "8", name: "tokens", title: "Tokens",
    legend: () => [["kind-0", "every second token"]],
    tone: (call, i) => (i % 2 ? "kind-0" : ""),
  },
];

// Returns the overlay with this name; the first one if the name is unknown.
export const overlayNamed = (name) => OVERLAYS.find((one) => one.name === name) ?? OVERLAYS[0];
