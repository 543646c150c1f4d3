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
from bench.scaling.spawn import spawn

if TYPE_CHECKING:
    from torch import Tensor

    from agentjet.compute.embedded.learner import PolicyLearner
    from agentjet.compute.embedded.rank_group import RankGroup, Sharding

MODES: tuple[Sharding, ...] = ("gathered", "sharded")
LEARNED = "learned"
JOB = JobConfig(optimizer=OptimizerConfig(lr=1e-5))
GROUPS, REPEATS, PROMPT_TOKENS, COMPLETION_TOKENS = 4, 3, 48, 32


def model_of(name: str) -> ModelConfig:
    return ModelConfig(name=name, device="cpu", dtype="float32", threads=1)


def grad_rel_err(model: str = "smollm2-135m") -> dict[str, float]:
    """The gradient of two ranks against one, on `model` and with every loss of the tests on a tiny model.

    `grad_rel_err` is the largest one of batches whose trees stay whole. `grad_rel_err_cut` is of a batch with a shared
    start, which is one tree that is cut: attention then adds up other parts, as with other micro-batches on one rank,
    whose error is `grad_rel_err_micro_batches`.
    """
    found = {f"grad_rel_err_{mode}": error for mode, error in model_gradient_errors(model).items()}
    found["grad_rel_err_losses"] = max(loss_gradient_errors().values())
    largest = max(found.values())
    cut = model_gradient_errors(model, shared=PROMPT_TOKENS // 2)
    found["grad_rel_err_cut"] = max(cut[mode] for mode in MODES)
    found["grad_rel_err_micro_batches"] = cut["micro_batches"]
    return {"grad_rel_err": largest, **found}


def model_gradient_errors(model: str, shared: int = 0) -> dict[str, float]:
    """Returns the error of the gradient of one batch by mode, and with micro-batches on one rank if `shared`."""
    import torch

    from agentjet.compute.embedded.learner import PolicyLearner
    from agentjet.compute.embedded.model import load_policy

    learner = PolicyLearner(load_policy(model_of(model)))
    batch = batch_of(learner, shared=shared)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gradient.pt"
        learner.forward_backward(batch, LossSpec.of(JOB))
        expected = {name: master.grad for name, master in learner._masters.items()}
        torch.save(expected, path)
        if shared:
            learner._optimizer.zero_grad()
            quarter = JOB.model_copy(update={"micro_batch_tokens": batch.forest.num_nodes // 4})
            learner.forward_backward(batch, LossSpec.of(quarter))
            found["micro_batches"] = relative((m.grad, expected[name]) for name, m in learner._masters.items())
        del learner, expected
        return found | {mode: spawn(2, _gradient_error, model, batch, mode, path)[0] for mode in MODES}


def loss_gradient_errors() -> dict[tuple[int, int], float]:
    """Returns the error by batch and step of the recorded batches of `tests/compute/test_locks.py`, on a tiny model."""
    from tests.cluster.rank_cases import Case, gradients_of_one, gradients_of_ranks
    from tests.compute.test_locks import RECIPES
    from tests.tiny import make_model

    batches = tuple(range(len(RECIPES)))
    errors: dict[tuple[int, int], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = {"full": make_model(Path(folder) / "tiny")}
        cases: dict[Case, tuple[int, ...]] = {("full", mode): batches for mode in MODES}
        of_ranks = spawn(2, gradients_of_ranks, models, cases)[0]
        expected, _ = gradients_of_one("full", models, batches)
    for gradients, _ in of_ranks.values():
        for step, gradient in gradients.items():
            error = float(np.linalg.norm(gradient - expected[step]) / np.linalg.norm(expected[step]))
            errors[step] = max(error, errors.get(step, 0.0))
    return errors


def reshard_err(model: str = "smollm2-135m", counts: tuple[int, ...] = (4, 2, 1)) -> dict[str, float]:
    """A checkpoint that each number of ranks loads from the one before and saves again.

    `reshard_err` is the largest error of its weights and moments. `reshard_step_err` is that of the weights after one
    more batch on each number of ranks, from the same checkpoint, against one rank: another order of sums.
    """
    from agentjet.compute.embedded import checkpoint
    from agentjet.compute.embedded.learner import PolicyLearner
    from agentjet.compute.embedded.model import load_policy

    learner = PolicyLearner(load_policy(model_of(model)))
    batches = [batch_of(learner, seed) for seed in range(2)]
    learner.learn(batches[0].forest, JOB, 0)
    weights = {name: master.detach().clone() for name, master in learner._masters.items()}
    moments = [
        {key: tensor.clone() for key, tensor in learner._optimizer.state[master].items()}
        for master in learner.masters()
    ]
    found = {"reshard_err": 0.0, "reshard_step_err": 0.0}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        checkpoint.save(first := folder / "first", learner, {"policy_version": 1, "operation": 2})
        learner.learn(batches[1].forest, JOB, 1)
        path = first
        for count in counts:
            spawn(count, _load_and_save, model, (path, target := folder / f"of {count}"), (first, batches[1], folder))
            path = target
            state = checkpoint.read_trainer(path, learner)
            pairs = [(state["masters"][name], weights[name]) for name in weights]
            for name, expected in zip(weights, moments, strict=True):
                pairs += [(state["moments"][name][key], expected[key]) for key in ("exp_avg", "exp_avg_sq")]
            found["reshard_err"] = max(found["reshard_err"], relative(pairs))
            state = checkpoint.read_trainer(folder / LEARNED, learner)
            pairs = [(state["masters"][name], master.detach()) for name, master in learner._masters.items()]
            found["reshard_step_err"] = max(found["reshard_step_err"], relative(pairs))
    return found


def batch_of(learner: PolicyLearner, seed: int = 0, shared: int = 0) -> TrainingBatch:
    """Returns groups of random tokens, with the policy's own log-probabilities and some noise.

    The first `shared` tokens are the same in all groups.
    """
    rng = np.random.default_rng(seed)
    size = learner.policy.vocabulary
    start = rng.integers(5, size, shared)
    rows = []
    for _ in range(GROUPS):
        prompt = np.concatenate([start, rng.integers(5, size, PROMPT_TOKENS - shared)])
        for _ in range(REPEATS):
            tokens = np.concatenate([prompt, rng.integers(5, size, COMPLETION_TOKENS)]).astype(np.int32)
            zeros = np.zeros(COMPLETION_TOKENS, np.float32)
            rows.append(call_row(tokens, zeros, zeros.astype(np.int32), float(rng.normal()), 1.0, len(rows)))
    forest = build_forest(rows)
    logprobs = learner.logprobs(forest).numpy() + rng.normal(scale=0.02, size=forest.num_targets)
    return TrainingBatch(seed, forest.with_columns(logprob=logprobs))


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


def _load_and_save(
    group: RankGroup, model: str, copied: tuple[Path, Path], learned: tuple[Path, TrainingBatch, Path]
) -> None:
    """Load a checkpoint and save it elsewhere; then load another one, learn a batch and save that."""
    from agentjet.compute.embedded import checkpoint

    learner, state = _learner(group, model, "sharded"), {"policy_version": 1, "operation": 2}
    checkpoint.load(copied[0], learner)
    checkpoint.save(copied[1], learner, state)
    path, batch, folder = learned
    checkpoint.load(path, learner)
    learner.learn(batch.forest, JOB, batch.id)
    checkpoint.save(folder / LEARNED, learner, state)


def _learner(group: RankGroup, model: str, mode: Sharding) -> PolicyLearner:
    from agentjet.compute.embedded.learner import PolicyLearner
    from agentjet.compute.embedded.model import load_policy

    return PolicyLearner(load_policy(model_of(model)), group, mode)
