"""Log-probabilities of given tokens: one pass without sampling, for evaluations that compare texts."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentjet.compute.embedded.attention import flat_forward
from agentjet.compute.embedded.passes import forest_plan
from agentjet.compute.embedded.policy import Policy
from agentjet.timeline.forest import Row, build_forest
from agentjet.types import TokenScore

HEAD_POSITIONS = 128
"""Positions that are multiplied with the vocabulary at a time."""


@torch.inference_mode()
def score(policy: Policy, tokens: NDArray[np.int32], num_likeliest: int) -> list[TokenScore]:
    """The score of each token of `tokens` [T] but the first, given those before it, at temperature 1: T - 1 scores."""
    hidden = _hidden(policy, tokens)[:-1]
    targets = torch.from_numpy(tokens[1:].astype(np.int64)).to(policy.device)
    scores = []
    for start in range(0, len(targets), HEAD_POSITIONS):
        logprobs = policy.head(hidden[start : start + HEAD_POSITIONS]).float().log_softmax(-1)
        own = logprobs.gather(-1, targets[start : start + HEAD_POSITIONS, None])[:, 0].tolist()
        best, ids = logprobs.topk(min(num_likeliest, logprobs.shape[-1]), -1)
        for logprob, values, which in zip(own, best.tolist(), ids.tolist(), strict=True):
            scores.append(TokenScore(logprob, tuple(zip(which, values, strict=True))))
    return scores


def _hidden(policy: Policy, tokens: NDArray[np.int32]) -> Tensor:
    """Hidden states [T, hidden]."""
    ids = torch.from_numpy(tokens.astype(np.int64)).to(policy.device)
    if not policy.card.can_branch:
        hidden: Tensor = cast(Any, policy.decoder)(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        return hidden
    nothing = np.zeros(0, np.float32)
    forest = build_forest([Row(tokens, nothing, nothing.astype(np.int32), 0.0, 1.0, 0)])
    positions = torch.arange(len(tokens), device=policy.device)
    return flat_forward(policy.decoder, ids, positions, forest_plan(forest, policy.device))
