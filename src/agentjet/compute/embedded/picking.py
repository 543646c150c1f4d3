"""Choosing the next token: temperature, truncation, one seeded uniform number a row.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentjet.types import SamplingParams


def pick(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """Sample a token a row from `logits` [R, V]; returns tokens and their log-probabilities.

    The log-probability is that of the distribution sampled from (after temperature and truncation). A greedy row
    (temperature 0) reports the model's own, at temperature 1, since a certain choice has none worth reporting.
    """
    logits = logits.float()
    temperatures = [p.temperature or 1.0 for p in params]
    if any(t != 1.0 for t in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    for i, p in enumerate(params):
        if p.temperature > 0 and (p.top_k or p.top_p < 1):
            logits[i] = truncate(logits[i], p.top_k, p.top_p)
    normaliser = logits.logsumexp(-1, keepdim=True)
    cumulative = (logits - normaliser).exp_().cumsum_(-1)
    # The last entry is 1 up to rounding; scaling by it keeps the threshold below it, so a token of probability 0 is
    # never hit.
    thresholds = torch.tensor(uniforms, dtype=torch.float32, device=logits.device)[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, thresholds, right=True).clamp_(max=logits.shape[-1] - 1)
    greedy = [i for i, p in enumerate(params) if p.temperature == 0]
    if greedy:
        chosen[greedy] = logits[greedy].argmax(-1, keepdim=True)
    logprobs = logits.gather(-1, chosen) - normaliser
    return chosen[:, 0].tolist(), logprobs[:, 0].tolist()


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """`logits` [V] with everything outside the top k, then outside the smallest set of mass `top_p`, at -inf."""
    kept = logits
    if top_k and top_k < len(logits):
        smallest = logits.topk(top_k).values[-1]
        kept = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p < 1:
        ordered, order = kept.sort(descending=True)
        probabilities = ordered.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities >= top_p
        kept = kept.scatter(0, order, ordered.masked_fill(outside, -torch.inf))
    return kept
