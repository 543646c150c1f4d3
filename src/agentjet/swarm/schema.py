"""The tables of the journal, the rows of calls, and the migration of older journals.

Token arrays are little-endian blobs: int32 for tokens and versions, float64 for log-probabilities (the reported bits).
`allowed` is packed by `timeline.support`. `pieces` holds the encoded bytes of the tokens of suffix and completion,
joined; `piece_lengths` (int32) has the length of each. `ask` is a JSON object: see `types.NewContext`. Bodies are JSON.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from agentjet.swarm.state import Episode, State, changes
from agentjet.types import SOLE_POLICY, Call, Message, NewContext, ToolCall

SCHEMA_VERSION = 10
OLDEST_SCHEMA = 6
"""The schema of AgentJet 0.1: the oldest one that is migrated."""

TABLES = """
CREATE TABLE facts (seq INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE snapshot (id INTEGER PRIMARY KEY CHECK (id = 0), body TEXT NOT NULL);

CREATE TABLE settled_episodes (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX settled_by_status ON settled_episodes (status, seq);

CREATE TABLE instances (
    number INTEGER PRIMARY KEY,
    client_id TEXT NOT NULL,
    instance_id TEXT NOT NULL,
    UNIQUE (client_id, instance_id)
);
CREATE INDEX events_of_kind ON events (kind, seq) WHERE kind IN ('evaluation', 'rollback');
"""
"""Tables that schema 9 added."""

OPERATIONS = """
CREATE TABLE operations (
    policy TEXT NOT NULL,
    number INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('forward_backward', 'optim_step')),
    batch_id INTEGER NOT NULL,
    PRIMARY KEY (policy, number)
) WITHOUT ROWID;
CREATE INDEX operations_of_batch ON operations (batch_id);
"""

SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE calls (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    episode_id TEXT NOT NULL,
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
    ask TEXT NOT NULL DEFAULT '{{}}',
    fork TEXT NOT NULL DEFAULT '',
    retry_of TEXT,
    context BLOB NOT NULL DEFAULT x'',
    allowed BLOB NOT NULL DEFAULT x'',
    untrained TEXT NOT NULL DEFAULT ''
);
CREATE INDEX calls_of_episode ON calls (episode_id, seq);

CREATE TABLE undelivered (call_id TEXT PRIMARY KEY) WITHOUT ROWID;

CREATE TABLE batches (
    id INTEGER PRIMARY KEY,
    job TEXT NOT NULL,
    composed REAL NOT NULL,
    carry TEXT NOT NULL
);
CREATE TABLE batch_members (
    episode_id TEXT PRIMARY KEY,
    batch_id INTEGER NOT NULL,
    group_position INTEGER NOT NULL,
    position INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX members_of_batch ON batch_members (batch_id, group_position, position);

CREATE TABLE steps (
    batch_id INTEGER PRIMARY KEY,
    metrics TEXT NOT NULL,
    learned REAL NOT NULL
);

CREATE TABLE checkpoints (
    policy_version INTEGER PRIMARY KEY,
    digest TEXT NOT NULL
);
{OPERATIONS}
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
{TABLES}
"""

# ---- rows --------------------------------------------------------------------------------------------------

SELECT_CALLS = """
SELECT id, episode_id, role, parent, kept, suffix, completion, logprobs, versions, temperature, finish_reason, response,
    prompt_key, created, pieces, piece_lengths, ask, fork, retry_of, context, allowed, untrained
FROM calls
"""

RecordedCall = tuple[Call, tuple[bytes, ...], tuple[bytes, ...]]
"""A call with the encoded bytes of each token of its suffix and of its completion."""


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


def to_json(value: Mapping[str, Any] | Sequence[Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def pack_ints(values: Sequence[int]) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def unpack_ints(blob: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(blob, "<i4").tolist())


def pack_floats(values: Sequence[float]) -> bytes:
    return np.asarray(values, "<f8").tobytes()


def settled_row(episode: Episode) -> tuple[Any, ...]:
    """A row of `settled_episodes`."""
    return episode.seq, episode.id, episode.status, to_json(changes(None, episode))


# ---- migration ---------------------------------------------------------------------------------------------

FROM_6 = """
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
"""

EPISODES_OF_8 = """
SELECT e.id, e.seq, e.client_id, e.task_id, e.task_set, e.group_name, e.group_id, e.mode, e.policy_version, e.begun,
    CASE WHEN f.episode_id IS NOT NULL THEN 'finished' ELSE COALESCE(a.status, 'live') END, COALESCE(f.ended, a.ended),
    CASE WHEN a.episode_id IS NULL THEN COALESCE(f.reward, p.reward) END,
    CASE WHEN a.episode_id IS NULL THEN COALESCE(f.by_role, p.by_role, '{}') ELSE '{}' END,
    CASE WHEN a.episode_id IS NULL THEN COALESCE(f.metrics, p.metrics, '{}') ELSE '{}' END,
    COALESCE(a.reason, ''),
    COALESCE(f.num_calls, a.num_calls, (SELECT COUNT(*) FROM calls c WHERE c.episode_id = e.id)),
    COALESCE(f.num_tokens, a.num_tokens,
        (SELECT SUM(length(c.completion)) / 4 FROM calls c WHERE c.episode_id = e.id AND c.untrained = ''), 0),
    s.batch_id,
    CASE WHEN f.episode_id IS NOT NULL AND g.state = 'dropped' THEN g.reason ELSE '' END,
    e.code_version, e.at_version, e.temperature, e.instance_id,
    COALESCE(n.noted, '{}'), COALESCE(n.refused, '{}')
FROM episodes e
LEFT JOIN finishes f ON f.episode_id = e.id
LEFT JOIN aborts a ON a.episode_id = e.id
LEFT JOIN promises p ON p.episode_id = e.id
LEFT JOIN groups g ON g.id = e.group_id
LEFT JOIN batch_members m ON m.episode_id = e.id
LEFT JOIN steps s ON s.batch_id = m.batch_id
LEFT JOIN notes n ON n.episode_id = e.id
"""

OPERATIONS_OF_9 = f"""
ALTER TABLE operations RENAME TO operations_of_9;
DROP INDEX operations_of_batch;
{OPERATIONS}
INSERT INTO operations SELECT '{SOLE_POLICY}', number, kind, batch_id FROM operations_of_9;
DROP TABLE operations_of_9
"""

SETTLED_OF_9 = """
DROP INDEX settled_by_team;
ALTER TABLE settled_episodes DROP COLUMN team;
UPDATE settled_episodes SET body = json_remove(body, '$.team')
"""

_FIELDS_OF_8 = [f.name for f in fields(Episode) if f.name != "oldest_version"]


def migrate(db: sqlite3.Connection, found: int) -> None:
    """Bring a journal of schema `found` forward, inside a transaction."""
    _run(db, OPERATIONS if found < 8 else OPERATIONS_OF_9)
    state = _state_of_9(db) if found == 9 else _state_of_8(db, found)
    _end_prepared(db, state)
    db.execute("INSERT OR REPLACE INTO snapshot VALUES (0, ?)", (to_json(state.snapshot()),))
    db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(SCHEMA_VERSION),))


def _run(db: sqlite3.Connection, statements: str) -> None:
    for statement in statements.split(";"):
        db.execute(statement)


def _state_of_9(db: sqlite3.Connection) -> State:
    """The state of a journal of schema 9, which had episodes of teams. Prepared episodes are live and have a reward."""
    _run(db, SETTLED_OF_9)
    row = db.execute("SELECT body FROM snapshot").fetchone()
    held = {} if row is None else json.loads(row[0])
    counts = held.get("counts", {})
    counts["live"] = counts.get("live", 0) + counts.pop("prepared", 0)
    state = State({**held, "episodes": [_episode_of_9(values) for values in held.get("episodes", ())]})
    for (body,) in db.execute("SELECT body FROM facts ORDER BY seq").fetchall():
        for kind, values in json.loads(body):
            state.apply((kind, _episode_of_9(values) if kind == "episode" else values))
    state.log.clear()
    db.execute("DELETE FROM facts")
    return state


def _episode_of_9(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in values.items() if name != "team"}
    return {**kept, "status": "live"} if kept.get("status") == "prepared" else kept


def _end_prepared(db: sqlite3.Connection, state: State) -> None:
    """End the prepared episodes unscored, because no `finish` will come for them."""
    reason = "in doubt: it was prepared, and neither finished nor aborted before the server was updated"
    now = db.execute("SELECT MAX(time) FROM events").fetchone()[0]
    for episode in [e for e in state.episodes.values() if e.status == "live" and e.reward is not None]:
        unscored: dict[str, Any] = {"reward": None, "by_role": {}, "metrics": {}, "dropped": ""}
        values = {"id": episode.id, "status": "expired", "ended": now, "reason": reason, **unscored}
        settled = state.apply(("episode", values))
        assert settled is not None
        db.execute("INSERT INTO settled_episodes VALUES (?, ?, ?, ?)", settled_row(settled))
        group = state.groups.get(episode.group_id or 0)
        if group is not None:
            members = [member for member in group.members if member != episode.id]
            dropped = {} if members else {"state": "dropped", "reason": "no_members", "closed": now}
            state.apply(("group", {"id": group.id, "members": members, **dropped}))
    state.log.clear()


def _state_of_8(db: sqlite3.Connection, found: int) -> State:
    """The state of a journal of schema 6 to 8, which had tables of episodes and groups.

    Every episode passes through the fold, so that its counts are those of a run that recorded facts from the start.
    The numbers of groups and episodes lost since the last batch start at 0.
    """
    if found == OLDEST_SCHEMA:
        _run(db, FROM_6)
    _run(db, TABLES)
    meta = dict(db.execute("SELECT key, value FROM meta WHERE key IN ('base_version', 'durable_version')"))
    base = int(meta.get("base_version", -1))
    newest = db.execute("SELECT MAX(batch_id) FROM steps").fetchone()[0]
    version = max(base, 0, 0 if newest is None else newest + 1)
    carry = db.execute("SELECT carry FROM batches ORDER BY id DESC LIMIT 1").fetchone()
    state = State()
    for row in db.execute(f"{EPISODES_OF_8} ORDER BY e.seq"):
        values = dict(zip(_FIELDS_OF_8, row, strict=True))
        values |= {name: json.loads(values[name]) for name in ("by_role", "metrics", "noted", "refused")}
        settled = state.apply(("episode", values))
        state.log.clear()
        if settled is not None:
            db.execute("INSERT INTO settled_episodes VALUES (?, ?, ?, ?)", settled_row(settled))
    for episode_id in list(state.episodes):
        calls = "SELECT substr(versions, 1, 4) FROM calls WHERE episode_id = ? AND versions != x'' AND untrained = ''"
        blobs = db.execute(calls, (episode_id,))
        oldest = min((unpack_ints(blob)[0] for (blob,) in blobs), default=None)
        state.apply(("episode", {"id": episode_id, "oldest_version": oldest}))
    columns = "id, client_id, name, opened, touched, state, reason, closed, task_set, code_version"
    groups = (
        f"SELECT {columns} FROM groups WHERE state != 'dropped' AND id NOT IN (SELECT group_id FROM batch_groups) "
        "ORDER BY id"
    )
    members = "SELECT id FROM episodes WHERE group_id = ? AND id NOT IN (SELECT episode_id FROM aborts) ORDER BY seq"
    for row in db.execute(groups).fetchall():
        names = [name for (name,) in db.execute(members, row[:1])]
        state.apply(("group", {**dict(zip(columns.split(", "), row, strict=True)), "members": names}))
    state.losses.clear()
    run = {
        "policy_version": version,
        "base_version": base,
        "durable_version": int(meta.get("durable_version", 0)),
        "composed": db.execute("SELECT 1 FROM batches WHERE id = ?", (version,)).fetchone() is not None,
        "num_groups": db.execute("SELECT MAX(id) FROM groups").fetchone()[0] or 0,
        "carry": json.loads(carry[0]) if carry else {},
    }
    state.apply(("run", run))
    db.execute(
        "INSERT INTO instances (client_id, instance_id) SELECT client_id, instance_id FROM episodes "
        "WHERE instance_id != '' GROUP BY client_id, instance_id ORDER BY MAX(seq)"
    )
    for table in ("promises", "finishes", "aborts", "notes", "batch_groups", "episodes", "groups"):
        db.execute(f"DROP TABLE {table}")
    db.execute("DELETE FROM meta WHERE key IN ('base_version', 'durable_version')")
    return state
