"""Turns: advantages of single calls, and comparisons that count turns. Critics of turns are in `critic`.

| reads | recipes |
|---|---|
| rewards of calls | `mars`, centred for each role; `dense_turn_credit`, compared with the same turn of the group |
| rewards of calls or episodes, and what was observed before each call | `gigpo`; `hgpo`, and before earlier calls |
| successes, and the graph of what was observed | `graph_gpo` |
| the number of turns | `stratified_grpo` |
| entropies of turns, of which each counts once | `stepwise_grpo`, and `dart` in `sampling` |

`_C` are the calls of a batch, `_ER` episodes and roles, `_G` the members of a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from agentjet.recipes.baselines import Grpo
from agentjet.recipes.policy_gradient import (
    EPS,
    FloatArray,
    Outputs,
    PolicyGradient,
    centred,
    compared_rewards,
    facts_of,
)
from agentjet.recipes.recipe import Need
from agentjet.section import Int64
from agentjet.timeline.batch import Facts, TrainingBatch
from agentjet.timeline.forest import Forest, observations, select


def num_calls(facts: Facts, counted_C: NDArray[np.bool_] | bool = True) -> NDArray[np.int64]:
    """Returns the number [E, R] of calls of each episode and role: of all, or of those that are True in `counted_C`."""
    sums_ER = np.zeros(facts.spoke.shape, np.int64)
    np.add.at(sums_ER, (facts.call_episode, facts.call_role), counted_C)
    return sums_ER


def same_calls(*keys: NDArray[np.integer[Any]]) -> Iterator[NDArray[np.intp]]:
    """Yields the calls with equal values of all keys [C], for each combination of values."""
    _, place_C = np.unique(np.stack(keys, axis=1), axis=0, return_inverse=True)
    for place in range(int(place_C.max(initial=-1)) + 1):
        yield np.flatnonzero(place_C.reshape(-1) == place)  # NumPy 2.0 gives it the shape of the keys.


def rewards_to_go(facts: Facts, rewards_C: FloatArray, gamma: float) -> FloatArray:
    """Returns the discounted sum [C] of the rewards of each call and of later calls of its role in its episode."""
    sums_C = np.zeros_like(rewards_C)
    later: dict[tuple[int, int], float] = {}
    for call in np.argsort(-facts.call_turn, kind="stable").tolist():
        sequence = int(facts.call_episode[call]), int(facts.call_role[call])
        later[sequence] = sums_C[call] = rewards_C[call] + gamma * later.get(sequence, 0.0)
    return sums_C


Observed = tuple[int, int, bytes | None]
"""A group, a role and what was observed before a call of it; None for a success."""


def calls_after(recipe: PolicyGradient, batch: TrainingBatch) -> dict[Observed, list[int]]:
    """Returns the calls that the recipe compares, by what was observed before them."""
    facts, seen_C = facts_of(batch), observations(batch.forest)
    is_compared_C = recipe.compared(facts)[facts.call_episode, facts.call_role]
    calls: dict[Observed, list[int]] = {}
    for call in np.flatnonzero(is_compared_C).tolist():
        if call in seen_C:
            place = int(facts.groups[facts.call_episode[call]]), int(facts.call_role[call]), seen_C[call]
            calls.setdefault(place, []).append(call)
    return calls


def turn_keys(facts: Facts) -> list[tuple[int, int, int]]:
    """Returns the episode, the role and the turn [C] of each call."""
    return list(zip(facts.call_episode.tolist(), facts.call_role.tolist(), facts.call_turn.tolist(), strict=True))


class SameObservation(Grpo):
    """The base of recipes that compare the calls of a group after the same observation."""

    step_weight: float = Field(1.0, ge=0)
    """Weight of the advantage of the call. 0: that of the episode only."""

    equal_rewards_teach: ClassVar[bool] = True

    def call_values(self, facts: Facts, calls: Mapping[Observed, list[int]]) -> FloatArray:
        """Returns the values [C] by which calls are compared. `calls` are those after each observation."""
        raise NotImplementedError

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        facts, calls = facts_of(batch), calls_after(self, batch)
        values_C, steps_C = self.call_values(facts, calls), np.zeros(len(facts.call_turn))
        for same in calls.values():
            steps_C[same] = self.group_advantages(values_C[same])
        return super().token_advantages(batch) + (self.step_weight * steps_C[batch.forest["call"]]).astype(np.float32)


class Gigpo(SameObservation):
    """GiGPO: the advantage of the episode, plus that of the call among calls of the group after the same observation.

        A = A_episode + step_weight A_step,  A_episode = r - mean(r)
        A_step = G_k - mean of G over calls with the same observation,  G_k = r_k + gamma G_{k+1}

    Source: arXiv 2505.10978. Confidence: equal to github.com/langfengQ/DrMAS at 3b556f2 in the advantage. An
    observation is the text between the role's answer and its next call; without rewards of calls, the last call has the
    episode's reward. If the template rewrites earlier answers, calls rarely share an observation: set `job.history =
    "as_sampled"`.
    Use: environments whose states recur, such as web pages, households and games.
    Cost: as GRPO.
    """

    name: str = "gigpo"
    gamma: float = Field(0.95, ge=0, le=1)
    """Discount of later calls."""
    normalise: bool = False
    """Divide both advantages by the standard deviation, as GRPO does."""

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        return super().group_advantages(rewards_G) if self.normalise else centred(rewards_G)

    def call_values(self, facts: Facts, calls: Mapping[Observed, list[int]]) -> FloatArray:
        return rewards_to_go(facts, call_rewards(facts), self.gamma)


class Hgpo(Grpo):
    """HGPO: calls are compared after the same observation, and again after the same history of observations.

        A = sum over k of (k + 1)^alpha A_k / sum over k of (k + 1)^alpha, over k = 1, ..., history + 1 with A_k not 0
        A_k = (G - mean) / (std + 1e-6) over the calls of the group with the same newest k observations
        G = discounted rewards to come, as in `gigpo`; std is that of the population

    Source: openreview.net/forum?id=T8Dev99qnz (ICLR 2026). Confidence: equal to github.com/OliverLeeXZ/SERL at 3c63ef3,
    which has the authors' code in recipe/hgpo, in the advantage, without its `base_group`. Observations are those of
    `gigpo`.
    Use: as `gigpo`, if agents see earlier turns, too: the same observation then differs by the way to it.
    Cost: as GRPO.
    """

    name: str = "hgpo"
    gamma: float = Field(0.95, ge=0, le=1)
    """Discount of later calls."""
    history: Int64 = Field(2, ge=0)
    """Number of earlier observations that are compared, too. 0: the present observation only."""
    alpha: float = Field(1.0, ge=0)
    """Exponent of the weights: larger values trust comparisons with a longer history more. 0: equal weights."""
    normalise: bool = True
    """Divide by the standard deviation."""

    equal_rewards_teach: ClassVar[bool] = True

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        facts = facts_of(batch)
        seen = {call: observed for observed, same in calls_after(self, batch).items() for call in same}
        keys, values_C = turn_keys(facts), rewards_to_go(facts, call_rewards(facts), self.gamma)
        at = {key: call for call, key in enumerate(keys)}
        sums_C, weights_C = np.zeros((2, len(values_C)))
        for k in range(1, self.history + 2):
            alike: dict[tuple[Observed | None, ...], list[int]] = {}
            for call in seen:
                episode, role, turn = keys[call]
                newest = [at.get((episode, role, turn - back), -1) for back in range(k)]
                alike.setdefault(tuple(seen.get(one) for one in newest), []).append(call)
            for history, same in alike.items():
                if None not in history:
                    found = centred(values_C[same]) / (np.std(values_C[same]) + EPS if self.normalise else 1.0)
                    counts = np.abs(found) > EPS
                    sums_C[same] += np.where(counts, found, 0.0) * (k + 1) ** self.alpha
                    weights_C[same] += counts * (k + 1) ** self.alpha
        advantages_C = sums_C / np.where(weights_C > 0, weights_C, 1)
        return np.asarray(advantages_C[batch.forest["call"]], np.float32)


class GraphGpo(SameObservation):
    """GraphGPO: GRPO, plus the advantage of the call among calls after the same observation, by the way to a success.

        A = A_episode + step_weight A_step,  A_step = (g_k - mean) / (std + 1e-6) over calls with the same observation
        g_k = 10 omega^d, d = fewest calls from the next observation to a success, over all episodes of the group

    An observation without a way has one call more than the longest way. A group without success has A_step = 0.
    Source: arXiv 2605.26684, as github.com/redai-infra/Relax at 9545630 reproduces it with a cost of 1 for each call.
    Confidence: inspired by: observations are those of `gigpo`, and an episode counts once in A_episode.
    Use: as `gigpo`, if failures pass through the same states as successes: a detour costs, also in a success.
    Cost: as GRPO.
    """

    name: str = "graph_gpo"
    omega: float = Field(0.1, gt=0, lt=1)
    """Factor of the value for each further call on the way."""
    pass_reward: float = 0.5
    """Smallest reward of an episode that is a success."""

    def call_values(self, facts: Facts, calls: Mapping[Observed, list[int]]) -> FloatArray:
        place = {call: observed for observed, same in calls.items() for call in same}
        keys = turn_keys(facts)
        at = {key: call for call, key in enumerate(keys)}
        passes_ER = compared_rewards(facts) >= self.pass_reward
        after: dict[int, Observed] = {}
        before: dict[Observed, set[Observed]] = {}
        for call, (group, role, _) in place.items():
            episode, _, turn = keys[call]
            following = at.get((episode, role, turn + 1))
            if following in place:
                after[call] = place[following]
            elif following is None and passes_ER[episode, role]:
                after[call] = group, role, None
            if call in after:
                before.setdefault(after[call], set()).add(place[call])
        distances: dict[Observed, int] = {}
        longest: dict[tuple[int, int], int] = {}
        nodes = {node for node in before if node[2] is None}
        while nodes:
            far = max(distances.values(), default=-1) + 1
            distances |= dict.fromkeys(nodes, far)
            longest |= dict.fromkeys((node[:2] for node in nodes), far)
            nodes = {earlier for node in nodes for earlier in before.get(node, ())} - distances.keys()
        values_C = np.zeros(len(keys))
        for call, (group, role, _) in place.items():
            if (group, role) in longest:
                way = distances[after[call]] if after.get(call) in distances else longest[group, role] + 1
                values_C[call] = 10 * self.omega**way
        return values_C


def call_rewards(facts: Facts) -> FloatArray:
    """Returns the reward [C] of each call. If none is named for a role of an episode, its last call has the reward of
    the episode.
    """
    place_C = facts.call_episode, facts.call_role
    last_ER = np.full(facts.spoke.shape, -1)
    np.maximum.at(last_ER, place_C, facts.call_turn)
    is_unnamed_ER = num_calls(facts, ~np.isnan(facts.call_rewards)) == 0
    ends_C = (facts.call_turn == last_ER[place_C]) & is_unnamed_ER[place_C]
    return np.nan_to_num(np.where(ends_C, compared_rewards(facts)[place_C], facts.call_rewards))


class Mars(PolicyGradient):
    """MARS turn-level: rewards of turns, centred for each role, summed from each turn to the end.

        A_k = sum over turns j >= k of gamma^(j - k) (r_j - mean of the role's turn rewards in the task set)

    Source: github.com/thu-nics/MARS at 5979f75. Confidence: after its core, without the whitenings, and without the
    second mean of each role, of the sums.
    Use: multi-turn games and tools whose turns have rewards. Agents finish with `by_turn` or `by_call`; a call without
    a reward has 0, and the reward of the episode is not used.
    Cost: as GRPO.
    """

    name: str = "mars"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of later turns."""

    needs_call_rewards: ClassVar[bool] = True
    smallest_group: ClassVar[int] = 1
    compares_rewards: ClassVar[bool] = False

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        facts = facts_of(batch)
        rewards_C = np.nan_to_num(facts.call_rewards)
        task_set_C = np.unique([task_set for task_set, _ in facts.tasks], return_inverse=True)[1][facts.call_episode]
        for calls in same_calls(task_set_C, facts.call_role):
            rewards_C[calls] -= rewards_C[calls].mean()
        advantages_C = rewards_to_go(facts, rewards_C, self.gamma)
        return advantages_C[batch.forest["call"]].astype(np.float32)


class DenseTurnCredit(PolicyGradient):
    """Dense turn credit: rewards of turns, as shares of the episode, compared with the same turn of the group.

        A_k = G_k - mean of G_k over the group,  G_k = r_k / n + gamma G_{k+1}
        n = number of turns with a positive reward in a won episode, else num_rewards

    Source: github.com/pearls-lab/meow-tea-taro at a9c248c, its placement of rewards; the comparison by turn is ours.
    Confidence: inspired by.
    Use: subgoals in long episodes. Agents finish with `by_turn` or `by_call`; an episode with a positive reward is won.
    A turn that no other episode of the group reaches has advantage 0.
    Cost: as GRPO.
    """

    name: str = "dense_turn_credit"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of later turns."""
    num_rewards: Int64 = Field(0, ge=0)
    """Number of rewards in a complete episode, the divisor of lost ones. 0: the episode's number of turns."""

    needs_call_rewards: ClassVar[bool] = True
    compares_rewards: ClassVar[bool] = False

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        facts = facts_of(batch)
        rewards_C = np.nan_to_num(facts.call_rewards)
        num_positive_ER = num_calls(facts, rewards_C > 0)
        divisors_ER = np.where(facts.rewards[:, None] > 0, num_positive_ER, self.num_rewards or num_calls(facts))
        shares_C = rewards_C / np.maximum(1, divisors_ER)[facts.call_episode, facts.call_role]
        sums_C = rewards_to_go(facts, shares_C, self.gamma)
        for calls in same_calls(facts.groups[facts.call_episode], facts.call_role, facts.call_turn):
            sums_C[calls] = centred(sums_C[calls])
        return sums_C[batch.forest["call"]].astype(np.float32)


class StratifiedGrpo(Grpo):
    """Stratified GRPO: episodes are compared with those of the same number of turns, blended with GRPO.

        A_i = alpha GRPO(episodes of the stratum) + (1 - alpha) GRPO(episodes of the group)
        stratum = min(calls of the role in the episode, max_turns)

    Source: arXiv 2510.06214, read in notes about it. Confidence: inspired by; alpha and strata are ours.
    Use: search and tool agents whose episodes differ in structure.
    Cost: as GRPO.
    """

    name: str = "stratified_grpo"
    alpha: float = Field(0.8, ge=0, le=1)
    """Weight of the comparison within strata. 0: GRPO."""
    max_turns: Int64 = Field(4, ge=1)
    """Episodes with this number of turns or more are one stratum."""

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        facts = facts_of(batch)
        turns_ER, advantages_ER = num_calls(facts), np.zeros(facts.spoke.shape)
        for episodes, role, rewards_G in self.comparisons(facts):
            strata_G = np.minimum(turns_ER[episodes, role], self.max_turns)
            within_G = np.zeros_like(rewards_G)
            for stratum in np.unique(strata_G):
                within_G[strata_G == stratum] = self.group_advantages(rewards_G[strata_G == stratum])
            whole_G = self.group_advantages(rewards_G)
            advantages_ER[episodes, role] = self.alpha * within_G + (1 - self.alpha) * whole_G
        return advantages_ER


class StepwiseGrpo(Grpo):
    """Step-wise GRPO: every turn counts once, and only the most uncertain turns are trained.

        A_i = (r_i - mean) / (std + 1e-6), over the turns of the group, each with the reward of its episode
        L = mean over the turns of the batch of the mean over the turn's tokens; a turn is a sequence
        Turns outside the `keep` share with the highest mean entropy are left out of the batch.

    Source: github.com/Computer-use-agents/dart-gui at e0e606d, and notes about DART-GUI. Confidence: inspired by; the
    mean over turns is ours, and entropies are those of the weights before the batch. `correction = "tis"` with
    `correction_high = 1` adds DART's importance weights.
    Use: long episodes whose turns have separate contexts, such as graphical interfaces.
    Cost: one more forward pass for the entropies; turns that are left out are not computed.
    """

    name: str = "stepwise_grpo"
    aggregation: Literal["auto", "token_mean", "sequence_mean", "sequence_sum", "constant"] = "sequence_mean"
    """Reduction of the token losses; see `grpo`. A turn is a sequence."""
    keep: float = Field(0.8, gt=0, le=1)
    """Share of the batch's turns that is trained, the most uncertain ones. 1: all, without entropies."""

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {"entropy"} if self.keep < 1 else super().needs

    def columns(self, batch: TrainingBatch, outputs: Outputs) -> tuple[Forest, dict[str, float]]:
        """Each turn is a sequence."""
        forest = batch.forest.with_columns(sequence=batch.forest["call"])
        every = np.full(forest.num_targets, True)
        return super().columns(replace(batch, forest=select(forest, every)), outputs)  # `select` counts the sequences.

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        facts = facts_of(batch)
        turns_ER, advantages_ER = num_calls(facts), np.zeros(facts.spoke.shape)
        for episodes, role, rewards_G in self.comparisons(facts):
            turns_G = turns_ER[episodes, role]
            of_turns = self.group_advantages(np.repeat(rewards_G, turns_G)) if turns_G.any() else np.zeros(1)
            first_G = np.minimum(np.cumsum(turns_G) - turns_G, len(of_turns) - 1)
            advantages_ER[episodes, role] = np.where(turns_G > 0, of_turns[first_G], 0.0)
        return advantages_ER

    def counting(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Without the turns of low entropy."""
        if self.keep == 1:
            return super().counting(batch, advantage)
        calls, inverse, counts = np.unique(batch.forest["call"], return_inverse=True, return_counts=True)
        mean_entropy = np.bincount(inverse, batch.forest["entropy"].astype(np.float64), len(calls)) / counts
        number = int(self.keep * len(calls)) or len(calls)
        kept = np.argsort(-mean_entropy, kind="stable")[:number]
        return np.isin(inverse, kept)
