"""`agentjet research run`: a study from its plan to its report, again from wherever it was interrupted.

Who may propose something to a study: a language model, a coding agent. Neither is needed, and neither judges.

What a running study says on the terminal: a line for what people want to know of its journal's entries.

What a journal or a steer file holds, as a person would write it down.

`LocalServerSlot`: a run served by a server of its own on this machine, started and ended with each trial.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentjet.cli.data_dir import JOURNAL
from agentjet.cli.serve import STOP_SECONDS, ChildServer, ServerEnded
from agentjet.errors import ConfigError
from agentjet.research.amendments import NOT_ADDED
from agentjet.research.diagnosis import needing
from agentjet.research.journal import EntryKind, StudyJournal, annex_path
from agentjet.research.models import Finding, Outcome
from agentjet.research.probes import NEEDS, missing
from agentjet.research.records import Setting, in_a_line
from agentjet.research.report.caveats import action_text
from agentjet.research.servers import Address

if TYPE_CHECKING:
    from agentjet.research.planner.plan import Plan
    from agentjet.research.planner.proposals import LLM, CodingAgentSandbox
    from agentjet.research.scheduler import StudyRun
    from agentjet.research.servers import LeasedServerSlot, ServerSlot


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
    # moved import

    leased = leased_places(server or [], admin_token_file or [], folder)
    voice = voice_of(llm, llm_model, llm_key_file)
    with ExitStack() as leases:
        for place in leased:
            leases.callback(place.close)
            place.check()
        carry_out(folder, leased or local_places(local), voice)


def leased_places(urls: list[str], token_files: list[Path], folder: Path) -> list[LeasedServerSlot]:
    """Raises `ConfigError`."""
    from agentjet.errors import ConfigError
    from agentjet.research.journal import StudyFolder
    from agentjet.research.servers import LeasedServerSlot, check_arms

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
    return [LeasedServerSlot(url, token, holder, typer.echo) for url, token in zip(urls, tokens, strict=True)]


def carry_out(folder: Path, places: Sequence[ServerSlot], voice: LLM | None = None) -> list[StudyRun]:
    """Everything from the plan to the report; `voice` may add to it in the end. Raises `ConfigError`."""
    # moved import
    # moved import
    from agentjet.client.threads import raise_on_signals
    from agentjet.errors import ConfigError
    from agentjet.research.journal import StudyFolder
    from agentjet.research.launcher import SteeringFile
    from agentjet.research.planner.proposals import ModelAdviser
    from agentjet.research.report import build_all
    from agentjet.research.scheduler import conduct_with_annexes
    from agentjet.research.swarm_runner import SwarmRunner

    files = StudyFolder(folder)
    study = files.study()
    if study.subject is None:
        raise ConfigError(f"{folder}: the study names no subject, and so nothing to train; plan it with --agent")
    study.subject.check_code()
    adviser = None if voice is None else ModelAdviser(voice)
    try:
        with (
            raise_on_signals(),
            on_disk(folder),
            ConsoleLog(files.journal, typer.echo) as journal,
            SwarmRunner(study.subject, folder, places, typer.echo) as runner,
        ):
            chapters = conduct_with_annexes(study, journal, runner, SteeringFile(files.steering), adviser)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; go on with: agentjet research run {shlex.quote(str(folder))}", err=True)
        raise typer.Exit(130) from None
    for line in SteeringFile(files.steering).unread([chapter.book for chapter in chapters]):
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


Llm = Annotated[
    str | None,
    typer.Option("--llm", metavar="URL", help="An OpenAI-compatible endpoint (http://.../v1) that may propose arms."),
]
LlmModel = Annotated[str, typer.Option("--llm-model", metavar="NAME", help="The model's name there.")]
LlmKeyFile = Annotated[Path | None, typer.Option("--llm-key-file", help="File with that endpoint's API key.")]
AgentCli = Annotated[
    str | None,
    typer.Option("--agent-cli", metavar="COMMAND", help="A coding agent that may write another version of the agent."),
]


def voice_of(url: str | None, model: str, key_file: Path | None) -> LLM | None:
    """The model that the options name. Raises `ConfigError`."""
    from agentjet.research.planner.proposals import ChatEndpoint

    if url is None:
        if model or key_file is not None:
            raise ConfigError("--llm-model and --llm-key-file are for an --llm")
        return None
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--llm {url!r} is no address: give one such as http://127.0.0.1:8000/v1")
    if not model:
        raise ConfigError(f"--llm {url}: give the model's name there, too (--llm-model)")
    return ChatEndpoint(url, model, key_of(key_file) if key_file else "")


def key_of(file: Path) -> str:
    """Without the white space around it. Raises `ConfigError`, which never holds any of it."""
    try:
        key = file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--llm-key-file {file}: {error.strerror}") from None
    if not re.fullmatch(rb"[!-~]+", key):
        raise ConfigError(
            f"--llm-key-file {file}: give a file with the key alone, in one line: it is empty, or has a blank, a line "
            "break or another character inside that no header can carry"
        )
    return key.decode("ascii")


def workshop_of(command: str | None) -> CodingAgentSandbox | None:
    """Where the coding agent that the option names works. Raises `ConfigError`."""
    from agentjet.research.planner.proposals import CodingAgentSandbox

    if command is None:
        return None
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--agent-cli {command!r}: {error}; quote it as a shell would") from None
    if not words:
        raise ConfigError(f"--agent-cli {command!r} is no command: give one, or leave it out")
    return CodingAgentSandbox(tuple(words))


def advised(plan: Plan, out: Path, voice: LLM | None, workshop: CodingAgentSandbox | None) -> Plan:
    """The plan with what was proposed and granted; what was said is in the study's journal."""
    # moved import
    from agentjet.research.journal import StudyFolder
    from agentjet.research.planner.proposals import propose_code, refine

    if voice is None and workshop is None:
        return plan
    with ConsoleLog(StudyFolder(out).journal, typer.echo) as journal:
        if voice is not None:
            plan = refine(plan, voice, journal)
        if workshop is not None:
            plan = propose_code(plan, plan.study.arms[0].name, workshop, out / "code", journal)
    return plan


SHOWN = ("rungs", "setting of ", "frozen", NOT_ADDED)
"""Decisions that are told, by how their names begin."""


class ConsoleLog(StudyJournal):
    """A journal that tells what is new in it."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        super().__init__(path)
        self._tell = tell
        self._told = {need for name, answer in self.decisions.items() for need in missing(name, answer)}
        """What nobody could answer, and was said so."""

    def annex(self, number: int) -> ConsoleLog:
        return ConsoleLog(annex_path(self.path, number), self._tell)

    def append(self, kind: EntryKind, body: Mapping[str, Any]) -> None:
        super().append(kind, body)
        line = self._line(kind, body)
        if line:
            self._tell(line)

    def _line(self, kind: EntryKind, body: Mapping[str, Any]) -> str:
        match kind:
            case "study":
                return f"study {self.study.id if self.study else ''}: {body['topic']}"
            case "outcome":
                return self._outcome(Outcome.from_json(body))
            case "decision" if body["name"].startswith(SHOWN):
                return f"decided: {body['name']}: {plain(body['content'])}"
            case "decision":
                return self._unanswered(body["name"], body["content"])
            case "finding":
                return self._finding(Finding.from_json(body["content"]))
            case "diagnosis":
                return f"diagnosed: {self._name(body['trial'])}: {body['cause'].replace('_', ' ')}: {body['seen']}"
            case "exchange" if body["failed"]:
                return f"{body['moment']}: nothing was proposed: {in_a_line(body['failed'])}"
            case "amendment" | "refusal":
                asked = action_text(body["asked"])
                return f"refused: {asked}: {body['refused']}" if body["refused"] else f"granted: {asked}"
        return ""

    def _outcome(self, outcome: Outcome) -> str:
        score = "no score" if outcome.score is None else f"score {outcome.score:.4g}"
        note = f" ({in_a_line(outcome.note)})" if outcome.note else ""
        return f"{self._name(outcome.trial)}: {outcome.end.replace('_', ' ')}, {score}{note}"

    def _unanswered(self, name: str, answer: object) -> str:
        """What the runner could not tell of a trial, the first time for all trials."""
        new = [need for need in missing(name, answer) if need not in self._told]
        self._told |= set(new)
        return "\n".join(f"could not be asked: {NEEDS[need]}; open for that: {needing(need)}" for need in new)

    def _name(self, trial: str) -> str:
        """Trials are counted from 1, in the order they were meant to be launched."""
        meant = self.trials[trial]
        return f"trial {list(self.trials).index(trial) + 1}, {meant.phase} {meant.arm!r}, seed {meant.seed}"

    def _finding(self, finding: Finding) -> str:
        claims = {hypothesis.id: hypothesis.claim for hypothesis in self.study.hypotheses} if self.study else {}
        interval = (
            f": {finding.estimate:+.4g}, {finding.confidence:.1%} interval {finding.low:+.4g} to {finding.high:+.4g}"
            if finding.estimate is not None and finding.confidence is not None
            else ""
        )
        verdict = finding.verdict.replace("_", " ")
        return f"{claims.get(finding.hypothesis, finding.hypothesis)}: {verdict}{interval} ({finding.reason})"


def plain(content: object) -> str:
    """Of a mapping in a mapping, as the settings of several arms are, each is told by its name."""
    if isinstance(content, Mapping):
        known = {name: value for name, value in content.items() if value not in ("", {})}
        return "; ".join(
            f"{name}: {', '.join(f'{key} = {plain(inner)}' for key, inner in value.items())}"
            if isinstance(value, Mapping)
            else f"{name} = {plain(value)}"
            for name, value in known.items()
        )
    if isinstance(content, list | tuple):
        return ", ".join(map(plain, content))
    return f"{content:.4g}" if isinstance(content, float) else str(content)


def requested(line: str) -> str:
    """A line of a steer file: the action, or what was said where it is none."""
    from agentjet.research.report.caveats import action_text

    try:
        said = json.loads(line)
    except ValueError:
        return line
    return action_text(said) if isinstance(said, dict) and "kind" in said else line


POLL_SECONDS = 0.2


@dataclass(frozen=True)
class LocalServer:
    """A child process, and how it is reached."""

    server: ChildServer
    address: Address

    def check(self) -> None:
        self.server.check()


@dataclass(frozen=True)
class LocalServerSlot:
    """Room for one server on this machine. The data dir of a run is `server/` in its folder."""

    number: int
    threads: int
    """Of its worker, where the settings say nothing."""

    @property
    def name(self) -> str:
        return f"local server {self.number}"

    @contextmanager
    def serving(self, run: Path, settings: Setting, stopping: Event) -> Iterator[LocalServer]:
        data_dir = run / "server"
        wait_until_free(data_dir, stopping)
        chosen = {"model.threads": self.threads, "job.keep_checkpoints": 1, **settings}
        overrides = [f"{name}={json.dumps(value)}" for name, value in chosen.items()]
        with ChildServer(None, overrides, data_dir) as server:
            server.connect().close()
            yield LocalServer(server, Address(server.url, (data_dir / "token").read_text(encoding="utf-8").strip()))

    def check(self) -> None:
        """Every trial starts a server of its own."""

    def over(self, run: Path) -> None:
        shutil.rmtree(run / "server" / "checkpoints", ignore_errors=True)

    def close(self) -> None:
        """Every server ended with its trial."""


def local_places(count: int) -> list[LocalServerSlot]:
    """Places that share the machine's cores."""
    threads = max(1, (os.cpu_count() or 1) // count)
    return [LocalServerSlot(number, threads) for number in range(1, count + 1)]


def wait_until_free(data_dir: Path, stopping: Event) -> None:
    """Until the server of a researcher that was killed has saved its policy and ended. Raises `ServerEnded`."""
    lock = data_dir / f"{JOURNAL}.lock"
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
