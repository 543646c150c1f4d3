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
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields
from functools import partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from agentjet import database
from agentjet.config import JobConfig, ModelConfig
from agentjet.errors import ConfigError, NotFound, Unprocessable
from agentjet.protocol import EvaluationView, Event, newest_held_out
from agentjet.protocol.records import EpisodeQuery
from agentjet.recipes.rollout import TaskStats
from agentjet.swarm import origin
from agentjet.swarm.journal_file import JournalFile, segments_of
from agentjet.swarm.origin import Origin, PolicyOrigin
from agentjet.swarm.state import (
    NOT_NEEDED,
    Batch,
    CallCounts,
    EpisodeRecord,
    Group,
    JobSettings,
    Outcome,
    OutcomeCounts,
    State,
    new_episode_id,
)
from agentjet.timeline.forest import EVERYTHING
from agentjet.timeline.tree import OrphanReason, orphans
from agentjet.types import Call, CheckpointStamp

IDEMPOTENCY_SECONDS = 86_400.0
"""Longer than any client repeats a request."""
EVENTS_KEPT = 100_000
EPISODES_KEPT = 2_000_000
TASKS_KEPT = 1_000_000
SLICE_ROWS = 100
SLICE_BYTES = 2 * 2**20
"""Most rows, and most bytes of calls, that one transaction deletes: a few milliseconds. A single row may exceed it."""

ORDERS = {
    "newest": ("seq", "<"),
    "oldest": ("seq", ">"),
    "reward": ("reward", ">"),
    "-reward": ("reward", "<"),
    "-num_tokens": ("num_tokens", "<"),
    "-num_calls": ("num_calls", "<"),
}
"""SQL of each order of episodes, and how it goes on. Among equals, newer episodes come first."""

RecordedCall = tuple[Call, tuple[bytes, ...], tuple[bytes, ...]]
"""A call with the encoded bytes of each token of its suffix and of its completion."""
_CALL = TypeAdapter[RecordedCall](
    RecordedCall, config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants")
)
_METRICS = TypeAdapter(dict[str, Any])
"""Reads the metrics of a step in a quarter of the time of `json.loads`."""
_STATE, _JOB = TypeAdapter(State), TypeAdapter(JobConfig)
_JOB_SETTINGS, _TASK = TypeAdapter(JobSettings), TypeAdapter(TaskStats)
_MAPPINGS = ("by_role", "call_rewards", "metrics", "noted", "refused")
_EPISODE_FIELDS = tuple(field.name for field in fields(EpisodeRecord))
_IS_MAPPING = tuple(name in _MAPPINGS for name in _EPISODE_FIELDS)
_EPISODE_COLUMNS = ", ".join(f'"{name}"' for name in _EPISODE_FIELDS)
_LATER_FIELDS = (
    "status", "ended", "reward", "by_role", "call_rewards", "call_rewards_digest", "metrics", "reward_text", "reason",
    "not_needed", "num_calls", "num_tokens", "trained_in", "oldest_version", "dropped", "noted", "refused",
)  # fmt: skip
"""The fields of an episode that change after its beginning."""
_PUT_EPISODE = (
    f"INSERT INTO episodes ({_EPISODE_COLUMNS}, settled) VALUES ({', '.join('?' * len(_EPISODE_FIELDS))}, ?) "
    "ON CONFLICT (seq) DO UPDATE SET settled = excluded.settled, "
    + ", ".join(f"{name} = excluded.{name}" for name in _LATER_FIELDS)
)
_GROUP_FIELDS = tuple(field.name for field in fields(Group) if field.name != "members")
_GROUP_COLUMNS = ", ".join(_GROUP_FIELDS)
_BATCH_COLUMNS = "id, groups, job, composed, carry"
_VALUES = attrgetter(*_EPISODE_FIELDS)
CountKind = Literal["outcome", "dropped", "lost_groups", "lost_episodes"]
"""Episodes by outcome, and dropped episodes by reason. Groups that were dropped, and episodes that ended unscored, by
reason and by the batch that was filled; of batches that are not learned yet.
"""
CODE_VERSIONS_KEPT = 20
"""Code versions with counts of outcomes, by last use."""


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

    @property
    def schema(self) -> str:
        """The file, as in `JournalFile.segments`; "" for the journal's own."""
        return self.table.rpartition(".")[0]

    def of_own_file(self) -> Slice:
        """The same rows for the journal of the file itself."""
        return self._replace(table=self.table.rpartition(".")[2])


def encode_call(call: Call, encoded_suffix: Sequence[bytes], encoded_completion: Sequence[bytes]) -> bytes:
    """Returns the body of a call with the encoded bytes of each token."""
    return _CALL.dump_json((call, tuple(encoded_suffix), tuple(encoded_completion)))


def pack_sets(sets: Sequence[bytes]) -> bytes:
    """Returns the compressed sets of successive tokens, each distinct set once; empty if all are `EVERYTHING`."""
    if not any(sets):
        return b""
    number: dict[bytes, int] = {}
    order = [number.setdefault(one, len(number)) for one in sets]
    head = np.array([len(number), *map(len, number), *order], "<u4").tobytes()
    return zlib.compress(head + b"".join(number))


def unpack_sets(packed: bytes, count: int) -> tuple[bytes, ...]:
    """Returns the sets of `count` tokens from their packed form."""
    if not packed:
        return (EVERYTHING,) * count
    content = zlib.decompress(packed)
    (num_distinct,) = np.frombuffer(content, "<u4", 1)
    lengths = np.frombuffer(content, "<u4", num_distinct, offset=4)
    order = np.frombuffer(content, "<u4", count, offset=4 + 4 * num_distinct).tolist()
    stops = (4 * (1 + num_distinct + count) + np.cumsum([0, *lengths])).tolist()
    distinct = [content[start:stop] for start, stop in pairwise(stops)]
    return tuple(distinct[i] for i in order)


def to_json(value: Mapping[str, Any] | Sequence[Any]) -> str:
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
        self._checked_origins: dict[str, PolicyOrigin] = {}

    @classmethod
    def open(cls, path: Path, *, models: Mapping[str, ModelConfig] | None = None) -> Self:
        """Open or create a journal. `models` are those of the policies; `policy` alone if the settings name none.

        Raises `ConfigError` if another process has it open, the disk refuses it, it has another schema, or it has
        other policies or another origin than `models`.
        """
        journal = cls(JournalFile.open(path))
        if models is None:
            return journal
        try:
            if journal.is_unused:
                journal.file.db.execute("DELETE FROM meta WHERE key = 'origin'")
            elif journal.origin.policies:  # Recorded before the first call. Without one, no policy was ever up.
                origin.check_policies(journal.origin, origin.named_policies(models), path.parent)
            for policy, model in models.items():
                journal.check_origin(policy, origin.of_settings(model))
        except (ConfigError, sqlite3.Error):
            journal.close()
            raise
        return journal

    @classmethod
    def open_read_only(cls, path: Path) -> Self:
        return cls(JournalFile.open_read_only(path))

    @classmethod
    def open_live(cls, path: Path) -> Self:
        """Open a journal that a server writes, to read it and the files of its fronts."""
        file = JournalFile(path, database.connect(path, "mode=ro", any_thread=True))
        file.attach(segments_of(path), live=True)
        return cls(file)

    @contextmanager
    def reading(self) -> Iterator[Self]:
        """The same journal on a read-only connection, for another thread. It reads committed changes only."""
        with closing(database.connect(self.path, "mode=ro")) as connection:
            file = JournalFile(self.path, connection)
            file.attach(tuple(self.file.segments.values()), live=True)
            yield type(self)(file)

    def close(self) -> None:
        """Close and unlock the file. Idempotent."""
        self.file.close()

    def _one(self, query: str, *values: Any) -> Any:
        """The first column of the first row, or None."""
        row = self.file.db.execute(query, values).fetchone()
        return None if row is None else row[0]

    # ---- the run -------------------------------------------------------------------------------------------

    @property
    def origin(self) -> Origin:
        return Origin.from_json(self.file.meta("origin", "{}"))

    @property
    def is_unused(self) -> bool:
        """True before the first episode. The origin may still change, because a setting may have been mistyped."""
        return not self.num_episodes and not self.origin.branched_from

    @property
    def is_empty(self) -> bool:
        """True if no episode has begun and nothing was learned."""
        state = self.read_state()
        return not self.num_episodes and state.policy_version <= max(0, state.base_version)

    @property
    def num_episodes(self) -> int:
        """Number of episodes that have begun, also of those that are deleted."""
        return int(self._one("SELECT MAX(seq) FROM episodes") or 0)

    @property
    def num_groups(self) -> int:
        return int(self._one("SELECT MAX(group_id) FROM episodes") or 0)

    def branch(self, recorded: Origin, branched_from: str) -> None:
        """Start a new journal with the origin of another one, and record which one."""
        self.file.set_meta("origin", Origin(recorded.policies, branched_from).to_json())

    def check_origin(self, policy: str, given: PolicyOrigin) -> None:
        """Raises `ConfigError` if a part of a policy's origin differs from the recorded one."""
        origin.check(self.origin, policy, given, self.path.parent)
        self._checked_origins[policy] = {**self._checked_origins.get(policy, {}), **given}

    def record_origin(self) -> None:
        """Store the checked origin, because the policies were loaded with it."""
        self.file.set_meta("origin", self.origin.with_policies(self._checked_origins).to_json())

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

    # ---- counts --------------------------------------------------------------------------------------------

    def count(self, kind: CountKind, name: str, number: int = 1, batch: int = 0) -> None:
        self.file.db.execute(
            "INSERT INTO counts VALUES (NULL, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET number = number + excluded.number",
            (kind, batch, name, number),
        )

    def counts(self, kind: CountKind, batch: int = 0) -> dict[str, int]:
        """The counts of a kind by name, in the order in which they were first added to."""
        query = "SELECT name, number FROM counts WHERE kind = ? AND batch = ? ORDER BY seq"
        return dict(self.file.db.execute(query, (kind, batch)))

    def outcomes(self) -> dict[str, int]:
        """Episodes since the data dir was made, by outcome. Trained and dropped ones are in `finished`, too."""
        return dict.fromkeys(get_args(Outcome), 0) | self.counts("outcome")

    def forget_lost(self, batch: int) -> None:
        self.file.db.execute(
            "DELETE FROM counts WHERE kind IN ('lost_groups', 'lost_episodes') AND batch < ?", (batch,)
        )

    def code_versions(self) -> dict[str, OutcomeCounts]:
        """Outcomes of training episodes by version of the agent's code; the last used versions, the newest last."""
        rows = self.file.db.execute(
            "SELECT version, episodes, finished, aborted, not_needed, reward_sum FROM code_versions "
            "ORDER BY last_episode"
        )
        return {version: OutcomeCounts(*counts) for version, *counts in rows}

    def code_version_began(self, episode: EpisodeRecord) -> None:
        """Count an episode of a code version, as the last used one. Older ones than `CODE_VERSIONS_KEPT` start again
        from 0 when they are used again.
        """
        self.file.db.execute(
            "INSERT INTO code_versions VALUES (?, ?, 1, 0, 0, 0, 0.0) ON CONFLICT DO UPDATE "
            "SET episodes = episodes + 1, last_episode = excluded.last_episode",
            (episode.code_version, episode.seq),
        )
        self.file.db.execute(
            "DELETE FROM code_versions WHERE version NOT IN "
            "(SELECT version FROM code_versions ORDER BY last_episode DESC LIMIT ?)",
            (CODE_VERSIONS_KEPT,),
        )

    def code_version_ended(self, episode: EpisodeRecord) -> None:
        column = "not_needed" if episode.not_needed else "aborted" if episode.reward is None else "finished"
        self.file.db.execute(
            f"UPDATE code_versions SET {column} = {column} + 1, reward_sum = reward_sum + ? WHERE version = ?",
            (episode.reward or 0.0, episode.code_version),
        )

    # ---- settings and checkpoints --------------------------------------------------------------------------

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
        self.file.db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?)", (stamp.policy_version, stamp.digest))

    # ---- episodes and groups -------------------------------------------------------------------------------

    def put_episode(self, episode: EpisodeRecord) -> None:
        values = [
            (to_json(value) if value else "{}") if is_mapping else value
            for value, is_mapping in zip(_VALUES(episode), _IS_MAPPING, strict=True)
        ]
        self.file.db.execute(_PUT_EPISODE, (*values, episode.is_settled))

    def episode(self, episode_id: str) -> EpisodeRecord | None:
        return next(iter(self._episodes("id = ?", (episode_id,))), None)

    def known_episode(self, episode_id: str) -> EpisodeRecord:
        """An episode. Raises `NotFound`."""
        episode = self.episode(episode_id)
        if episode is None:
            raise NotFound(f"There is no episode {episode_id!r} in this run.", code="episode_not_found")
        return episode

    def newest_counts(self, episode_id: str) -> CallCounts | None:
        """The counts of an episode in the file that has most of its calls; None if none has some."""
        query = " UNION ALL ".join(
            f"SELECT {', '.join(CallCounts._fields)} FROM {schema}.episodes WHERE id = :id" for schema in self._schemas
        )
        rows = self.file.db.execute(query, {"id": episode_id})
        found = [CallCounts(row[0], row[1], row[2], json.loads(row[3]), json.loads(row[4])) for row in rows]
        return max(
            found, key=lambda one: (one.num_calls, sum(one.noted.values()), sum(one.refused.values())), default=None
        )

    def unsettled_episodes(self) -> list[EpisodeRecord]:
        return self._episodes("NOT settled ORDER BY seq", ())

    def episodes_of_group(self, group_id: int) -> list[EpisodeRecord]:
        return self._episodes("group_id = ? ORDER BY seq", (group_id,))

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
            total = self.file.db.execute(counting, values).fetchone()[0]
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
            "id >= ? AND id < ? AND mode = 'train' AND (status IN ('aborted', 'expired') OR dropped != '') "
            "AND ended > ? AND ended <= ? ORDER BY id DESC LIMIT ?",
            (_first_id(start - longest), _first_id(end + 0.001), start, end, limit),
        )

    def _episodes(self, condition: str, values: Any) -> list[EpisodeRecord]:
        rows = self.file.db.execute(f"SELECT {_EPISODE_COLUMNS} FROM episodes WHERE {condition}", values)
        return [
            EpisodeRecord(
                *(
                    (json.loads(value) if value != "{}" else {}) if is_mapping else value
                    for value, is_mapping in zip(row, _IS_MAPPING, strict=True)
                )
            )
            for row in rows
        ]

    def put_group(self, group: Group) -> None:
        """Store a new or changed group. Its members are those episodes of it that are live or finished."""
        values = [getattr(group, name) for name in _GROUP_FIELDS]
        marks = ", ".join("?" * len(values))
        self.file.db.execute(f"INSERT OR REPLACE INTO groups ({_GROUP_COLUMNS}) VALUES ({marks})", values)

    def remove_group(self, group_id: int) -> None:
        self.file.db.execute("DELETE FROM groups WHERE id = ?", (group_id,))

    def groups(self) -> list[Group]:
        """The groups of the present batch, in the order they were opened."""
        members = "SELECT id FROM episodes WHERE group_id = ? AND status IN ('live', 'finished') ORDER BY seq"
        found = []
        for row in self.file.db.execute(f"SELECT {_GROUP_COLUMNS} FROM groups ORDER BY id").fetchall():
            values = dict(zip(_GROUP_FIELDS, row, strict=True))
            ids = tuple(one for (one,) in self.file.db.execute(members, (values["id"],)))
            found.append(Group(**values | {"is_left": bool(values["is_left"]), "members": ids}))
        return found

    def task(self, task_set: str, task_id: str) -> TaskStats:
        """Statistics of a task; zeros before its first group."""
        body = self._one("SELECT body FROM tasks WHERE task_set = ? AND task_id = ?", task_set, task_id)
        return TaskStats(task_set, task_id) if body is None else _TASK.validate_json(body)

    def put_task(self, task: TaskStats) -> None:
        """Store new statistics of a task, as the newest."""
        row = (task.task_set, task.task_id, _TASK.dump_json(task, exclude={"last_step"}).decode())
        self.file.db.execute("INSERT OR REPLACE INTO tasks (task_set, task_id, body) VALUES (?, ?, ?)", row)

    def forget_tasks(self) -> None:
        self.file.db.execute("DELETE FROM tasks")

    def add_instance(self, client_id: str, instance_id: str) -> None:
        """Record that a process of a client began an episode."""
        self.file.db.execute(
            "INSERT OR IGNORE INTO instances (client_id, instance_id) VALUES (?, ?)", (client_id, instance_id)
        )

    def instances(self, client_id: str) -> list[str]:
        """The processes of a client that began episodes, in the order of their first one."""
        query = "SELECT instance_id FROM instances WHERE client_id = ? ORDER BY number"
        return [str(row[0]) for row in self.file.db.execute(query, (client_id,))]

    # ---- calls ---------------------------------------------------------------------------------------------

    def add_call(self, call: Call, body: bytes, routes: bytes = b"", *, seq: int | None = None) -> None:
        """Record a call. `body` is what `encode_call` returned for it; `routes` are packed by `timeline.routes`.

        `seq` orders the calls of an episode; by default it is the next one of all files.
        """
        call_id, *facts = CallFacts.of(call)
        if seq is None and self.file.segments:  # Numbers of fronts come from the clock.
            seq = self.last_call_number() + 1
        self.file.db.execute(
            "INSERT INTO main.calls (seq, id, episode_id, undelivered, body, role, after_call, retry_of, untrained, "
            "num_tokens, num_bytes, routes) VALUES (?, ?, ?, FALSE, ?, ?, ?, ?, ?, ?, ?, ?)",
            (seq, call_id, call.episode_id, body.decode(), *facts, len(body) + len(routes), routes or None),
        )

    def last_call_number(self) -> int:
        return max(int(self._one(f"SELECT MAX(seq) FROM {schema}.calls") or 0) for schema in self._schemas)

    @property
    def _schemas(self) -> tuple[str, ...]:
        return "main", *self.file.segments

    def routes(self, episode_id: str) -> dict[str, bytes]:
        """The packed routes of an episode's calls that have some, by call."""
        if not self.file.has_routes:
            return {}
        query = "SELECT id, routes FROM calls WHERE episode_id = ? AND routes IS NOT NULL"
        return dict(self.file.db.execute(query, (episode_id,)))

    def calls(self, episode_id: str) -> list[RecordedCall]:
        """An episode's calls in the order they were recorded, with the encoded pieces of suffix and completion."""
        rows = self.file.db.execute("SELECT body FROM calls WHERE episode_id = ? ORDER BY seq", (episode_id,))
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
        """Facts about an episode's calls, in the order they were recorded. No call is parsed."""
        query = "SELECT id, role, after_call, retry_of, untrained, num_tokens FROM calls WHERE episode_id = ?"
        return [CallFacts(*row) for row in self.file.calls.execute(f"{query} ORDER BY seq", (episode_id,))]

    def add_undelivered(self, call_ids: Iterable[str]) -> None:
        self.file.db.executemany(
            "UPDATE main.calls SET undelivered = TRUE WHERE id = ? AND NOT undelivered",
            [(call_id,) for call_id in call_ids],
        )

    def orphans(self, episode_id: str) -> dict[str, OrphanReason]:
        """The calls of an episode that are not trained, with the reason. No call is parsed."""
        rows = self.file.calls.execute("SELECT id FROM calls WHERE episode_id = ? AND undelivered", (episode_id,))
        return orphans(self.call_facts(episode_id), {row[0] for row in rows})

    def keep_transcript(self, episode_id: str, reason: str, most: int) -> None:
        """Keep the calls of an ended episode beyond their replay, for people, as one of the `most` newest of a reason.
        An episode without calls is left out.
        """
        query = "SELECT SUM(num_bytes) FROM calls WHERE episode_id = ?"
        (num_bytes,) = self.file.calls.execute(query, (episode_id,)).fetchone()
        if num_bytes is not None:
            self.file.db.execute(
                "INSERT OR REPLACE INTO transcripts (episode_id, reason, most, num_bytes) VALUES (?, ?, ?, ?)",
                (episode_id, reason, most, num_bytes),
            )

    # ---- batches -------------------------------------------------------------------------------------------

    def add_batch(self, batch: Batch) -> None:
        row = (
            batch.id,
            to_json(batch.groups),
            _JOB.dump_json(batch.job).decode(),
            batch.composed,
            to_json(batch.carry),
        )
        self.file.db.execute("INSERT INTO batches (id, groups, job, composed, carry) VALUES (?, ?, ?, ?, ?)", row)

    def batches(self, start: int, stop: int | None = None) -> list[Batch]:
        """Batches from `start` on, before `stop`, in order, learned or not."""
        query = f"SELECT {_BATCH_COLUMNS} FROM batches WHERE id >= ? AND id < ? ORDER BY id"
        return [self._batch(*row) for row in self.file.db.execute(query, (start, 2**62 if stop is None else stop))]

    def stored_batch(self, batch_id: int) -> Callable[[], Batch]:
        """Reads a batch. The returned function makes it, without the file: its recipe may import a plug-in. It raises
        `ConfigError` if the recipe can no longer be read.
        """
        row = self.file.db.execute(f"SELECT {_BATCH_COLUMNS} FROM batches WHERE id = ?", (batch_id,)).fetchone()
        return partial(self._batch, *row)

    def first_group(self, batch_id: int) -> tuple[str, ...]:
        """The members of a batch's first group; none without the batch. The batch's recipe is not made."""
        found = self._one("SELECT groups -> 0 FROM batches WHERE id = ?", batch_id)
        return tuple(json.loads(found or "[]"))

    def newest_carry(self) -> dict[str, float]:
        """The `carry` of the newest batch, learned or not. The batch's recipe is not made."""
        found = self._one("SELECT carry FROM batches ORDER BY id DESC LIMIT 1")
        return dict(json.loads(found or "{}"))

    def _batch(self, batch_id: int, groups: str, job: str, composed: float, carry: str) -> Batch:
        """Raises `ConfigError` if the batch's recipe can no longer be read."""
        try:
            made = _JOB.validate_json(job)
        except ValidationError as error:
            raise self._unreadable(f"batch {batch_id}", json.loads(job), error, 0) from None
        return Batch(batch_id, tuple(map(tuple, json.loads(groups))), made, composed, json.loads(carry))

    def _unreadable(self, what: str, job: Any, error: ValidationError, start: int = 1) -> ConfigError:
        """The error for job settings. The names of their keys begin after `start` parts of the location."""
        recipe = job.get("recipe") if isinstance(job, dict) else None
        name = recipe.get("name", "") if isinstance(recipe, dict) else ""
        wrong = [  # Those of `given` and of `job` are mostly the same.
            f"{'.'.join(map(str, ('job', *one['loc'][start:])))}: {one['msg'].removeprefix('Value error, ')}"
            for one in error.errors()
        ]
        return ConfigError(
            f"{self.path}: {what} (recipe {name!r}) cannot be read: "
            f"{'; '.join(dict.fromkeys(wrong))}. Start with the packages and versions "
            "that wrote it, or make a new data dir from a checkpoint (agentjet checkpoints branch)"
        )

    def remove_batches(self, start: int) -> None:
        self.file.db.execute("DELETE FROM operations WHERE batch_id >= ?", (start,))
        self.file.db.execute("DELETE FROM batches WHERE id >= ?", (start,))

    def put_operation(self, policy: str, number: int, kind: str, batch_id: int) -> None:
        self.file.db.execute("INSERT OR REPLACE INTO operations VALUES (?, ?, ?, ?)", (policy, number, kind, batch_id))

    def operations(self, policy: str) -> list[tuple[int, str, int]]:
        """All operations on a policy, in order: number, kind and batch."""
        query = "SELECT number, kind, batch_id FROM operations WHERE policy = ? ORDER BY number"
        return list(self.file.db.execute(query, (policy,)))

    def add_step(self, batch_id: int, metrics: Mapping[str, float]) -> None:
        """Record that a batch was learned."""
        self.file.db.execute("UPDATE batches SET metrics = ? WHERE id = ?", (to_json(metrics), batch_id))

    def put_fingerprints(self, batch_id: int, fingerprints: Mapping[str, int]) -> None:
        self.file.db.execute("UPDATE batches SET fingerprint = ? WHERE id = ?", (to_json(fingerprints), batch_id))

    def fingerprints(self, batch_id: int) -> dict[str, int]:
        """The fingerprints of a learned batch; empty if an older version learned it."""
        return dict(json.loads(self._one("SELECT fingerprint FROM batches WHERE id = ?", batch_id) or "{}"))

    def step(self, batch_id: int) -> dict[str, float]:
        """The metrics of a learned batch; empty if this run did not learn it."""
        return dict(json.loads(self._one("SELECT metrics FROM batches WHERE id = ?", batch_id) or "{}"))

    def batch_records(self, before: int | None, limit: int) -> list[BatchRecord]:
        """The newest batches, or those before one, newest first."""
        rows = self.file.db.execute(
            "SELECT id, groups, job, composed, metrics FROM batches WHERE id < ? ORDER BY id DESC LIMIT ?",
            (2**62 if before is None else before, limit),
        )
        return [
            BatchRecord(
                batch_id,
                tuple(map(tuple, json.loads(groups))),
                json.loads(job),
                composed,
                None if metrics is None else json.loads(metrics),
            )
            for batch_id, groups, job, composed, metrics in rows
        ]

    def steps(self, after: int | None, limit: int, names: Collection[str] = ()) -> list[StepRecord]:
        """The oldest `limit` steps to versions above `after`, or the newest `limit`, in order.

        `names` are the metrics to return; empty for all.
        """
        order = "DESC" if after is None else "ASC"
        rows = self.file.db.execute(
            "SELECT id + 1, composed, metrics FROM batches "
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
        found: tuple[str, str] | None = self.file.db.execute(query, (scope, key)).fetchone()
        return found

    def remember(self, scope: str, key: str, fingerprint: str, episode_id: str, created: float) -> None:
        row = (scope, key, fingerprint, episode_id, created)
        self.file.db.execute("INSERT INTO idempotency VALUES (?, ?, ?, ?, ?)", row)

    def add_event(self, kind: str, time: float, body: Mapping[str, Any]) -> Event:
        row = (kind, time, to_json(body))
        added = self.file.db.execute("INSERT INTO events (kind, time, body) VALUES (?, ?, ?)", row)
        assert added.lastrowid is not None
        return Event(seq=added.lastrowid, kind=kind, time=time, body=dict(body))

    def events(self, after: int = 0, limit: int = 1000) -> list[Event]:
        """The oldest `limit` events numbered above `after`."""
        return self._events("seq > ? ORDER BY seq LIMIT ?", after, limit)

    def event_kinds(self, after: int, last: int) -> dict[str, int]:
        """Number of events of each kind among the oldest 1,000 above `after`, up to `last`."""
        chosen = "SELECT kind FROM events WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT 1000"
        rows = self.file.db.execute(f"SELECT kind, COUNT(*) FROM ({chosen}) GROUP BY kind", (after, last))
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
        rows = self.file.db.execute(f"SELECT seq, kind, time, body FROM events WHERE {condition}", values)
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
        displaced = self.file.db.execute(_DISPLACED, {"limit": transcript_bytes}).fetchall()
        values = {"durable": state.durable_version, "displaced": json.dumps([seq for seq, _ in displaced])}
        slices = [*_sliced("transcripts", displaced)]
        for schema in self._schemas:
            rows = self.file.db.execute(_UNNEEDED_CALLS.format(schema=schema), values)
            slices += _sliced("calls" if schema == "main" else f"{schema}.calls", rows)
            if schema != "main":  # The counts of episodes without calls.
                slices += _sliced(f"{schema}.episodes", self.file.db.execute(_UNNEEDED_COUNTS.format(schema=schema)))
        old_keys = self.file.db.execute(
            "SELECT scope, key, 0 FROM idempotency WHERE created < ?", (now - IDEMPOTENCY_SECONDS,)
        )
        slices += _sliced("idempotency", old_keys, "scope = ? AND key = ?")
        limits = {
            "events": ("kind NOT IN ('evaluation', 'rollback')", self.last_event() - EVENTS_KEPT),
            "episodes": ("settled", self.num_episodes - EPISODES_KEPT),
            "tasks": ("TRUE", (self._one("SELECT MAX(seq) FROM tasks") or 0) - TASKS_KEPT),
        }
        for table, (condition, limit) in limits.items():
            rows = self.file.db.execute(f"SELECT seq, 0 FROM {table} WHERE seq <= ? AND {condition}", (limit,))
            slices += _sliced(table, rows)
        return slices

    def delete(self, rows: Slice) -> None:
        """Delete rows of the journal's own file."""
        self.file.db.executemany(f"DELETE FROM main.{rows.table} WHERE {rows.condition}", rows.keys)


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
_UNNEEDED_CALLS = """
SELECT seq, num_bytes FROM {schema}.calls WHERE episode_id IN (
    SELECT DISTINCT episode_id FROM {schema}.calls
    EXCEPT SELECT id FROM main.episodes WHERE NOT settled
    EXCEPT SELECT member.value FROM batches, json_each(batches.groups) AS members,
        json_each(members.value) AS member WHERE batches.id >= :durable
    EXCEPT SELECT episode_id FROM transcripts WHERE seq NOT IN (SELECT value FROM json_each(:displaced))
) ORDER BY episode_id, seq DESC
"""

_UNNEEDED_COUNTS = """
SELECT seq, 0 FROM {schema}.episodes WHERE id NOT IN (SELECT episode_id FROM {schema}.calls)
    AND id NOT IN (SELECT id FROM main.episodes WHERE NOT settled)
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
    filters = EpisodeQuery.filters()
    values = query.model_dump(exclude_defaults=True, include={*filters})
    conditions = ["TRUE", *(filters[name].sql for name in values)]
    if query.status == NOT_NEEDED:
        values["status"] = "aborted"
        conditions.append("not_needed != ''")
    elif query.status == "aborted":
        conditions.append("not_needed = ''")
    if query.sort in ("reward", "-reward"):
        conditions.append("reward IS NOT NULL")
    if query.text:
        values["json"] = json.dumps(query.text, ensure_ascii=False)[1:-1]  # As it stands in the body of a call.
    return conditions, values


def _first_id(time: float) -> str:
    """An id before those of all episodes that began at a time."""
    return new_episode_id(time)[:-16]
