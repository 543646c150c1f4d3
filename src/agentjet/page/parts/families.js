// Metrics by family: the part of a name before its first slash, in the order of what one looks at first.

const FIRST = ["reward", "groups", "episodes", "policy", "optim", "agent", "critic", "dpo", "kto", "completion", "batch"];
const LAST = ["code", "forest", "weights", "learner", "sampler", "time", "perf"];
const TITLES = {
  reward: "Reward", groups: "Groups", episodes: "Outcomes", policy: "Policy", optim: "Optimiser", agent: "From agents",
  critic: "Critic", dpo: "Pairs", kto: "Answers", completion: "Calls", batch: "Batches", code: "Code versions", forest: "Forest",
  weights: "Weights", learner: "Learner", sampler: "Sampler", time: "Time", perf: "Speed", episode: "Episodes",
};

// Returns [[title, names], ...]. Names of a policy's metrics, such as `planner/policy/entropy`, are a family each.
export function families(names) {
  const found = new Map();
  for (const name of [...names].sort()) {
    const family = name.split("/", 1)[0];
    found.set(family, [...(found.get(family) ?? []), name]);
  }
  const place = (family) => {
    if (FIRST.includes(family)) return FIRST.indexOf(family);
    return LAST.includes(family) ? 200 + LAST.indexOf(family) : 100;
  };
  return [...found].sort((a, b) => place(a[0]) - place(b[0])).map(([family, those]) => [Object.hasOwn(TITLES, family) ? TITLES[family] : family, those]);
}

// Returns { names, problem } of the names that a regular expression finds; all of them, and the problem, if it is invalid.
export function matching(names, text) {
  try {
    const pattern = new RegExp(text, "iu");
    return { names: names.filter((name) => pattern.test(name)), problem: "" };
  } catch (error) {
    return { names, problem: error.message };
  }
}
