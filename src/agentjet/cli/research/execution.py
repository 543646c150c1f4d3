"""Execution of a study for the command line: local and shared servers, and messages about new journal entries."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import typer

from agentjet.cli.data_dir import JOURNAL
from agentjet.cli.research.study import plain, requested
from agentjet.cli.serve import STOP_SECONDS, ChildServer, ServerEnded
from agentjet.client.threads import raise_on_signals
from agentjet.errors import ConfigError
from agentjet.research.amendments import NOT_ADDED
from agentjet.research.diagnosis import causes_needing
from agentjet.research.journal import EntryKind, StudyFolder, StudyJournal, StudyLog
from agentjet.research.launcher import SteeringFile
from agentjet.research.models import Finding, Outcome
from agentjet.research.planner.proposals import ModelAdviser, propose_code, refine
from agentjet.research.probes import NEEDS, missing
from agentjet.research.records import Setting, in_a_line
from agentjet.research.report import build_all
from agentjet.research.report.caveats import action_text
from agentjet.research.scheduler import conduct_with_annexes
from agentjet.research.servers import Address, SharedServerSlot, check_arms
from agentjet.research.swarm_runner import SwarmRunner
from agentjet.types import DEFAULT_RUN

if TYPE_CHECKING:
    from agentjet.research.planner.plan import Plan
    from agentjet.research.planner.proposals import LLM, CodingAgentSandbox
    from agentjet.research.scheduler import StudyRun
    from agentjet.research.servers import ServerSlot


def carry_out(folder: Path, slots: Sequence[ServerSlot], llm: LLM | None = None) -> list[StudyRun]:
    """Runs a study from the plan to the report. A language model may propose an annex. Raises `ConfigError`."""

    files = StudyFolder(folder)
    study = files.study()
    if study.subject is None:
        raise ConfigError(f"{folder}: the study names no subject to train; plan it with --agent")
    study.subject.check_code()
    adviser = None if llm is None else ModelAdviser(llm)
    try:
        with (
            raise_on_signals(),
            on_disk(folder),
            StudyJournal(files.journal, ConsoleLog(typer.echo)) as journal,
            SwarmRunner(study.subject, folder, slots, typer.echo) as runner,
        ):
            study_runs = conduct_with_annexes(study, journal, runner, SteeringFile(files.steering_file), adviser)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; continue with: agentjet research run {shlex.quote(str(folder))}", err=True)
        raise typer.Exit(130) from None
    for line in SteeringFile(files.steering_file).unread([study_run.log for study_run in study_runs]):
        typer.echo(f"requested too late, so ignored: {requested(line)}")
    with on_disk(folder):
        report, *annexes = build_all([study_run.log for study_run in study_runs], folder)
    typer.echo(f"The report is {report}, and {report.with_suffix('.md')}.")
    for annex in annexes:
        typer.echo(f"The report of the annex is {annex}, and {annex.with_suffix('.md')}.")
    return study_runs


@contextmanager
def on_disk(folder: Path) -> Iterator[None]:
    """Raises `ConfigError` if a file is unavailable, because the disk is full or the folder was moved."""

    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder}: {error.strerror}. The journal is intact: free disk space, or restore the "
            f"study's folder, and continue with: agentjet research run {shlex.quote(str(folder))}"
        ) from error


def with_proposals(plan: Plan, out: Path, llm: LLM | None, sandbox: CodingAgentSandbox | None) -> Plan:
    """Returns the plan with the granted proposals. The journal of the study records each exchange."""

    if llm is None and sandbox is None:
        return plan
    with StudyJournal(StudyFolder(out).journal, ConsoleLog(typer.echo)) as journal:
        if llm is not None:
            plan = refine(plan, llm, journal)
        if sandbox is not None:
            plan = propose_code(plan, plan.study.arms[0].name, sandbox, out / "code", journal)
    return plan


SHOWN = ("rungs", "setting of ", "frozen", NOT_ADDED)
"""Beginnings of names of decisions that are printed."""


class ConsoleLog:
    """Prints the new entries of a journal. Use it as the journal's listener."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify

    def __call__(self, log: StudyLog, kind: EntryKind, body: Mapping[str, Any]) -> None:
        line = entry_message(log, kind, body)
        if line:
            self._notify(line)


def entry_message(log: StudyLog, kind: EntryKind, body: Mapping[str, Any]) -> str:
    """Returns a line about the newest entry; empty if it is of no interest to people."""
    match kind:
        case "study":
            return f"study {log.study.id if log.study else ''}: {body['topic']}"
        case "outcome":
            return outcome_message(log, Outcome.from_json(body))
        case "decision" if body["name"].startswith(SHOWN):
            return f"decided: {body['name']}: {plain(body['content'])}"
        case "decision":
            return unanswered_message(log, body["name"])
        case "finding":
            return finding_message(log, Finding.from_json(body["content"]))
        case "diagnosis":
            return f"diagnosed: {trial_name(log, body['trial'])}: {body['cause'].replace('_', ' ')}: {body['seen']}"
        case "exchange" if body["failed"]:
            return f"{body['moment']}: no proposals: {in_a_line(body['failed'])}"
        case "amendment" | "refusal":
            action = action_text(body["asked"])
            return f"refused: {action}: {body['refused']}" if body["refused"] else f"granted: {action}"
    return ""


def outcome_message(log: StudyLog, outcome: Outcome) -> str:
    score = "no score" if outcome.score is None else f"score {outcome.score:.4g}"
    note = f" ({in_a_line(outcome.note)})" if outcome.note else ""
    return f"{trial_name(log, outcome.trial)}: {outcome.end.replace('_', ' ')}, {score}{note}"


def unanswered_message(log: StudyLog, name: str) -> str:
    """Lists the needs that the decision `name` leaves open, unless another decision of the journal already did."""
    reported = {need for other, answer in log.decisions.items() if other != name for need in missing(other, answer)}
    new = [need for need in missing(name, log.decisions[name]) if need not in reported]
    return "\n".join(f"the runner cannot report {NEEDS[need]}; not diagnosed: {causes_needing(need)}" for need in new)


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


def shared_slots(urls: list[str], token_files: list[Path], folder: Path) -> list[SharedServerSlot]:
    """Raises `ConfigError`."""

    if len(urls) != len(token_files):
        raise ConfigError(f"{len(urls)} --server and {len(token_files)} --admin-token-file: give one for each")
    if urls:
        check_arms(StudyFolder(folder).study())
    try:
        tokens = [file.read_text(encoding="utf-8").strip() for file in token_files]
    except OSError as error:
        raise ConfigError(f"--admin-token-file {error.filename}: {error.strerror}") from None
    return [SharedServerSlot(url, token, typer.echo) for url, token in zip(urls, tokens, strict=True)]


POLL_SECONDS = 0.2


@dataclass(frozen=True)
class LocalServer:
    """A child process and its address."""

    server: ChildServer
    address: Address

    def check(self) -> None:
        self.server.check()


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
    def serve(self, run: Path, settings: Setting, stopping: Event) -> Iterator[LocalServer]:
        data_dir = run / "server"
        wait_until_free(data_dir, stopping)
        chosen = {"model.threads": self.threads, "job.keep_checkpoints": 1, **settings}
        overrides = [f"{name}={json.dumps(value)}" for name, value in chosen.items()]
        with ChildServer(None, overrides, data_dir) as server:
            server.connect().close()
            yield LocalServer(server, Address(server.url, (data_dir / "token").read_text(encoding="utf-8").strip()))

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
