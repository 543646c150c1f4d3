"""The optimisers of `job.optimizer.name`, on the masters of one policy, and the schedule of the learning rate.

| name | some weights | the others | bytes of moments a weight |
|---|---|---|---|
| `adamw` | | AdamW (arXiv 1711.05101) | 8 |
| `muon` | matrices of the layers: Muon (arXiv 2502.16982, its learning rate) | AdamW | 4, the others 8 |
| `adamw_8bit` | all but embeddings: AdamW with moments of 8 bits (arXiv 2110.02861) | AdamW | 2, the others 8 |

A matrix is a 2-D `weight` of a module inside the decoder's layers that is not an embedding. The optimisers are those of
torch and bitsandbytes, which keeps 32 bits for tensors of fewer than 4096 numbers. Embeddings have 32 bits, as in the
paper, because gradients of rare tokens are small beside those of frequent ones in the same block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentjet.compute.model import decoder_layers
from agentjet.compute.policy import Policy
from agentjet.compute.protocol import check_optimizer
from agentjet.config import OptimizerConfig


class Optimizer:
    """An optimiser on masters, without moments. One by the same name `load`s its `moments` and continues bit by bit."""

    def __init__(self, name: str, policy: Policy, masters: Mapping[str, Tensor]) -> None:
        """Raises `ConfigError` for a policy or masters that this optimiser cannot train."""
        backend = "cluster" if any(isinstance(master, DTensor) for master in masters.values()) else "embedded"
        check_optimizer(
            "job.optimizer.name", name, backend, adapters=policy.has_adapters, offloads=policy.offloads_optimizer
        )
        self.name = name
        self._masters = masters
        self.parts: list[tuple[torch.optim.Optimizer, list[str]]] = []
        """The optimisers of the libraries, with the names of their masters."""
        special: set[str] = set()
        if name == "muon":
            special = matrices_of(policy)
            self._add(partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw"), special)
        elif name == "adamw_8bit":
            from bitsandbytes.optim import AdamW8bit

            special = {*masters} - embeddings_of(policy)
            self._add(AdamW8bit, special)
        self._add(partial(torch.optim.AdamW, fused=True), {*masters} - special)

    def _add(self, make: Callable[..., torch.optim.Optimizer], names: set[str]) -> None:
        if ordered := [name for name in self._masters if name in names]:
            self.parts.append((make([self._masters[name] for name in ordered], lr=0.0), ordered))

    def step(self, settings: OptimizerConfig, rate: float) -> None:
        """Apply the gradients of the masters at this learning rate."""
        own: dict[str, Any]
        for part, _ in self.parts:
            if isinstance(part, torch.optim.Muon):
                own = {"momentum": settings.momentum}
            else:
                own = {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
            for group in part.param_groups:
                group.update(own, lr=rate, weight_decay=settings.weight_decay)
            part.step()

    def zero_grad(self) -> None:
        """Drop the gradients of the masters."""
        for part, _ in self.parts:
            part.zero_grad(set_to_none=True)

    def moments(self) -> dict[str, dict[str, Any]]:
        """Returns tensors and numbers of each master by its name; empty before its first step."""
        state = {name: dict(part.state[self._masters[name]]) for part, names in self.parts for name in names}
        return {name: state[name] for name in self._masters}

    def load(self, moments: Mapping[str, Mapping[str, Any] | None]) -> None:
        """The inverse of `moments`."""
        for part, names in self.parts:
            state = {number: moments[name] for number, name in enumerate(names) if moments[name]}
            part.load_state_dict({**part.state_dict(), "state": state})


def matrices_of(policy: Policy) -> set[str]:
    """Returns the names of the weights that Muon changes. Raises `ConfigError` if the decoder has no list of layers."""
    modules = [m for layer in decoder_layers(policy, "job.optimizer.name = 'muon'") for m in layer.modules()]
    weights = {id(getattr(module, "weight", None)) for module in modules}
    matrices = {name for name, weight in policy.trainable().items() if id(weight) in weights and weight.dim() == 2}
    return matrices - embeddings_of(policy)


def embeddings_of(policy: Policy) -> set[str]:
    """Returns the names of the trained embeddings, which may be the head, too."""
    weights = {id(module.weight) for module in policy.model.modules() if isinstance(module, nn.Embedding)}
    return {name for name, weight in policy.trainable().items() if id(weight) in weights}


def new_moments(master: Tensor) -> dict[str, Tensor]:
    """Returns the state of AdamW for a master before the first step."""
    moments = {name: torch.zeros_like(master, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), device=master.device), **moments}


def learning_rate(optimizer: OptimizerConfig, version: int) -> float:
    """Returns the rate of the batch at `version`: linear warm-up, then constant, linear or cosine decay."""
    if version < optimizer.warmup_steps:
        return optimizer.lr * (version + 1) / (optimizer.warmup_steps + 1)
    if optimizer.schedule == "constant":
        return optimizer.lr
    progress = min(1.0, (version - optimizer.warmup_steps) / (optimizer.total_steps - optimizer.warmup_steps))
    shape = 1 - progress if optimizer.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return optimizer.lr * (optimizer.min_lr_ratio + (1 - optimizer.min_lr_ratio) * shape)
