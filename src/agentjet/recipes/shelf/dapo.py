"""DAPO."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import numpy as np
from pydantic import Field, SerializeAsAny, model_validator

from agentjet.recipes.losses import Clip, PolicyLoss
from agentjet.recipes.policy_gradient import FloatArray, lengths, penalised
from agentjet.recipes.shelf.grpo import Grpo
from agentjet.section import Int64
from agentjet.timeline.batch import TrainingBatch


class Dapo(Grpo):
    """DAPO: GRPO with a higher upper clip, dynamic sampling, a mean over tokens, and a penalty for overlong episodes.

        r_i += clip(-(len_i - (max_length - buffer)) / buffer x factor, -factor, 0)

    Source: arXiv 2503.14476, as verl computes it up to `max_length`. Confidence: reproduced.
    Use: long reasoning with rewards of 0 and 1. Set `max_length` for the penalty.
    Cost: as GRPO, and the episodes of dropped groups.
    """

    name: str = "dapo"
    loss: SerializeAsAny[PolicyLoss] = Clip(clip_high=0.28, dual_clip=10.0)
    """The policy loss."""
    drop_zero_variance: bool = True
    """Dynamic sampling: drop groups whose rewards are all equal, and sample others instead."""
    max_length: Int64 = Field(0, ge=0)
    """Length of an episode's answers, in tokens, from which the penalty is `factor`. 0: without a penalty."""
    buffer: Int64 = Field(4096, ge=1)
    """Tokens before `max_length` over which the penalty grows."""
    factor: float = Field(1.0, ge=0)
    """Penalty at `max_length`, the largest."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if 0 < self.max_length < self.buffer:
            raise ValueError(
                f"buffer = {self.buffer} is above max_length = {self.max_length}, so the shortest episodes would have "
                "a penalty; set it to max_length or less"
            )
        return self

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        assert batch.facts is not None
        if not self.max_length:
            return super().sequence_advantages(batch)
        penalties_ER = -overlong(lengths(batch), self.max_length, self.buffer, self.factor)
        return super().sequence_advantages(replace(batch, facts=penalised(batch.facts, penalties_ER)))


def overlong(lengths_ER: FloatArray, max_length: int, buffer: int, factor: float) -> FloatArray:
    """Returns the penalty [E, R], at most 0, of lengths near `max_length`."""
    return np.clip(-(lengths_ER - (max_length - buffer)) / buffer * factor, -factor, 0.0)
