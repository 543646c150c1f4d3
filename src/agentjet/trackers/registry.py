"""Finds the sink of `--to KIND:TARGET`."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from difflib import get_close_matches

from agentjet.errors import ConfigError
from agentjet.trackers.sink import Sink


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
        raise ConfigError(f"--to {label} needs the package {kind.package!r}: pip install 'agentjet[{name}]'")
    sink: Sink = _class(kind.path)(target)
    return sink


def _own_sink(label: str) -> Sink:
    module = label.partition(":")[0]
    try:
        made = _class(label)()
    except ModuleNotFoundError as error:
        if error.name != module:  # A module that the file imports.
            raise
        near = get_close_matches(module, KINDS, n=1)
        hint = f"did you mean {near[0]}:{KINDS[near[0]].target}?" if near else "put its folder on PYTHONPATH"
        raise ConfigError(f"--to {label}: there is no tracker and no module {module!r}; {hint}") from None
    except AttributeError:
        raise ConfigError(f"--to {label}: the module {module!r} has no such class") from None
    if missing := [name for name in ("begin", "write", "end") if not callable(getattr(made, name, None))]:
        raise ConfigError(f"--to {label} has no method {missing[0]!r}: a sink has begin, write and end")
    sink: Sink = made
    return sink


def _class(path: str) -> type:
    module, _, name = path.partition(":")
    found: type = getattr(importlib.import_module(module), name)
    return found
