"""`ValueModel`: linear heads that predict values from a policy's last hidden states, and their optimiser.

    V(s) = w f(s) + BIAS b,  f(s) = h(s) / (|h(s)| sqrt(width))

The absolute values of `f` add up to at most 1 for any model, so an Adam step moves a value by about the rate at most.
All heads begin at 0: the first advantages are those of a value 0. Heads are float32, and float64 for a float64 policy.
Shapes: U positions, K heads.
"""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor

from agentjet.compute.embedded.policy import Policy
from agentjet.recipes.recipe import ValueHeads

BIAS = 0.1
"""Size of the constant feature."""


class ValueModel:
    """The heads of a recipe. Saved with the trainer's state of the policy."""

    def __init__(self, heads: ValueHeads, policy: Policy) -> None:
        self.heads = heads
        dtype = torch.promote_types(policy.dtype, torch.float32)
        size = len(heads.names), int(policy.config.hidden_size) + 1
        self._weights = torch.zeros(size, dtype=dtype, device=policy.device, requires_grad=True)
        """Weights and bias [K, width + 1]."""
        self._optimizer = torch.optim.AdamW([self._weights], lr=heads.lr, betas=(0.9, 0.99), weight_decay=0.0)

    def values(self, hidden: Tensor) -> dict[str, Tensor]:
        """Returns the values [U] of each head, from hidden states [U, width]. Gradients reach the body scaled."""
        if hidden.requires_grad:
            hidden = hidden * 1.0 if self.heads.body_coef else hidden.detach()
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * self.heads.body_coef)  # type: ignore[no-untyped-call]
        wide = hidden.to(self._weights.dtype)
        features = torch.nn.functional.normalize(wide, dim=-1) / math.sqrt(wide.shape[-1])
        found = features @ self._weights[:, :-1].T + BIAS * self._weights[:, -1]
        return dict(zip(self.heads.names, found.unbind(-1), strict=True))

    @property
    def weights(self) -> Tensor:
        """The tensor that has the gradient."""
        return self._weights

    @property
    def has_finite_gradient(self) -> bool:
        """True if the gradient is finite or missing."""
        return self._weights.grad is None or bool(self._weights.grad.isfinite().all())

    def step(self) -> None:
        """Apply the gradient, if there is one, and drop it."""
        self._optimizer.param_groups[0]["lr"] = self.heads.lr
        self._optimizer.step()
        self.drop_gradient()

    def drop_gradient(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Returns names, weights and moments. `restored` continues from them bit by bit."""
        return {
            "names": list(self.heads.names),
            "weights": self._weights.detach(),
            "optimizer": self._optimizer.state_dict(),
        }

    @classmethod
    def restored(cls, state: dict[str, Any], policy: Policy) -> Self:
        """The inverse of `state`. The next batch brings the other parameters."""
        found = cls(ValueHeads(tuple(state["names"]), 0.0, 0.0), policy)
        with torch.no_grad():
            found._weights.copy_(state["weights"])
        found._optimizer.load_state_dict(state["optimizer"])
        return found
