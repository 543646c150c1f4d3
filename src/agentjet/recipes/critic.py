"""Critics: advantages from values that are learned, too.

| value of | recipes |
|---|---|
| each token | `ppo`; `vapo`, whose advantages and values have different lambdas |
| the prompt of each call | `archer`; `digirl`, a probability of success |

The heads predict from the policy's last hidden states, before each sampled token. Observations are skipped: the value
after the last token of a call is that before the first token of the next call. Shapes: M targets, K calls in the order
of sampling, S steps of any kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from agentjet.recipes.losses import Clip, CrossEntropy
from agentjet.recipes.policy_gradient import FloatArray, Outputs, OwnLoss, PolicyGradient, compared_rewards, facts_of
from agentjet.recipes.recipe import ValueHeads
from agentjet.section import Int64
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest, select

if TYPE_CHECKING:
    from torch import Tensor

VALUE_LOSS = "critic/loss"
EXPLAINED = "critic/explained_variance"
IntArray = NDArray[np.intp]


class Critic(PolicyGradient):
    """The parameters and hooks that recipes with value heads share."""

    value_lr: float = Field(1.0, gt=0)
    """Learning rate of the value heads. A step moves a value by about this at most; rewards of another scale than 1
    need another rate."""
    value_coef: float = Field(0.1, ge=0)
    """Factor of the value loss in the gradient of the policy's weights. 0: only the heads learn values."""
    warm_up: Int64 = Field(0, ge=0)
    """First batches of these heads in which only they learn; the policy stays."""

    head_names: ClassVar[tuple[str, ...]] = ("value",)
    smallest_group: ClassVar[int] = 1
    compares_rewards: ClassVar[bool] = False

    @property
    def value_heads(self) -> ValueHeads:
        return ValueHeads(self.head_names, self.value_lr, self.value_coef, self.warm_up)

    def estimates(self, batch: TrainingBatch) -> dict[str, NDArray[np.float64]]:
        """Returns columns [M] that `value_loss` and `token_advantages` read, such as targets of the values."""
        raise NotImplementedError

    def value_loss(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns the losses [M] of the values, with gradient."""
        raise NotImplementedError

    def columns(self, batch: TrainingBatch, outputs: Outputs) -> tuple[Forest, dict[str, float]]:
        if batch.facts is not None and batch.forest.num_targets:
            rewarded = ~np.isnan(batch.facts.of_tokens(compared_rewards(batch.facts), batch.forest))
            if not rewarded.all():
                batch = replace(batch, forest=select(batch.forest, rewarded))
                outputs = {name: values[rewarded] for name, values in outputs.items()}
        if not batch.forest.num_targets:
            return batch.forest, {}
        if batch.facts is not None:
            batch = replace(batch, forest=batch.forest.with_columns(**self.estimates(batch)))
        return super().columns(batch, outputs)

    def contributing(self, forest: Forest) -> NDArray[np.bool_]:
        """All: a token without advantage has a value, too."""
        return np.full(forest.num_targets, True)

    def with_terms(
        self, loss: Tensor, metrics: dict[str, Tensor], logp: Tensor, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().with_terms(loss, metrics, logp, columns)
        value_loss = self.value_loss(columns)
        return loss + value_loss, {**metrics, VALUE_LOSS: value_loss}


class Steps(NamedTuple):
    """The targets of a batch in the order of sampling, sequence after sequence."""

    order: IntArray
    """The targets [M]."""
    rewards: FloatArray
    """Rewards [M] in this order: those of calls at their ends, and that of the episode at the end of the sequence."""
    sequence: IntArray
    """Sequences [M] in this order."""
    starts: IntArray
    """Places of the first tokens of calls."""
    ends: IntArray
    """Places of the last tokens of calls."""

    def at_starts(self, values_K: FloatArray | float) -> FloatArray:
        """Returns an array [M] with the values of calls at their first tokens, and 0 elsewhere."""
        values = np.zeros(len(self.order))
        values[self.order[self.starts]] = values_K
        return values

    def of_calls(self, values_K: NDArray[Any]) -> FloatArray:
        """Returns the value [M] of the call of each target."""
        values = np.zeros(len(self.order))
        values[self.order] = np.repeat(values_K, self.ends + 1 - self.starts)
        return values


def steps(batch: TrainingBatch) -> Steps:
    """Returns the targets in order. A call without a reward has 0. Other rewards are those of `compared_rewards`."""
    facts, forest = facts_of(batch), batch.forest
    calls = forest["call"]
    order = np.lexsort((forest.depth[forest.node], facts.call_turn[calls], forest["sequence"]))
    sequence, call = forest["sequence"][order], calls[order]
    ends = np.flatnonzero(np.append(call[1:] != call[:-1], True))
    last = np.flatnonzero(np.append(sequence[1:] != sequence[:-1], True))
    rewards = np.zeros(len(order))
    rewards[ends] = np.nan_to_num(facts.call_rewards[call[ends]])
    episode, role = facts.call_episode[call[last]], facts.call_role[call[last]]
    rewards[last] += np.nan_to_num(compared_rewards(facts)[episode, role])
    starts = np.concatenate([np.zeros(1, np.intp), ends[:-1] + 1])
    return Steps(order, rewards, sequence.astype(np.intp), starts, ends)


def gae(
    rewards: FloatArray, values: FloatArray, sequence: IntArray, gamma: float, lam: float | FloatArray
) -> FloatArray:
    """Returns generalised advantages [S] (arXiv 1506.02438, equation 16); the value after a sequence is 0.

    `lam` is one lambda, or that [S] of the sequence of each step.

    Steps of one sequence are neighbours, in order. All sequences are computed together, from their ends.
    """
    stops = np.flatnonzero(np.append(sequence[1:] != sequence[:-1], True)) + 1
    lengths = np.diff(stops, prepend=0)
    lam_S = np.broadcast_to(lam, len(rewards))
    following, last, found = np.zeros(len(stops)), np.zeros(len(stops)), np.zeros(len(rewards))
    for back in range(int(lengths.max(initial=0))):
        alive = np.flatnonzero(lengths > back)
        at = stops[alive] - 1 - back
        delta = rewards[at] + gamma * following[alive] - values[at]
        last[alive] = delta + gamma * lam_S[at] * last[alive]
        following[alive] = values[at]
        found[at] = last[alive]
    return found


def explained_variance(values: NDArray[np.floating], returns: NDArray[np.floating]) -> float:
    """Returns 1 - var(returns - values) / var(returns): 1 for perfect values, 0 for equal returns."""
    variance = float(np.var(returns, dtype=np.float64))
    return 1 - float(np.var(returns - values, dtype=np.float64)) / variance if variance > 0 else 0.0


class Ppo(Critic):
    """PPO: the clipped loss with generalised advantages of single tokens, from a value head on the policy.

        d_t = r_t + gamma V_(t+1) - V_t,  A_t = d_t + gamma lambda A_(t+1), then whitened over the batch's tokens
        L = clip + 0.5 max((V - R)^2, (V_old + clamp(V - V_old, +- value_clip) - R)^2),  R = A + V_old before whitening

    t + 1 is the next token of the same role: observations between two calls are skipped. Rewards of turns come at the
    ends of their calls, that of the episode at the end.
    Source: arXiv 1707.06347 and 1506.02438. Confidence: equal to verl 0.9.1 with `loss.dual_clip = 3`; the critic is a
    linear head on the policy's last hidden states instead of a second model.
    Use: long episodes, where one reward for all tokens is too coarse; groups of one episode.
    Cost: one more forward pass for the values; every token is computed.
    """

    name: str = "ppo"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda: 1 trusts the rewards, 0 trusts the values."""
    value_clip: float = Field(0.5, gt=0)
    """A value that moved further than this from that before the batch has no gradient."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, "value", "return")

    def estimates(self, batch: TrainingBatch) -> dict[str, NDArray[np.float64]]:
        advantages = self.advantages(batch, steps(batch), self.lam)
        return {"return": advantages + batch.forest["value"], "gae": advantages}

    def advantages(self, batch: TrainingBatch, sampled: Steps, lam: float | FloatArray) -> FloatArray:
        """Returns the generalised advantages [M], with one lambda or with that of each step in order of sampling."""
        found = np.zeros(batch.forest.num_targets)
        values = batch.forest["value"][sampled.order].astype(np.float64)
        found[sampled.order] = gae(sampled.rewards, values, sampled.sequence, self.gamma, lam)
        return found

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        found = batch.forest["gae"].astype(np.float64)
        deviation = float(np.std(found, ddof=1)) if len(found) > 1 else 1.0
        return np.asarray((found - found.mean()) / np.sqrt(deviation**2 + 1e-8), np.float32)

    def columns(self, batch: TrainingBatch, outputs: Outputs) -> tuple[Forest, dict[str, float]]:
        forest, metrics = super().columns(batch, outputs)
        if forest.num_targets:
            metrics[EXPLAINED] = explained_variance(forest["value"], forest["return"])
        return forest, metrics

    def value_loss(self, columns: Mapping[str, Tensor]) -> Tensor:
        value, old, goal = columns["new_value"], columns["value"], columns["return"]
        # As PPO clips ratios: a value that moved far has no gradient, unless it moved away from the return.
        near = old + (value - old).clamp(-self.value_clip, self.value_clip)
        return 0.5 * ((value - goal) ** 2).maximum((near - goal) ** 2)


class Vapo(Ppo):
    """VAPO: PPO whose values learn unbiased returns, whose lambda grows with length, and whose values learn first.

        policy: lambda = max(0, 1 - 1 / (alpha x tokens of the sequence));  values: lambda = `lam`
        In the first `warm_up` batches only the values learn.

    Source: arXiv 2504.05118 and VC-PPO 2503.01491. Confidence: after these parts of it and its upper clip, without its
    cross-entropy of right answers, and with a head instead of a second model. UI-TARS-2 (2509.02544) trains with the
    same four: decoupled and length-adaptive GAE, values that learn first, and the upper clip.
    Use: long answers with one reward at the end, whose signal the lambda of `ppo` loses after some dozens of tokens.
    Cost: as PPO, and the batches of the warm-up.
    """

    name: str = "vapo"
    loss: OwnLoss = Clip(clip_high=0.28)
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda of the returns that the values learn. 1: the rewards to come, without bias."""
    alpha: float = Field(0.05, gt=0)
    """Growth of the policy's lambda with the length of the sequence."""
    warm_up: Int64 = Field(50, ge=0)
    """First batches of these heads in which only they learn; the policy stays."""
    value_coef: float = Field(0.0, ge=0)
    """Factor of the value loss in the gradient of the policy's weights. 0: only the heads learn values."""

    def estimates(self, batch: TrainingBatch) -> dict[str, NDArray[np.float64]]:
        sampled = steps(batch)
        lam = np.maximum(0, 1 - 1 / (self.alpha * np.bincount(sampled.sequence)[sampled.sequence]))
        return {**super().estimates(batch), "gae": self.advantages(batch, sampled, lam)}


class Archer(Critic):
    """ArCHer: a critic of whole utterances gives each call one advantage; the policy learns its tokens.

        d_k = r_k + gamma V(o_(k+1)) - V(o_k),  A_k = d_k + gamma lambda A_(k+1), the same for all tokens of call k
        V(o_k) learns A_k + V(o_k);  o_k is the prompt of call k, and V is 0 after the last call

    Source: arXiv 2402.19446 and github.com/YifeiZhou02/ArCHer at 7c771a7. Confidence: inspired by. Its actor has
    Q(o, a) - V(o) of double critics, because it samples new utterances at old prompts. Here the batch has the rewards
    and next prompts of its utterances: lambda = 0 gives the target of its Q.
    Use: dialogues and tools with many turns. Rewards of turns come at the ends of their calls.
    Cost: one more forward pass for the values; every token is computed.
    """

    name: str = "archer"
    gamma: float = Field(0.95, ge=0, le=1)
    """Discount per call."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda: 1 trusts the rewards, 0 trusts the value of the next prompt."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, "return", "is_start")

    def estimates(self, batch: TrainingBatch) -> dict[str, NDArray[np.float64]]:
        sampled = steps(batch)
        values_K = batch.forest["value"][sampled.order[sampled.starts]].astype(np.float64)
        advantages_K = gae(
            sampled.rewards[sampled.ends], values_K, sampled.sequence[sampled.ends], self.gamma, self.lam
        )
        return {
            "utterance_advantage": sampled.of_calls(advantages_K),
            "return": sampled.at_starts(advantages_K + values_K),
            "is_start": sampled.at_starts(1.0),
        }

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        return np.asarray(batch.forest["utterance_advantage"])

    def value_loss(self, columns: Mapping[str, Tensor]) -> Tensor:
        return columns["is_start"] * (columns["new_value"] - columns["return"]) ** 2


class Digirl(Critic):
    """DigiRL: imitation of the calls after which success became more likely.

        A_k = P(o_(k+1)) - P(o_k) - margin + r_k + sum over j >= k of gamma^(j-k) r_j
        L = -1[A_k > 0] log(policy) + cross-entropy of P(o_k) for "some later reward is above 0"

    o_k is the prompt of call k; after the last call P is 0. r_k is the reward of the call; the last one has that of the
    episode, too.
    Source: arXiv 2406.11896 and github.com/DigiRL-agent/digirl at c74ec34. Confidence: after its step-level part: one
    critic instead of the smaller of two, a head on the policy, and no replay buffer.
    Use: device control and web tasks with rewards of 0 or 1 and many turns.
    Cost: one more forward pass for the values; every token is computed.
    """

    name: str = "digirl"
    loss: OwnLoss = CrossEntropy()
    gamma: float = Field(0.5, ge=0, le=1)
    """Discount of later rewards per call."""
    margin: float = Field(0.05, ge=0)
    """Cost of each call."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, "succeeds", "is_start")

    def estimates(self, batch: TrainingBatch) -> dict[str, NDArray[np.float64]]:
        sampled = steps(batch)
        values_K = batch.forest["value"][sampled.order[sampled.starts]].astype(np.float64)
        sequence_K, rewards_K = sampled.sequence[sampled.ends], sampled.rewards[sampled.ends]
        probability_K = 1 / (1 + np.exp(-values_K))
        # Without values and with lambda 1, the advantage is the discounted sum of the rewards.
        later_K = gae(rewards_K, np.zeros(len(values_K)), sequence_K, self.gamma, 1.0)
        goes_on_K = np.append(sequence_K[1:] == sequence_K[:-1], False)
        next_K = np.where(goes_on_K, np.append(probability_K[1:], 0.0), 0.0)
        better_K = next_K - probability_K - self.margin + rewards_K + later_K > 0
        succeeds_K = (later_K > 0).astype(np.float64)
        return {
            "chosen": sampled.of_calls(better_K),
            "succeeds": sampled.at_starts(succeeds_K),
            "is_start": sampled.at_starts(1.0),
        }

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        return np.asarray(batch.forest["chosen"])

    def value_loss(self, columns: Mapping[str, Tensor]) -> Tensor:
        logit = columns["new_value"]
        entropy = logit.clamp(min=0) - columns["succeeds"] * logit + (-logit.abs()).exp().log1p()
        return columns["is_start"] * entropy
