"""Dr. GRPO."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentjet.recipes.policy_gradient import PolicyGradient


class DrGrpo(PolicyGradient):
    """Dr. GRPO: GRPO without the division by the deviation, and with a constant divisor instead of lengths.

        A_i = r_i - mean(r),  loss = sum of token losses / (constant x sequences)

    Source: arXiv 2503.20783. Confidence: reproduced.
    Use: where GRPO favours very easy and very hard tasks, or long wrong answers. Set `constant` to `job.max_tokens`.
    Cost: as GRPO.
    """

    name: str = "dr_grpo"
    aggregation: Literal["auto", "token_mean", "sequence_mean", "constant"] = "constant"
    """Reduction of the token losses; see `grpo`."""
    constant: float = Field(256.0, ge=0)
    """Divisor of the summed loss, besides the number of sequences: usually the maximum completion length."""
