"""Choosing the next token: a grammar's mask, temperature, truncation, one seeded uniform number a completion.

Shapes: C completions, R rows of logits, V vocabulary. Completions that share a row share its softmax, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentjet.timeline.allowed import EVERYTHING, encode_set
from agentjet.types import SamplingParams

Shape = tuple[int, float, int, float, bytes]
"""What makes a distribution: the row of logits, temperature, top_k, top_p and mask."""


def pick(
    logits: Tensor,
    of: Sequence[int],
    params: Sequence[SamplingParams],
    masks: Sequence[bytes],
    uniforms: Sequence[float],
) -> tuple[list[int], list[float], list[bytes]]:
    """Sample one token for each of C completions; `of[c]` is the row of `logits` [R, V] that completion c samples from.

    `masks[c]` has a bit for each token that may follow, lowest first; empty, it allows all of them.
    Returns tokens, log-probabilities, and the set that each token was chosen among (see `timeline.allowed`). The
    log-probabilities are those of the distribution sampled from: over the set, after temperature. A greedy completion
    (temperature 0) reports those of temperature 1, since a certain choice has none worth reporting. Where a row is no
    distribution (not finite, or nothing allowed), the log-probability is not finite and the token means nothing.
    """
    shapes = [(row, p.temperature, p.top_k, p.top_p, mask) for row, p, mask in zip(of, params, masks, strict=True)]
    distinct = {shape: i for i, shape in enumerate(dict.fromkeys(shapes))}
    tempered, sets = _tempered(logits, list(distinct))
    normaliser = tempered.logsumexp(-1, keepdim=True)
    cumulative = (tempered - normaliser).exp_().cumsum_(-1)
    rows = torch.tensor([distinct[shape] for shape in shapes], device=logits.device)
    chosen = _first_above(cumulative, rows, torch.tensor(uniforms, dtype=torch.float32, device=logits.device))
    if any(p.temperature == 0 for p in params):
        greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
        chosen = torch.where(greedy, tempered.argmax(-1)[rows], chosen)
    logprobs = (tempered[rows, chosen] - normaliser[rows, 0]).tolist()
    return chosen.tolist(), logprobs, [sets[distinct[shape]] for shape in shapes]


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


def _tempered(logits: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, list[bytes]]:
    """Logits [D, V] of the distinct distributions, in float32, after mask, temperature and truncation; and the set
    that each leaves."""
    rows = torch.tensor([row for row, *_ in shapes], device=logits.device)
    tempered = logits.index_select(0, rows).float()
    temperatures = [temperature or 1.0 for _, temperature, *_ in shapes]
    if any(t != 1.0 for t in temperatures):
        tempered /= torch.tensor(temperatures, device=logits.device)[:, None]
    sets = [EVERYTHING] * len(shapes)
    for i, (_, temperature, top_k, top_p, mask) in enumerate(shapes):
        if mask:
            outside = torch.from_numpy(~unpack_mask(mask, logits.shape[-1])).to(logits.device)
            tempered[i].masked_fill_(outside, -torch.inf)
        if temperature > 0 and (top_k or top_p < 1):
            tempered[i] = truncate(tempered[i], top_k, top_p)
        elif not mask:
            continue
        members = (tempered[i] != -torch.inf).cpu().numpy()
        sets[i] = encode_set(members) if members.any() else EVERYTHING
    return tempered, sets


def unpack_mask(mask: bytes, vocabulary: int) -> NDArray[np.bool_]:
    """The bits of a mask as truth values [V]."""
    return np.unpackbits(np.frombuffer(mask, np.uint8), count=vocabulary, bitorder="little").view(bool)


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """`logits` [V] with everything outside the top k, then outside the smallest set of mass `top_p`, at -inf.

    The likeliest token stays, however little mass is asked for.
    """
    kept = logits
    if top_k and top_k < len(logits):
        smallest = logits.topk(top_k).values[-1]
        kept = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p < 1:
        ordered, order = kept.sort(descending=True)
        probabilities = ordered.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities >= top_p
        outside[0] = False  # a top_p below float32's smallest number is 0
        kept = kept.scatter(0, order, ordered.masked_fill(outside, -torch.inf))
    return kept
