"""The recipe of a run: how facts about episodes become columns of a forest, and how columns become a loss.

A new advantage, loss, aggregation or correction is an entry in its table. Shapes: M targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agentjet.config import AlgorithmConfig
from agentjet.recipes.advantages import sequence_advantages
from agentjet.recipes.losses import AGGREGATIONS, CORRECTIONS, LOSSES, importance_ratio, kl_k3
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest, select

if TYPE_CHECKING:
    from torch import Tensor

MISMATCH = "policy/mismatch_kl"


class Recipe:
    """GRPO and its relatives: an advantage per sequence, a policy loss, optionally a correction and a KL term."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self.algorithm = algorithm
        self._loss = LOSSES[algorithm.loss]
        self._correction = None if algorithm.correction == "none" else CORRECTIONS[algorithm.correction]
        self.reads = (*self._loss.reads, "reference") if algorithm.kl_coef else self._loss.reads
        """Columns that `token_loss` reads."""

    @property
    def corrects(self) -> bool:
        """True if `prepared` needs the log-probabilities of the present weights."""
        return self._correction is not None

    def prepared(
        self, batch: TrainingBatch, proximal: NDArray[np.float32] | None = None
    ) -> tuple[Forest, dict[str, float]]:
        """Returns the forest of the targets that count, with their advantages after the correction, and metrics.

        `proximal` are the log-probabilities [M] of the present weights. With a correction, they become the old
        log-probabilities, and the correction scales the advantages. Every loss is linear in the advantage.
        """
        advantage = self._advantage(batch)
        forest = batch.forest.with_columns(advantage=advantage)
        if not forest.num_targets:
            return forest, {}
        behaviour = forest["logprob"]
        # The entropy is unbiased, over every sampled token, and needs no forward pass.
        metrics = {"policy/entropy": -float(behaviour.mean(dtype=np.float64))}
        if self._correction is None:
            return forest, metrics
        import torch

        assert proximal is not None
        weight, counts = self._correction(importance_ratio(proximal, behaviour), self.algorithm)
        metrics |= {
            MISMATCH: float(kl_k3(torch.from_numpy(behaviour.copy()), torch.from_numpy(proximal)).mean()),
            "policy/correction_mean": float(weight.mean()),
            "policy/correction_dropped": float((weight == 0).mean()),
        }
        forest = forest.with_columns(advantage=advantage * weight, logprob=proximal)
        return forest if counts.all() else select(forest, counts), metrics

    def _advantage(self, batch: TrainingBatch) -> NDArray[np.float32]:
        facts = batch.facts
        if facts is None:
            return batch.forest["advantage"]
        advantages_ER = sequence_advantages(facts, self.algorithm)
        return advantages_ER[facts.call_episode, facts.call_role][batch.forest["call"]].astype(np.float32)

    def weights(self, forest: Forest) -> NDArray[np.float32]:
        """The weight [M] of each token in the loss of a mini-batch."""
        aggregation = AGGREGATIONS[self.algorithm.loss_aggregation]
        return aggregation(forest["sequence"], forest.num_sequences, self.algorithm)

    def contributing(self, forest: Forest) -> NDArray[np.bool_]:
        """The targets [M] that must be computed.

        Without a KL term, a token with advantage 0 adds nothing to the loss. A loss over sequence ratios needs every
        token of a sequence that has any advantage.
        """
        if self.algorithm.kl_coef:
            return np.full(forest.num_targets, True)
        contributes: NDArray[np.bool_] = forest["advantage"] != 0
        if "sequence_log_ratio" in self.reads:
            contributes = np.isin(forest["sequence"], forest["sequence"][contributes])
        return contributes

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the losses [M] of tokens, with gradient, and metrics [M] whose means are reported.

        `logp` [M] are their log-probabilities, with gradient.
        """
        loss, clipped = self._loss.function(logp, *(columns[name] for name in self._loss.reads), self.algorithm)
        metrics = {"policy/clip_fraction": clipped}
        if self.algorithm.kl_coef:
            metrics["policy/kl"] = kl = kl_k3(logp, columns["reference"])
            loss = loss + self.algorithm.kl_coef * kl
        return loss, metrics
