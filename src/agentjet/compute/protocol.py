"""The interface between the gateway and the weights: samplers, learners and operations. No torch.

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

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from numpy.typing import NDArray

from agentjet.config import AlgorithmConfig, JobConfig, ModelConfig, OptimizerConfig, ServeConfig
from agentjet.errors import ConfigError, WorkerDied
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import CheckpointStamp, ModelInfo, Op, OperationKind, PolicyId, Sampled, SamplingParams, TokenScore


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of a backend that settings may need."""

    support_sets: bool
    """Reports the set from which each token was chosen. `top_p`, `top_k` and grammars need it in training."""
    adapters: bool
    """Trains LoRA adapters."""
    prefix_sharing: bool
    """Computes shared prefixes once, if the model allows it."""
    bit_equal_replay: bool
    """The same operations give the same weights, bit by bit."""


def check_capabilities(capabilities: Capabilities, config: ServeConfig, job: JobConfig) -> None:
    """Raises `ConfigError` for the first setting of a policy or job that needs a missing capability."""
    for policy in config.policy_names:
        rank = config.model_of(policy).lora.rank
        if rank and not capabilities.adapters:
            key = f"policies.{policy}.lora.rank" if config.policies else "model.lora.rank"
            raise ConfigError(f"{key} = {rank}: this backend trains no adapters; set it to 0")
    truncating = [name for name in ("top_p", "top_k") if name not in job.sampling.override]
    if truncating and not capabilities.support_sets:
        raise ConfigError(
            f"job.sampling.override lacks {', '.join(truncating)}: this backend does not report the sets of truncated "
            "distributions, so training requests must not truncate; add these names"
        )


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The loss of one `forward_backward`: the algorithm, and which optimiser step of the batch it is for."""

    algorithm: AlgorithmConfig
    micro_batch_tokens: int
    seed: int
    """Seed of the random mini-batches."""
    step: int = 0
    """Number of the optimiser step within the batch, over all epochs and mini-batches."""

    @classmethod
    def of(cls, job: JobConfig, step: int = 0) -> Self:
        return cls(job.algorithm, job.micro_batch_tokens, job.seed, step)

    def to_wire(self) -> dict[str, Any]:
        """A dict of plain values, for the worker's pipe."""
        return {
            "algorithm": self.algorithm.model_dump(mode="json"),
            "micro_batch_tokens": self.micro_batch_tokens,
            "seed": self.seed,
            "step": self.step,
        }

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Self:
        return cls(**{**wire, "algorithm": AlgorithmConfig.model_validate(wire["algorithm"])})


@dataclass(frozen=True, slots=True)
class Outputs:
    """The result of `forward_backward` or `logprobs`."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    num_steps: int = 1
    """Optimiser steps that the recipe does on this batch."""
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Computed values per target [M], by name."""


class Sampler(Protocol):
    """Generates tokens."""

    def sample(self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Sampled]:
        """Stream a completion of `token_ids`; closing the iterator cancels it.

        Raises:

        * `OutOfCache` if prompt and completion exceed the cache;
        * `GrammarError` if the grammar of `params` allows no next token;
        * `ComputeError` for token ids outside the vocabulary;
        * `WorkerDied` if the worker ends; `PolicyRemoved` if the policy is not in a worker.
        """
        ...

    async def score(self, policy: PolicyId, token_ids: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        """Returns the log-probability of each token except the first, given those before it. Samples nothing.

        Raises `ComputeError` for token ids outside the vocabulary, `WorkerDied` if the worker ends.
        """
        ...


class Learner(Protocol):
    """Computes gradients and updates. See the rules for operations above."""

    async def forward_backward(self, op: Op, batch: TrainingBatch, loss: LossSpec) -> Outputs:
        """Add the gradient of a loss to the accumulated gradient of the policy."""
        ...

    async def optim_step(self, op: Op, optimizer: OptimizerConfig) -> dict[str, float]:
        """Update the policy with the accumulated gradient; returns metrics.

        The learning rate follows from the schedule and from the policy version that was published last.
        """
        ...

    async def logprobs(self, policy: PolicyId, batch: TrainingBatch, *, reference: bool = False) -> Outputs:
        """Returns the column `logprob` of all targets, by the present weights or by the reference. No gradient."""
        ...

    async def publish(self, policy: PolicyId, version: int) -> None:
        """Make the present weights visible to the samplers, as this policy version. Idempotent."""
        ...

    async def save(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        """Write a checkpoint folder (`policy/`, `trainer.pt`, `state.json`) atomically.

        Raises `CheckpointError`, and `OperationConflict` while a gradient waits for its `optim_step`.
        """
        ...

    async def load(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        """Verify a checkpoint folder, then restore weights, optimiser, version and operation number from it.

        Raises `CheckpointError` for a damaged checkpoint, `ConfigError` for one made with other settings.
        """
        ...

    async def export(self, policy: PolicyId, path: Path, *, adapter: bool = False) -> None:
        """Write the policy as a Hugging Face folder (LoRA merged), or its `adapter` as a PEFT folder, atomically."""
        ...


class Compute(Sampler, Learner, Protocol):
    """A backend: samplers, learners, and the life of the workers that host their policies.

    A policy belongs to one worker from `add` to `remove`. Before and after, every other method for the policy raises
    `PolicyRemoved`; if that worker died, `WorkerDied`. Policies of one worker recover independently: each is added
    again alone.
    """

    @property
    def capabilities(self) -> Capabilities:
        """The features of the backend. Known before the first `add`."""
        ...

    async def add(self, policy: PolicyId, model: ModelConfig, *, worker: str = "", dtype: str = "") -> ModelInfo:
        """Add a policy with the weights of version 0 and operation 0; replaces the policy if it exists.

        Starts the worker of that name if it does not run. Adapters of a worker share one base model. `dtype` is the
        type of an existing policy. It applies if `model.dtype` is `auto`.

        Raises:

        * `ConfigError` if the model cannot be loaded, or if it is an adapter and the worker has adapters of another
          base model or type;
        * `WorkerDied` if the worker ends.
        """
        ...

    async def remove(self, policy: PolicyId) -> None:
        """Free a policy; its completions fail with `PolicyRemoved`. Idempotent, also after the worker died.

        A worker without policies ends.
        """
        ...

    async def died(self, policies: Sequence[PolicyId]) -> WorkerDied:
        """Wait until a worker of these policies ends unexpectedly; returns the reason.

        The backend kills a worker that hangs: `WorkerHung`.
        """
        ...

    async def close(self) -> None:
        """Stop all workers and wait for their end. Idempotent."""
        ...


BeforeOperation = Callable[[Op, OperationKind], Awaitable[None]]


async def learn(
    learner: Learner, op: Op, batch: TrainingBatch, job: JobConfig, *, before: BeforeOperation | None = None
) -> tuple[dict[str, float], Op]:
    """Train a policy on a batch, from operation `op` on; returns metrics and the next operation.

    Each optimiser step is a `forward_backward` and an `optim_step`. `before` is awaited before each of them, to record
    it. The new weights are not published yet. A repetition with the same arguments changes nothing.
    """
    steps: list[StepMetrics] = []
    num_steps = 1
    while len(steps) < num_steps:
        if before is not None:
            await before(op, "forward_backward")
        outputs = await learner.forward_backward(op, batch, LossSpec.of(job, len(steps)))
        if before is not None:
            await before(op.next(), "optim_step")
        steps.append((outputs.metrics, await learner.optim_step(op.next(), job.optimizer_of(op.policy))))
        num_steps = outputs.num_steps
        op = op.next().next()
    return merged_metrics(steps), op


StepMetrics = tuple[Mapping[str, float], Mapping[str, float]]
"""Metrics of one optimiser step: of its `forward_backward` and of its `optim_step`."""
MEANS = ("policy/clip_fraction", "policy/kl")
"""Metrics of mini-batches that are reported as means over the optimiser steps."""


def merged_metrics(steps: Sequence[StepMetrics]) -> dict[str, float]:
    """Returns the metrics of a batch from those of its optimiser steps."""
    gradients, updates = [gradient for gradient, _ in steps], [update for _, update in steps]
    merged: dict[str, float] = {}
    for gradient in reversed(gradients):  # the first step has most: metrics of the whole batch
        merged |= gradient
    merged |= {name: sum(one[name] for one in gradients) / len(steps) for name in MEANS if name in merged}
    merged["forest/tokens_computed"] = sum(gradient["forest/tokens_computed"] for gradient in gradients)
    merged |= updates[-1]
    norms = [update["optim/grad_norm"] for update in updates if math.isfinite(update["optim/grad_norm"])]
    merged["optim/grad_norm"] = sum(norms) / max(1, len(norms))
    for name in ("optim/steps", "optim/skipped_steps"):
        merged[name] = sum(update[name] for update in updates)
    for name in ("weights/learner", "weights/sampler"):
        if name in merged:
            merged[name] = max(update[name] for update in updates)
    return merged
