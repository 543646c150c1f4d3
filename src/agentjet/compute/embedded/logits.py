"""What a model does to its logits after the output embeddings: nothing, a scale, or a soft cap.

The learner multiplies out the vocabulary itself, a chunk at a time, and the sampler for the last positions only; both
must end at the model's own logits. The config names the numbers, under names that mean division in one architecture and
multiplication in another, so the candidates are tried against the model itself.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from agentjet.compute.embedded.policy import LogitShape, Policy
from agentjet.errors import ConfigError

SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier")
PROBE_TOKENS = 12


@torch.inference_mode()
def find_logit_shape(policy: Policy) -> LogitShape:
    """The candidate that comes closest to the model's logits; raises `ConfigError` when none comes close."""
    tokens = probe_tokens(policy, PROBE_TOKENS)[None]
    theirs = cast(Any, policy.model)(input_ids=tokens, use_cache=False).logits[0]
    hidden = cast(Any, policy.decoder)(input_ids=tokens, use_cache=False).last_hidden_state[0]
    plain = policy.head(hidden)
    candidates = _candidates(policy.config)
    differences = [float((shape(plain).float() - theirs.float()).abs().max()) for shape in candidates]
    closest = min(range(len(candidates)), key=differences.__getitem__)
    if not differences[closest] <= tolerance(policy.dtype, theirs):
        raise ConfigError(
            f"model.name = {policy.card.name!r}: its logits are not the product of its last hidden states and its "
            f"output embeddings (they differ by {differences[closest]:.3f}), which this version cannot train; "
            "use another model"
        )
    return candidates[closest]


def tolerance(dtype: torch.dtype, logits: Tensor) -> float:
    """How far two ways to the same logits may differ by rounding."""
    return (0.15 if dtype == torch.bfloat16 else 1e-3) * max(1.0, float(logits.float().std()))


def probe_tokens(policy: Policy, count: int) -> Tensor:
    """Token ids [count], all over the vocabulary."""
    return torch.arange(count, device=policy.device) * 7919 % policy.vocabulary


def _candidates(config: Any) -> list[LogitShape]:
    found: list[LogitShape] = []
    for name in SOFT_CAPS:
        if cap := getattr(config, name, None):
            found.append(lambda logits, cap=cap: torch.tanh(logits / cap) * cap)  # type: ignore[misc]
    for name in SCALES:
        if scale := getattr(config, name, None):
            found.append(lambda logits, scale=scale: logits / scale)  # type: ignore[misc]
            found.append(lambda logits, scale=scale: logits * scale)  # type: ignore[misc]
    return [*found, lambda logits: logits]
