"""The learner's part of `python -m bench.scale`: gradients of two ranks against one, and checkpoints that reshard.

Ranks are processes of this machine on gloo, one thread each. "One" is the learner of the embedded backend. Errors are
relative: the norm of the difference over the norm.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agentjet.compute.protocol import LossSpec
from agentjet.config import JobConfig, ModelConfig, OptimizerConfig
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import build_forest, call_row
from tests.cluster.spawn import spawn

if TYPE_CHECKING:
    from torch import Tensor

    from agentjet.compute.cluster.group import RankGroup
    from agentjet.compute.cluster.learner import RankLearner, Sharding
    from agentjet.compute.embedded.learner import PolicyLearner

MODES: tuple[Sharding, ...] = ("gathered", "sharded")
JOB = JobConfig(optimizer=OptimizerConfig(lr=1e-5))
GROUPS, REPEATS, PROMPT_TOKENS, COMPLETION_TOKENS = 4, 3, 48, 32


def model_of(name: str) -> ModelConfig:
    return ModelConfig(name=name, device="cpu", dtype="float32", threads=1)


def grad_rel_err(model: str = "smollm2-135m") -> dict[str, float]:
    """Returns the error of the gradient of one batch on two ranks against one, by mode, and the largest."""
    import torch

    from agentjet.compute.embedded.learner import PolicyLearner
    from agentjet.compute.embedded.model import load_policy

    learner = PolicyLearner(load_policy(model_of(model)))
    batch = batch_of(learner)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gradient.pt"
        learner.forward_backward(batch, LossSpec.of(JOB))
        torch.save({name: master.grad for name, master in learner._masters.items()}, path)
        del learner
        found = {mode: spawn(2, _gradient_error, model, batch, mode, path)[0] for mode in MODES}
    by_mode = {f"grad_rel_err_{mode}": error for mode, error in found.items()}
    return {"grad_rel_err": max(found.values()), **by_mode}


def reshard_err(model: str = "smollm2-135m", counts: tuple[int, ...] = (4, 2, 1)) -> dict[str, float]:
    """The largest error of weights and moments of a checkpoint that each number of ranks loads from the one before and
    saves again.
    """
    from agentjet.compute.embedded import checkpoint
    from agentjet.compute.embedded.learner import PolicyLearner
    from agentjet.compute.embedded.model import load_policy

    learner = PolicyLearner(load_policy(model_of(model)))
    learner.learn(batch_of(learner).forest, JOB, 0)
    weights = {name: master.detach() for name, master in learner._masters.items()}
    moments = [learner._optimizer.state[master] for master in learner.masters()]
    largest = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "first"
        checkpoint.save(path, learner.policy, learner, {"policy_version": 1, "operation": 2})
        for count in counts:
            target = Path(scratch) / f"of {count}"
            spawn(count, _load_and_save, model, path, target)
            state, path = checkpoint.read_trainer(target, learner), target
            pairs = [(state["masters"][name], weights[name]) for name in weights]
            for name, expected in zip(weights, moments, strict=True):
                pairs += [(state["moments"][name][key], expected[key]) for key in ("exp_avg", "exp_avg_sq")]
            largest = max(largest, relative(pairs))
    return {"reshard_err": largest}


def batch_of(learner: PolicyLearner) -> TrainingBatch:
    """Returns groups of random tokens, with the policy's own log-probabilities and some noise."""
    rng = np.random.default_rng(0)
    size = learner.policy.vocabulary
    rows = []
    for _ in range(GROUPS):
        prompt = rng.integers(5, size, PROMPT_TOKENS)
        for _ in range(REPEATS):
            tokens = np.concatenate([prompt, rng.integers(5, size, COMPLETION_TOKENS)]).astype(np.int32)
            zeros = np.zeros(COMPLETION_TOKENS, np.float32)
            rows.append(call_row(tokens, zeros, zeros.astype(np.int32), float(rng.normal()), 1.0, len(rows)))
    forest = build_forest(rows)
    logprobs = learner.logprobs(forest).numpy() + rng.normal(scale=0.02, size=forest.num_targets)
    return TrainingBatch(0, forest.with_columns(logprob=logprobs))


def relative(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Returns the error of tensors, each with the expected one."""
    difference = norm = 0.0
    for tensor, expected in pairs:
        difference += float((tensor.double() - expected.double()).norm()) ** 2
        norm += float(expected.double().norm()) ** 2
    return math.sqrt(difference / norm)


def _gradient_error(group: RankGroup, model: str, batch: TrainingBatch, mode: Sharding, path: Path) -> float:
    import torch

    learner = _learner(group, model, mode)
    learner.forward_backward(batch, LossSpec.of(JOB))
    expected = torch.load(path, mmap=True)
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor.full_tensor()  # type: ignore[attr-defined]  # noqa: E731
    return relative((whole(master.grad), expected[name]) for name, master in learner._masters.items())


def _load_and_save(group: RankGroup, model: str, path: Path, target: Path) -> None:
    from agentjet.compute.cluster import checkpoint

    learner = _learner(group, model, "sharded")
    checkpoint.load(path, learner, group)
    checkpoint.save(target, learner, group, {"policy_version": 1, "operation": 2})


def _learner(group: RankGroup, model: str, mode: Sharding) -> RankLearner:
    from agentjet.compute.cluster.learner import RankLearner
    from agentjet.compute.embedded.model import load_policy

    return RankLearner(load_policy(model_of(model)), group, mode)
