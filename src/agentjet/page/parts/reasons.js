// Why a group was dropped, in words. A reason that is not here is one of a recipe.

const DROPPED = {
  zero_variance: "all rewards of the group were equal, so there was nothing to compare",
  too_few: "fewer episodes finished than job.min_group_size",
  no_tokens: "its episodes sampled nothing",
  no_members: "all its episodes ended without a reward",
  stalled: "its task set finished nothing while others waited for it",
  surplus: "the batch was full without it",
  stale: "its tokens were older than job.max_staleness",
  poisoned: "workers crashed on it",
  rolled_back: "the run went back to an earlier version",
};

// An episode that ended without a reward because its work was no longer wanted: not a failure.
const UNWANTED = ["surplus", "stale", "not needed", "replaced"];
const isUnwanted = ({ reason }) => UNWANTED.some((start) => reason?.startsWith(`${start}:`));

// The colour of an episode's status.
export function toneOf(episode) {
  if (!["aborted", "expired"].includes(episode.status)) return "";
  return isUnwanted(episode) ? "muted" : "bad";
}

export function droppedBecause(reason) {
  return Object.hasOwn(DROPPED, reason) ? DROPPED[reason] : "the recipe refused it";
}
