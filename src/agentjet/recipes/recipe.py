"""The recipe of a run: how facts about episodes become columns of a forest, and how columns become a loss.

`recipe_of` is the one place that turns settings into a recipe. A new advantage, loss, aggregation or correction is an
entry in its table. Shapes: M targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from agentjet.config import AlgorithmConfig
from agentjet.errors import ConfigError
from agentjet.recipes.advantages import ADVANTAGES, sequence_advantages
from agentjet.recipes.losses import AGGREGATIONS, CORRECTIONS, LOSSES, importance_ratio, kl_k3
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest

if TYPE_CHECKING:
    from torch import Tensor

Entry = TypeVar("Entry")
MISMATCH = "policy/mismatch_kl"


@dataclass(frozen=True)
class Columns:
    """Columns [M] to set on a forest, the targets [M] that count (None: all), and metrics."""

    values: Mapping[str, NDArray[Any]]
    counts: NDArray[np.bool_] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenTerms:
    """The losses [M] of tokens, with gradient, and metrics [M] whose means over the tokens are reported."""

    loss: Tensor
    metrics: Mapping[str, Tensor]


class Recipe:
    """GRPO and its relatives: an advantage per sequence, a policy loss, optionally a correction and a KL term."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        """Raises `ConfigError` for a name that is not in its table."""
        self.algorithm = algorithm
        find("advantage", algorithm.advantage, ADVANTAGES)
        self._loss = find("loss", algorithm.loss, LOSSES)
        self._aggregation = find("aggregation", algorithm.loss_aggregation, AGGREGATIONS)
        is_corrected = algorithm.correction != "none"
        self._correction = find("correction", algorithm.correction, CORRECTIONS) if is_corrected else None

    @property
    def needs(self) -> frozenset[str]:
        """Outputs that must be computed first: `logprob` for `columns`, `reference` for `token_loss`."""
        needs = {"logprob": self._correction is not None, "reference": bool(self.algorithm.kl_coef)}
        return frozenset(name for name, is_needed in needs.items() if is_needed)

    @property
    def reads(self) -> frozenset[str]:
        """Columns that `token_loss` reads."""
        return frozenset(self._loss.reads) | (self.needs & {"reference"})

    def required(self, batch: TrainingBatch) -> frozenset[str]:
        """Columns that a batch must have."""
        return frozenset({"logprob", "advantage" if batch.facts is None else "call"})

    def columns(self, batch: TrainingBatch, outputs: Mapping[str, NDArray[np.float32]]) -> Columns:
        """Returns the advantage of each target, after the correction.

        `outputs["logprob"]` are the log-probabilities of the present weights. With a correction, they become the old
        log-probabilities, and the correction scales the advantages. Every loss is linear in the advantage.
        """
        forest = batch.forest
        advantage = forest["advantage"] if batch.facts is None else self._advantage(batch)
        if not forest.num_targets:
            return Columns({"advantage": advantage})
        # The entropy is unbiased, over every sampled token, and needs no forward pass.
        metrics = {"policy/entropy": -float(forest["logprob"].mean(dtype=np.float64))}
        if self._correction is None:
            return Columns({"advantage": advantage}, metrics=metrics)
        proximal = outputs["logprob"]
        weight, counts = self._correction(importance_ratio(proximal, forest["logprob"]), self.algorithm)
        metrics |= {
            MISMATCH: _mismatch(forest["logprob"], proximal),
            "policy/correction_mean": float(weight.mean()),
            "policy/correction_dropped": float((weight == 0).mean()),
        }
        return Columns({"advantage": advantage * weight, "logprob": proximal}, counts, metrics)

    def _advantage(self, batch: TrainingBatch) -> NDArray[np.float32]:
        facts, call = batch.facts, batch.forest["call"]
        assert facts is not None
        advantages_ER = sequence_advantages(facts, self.algorithm)
        return advantages_ER[facts.call_episode, facts.call_role][call].astype(np.float32)

    def weights(self, forest: Forest) -> NDArray[np.float32]:
        """The weight [M] of each token in the loss of a mini-batch."""
        return self._aggregation(forest["sequence"], forest.num_sequences, self.algorithm)

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

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> TokenTerms:
        """Returns the loss of tokens from their log-probabilities [M], with gradient, and the columns that it reads."""
        loss, clipped = self._loss(logp, columns, self.algorithm)
        metrics = {}
        if self.algorithm.kl_coef:
            kl = kl_k3(logp, columns["reference"])
            loss = loss + self.algorithm.kl_coef * kl
            metrics["policy/kl"] = kl
        return TokenTerms(loss, {**metrics, "policy/clip_fraction": clipped})


def recipe_of(algorithm: AlgorithmConfig) -> Recipe:
    """Returns the recipe that the settings name."""
    return Recipe(algorithm)


def find(kind: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """Returns the entry of a table. Raises `ConfigError` with the known names for any other name."""
    if name not in table:
        raise ConfigError(f"job.algorithm.{kind} = {name!r} is unknown: use one of {', '.join(table)}")
    return table[name]


def _mismatch(behaviour: NDArray[np.float32], proximal: NDArray[np.float32]) -> float:
    import torch

    return float(kl_k3(torch.from_numpy(behaviour.copy()), torch.from_numpy(proximal)).mean())
