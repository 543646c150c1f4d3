"""Files that are whole or not there, also after a power cut.

The one record of a study: what was fixed, launched, measured and decided, in the order it happened.

A `StudyLog` is the record in memory. A `StudyJournal` is a book whose every entry is on disk before anybody acts
on it: lines
of JSON in a file that only grows, each with its number and the hash of the line before, one writer at a time. A last
line that a crash tore is cut off when the file is opened; a line that was changed is refused.

A study goes on by being run again over its book: the scheduler is a function of the study and of the outcomes, what the
book has is not launched twice, and a decision that comes out differently from the recorded one is an error.

`StudyFolder`: the files of one study. The plan is read by people, `study.json` by the researcher.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from agentjet.errors import ConfigError
from agentjet.research.models import Amendment, Diagnosis, Exchange, Outcome, Study, Trial, canonical


def write_whole(path: Path, text: str) -> None:
    """Put `text` in the place of whatever the file was. It is on disk when this returns."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """A new file survives a power cut only when its folder does."""
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
    """Entries, and what they add up to."""

    def __init__(self) -> None:
        self.study: Study | None = None
        self.trials: dict[str, Trial] = {}
        """By id: every trial that was meant to be launched."""
        self.unacknowledged: dict[str, str] = {}
        """Launch key to trial id: meant to be launched, and nobody knows whether it was."""
        self.attempts: dict[str, int] = {}
        """By trial id: how often it was launched."""
        self.outcomes: dict[str, list[Outcome]] = {}
        """By trial id, one for each launch that ended."""
        self.diagnoses: dict[str, list[Diagnosis]] = {}
        """By trial id."""
        self.decisions: dict[str, object] = {}
        """By name: what was decided, and from then on stands."""
        self.amendments: list[Amendment] = []
        """Requests that were granted and those that were refused, in the order they were taken."""
        self.exchanges: list[Exchange] = []
        self.num_points = 0
        """Fixed points that were passed: what is asked now is taken at a later one."""
        self.num_entries = 0

    def append(self, kind: EntryKind, body: Mapping[str, Any]) -> None:
        self._apply(kind, body)
        self.num_entries += 1

    def open_study(self, study: Study) -> None:
        """Fix the study. Raises `ConfigError` when the book is another study's."""
        if self.study is None:
            self.append("study", study.to_json())
        elif self.study.id != study.id:
            raise ConfigError(
                f"this journal is of study {self.study.id} ({self.study.topic!r}), not of {study.id}: they differ in "
                f"{', '.join(differing_fields(self.study, study))}. A study is fixed before its data: "
                "restore study.json, or plan the changed one in a new folder"
            )

    def decide(self, name: str, content: object, *, kind: Literal["decision", "finding"] = "decision") -> None:
        """Record a decision once. Raises `ConfigError` when it differs from the one recorded under this name."""
        content = json.loads(canonical(content))
        if name not in self.decisions:
            self.append(kind, {"name": name, "content": content})
        elif self.decisions[name] != content:
            raise ConfigError(
                f"decision {name!r} was {canonical(self.decisions[name])} and would now be {canonical(content)}: the "
                "study's code changed since; finish it with the version that began it"
            )

    def annex(self, number: int) -> StudyLog:
        """The book of what was added to this study later."""
        return StudyLog()

    def close(self) -> None:
        """Nothing more is recorded."""

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
                raise ConfigError(f"journal entry of kind {kind!r}: written by a newer AgentJet; use that one")


def differing_fields(study: Study, other: Study) -> list[str]:
    """The fields that two studies do not share; of their subjects, by the whole name."""
    fields, others = fields_of(study), fields_of(other)
    return sorted(name for name in {*fields, *others} if fields.get(name) != others.get(name))


def fields_of(study: Study) -> dict[str, Any]:
    fields = study.to_json()
    return fields | {f"subject.{name}": value for name, value in fields.pop("subject", {}).items()}


class StudyJournal(StudyLog):
    """A book in a file. Open it, and close it or leave its block."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` when another process has the file, or a line in it was changed."""
        super().__init__()
        self.path = path
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
        """Write, force to disk, then count. A disk that refuses leaves the book as it was, and raises `OSError`."""
        line = entry(self.num_entries, self._last, kind, body)
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

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def annex(self, number: int) -> StudyJournal:
        """A file beside this one."""
        return StudyJournal(annex_path(self.path, number))

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


def read_book(path: Path) -> StudyLog:
    """What a journal holds, also while another process writes it. Raises `ConfigError`."""
    book = StudyLog()
    for fields, _ in whole_lines(path) if path.exists() else ():
        book.append(fields["kind"], fields["body"])
    return book


def whole_lines(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The entries of a journal; a last line that a crash tore is none, for nobody has acted on it.

    Raises `ConfigError` where a line was changed.
    """
    previous = ""
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines):
        fields = parsed(line)
        if fields is None and number == len(lines) - 1 and not line.endswith(b"\n"):
            return
        if fields is None or fields["seq"] != number or fields["prev"] != previous:
            raise ConfigError(
                f"{path}, line {number + 1}: was changed after it was written; restore the file from a copy"
            )
        previous = digest(line)
        yield fields, line


def annex_path(path: Path, number: int) -> Path:
    """Where the journal of a study's n-th annex is."""
    return path.with_name(f"{path.stem}-annex-{number}{path.suffix}")


def entry(number: int, previous: str, kind: str, body: Mapping[str, Any]) -> bytes:
    """A line of the file. `sum` is over the rest, so that a change in the last line shows too."""
    content = {"seq": number, "prev": previous, "kind": kind, "body": body}
    return (canonical({**content, "sum": digest(canonical(content).encode())}) + "\n").encode()


def parsed(line: bytes) -> dict[str, Any] | None:
    """The fields of a line, or None when it is torn or was changed."""
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
    """`study.json` and `plan.md`, then `journal.jsonl`, `steer.jsonl`, the runner's folders, and the report."""

    path: Path

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def steering(self) -> Path:
        return self.path / "steer.jsonl"

    def books(self) -> list[StudyLog]:
        """What is in the journal of the study, and in that of each annex. Raises `ConfigError`."""
        annexes = takewhile(Path.exists, (annex_path(self.journal, number) for number in count(1)))
        return [read_book(path) for path in (self.journal, *annexes)]

    def check_new(self) -> None:
        """Raises `ConfigError` where a plan, or a study's data, lie."""
        if read_book(self.journal).study is not None:
            raise ConfigError(f"{self.path} holds a study that was begun: give another folder")
        if (self.path / "study.json").exists():
            raise ConfigError(f"{self.path} holds a plan already: give another folder (--out), or delete that one")

    def make(self) -> None:
        """Raises `ConfigError` where no folder can be."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {self.path}: {error.strerror}; name a folder that can be made") from None

    def write(self, study: Study, plan: str) -> None:
        """Raises `ConfigError` where another study lies."""
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
                f"{self.path} holds no study.json: name the folder of a study, or plan one with `agentjet research new`"
            ) from None
        except ValueError as error:
            raise ConfigError(f"{file} is no JSON: {error}") from None
        return Study.from_json(content)
