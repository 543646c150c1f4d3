"""Direct preference optimisation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from agentjet.recipes.policy_gradient import FloatArray, PolicyGradient
from agentjet.recipes.recipe import Need, Recipe
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest, select

if TYPE_CHECKING:
    from torch import Tensor

ROLES = PolicyGradient(by_role=True)
"""Its comparisons: of each role, the members of a group that spoke, by their rewards."""


class Dpo(Recipe):
    """DPO: preferences between the episodes of a group, from their rewards.

        L = -log sigmoid(beta * (u_w - u_l)),  u = sum over sampled tokens of log(policy / reference)

    It is the mean over pairs (w, l) of one group and role with r_w - r_l >= margin, or of best against worst.
    A pair needs a shared prefix: the same tokens before the first answer. The reference is version 0.

    Source: arXiv 2305.18290. Confidence: reproduced.
    Use: rewards that only rank, such as a judge's. One optimiser step a batch, because a step changes every margin.
    Cost: two more forward passes, of the present weights and of the reference; no backward for episodes without a pair.
    """

    name: str = "dpo"
    beta: float = Field(0.1, gt=0)
    """Strength of the reference. Large values keep the policy near it."""
    pairs: Literal["best_worst", "all"] = "best_worst"
    """Pairs of a group: its best episode against its worst, or every two with the margin between their rewards."""
    margin: float = Field(0.0, ge=0)
    """Smallest difference between the rewards of a pair. Equal rewards are never a pair."""

    smallest_group: ClassVar[int] = 2

    @model_validator(mode="after")
    def _one_step(self) -> Self:
        for key in ("epochs", "mini_batches"):
            if (value := getattr(self, key)) != 1:
                raise ValueError(f"{key} = {value}: dpo does one optimiser step a batch, on whole pairs; set it to 1")
        return self

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"proximal", "reference"})

    @property
    def reads(self) -> tuple[str, ...]:
        return ("advantage",)

    def columns(
        self, batch: TrainingBatch, outputs: Mapping[str, NDArray[np.float32]]
    ) -> tuple[Forest, dict[str, float]]:
        """Adds the derivative of the loss by each token's log-probability, negated, as the advantage."""
        forest, facts = batch.forest, batch.facts
        assert facts is not None
        call, sequence = forest["call"], forest["sequence"]
        ratio_S = np.bincount(sequence, outputs["proximal"].astype(np.float64) - outputs["reference"])
        start_S = forest.parent[forest.node[np.unique(sequence, return_index=True)[1]]]
        sequence_ER = np.full(facts.spoke.shape, -1)
        sequence_ER[facts.call_episode[call], facts.call_role[call]] = sequence
        pairs = [
            (sequence_ER[episodes[better], role], sequence_ER[episodes[worse], role])
            for episodes, role, rewards_G in ROLES.comparisons(facts)
            for better, worse in self.pairs_of(rewards_G)
        ]
        better_P, worse_P = np.array([one for one in pairs if start_S[one[0]] == start_S[one[1]]], int).reshape(-1, 2).T
        margin_P = self.beta * (ratio_S[better_P] - ratio_S[worse_P])
        pull_P = self.beta * np.exp(-np.logaddexp(0.0, margin_P)) / max(1, len(margin_P))
        pull_S = np.bincount(better_P, pull_P, len(ratio_S)) - np.bincount(worse_P, pull_P, len(ratio_S))
        metrics = {"dpo/pairs": float(len(margin_P)), "dpo/pairs_unshared": float(len(pairs) - len(margin_P))}
        if len(margin_P):
            loss, right = np.logaddexp(0.0, -margin_P), margin_P > 0
            metrics |= {"dpo/loss": float(loss.mean()), "dpo/accuracy": float(right.mean())}
        return select(forest.with_columns(advantage=pull_S[sequence]), pull_S[sequence] != 0), metrics

    def pairs_of(self, rewards_G: FloatArray) -> Iterator[tuple[int, int]]:
        """Yields the pairs (better, worse) of members of a group."""
        best_worst = [(int(np.argmax(rewards_G)), int(np.argmin(rewards_G)))]
        for better, worse in best_worst if self.pairs == "best_worst" else permutations(range(len(rewards_G)), 2):
            if (gap := rewards_G[better] - rewards_G[worse]) > 0 and gap >= self.margin:
                yield better, worse

    def weights(self, forest: Forest) -> NDArray[np.float32]:
        return np.ones(forest.num_targets, np.float32)

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return -columns["advantage"] * logp, {}
