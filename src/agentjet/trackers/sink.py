"""`Sink`: one tracker, or one file. `Run` and `Step` are what it gets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Step:
    """The metrics of a learned batch."""

    version: int
    """The policy version after the step. Versions rise; a rollback never uses one again."""
    time: float
    """Unix seconds."""
    metrics: Mapping[str, float]
    """Finite values only."""

    @property
    def row(self) -> dict[str, float]:
        """The step as one line of `metrics.jsonl` has it."""
        return {"step": self.version, "time": self.time, **self.metrics}


@dataclass(frozen=True, slots=True)
class Run:
    """The run whose steps are copied."""

    id: str
    """Made from the first step, so it is the same from a server and from the files, on every machine."""
    name: str
    settings: Mapping[str, Any]
    """Settings by dotted name."""

    @classmethod
    def of(cls, first: Step, name: str, settings: Mapping[str, Any]) -> Run:
        """The run whose first step this is."""
        run_id = id_of_run(first)
        return cls(run_id, name or f"agentjet-{run_id}", settings)


def id_of_run(first: Step) -> str:
    """Identifies the run with this first step. A journal keeps its steps for ever."""
    facts = json.dumps([first.version, sorted(first.metrics.items())])
    return hashlib.sha256(facts.encode()).hexdigest()[:12]


class Sink(Protocol):
    """A tracker. A class of yours has these three methods, and is constructed without arguments.

    A sink that writes one file or folder of this machine has its `path`, which belongs to one run.
    """

    def begin(self, run: Run) -> int | None:
        """Open the run in the tracker, or create it.

        Returns the newest policy version that the tracker has, 0 if it has none. None if the tracker cannot be asked:
        then the newest version that `write` returned from counts.
        """

    def write(self, steps: Sequence[Step]) -> None:
        """Write the steps, in rising order. They are stored when this returns."""

    def end(self) -> None:
        """Close the run in the tracker. It may begin again."""
