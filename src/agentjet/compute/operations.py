"""Operations on a policy: the steps of a batch, and the log that applies each operation once. No torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import msgpack
import numpy as np

from agentjet.compute.protocol import Learner, LossSpec
from agentjet.config import JobConfig
from agentjet.errors import OperationConflict
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import Op, OperationKind

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
"""A number of 52 bits for all bits of the masters after a step. It is journalled with the batch, and not reported."""
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
