"""The journal of a study: what was fixed, launched, measured and decided, in this order. And its folder.

A `StudyLog` is the record in memory. A `StudyJournal` writes each entry to disk before it takes effect. The file is
append-only JSON lines with one writer; each line holds its number and the hash of the line before. A last line torn by
a crash is cut off when the file is opened; a changed line is refused.

A study resumes by running again over its log. The scheduler is a function of the study and its outcomes: it launches
nothing twice, and a decision that differs from the recorded one is an error.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from agentjet.errors import ConfigError
from agentjet.research.models import Amendment, Diagnosis, Exchange, Outcome, Study, Trial, canonical


def write_whole(path: Path, text: str) -> None:
    """Replaces the file. After a power cut it holds either the old or the new text."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes a new file in the folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


EntryKind = Literal[
    "study",
    "intent",
    "ack",
    "outcome",
    "decision",
    "finding",
    "diagnosis",
    "point",
    "amendment",
    "refusal",
    "exchange",
]


class StudyLog:
    """The entries of a journal and the state they add up to."""

    def __init__(self) -> None:
        self.study: Study | None = None
        self.trials: dict[str, Trial] = {}
        """By id, every trial with a launch intent."""
        self.unacknowledged: dict[str, str] = {}
        """Launch key to trial id. The intent is recorded; whether the launch happened is unknown."""
        self.attempts: dict[str, int] = {}
        """Number of launches by trial id."""
        self.outcomes: dict[str, list[Outcome]] = {}
        """By trial id, one outcome per ended launch."""
        self.diagnoses: dict[str, list[Diagnosis]] = {}
        """By trial id."""
        self.decisions: dict[str, object] = {}
        """By name. A decision never changes."""
        self.amendments: list[Amendment] = []
        """Granted and refused requests, in the order they were taken."""
        self.exchanges: list[Exchange] = []
        self.num_points = 0
        """Number of points passed at which requests are taken."""
        self.num_entries = 0

    def append(self, kind: EntryKind, body: Mapping[str, Any]) -> None:
        self._apply(kind, body)
        self.num_entries += 1

    def open_study(self, study: Study) -> None:
        """Fixes the study. Raises `ConfigError` if the log belongs to another study."""
        if self.study is None:
            self.append("study", study.to_json())
        elif self.study.id != study.id:
            raise ConfigError(
                f"this journal belongs to study {self.study.id} ({self.study.topic!r}), not to {study.id}: they differ "
                f"in {', '.join(differing_fields(self.study, study))}. A study is fixed before its data: "
                "restore study.json, or plan the changed one in a new folder"
            )

    def decide(self, name: str, content: object, *, kind: Literal["decision", "finding"] = "decision") -> None:
        """Records a decision once. Raises `ConfigError` if it differs from the recorded one."""
        content = json.loads(canonical(content))
        if name not in self.decisions:
            self.append(kind, {"name": name, "content": content})
        elif self.decisions[name] != content:
            raise ConfigError(
                f"decision {name!r} was {canonical(self.decisions[name])} and would now be {canonical(content)}: the "
                "code changed since; finish the study with the AgentJet version that started it"
            )

    def annex(self, number: int) -> StudyLog:
        """Returns the log of the `number`-th annex."""
        return StudyLog()

    def close(self) -> None:
        """Does nothing: only a `StudyJournal` has a file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _apply(self, kind: str, body: Mapping[str, Any]) -> None:
        match kind:
            case "study":
                self.study = Study.from_json(body)
            case "intent":
                trial = Trial.from_json(body["trial"])
                self.trials[trial.id] = trial
                self.unacknowledged[body["key"]] = trial.id
                self.attempts[trial.id] = self.attempts.get(trial.id, 0) + 1
            case "ack":
                del self.unacknowledged[body["key"]]
            case "outcome":
                outcome = Outcome.from_json(body)
                self.outcomes.setdefault(outcome.trial, []).append(outcome)
            case "diagnosis":
                diagnosis = Diagnosis.from_json(body)
                self.diagnoses.setdefault(diagnosis.trial, []).append(diagnosis)
            case "decision" | "finding":
                self.decisions[body["name"]] = body["content"]
            case "point":
                self.num_points += 1
            case "amendment" | "refusal":
                self.amendments.append(Amendment.from_json(body))
            case "exchange":
                self.exchanges.append(Exchange.from_json(body))
            case _:
                raise ConfigError(f"journal entry of kind {kind!r}: written by a newer AgentJet; use that version")


def differing_fields(study: Study, other: Study) -> list[str]:
    """Returns the fields in which two studies differ, with those of their subjects as `subject.NAME`."""
    fields, others = fields_of(study), fields_of(other)
    return sorted(name for name in {*fields, *others} if fields.get(name) != others.get(name))


def fields_of(study: Study) -> dict[str, Any]:
    fields = study.to_json()
    return fields | {f"subject.{name}": value for name, value in fields.pop("subject", {}).items()}


Listener = Callable[[StudyLog, EntryKind, Mapping[str, Any]], None]
"""Receives the log, and the kind and body of its new entry."""


class StudyJournal(StudyLog):
    """A log in a file. Close it, or use it as a context manager."""

    def __init__(self, path: Path, listener: Listener = lambda log, kind, body: None) -> None:
        """`listener` is called for each new entry. Raises `ConfigError` if another process has the file, or if a line
        was changed.
        """
        super().__init__()
        self.path = path
        self._listener = listener
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._last = ""
        try:
            self._lock()
            self._replay()
            sync_folder(path.parent)
        except BaseException:
            self.close()
            raise

    def append(self, kind: EntryKind, body: Mapping[str, Any]) -> None:
        """Writes the entry and syncs it, then applies it. If the disk refuses, the log is unchanged and `OSError` is
        raised.
        """
        line = journal_line(self.num_entries, self._last, kind, body)
        end = os.fstat(self._file).st_size
        try:
            remaining = memoryview(line)
            while remaining:
                remaining = remaining[os.write(self._file, remaining) :]
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, end)
            error.filename = str(self.path)
            raise
        self._last = digest(line)
        super().append(kind, body)
        self._listener(self, kind, body)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def annex(self, number: int) -> StudyJournal:
        """Opens a file beside this one."""
        return StudyJournal(annex_path(self.path, number), self._listener)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{self.path} is being written by another process: stop that one first") from None

    def _replay(self) -> None:
        good = 0
        for fields, line in whole_lines(self.path):
            self._last = digest(line)
            good += len(line)
            super().append(fields["kind"], fields["body"])
        if os.fstat(self._file).st_size > good:
            os.ftruncate(self._file, good)
            os.fsync(self._file)


def read_log(path: Path) -> StudyLog:
    """Reads a journal, also while another process writes it. Raises `ConfigError`."""
    log = StudyLog()
    for fields, _ in whole_lines(path) if path.exists() else ():
        log.append(fields["kind"], fields["body"])
    return log


def whole_lines(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yields the entries of a journal with their bytes. A torn last line is skipped: no entry takes effect before it is
    whole.

    Raises `ConfigError` if a line was changed.
    """
    previous = ""
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines):
        fields = parse_line(line)
        if fields is None and number == len(lines) - 1 and not line.endswith(b"\n"):
            return
        if fields is None or fields["seq"] != number or fields["prev"] != previous:
            raise ConfigError(
                f"{path}, line {number + 1}: was changed after it was written; restore the file from a copy"
            )
        previous = digest(line)
        yield fields, line


def annex_path(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-annex-{number}{path.suffix}")


def journal_line(number: int, previous: str, kind: str, body: Mapping[str, Any]) -> bytes:
    """A line of the file. `sum` is the hash of the other fields, so that a change in the last line is found."""
    content = {"seq": number, "prev": previous, "kind": kind, "body": body}
    return (canonical({**content, "sum": digest(canonical(content).encode())}) + "\n").encode()


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Returns the fields of a line, or None if it is torn or was changed."""
    try:
        fields: dict[str, Any] = json.loads(line)
        claimed = fields.pop("sum")
        whole = line.endswith(b"\n") and digest(canonical(fields).encode()) == claimed
    except (ValueError, KeyError, AttributeError):
        return None
    return fields if whole else None


def digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()[:32]


@dataclass(frozen=True)
class StudyFolder:
    """The files of a study: `study.json`, `plan.md`, `journal.jsonl`, `steer.jsonl`, the runner's folders and the
    report.
    """

    path: Path

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def steering_file(self) -> Path:
        return self.path / "steer.jsonl"

    def logs(self) -> list[StudyLog]:
        """Returns the logs of the study and of each annex. Raises `ConfigError`."""
        annexes = takewhile(Path.exists, (annex_path(self.journal, number) for number in count(1)))
        return [read_log(path) for path in (self.journal, *annexes)]

    def check_new(self) -> None:
        """Raises `ConfigError` if the folder holds a plan or a study's data."""
        if read_log(self.journal).study is not None:
            raise ConfigError(f"{self.path} holds a started study: choose another folder")
        if (self.path / "study.json").exists():
            raise ConfigError(f"{self.path} already holds a plan: choose another folder (--out), or delete the plan")

    def make(self) -> None:
        """Raises `ConfigError` if the folder cannot be created."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {self.path}: {error.strerror}; choose a folder that can be created") from None

    def write(self, study: Study, plan: str) -> None:
        """Raises `ConfigError` if the folder holds another study."""
        self.check_new()
        self.make()
        (self.path / "plan.md").write_text(plan, encoding="utf-8")
        write_whole(self.path / "study.json", json.dumps(study.to_json(), indent=2, ensure_ascii=False) + "\n")

    def study(self) -> Study:
        """Raises `ConfigError`."""
        file = self.path / "study.json"
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except OSError:
            raise ConfigError(
                f"{self.path} has no study.json: name the folder of a study, or plan one with `agentjet research new`"
            ) from None
        except ValueError as error:
            raise ConfigError(f"{file} is not valid JSON: {error}") from None
        return Study.from_json(content)
