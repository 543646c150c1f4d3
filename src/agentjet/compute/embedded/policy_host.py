"""`PolicyHost`: applies a policy's learning requests in a process that hosts it. Workers and ranks share it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from agentjet.compute.embedded import checkpoint
from agentjet.compute.embedded.learner import PolicyLearner
from agentjet.compute.embedded.sampler import ModelSampler
from agentjet.compute.operations import FINGERPRINT, OperationLog, body_digest
from agentjet.compute.protocol import LossSpec, Outputs
from agentjet.config import OptimizerConfig
from agentjet.errors import ComputeError, OperationConflict
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import CheckpointStamp, Op

GROWTH = 1.25
"""Growth since the first batch from which freed memory is returned."""
ROOM = 2.0
"""Available memory from which a process keeps what it freed, as a multiple of the memory that it has."""


class PolicyHost:
    """Applies the requests of one policy, see `Learner`: each operation once, in order."""

    def __init__(
        self,
        learner: PolicyLearner,
        sampler: ModelSampler | None = None,
        deliver: Callable[[], None] = lambda: None,
        write: Callable[[int], Any] | None = None,
    ) -> None:
        """`sampler` shares the weights, and may serve other policies, too. Its tokens are sent by `deliver`.

        `write` writes the weights of a version for samplers that have a copy of them; returns a `Publication` on rank
        0. All ranks call it together.
        """
        self.policy = learner.policy
        self.learner = learner
        self.sampler = sampler
        self.version = 0
        self._deliver = deliver
        self._write = write
        self._publication: Any = None
        """That of the present weights, on rank 0."""
        self._is_published = True
        """False from an `optim_step` to the next `publish`."""
        self._operations = OperationLog()
        self._batch: TrainingBatch | None = None
        self._batch_digest = ""

    def load_batch(self, batch: TrainingBatch) -> None:
        self._batch, self._batch_digest = batch, body_digest(batch)

    def forward_backward(self, op: Op, batch_id: int, loss: LossSpec) -> Outputs:
        batch = self._batch
        if batch is None or batch.id != batch_id:
            raise ComputeError(f"policy {op.policy_id} does not have batch {batch_id}: load it first")
        body = ("forward_backward", self._batch_digest, loss)
        return self._operations.apply(op, body, lambda: self.learner.forward_backward(batch, loss))

    def optim_step(self, op: Op, optimizer: OptimizerConfig) -> dict[str, float]:
        return self._operations.apply(op, ("optim_step", optimizer), lambda: self._update(optimizer))

    def publish(self, version: int, wanted: bool = True) -> Any:
        """Give the present weights this version; returns their publication if one is `wanted`. Idempotent.

        Raises `ComputeError` for a file that cannot be written.
        """
        if not self._is_published or version != self.version:
            self._change_version(version)
        ranks = self.learner.ranks
        if wanted and self._write is not None:
            if not all(ranks.gather(ranks.rank != 0 or self._publication is not None)):
                self._publication = self._write(version)
            return self._publication
        return None

    def save(self, path: Path) -> CheckpointStamp:
        if self.learner.has_gradient or not self._is_published:
            raise OperationConflict("a checkpoint needs a published policy without a pending gradient")
        state: dict[str, Any] = {"policy_version": self.version, "operation": self._operations.next}
        if self.learner.recipe_states:
            state["recipe_states"] = self.learner.recipe_states
        return self._stamp(checkpoint.save(path, self.learner, state))

    def load(self, path: Path) -> CheckpointStamp:
        state = checkpoint.load(path, self.learner)
        self.learner.recipe_states = state.get("recipe_states", {})
        self._change_version(state["policy_version"])
        self._operations = OperationLog(state["operation"])
        return self._stamp(state["digest"])

    def export(self, path: Path, adapter: bool) -> None:
        checkpoint.export(path, self.learner, adapter=adapter)

    def _update(self, optimizer: OptimizerConfig) -> dict[str, float]:
        """Change the weights; returns metrics."""
        if self.sampler is not None:
            self.sampler.pause(self.policy)  # Until the next `publish`, because it shares the weights.
        self._is_published = False
        metrics = self.learner.optim_step(optimizer, self.version) | self.learner.weights_changed()
        metrics[FINGERPRINT] = float(self.learner.fingerprint)
        if self.learner.ranks.mesh is not None:
            metrics["learner/ranks"] = float(self.learner.ranks.num_ranks)
        HEAP.settle()
        return metrics

    def _change_version(self, version: int) -> None:
        """Name the present weights with this version. Frees the batch that led to it.

        Sends the tokens of the old weights with the old version, then drops the cached keys of this policy.
        """
        self._deliver()
        self.version, self._is_published, self._batch, self._publication = version, True, None, None
        if self.sampler is not None:
            self.sampler.invalidate(self.policy)

    def _stamp(self, digest: str) -> CheckpointStamp:
        return CheckpointStamp(self.version, digest, self._operations.next)


class Heap:
    """Freed memory that the C library keeps for the next batch, see `WORKER_VARIABLES`.

    A batch's blocks differ in size from those before, so gaps may add up: 8 GB after twelve batches of long
    conversations without `trim`.
    """

    def __init__(self) -> None:
        self._needed = 0

    def settle(self) -> None:
        """After a batch: keep freed memory for the next one, unless gaps add up or other programs may need it."""
        resident = psutil.Process().memory_info().rss
        self._needed = self._needed or resident
        if resident > GROWTH * self._needed or psutil.virtual_memory().available < ROOM * resident:
            self.trim()

    def trim(self) -> None:
        """Return freed memory to the system; does nothing if the C library is not glibc."""
        self._needed = 0
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


HEAP = Heap()
"""That of the process."""
