"""Choosing the next token: temperature, truncation, one seeded uniform number a completion.

Shapes: C completions, R rows of logits, V vocabulary. Completions that share a row share its softmax, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentjet.types import SamplingParams


def pick(
    logits: Tensor, of: Sequence[int], params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Sample one token for each of C completions; `of[c]` is the row of `logits` [R, V] that completion c samples from.

    Returns tokens and log-probabilities: those of the distribution sampled from, after temperature and truncation. A
    greedy completion (temperature 0) reports the model's own, at temperature 1, since a certain choice has none worth
    reporting.
    """
    shapes = [(row, p.temperature, p.top_k, p.top_p) for row, p in zip(of, params, strict=True)]
    distinct = {shape: i for i, shape in enumerate(dict.fromkeys(shapes))}
    tempered = _tempered(logits, list(distinct))
    normaliser = tempered.logsumexp(-1, keepdim=True)
    cumulative = (tempered - normaliser).exp_().cumsum_(-1)
    rows = torch.tensor([distinct[shape] for shape in shapes], device=logits.device)
    chosen = _first_above(cumulative, rows, torch.tensor(uniforms, dtype=torch.float32, device=logits.device))
    if any(p.temperature == 0 for p in params):
        greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
        chosen = torch.where(greedy, tempered.argmax(-1)[rows], chosen)
    return chosen.tolist(), (tempered[rows, chosen] - normaliser[rows, 0]).tolist()


def _first_above(cumulative: Tensor, rows: Tensor, uniforms: Tensor) -> Tensor:
    """First index [C] at which `cumulative[rows]` exceeds the uniforms, by bisection, without copying shared rows.

    The last entry of a row is 1 up to rounding; scaling by it keeps the threshold below it, so that a token of
    probability 0 is never hit.
    """
    last = cumulative.shape[-1] - 1
    thresholds = uniforms * cumulative[rows, last]
    low, high = torch.zeros_like(rows), torch.full_like(rows, last)
    for _ in range(last.bit_length()):
        middle = (low + high) // 2
        above = cumulative[rows, middle] > thresholds
        high = torch.where(above, middle, high)
        low = torch.where(above, low, (middle + 1).clamp(max=last))
    return low


def _tempered(logits: Tensor, shapes: Sequence[tuple[int, float, int, float]]) -> Tensor:
    """Logits [D, V] of the distinct distributions, in float32, after temperature and truncation."""
    rows = torch.tensor([row for row, *_ in shapes], device=logits.device)
    tempered = logits.index_select(0, rows).float()
    temperatures = [temperature or 1.0 for _, temperature, _, _ in shapes]
    if any(t != 1.0 for t in temperatures):
        tempered /= torch.tensor(temperatures, device=logits.device)[:, None]
    for i, (_, temperature, top_k, top_p) in enumerate(shapes):
        if temperature > 0 and (top_k or top_p < 1):
            tempered[i] = truncate(tempered[i], top_k, top_p)
    return tempered


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
