"""The gradient of the forest against that of one row per call, in float64, on a small model of the same kind."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from agentjet.compute.embedded.model import load_policy
from agentjet.compute.embedded.policy import Policy
from agentjet.compute.protocol import LossSpec
from agentjet.config import JobConfig, ModelConfig
from agentjet.timeline import Row
from agentjet.timeline.batch import TrainingBatch
from bench.merging.modes import lay_out, make_learner


def gradient_error(rows: Sequence[Row], folder: Path, budget: int) -> float:
    """Relative error in the 2-norm over all weights."""
    policy = load_policy(ModelConfig.model_validate({"name": str(folder), "dtype": "float32", "device": "cpu"}))
    _in_double(policy)
    forest, baseline = (_gradient(policy, mode, rows, budget) for mode in ("forest", "call"))
    return float((forest - baseline).norm() / baseline.norm())


def _gradient(policy: Policy, mode: str, rows: Sequence[Row], budget: int) -> Tensor:
    """The gradient that the optimiser would receive."""
    learner = make_learner(policy, mode)
    learner.forward_backward(TrainingBatch(0, lay_out(mode, rows)), LossSpec.of(JobConfig(micro_batch_tokens=budget)))
    gradient = torch.cat([master.grad.flatten() for master in learner.masters() if master.grad is not None])
    learner._optimizer.zero_grad()
    return gradient


def _in_double(policy: Policy) -> None:
    """Float64 throughout: `transformers` always computes norms in float32, so its norms are replaced."""
    policy.model.double()
    for module in policy.model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(_norm, module)  # type: ignore[method-assign]


def _norm(module: nn.Module, hidden: Tensor) -> Tensor:
    scale: Tensor = (hidden.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
    return module.weight * hidden * scale
