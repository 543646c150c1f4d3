"""`agentjet track`: copies the steps of a run to a tracker, in a process by itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from agentjet.cli import Run, Token, TokenFile, connect, print_text
from agentjet.cli.data_dir import journal_of
from agentjet.errors import ConfigError
from agentjet.protocol import flatten
from agentjet.trackers import Step
from agentjet.types import DEFAULT_RUN

if TYPE_CHECKING:
    from agentjet.client import Swarm
    from agentjet.swarm import Journal

T = TypeVar("T")
PATIENCE = 3600.0
"""Seconds after which a server that does not answer ends the command."""


def track(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL|PATH]", help="A server, its ADDRESS/runs/NAME, or a data dir; default: AGENTJET_URL."
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="KIND:TARGET",
            help="tensorboard:DIR, wandb:PROJECT, mlflow:URI, trackio:PROJECT, csv:FILE, jsonl:FILE or module:Class.",
        ),
    ] = "",
    name: Annotated[
        str, typer.Option("--name", help="Name of the run in the tracker; default: made from the run.")
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="End after the steps that a server has now.")] = False,
    every: Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds between two looks for new steps.")] = 5.0,
    run: Run = DEFAULT_RUN,
    folder: Annotated[Path, typer.Option("--cursors", help="Folder of the cursors.")] = Path("agentjet-track"),
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Copy the steps of a run to a tracker, each exactly once, also those before the start of this command.

    A server is followed until its job ends, across its restarts; if it is away for an hour, the command ends. A data
    dir is copied once, also that of a stopped run. The same command, started again, goes on where it was. Training does
    not depend on this process.
    """
    from agentjet.client import Retry
    from agentjet.client.threads import raise_on_signals
    from agentjet.trackers.follower import Follower
    from agentjet.trackers.sinks import FORMS, open_sink

    if not to:
        raise ConfigError(f"--to is missing: give one of {FORMS}, or module:Class")
    sink, pause = open_sink(to), partial(time.sleep, every)
    follow = partial(Follower, sink=sink, label=to, name=name, folder=folder, say=print_text, pause=pause)
    with raise_on_signals(), suppress(KeyboardInterrupt):
        if source is not None and "://" not in source:
            follow(FileSource(Path(source), run)).run(stay=False)
            return
        with connect(source, token, token_file, retry=Retry(patience=PATIENCE)) as swarm:
            follow(ServerSource(swarm)).run(stay=not once)


class ServerSource:
    """The steps of a server."""

    def __init__(self, swarm: Swarm) -> None:
        """Raises `Unreachable` or a `RequestError` if the first request fails."""
        self._swarm = swarm
        self.title = swarm.url
        swarm.status()

    def settings(self) -> Mapping[str, Any]:
        status, body = self._swarm.status(), self._swarm.job()
        facts = {"model": status.model, "model_weights": status.model_weights, "run": status.run}
        return {**facts, **dict(flatten(body.job, "job."))}

    def steps(self, after: int, limit: int) -> list[Step]:
        found = self._swarm.steps(after, limit)
        return [
            Step(version, composed, {n: v for n, values in found.metrics.items() if (v := values[place]) is not None})
            for place, (version, composed) in enumerate(zip(found.versions, found.times, strict=True))
        ]

    def progress(self) -> tuple[int, int]:
        status = self._swarm.status()
        return status.policy_version, status.max_steps


class FileSource:
    """The steps of a run's files, also while a server writes them."""

    def __init__(self, path: Path, run: str) -> None:
        """Raises `ConfigError` if the folder has no journal."""
        self._journal = journal_of(path, run)
        self.title = str(path)

    def settings(self) -> Mapping[str, Any]:
        from agentjet.gateway.read import settings_of

        return self._read(settings_of)

    def steps(self, after: int, limit: int) -> list[Step]:
        found = self._read(lambda journal: journal.steps(after, limit))
        return [
            Step(step.version, step.composed, {n: float(v) for n, v in step.metrics.items() if math.isfinite(v)})
            for step in found
        ]

    def progress(self) -> tuple[int, int]:
        return self._read(lambda journal: journal.read_state().policy_version), 0

    def _read(self, read: Callable[[Journal], T]) -> T:
        from agentjet.swarm import Journal

        with closing(Journal.open_read_only(self._journal)) as journal:
            return read(journal)
