"""Several adapters over one base model: in the same weights, and in one forward pass.

Each adapter has separate modules around the shared weights. It is loaded, trained and saved as if it were alone. For
sampling, `AdapterMixture` runs tokens of several adapters through the base model once. It stacks the matrices of
the adapters. Every layer computes the low-rank products of all adapters, and masks those of other policies:

    out = W x + B (mask * (A x)),    A [R, in] and B [out, R] stacked,    R the sum of the ranks

The log-probabilities equal those of a separate pass within rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentjet.compute.embedded.attention import AttentionPlan, flat_forward
from agentjet.compute.embedded.policy import Policy

ADAPTER = "default"
"""Name of a policy's adapter in `peft`, and in its files."""


def copied_modules(model: nn.Module) -> Any:
    """Returns a copy of the modules that shares all weights and buffers."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, cast(Any, shared))


def mixable_layers(policy: Policy) -> dict[str, Any]:
    """Returns the layers of a policy's adapter by their path in the decoder; empty if a mixture cannot compute them.

    A mixture needs layers that see all tokens in order. A routed expert sees some of them.
    """
    from peft.tuners.lora import Linear, LoraLayer

    num_layers = sum(isinstance(layer, LoraLayer) for layer in policy.model.modules())
    found = {path: layer for path, layer in policy.decoder.named_modules() if type(layer) is Linear}
    return found if len(found) == num_layers and not any("experts" in path.split(".") for path in found) else {}


class AdapterMixture:
    """The base model's decoder with the stacked adapters of some policies."""

    def __init__(self, base: Policy) -> None:
        self._decoder = copied_modules(base.decoder)
        self._layers: dict[str, _MixedLayer] = {}
        self._ranks: dict[Policy, slice] = {}
        """The place of each stacked policy among the R rows."""

    def invalidate(self) -> None:
        """Drop the stacked matrices: weights of a policy changed."""
        self._ranks.clear()
        for layer in self._layers.values():
            layer.down = layer.up = None

    def forward(
        self, tokens: Tensor, positions: Tensor, plan: AttentionPlan, owners: Sequence[tuple[Policy, int]]
    ) -> Tensor:
        """Returns hidden states [N, hidden]. `owners` are the policies of the tokens, with their numbers, in order."""
        policies = dict.fromkeys(policy for policy, _ in owners)
        if not policies.keys() <= self._ranks.keys():
            self._stack(list(policies | self._ranks))
        num_ranks = max(place.stop for place in self._ranks.values())
        outside = np.ones((len(tokens), num_ranks), bool)
        start = 0
        for policy, count in owners:
            outside[start : start + count, self._ranks[policy]] = False
            start += count
        mask = torch.from_numpy(outside).to(tokens.device)
        for layer in self._layers.values():
            layer.outside = mask
        return flat_forward(self._decoder, tokens, positions, plan)

    def _stack(self, policies: list[Policy]) -> None:
        self.invalidate()
        start = 0
        for policy in policies:
            rank = next(iter(policy.mixable_layers.values())).r[ADAPTER]
            self._ranks[policy] = slice(start, start + rank)
            start += rank
        for path in dict.fromkeys(path for policy in policies for path in policy.mixable_layers):
            if path not in self._layers:
                self._layers[path] = _MixedLayer(self._decoder.get_submodule(path))
                self._decoder.set_submodule(path, self._layers[path])
            layers = ((policy.mixable_layers.get(path), self._ranks[policy]) for policy in policies)
            self._layers[path].stack([(layer, place) for layer, place in layers if layer is not None], num_ranks=start)


class _MixedLayer(nn.Module):
    """A linear layer of the base model, with the stacked matrices of the adapters."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down: Tensor | None = None
        self.up: Tensor | None = None
        self.outside: Tensor | None = None
        """Mask [N, R]: True where a token does not belong to the policy of the rank."""

    def stack(self, adapters: list[tuple[Any, slice]], num_ranks: int) -> None:
        """Stack the adapters of this layer, each at its ranks."""
        down, up = adapters[0][0].lora_A[ADAPTER].weight, adapters[0][0].lora_B[ADAPTER].weight
        self.down = down.new_zeros(num_ranks, down.shape[1])
        self.up = up.new_zeros(up.shape[0], num_ranks)
        for layer, place in adapters:
            self.down[place] = layer.lora_A[ADAPTER].weight
            self.up[:, place] = layer.lora_B[ADAPTER].weight * layer.scaling[ADAPTER]
        # 0 times NaN is NaN: in `up`, a diverged adapter would reach the tokens of the others.
        diverged = ~self.up.isfinite().all(0)
        self.up.masked_fill_(diverged, 0)
        self.down.masked_fill_(diverged[:, None], torch.nan)

    def forward(self, x: Tensor) -> Tensor:
        """See `nn.Linear`. `x` are all tokens of the pass in order."""
        out: Tensor = self.base(x)
        if self.down is None or self.up is None or self.outside is None:
            return out
        low = F.linear(x, self.down).masked_fill_(self.outside, 0)
        return out + F.linear(low, self.up)
