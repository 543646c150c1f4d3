"""Step-wise GRPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from agentjet.recipes.policy_gradient import FloatArray
from agentjet.recipes.recipe import Need
from agentjet.recipes.shelf.grpo import Grpo
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest, select


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

    def columns(
        self, batch: TrainingBatch, outputs: Mapping[str, NDArray[np.float32]]
    ) -> tuple[Forest, dict[str, float]]:
        """Each turn is a sequence."""
        forest = batch.forest.with_columns(sequence=batch.forest["call"])
        every = np.full(forest.num_targets, True)
        return super().columns(replace(batch, forest=select(forest, every)), outputs)  # `select` counts the sequences.

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        assert batch.facts is not None
        turns_ER = np.zeros(batch.facts.spoke.shape, np.int64)
        np.add.at(turns_ER, (batch.facts.call_episode, batch.facts.call_role), 1)
        advantages_ER = np.zeros(batch.facts.spoke.shape)
        for episodes, role, rewards_G in self.comparisons(batch.facts):
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
