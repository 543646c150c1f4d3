"""Whether a model's state can branch: several continuations of one prefix computed side by side, the prefix once.

Two questions, and both must be answered with yes. By its config, is every layer full attention? (A window that is
never shorter than the context is full attention.) And does a forward pass over a small forest, under a plan, give what
the model itself gives row by row? The second finds what no config says: soft caps, sinks, biases, convolutions beside
the attention, layers that keep other keys than the cache can hold.
"""

from __future__ import annotations

import re
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import get_layer_types_and_kwargs

from agentjet.compute.embedded.attention import ATTENTION, AttentionPlan, flat_forward
from agentjet.compute.embedded.logits import probe_tokens, tolerance
from agentjet.compute.embedded.passes import forest_plan
from agentjet.compute.embedded.policy import Policy
from agentjet.compute.embedded.resolve import first_line
from agentjet.timeline.forest import Row, build_forest

FULL = "full_attention"
SHORT_SIGHT = re.compile(r"window_(size|len)|index_topk")
"""Names of settings of layers that see less than everything, in configs that do not list their layers."""
TRUNK, BRANCH = 8, 5


def why_state_cannot_branch(policy: Policy) -> str | None:
    """The reason, for the log; None when it can.

    The boundary at which whatever a model of any kind raises, when it is looked at or run under a plan, becomes a
    reason.
    """
    try:
        return _by_config(policy.config, policy.card.context_length) or _by_trial(policy)
    except Exception as error:
        return f"it does not run under an attention plan: {type(error).__name__}: {first_line(error)}"


def _by_config(config: Any, context: int) -> str | None:
    kinds: set[str] = set()
    for kind, arguments in zip(*get_layer_types_and_kwargs(config), strict=True):
        window = arguments.get("sliding_window")
        if kind == FULL or (kind == "sliding_attention" and window and window >= context):
            continue
        kinds.add(f"{kind} of {window} in a context of {context}" if window else kind)
    if kinds:
        return f"layers of kind {', '.join(sorted(kinds))}"
    short = sorted(key for key, value in config.to_dict().items() if value and SHORT_SIGHT.search(key))
    return f"its config has {', '.join(short)}" if short else None


@torch.inference_mode()
def _by_trial(policy: Policy) -> str | None:
    """Two rows with a common trunk: as one forest under a plan, and row by row by the model itself."""
    tokens = probe_tokens(policy, TRUNK + 2 * BRANCH).cpu().numpy().astype(np.int32)
    rows = [tokens[: TRUNK + BRANCH], np.concatenate([tokens[:TRUNK], tokens[TRUNK + BRANCH :]])]
    nothing = np.zeros(0, np.float32)
    forest = build_forest([Row(row, nothing, nothing.astype(np.int32), 0.0, 1.0, i) for i, row in enumerate(rows)])
    assert forest.num_nodes == len(tokens), "the vocabulary is smaller than the trial"
    witness = _Witness(forest_plan(forest, policy.device))
    with policy.attention(ATTENTION):
        hidden = flat_forward(
            policy.decoder,
            torch.from_numpy(forest.tokens.astype(np.int64)).to(policy.device),
            torch.from_numpy(forest.depth.astype(np.int64)).to(policy.device),
            witness,
        )
    if (unlike := witness.unlike(policy)) is not None:
        return unlike
    ours = policy.head(hidden).float().log_softmax(-1)
    for row in rows:
        ids = torch.from_numpy(row.astype(np.int64)).to(policy.device)
        logits = cast(Any, policy.model)(input_ids=ids[None], use_cache=False).logits[0].float()
        theirs = logits.log_softmax(-1)
        branch = np.flatnonzero(np.isin(forest.tokens, row))
        difference = float((ours[torch.from_numpy(branch).to(policy.device)] - theirs).abs().max())
        if not difference <= tolerance(policy.dtype, logits):
            return f"its attention differs from plain attention by {difference:.3f} in log-probability"
    return None


class _Witness:
    """Passes attention on to a plan and notes which layers asked, and for keys and values of which sizes."""

    def __init__(self, plan: AttentionPlan) -> None:
        self._plan = plan
        self._layers: list[int] = []
        self._sizes: set[tuple[int, ...]] = set()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `AttentionPlan`."""
        self._layers.append(layer)
        self._sizes |= {tuple(key.shape[1:]), tuple(value.shape[1:])}
        return self._plan.attend(layer, query, key, value, scale)

    def unlike(self, policy: Policy) -> str | None:
        """How the layers differ from those the sampler's cache is made for; None when they do not."""
        shape = policy.shape
        if sorted(self._layers) != list(range(shape.layers)):
            return f"{len(set(self._layers))} of its {shape.layers} layers attend through the library's interface"
        if self._sizes != {(shape.kv_heads, shape.head_dim)}:
            return f"its keys and values have the sizes {sorted(self._sizes)}"
        return None
