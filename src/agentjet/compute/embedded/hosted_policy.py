"""A policy in the worker: its weights, learner, version, and the operations that were applied to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from agentjet.compute.embedded import checkpoint
from agentjet.compute.embedded.learner import PolicyLearner
from agentjet.compute.embedded.policy import Policy, fingerprint
from agentjet.compute.embedded.sampler import ModelSampler
from agentjet.compute.operations import OperationLog, body_digest
from agentjet.compute.protocol import LossSpec
from agentjet.config import JobConfig, OptimizerConfig
from agentjet.errors import OperationConflict
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import Op, PolicyId

LOGPROBS_TOKENS = JobConfig().micro_batch_tokens
"""Computed tokens of a micro-batch of `logprobs`."""


class Fingerprints:
    """Detects whether a step changed the learner's weights and the sampler's weights.

    A float32 policy has one copy of the weights, unless a bug replaces a parameter. A bfloat16 policy has separate
    masters.
    """

    def __init__(self, learner: PolicyLearner, sampling: Policy) -> None:
        self._learner = learner
        self._sampling = sampling
        self._last = self._compute()

    def reset(self) -> None:
        """Take the present weights as the reference, after they were loaded."""
        self._last = self._compute()

    def changed(self) -> dict[str, float]:
        """Returns 1 for each side that changed since the last call, else 0."""
        before, self._last = self._last, self._compute()
        return {name: float(self._last[name] != before[name]) for name in before}

    def _compute(self) -> dict[str, int]:
        known: dict[int, Tensor] = {}
        return {
            "weights/learner": fingerprint(self._learner.masters(), known),
            "weights/sampler": fingerprint(self._sampling.trainable().values(), known),
        }


class HostedPolicy:
    """Applies the requests of one policy. Its sampler may serve other policies, too."""

    def __init__(self, id: PolicyId, policy: Policy, sampler: ModelSampler, deliver: Callable[[], None]) -> None:
        """`deliver` sends the tokens of this policy that were sampled and not sent yet."""
        self.id = id
        self.policy = policy
        self.sampler = sampler
        self.learner = PolicyLearner(policy)
        self.version = 0
        self._is_published = True
        """False from an `optim_step` to the next `publish`: sampling pauses, because it shares the weights."""
        self._deliver = deliver
        self._operations = OperationLog()
        self._fingerprints = Fingerprints(self.learner, policy)

    def forward_backward(self, number: int, batch: dict[str, Any], loss: dict[str, Any]) -> dict[str, Any]:
        """See `Learner.forward_backward`."""

        def apply() -> dict[str, Any]:
            outputs = self.learner.forward_backward(TrainingBatch.from_wire(batch), LossSpec.from_wire(loss))
            return {"metrics": dict(outputs.metrics), "num_steps": outputs.num_steps}

        return self._apply(number, ("forward_backward", batch, loss), apply)

    def optim_step(self, number: int, optimizer: dict[str, Any]) -> dict[str, Any]:
        """See `Learner.optim_step`."""

        def apply() -> dict[str, Any]:
            self._is_published = False
            self.sampler.pause(self.policy)
            metrics = self.learner.optim_step(OptimizerConfig.model_validate(optimizer), self.version)
            return metrics | self._fingerprints.changed()

        return self._apply(number, ("optim_step", optimizer), apply)

    def logprobs(self, batch: dict[str, Any], reference: bool) -> bytes:
        """See `Learner.logprobs`. Returns the column as float32."""
        forest = TrainingBatch.from_wire(batch).forest
        return self.learner.batch_logprobs(forest, LOGPROBS_TOKENS, reference=reference).tobytes()

    def publish(self, version: int) -> None:
        """See `Learner.publish`."""
        if not self._is_published or version != self.version:
            self._change_version(version)

    def save(self, path: str) -> dict[str, Any]:
        """See `Learner.save`."""
        if self.learner.has_gradient or not self._is_published:
            raise OperationConflict("a checkpoint needs a published policy without a pending gradient")
        state = {"policy_version": self.version, **self._operations.state()}
        return self._stamp(checkpoint.save(Path(path), self.policy, self.learner, state))

    def load(self, path: str) -> dict[str, Any]:
        """See `Learner.load`."""
        state = checkpoint.load(Path(path), self.policy, self.learner)
        self._fingerprints.reset()
        self._change_version(state["policy_version"])
        self._operations = OperationLog.restored(state)
        return self._stamp(state.get("digest", ""))

    def export(self, path: str, adapter: bool = False) -> None:
        """See `Learner.export`."""
        checkpoint.export(Path(path), self.policy, adapter=adapter)

    def _apply(self, number: int, body: tuple[Any, ...], apply: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Apply an operation, or return the stored result of a repeated one. Raises `OperationConflict`."""
        op, digest = Op.of(self.id, number), body_digest(*body)
        if (stored := self._operations.repeated(op, digest)) is not None:
            return stored
        result = apply()
        self._operations.record(op, digest, result)
        return result

    def _change_version(self, version: int) -> None:
        """Send the tokens of the old weights with the old version, then drop the cached keys of this policy."""
        self._deliver()
        self.version, self._is_published = version, True
        self.sampler.invalidate(self.policy)

    def _stamp(self, digest: str) -> dict[str, Any]:
        return {"policy_version": self.version, "digest": digest, "operation": self._operations.next}
