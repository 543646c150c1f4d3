"""Episodes, groups and batches as frozen values, the tables of the journal, and the rows between the two.

Times are Unix seconds of the run's clock. Token arrays are little-endian blobs: int32 for tokens and versions, float64
for log-probabilities (the reported bits). `allowed` is packed by `timeline.support`. `pieces` holds the encoded bytes
of the tokens of suffix and completion, joined; `piece_lengths` (int32) has the length of each. `ask` is a JSON object:
see `types.NewContext`. `carry`, `noted` and `refused` are objects of numbers: see `Batch` and `Episode`.

Rows are only added, except groups (their state), notes (their counts), and rows that a durable checkpoint makes
obsolete.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from agentjet.config import JobConfig
from agentjet.types import Call, EpisodeStatus, Message, Mode, NewContext, ToolCall

RECOVERABLE = frozenset(
    {"context_length_exceeded", "thread_unsupported_request", "previous_response_not_found", "item_not_found"}
)
"""Codes of refusals that agents recover from: they compact their history, or send all of it."""
GroupState = Literal["open", "complete", "dropped"]


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a task, from `begin` to its reward or its abort."""

    id: str
    seq: int
    """Counts the episodes of a data dir from 1, in the order they began."""
    client_id: str
    task_id: str
    task_set: str
    group: str
    """The client's name for the group; empty in an eval episode without one."""
    group_id: int | None
    """The group instance; None for eval episodes, which are never grouped."""
    mode: Mode
    policy_version: int
    """Version at the beginning."""
    begun: float
    status: EpisodeStatus = "live"
    ended: float | None = None
    reward: float | None = None
    """Also the promised reward of a prepared episode. None for an aborted or expired one."""
    by_role: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    """Why it was aborted or expired."""
    num_calls: int = 0
    num_tokens: int = 0
    """Sampled tokens, over all calls that may train."""
    trained_in: int | None = None
    """The batch that trained it; None before that."""
    dropped: str = ""
    """Why a finished episode will never train (its group's reason), else empty."""
    code_version: str = ""
    team: str = ""
    at_version: int | None = None
    """The policy version that an eval episode is pinned to."""
    temperature: float | None = None
    """Temperature of all calls of an eval episode, if it was begun with one."""
    instance_id: str = ""
    """The process of the client that began it, if the client named one."""
    noted: Mapping[str, int] = field(default_factory=dict)
    """Request keys that were accepted without an effect, and other deviations from the requests, with their counts."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Refused requests: `code` or `code: parameter`, with their counts."""

    @property
    def unscorable(self) -> bool:
        """True if a refusal ended a call, except for refusals that agents are known to recover from."""
        return any(name.partition(":")[0] not in RECOVERABLE for name in self.refused)


def new_episode_id(now: float) -> str:
    """An id that no other episode has, in any run of any server: the time in milliseconds, then 64 random bits.

    Ids sort by the time at which their episodes began. A data dir of edition 1 has ids such as `ep000001`, too.
    """
    return f"ep_{max(0, int(now * 1000)):011x}{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """Outcomes of the training episodes of one code version. `aborted` includes expired ones."""

    episodes: int
    finished: int
    aborted: int
    reward_sum: float

    def begun(self) -> OutcomeCounts:
        return replace(self, episodes=self.episodes + 1)

    def ended(self, reward: float | None) -> OutcomeCounts:
        if reward is None:
            return replace(self, aborted=self.aborted + 1)
        return replace(self, finished=self.finished + 1, reward_sum=self.reward_sum + reward)

    @property
    def reward_mean(self) -> float | None:
        return self.reward_sum / self.finished if self.finished else None


@dataclass(frozen=True, slots=True)
class Group:
    """An instance of a group.

    `members` are its live and finished episodes, in the order they began; a lost one frees its place.
    """

    id: int
    client_id: str
    name: str
    opened: float
    touched: float
    """Time at which a member last began or ended. The wait for further members counts from it."""
    members: tuple[str, ...] = ()
    state: GroupState = "open"
    reason: str = ""
    """Why it was dropped:

    `too_few`, `zero_variance`, `no_tokens`, `no_members`; `short` on one that trains below full size.
    """
    closed: float | None = None
    for_batch: int | None = None
    """The batch that was being filled when it closed."""
    task_set: str = ""
    code_version: str = ""
    """Code version of the episode that opened it."""


@dataclass(frozen=True, slots=True)
class JobSettings:
    """The job settings in force; `given` are those that the server was started with."""

    revision: int
    """Counts the changes of a data dir from 1."""
    given: JobConfig
    job: JobConfig


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups consumed by one `learn` call; `id` is the policy version it starts from.

    Committed to the journal, with its job settings, before it is learned: replaying it needs nothing else.
    """

    id: int
    groups: tuple[tuple[str, ...], ...]
    """The episodes of each group, in training order."""
    job: JobConfig
    composed: float
    carry: Mapping[str, float] = field(default_factory=dict)
    """Groups that each present task set was owed after it: see `mixture`. Empty without `job.task_weights`."""

    @property
    def episode_ids(self) -> tuple[str, ...]:
        return tuple(episode_id for group in self.groups for episode_id in group)


SCHEMA_VERSION = 8
OPERATIONS = """
CREATE TABLE operations (
    number INTEGER PRIMARY KEY, kind TEXT NOT NULL CHECK (kind IN ('forward_backward', 'optim_step')),
    batch_id INTEGER NOT NULL REFERENCES batches (id)
);
CREATE INDEX operations_of_batch ON operations (batch_id);
"""

SCHEMA = (
    """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    client_id TEXT NOT NULL,
    name TEXT NOT NULL,
    opened REAL NOT NULL,
    touched REAL NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'complete', 'dropped')),
    reason TEXT NOT NULL,
    closed REAL,
    for_batch INTEGER,
    task_set TEXT NOT NULL DEFAULT '',
    code_version TEXT NOT NULL DEFAULT ''
);
CREATE INDEX groups_dropped ON groups (for_batch) WHERE state = 'dropped';

CREATE TABLE episodes (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    client_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    task_set TEXT NOT NULL,
    group_name TEXT NOT NULL,
    group_id INTEGER REFERENCES groups (id),
    mode TEXT NOT NULL CHECK (mode IN ('train', 'eval')),
    policy_version INTEGER NOT NULL,
    begun REAL NOT NULL,
    code_version TEXT NOT NULL DEFAULT '',
    team TEXT NOT NULL DEFAULT '',
    at_version INTEGER,
    temperature REAL,
    instance_id TEXT NOT NULL DEFAULT ''
);
CREATE INDEX episodes_of_group ON episodes (group_id);
CREATE INDEX episodes_of_team ON episodes (team) WHERE team != '';
CREATE INDEX episodes_of_code ON episodes (code_version) WHERE code_version != '';
CREATE INDEX episodes_of_client ON episodes (client_id) WHERE instance_id != '';
CREATE INDEX episodes_of_instance ON episodes (client_id, instance_id) WHERE instance_id != '';

CREATE TABLE calls (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    episode_id TEXT NOT NULL REFERENCES episodes (id),
    role TEXT NOT NULL,
    parent TEXT,
    kept INTEGER NOT NULL,
    suffix BLOB NOT NULL,
    completion BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    versions BLOB NOT NULL,
    pieces BLOB NOT NULL,
    piece_lengths BLOB NOT NULL,
    temperature REAL NOT NULL,
    finish_reason TEXT NOT NULL,
    response TEXT NOT NULL,
    prompt_key TEXT NOT NULL,
    created REAL NOT NULL,
    ask TEXT NOT NULL DEFAULT '{}',
    fork TEXT NOT NULL DEFAULT '',
    retry_of TEXT,
    context BLOB NOT NULL DEFAULT x'',
    allowed BLOB NOT NULL DEFAULT x'',
    untrained TEXT NOT NULL DEFAULT ''
);
CREATE INDEX calls_of_episode ON calls (episode_id, seq);

CREATE TABLE undelivered (call_id TEXT PRIMARY KEY) WITHOUT ROWID;

CREATE TABLE notes (
    episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
    noted TEXT NOT NULL,
    refused TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE promises (
    episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
    reward REAL NOT NULL,
    by_role TEXT NOT NULL,
    metrics TEXT NOT NULL,
    prepared REAL NOT NULL
) WITHOUT ROWID;

CREATE TABLE finishes (
    episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
    reward REAL NOT NULL,
    by_role TEXT NOT NULL,
    metrics TEXT NOT NULL,
    num_calls INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    ended REAL NOT NULL
) WITHOUT ROWID;

CREATE TABLE aborts (
    episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
    status TEXT NOT NULL CHECK (status IN ('aborted', 'expired')),
    reason TEXT NOT NULL,
    num_calls INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    ended REAL NOT NULL,
    for_batch INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX aborts_for_batch ON aborts (for_batch);

CREATE TABLE batches (
    id INTEGER PRIMARY KEY,
    job TEXT NOT NULL,
    composed REAL NOT NULL,
    carry TEXT NOT NULL DEFAULT '{}'
);
CREATE TABLE batch_groups (
    group_id INTEGER PRIMARY KEY REFERENCES groups (id),
    batch_id INTEGER NOT NULL REFERENCES batches (id),
    position INTEGER NOT NULL
);
CREATE TABLE batch_members (
    episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
    batch_id INTEGER NOT NULL REFERENCES batches (id),
    group_position INTEGER NOT NULL,
    position INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX members_of_batch ON batch_members (batch_id, group_position, position);

CREATE TABLE steps (
    batch_id INTEGER PRIMARY KEY REFERENCES batches (id),
    metrics TEXT NOT NULL,
    learned REAL NOT NULL
);

CREATE TABLE checkpoints (
    policy_version INTEGER PRIMARY KEY,
    digest TEXT NOT NULL
);

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
"""
    + OPERATIONS
)

MIGRATIONS = {
    1: """
    ALTER TABLE calls ADD COLUMN ask TEXT NOT NULL DEFAULT '{}';
    ALTER TABLE calls ADD COLUMN fork TEXT NOT NULL DEFAULT '';
    ALTER TABLE calls ADD COLUMN retry_of TEXT;
    ALTER TABLE calls ADD COLUMN context BLOB NOT NULL DEFAULT x'';
    CREATE TABLE undelivered (call_id TEXT PRIMARY KEY) WITHOUT ROWID;
    """,
    2: """
    ALTER TABLE calls ADD COLUMN allowed BLOB NOT NULL DEFAULT x'';
    ALTER TABLE episodes ADD COLUMN code_version TEXT NOT NULL DEFAULT '';
    ALTER TABLE episodes ADD COLUMN team TEXT NOT NULL DEFAULT '';
    ALTER TABLE episodes ADD COLUMN at_version INTEGER;
    CREATE INDEX episodes_of_team ON episodes (team) WHERE team != '';
    CREATE INDEX episodes_of_code ON episodes (code_version) WHERE code_version != '';
    ALTER TABLE groups ADD COLUMN task_set TEXT NOT NULL DEFAULT '';
    ALTER TABLE groups ADD COLUMN code_version TEXT NOT NULL DEFAULT '';
    UPDATE groups SET task_set = COALESCE((SELECT task_set FROM episodes WHERE group_id = groups.id LIMIT 1), '');
    ALTER TABLE batches ADD COLUMN carry TEXT NOT NULL DEFAULT '{}';
    CREATE TABLE promises (
        episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
        reward REAL NOT NULL,
        by_role TEXT NOT NULL,
        metrics TEXT NOT NULL,
        prepared REAL NOT NULL
    ) WITHOUT ROWID;
    """,
    3: """
    ALTER TABLE episodes ADD COLUMN temperature REAL;
    """,
    4: """
    ALTER TABLE batches DROP COLUMN seed;
    """,
    5: """
    UPDATE meta SET key = 'origin', value = json_object('model.name', value) WHERE key = 'model';
    """,
    6: """
    CREATE TABLE checkpoints (policy_version INTEGER PRIMARY KEY, digest TEXT NOT NULL);
    INSERT INTO meta SELECT 'undigested_until', COALESCE(
        (SELECT MAX(batch_id) + 1 FROM steps), (SELECT value FROM meta WHERE key = 'base_version'), 0
    );
    ALTER TABLE episodes ADD COLUMN instance_id TEXT NOT NULL DEFAULT '';
    CREATE INDEX episodes_of_client ON episodes (client_id) WHERE instance_id != '';
    CREATE INDEX episodes_of_instance ON episodes (client_id, instance_id) WHERE instance_id != '';
    CREATE TABLE notes (
        episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
        noted TEXT NOT NULL,
        refused TEXT NOT NULL
    ) WITHOUT ROWID;
    ALTER TABLE calls ADD COLUMN untrained TEXT NOT NULL DEFAULT '';
    """,
    7: OPERATIONS,
}
"""From each older version to the next."""


EPISODES_FROM = """
FROM episodes e
LEFT JOIN finishes f ON f.episode_id = e.id
LEFT JOIN aborts a ON a.episode_id = e.id
LEFT JOIN promises p ON p.episode_id = e.id
LEFT JOIN groups g ON g.id = e.group_id
LEFT JOIN batch_members m ON m.episode_id = e.id
LEFT JOIN steps s ON s.batch_id = m.batch_id
LEFT JOIN notes n ON n.episode_id = e.id
"""

STATUS = """
CASE WHEN f.episode_id IS NOT NULL THEN 'finished' WHEN a.episode_id IS NOT NULL THEN a.status
    WHEN p.episode_id IS NOT NULL THEN 'prepared' ELSE 'live' END
"""

SELECT_EPISODES = f"""
SELECT e.id, e.seq, e.client_id, e.task_id, e.task_set, e.group_name, e.group_id, e.mode, e.policy_version, e.begun,
    {STATUS}, COALESCE(f.ended, a.ended),
    CASE WHEN a.episode_id IS NULL THEN COALESCE(f.reward, p.reward) END,
    CASE WHEN a.episode_id IS NULL THEN COALESCE(f.by_role, p.by_role, '{{}}') ELSE '{{}}' END,
    CASE WHEN a.episode_id IS NULL THEN COALESCE(f.metrics, p.metrics, '{{}}') ELSE '{{}}' END,
    COALESCE(a.reason, ''),
    COALESCE(f.num_calls, a.num_calls, (SELECT COUNT(*) FROM calls c WHERE c.episode_id = e.id)),
    COALESCE(f.num_tokens, a.num_tokens,
        (SELECT SUM(length(c.completion)) / 4 FROM calls c WHERE c.episode_id = e.id AND c.untrained = ''), 0),
    s.batch_id,
    CASE WHEN f.episode_id IS NOT NULL AND g.state = 'dropped' THEN g.reason ELSE '' END,
    e.code_version, e.team, e.at_version, e.temperature, e.instance_id,
    COALESCE(n.noted, '{{}}'), COALESCE(n.refused, '{{}}')
{EPISODES_FROM}
"""

SELECT_CALLS = """
SELECT id, episode_id, role, parent, kept, suffix, completion, logprobs, versions, temperature, finish_reason, response,
    prompt_key, created, pieces, piece_lengths, ask, fork, retry_of, context, allowed, untrained
FROM calls
"""

_EPISODE_FIELDS = [field.name for field in fields(Episode)]

RecordedCall = tuple[Call, tuple[bytes, ...], tuple[bytes, ...]]
"""A call with the encoded bytes of each token of its suffix and of its completion."""


def read_episode(row: Sequence[Any]) -> Episode:
    """From a row of `SELECT_EPISODES`."""
    values = [*row[:13], json.loads(row[13]), json.loads(row[14]), *row[15:-2], *map(json.loads, row[-2:])]
    return Episode(**dict(zip(_EPISODE_FIELDS, values, strict=True)))


def read_call(row: Sequence[Any]) -> RecordedCall:
    """From a row of `SELECT_CALLS`."""
    suffix, completion = unpack_ints(row[5]), unpack_ints(row[6])
    call = Call(
        id=row[0],
        episode_id=row[1],
        role=row[2],
        parent=row[3],
        kept=row[4],
        suffix=suffix,
        completion=completion,
        logprobs=tuple(np.frombuffer(row[7], "<f8").tolist()),
        versions=unpack_ints(row[8]),
        temperature=row[9],
        finish_reason=row[10],
        response=_message(json.loads(row[11])),
        prompt_key=row[12],
        created=row[13],
        ask=_ask(json.loads(row[16])),
        fork=row[17],
        retry_of=row[18],
        context=row[19],
        support=row[20],
        untrained=row[21],
    )
    pieces: list[bytes] = []
    start = 0
    for length in unpack_ints(row[15]):
        pieces.append(row[14][start : start + length])
        start += length
    return call, tuple(pieces[: len(suffix)]), tuple(pieces[len(suffix) :])


def _message(value: Mapping[str, Any]) -> Message:
    return Message(**{**value, "tool_calls": tuple(ToolCall(**tool_call) for tool_call in value["tool_calls"])})


def _ask(value: Mapping[str, Any]) -> NewContext:
    if not value:
        return NewContext()
    messages, tools = tuple(map(_message, value["messages"])), tuple(value["tools"])
    return NewContext(messages, value["after"], tools, value["fingerprint"], value.get("instructed", False))


def to_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def pack_ints(values: Sequence[int]) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def unpack_ints(blob: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(blob, "<i4").tolist())


def pack_floats(values: Sequence[float]) -> bytes:
    return np.asarray(values, "<f8").tobytes()
