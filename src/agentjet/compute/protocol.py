"""The interface between the gateway and the weights: samplers, learners, and operations on a policy. No torch.

A backend implements `Compute`, that is both `Sampler` and `Learner`. Invariants of a backend:

* A prefix cache never outlives the weights that filled it.
* Reported log-probabilities are those of the sampled distribution. The set of the distribution is reported with them.
* Learning computes log-probabilities over that set again. Softmax, entropy and KL are of the restricted policy.
* A token whose log-probability is not finite is never reported: its completion fails with `ComputeError`.
* Every token is reported with the version that sampled it. A policy samples nothing between `optim_step` and `publish`
  if sampler and learner share its weights.
* Operations on a policy are numbered from 0 and applied in order, each once. A repeated operation returns its stored
  result and changes nothing. Any other number, or the same number with another body, raises `OperationConflict`.
* A bad request never disturbs another. An operation that raises an `AgentJetError` changes nothing.
* Policies are isolated: operations on one policy change neither the weights nor the cached prefixes of another.

Gradients accumulate over `forward_backward` calls until `optim_step`. They die with the worker: load the newest
checkpoint and apply the later operations again, in order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import msgpack
import numpy as np

from agentjet.config import ComputeConfig, JobConfig, ModelConfig, OptimizerConfig, ServeConfig
from agentjet.errors import ConfigError, OperationConflict, WorkerDied, install_extra
from agentjet.recipes import hooks
from agentjet.recipes.recipe import Recipe
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import (
    CheckpointStamp,
    ModelInfo,
    Op,
    OperationKind,
    PolicyId,
    ProcessStatus,
    Sampled,
    SamplerBounds,
    SamplersStatus,
    SamplingParams,
    TokenScore,
)

EMBEDDED = ComputeConfig()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of a backend that settings may need."""

    values: bool = False
    """Trains value heads on the policy."""
    optimizers: tuple[str, ...] = ("adamw",)
    """Values of `job.optimizer.name`. Learner ranks hold parts of matrices, which only AdamW can change alone."""
    separate_samplers: bool = False
    """Samplers are separate processes with a copy of the weights. They sample while the learner learns, and while it
    recovers from a crash.
    """


CAPABILITIES = {
    "embedded": Capabilities(values=True, optimizers=("adamw", "muon", "adamw_8bit")),
    "cluster": Capabilities(separate_samplers=True),
}
"""By the name of the backend."""


def check_capabilities(
    capabilities: Callable[[ComputeConfig], Capabilities], config: ServeConfig, job: JobConfig
) -> None:
    """Raises `ConfigError` if the recipe or an optimiser of a job needs a feature that the backend of a policy does not
    have.
    """
    needed = {"values": hooks.declared(job.recipe, "value_heads") is not None}
    for policy in config.policy_names:
        backend, model = config.compute_of(policy), config.model_of(policy)
        found = capabilities(backend)
        key = f"job.optimizers.{policy}.name" if policy in job.optimizers else "job.optimizer.name"
        name, offloads = job.optimizer_of(policy).name, model.offload_optimizer
        check_optimizer(key, name, backend.backend, found, adapters=bool(model.lora.rank), offloads=offloads)
        if missing := [feature for feature, wanted in needed.items() if wanted and not getattr(found, feature)]:
            raise ConfigError(
                f"job.recipe = {job.recipe.name!r} needs {missing[0]}, and the {backend.backend} backend has none: "
                "set compute.backend = 'embedded', or choose another recipe"
            )


def check_optimizer(
    key: str, name: str, backend: str, found: Capabilities | None = None, *, adapters: bool, offloads: bool
) -> None:
    """Raises `ConfigError` if a backend has no such optimiser, it cannot train the policy, or its library is missing.

    `key` is the setting. `adapters`: the policy trains an adapter; `offloads`: `model.offload_optimizer`.
    """
    found = found or CAPABILITIES[backend]
    if name not in found.optimizers:
        known = ", ".join(map(repr, found.optimizers))
        reason = f"the {backend} backend has {known}: choose one of these, or set compute.backend = 'embedded'"
    elif name == "muon" and adapters:
        reason = (
            "Muon makes the update of a whole matrix orthogonal, and an adapter is a product of two: "
            "choose 'adamw', or set model.lora.rank = 0"
        )
    elif name == "adamw_8bit" and offloads:
        reason = "its small moments stay on the device: choose 'adamw', or set model.offload_optimizer = false"
    elif name == "adamw_8bit" and find_spec("bitsandbytes") is None:
        reason = f"bitsandbytes is not installed: {install_extra('bitsandbytes')}"
    else:
        return
    raise ConfigError(f"{key} = {name!r}: {reason}")


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The loss of one `forward_backward`: the recipe, and which optimiser step of the batch it is for."""

    recipe: Recipe
    micro_batch_tokens: int
    seed: int
    """Seed of the random mini-batches."""
    step: int = 0
    """Number of the optimiser step within the batch, over all epochs and mini-batches."""

    @classmethod
    def of(cls, job: JobConfig, step: int = 0) -> Self:
        return cls(job.recipe, job.micro_batch_tokens, job.seed, step)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The result of `forward_backward`."""

    metrics: Mapping[str, float]
    num_steps: int = 1
    """Optimiser steps that the recipe does on this batch."""


class Sampler(Protocol):
    """Generates tokens."""

    def sample(self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Sampled]:
        """Stream a completion of `token_ids`; closing the iterator cancels it.

        Raises `OutOfCache`, `GrammarError`, and `ComputeError` for token ids outside the vocabulary.
        """

    async def score(self, policy: PolicyId, token_ids: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        """Returns the log-probability of each token except the first, given those before it. Raises `ComputeError`."""


class Learner(Protocol):
    """Computes gradients and updates. See the rules for operations above."""

    async def load_batch(self, policy: PolicyId, batch: TrainingBatch) -> None:
        """Give the policy a batch for its operations, encoded off the event loop. Idempotent.

        The policy keeps it until the next `load_batch`, `publish` or `load`.
        """

    async def forward_backward(self, op: Op, batch_id: int, loss: LossSpec) -> Outputs:
        """Add the gradient of a loss over the loaded batch to the accumulated gradient of the policy.

        Raises `ComputeError` if the policy has another batch, or none. A failure changes nothing.
        """

    async def optim_step(self, op: Op, optimizer: OptimizerConfig) -> dict[str, float]:
        """Update the policy with the accumulated gradient, at the learning rate of its version; returns metrics."""

    async def publish(
        self, policy: PolicyId, version: int, *, to_samplers: bool = True, in_turns: bool = False
    ) -> Mapping[str, float]:
        """Name the present weights with this policy version and give them to the samplers; returns metrics. Idempotent.

        Separate samplers keep their weights without `to_samplers`, which is for versions that are applied again. With
        `in_turns` they adopt in turn, so that the others sample.
        """

    async def save(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        """Write a checkpoint folder (`policy/`, `trainer.pt` or `trainer/`, `state.json`) atomically.

        Raises `CheckpointError`, and `OperationConflict` while a gradient waits for its `optim_step`.
        """

    async def load(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        """Verify a checkpoint folder, then restore weights, optimiser, version and operation number from it.

        Separate samplers get the weights with the next `publish`.

        Raises `CheckpointError` for a damaged checkpoint, `ConfigError` for one made with other settings.
        """

    async def export(self, policy: PolicyId, path: Path, *, adapter: bool = False) -> None:
        """Write the policy as a Hugging Face folder (LoRA merged), or its `adapter` as a PEFT folder, atomically."""


class Compute(Sampler, Learner, Protocol):
    """A backend: samplers, learners, and the life of the workers that host their policies.

    A policy belongs to one worker from `add` to `remove`. Before and after, every other method for the policy raises
    `PolicyRemoved`; if that worker died, `WorkerDied`. Policies of one worker recover independently: each is added
    again alone.
    """

    def capabilities(self, settings: ComputeConfig) -> Capabilities:
        """Returns the features of the backend that the settings choose. Known before the first `add`."""

    async def add(
        self, policy: PolicyId, model: ModelConfig, *, worker: str = "", settings: ComputeConfig = EMBEDDED
    ) -> ModelInfo:
        """Add a policy with the weights of version 0 and operation 0; replaces the policy if it exists.

        `settings` choose the backend. The embedded one starts the worker of that name if it does not run; adapters of a
        worker share one base model. The cluster keeps samplers that the policy has, if the settings are the same. They
        get the weights with the next `publish`. Raises `ConfigError` if the model cannot be loaded, the settings cannot
        be honoured, or the worker has adapters of another base model or type.
        """

    async def remove(self, policy: PolicyId) -> None:
        """Free a policy; its completions fail with `PolicyRemoved`. A worker without policies ends. Idempotent."""

    async def died(self, policies: Sequence[PolicyId]) -> WorkerDied:
        """Wait until a worker of these policies ends unexpectedly; returns the reason. A hung worker is killed."""

    def processes(self, policy: PolicyId) -> list[ProcessStatus]:
        """Returns the processes of a policy, ranks first. Empty for a policy that was not added."""

    def samplers(self, policy: PolicyId) -> SamplersStatus | None:
        """Returns the sampler replicas of a policy; None without replicas, or for a policy that was not added."""

    async def scale(self, policy: PolicyId, bounds: SamplerBounds) -> None:
        """Change the number of replicas of a policy, or its bounds; new ones start in the background.

        Raises `ConfigError` if the backend has no replicas or not enough GPUs.
        """

    async def close(self) -> None:
        """Stop all workers and wait for their end. Idempotent."""


# ---- operations ------------------------------------------------------------------------------------------------------

Result = TypeVar("Result")
MAX_RESULTS = 256
"""Number of the latest results that are stored."""

BeforeOperation = Callable[[Op, OperationKind], Awaitable[None]]


async def learn(
    learner: Learner, op: Op, batch: TrainingBatch, job: JobConfig, *, before: BeforeOperation | None = None
) -> tuple[dict[str, float], Op]:
    """Train a policy on a batch, from operation `op` on; returns metrics and the next operation.

    The learner gets the batch once. Each optimiser step is a `forward_backward` and an `optim_step`. `before` is
    awaited before each of them, to record it. The new weights are not published yet. A repetition with the same
    arguments changes nothing.
    """
    steps: list[Mapping[str, float]] = []
    num_steps = 1
    await learner.load_batch(op.policy_id, batch)
    while len(steps) < num_steps:
        if before is not None:
            await before(op, "forward_backward")
        outputs = await learner.forward_backward(op, batch.id, LossSpec.of(job, len(steps)))
        if before is not None:
            await before(op.next(), "optim_step")
        update = await learner.optim_step(op.next(), job.optimizer_of(op.policy))
        steps.append({**outputs.metrics, **update})
        num_steps = outputs.num_steps
        op = op.next().next()
    return merged_metrics(steps), op


FINGERPRINT = "fingerprint"
"""A number of 52 bits for all bits of the masters after a step. It is journalled with the batch, and not shown."""
SUMS = ("forest/tokens_computed", "optim/steps", "optim/skipped_steps")
MAXIMA = ("weights/learner", "weights/sampler")
LAST = ("optim/lr", "weights/finite", FINGERPRINT)


def merged_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the metrics of a batch from those of its optimiser steps: means over the steps that have them, unless
    listed above.
    """
    by_name = _by_name(steps)
    merged = means(steps)
    for names, of in ((SUMS, sum), (MAXIMA, max), (LAST, lambda values: values[-1])):
        merged |= {name: of(by_name[name]) for name in names if name in merged}
    merged["optim/grad_norm"] = _mean([n for step in steps if math.isfinite(n := step["optim/grad_norm"])])
    return merged


def means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each metric over the steps that have it."""
    return {name: _mean(values) for name, values in _by_name(steps).items()}


def _by_name(steps: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    by_name: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            by_name.setdefault(name, []).append(value)
    return by_name


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


class OperationLog:
    """The operations that were applied to one policy. `next` is the number of the next one."""

    def __init__(self, next: int = 0) -> None:
        self.next = next
        self._applied: dict[int, tuple[str, Any]] = {}
        """Digest of the body, and result, by number."""

    def apply(self, op: Op, body: tuple[Any, ...], function: Callable[[], Result]) -> Result:
        """Apply the next operation by calling `function`; returns its result, or the stored one of a repetition.

        Raises `OperationConflict` for a number that is out of order, and for a repetition with another body.
        """
        digest, operation = body_digest(*body), f"operation {op.number} of policy {op.policy_id}"
        if op.number > self.next:
            raise OperationConflict(f"{operation} is out of order: the next one is {self.next}")
        if op.number == self.next:
            self._applied[op.number] = digest, function()
            self._applied.pop(op.number - MAX_RESULTS, None)
            self.next += 1
        elif op.number not in self._applied:
            raise OperationConflict(
                f"{operation} was applied, and its result is no longer stored: the next one is {self.next}"
            )
        elif self._applied[op.number][0] != digest:
            raise OperationConflict(f"{operation} was applied with another body")
        stored: Result = self._applied[op.number][1]
        return stored


def body_digest(*body: Any) -> str:
    """Returns the digest of an operation's body: plain values, dataclasses, settings and arrays."""
    return hashlib.sha256(msgpack.packb(body, default=_plain)).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, value.tobytes()]
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return repr(value)  # Settings.
