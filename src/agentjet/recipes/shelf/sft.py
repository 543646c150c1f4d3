"""Supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from agentjet.recipes.losses import AGGREGATIONS
from agentjet.recipes.recipe import Recipe
from agentjet.timeline.forest import Forest

if TYPE_CHECKING:
    from torch import Tensor

CROSS_ENTROPY = "policy/cross_entropy"


class Sft(Recipe):
    """Supervised fine-tuning: cross-entropy on given answers, the demonstrations of `agentjet sft` and `swarm.sft`.

        L = -log(policy), mean over the tokens of the answers with their end tokens

    Source: standard. Confidence: reproduced.
    Use: a warm start. A run with any other recipe uses this one for demonstrations, so it need not be chosen.
    As the recipe of a run it refuses training episodes: for sampled answers with a good reward there is `rft`.
    Cost: one forward and backward pass; nothing is sampled.
    """

    name: str = "sft"
    aggregation: Literal["token_mean", "sequence_mean"] = Field("token_mean")
    """Mean over the tokens of the batch, or mean over demonstrations of their token means."""

    only_given: ClassVar[bool] = True

    @property
    def reads(self) -> tuple[str, ...]:
        return ()

    @property
    def reports(self) -> tuple[str, ...]:
        return (CROSS_ENTROPY,)

    def weights(self, forest: Forest) -> NDArray[np.float32]:
        return AGGREGATIONS[self.aggregation](forest["sequence"], forest.num_sequences, 0.0)

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return -logp, {CROSS_ENTROPY: -logp}
