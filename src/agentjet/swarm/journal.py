"""`Journal`: the SQLite file that holds every fact that must survive a crash. One writer at a time.

The journal stores and finds; the rules are elsewhere. Each episode and each group has one row with its present value.
Times are Unix seconds. Bodies are JSON. Retention, by `unneeded`: calls that neither a replay nor a kept transcript
needs, idempotency keys older than `IDEMPOTENCY_SECONDS`, all events except the newest `EVENTS_KEPT`, evaluations and
rollbacks, and all settled episodes except the newest `EPISODES_KEPT` are deleted, and statistics of tasks except those
of the newest `TASKS_KEPT` groups. Batches, operations and metrics are kept.

The body of a call may have megabytes. Facts about calls that the event loop needs are columns next to it, and an index
holds them all, so that they are read without the bodies.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from agentjet import database
from agentjet.config import ModelConfig
from agentjet.errors import ConfigError, NotFound, Unprocessable
from agentjet.protocol import EvaluationView, Event, newest_held_out
from agentjet.protocol.records import REWARD, EpisodeQuery
from agentjet.recipes.rollout import TaskStats
from agentjet.swarm import origin
from agentjet.swarm.journal_file import AddedColumns, JournalFile
from agentjet.swarm.origin import BRANCHED_FROM, Origin
from agentjet.swarm.state import (
    NOT_NEEDED,
    NOT_NEEDED_REASONS,
    Batch,
    EpisodeRecord,
    Group,
    JobSettings,
    State,
    new_episode_id,
)
from agentjet.types import Call, CheckpointStamp

IDEMPOTENCY_SECONDS = 86_400.0
"""Longer than any client repeats a request."""
EVENTS_KEPT = 100_000
EPISODES_KEPT = 2_000_000
_OF_REASON = " OR ".join(f"body ->> 'reason' GLOB '{start}:*'" for start in NOT_NEEDED_REASONS)
IS_NOT_NEEDED = f"(status = 'aborted' AND ({_OF_REASON}))"
"""SQL of `EpisodeRecord.is_not_needed`."""
TASKS_KEPT = 1_000_000
SLICE_ROWS = 100
SLICE_BYTES = 2 * 2**20
"""Most rows, and most bytes of calls, that one transaction deletes: a few milliseconds. A single row may exceed it."""

ORDERS = {
    "newest": ("seq", "<"),
    "oldest": ("seq", ">"),
    "reward": (REWARD, ">"),
    "-reward": (REWARD, "<"),
    "-num_tokens": ("json_extract(body, '$.num_tokens')", "<"),
    "-num_calls": ("json_extract(body, '$.num_calls')", "<"),
}
"""SQL of each order of episodes, and how it goes on. Among equals, newer episodes come first."""

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE episodes (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL,
    settled INTEGER NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX episodes_by_status ON episodes (status, seq);
CREATE INDEX unsettled_episodes ON episodes (seq) WHERE NOT settled;
CREATE INDEX episodes_of_group ON episodes (json_extract(body, '$.group_id'));

CREATE TABLE groups (id INTEGER PRIMARY KEY, body TEXT NOT NULL);

CREATE TABLE tasks (
    seq INTEGER PRIMARY KEY,
    task_set TEXT NOT NULL,
    task_id TEXT NOT NULL,
    body TEXT NOT NULL,
    UNIQUE (task_set, task_id)
);

CREATE TABLE instances (
    number INTEGER PRIMARY KEY,
    client_id TEXT NOT NULL,
    instance_id TEXT NOT NULL,
    UNIQUE (client_id, instance_id)
);

CREATE TABLE calls (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    episode_id TEXT NOT NULL,
    undelivered INTEGER NOT NULL,
    body TEXT NOT NULL
);

CREATE TABLE transcripts (
    seq INTEGER PRIMARY KEY,
    episode_id TEXT NOT NULL UNIQUE,
    reason TEXT NOT NULL,
    most INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL
);

CREATE TABLE batches (id INTEGER PRIMARY KEY, body TEXT NOT NULL, metrics TEXT);

CREATE TABLE operations (
    policy TEXT NOT NULL,
    number INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('forward_backward', 'optim_step')),
    batch_id INTEGER NOT NULL,
    PRIMARY KEY (policy, number)
) WITHOUT ROWID;
CREATE INDEX operations_of_batch ON operations (batch_id);

CREATE TABLE checkpoints (policy_version INTEGER PRIMARY KEY, digest TEXT NOT NULL);

CREATE TABLE idempotency (
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    episode_id TEXT NOT NULL,
    created REAL NOT NULL,
    PRIMARY KEY (scope, key)
) WITHOUT ROWID;

CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    time REAL NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX events_of_kind ON events (kind, seq) WHERE kind IN ('evaluation', 'rollback');
"""
ADDED_COLUMNS: AddedColumns = {
    "batches": {"fingerprint": "TEXT"},
    "calls": {
        "role": "TEXT",
        "after_call": "TEXT",
        "retry_of": "TEXT",
        "untrained": "TEXT",
        "num_tokens": "INTEGER",
        "num_bytes": "INTEGER",
    },
}
"""Nullable columns that journals of schema 14 get when they are opened. A call of before has no role."""
INDEXES = """
CREATE INDEX IF NOT EXISTS facts_of_calls ON calls
    (episode_id, seq, id, undelivered, role, after_call, retry_of, untrained, num_tokens, num_bytes);
CREATE INDEX IF NOT EXISTS idempotency_by_age ON idempotency (created);
DROP INDEX IF EXISTS calls_of_episode;
"""
"""Indexes of the added columns, and those that older journals lack or have instead."""
_NUM_BYTES = "COALESCE(num_bytes, LENGTH(CAST(body AS BLOB)))"

RecordedCall = tuple[Call, tuple[bytes, ...], tuple[bytes, ...]]
"""A call with the encoded bytes of each token of its suffix and of its completion."""
_CALL = TypeAdapter[RecordedCall](
    RecordedCall, config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants")
)
_METRICS = TypeAdapter(dict[str, Any])
"""Reads the metrics of a step in a quarter of the time of `json.loads`."""
_EPISODE, _GROUP, _STATE = TypeAdapter(EpisodeRecord), TypeAdapter(Group), TypeAdapter(State)
_BATCH, _JOB_SETTINGS, _TASK = TypeAdapter(Batch), TypeAdapter(JobSettings), TypeAdapter(TaskStats)


class CallFacts(NamedTuple):
    """The facts about a call that decide if it trains: see `Call`."""

    id: str
    role: str
    after: str | None
    retry_of: str | None
    untrained: str
    num_tokens: int
    """Length of the completion."""

    @classmethod
    def of(cls, call: Call) -> Self:
        return cls(call.id, call.role, call.after, call.retry_of, call.untrained, len(call.completion))


class Slice(NamedTuple):
    """Rows of one table that one transaction deletes."""

    table: str
    condition: str
    """SQL of one row."""
    keys: Sequence[tuple[Any, ...]]
    """The values of the condition, of each row."""
    num_bytes: int = 0
    """Size of the deleted calls."""


def encode_call(call: Call, encoded_suffix: Sequence[bytes], encoded_completion: Sequence[bytes]) -> bytes:
    """Returns the body of a call with the encoded bytes of each token."""
    return _CALL.dump_json((call, tuple(encoded_suffix), tuple(encoded_completion)))


def to_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class StepRecord(NamedTuple):
    """A learned batch."""

    version: int
    """The policy version after it."""
    composed: float
    """When its batch was composed."""
    metrics: dict[str, float]


class EpisodePage(NamedTuple):
    """Episodes in the order that was asked for."""

    episodes: Sequence[EpisodeRecord]
    next: str | None
    """The id of the last one if others follow, else None."""
    total: int | None
    """Number of matches on all pages, if asked for."""


class BatchRecord(NamedTuple):
    """A batch, learned or not, without its recipe, which may be a plug-in that this machine does not have."""

    id: int
    groups: tuple[tuple[str, ...], ...]
    job: Mapping[str, Any]
    composed: float
    metrics: Mapping[str, float] | None
    """None until it is learned."""

    @property
    def state(self) -> Literal["pending", "learned"]:
        return "pending" if self.metrics is None else "learned"


class Journal:
    """Typed rows in and out of a journal file. Construct it with `Journal.open`."""

    def __init__(self, file: JournalFile) -> None:
        self.file = file
        self.path = file.path
        self._checked_origin: Origin = {}

    @classmethod
    def open(cls, path: Path, *, models: Mapping[str, ModelConfig] | None = None) -> Self:
        """Open or create a journal. `models` are those of the policies; `policy` alone if the settings name none.

        Raises `ConfigError` if another process has it open, the disk refuses it, it has another schema, or it has
        other policies or another origin than `models`.
        """
        journal = cls(JournalFile.open(path, SCHEMA, ADDED_COLUMNS, INDEXES))
        if models is None:
            return journal
        try:
            if journal.is_unused:
                journal._db.execute("DELETE FROM meta WHERE key = 'origin'")
            elif journal.origin:  # Recorded before the first call. Without one, no policy was ever up.
                origin.check_policies(journal.origin, origin.named_policies(models), path.parent)
            journal.check_origin(origin.of_settings(models))
        except (ConfigError, sqlite3.Error):
            journal.close()
            raise
        return journal

    @classmethod
    def open_read_only(cls, path: Path) -> Self:
        """See `JournalFile.open_read_only`."""
        return cls(JournalFile.open_read_only(path, SCHEMA, ADDED_COLUMNS))

    @contextmanager
    def reading(self) -> Iterator[Self]:
        """The same journal on a read-only connection, for another thread. It reads committed changes only."""
        with closing(database.connect(self.path, "mode=ro")) as connection:
            yield type(self)(JournalFile(self.path, connection))

    def close(self) -> None:
        """Close and unlock the file. Idempotent."""
        self.file.close()

    @property
    def _db(self) -> sqlite3.Connection:
        return self.file.db

    def _one(self, query: str, *values: Any) -> Any:
        """The first column of the first row, or None."""
        row = self._db.execute(query, values).fetchone()
        return None if row is None else row[0]

    # ---- the run -------------------------------------------------------------------------------------------

    @property
    def origin(self) -> Origin:
        recorded: dict[str, str | int] = json.loads(self.file.meta("origin", "{}"))
        return recorded

    @property
    def is_unused(self) -> bool:
        """True before the first episode. The origin may still change, because a setting may have been mistyped."""
        return not self.read_state().num_episodes and BRANCHED_FROM not in self.origin

    def branch(self, recorded: Origin, branched_from: str) -> None:
        """Start a new journal with the origin of another one, and record which one."""
        self.file.set_meta("origin", to_json({**recorded, BRANCHED_FROM: branched_from}))

    def check_origin(self, given: Origin) -> None:
        """Raises `ConfigError` if a part of the origin differs from the recorded one."""
        origin.check(self.origin, given, self.path.parent)
        self._checked_origin = {**self._checked_origin, **given}

    def record_origin(self) -> None:
        """Store the checked origin, because the policies were loaded with it."""
        self.file.set_meta("origin", to_json({**self.origin, **self._checked_origin}))

    def control_tokens(self) -> dict[str, dict[int, str]]:
        """The names of control tokens by policy; empty before the policies were up once."""
        recorded = json.loads(self.file.meta("control_tokens", "{}"))
        return {policy: {int(token): name for token, name in names.items()} for policy, names in recorded.items()}

    def put_control_tokens(self, names: Mapping[str, Mapping[int, str]]) -> None:
        """Store the names of control tokens by policy, so that transcripts can be read without a tokenizer."""
        self.file.set_meta("control_tokens", json.dumps(names, ensure_ascii=False))

    def context_lengths(self) -> dict[str, int]:
        """The context of each policy in tokens; empty before the policies were up once."""
        recorded: dict[str, int] = json.loads(self.file.meta("context_lengths", "{}"))
        return recorded

    def put_context_lengths(self, lengths: Mapping[str, int]) -> None:
        """Store the context of each policy, so that answers that filled it can be counted without a model."""
        self.file.set_meta("context_lengths", json.dumps(lengths))

    def read_state(self) -> State:
        return _STATE.validate_json(self.file.meta("state", "{}"))

    def put_state(self, state: State) -> None:
        self.file.set_meta("state", _STATE.dump_json(state).decode())

    def job_settings(self) -> JobSettings | None:
        """None before the first start. Raises `ConfigError` if they can no longer be read."""
        held = self.file.meta("job_settings", "")
        try:
            return _JOB_SETTINGS.validate_json(held) if held else None
        except ValidationError as error:
            raise self._unreadable("the stored job settings", json.loads(held).get("job"), error) from None

    def put_job_settings(self, settings: JobSettings) -> None:
        self.file.set_meta("job_settings", _JOB_SETTINGS.dump_json(settings).decode())

    def checkpoint_digest(self, policy_version: int) -> str | None:
        """Digest of the checkpoint of that version; None if none was recorded."""
        found: str | None = self._one("SELECT digest FROM checkpoints WHERE policy_version = ?", policy_version)
        return found

    def put_checkpoint(self, stamp: CheckpointStamp) -> None:
        """Record a checkpoint as the one of its version."""
        self._db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?)", (stamp.policy_version, stamp.digest))

    # ---- episodes and groups -------------------------------------------------------------------------------

    def put_episode(self, episode: EpisodeRecord) -> None:
        """Store a new or changed episode."""
        row = (episode.seq, episode.id, episode.status, episode.is_settled, _EPISODE.dump_json(episode).decode())
        self._db.execute(
            "INSERT INTO episodes VALUES (?, ?, ?, ?, ?) ON CONFLICT (seq) DO UPDATE "
            "SET status = excluded.status, settled = excluded.settled, body = excluded.body",
            row,
        )

    def episode(self, episode_id: str) -> EpisodeRecord | None:
        body = self._one("SELECT body FROM episodes WHERE id = ?", episode_id)
        return None if body is None else self.episode_of(body)

    def known_episode(self, episode_id: str) -> EpisodeRecord:
        """An episode. Raises `NotFound`."""
        episode = self.episode(episode_id)
        if episode is None:
            raise NotFound(f"There is no episode {episode_id!r} in this run.", code="episode_not_found")
        return episode

    def episode_of(self, body: str) -> EpisodeRecord:
        """The episode of a row."""
        return _EPISODE.validate_json(body)

    def unsettled_episodes(self) -> list[EpisodeRecord]:
        """The unsettled ones, in the order they began."""
        return self._episodes("NOT settled ORDER BY seq", ())

    def episodes_of_group(self, group_id: int) -> list[EpisodeRecord]:
        """The episodes of a group, in the order they began."""
        return self._episodes("json_extract(body, '$.group_id') = ? ORDER BY seq", (group_id,))

    def members_of(self, groups: Sequence[Sequence[str]]) -> list[list[EpisodeRecord]]:
        """The episodes of each group that the journal still has. `groups` have their ids."""
        ids = json.dumps([member for group in groups for member in group])
        found = {one.id: one for one in self._episodes("id IN (SELECT value FROM json_each(?))", (ids,))}
        return [[found[member] for member in group if member in found] for group in groups]

    def find_episodes(self, query: EpisodeQuery) -> EpisodePage:
        """The episodes that match every filter of a query.

        Pages are found by key, not by offset, so a page costs the same wherever it is. Filters without an index read
        rows until the page is full. Raises `NotFound` if `before` does not exist, and `InvalidRequest` if it has no
        place in the order.
        """
        conditions, values = _conditions(query)
        key, direction = ORDERS[query.sort]
        total = None
        if query.count:
            counting = f"SELECT count(*) FROM episodes WHERE {' AND '.join(conditions)}"
            total = self._db.execute(counting, values).fetchone()[0]
        if query.before:
            conditions.append(
                f"seq {direction} :seq" if key == "seq" else f"({key} {direction} :key OR {key} = :key AND seq < :seq)"
            )
            values |= self._place(query.before, key)
        order = f"{key} {'DESC' if direction == '<' else 'ASC'}" + ("" if key == "seq" else ", seq DESC")
        found = self._episodes(
            f"{' AND '.join(conditions)} ORDER BY {order} LIMIT :limit", values | {"limit": query.limit + 1}
        )
        page = found[: query.limit]
        return EpisodePage(page, page[-1].id if len(found) > len(page) else None, total)

    def _place(self, episode_id: str, key: str) -> dict[str, Any]:
        seq = self.known_episode(episode_id).seq
        value = self._one(f"SELECT {key} FROM episodes WHERE seq = ?", seq)
        if value is None:
            message = f"before = {episode_id!r}: it has no reward, so no page of this order follows it."
            raise Unprocessable(message, code="invalid_value", param="before")
        return {"seq": seq, "key": value}

    def never_trained(self, start: float, end: float, longest: float, limit: int) -> list[EpisodeRecord]:
        """The newest training episodes that ended between two times and never train: dropped, aborted or expired ones.

        `longest` is the longest duration of an episode: ids begin with the time of the beginning.
        """
        return self._episodes(
            "id >= ? AND id < ? AND body ->> 'mode' = 'train' "
            "AND (status IN ('aborted', 'expired') OR body ->> 'dropped' != '') "
            "AND json_extract(body, '$.ended') > ? AND json_extract(body, '$.ended') <= ? ORDER BY id DESC LIMIT ?",
            (_first_id(start - longest), _first_id(end + 0.001), start, end, limit),
        )

    def _episodes(self, condition: str, values: Any) -> list[EpisodeRecord]:
        return [
            self.episode_of(body)
            for (body,) in self._db.execute(f"SELECT body FROM episodes WHERE {condition}", values)
        ]

    def put_group(self, group: Group) -> None:
        """Store a new or changed group."""
        self._db.execute("INSERT OR REPLACE INTO groups VALUES (?, ?)", (group.id, _GROUP.dump_json(group).decode()))

    def remove_group(self, group_id: int) -> None:
        self._db.execute("DELETE FROM groups WHERE id = ?", (group_id,))

    def groups(self) -> list[Group]:
        return [_GROUP.validate_json(body) for (body,) in self._db.execute("SELECT body FROM groups ORDER BY id")]

    def task(self, task_set: str, task_id: str) -> TaskStats:
        """Statistics of a task; zeros before its first group."""
        body = self._one("SELECT body FROM tasks WHERE task_set = ? AND task_id = ?", task_set, task_id)
        return TaskStats(task_set, task_id) if body is None else _TASK.validate_json(body)

    def put_task(self, task: TaskStats) -> None:
        """Store new statistics of a task, as the newest."""
        row = (task.task_set, task.task_id, _TASK.dump_json(task).decode())
        self._db.execute("INSERT OR REPLACE INTO tasks (task_set, task_id, body) VALUES (?, ?, ?)", row)

    def forget_tasks(self) -> None:
        """Forget the statistics of all tasks."""
        self._db.execute("DELETE FROM tasks")

    def add_instance(self, client_id: str, instance_id: str) -> None:
        """Record that a process of a client began an episode."""
        self._db.execute(
            "INSERT OR IGNORE INTO instances (client_id, instance_id) VALUES (?, ?)", (client_id, instance_id)
        )

    def instances(self, client_id: str) -> list[str]:
        """The processes of a client that began episodes, in the order of their first one."""
        query = "SELECT instance_id FROM instances WHERE client_id = ? ORDER BY number"
        return [str(row[0]) for row in self._db.execute(query, (client_id,))]

    # ---- calls ---------------------------------------------------------------------------------------------

    def add_call(self, call: Call, body: bytes) -> None:
        """Record a call. `body` is what `encode_call` returned for it."""
        call_id, *facts = CallFacts.of(call)
        self._db.execute(
            "INSERT INTO calls (id, episode_id, undelivered, body, role, after_call, retry_of, untrained, num_tokens, "
            "num_bytes) VALUES (?, ?, FALSE, ?, ?, ?, ?, ?, ?, ?)",
            (call_id, call.episode_id, body.decode(), *facts, len(body)),
        )

    def calls(self, episode_id: str) -> list[RecordedCall]:
        """An episode's calls in the order they were recorded, with the encoded pieces of suffix and completion."""
        rows = self._db.execute("SELECT body FROM calls WHERE episode_id = ? ORDER BY seq", (episode_id,))
        return [_CALL.validate_json(body) for (body,) in rows]

    def first_call(self, episode_id: str) -> Call | None:
        """An episode's first recorded call; None if there is none, or none any more."""
        return self._call("ORDER BY seq LIMIT 1", episode_id)

    def last_call(self, episode_id: str) -> Call | None:
        """An episode's last recorded call; None if there is none, or none any more."""
        return self._call("ORDER BY seq DESC LIMIT 1", episode_id)

    def _call(self, order: str, episode_id: str) -> Call | None:
        body = self._one(f"SELECT body FROM calls WHERE episode_id = ? {order}", episode_id)
        return None if body is None else _CALL.validate_json(body)[0]

    def call_facts(self, episode_id: str) -> list[CallFacts]:
        """Facts about an episode's calls, in the order they were recorded. Parses only calls of an older version."""
        rows = self._db.execute(
            "SELECT id, role, after_call, retry_of, untrained, num_tokens FROM calls WHERE episode_id = ? ORDER BY seq",
            (episode_id,),
        ).fetchall()
        if any(row[1] is None for row in rows):
            return [CallFacts.of(call) for call, *_ in self.calls(episode_id)]
        return [CallFacts(*row) for row in rows]

    def add_undelivered(self, call_ids: Iterable[str]) -> None:
        """Record that these answers did not reach their agent."""
        self._db.executemany("UPDATE calls SET undelivered = TRUE WHERE id = ?", [(call_id,) for call_id in call_ids])

    def undelivered(self, episode_id: str) -> frozenset[str]:
        """The episode's calls whose answer did not reach the agent, according to the transport."""
        rows = self._db.execute("SELECT id FROM calls WHERE episode_id = ? AND undelivered", (episode_id,))
        return frozenset(row[0] for row in rows)

    def keep_transcript(self, episode_id: str, reason: str, most: int) -> None:
        """Keep the calls of an ended episode beyond their replay, for people, as one of the `most` newest of a reason.
        An episode without calls is left out.
        """
        self._db.execute(
            "INSERT OR REPLACE INTO transcripts (episode_id, reason, most, num_bytes) "
            f"SELECT episode_id, ?, ?, SUM({_NUM_BYTES}) FROM calls WHERE episode_id = ? "
            "GROUP BY episode_id",
            (reason, most, episode_id),
        )

    # ---- batches -------------------------------------------------------------------------------------------

    def add_batch(self, batch: Batch) -> None:
        self.file.insert("batches", (batch.id, _BATCH.dump_json(batch).decode(), None, None))

    def batches(self, start: int, stop: int | None = None) -> list[Batch]:
        """Batches from `start` on, before `stop`, in order, learned or not."""
        query = "SELECT body FROM batches WHERE id >= ? AND id < ? ORDER BY id"
        rows = self._db.execute(query, (start, 2**62 if stop is None else stop))
        return [self._batch(body) for (body,) in rows]

    def stored_batch(self, batch_id: int) -> Callable[[], Batch]:
        """Reads a batch. The returned function makes it, without the file: its recipe may import a plug-in. It raises
        `ConfigError` if the recipe can no longer be read.
        """
        return partial(self._batch, self._one("SELECT body FROM batches WHERE id = ?", batch_id))

    def first_group(self, batch_id: int) -> tuple[str, ...]:
        """The members of a batch's first group; none without the batch. The batch's recipe is not made."""
        found = self._one("SELECT json_extract(body, '$.groups[0]') FROM batches WHERE id = ?", batch_id)
        return tuple(json.loads(found or "[]"))

    def newest_carry(self) -> dict[str, float]:
        """The `carry` of the newest batch, learned or not. The batch's recipe is not made."""
        found = self._one("SELECT json_extract(body, '$.carry') FROM batches ORDER BY id DESC LIMIT 1")
        return dict(json.loads(found or "{}"))

    def _batch(self, body: str) -> Batch:
        """Raises `ConfigError` if the batch's recipe can no longer be read."""
        try:
            return _BATCH.validate_json(body)
        except ValidationError as error:
            held = json.loads(body)
            raise self._unreadable(f"batch {held.get('id')}", held.get("job"), error) from None

    def _unreadable(self, what: str, job: Any, error: ValidationError) -> ConfigError:
        recipe = job.get("recipe") if isinstance(job, dict) else None
        name = recipe.get("name", "") if isinstance(recipe, dict) else ""
        wrong = [  # Those of `given` and of `job` are mostly the same.
            f"{'.'.join(map(str, ('job', *one['loc'][1:])))}: {one['msg'].removeprefix('Value error, ')}"
            for one in error.errors()
        ]
        return ConfigError(
            f"{self.path}: {what} (recipe {name!r}) cannot be read: "
            f"{'; '.join(dict.fromkeys(wrong))}. Start with the packages and versions "
            "that wrote it, or make a new data dir from a checkpoint (agentjet checkpoints branch)"
        )

    def remove_batches(self, start: int) -> None:
        """Delete the batches from `start` on, learned or not."""
        self._db.execute("DELETE FROM operations WHERE batch_id >= ?", (start,))
        self._db.execute("DELETE FROM batches WHERE id >= ?", (start,))

    def put_operation(self, policy: str, number: int, kind: str, batch_id: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO operations VALUES (?, ?, ?, ?)", (policy, number, kind, batch_id))

    def operations(self, policy: str) -> list[tuple[int, str, int]]:
        """All operations on a policy, in order: number, kind and batch."""
        query = "SELECT number, kind, batch_id FROM operations WHERE policy = ? ORDER BY number"
        return list(self._db.execute(query, (policy,)))

    def add_step(self, batch_id: int, metrics: Mapping[str, float]) -> None:
        """Record that a batch was learned."""
        self._db.execute("UPDATE batches SET metrics = ? WHERE id = ?", (to_json(metrics), batch_id))

    def put_fingerprints(self, batch_id: int, fingerprints: Mapping[str, int]) -> None:
        """Record the fingerprints of the weights that a batch led to, by policy."""
        self._db.execute("UPDATE batches SET fingerprint = ? WHERE id = ?", (to_json(fingerprints), batch_id))

    def fingerprints(self, batch_id: int) -> dict[str, int]:
        """The fingerprints of a learned batch; empty if an older version learned it."""
        return dict(json.loads(self._one("SELECT fingerprint FROM batches WHERE id = ?", batch_id) or "{}"))

    def step(self, batch_id: int) -> dict[str, float]:
        """The metrics of a learned batch; empty if this run did not learn it."""
        return dict(json.loads(self._one("SELECT metrics FROM batches WHERE id = ?", batch_id) or "{}"))

    def recent_steps(self, limit: int) -> dict[int, dict[str, float]]:
        """The metrics of the newest learned batches by batch, the newest last."""
        query = "SELECT id, metrics FROM batches WHERE metrics IS NOT NULL ORDER BY id DESC LIMIT ?"
        rows = self._db.execute(query, (limit,)).fetchall()
        return {batch_id: json.loads(metrics) for batch_id, metrics in reversed(rows)}

    def first_steps(self, limit: int) -> list[dict[str, float]]:
        """The metrics of the first learned batches, the newest last."""
        query = "SELECT metrics FROM batches WHERE metrics IS NOT NULL ORDER BY id LIMIT ?"
        return [json.loads(metrics) for (metrics,) in self._db.execute(query, (limit,))]

    def batch_records(self, before: int | None, limit: int) -> list[BatchRecord]:
        """The newest batches, or those before one, newest first."""
        rows = self._db.execute(
            "SELECT body, metrics FROM batches WHERE id < ? ORDER BY id DESC LIMIT ?",
            (2**62 if before is None else before, limit),
        )
        found = []
        for body, metrics in rows:
            held = json.loads(body)
            groups = tuple(map(tuple, held["groups"]))
            learned = None if metrics is None else json.loads(metrics)
            found.append(BatchRecord(held["id"], groups, held["job"], held["composed"], learned))
        return found

    def steps(self, after: int | None, limit: int, names: Collection[str] = ()) -> list[StepRecord]:
        """The oldest `limit` steps to versions above `after`, or the newest `limit`, in order.

        `names` are the metrics to return; empty for all.
        """
        order = "DESC" if after is None else "ASC"
        rows = self._db.execute(
            "SELECT id + 1, json_extract(body, '$.composed'), metrics FROM batches "
            f"WHERE metrics IS NOT NULL AND id >= ? ORDER BY id {order} LIMIT ?",
            (0 if after is None else after, limit),
        ).fetchall()
        found = []
        for version, composed, metrics in sorted(rows):
            values = _METRICS.validate_json(metrics)
            found.append(
                StepRecord(version, composed, {n: v for n, v in values.items() if n in names} if names else values)
            )
        return found

    # ---- keys and events -----------------------------------------------------------------------------------

    def recall(self, scope: str, key: str) -> tuple[str, str] | None:
        """The fingerprint of the request that used this key, and the episode it was about."""
        query = "SELECT fingerprint, episode_id FROM idempotency WHERE scope = ? AND key = ?"
        found: tuple[str, str] | None = self._db.execute(query, (scope, key)).fetchone()
        return found

    def remember(self, scope: str, key: str, fingerprint: str, episode_id: str, created: float) -> None:
        self.file.insert("idempotency", (scope, key, fingerprint, episode_id, created))

    def add_event(self, kind: str, time: float, body: Mapping[str, Any]) -> Event:
        seq = self.file.insert("events", (None, kind, time, to_json(body)))
        return Event(seq=seq, kind=kind, time=time, body=dict(body))

    def events(self, after: int, limit: int) -> list[Event]:
        """The oldest `limit` events numbered above `after`."""
        return self._events("seq > ? ORDER BY seq LIMIT ?", after, limit)

    def event_kinds(self, after: int, last: int, limit: int) -> dict[str, int]:
        """Number of events of each kind among the oldest `limit` above `after`, up to `last`."""
        chosen = "SELECT kind FROM events WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
        rows = self._db.execute(f"SELECT kind, COUNT(*) FROM ({chosen}) GROUP BY kind", (after, last, limit))
        return dict(rows.fetchall())

    def events_of(self, kind: str) -> list[Event]:
        """All events of a kind that are kept, in order: evaluations and rollbacks are never deleted."""
        assert kind in ("evaluation", "rollback"), "events of other kinds have no index"
        return self._events("kind = ? AND kind IN ('evaluation', 'rollback') ORDER BY seq", kind)

    def evaluations(self) -> list[EvaluationView]:
        """All recorded evaluations, the oldest first."""
        events, rollbacks = self.events_of("evaluation"), [event.body for event in self.events_of("rollback")]
        undone = {version for done in rollbacks for version in range(done["to"] + 1, done["policy_version"])}
        views = [
            EvaluationView(**event.body, time=event.time, best=False, undone=event.body["policy_version"] in undone)
            for event in events
        ]
        best = max(newest_held_out(views), key=lambda view: view.score, default=None)
        return [view.model_copy(update={"best": True}) if view is best else view for view in views]

    def _events(self, condition: str, *values: Any) -> list[Event]:
        rows = self._db.execute(f"SELECT seq, kind, time, body FROM events WHERE {condition}", values)
        return [Event(seq=seq, kind=kind, time=time, body=json.loads(body)) for seq, kind, time, body in rows]

    def last_event(self) -> int:
        """Number of the newest event, 0 before the first."""
        return int(self._one("SELECT MAX(seq) FROM events") or 0)

    # ---- retention -----------------------------------------------------------------------------------------

    def unneeded(self, state: State, now: float, transcript_bytes: int) -> list[Slice]:
        """The rows that the retention rule above does not keep, in slices; kept transcripts have at most
        `transcript_bytes`. Reads only, so that another thread may do it.

        A row that is not needed once is never needed again, so the slices stay right while the run goes on. A crash
        between two of them leaves rows to the next time: transcripts go before their calls, later calls before earlier
        ones, so that no call lacks the one that it continues.
        """
        displaced = self._db.execute(_DISPLACED, {"limit": transcript_bytes}).fetchall()
        values = {"durable": state.durable_version, "displaced": json.dumps([seq for seq, _ in displaced])}
        slices = [*_sliced("transcripts", displaced), *_sliced("calls", self._db.execute(_UNNEEDED_CALLS, values))]
        old_keys = self._db.execute(
            "SELECT scope, key, 0 FROM idempotency WHERE created < ?", (now - IDEMPOTENCY_SECONDS,)
        )
        slices += _sliced("idempotency", old_keys, "scope = ? AND key = ?")
        limits = {
            "events": ("kind NOT IN ('evaluation', 'rollback')", self.last_event() - EVENTS_KEPT),
            "episodes": ("settled", state.num_episodes - EPISODES_KEPT),
            "tasks": ("TRUE", (self._one("SELECT MAX(seq) FROM tasks") or 0) - TASKS_KEPT),
        }
        for table, (condition, limit) in limits.items():
            rows = self._db.execute(f"SELECT seq, 0 FROM {table} WHERE seq <= ? AND {condition}", (limit,))
            slices += _sliced(table, rows)
        return slices

    def delete(self, rows: Slice) -> None:
        self._db.executemany(f"DELETE FROM {rows.table} WHERE {rows.condition}", rows.keys)


_DISPLACED = """
WITH placed AS (
    SELECT seq, most, num_bytes, ROW_NUMBER() OVER (PARTITION BY reason ORDER BY seq DESC) AS place FROM transcripts
), totals AS (
    SELECT seq, SUM(num_bytes) OVER (ORDER BY seq DESC) AS total FROM placed
    WHERE place <= most AND num_bytes <= :limit / 2
)
SELECT seq, 0 FROM transcripts WHERE seq NOT IN (SELECT seq FROM totals WHERE total <= :limit)
"""
"""The transcripts that newer ones of their reason, or of all, displace. A large one does not displace all others."""
_UNNEEDED_CALLS = f"""
SELECT seq, {_NUM_BYTES} FROM calls WHERE episode_id IN (
    SELECT DISTINCT episode_id FROM calls
    EXCEPT SELECT id FROM episodes WHERE NOT settled
    EXCEPT SELECT member.value FROM batches, json_each(batches.body, '$.groups') AS members,
        json_each(members.value) AS member WHERE batches.id >= :durable
    EXCEPT SELECT episode_id FROM transcripts WHERE seq NOT IN (SELECT value FROM json_each(:displaced))
) ORDER BY episode_id, seq DESC
"""


def _sliced(table: str, rows: Iterable[Sequence[Any]], condition: str = "seq = ?") -> Iterator[Slice]:
    """Slices of rows, which are a key and the size in bytes."""
    keys: list[tuple[Any, ...]] = []
    num_bytes = 0
    for *key, size in rows:
        if len(keys) == SLICE_ROWS or (keys and num_bytes + size > SLICE_BYTES):
            yield Slice(table, condition, keys, num_bytes)
            keys, num_bytes = [], 0
        keys.append(tuple(key))
        num_bytes += size
    if keys:
        yield Slice(table, condition, keys, num_bytes)


def _conditions(query: EpisodeQuery) -> tuple[list[str], dict[str, Any]]:
    """The SQL of the filters, and their values."""
    filters = EpisodeQuery.filters()
    values = query.model_dump(exclude_defaults=True, include={*filters})
    conditions = ["TRUE", *(filters[name].sql for name in values)]
    if query.status == NOT_NEEDED:
        conditions = [IS_NOT_NEEDED if one == filters["status"].sql else one for one in conditions]
    elif query.status == "aborted":
        conditions.append(f"NOT {IS_NOT_NEEDED}")
    if query.sort in ("reward", "-reward"):
        conditions.append(f"{REWARD} IS NOT NULL")
    if query.text:
        values["text"] = json.dumps(query.text, ensure_ascii=False)[1:-1]  # as it stands in JSON
    return conditions, values


def _first_id(time: float) -> str:
    """An id before those of all episodes that began at a time."""
    return new_episode_id(time)[:-16]
