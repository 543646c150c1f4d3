"""`Sink`: one tracker, or one file. `Run` and `Step` are what it gets. `open_sink` finds that of `--to KIND:TARGET`.

Each sink that needs a library has its module, which only `open_sink` imports.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentjet.errors import ConfigError, did_you_mean, failure, install_extra, nearest_name


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


@dataclass(frozen=True, slots=True)
class Kind:
    """A built-in kind of sink."""

    target: str
    """Name of the part behind the colon."""
    path: str
    """`module:Class` of the sink."""
    package: str = ""
    """The package that it imports."""


KINDS = {
    "tensorboard": Kind("DIR", "agentjet.trackers.tensorboard:TensorBoardSink", "tensorboardX"),
    "wandb": Kind("PROJECT", "agentjet.trackers.wandb:WandbSink", "wandb"),
    "mlflow": Kind("URI", "agentjet.trackers.mlflow:MlflowSink", "mlflow"),
    "trackio": Kind("PROJECT", "agentjet.trackers.trackio:TrackioSink", "trackio"),
    "csv": Kind("FILE", "agentjet.trackers.files:CsvSink"),
    "jsonl": Kind("FILE", "agentjet.trackers.files:JsonlSink"),
}
FORMS = ", ".join(f"{name}:{kind.target}" for name, kind in KINDS.items())


def open_sink(label: str) -> Sink:
    """Returns the sink of `KIND:TARGET` or `module:Class`. Raises `ConfigError`."""
    name, colon, target = label.partition(":")
    if not colon or not target:
        raise ConfigError(f"--to {label} has no target: give one of {FORMS}, or module:Class")
    kind = KINDS.get(name)
    if kind is None:
        return _own_sink(label)
    if kind.package and importlib.util.find_spec(kind.package) is None:
        raise ConfigError(f"--to {label} needs the package {kind.package!r}: {install_extra(name)}")
    module, _, name = kind.path.partition(":")
    sink: Sink = getattr(importlib.import_module(module), name)(target)
    return sink


def _own_sink(label: str) -> Sink:
    place, _, name = label.partition(":")
    try:
        module = importlib.import_module(place)
    except (Exception, SystemExit) as error:  # The boundary: the user's module may raise anything.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{place}.".startswith(f"{missing}."):  # Not a module that the file imports.
            raise ConfigError(f"--to {label}: importing {place!r} failed at {failure(error)}") from error
        near = nearest_name(place, KINDS)
        hint = f"did you mean {near}:{KINDS[near].target}?" if near else "put its folder on PYTHONPATH"
        raise ConfigError(f"--to {label}: there is no tracker and no module {missing!r}; {hint}") from None
    kind = getattr(module, name, None)
    if not callable(kind):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        way_out = did_you_mean(name, classes, f"it has {', '.join(classes) or 'none'}")
        raise ConfigError(f"--to {label}: the module {place!r} has no such class; {way_out}")
    try:
        made = kind()
    except (Exception, SystemExit) as error:  # The boundary: so may its class.
        raise ConfigError(f"--to {label}: {name}() failed at {failure(error)}") from error
    if absent := [one for one in ("begin", "write", "end") if not callable(getattr(made, one, None))]:
        raise ConfigError(f"--to {label} has no method {absent[0]!r}: a sink has begin, write and end")
    sink: Sink = made
    return sink
