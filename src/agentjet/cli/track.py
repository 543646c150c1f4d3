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
from agentjet.cli.data_dir import run_folder
from agentjet.errors import ConfigError, Later, Unreachable
from agentjet.protocol import flatten
from agentjet.trackers import Step
from agentjet.types import DEFAULT_RUN, JOURNAL

if TYPE_CHECKING:
    from agentjet.client import Swarm
    from agentjet.swarm import Journal

T = TypeVar("T")


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

    A server is followed until its job ends, across its restarts. A data dir is copied once, also that of a stopped run.
    After Ctrl-C or a crash the same command goes on where it was. Training does not depend on this process.
    """
    from agentjet.client.threads import raise_on_signals
    from agentjet.trackers.follower import Follower
    from agentjet.trackers.sink import FORMS, open_sink

    if not to:
        raise ConfigError(f"--to is missing: give one of {FORMS}, or module:Class")
    sink, pause = open_sink(to), partial(time.sleep, every)
    follow = partial(Follower, sink=sink, label=to, name=name, folder=folder, say=print_text, pause=pause)
    with raise_on_signals(), suppress(KeyboardInterrupt):
        if source is not None and "://" not in source:
            follow(FileSource(Path(source), run)).run(stay=False)
            return
        with connect(source, token, token_file) as swarm:
            follow(ServerSource(swarm, print_text, None if once else pause)).run(stay=not once)


class ServerSource:
    """The steps of a server. Without `pause`, an error of the connection ends the command."""

    def __init__(self, swarm: Swarm, say: Callable[[str], None], pause: Callable[[], None] | None) -> None:
        """Raises `Unreachable` or a `RequestError` if the first request fails."""
        self._swarm, self._say, self._pause = swarm, say, pause
        self.title = swarm.url
        swarm.status()

    def settings(self) -> Mapping[str, Any]:
        status, body = self._ask(self._swarm.status), self._ask(self._swarm.job)
        facts = {"model": status.model, "model_weights": status.model_weights, "run": status.run}
        return {**facts, **dict(flatten(body.job, "job."))}

    def steps(self, after: int, limit: int) -> list[Step]:
        found = self._ask(lambda: self._swarm.steps(after, limit))
        return [
            Step(version, composed, {n: v for n, values in found.metrics.items() if (v := values[place]) is not None})
            for place, (version, composed) in enumerate(zip(found.versions, found.times, strict=True))
        ]

    def progress(self) -> tuple[int, int]:
        status = self._ask(self._swarm.status)
        return status.policy_version, status.max_steps

    def _ask(self, request: Callable[[], T]) -> T:
        """The answer to a request, which is repeated while the server is away."""
        is_lost = False
        while True:
            try:
                found = request()
            except (Unreachable, Later) as error:
                if self._pause is None:
                    raise
                if not is_lost:
                    self._say(f"{error}. Trying again until Ctrl-C")
                is_lost = True
                self._pause()
            else:
                if is_lost:
                    self._say(f"{self.title} answers again")
                return found


class FileSource:
    """The steps of a run's files, also while a server writes them."""

    def __init__(self, path: Path, run: str) -> None:
        """Raises `ConfigError` if the folder has no journal."""
        self._journal = (path if (path / JOURNAL).is_file() else run_folder(path, run)) / JOURNAL
        self.title = str(path)

    def settings(self) -> Mapping[str, Any]:
        def read(journal: Journal) -> Mapping[str, Any]:
            with suppress(ConfigError):  # The package of the run's recipe is not needed to copy steps.
                if (held := journal.job_settings()) is not None:
                    return {**journal.origin, **dict(flatten(held.job.model_dump(mode="json"), "job."))}
            return journal.origin

        return self._read(read)

    def steps(self, after: int, limit: int) -> list[Step]:
        from agentjet.swarm import records

        found = self._read(lambda journal: records.steps(journal, after, limit))
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
