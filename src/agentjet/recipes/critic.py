"""`Critic`: the base of recipes that learn values, and their arithmetic.

The heads predict from the policy's last hidden states, before each sampled token. Observations are skipped: the value
after the last token of a call is that before the first token of the next call. Shapes: M targets, S steps of any kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from agentjet.recipes.policy_gradient import FloatArray, PolicyGradient, compared_rewards
from agentjet.recipes.recipe import ValueHeads
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest, select

if TYPE_CHECKING:
    from torch import Tensor

VALUE_LOSS = "critic/loss"
EXPLAINED = "critic/explained_variance"
IntArray = NDArray[np.intp]


class Critic(PolicyGradient):
    """The parameters and hooks that recipes with value heads share."""

    value_lr: float = Field(0.1, gt=0)
    """Learning rate of the value heads. A step moves a value by about this at most; rewards of another scale than 1
    need another rate."""
    value_coef: float = Field(0.1, ge=0)
    """Factor of the value loss in the gradient of the policy's weights. 0: only the heads learn values."""

    head_names: ClassVar[tuple[str, ...]] = ("value",)
    smallest_group: ClassVar[int] = 1
    compares_rewards: ClassVar[bool] = False

    @property
    def value_heads(self) -> ValueHeads:
        return ValueHeads(self.head_names, self.value_lr, self.value_coef)

    def estimates(self, batch: TrainingBatch) -> dict[str, NDArray[np.float64]]:
        """Returns columns [M] that `value_loss` and `token_advantages` read, such as targets of the values."""
        raise NotImplementedError

    def value_loss(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns the losses [M] of the values, with gradient."""
        raise NotImplementedError

    def columns(
        self, batch: TrainingBatch, outputs: Mapping[str, NDArray[np.float32]]
    ) -> tuple[Forest, dict[str, float]]:
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

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().token_loss(logp, columns)
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


def steps(batch: TrainingBatch) -> Steps:
    """Returns the targets in order. A call without a reward has 0. Other rewards are those of `compared_rewards`."""
    facts, forest = batch.facts, batch.forest
    assert facts is not None
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


def gae(rewards: FloatArray, values: FloatArray, sequence: IntArray, gamma: float, lam: float) -> FloatArray:
    """Returns generalised advantages [S] (arXiv 1506.02438, equation 16); the value after a sequence is 0.

    Steps of one sequence are neighbours, in order. All sequences are computed together, from their ends.
    """
    stops = np.flatnonzero(np.append(sequence[1:] != sequence[:-1], True)) + 1
    lengths = np.diff(stops, prepend=0)
    following, last, found = np.zeros(len(stops)), np.zeros(len(stops)), np.zeros(len(rewards))
    for back in range(int(lengths.max(initial=0))):
        alive = np.flatnonzero(lengths > back)
        at = stops[alive] - 1 - back
        delta = rewards[at] + gamma * following[alive] - values[at]
        last[alive] = delta + gamma * lam * last[alive]
        following[alive] = values[at]
        found[at] = last[alive]
    return found


def scattered(values: FloatArray, targets: IntArray, num_targets: int) -> FloatArray:
    """Returns an array [M] with the values at their targets, and 0 elsewhere."""
    found = np.zeros(num_targets)
    found[targets] = values
    return found


def explained_variance(values: NDArray[np.floating], returns: NDArray[np.floating]) -> float:
    """Returns 1 - var(returns - values) / var(returns): 1 for perfect values, 0 for equal returns."""
    variance = float(np.var(returns, dtype=np.float64))
    return 1 - float(np.var(returns - values, dtype=np.float64)) / variance if variance > 0 else 0.0
