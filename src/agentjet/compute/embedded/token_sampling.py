"""The choice of the next token: grammar, temperature, truncation; and the log-probabilities of given tokens.

Shapes: C completions, R rows of logits, V vocabulary. Completions of one row share its softmax.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentjet.compute.embedded.passes import pass_of
from agentjet.compute.embedded.policy import Policy
from agentjet.compute.truncation import restrict
from agentjet.timeline.forest import Row, build_forest
from agentjet.timeline.support import EVERYTHING
from agentjet.types import SamplingParams, TokenScore


def sample_tokens(
    logits: Tensor,
    of: Sequence[int],
    params: Sequence[SamplingParams],
    masks: Sequence[bytes],
    uniforms: Sequence[float],
) -> tuple[list[int], list[float], list[bytes]]:
    """Sample one token for each of C completions; `of[c]` is the row of `logits` [R, V] that completion c samples from.

    `masks[c]` has a bit for each token, lowest first; an empty mask allows every token. Returns the tokens, their
    log-probabilities, and the set from which each was chosen (see `timeline.support`).

    The log-probabilities are those of the sampled distribution: over the set, after temperature. A greedy completion
    (temperature 0) reports those of temperature 1. If a row has NaN logits or an empty mask, its
    log-probability is not finite, and its token must be ignored.
    """
    shapes = [(row, p.temperature, p.top_k, p.top_p, mask) for row, p, mask in zip(of, params, masks, strict=True)]
    distinct = {shape: i for i, shape in enumerate(dict.fromkeys(shapes))}
    tempered, sets = _tempered(logits, list(distinct))
    normaliser = tempered.logsumexp(-1, keepdim=True)
    cumulative = (tempered - normaliser).exp_().cumsum_(-1)
    rows = torch.tensor([distinct[shape] for shape in shapes], device=logits.device)
    by_completion = cumulative if len(distinct) == len(shapes) else cumulative[rows]
    # The last entry of a row is 1 up to rounding. A token of probability 0 is never the first one above a threshold.
    below_1 = torch.tensor(uniforms, dtype=torch.float32, device=logits.device).clamp(max=1 - 2**-24)
    chosen = torch.searchsorted(by_completion, below_1[:, None] * by_completion[:, -1:], right=True)[:, 0]
    chosen = chosen.clamp(max=logits.shape[-1] - 1)  # Of NaN, no entry is above.
    if any(p.temperature == 0 for p in params):
        greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
        chosen = torch.where(greedy, tempered.argmax(-1)[rows], chosen)
    logprobs = (tempered[rows, chosen] - normaliser[rows, 0]).tolist()
    return chosen.tolist(), logprobs, [sets[distinct[shape]] for shape in shapes]


def _tempered(logits: Tensor, shapes: Sequence[tuple[int, float, int, float, bytes]]) -> tuple[Tensor, list[bytes]]:
    """Returns logits [D, V] of distinct distributions after mask, temperature and truncation, and their sets.

    `shapes` are row of logits, temperature, top_k, top_p and mask.
    """
    rows = torch.tensor([row for row, *_ in shapes], device=logits.device)
    tempered = logits.index_select(0, rows).float()
    temperatures = [temperature or 1.0 for _, temperature, *_ in shapes]
    if any(t != 1.0 for t in temperatures):
        tempered /= torch.tensor(temperatures, device=logits.device)[:, None]
    sets = [EVERYTHING] * len(shapes)
    for i, (_, temperature, top_k, top_p, mask) in enumerate(shapes):
        sets[i] = restrict(tempered[i], *((top_k, top_p) if temperature > 0 else (0, 1.0)), mask)
    return tempered, sets


HEAD_POSITIONS = 128
"""Positions whose logits over the vocabulary exist at the same time."""


@torch.inference_mode()
def score(policy: Policy, tokens: NDArray[np.int32], num_likeliest: int) -> list[TokenScore]:
    """Returns T - 1 scores: of each token of `tokens` [T] except the first, given those before it, at temperature 1."""
    if len(tokens) == 1:
        return []
    hidden, _ = pass_of(policy).hidden(build_forest([Row(tokens, slice(1, None), {})]))
    targets = torch.from_numpy(tokens[1:].astype(np.int64)).to(policy.device)
    scores = []
    for start in range(0, len(targets), HEAD_POSITIONS):
        logprobs = policy.head(hidden[start : start + HEAD_POSITIONS]).float().log_softmax(-1)
        own = logprobs.gather(-1, targets[start : start + HEAD_POSITIONS, None])[:, 0].tolist()
        best, ids = logprobs.topk(min(num_likeliest, logprobs.shape[-1]), -1)
        for logprob, values, which in zip(own, best.tolist(), ids.tolist(), strict=True):
            scores.append(TokenScore(logprob, tuple(zip(which, values, strict=True))))
    return scores
