"""Compares the journal after a run with the clients' books, the forests that were learned, and the wire's notes.

The three records are independent. Everything that must be zero is a number here; the caller judges.
"""

from __future__ import annotations

import json
import os
import pickle
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from agentjet.swarm import Journal

# ---- the clients' own books: one line of JSON each, on disk before the client goes on --------------------------------


class Book:
    """Append only."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, what: str, episode: str, **more: Any) -> None:
        line = json.dumps({"what": what, "episode": episode, "at": time.time(), **more}) + "\n"
        os.write(self._file, line.encode())
        os.fsync(self._file)


@dataclass(slots=True)
class Books:
    """The records of all clients together."""

    begun: set[str] = field(default_factory=set)  # Episodes that a client was given
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)  # Answers that reached an agent, by call id
    failed_calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls that ended with an error after the last attempt of the SDK."""
    scoring: dict[str, list[float | dict[str, float]]] = field(default_factory=dict)
    """Rewards that an agent returned, whether or not they arrived."""
    finished: dict[str, float | dict[str, float]] = field(default_factory=dict)  # Rewards that the server acknowledged
    failed: set[str] = field(default_factory=set)  # Episodes whose agent raised
    aborted: set[str] = field(default_factory=set)  # Aborts that the server acknowledged


def read(folder: Path) -> Books:
    """All books of a folder. A line that a killed client did not finish is ignored."""
    books = Books()
    for path in sorted(folder.glob("*.jsonl")):
        for line in _lines(path):
            _enter(books, line)
    return books


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def _enter(books: Books, line: dict[str, Any]) -> None:
    episode = line["episode"]
    match line["what"]:
        case "begun":
            books.begun.add(episode)
        case "call":
            books.calls[line["call"]] = line
        case "call failed":
            books.failed_calls.append(line)
        case "scoring":
            books.scoring.setdefault(episode, []).append(line["reward"])
        case "finished":
            books.finished[episode] = line["reward"]
        case "failed":
            books.failed.add(episode)
        case "aborted":
            books.aborted.add(episode)


# ---- the comparison --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """An episode as the journal ends with it."""

    id: str
    group_id: int | None
    reward: float | dict[str, float] | None  # In a run with policies, the reward of each
    num_calls: int | None
    finished: float | None
    lost_as: str | None  # `aborted` or `expired`
    reason: str | None
    lost: float | None
    dropped: str  # Why a finished episode will not train, else empty
    batch: int | None
    learned: int | None


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of comparing the records."""

    begun: int
    finished: int
    trained: int
    waiting: int
    dropped: dict[str, int]  # Finished, in a group that was dropped; by reason
    unscored: dict[str, int]  # Aborted, expired and live
    lost: list[str]  # Acknowledged and not in the journal, or otherwise there
    trained_twice: list[str]
    failures_scored: list[str]  # A reward that no agent returned
    two_effects: list[str]  # Keys under which more than one episode was begun, and episodes with more than one key
    batches: int

    @classmethod
    def total(cls, audits: Sequence[Audit]) -> Audit:
        """The audit of several runs together."""

        def added(values: list[Any]) -> Any:
            if isinstance(values[0], dict):
                return dict(sum(map(Counter, values), Counter[str]()))
            return sum(values, type(values[0])())

        return cls(**{one.name: added([getattr(audit, one.name) for audit in audits]) for one in fields(cls)})

    @property
    def aborted(self) -> int:
        """Finished episodes that will not train, each for a reason that is counted."""
        return sum(self.dropped.values())


def rows(journal: Path) -> dict[str, Row]:
    """Every episode."""
    with sqlite3.connect(journal) as db:
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        db.row_factory = sqlite3.Row
        episodes = db.execute("SELECT * FROM episodes ORDER BY seq").fetchall()
    with closing(Journal.open_read_only(journal)) as opened:
        for schema in opened.file.segments:
            assert opened.file.db.execute(f"PRAGMA {schema}.integrity_check").fetchone()[0] == "ok"
        batches = {episode: batch.id for batch in opened.batches(0) for episode in batch.episode_ids}
    return {episode["id"]: _row(episode, batches.get(episode["id"])) for episode in episodes}


def _row(episode: sqlite3.Row, batch: int | None) -> Row:
    finished, lost = episode["status"] == "finished", episode["status"] in ("aborted", "expired")
    return Row(
        id=episode["id"],
        group_id=episode["group_id"],
        reward=(json.loads(episode["by_role"]) or episode["reward"]) if finished else None,
        num_calls=episode["num_calls"] if finished else None,
        finished=episode["ended"] if finished else None,
        lost_as=episode["status"] if lost else None,
        reason=episode["reason"] if lost else None,
        lost=episode["ended"] if lost else None,
        dropped=episode["dropped"],
        batch=batch,
        learned=episode["trained_in"],
    )


def audit(journal: Path, books: Books, forests: Path, answers: Mapping[str, set[str]]) -> Audit:
    """Compares the journal of a server that has ended with the other records."""
    episodes = rows(journal)
    finished = [row for row in episodes.values() if row.reward is not None]
    dropped = Counter(row.dropped for row in finished if row.dropped)
    unscored = Counter(row.lost_as or "live" for row in episodes.values() if row.reward is None)
    learned = _learned(journal)
    return Audit(
        begun=len(episodes),
        finished=len(finished),
        trained=sum(row.learned is not None for row in finished),
        waiting=sum(row.learned is None and not row.dropped for row in finished),
        dropped=dict(dropped),
        unscored=dict(unscored),
        lost=_lost(episodes, books) + _lost_calls(journal, episodes, books),
        trained_twice=_trained_twice(episodes, forests, learned) + _operations_out_of_order(journal),
        failures_scored=[row.id for row in finished if row.reward not in books.scoring.get(row.id, [])]
        + sorted(books.failed & {row.id for row in finished}),
        two_effects=_two_effects(answers),
        batches=len(learned),
    )


def _learned(journal: Path) -> list[int]:
    with sqlite3.connect(journal) as db:
        return [row[0] for row in db.execute("SELECT id FROM batches WHERE metrics IS NOT NULL ORDER BY id")]


def _lost(episodes: Mapping[str, Row], books: Books) -> list[str]:
    """Acknowledged begins, rewards and aborts that the journal does not have."""
    gone = [f"begin of {id}" for id in books.begun if id not in episodes]
    known = {id: row.reward for id, row in episodes.items()}
    gone += [f"reward of {id}" for id, reward in books.finished.items() if known.get(id) != reward]
    gone += [f"abort of {id}" for id in books.aborted if id not in episodes or episodes[id].lost_as is None]
    return gone


def _lost_calls(journal: Path, episodes: Mapping[str, Row], books: Books) -> list[str]:
    """Answers that an agent read: recorded, as long as the journal keeps calls; counted, once it need not. A finished
    episode has as many calls as it counts.
    """
    with closing(Journal.open_read_only(journal)) as opened:  # Fronts have files of their own.
        kept = dict(opened.file.db.execute("SELECT id, episode_id FROM calls"))
    heard: Counter[str] = Counter(call["episode"] for call in books.calls.values())
    gone = [
        f"call {call} of {line['episode']}"
        for call, line in books.calls.items()
        if call not in kept and _must_have_calls(episodes.get(line["episode"]))
    ]
    for id, number in heard.items():
        recorded = episodes[id].num_calls if id in episodes else 0
        if recorded is not None and recorded < number:
            gone.append(f"{number - recorded} calls of {id}")
    stored = Counter(kept.values())
    for id, row in episodes.items():
        if row.num_calls is not None and _must_have_calls(row) and row.num_calls != stored[id]:
            gone.append(f"{row.num_calls} calls of {id}, which has {stored[id]}")
    return gone


def _must_have_calls(row: Row | None) -> bool:
    """Live, or finished and waiting: nothing has let its calls go."""
    return row is not None and row.lost_as is None and row.batch is None and not row.dropped


def _trained_twice(episodes: Mapping[str, Row], forests: Path, learned: list[int]) -> list[str]:
    """By the forests that the surviving batches were learned from, not by the journal's own word."""
    times: Counter[str] = Counter()
    for batch_id in learned:
        kept: dict[str, Any] = pickle.loads((forests / f"{batch_id:06d}.pickle").read_bytes())
        times.update(kept["members"])
    twice = [id for id, number in times.items() if number > 1]
    recorded = {id for id, row in episodes.items() if row.learned is not None}
    return twice + sorted(recorded ^ set(times))


def _operations_out_of_order(journal: Path) -> list[str]:
    """Operations of the journal that are not a gradient and then its update, numbered on from 0, batch after batch.

    All policies of the run must have the same ones.
    """
    with sqlite3.connect(journal) as db:
        rows = list(db.execute("SELECT policy, number, kind, batch_id FROM operations ORDER BY policy, number"))
    by_policy: dict[str, list[tuple[int, str, int]]] = {}
    for policy, *operation in rows:
        by_policy.setdefault(policy, []).append(tuple(operation))
    wrong = []
    for policy, operations in by_policy.items():
        before = -1
        for place, (number, kind, batch_id) in enumerate(operations):
            expected = ("forward_backward", "optim_step")[place % 2]
            if (number, kind) != (place, expected) or batch_id < before:
                wrong.append(f"operation {number} of {policy} ({kind} of batch {batch_id})")
            before = batch_id
        if operations != next(iter(by_policy.values())):
            wrong.append(f"operations of {policy} are not those of the other policies")
    return wrong


def _two_effects(answers: Mapping[str, set[str]]) -> list[str]:
    keys: Counter[str] = Counter(id for ids in answers.values() for id in ids)
    return [key for key, ids in answers.items() if len(ids) > 1] + [id for id, number in keys.items() if number > 1]
