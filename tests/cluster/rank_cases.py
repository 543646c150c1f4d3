"""Work of the ranks of `test_ranks.py`, which they do in processes of their own, and of one learner to compare with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentjet.compute import checkpoint
from agentjet.compute.group import RankGroup, Sharding
from agentjet.compute.learner import PolicyLearner
from agentjet.compute.policy import Policy
from agentjet.compute.protocol import LossSpec
from agentjet.compute.rank import publish
from agentjet.compute.weights import WeightsServer
from agentjet.config import JobConfig, OptimizerConfig
from agentjet.errors import CheckpointError, ConfigError, RecipeError
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest, build_forest, call_row
from tests.compute.baseline import Double
from tests.compute.conftest import make_policy
from tests.compute.direct import learn_directly
from tests.compute.test_locks import recorded_batch, settings, training_batch
from tests.compute.test_operations import Failing
from tests.compute.test_teachers import Likely

Step = tuple[int, int]
"""Number of a batch of `test_locks`, and of an optimiser step of it."""
Arrays = dict[str, np.ndarray]
Case = tuple[str, Sharding]
RECOMPUTED = " recomputed"
"""Ending of a kind with activation checkpointing."""
OFFLOADED = " offloaded"
"""Ending of a kind with an offloaded optimiser."""
BEFORE, AFTER = (0, 9), (4, 15)
"""Batches that are learned before a checkpoint, and after it."""
TAUGHT: tuple[dict[str, Any], ...] = (
    {"name": "distill", "teacher": "FOLDER"},
    {"name": "distill_top_k", "teacher": "FOLDER", "top_k": 5},
    {"name": "kdrl", "teacher": "reference", "mini_batches": 2},
    {"name": "opsd", "teacher": "policy", "top_k": 5, "loss": {"beta": 0.3}},
    {"name": "sdpo", "top_k": 4},
)
"""Recipes with a teacher; the last two show it something."""
TAUGHT_CASES: list[Case] = [("full", "gathered"), ("full", "sharded"), ("double", "sharded"), ("lora", "sharded")]
FAILURES: list[Case] = [("full bfloat16", "gathered"), ("full", "sharded")]
"""Cases of an operation that fails. Gathered bfloat16 weights have sums of gradients, too."""


def policy_of(kind: str, folder: Path) -> Policy:
    """The model in `folder`, moved away from version 0, so that the reference differs from it."""
    policy = make_policy(
        folder,
        dtype="bfloat16" if "bfloat16" in kind else "float32",
        activation_checkpointing=kind.endswith(RECOMPUTED),
        offload_optimizer=kind.endswith(OFFLOADED),
        rank=4 if kind.startswith("lora") else 0,
    )
    if kind == "double":
        policy.model.double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(torch.randn(p.shape, generator=generator).to(p.dtype) * 0.02)
    return policy


def gradients(
    learner: PolicyLearner, batches: tuple[int, ...]
) -> tuple[dict[Step, np.ndarray], dict[Step, dict[str, float]]]:
    """The flat gradient and the metrics of every step of the batches, all at the same weights."""
    found: dict[Step, np.ndarray] = {}
    metrics: dict[Step, dict[str, float]] = {}
    for number in batches:
        batch, step, num_steps = training_batch(recorded_batch(number), number), 0, 1
        while step < num_steps:
            outputs = learner.forward_backward(batch, LossSpec.of(settings(number), step))
            found[number, step] = flat_gradient(learner)
            metrics[number, step] = dict(outputs.metrics)
            step, num_steps = step + 1, outputs.num_steps
    return found, metrics


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def taught_batch(number: int) -> TrainingBatch:
    """A batch in which a teacher sees other tokens before every second call."""
    groups = recorded_batch(number)
    batch, before, first, rows = training_batch(groups, number), np.array([7, 11, 13], np.int32), 0, []
    for place, call in enumerate(call for members in groups for episode in members for call in episode.calls):
        seen = np.concatenate([before, call.tokens]).astype(np.int32)
        row = call_row(seen, call.logprobs, call.versions, None, call.temperature, place, call.sets)
        rows.append(row.with_columns(target=np.arange(first, first := first + row.num_targets)))
    return replace(batch, taught=build_forest(rows[::2]))


def taught(learner: PolicyLearner, folder: Path) -> list[tuple[np.ndarray, dict[str, float]]]:
    """The flat gradient and the metrics of every step of `TAUGHT`, and of a loss over likely tokens."""
    made = [make_recipe({key: str(folder) if one == "FOLDER" else one for key, one in of.items()}) for of in TAUGHT]
    found = []
    for number, recipe in enumerate([*made, Likely(source="policy", top_of="policy", whole=True)]):
        step, num_steps = 0, 1
        while step < num_steps:
            loss = LossSpec.of(JobConfig(recipe=recipe, micro_batch_tokens=60), step)
            outputs = learner.forward_backward(taught_batch(number), loss)
            found.append((flat_gradient(learner), dict(outputs.metrics)))
            step, num_steps = step + 1, outputs.num_steps
    return found


def taught_ranks(group: RankGroup | None, models: dict[str, Path], cases: list[Case]) -> Any:
    """The results of `taught` by case; without a group those of one learner."""
    found = {}
    for kind, sharding in cases:
        with Double() if kind == "double" else nullcontext():
            learner = PolicyLearner(policy_of(kind, models[kind]), group, sharding if group is not None else "gathered")
            found[kind, sharding] = taught(learner, models[kind])
    return found


def flat_gradient(learner: PolicyLearner) -> np.ndarray:
    parts = [torch.zeros_like(m) if m.grad is None else m.grad for m in learner.masters()]
    found = np.concatenate([whole(part).numpy().ravel() for part in parts])
    for master in learner.masters():
        master.grad = None
    return found


def gradients_of_ranks(group: RankGroup, models: dict[str, Path], cases: dict[Case, tuple[int, ...]]) -> Any:
    found = {}
    for (kind, sharding), batches in cases.items():
        with Double() if kind == "double" else nullcontext():
            found[kind, sharding] = gradients(PolicyLearner(policy_of(kind, models[kind]), group, sharding), batches)
    return found if group.rank == 0 else None


def repeat_routes(group: RankGroup | None, folder: Path, forest: Forest) -> list[tuple[np.ndarray, dict[str, float]]]:
    """The flat gradient and the metrics of a batch with routes, in both modes; without a group those of one learner."""
    found = []
    for sharding in ("gathered", "sharded") if group is not None else ("gathered",):
        learner = PolicyLearner(make_policy(folder), group, cast(Sharding, sharding))
        outputs = learner.forward_backward(TrainingBatch(0, forest), LossSpec.of(JobConfig()))
        found.append((flat_gradient(learner), dict(outputs.metrics)))
    return found


def gradients_of_one(kind: str, models: dict[str, Path], batches: tuple[int, ...]) -> Any:
    kind = kind.removesuffix(RECOMPUTED)
    with Double() if kind == "double" else nullcontext():
        return gradients(PolicyLearner(policy_of(kind, models[kind])), batches)


def state_of(learner: PolicyLearner) -> Arrays:
    """Masters and moments, and a reference that has moved, whole, by name."""
    found: Arrays = {}
    state = learner.state()
    for name, master in state["masters"].items():
        for key, tensor in (("master", master), *sorted(state["moments"][name].items())):
            found[f"{key} {name}"] = whole(tensor).numpy().copy()
    for name, tensor in state.get("reference", {}).items():
        found[f"reference {name}"] = whole(tensor).numpy().copy()
    return found


def learn(learner: PolicyLearner, batches: tuple[int, ...]) -> Arrays:
    """Learn with a reference that moves after each batch that reads it."""
    for number in batches:
        batch, job = training_batch(recorded_batch(number), number), settings(number)
        if getattr(job.recipe, "kl_coef", 0.0):
            recipe = job.recipe.model_copy(update={"reference_every": 1, "reference_mix": 0.3})
            job = job.model_copy(update={"recipe": recipe})
        learn_directly(learner, batch.forest, job, number, batch.facts)
    return state_of(learner)


def digest(arrays: Arrays) -> str:
    found = hashlib.sha256()
    for name, array in arrays.items():
        found.update(name.encode() + array.tobytes())
    return found.hexdigest()


def save_and_replay(group: RankGroup, models: dict[str, Path], folder: Path, cases: list[Case]) -> Any:
    """Learn, save, learn on; then the same from the checkpoint, with the optimiser offloaded if it was not, else not.

    Returns what rank 0 found, by case.
    """
    found: dict[Case, dict[str, Any]] = {}
    for kind, sharding in cases:
        place = folder / f"{kind}-{sharding}"
        learner = PolicyLearner(policy_of(kind, models[kind]), group, sharding)
        saved = learn(learner, BEFORE)
        stamp = checkpoint.save(place / "step_000002", learner, {"policy_version": 2, "operation": 8})
        undisturbed = learn(learner, AFTER)
        checkpoint.export(place / "export", learner, adapter=False)
        if learner.policy.has_adapters:
            checkpoint.export(place / "adapter", learner, adapter=True)
        weights = {name: tensor.float().numpy().copy() for name, tensor in learner.whole_weights().items()}
        other = kind.removesuffix(OFFLOADED) if kind.endswith(OFFLOADED) else kind + OFFLOADED
        revived = PolicyLearner(policy_of(other, models[kind]), group, sharding)
        state = checkpoint.load(place / "step_000002", revived)
        found[kind, sharding] = {
            "saved": saved,
            "digest": stamp,
            "state": state,
            "undisturbed": digest(undisturbed),
            "restored": digest(state_of(revived)),
            "fingerprint": revived.fingerprint,
            "replayed": digest(learn(revived, AFTER)),
            "weights": weights,
            "after": undisturbed,
        }
    return found if group.rank == 0 else None


def load_and_save(
    group: RankGroup, models: dict[str, Path], case: Case, path: Path, target: Path, batches: tuple[int, ...]
) -> Any:
    """Load a checkpoint, learn, and save another one; returns what was restored, and the state at the end."""
    kind, sharding = case
    learner = PolicyLearner(policy_of(kind, models[kind]), group, sharding)
    checkpoint.load(path, learner)
    restored = state_of(learner)
    after = learn(learner, batches) if batches else restored
    checkpoint.save(target, learner, {"policy_version": 3, "operation": 12})
    return (restored, after) if group.rank == 0 else None


def refuse(group: RankGroup, models: dict[str, Path], folder: Path) -> list[str]:
    """The errors of a rank, which can go on after each."""
    learner = PolicyLearner(policy_of("full", models["full"]), group, "sharded")
    errors: list[str] = []

    def attempt(action: Callable[[], Any]) -> None:
        try:
            action()
        except (CheckpointError, ConfigError) as error:
            errors.append(str(error))

    (folder / "file").write_text("not a folder")
    attempt(lambda: checkpoint.save(folder / "file" / "step", learner, {}))
    attempt(lambda: checkpoint.load(folder / "nothing", learner))
    path = folder / "step_000000"
    checkpoint.save(path, learner, {"policy_version": 0})
    attempt(lambda: checkpoint.load(path if group.rank == 0 else folder / "of another machine", learner))
    if group.rank == 0:
        (path / "trainer" / ".metadata").write_text("damaged")
    group.gather(None)
    attempt(lambda: checkpoint.load(path, learner))
    return errors


def fail(group: RankGroup, models: dict[str, Path], cases: list[Case]) -> dict[Case, dict[str, tuple[str, str]]]:
    """The error of an operation that fails on all ranks between two others, and the state after these, by its hook."""
    job = JobConfig(recipe=Failing(), micro_batch_tokens=60, optimizer=OptimizerConfig(lr=1e-2))
    first, second = (training_batch(recorded_batch(number), number) for number in BEFORE)
    found: dict[Case, dict[str, tuple[str, str]]] = {}
    for kind, sharding in cases:
        for where in ("", "second call", "not finite", "next_state"):
            learner, error = PolicyLearner(policy_of(kind, models[kind]), group, sharding), ""
            learner.forward_backward(first, LossSpec.of(job))
            Failing.where, Failing.calls = where, 0
            try:
                if where:
                    learner.forward_backward(second, LossSpec.of(job))
            except RecipeError as raised:
                error = str(raised)
            Failing.where = ""
            learner.forward_backward(second, LossSpec.of(job))
            learner.optim_step(job.optimizer, 0)
            found.setdefault((kind, sharding), {})[where] = error, digest(state_of(learner))
    return found


def publish_adapter(group: RankGroup, model: Path) -> Any:
    """Publish `policy_of("lora")`; returns the publication and the weights in its file, by name."""
    server = WeightsServer("127.0.0.1", b"secret") if group.rank == 0 else None
    learner = PolicyLearner(policy_of("lora", model), group, "sharded")
    publication = publish(learner, server, 1, is_hot=True)
    if server is None or publication is None:
        return None
    weights = {name: tensor.numpy() for name, tensor in load_file(publication.path).items()}
    server.close()
    return publication, weights


def all_work(
    group: RankGroup, models: dict[str, Path], folder: Path, cases: dict[Case, tuple[int, ...]], replays: list[Case]
) -> Any:
    return (
        gradients_of_ranks(group, models, cases),
        save_and_replay(group, models, folder, replays),
        refuse(group, models, folder),
        publish_adapter(group, models["lora"]),
        fail(group, models, FAILURES),
        taught_ranks(group, models, TAUGHT_CASES),
    )
