"""The one attention function of the backend: whoever runs the model says, by a plan, what attends to what.

The sampler's plan reads and writes its key-value cache, the learner's plan follows a forest's branches. The model is
a stock `transformers` model; tokens of all sequences or branches are laid flat in one row.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "agentjet_plan"
BEYOND_PLANS = ("softcap", "s_aux", "sinks", "position_bias")
"""Arguments with which a model asks for more than a softmax over what is visible."""


class AttentionPlan(Protocol):
    """Computes attention for the flat row of tokens of one forward pass."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """`query` [N, H, D], `key` and `value` [N, K, D] of the pass's own tokens; returns [N, H, D]."""
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

    Raises `NotImplementedError` for what a plan does not compute: `branching.py` then keeps the model's own attention.
    """
    if asked := [name for name in BEYOND_PLANS if unused.get(name) is not None]:
        raise NotImplementedError(f"attention with {', '.join(asked)}")
    assert plan is not None, "this model runs under an attention plan only"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = plan.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scale)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attention)


def group_queries(query: Tensor, num_kv_heads: int) -> Tensor:
    """[..., T, H, D] to [..., K, H/K * T, D]: query heads that share a key head become more query rows.

    Grouped-query attention then needs no copies of keys and values.
    """
    *lead, t, h, d = query.shape
    group = h // num_kv_heads
    return query.reshape(*lead, t, num_kv_heads, group, d).movedim(-4, -2).reshape(*lead, num_kv_heads, group * t, d)


def ungroup_queries(out: Tensor, num_heads: int) -> Tensor:
    """The inverse of `group_queries`: [..., K, H/K * T, D] to [..., T, H, D]."""
    *lead, k, gt, d = out.shape
    group = num_heads // k
    return out.reshape(*lead, k, group, gt // group, d).movedim(-2, -4).reshape(*lead, gt // group, num_heads, d)


def flat_forward(decoder: nn.Module, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
    """Hidden states [N, hidden] of a flat row of tokens [N] at the given positions [N]."""
    out = decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False, plan=plan)
    hidden: Tensor = out.last_hidden_state
    return hidden[0]


def causal_tail_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """[Q, K] mask where the queries are the last Q of the K positions."""
    q = torch.arange(num_keys - num_queries, num_keys, device=device)
    return torch.arange(num_keys, device=device)[None, :] <= q[:, None]
