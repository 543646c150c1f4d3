"""`agentjet research run`: a study from its plan to its report, again from wherever it was interrupted."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentjet.cli.research.advice import Llm, LlmKeyFile, LlmModel, voice_of

if TYPE_CHECKING:
    from agentjet.research.leased import LeasedPlace
    from agentjet.research.planner.consult import Voice
    from agentjet.research.scheduler import Chapter
    from agentjet.research.servers import Place

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the study.")]
Local = Annotated[int, typer.Option("--local", min=1, help="Servers to start on this machine, side by side.")]


def run(
    folder: Folder,
    local: Local = 2,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="URL", help="Lease this server instead of starting any; can be repeated."),
    ] = None,
    admin_token_file: Annotated[
        list[Path] | None,
        typer.Option("--admin-token-file", help="`admin-token` in that server's data dir; one for each --server."),
    ] = None,
    llm: Llm = None,
    llm_model: LlmModel = "",
    llm_key_file: LlmKeyFile = None,
) -> None:
    """Run a study, or go on with one that was interrupted or killed. Ctrl-C ends it; the same command goes on.

    Servers are started on this machine, one for each trial, or leased. In the end the report is in the folder.
    """
    from agentjet.cli.research.local import local_places

    leased = leased_places(server or [], admin_token_file or [], folder)
    voice = voice_of(llm, llm_model, llm_key_file)
    with ExitStack() as leases:
        for place in leased:
            leases.callback(place.close)
            place.check()
        carry_out(folder, leased or local_places(local), voice)


def leased_places(urls: list[str], token_files: list[Path], folder: Path) -> list[LeasedPlace]:
    """Raises `ConfigError`."""
    from agentjet.errors import ConfigError
    from agentjet.research.folder import StudyFolder
    from agentjet.research.leased import LeasedPlace, check_arms

    if len(urls) != len(token_files):
        raise ConfigError(f"{len(urls)} --server and {len(token_files)} --admin-token-file: give one for each")
    study = StudyFolder(folder).study()
    if urls:
        check_arms(study)
    try:
        tokens = [file.read_text(encoding="utf-8").strip() for file in token_files]
    except OSError as error:
        raise ConfigError(f"--admin-token-file {error.filename}: {error.strerror}") from None
    holder = f"study {study.id}: {study.topic}"[:256]
    return [LeasedPlace(url, token, holder, typer.echo) for url, token in zip(urls, tokens, strict=True)]


def carry_out(folder: Path, places: Sequence[Place], voice: Voice | None = None) -> list[Chapter]:
    """Everything from the plan to the report; `voice` may add to it in the end. Raises `ConfigError`."""
    from agentjet.cli.research.telling import Told
    from agentjet.cli.research.words import requested
    from agentjet.client.signals import signals_unwind
    from agentjet.errors import ConfigError
    from agentjet.research.folder import StudyFolder
    from agentjet.research.planner.consult import ModelAdviser
    from agentjet.research.report import build_all
    from agentjet.research.scheduler import see_through
    from agentjet.research.steering import Steering
    from agentjet.research.swarm_runner import SwarmRunner

    files = StudyFolder(folder)
    study = files.study()
    if study.subject is None:
        raise ConfigError(f"{folder}: the study names no subject, and so nothing to train; plan it with --agent")
    study.subject.check_code()
    adviser = None if voice is None else ModelAdviser(voice)
    try:
        with (
            signals_unwind(),
            on_disk(folder),
            Told(files.journal, typer.echo) as journal,
            SwarmRunner(study.subject, folder, places, typer.echo) as runner,
        ):
            chapters = see_through(study, journal, runner, Steering(files.steering), adviser)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; go on with: agentjet research run {shlex.quote(str(folder))}", err=True)
        raise typer.Exit(130) from None
    for line in Steering(files.steering).unread([chapter.book for chapter in chapters]):
        typer.echo(f"asked too late, and not done: {requested(line)}")
    with on_disk(folder):
        report, *annexes = build_all([chapter.book for chapter in chapters], folder)
    typer.echo(f"The report is {report}, and {report.with_suffix('.md')}.")
    for annex in annexes:
        typer.echo(f"What was added after the data has a report of its own: {annex}, and {annex.with_suffix('.md')}.")
    return chapters


@contextmanager
def on_disk(folder: Path) -> Iterator[None]:
    """Raises `ConfigError` where a file cannot be had: the disk is full, the folder was moved."""
    from agentjet.errors import ConfigError

    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder}: {error.strerror}. What is in the journal stands: make room, or have the "
            f"study's folder where it was, and go on with: agentjet research run {shlex.quote(str(folder))}"
        ) from error
