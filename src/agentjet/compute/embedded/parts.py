"""Attention of some queries to some keys, with the log-sum-exp that lets parts be merged.

`torch`'s public attention keeps the log-sum-exp to itself, and its autograd would differentiate each part on its own.
The two operators under it are called directly here: on a CPU the fused kernel that the public function takes as well,
elsewhere, or where keys and values differ in width, matrix products that hold the scores.

Shapes: Q queries, L keys, H heads, D widths.
"""

from __future__ import annotations

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of query, key and value."""

FEW_KEYS = 384
"""With fewer keys the fused backward pass is faster in float32 than in bfloat16, up to four times."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Output [Q, H, D] and log-sum-exp [Q, H] of queries [Q, H, D] over keys and values [L, H, D].

    `mask` [Q, L] is added to the scores; every query sees at least one key.
    """
    if _is_fused(query, value):
        out, lse = _flash(*_heads_first(query, key, value), 0.0, causal, attn_mask=_in_4d(mask), scale=scale)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)
    scores = _scores(query, key, scale, mask, causal)
    lse = scores.logsumexp(-1)
    out = torch.einsum("hql,lhd->qhd", (scores - lse.unsqueeze(-1)).exp(), value.to(scores.dtype))
    return out, lse.transpose(0, 1)


def attend_blocks(query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Output [T, K, G, D] and log-sum-exp [T, K, G] of T blocks of L keys, each with queries of its own.

    `query` [T, K, G, D]; `keys`, `values` [T, K, L, D]; `mask` [T, L] is added to the scores.
    """
    if _is_fused(query, values):
        out, lse = _flash(query, keys, values, 0.0, False, attn_mask=mask[:, None, None], scale=scale)
        return out, lse
    accurate = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(accurate) @ keys.to(accurate).transpose(-1, -2) * scale + mask[:, None, None]
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ values.to(accurate), lse


def attend_part_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
) -> Gradients:
    """Gradients through this part, `out` and `lse` being those of all parts together."""
    if _is_fused(query, value):
        if len(key) < FEW_KEYS and query.dtype != lse.dtype:
            grad_out, query, key, value, out = (x.to(lse.dtype) for x in (grad_out, query, key, value, out))
            mask = None if mask is None else mask.to(lse.dtype)
        tensors = _heads_first(grad_out, query, key, value, out)
        lse = lse.transpose(0, 1)[None]
        grads = _flash_backward(*tensors, lse, 0.0, causal, attn_mask=_in_4d(mask), scale=scale)
        q, k, v = (grad[0].transpose(0, 1) for grad in grads)
        return q, k, v
    probabilities = (_scores(query, key, scale, mask, causal) - lse.transpose(0, 1).unsqueeze(-1)).exp()
    grad_out, out, value = (x.to(lse.dtype) for x in (grad_out, out, value))
    dots = torch.einsum("qhd,lhd->hql", grad_out, value) - (grad_out * out).sum(-1).transpose(0, 1).unsqueeze(-1)
    grad_scores = probabilities * dots * scale
    return (
        torch.einsum("hql,lhd->qhd", grad_scores, key.to(lse.dtype)),
        torch.einsum("hql,qhd->lhd", grad_scores, query.to(lse.dtype)),
        torch.einsum("hql,qhd->lhd", probabilities, grad_out),
    )


def _is_fused(query: Tensor, value: Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.transpose(0, 1)[None] for tensor in tensors)


def _in_4d(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask[None, None]


def _scores(query: Tensor, key: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    """[H, Q, L], in float32 at least."""
    accurate = torch.float32 if query.dtype in (torch.bfloat16, torch.float16) else query.dtype
    scores = torch.einsum("qhd,lhd->hql", query.to(accurate), key.to(accurate)) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores if mask is None else scores + mask
