"""The attention function of the backend, and exact partial attention with log-sum-exps.

An attention plan decides which tokens attend to which. The sampler's plan uses the key-value cache; the learner's plan
follows the branches of a forest. The model is a stock `transformers` model, and the tokens of all sequences or branches
form one flat row.

Partial results over some of the keys are merged by their log-sum-exps. `torch`'s public attention does not return the
log-sum-exp, and its autograd would differentiate each part alone. So this module calls the operators below it: on a CPU
the fused kernel. Elsewhere, and if keys and values differ in width, matrix products hold the scores.

Shapes: N tokens, Q queries, L keys, H heads, K key heads, D widths.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "agentjet_plan"
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "sinks", "position_bias")
"""Arguments of attention variants that a plan does not compute."""


class AttentionPlan(Protocol):
    """Computes the attention of one forward pass over a flat row of tokens."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Returns [N, H, D] for `query` [N, H, D], `key` and `value` [N, K, D] of the pass's own tokens."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    plan: AttentionPlan | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """`transformers`' attention signature: [1, heads, N, D] in, [1, N, heads, D] out.

    Raises `NotImplementedError` for `UNSUPPORTED_ARGUMENTS`; the model then keeps its own attention.
    """
    if unsupported := [name for name in UNSUPPORTED_ARGUMENTS if unused.get(name) is not None]:
        raise NotImplementedError(f"attention with {', '.join(unsupported)}")
    assert plan is not None, "this model runs under an attention plan only"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = plan.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scale)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attention)


def fold_query_heads(query: Tensor, num_kv_heads: int) -> Tensor:
    """Reshape [..., T, H, D] to [..., K, H/K * T, D]: query heads of one key head become additional query rows.

    Grouped-query attention then needs no copies of keys and values.
    """
    *lead, t, h, d = query.shape
    group = h // num_kv_heads
    return query.reshape(*lead, t, num_kv_heads, group, d).movedim(-4, -2).reshape(*lead, num_kv_heads, group * t, d)


def unfold_query_heads(out: Tensor, num_heads: int) -> Tensor:
    """Reshape [..., K, H/K * T, D] to [..., T, H, D]: the inverse of `fold_query_heads`."""
    *lead, k, gt, d = out.shape
    group = num_heads // k
    return out.reshape(*lead, k, group, gt // group, d).movedim(-2, -4).reshape(*lead, gt // group, num_heads, d)


def flat_forward(decoder: nn.Module, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
    """Returns hidden states [N, hidden] of a flat row of tokens [N] at the given positions [N]."""
    out = decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False, plan=plan)
    hidden: Tensor = out.last_hidden_state
    return hidden[0]


def causal_tail_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Returns a [Q, K] mask in which the queries are the last Q of K positions."""
    q = torch.arange(num_keys - num_queries, num_keys, device=device)
    return torch.arange(num_keys, device=device)[None, :] <= q[:, None]


Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of query, key and value."""

FEW_KEYS = 384
"""With fewer keys, the fused backward pass is up to four times faster in float32 than in bfloat16."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns output [Q, H, D] and log-sum-exp [Q, H] of queries [Q, H, D] over keys and values [L, H, D].

    `mask` [Q, L] is added to the scores. Every query must see at least one key.
    """
    if _is_fused(query, value):
        out, lse = _flash(*_heads_first(query, key, value), 0.0, causal, attn_mask=_in_4d(mask), scale=scale)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)
    scores = _scores(query, key, scale, mask, causal)
    lse = scores.logsumexp(-1)
    out = torch.einsum("hql,lhd->qhd", (scores - lse.unsqueeze(-1)).exp(), value.to(scores.dtype))
    return out, lse.transpose(0, 1)


def attend_blocks(query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns output [T, K, G, D] and log-sum-exp [T, K, G] of T blocks of L keys, each with separate queries.

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
    """Returns the gradients through one part; `out` and `lse` are those of all parts together."""
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
    """Returns scores [H, Q, L], in float32 or wider."""
    accurate = torch.float32 if query.dtype in (torch.bfloat16, torch.float16) else query.dtype
    scores = torch.einsum("qhd,lhd->hql", query.to(accurate), key.to(accurate)) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores if mask is None else scores + mask
