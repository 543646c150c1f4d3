"""Execution of a study for the command line: local and shared servers, and messages about new journal entries."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import typer

from agentjet.cli.research.study import plain, summary
from agentjet.cli.serve import STOP_SECONDS, ChildServer, ServerEnded
from agentjet.client.threads import raise_on_signals
from agentjet.errors import ConfigError
from agentjet.research.journal import JournalEntry, StudyFolder, StudyLog
from agentjet.research.models import Finding, Outcome
from agentjet.research.records import Setting, shortened
from agentjet.research.report import build
from agentjet.research.scheduler import conduct
from agentjet.research.servers import (
    Address,
    RunningServer,
    ServerSlot,
    ServerUnavailable,
    SharedServerSlot,
    check_not_stopping,
)
from agentjet.research.swarm_runner import SwarmRunner
from agentjet.types import DEFAULT_RUN, JOURNAL


def carry_out(folder: Path, slots: Sequence[ServerSlot]) -> None:
    """Runs a study from the plan to the report. Raises `ConfigError`."""
    files, again = StudyFolder(folder), f"agentjet research run {shlex.quote(str(folder))}"
    study = files.study()
    if study.subject is None:
        raise ConfigError(f"{folder}: the study names no subject to train; plan it with --agent")
    study.subject.check_code()
    try:
        with (
            raise_on_signals(),
            StudyLog(files.journal) as journal,
            SwarmRunner(study.subject, folder, slots, typer.echo) as runner,
        ):
            journal.notify = console(typer.echo, journal)
            conduct(study, journal, runner)
        report = build(journal, folder)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; continue with: {again}", err=True)
        raise typer.Exit(130) from None
    except ServerUnavailable as gone:
        raise ConfigError(f"{gone}. No trial was lost. Continue with: {again}") from None
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder}: {error.strerror}. The journal is intact: free disk space, or restore the "
            f"study's folder, and continue with: {again}"
        ) from error
    typer.echo(f"The report is {report}, and {report.with_suffix('.md')}.")


SHOWN = ("rungs", "setting of ", "frozen")
"""Beginnings of names of decisions that are printed."""


def console(tell: Callable[[str], None], log: StudyLog) -> Callable[[JournalEntry], None]:
    """Prints new entries, and after each outcome the budget and the time that are left: the `notify` of a journal."""

    def notify(entry: JournalEntry) -> None:
        if line := entry_message(log, entry):
            tell(line)
        if entry.kind == "outcome":
            found = summary(log)
            left = f"; left: {found['time left']}" if "time left" in found else ""
            tell(f"spent {found['spent']:g} of {found['budget']:g} full runs{left}")

    return notify


def entry_message(log: StudyLog, entry: JournalEntry) -> str:
    """Returns a line about the newest entry; empty if it is of no interest to people."""
    body = entry.content
    match entry.kind:
        case "study":
            return f"study {log.study.id if log.study else ''}: {body['topic']}"
        case "outcome":
            return outcome_message(log, Outcome.from_json(body))
        case "decision" if body["name"].startswith(SHOWN):
            return f"decided: {body['name']}: {plain(body['content'])}"
        case "finding":
            return finding_message(log, Finding.from_json(body["content"]))
        case "diagnosis":
            return f"diagnosed: {trial_name(log, body['trial'])}: {body['cause'].replace('_', ' ')}: {body['seen']}"
    return ""


def outcome_message(log: StudyLog, outcome: Outcome) -> str:
    score = "no score" if outcome.score is None else f"score {outcome.score:.4g}"
    note = f" ({in_a_line(outcome.note)})" if outcome.note else ""
    return f"{trial_name(log, outcome.trial)}: {outcome.end.replace('_', ' ')}, {score}{note}"


LONGEST_LINE = 400
"""Maximum characters of a note on the terminal."""


def in_a_line(note: str) -> str:
    return shortened(" ".join(note.split()), LONGEST_LINE)


def trial_name(log: StudyLog, trial_id: str) -> str:
    """Trials are numbered from 1, in the order of their intents."""
    trial = log.trials[trial_id]
    return f"trial {list(log.trials).index(trial_id) + 1}, {trial.phase} {trial.arm!r}, seed {trial.seed}"


def finding_message(log: StudyLog, finding: Finding) -> str:
    claims = {hypothesis.id: hypothesis.claim for hypothesis in log.study.hypotheses} if log.study else {}
    interval = (
        f": {finding.estimate:+.4g}, {finding.confidence:.1%} interval {finding.low:+.4g} to {finding.high:+.4g}"
        if finding.estimate is not None and finding.confidence is not None
        else ""
    )
    verdict = finding.verdict.replace("_", " ")
    return f"{claims.get(finding.hypothesis, finding.hypothesis)}: {verdict}{interval} ({finding.reason})"


# ---- servers --------------------------------------------------------------------------------------------------------


def slots_of(urls: list[str] | None, token_files: list[Path] | None, local: int) -> Sequence[ServerSlot]:
    """The servers of `--server`, which must answer; or those to start on this machine. Raises `ConfigError`."""
    urls, token_files = urls or [], token_files or []
    if len(urls) != len(token_files):
        raise ConfigError(f"{len(urls)} --server and {len(token_files)} --admin-token-file: give one for each")
    try:
        tokens = [file.read_text(encoding="utf-8").strip() for file in token_files]
    except OSError as error:
        raise ConfigError(f"--admin-token-file {error.filename}: {error.strerror}") from None
    shared = [SharedServerSlot(url, token, typer.echo) for url, token in zip(urls, tokens, strict=True)]
    for slot in shared:
        slot.check()
    return shared or local_slots(local)


POLL_SECONDS = 0.2


@dataclass(frozen=True)
class LocalServerSlot:
    """A slot for one server on this machine. The data dir of a run is `server/` in its folder."""

    number: int
    threads: int
    """Default number of threads of its worker."""

    @property
    def name(self) -> str:
        return f"local server {self.number}"

    @contextmanager
    def serve(self, run: Path, settings: Setting, stopping: Event) -> Iterator[RunningServer]:
        data_dir = run / "server"
        wait_until_free(data_dir, stopping)
        chosen = {"model.threads": self.threads, "job.keep_checkpoints": 1, **settings}
        overrides = [f"{name}={json.dumps(value)}" for name, value in chosen.items()]
        with ChildServer(None, overrides, data_dir, is_one_of_many=True) as server:
            server.connect(lambda: check_not_stopping(stopping)).close()
            token = (data_dir / "token").read_text(encoding="utf-8").strip()
            yield RunningServer(Address(server.url, token), server.check)

    def check(self) -> None:
        """Does nothing: each trial starts a new server."""

    def run_finished(self, run: Path) -> None:
        shutil.rmtree(run / "server" / "runs" / DEFAULT_RUN / "checkpoints", ignore_errors=True)


def local_slots(count: int) -> list[LocalServerSlot]:
    """Slots that share the machine's cores."""
    threads = max(1, (os.cpu_count() or 1) // count)
    return [LocalServerSlot(number, threads) for number in range(1, count + 1)]


def wait_until_free(data_dir: Path, stopping: Event) -> None:
    """Waits until the server of a killed researcher has saved its policy and ended. Raises `ServerEnded`."""
    lock = data_dir / "runs" / DEFAULT_RUN / f"{JOURNAL}.lock"
    if not lock.exists():
        return
    deadline = time.monotonic() + STOP_SECONDS
    with lock.open("r+") as file:
        while time.monotonic() < deadline and not stopping.is_set():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                stopping.wait(POLL_SECONDS)
            else:
                return
    raise ServerEnded(f"{data_dir} is still in use, after {STOP_SECONDS:.0f} s at most: end the server that has it")
