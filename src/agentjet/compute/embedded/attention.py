"""The attention function of the backend, and exact partial attention with log-sum-exps.

An attention plan decides which tokens attend to which. The sampler's plan uses the key-value cache; the learner's plan
follows the branches of a forest. The model is a stock `transformers` model, and the tokens of all sequences or branches
form one flat row.

Partial results over some of the keys are merged by their log-sum-exps. `torch`'s public attention does not return the
log-sum-exp, and its autograd would differentiate each part alone. So this module calls the fused kernel of the CPU
below it. On CUDA nothing is merged: see `FlexPlan` and `PagedPlan`.

Shapes: N tokens, B parts, Q queries, L keys, H heads, K key heads, D widths.
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

    Raises `NotImplementedError` for what a plan does not compute; the model then keeps its own attention.
    """
    if unsupported := [name for name in UNSUPPORTED_ARGUMENTS if unused.get(name) is not None]:
        raise NotImplementedError(f"attention with {', '.join(unsupported)}")
    if query.shape[-1] != value.shape[-1]:
        raise NotImplementedError("attention with values of another width")
    assert plan is not None, "this model runs under an attention plan only"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = plan.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scale)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attention)


def flat_forward(decoder: nn.Module, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
    """Returns hidden states [N, hidden] of a flat row of tokens [N] at the given positions [N]."""
    out = decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False, plan=plan)
    hidden: Tensor = out.last_hidden_state
    return hidden[0]


FEW_KEYS = 384
"""With fewer keys, the fused backward pass is up to four times faster in float32 than in bfloat16."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns output [B, H, Q, D] and log-sum-exp [B, H, Q] of queries [B, H, Q, D], keys and values [B, H, L, D].

    `mask` is added to the scores [B, H, Q, L]. Every query must see at least one key. All tensors are on a CPU.
    """
    out, lse = _flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value through one part; `out` and `lse` are those of all parts."""
    if key.shape[2] < FEW_KEYS and query.dtype != lse.dtype:
        grad_out, query, key, value, out = (x.to(lse.dtype) for x in (grad_out, query, key, value, out))
    mask = None if mask is None else mask.to(query.dtype)
    q, k, v = _flash_backward(grad_out, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    return q, k, v
