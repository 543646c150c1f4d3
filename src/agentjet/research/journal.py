"""`StudyJournal`: an append-only file of entries; `StudyLog`: the sum of a study's entries; `Notebook`: a campaign's;
`Inbox`: messages of people to a campaign.

A study or a campaign resumes by running again over its journal. It is a function of what was observed: it launches
nothing twice, and a decision that differs from the recorded one is an error. An entry is on disk before anything
depends on it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shlex
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from agentjet import database
from agentjet.errors import ConfigError
from agentjet.research.models import LONGEST_NOTE, VETOED, Diagnosis, Outcome, Record, Study, Trial, canonical, refuse

SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY, kind TEXT NOT NULL, key TEXT NOT NULL UNIQUE, at REAL NOT NULL,
    because TEXT NOT NULL, content TEXT NOT NULL);
CREATE TRIGGER IF NOT EXISTS kept BEFORE UPDATE ON entries BEGIN SELECT RAISE(ABORT, 'append only'); END;
CREATE TRIGGER IF NOT EXISTS never_removed BEFORE DELETE ON entries BEGIN SELECT RAISE(ABORT, 'append only'); END;
"""


def write_whole(path: Path, text: str) -> None:
    """Replaces the file. After a power cut it holds either the old or the new text."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class JournalEntry:
    number: int
    """From 1."""
    kind: str
    key: str
    """Name of the step; unique."""
    at: float
    """Seconds since 1970. No decision depends on it."""
    because: tuple[int, ...]
    """Numbers of the entries that led to this one."""
    content: Any


def locked(file: Path, said: str) -> int:
    """The descriptor of a lock, held until it is closed. Raises `ConfigError`, which begins with `said`."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"{said} by another process: wait for its end, or stop it") from None
    return descriptor


@contextmanager
def one_start(folder: Path) -> Iterator[None]:
    """Keeps other starts out of the folder of a campaign. Raises `ConfigError`."""
    descriptor = locked(folder / START, f"--out {folder}: a campaign is being started there")
    try:
        yield
    finally:
        (folder / START).unlink(missing_ok=True)
        os.close(descriptor)


class StudyJournal:
    """Entries in order, in one SQLite file or in memory. A context manager with one writer."""

    def __init__(
        self,
        file: Path | None = None,
        *,
        writer: bool = True,
        now: Callable[[], float] = time.time,
        notify: Callable[[JournalEntry], None] = lambda entry: None,
    ) -> None:
        """`notify` gets each entry that was written. Without a `file` they are in memory. Raises `ConfigError`."""
        self.file, self._now, self.notify = file, now, notify
        self.entries: list[JournalEntry] = []
        self._by_key: dict[str, JournalEntry] = {}
        self.known = self._by_key.get
        self._lock, self._database = -1, None
        if file is not None:
            try:
                self._database = self._opened(file) if writer else database.connect(file, "mode=ro", any_thread=True)
                self.refresh()
            except sqlite3.Error as error:
                self.close()
                raise failure(file, error) from None
            except BaseException:
                self.close()
                raise

    def _opened(self, file: Path) -> sqlite3.Connection:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = locked(file.with_name(f"{file.name}.lock"), f"{file} is being written")
        connection = database.connect(file, any_thread=True)
        database.check_tables(connection, SCHEMA, file)  # Before a trigger of another file can run.
        connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;" + SCHEMA)
        return connection

    def has_writer(self) -> bool:
        """True while a process writes the file."""
        assert self.file is not None
        with suppress(FileNotFoundError), self.file.with_name(f"{self.file.name}.lock").open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def refresh(self) -> None:
        """Reads entries that another process wrote. A file whose writer has not made its tables yet has none."""
        if self._database is None or not self._database.execute("SELECT 1 FROM sqlite_master").fetchone():
            return
        if self.file is not None and not self.entries:
            database.check_tables(self._database, SCHEMA, self.file)
        rows = self._database.execute(
            "SELECT number, kind, key, at, because, content FROM entries WHERE number > ? ORDER BY number",
            (len(self.entries),),
        )
        for number, kind, key, at, because, content in rows:
            self._add(JournalEntry(number, kind, key, at, tuple(json.loads(because)), json.loads(content)))

    def entry(self, kind: str, content: object, because: Sequence[int] = (), *, key: str = "") -> JournalEntry:
        """Appends an entry; it is on disk when this returns. Raises `OSError` for a full disk, and appends nothing."""
        number = len(self.entries) + 1
        made = JournalEntry(number, kind, key or f"{kind} {number}", self._now(), tuple(because), stored(content))
        if self.file is not None:
            assert self._database is not None, "the journal is closed"
            row = (number, kind, made.key, made.at, canonical(list(made.because)), canonical(made.content))
            try:
                self._database.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?)", row)
            except sqlite3.Error as error:
                raise failure(self.file, error) from None
        self._add(made)
        self.notify(made)
        return made

    def of(self, *kinds: str, until: float = math.inf) -> list[JournalEntry]:
        """Entries of these kinds, up to a time."""
        return [entry for entry in self.entries if entry.kind in kinds and entry.at <= until]

    def _add(self, entry: JournalEntry) -> None:
        self.entries.append(entry)
        self._by_key[entry.key] = entry

    def close(self) -> None:
        """Leaves a single file if no other process reads it."""
        if self._database is not None:
            with suppress(sqlite3.Error):
                self._database.execute("PRAGMA journal_mode = DELETE")
            self._database.close()
            self._database = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def stored(content: object) -> Any:
    """The content as it is read back."""
    return json.loads(canonical(content))


def rounded(content: object) -> Any:
    """The content with nine digits of each number: another processor may compute other last digits."""
    return json.loads(canonical(content), parse_float=lambda digits: f"{float(digits):.9g}")


def failure(file: Path, error: sqlite3.Error) -> Exception:
    """The exception for an error of the file: `ConfigError` if it is not a journal, else `OSError`."""
    if isinstance(error, sqlite3.OperationalError) and "no such" not in str(error):
        return OSError(errno.EIO, str(error), str(file))
    return ConfigError(f"{file} is not a journal of this version ({error}): restore the file from a copy")


# ---- studies --------------------------------------------------------------------------------------------------------


class StudyLog(StudyJournal):
    """The journal of a study, and the state that its entries add up to."""

    def __init__(self, file: Path | None = None, **options: Any) -> None:
        self.study: Study | None = None
        self.trials: dict[str, Trial] = {}
        """By id, every trial with a launch intent."""
        self.attempts: dict[str, int] = {}
        """Number of launches by trial id."""
        self.outcomes: dict[str, list[Outcome]] = {}
        """By trial id, one outcome per ended launch."""
        self.diagnoses: dict[str, list[Diagnosis]] = {}
        """By trial id."""
        self.decisions: dict[str, object] = {}
        """By name. A decision never changes."""
        super().__init__(file, **options)

    def open_study(self, study: Study) -> None:
        """Fixes the study. Raises `ConfigError` if the log belongs to another study."""
        if self.study is None:
            self.entry("study", study.to_json())
        elif self.study.id != study.id:
            ours, other = stored(self.study.to_json()), stored(study.to_json())
            names = ", ".join(sorted(name for name in {*ours, *other} if ours.get(name) != other.get(name)))
            raise ConfigError(
                f"this journal belongs to study {self.study.id} ({self.study.topic!r}), not to {study.id}: they differ "
                f"in {names}. A study is fixed before its data: restore study.json, or plan the changed one in a new "
                "folder"
            )

    def decide(self, name: str, content: object, *, kind: Literal["decision", "finding"] = "decision") -> None:
        """Records a decision once. Raises `ConfigError` if it differs from the recorded one in nine digits."""
        content = stored(content)
        if name not in self.decisions:
            self.entry(kind, {"name": name, "content": content})
        elif rounded(self.decisions[name]) != rounded(content):
            raise ConfigError(
                f"decision {name!r} was {canonical(self.decisions[name])} and would now be {canonical(content)}: the "
                "code changed since; finish the study with the AgentJet version that started it"
            )

    def _add(self, entry: JournalEntry) -> None:
        super()._add(entry)
        body = entry.content
        match entry.kind:
            case "study":
                self.study = Study.from_json(body)
            case "intent":
                trial = Trial.from_json(body["trial"])
                self.trials[trial.id] = trial
                self.attempts[trial.id] = self.attempts.get(trial.id, 0) + 1
            case "ack":
                pass  # written by earlier versions after a launch
            case "outcome":
                outcome = Outcome.from_json(body)
                self.outcomes.setdefault(outcome.trial, []).append(outcome)
            case "diagnosis":
                diagnosis = Diagnosis.from_json(body)
                self.diagnoses.setdefault(diagnosis.trial, []).append(diagnosis)
            case "decision" | "finding":
                self.decisions[body["name"]] = body["content"]
            case _:
                raise ConfigError(f"journal entry of kind {entry.kind!r}: written by another version; use that one")


@contextmanager
def copied(file: Path | None) -> Iterator[StudyLog]:
    """An empty log whose entries are written to the file, unless it has them: a study is conducted again whole."""
    with StudyJournal(file) as journal:

        def copy(entry: JournalEntry) -> None:
            if entry.number > len(journal.entries):
                journal.entry(entry.kind, entry.content, entry.because, key=entry.key)

        yield StudyLog(notify=copy)


def read_log(file: Path) -> StudyLog:
    """Reads the log of a study, also while another process writes it. Empty without a file. Raises `ConfigError`."""
    if not file.exists():
        return StudyLog()
    with StudyLog(file, writer=False) as log:
        return log


@dataclass(frozen=True)
class StudyFolder:
    """The files of a study: `study.json`, `plan.md`, `study.sqlite`, the runner's folders and the report."""

    path: Path

    @property
    def journal(self) -> Path:
        return self.path / "study.sqlite"

    def log(self) -> StudyLog:
        """Returns the log of the study, empty before its first entry. Raises `ConfigError`."""
        return read_log(self.journal)

    def check_new(self) -> None:
        """Raises `ConfigError` if the folder holds a plan or a study's data."""
        if self.log().study is not None:
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
        if (self.path / "journal.jsonl").exists():
            raise ConfigError(f"{self.path} holds a study of AgentJet 0.1: finish and report it with that version")
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except OSError:
            raise ConfigError(
                f"{self.path} has no study.json: name the folder of a study, or plan one with `agentjet research new`"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file} is not valid JSON: {error}") from None
        return Study.from_json(content)


# ---- campaigns ------------------------------------------------------------------------------------------------------

NOTEBOOK = "notebook.sqlite"
START = "start.lock"
"""A file that a killed start leaves."""
INBOX = "inbox"
DECIDED = "all claims are decided"
"""Reason for the end of a topic without open claims."""
AGAIN = "the subject again"
"""Why the subject runs with a second seed."""
HUMAN = ("note", "veto", "budget", "reopen")
"""Kinds of entries that people wrote."""
DAY = 86400.0


@dataclass(frozen=True)
class HumanMessage(Record):
    """A remark of people, a veto, more budget, or that an ended campaign goes on."""

    kind: Literal["note", "veto", "budget", "reopen"]
    text: str = ""
    """The remark, or the name of an intervention or of an arm."""
    runs: float = 0.0
    hours: float = 0.0
    """Added to the budget, in its unit."""

    def __post_init__(self) -> None:
        needs = {"note": "give the remark", "veto": "give the name of a proposal"}.get(self.kind, "")
        refuse(bool(needs and not self.text.strip()), f"the {self.kind} is empty: {needs}")
        refuse(
            len(self.text) > LONGEST_NOTE,
            f"the {self.kind} has {len(self.text):,} characters: give at most {LONGEST_NOTE:,}",
        )
        odd = "\0" in self.text or self.text != self.text.encode("utf-8", "replace").decode()
        refuse(odd, f"the {self.kind} is not valid text: give UTF-8")
        refuse(min(self.runs, self.hours) < 0, "the added budget is negative: a budget only grows")


class Inbox:
    """Messages that wait for a campaign: a file each, in the order of their names. Any process may add one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / INBOX
        self.foreign: dict[str, str] = {}
        """By name, why a file cannot be used."""

    def put(self, message: HumanMessage) -> None:
        self.path.mkdir(exist_ok=True)
        write_whole(self.path / f"{time.time_ns():020d}-{os.getpid()}.json", canonical(message.to_json()))

    def waiting(self) -> dict[str, HumanMessage]:
        """Messages by their names. Other files stay where they are."""
        found = {}
        for path in sorted(self.path.glob("[!.]*")):  # a file that is being written begins with a dot
            try:
                refuse(not path.is_file() or path.stat().st_size > 10 * LONGEST_NOTE, "it is not a small file")
                found[path.name] = HumanMessage.from_json(json.loads(path.read_text(encoding="utf-8")))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, RecursionError, ConfigError) as error:
                self.foreign[path.name] = str(error)
        return found

    def remove(self, name: str) -> None:
        with suppress(OSError):  # the notebook has it, so that it is not taken twice
            (self.path / name).unlink()


class Notebook(StudyJournal):
    """The journal of a campaign, in its folder `path`. Raises `ConfigError`, also without a campaign to read."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.inbox = path, Inbox(path)
        if not options.get("writer", True) and not (path / NOTEBOOK).exists():
            raise ConfigError(f"{path}: there is no campaign in this folder (no {NOTEBOOK})")
        super().__init__(path / NOTEBOOK, **options)

    def ending(self, until: float = math.inf) -> JournalEntry | None:
        """The entry of the end; None if the campaign goes on, or was reopened since."""
        last = self.of("ended", "reopen", until=until)[-1:]
        return last[0] if last and last[0].kind == "ended" else None

    def over(self) -> JournalEntry | None:
        """The same, unless a message to reopen it waits."""
        waits = any(message.kind == "reopen" for message in self.inbox.waiting().values())
        return None if waits else self.ending()

    def budget(self, until: float = math.inf) -> tuple[str, float]:
        """Unit and size of the budget, with what people added."""
        given = self.entries[0].content["question"]["budget"]
        [(unit, most)] = [(unit, most) for unit, most in given.items() if most]
        return unit, most + math.fsum(added.content[unit] for added in self.of("budget", "reopen", until=until))

    def check(self, message: HumanMessage) -> None:
        """Raises `ConfigError` for a message that this campaign cannot take."""
        refuse(not self.entries, f"{self.path}: the campaign has just begun: try again in a minute")
        over, folder = self.over(), shlex.quote(str(self.path))
        refuse(
            over is not None and message.kind != "reopen",
            f"{self.path}: the campaign has ended: first use agentjet research reopen {folder}",
        )
        refuse(
            over is None and message.kind == "reopen",
            f"{self.path}: the campaign has not ended, or is reopened already: continue it with agentjet research "
            f"resume {folder}, or give it more with agentjet research budget {folder} --add",
        )
        unit, _ = self.budget()
        other, example = (message.hours, "20runs") if unit == "runs" else (message.runs, "12h")
        refuse(other > 0, f"--add: the budget of this campaign is in {unit}: give {unit}, such as {example}")
        refuse(
            over is not None and over.content["score"] is None,
            f"{self.path}: no run of the subject has a score: mend the subject, and start with another --out",
        )
        refuse(
            over is not None and over.content["reason"] == DECIDED,
            f"{self.path}: {DECIDED}: ask another question, with another --out",
        )

    @property
    def hours_planned(self) -> float:
        """Hours that a language model took for the plan of the topic."""
        planned = (self.entries[0].content if self.entries else {}).get("planned") or {}
        return float(planned.get("asked", {}).get("used", {}).get("hours", 0.0))

    def spending(self, until: float = math.inf) -> dict[str, float]:
        """Full runs and hours of work, those of proposers included, up to a time."""
        runs = [(entry.content["cost"], entry.content["hours"]) for entry in self.of("observed", until=until)]
        studies = [
            (entry.content["spent"], entry.content["hours"]) for entry in self.of("learned", "ablated", until=until)
        ]
        asked = [(0.0, entry.content.get("hours", 0.0)) for entry in self.of("intent", until=until)]
        every = [*runs, *studies, *asked]
        hours = math.fsum(hours for _, hours in every) + self.hours_planned
        return {"runs": math.fsum(cost for cost, _ in every), "hours": hours}

    def names(self) -> set[str]:
        """Names of the proposals and of the arms so far."""
        arms = [arm["name"] for each in self.of("study", "ablation") for arm in each.content["study"]["arms"]]
        return {*arms, *(each.content["name"] for each in self.of("hypothesis"))}

    def standing(self, day: int = 0) -> dict[str, Any]:
        """Tries, findings and spending: now, or at the end of a day. Raises `ConfigError` for a day to come."""
        started, until = self.known("started"), math.inf
        if started is None:
            return {"stage": "begun"}
        if day:
            until = started.at + day * DAY
            over = int((time.time() - started.at) / DAY)
            refuse(day > over, f"--day {day}: {over} days of this campaign are over; omit --day for the present")
        steps = {e.number: ": ".join(step) for e in self.entries if e.at <= until and (step := described(e))}
        ran = {entry.content["trial"]["arm"] for entry in self.of("observed", until=until)}
        ended, learned = self.ending(until), [entry.content for entry in self.of("learned", until=until)]
        present = "working" if self.has_writer() else "interrupted; agentjet research resume continues it"
        away = [steps[entry.number] for entry in self.of("intent") if entry.number in steps]
        spent = self.spending(until)
        unit, most = self.budget(until)
        asked = math.fsum(entry.content.get("hours", 0.0) for entry in self.of("intent", until=until))
        asked += self.hours_planned
        people = [f"{steps[entry.number]} (#{entry.number})" for entry in self.of(*HUMAN, until=until)]
        return {
            "topic": started.content["question"]["topic"],
            "stage": f"ended: {ended.content['reason']}" if ended else f"the end of day {day}" if day else present,
            "tried": [
                each.content["name"] for each in self.of("hypothesis", until=until) if each.content["commit"] in ran
            ],
            "found": [each["meaning"] for each in learned if each["accepted"] or each["verdict"] == "answered"],
            "ruled out": [
                each["meaning"] for each in learned if each["verdict"] in ("refuted", "practically_equivalent")
            ],
            "open": [each["meaning"] for each in learned if each["verdict"] == "inconclusive"],
            "refused": len(self.of("refused", until=until)),
            **({"away": list(dict.fromkeys(away))} if away else {}),
            **({"people": people} if people else {}),
            "newest": [*steps.values()][-1],
            "spent": f"{spent['runs']:.1f} full runs, {spent['hours']:.1f} h (proposers {asked:.1f} h)",
            "left": f"{max(0.0, most - spent[unit]):.1f} {unit}",
        }


STEPS: Mapping[str, tuple[str, str]] = {
    "started": ("began", "asks"),
    "refused": ("refused a proposal", "reason"),
    "study": ("fixed a study, before its data", "name"),
    "ablation": ("fixed a study of the parts, before its data", "name"),
    "learned": ("learned", "meaning"),
    "ablated": ("learned", "meaning"),
    "edited": ("note", "meaning"),
    "followed": ("followed up", "reason"),
    "note": ("note by people", "text"),
    "veto": (VETOED, "text"),
    "ended": ("ended", "reason"),
}
"""By kind of an entry, the step, and the field with its result."""


def described(entry: JournalEntry) -> tuple[str, str] | None:
    """The step of an entry and its result; None for entries about the machinery."""
    content = entry.content
    match entry.kind:
        case "intent" if content.get("away"):
            return f"{proposer_of(entry)} did not answer", f"{content['away']}; the next proposer goes on"
        case "observed":
            return f"observed {content['trial']['arm'][:8]} ({content['why']})", outcome_of(content)
        case "hypothesis":
            return f"proposed by {content['origin']}: {content['name']}", content["why"] or "no reason was given"
        case "screened":
            short = [
                f"{each['name']} {each['score']:.3g}" for each in content.get("short", ()) if each["score"] is not None
            ]
            gains = "; ".join(
                f"{each['name']} {each['gain']:+.3g}"
                + (f" ({each['at_start']:+.3g} at step 0)" if each.get("at_start") is not None else "")
                for each in content["full"]
            )
            result = f"gain of one full run: {gains}" if gains else "no full run came back"
            return "screened", f"{result} (scores after a third: {'; '.join(short)})" if short else result
        case "budget" | "reopen":
            added = ", ".join(f"{content[unit]:g} more {unit}" for unit in ("runs", "hours") if content[unit])
            return "reopened" if entry.kind == "reopen" else "added to the budget", added or "with the budget as it was"
        case "intent" | "parts":
            return None
        case kind if kind in STEPS:
            step, result = STEPS[kind]
            return step, content[result]
        case kind:  # of another version
            said = [content[name] for name in ("text", "meaning", "reason") if isinstance(content.get(name), str)]
            return (kind, said[0]) if said else None


def proposer_of(asked: JournalEntry) -> str:
    """Name of the proposer that was asked."""
    # Notebooks of earlier versions have it in the key only.
    return asked.content.get("proposer") or asked.key.partition(" asked ")[2]


def outcome_of(observed: Mapping[str, Any]) -> str:
    run = observed["outcome"]
    if run["score"] is None:  # the error of a first run is the reason for the end
        return "no score" if run["end"] == "arm_failed" and observed["why"] == "the subject" else str(run["note"])
    causes = ", ".join(sign["cause"].replace("_", " ") for sign in observed["signs"])
    first = f" ({run['curve'][0]:.3g} at step 0)" if run.get("curve") else ""
    return f"score {run['score']:.3g}{first}; shows: {causes or 'no sign'}"
