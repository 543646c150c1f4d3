"""The operations that were applied to a policy: their order, their results, and repetitions. No torch.

A backend keeps one `OperationLog` per policy. Its checkpoint contains `state`, so that a policy that is loaded
continues with the same numbers and still answers repeated operations.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgpack

from agentjet.errors import OperationConflict
from agentjet.types import Op

MAX_RESULTS = 256
"""Number of the latest results that are stored in memory."""
MAX_SAVED_RESULTS = 8
"""Number of the latest results that are stored in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Applied:
    """An applied operation: the digest of its body, and its result."""

    digest: str
    result: dict[str, Any]


class OperationLog:
    """Numbers the operations of one policy from `next` on."""

    def __init__(self, next: int = 0) -> None:
        self.next = next
        self._applied: dict[int, Applied] = {}

    def repeated(self, op: Op, digest: str) -> dict[str, Any] | None:
        """Returns the stored result of an operation that was applied before; None if `op` is the next one.

        Raises `OperationConflict` for a number that is out of order, and for a repetition with another body.
        """
        if op.number == self.next:
            return None
        if op.number > self.next:
            raise OperationConflict(
                f"operation {op.number} of policy {op.policy_id} is out of order: the next one is {self.next}"
            )
        applied = self._applied.get(op.number)
        if applied is None:
            raise OperationConflict(
                f"operation {op.number} of policy {op.policy_id} was applied, and its result is no longer stored: "
                f"the next one is {self.next}"
            )
        if applied.digest != digest:
            raise OperationConflict(f"operation {op.number} of policy {op.policy_id} was applied with another body")
        return applied.result

    def record(self, op: Op, digest: str, result: dict[str, Any]) -> None:
        """Store the result of the next operation."""
        assert op.number == self.next
        self._applied[op.number] = Applied(digest, result)
        self._applied.pop(op.number - MAX_RESULTS, None)
        self.next += 1

    def state(self) -> dict[str, Any]:
        """Returns the content of the log as JSON values."""
        latest = list(self._applied.items())[-MAX_SAVED_RESULTS:]
        return {"operation": self.next, "results": [[number, one.digest, one.result] for number, one in latest]}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> OperationLog:
        """The inverse of `state`. A checkpoint without operations had two for each policy version."""
        log = cls(state.get("operation", 2 * int(state["policy_version"])))
        log._applied = {number: Applied(digest, result) for number, digest, result in state.get("results", ())}
        return log


def body_digest(*body: Any) -> str:
    """Returns the digest of an operation's body, from plain values."""
    return hashlib.sha256(msgpack.packb(body)).hexdigest()
