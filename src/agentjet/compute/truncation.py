"""Truncation of a distribution over the vocabulary by a grammar's mask, `top_k` and `top_p`. Every backend uses it.

V is the size of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agentjet.timeline.support import EVERYTHING, encode_set


def restrict(logits: Tensor, top_k: int, top_p: float, mask: bytes) -> bytes:
    """Set `logits` [V], after temperature, to -inf outside a mask and then a truncation, in place.

    `mask` has a bit for each token, lowest first; an empty one allows every token. Returns the set that remains (see
    `timeline.support`), and `EVERYTHING` if none remains or nothing is restricted.
    """
    if mask:
        allowed = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(logits), bitorder="little")
        logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), -torch.inf)
    if top_k or top_p < 1:
        logits.copy_(truncate(logits, top_k, top_p))
    elif not mask:
        return EVERYTHING
    members = (logits != -torch.inf).cpu().numpy()
    return encode_set(members) if members.any() else EVERYTHING


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set `logits` [V] outside the top k, then outside the smallest set of mass `top_p`, to -inf.

    The likeliest token always stays.
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
