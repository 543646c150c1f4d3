"""The tables of a journal, and the migration from the schema before, in which most facts were JSON.

One set of queries returns rows of the present tables from those of the earlier schema. A journal that is only read gets
them as temporary views with the names of the present tables. A journal that is opened for writing is migrated by them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

SCHEMA_VERSION = 15
EARLIER_VERSION = 14
"""The schema that is migrated."""
UNCHANGED = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

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

CREATE TABLE transcripts (
    seq INTEGER PRIMARY KEY,
    episode_id TEXT NOT NULL UNIQUE,
    reason TEXT NOT NULL,
    most INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL
);

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
CALL_COLUMNS = {
    "role": ("TEXT", "body ->> '$[0].role'"),
    "after_call": ("TEXT", "body ->> '$[0].ask.after'"),
    "retry_of": ("TEXT", "body ->> '$[0].retry_of'"),
    "untrained": ("TEXT", "COALESCE(body ->> '$[0].untrained', '')"),
    "num_tokens": ("INTEGER", "json_array_length(body, '$[0].completion')"),
    "num_bytes": ("INTEGER", "LENGTH(CAST(body AS BLOB))"),
}
"""Columns of calls that the first journals of the earlier schema lack, or have as NULL: type, and value by the body.

They stand at the end of the table, so that a migration adds them without a copy of the bodies.
"""
_CALLS = """
CREATE TABLE calls (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    episode_id TEXT NOT NULL,
    undelivered INTEGER NOT NULL,
    body TEXT NOT NULL{more}
);
"""
_ADDED = ", ".join(f"{name} {kind}" for name, (kind, _) in CALL_COLUMNS.items())
# An index of all facts: the event loop reads them without the bodies, which may have megabytes.
CALL_INDEXES = """
CREATE INDEX facts_of_calls ON calls
    (episode_id, seq, id, undelivered, role, after_call, retry_of, untrained, num_tokens, num_bytes);
CREATE INDEX idempotency_by_age ON idempotency (created);
"""
_CALL_INDEXES = ("facts_of_calls", "idempotency_by_age")
REBUILT = """
CREATE TABLE counts (
    seq INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    batch INTEGER NOT NULL,
    name TEXT NOT NULL,
    number INTEGER NOT NULL,
    UNIQUE (kind, batch, name)
);

CREATE TABLE code_versions (
    version TEXT PRIMARY KEY,
    last_episode INTEGER NOT NULL,
    episodes INTEGER NOT NULL,
    finished INTEGER NOT NULL,
    aborted INTEGER NOT NULL,
    not_needed INTEGER NOT NULL,
    reward_sum REAL NOT NULL
) WITHOUT ROWID;

CREATE TABLE episodes (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    settled INTEGER NOT NULL,
    client_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    task_set TEXT NOT NULL,
    "group" TEXT NOT NULL,
    group_id INTEGER,
    mode TEXT NOT NULL,
    policy_version INTEGER NOT NULL,
    begun REAL NOT NULL,
    status TEXT NOT NULL,
    ended REAL,
    reward REAL,
    by_role TEXT NOT NULL,
    call_rewards TEXT NOT NULL,
    call_rewards_digest TEXT NOT NULL,
    metrics TEXT NOT NULL,
    reward_text TEXT NOT NULL,
    reason TEXT NOT NULL,
    not_needed TEXT NOT NULL,
    num_calls INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    trained_in INTEGER,
    oldest_version INTEGER,
    dropped TEXT NOT NULL,
    code_version TEXT NOT NULL,
    at_version INTEGER,
    temperature REAL,
    max_turns INTEGER NOT NULL,
    task_mean REAL,
    instance_id TEXT NOT NULL,
    seed INTEGER,
    noted TEXT NOT NULL,
    refused TEXT NOT NULL
);
CREATE INDEX episodes_by_status ON episodes (status, seq);
CREATE INDEX unsettled_episodes ON episodes (seq) WHERE NOT settled;
CREATE INDEX episodes_of_group ON episodes (group_id);

CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    client_id TEXT NOT NULL,
    name TEXT NOT NULL,
    opened REAL NOT NULL,
    touched REAL NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    closed REAL,
    task_set TEXT NOT NULL,
    code_version TEXT NOT NULL,
    is_left INTEGER NOT NULL,
    size INTEGER NOT NULL,
    temperature REAL,
    max_turns INTEGER NOT NULL,
    task_mean REAL
);

CREATE TABLE batches (
    id INTEGER PRIMARY KEY,
    groups TEXT NOT NULL,
    job TEXT NOT NULL,
    composed REAL NOT NULL,
    carry TEXT NOT NULL,
    metrics TEXT,
    fingerprint TEXT
);
"""
SCHEMA = UNCHANGED + _CALLS.format(more=f", {_ADDED}") + CALL_INDEXES + REBUILT
EARLIER_SCHEMA = f"""{UNCHANGED}{_CALLS.format(more="")}
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

CREATE TABLE batches (id INTEGER PRIMARY KEY, body TEXT NOT NULL, metrics TEXT);
"""
_NOT_NEEDED = " ".join(
    f"WHEN body ->> 'reason' GLOB '{start}:*' THEN '{start}'"
    for start in ("surplus", "stale", "not needed", "replaced")
)
_STATE = "(SELECT value FROM main.meta WHERE key = 'state')"
# Keys of `losses` were `BATCH/groups/REASON` and `BATCH/episodes/REASON`.
_AFTER_BATCH = "substr(key, instr(key, '/') + 1)"
COUNTS = f"""
SELECT ROW_NUMBER() OVER () AS seq, * FROM (
SELECT 'outcome' AS kind, 0 AS batch, key AS name, value AS number FROM json_each({_STATE}, '$.counts')
UNION ALL SELECT 'dropped', 0, key, value FROM json_each({_STATE}, '$.dropped')
UNION ALL SELECT 'lost_' || substr({_AFTER_BATCH}, 1, instr({_AFTER_BATCH}, '/') - 1),
    CAST(substr(key, 1, instr(key, '/') - 1) AS INTEGER),
    substr({_AFTER_BATCH}, instr({_AFTER_BATCH}, '/') + 1), value
    FROM json_each({_STATE}, '$.losses'))
"""
# At most 20, whose order is kept. An episode of the present schema has a higher number.
CODE_VERSIONS = f"""
SELECT key AS version, ROW_NUMBER() OVER (ORDER BY id) - 20 AS last_episode,
    value ->> 'episodes' AS episodes, value ->> 'finished' AS finished,
    value ->> 'aborted' AS aborted, COALESCE(value ->> 'not_needed', 0) AS not_needed,
    value ->> 'reward_sum' AS reward_sum
    FROM json_each({_STATE}, '$.code_versions')
"""


def _rebuilt(connection: sqlite3.Connection) -> dict[str, dict[str, str]]:
    """The present columns of the tables that a migration rebuilds, by the columns of the earlier table."""

    def each(names: str, expression: str) -> dict[str, str]:
        return {name: expression.replace("NAME", name) for name in names.split()}

    text, number = "COALESCE(body ->> '$.NAME', '')", "COALESCE(body ->> '$.NAME', 0)"
    mapping, optional = "COALESCE(body -> '$.NAME', '{}')", "json_extract(body, '$.NAME')"  # As an index has it.
    return {
        "episodes": {
            **each("seq id status settled", "NAME"),
            **each("client_id task_id task_set group mode call_rewards_digest reward_text reason dropped", text),
            **each("code_version instance_id", text),
            **each("policy_version begun num_calls num_tokens max_turns", number),
            **each("group_id ended reward trained_in oldest_version at_version temperature task_mean seed", optional),
            **each("by_role call_rewards metrics noted refused", mapping),
            "not_needed": f"CASE WHEN status != 'aborted' THEN '' {_NOT_NEEDED} ELSE '' END",
        },
        "groups": {
            "id": "id",
            **each("client_id name state reason task_set code_version", text),
            **each("opened touched is_left size max_turns", number),
            **each("closed temperature task_mean", optional),
        },
        "batches": {
            **each("id metrics", "NAME"),
            **each("groups job", "body -> '$.NAME'"),
            "composed": number.replace("NAME", "composed"),
            "carry": mapping.replace("NAME", "carry"),
            "fingerprint": "fingerprint" if "fingerprint" in _columns(connection, "batches") else "NULL",
        },
    }


def _columns(connection: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}


def _select(columns: dict[str, str], table: str) -> str:
    return f"SELECT {', '.join(f'{value} AS {chr(34)}{name}{chr(34)}' for name, value in columns.items())} FROM {table}"


def views(connection: sqlite3.Connection) -> Iterator[str]:
    """The statements after which a file of the earlier schema is read as one of the present."""
    present = _columns(connection, "calls")
    calls = {name: name for name in ("seq", "id", "episode_id", "undelivered", "body")}
    for name, (_, value) in CALL_COLUMNS.items():
        calls[name] = f"COALESCE({name}, {value})" if name in present else value
    queries = {table: _select(columns, f"main.{table}") for table, columns in _rebuilt(connection).items()}
    queries |= {"calls": _select(calls, "main.calls"), "counts": COUNTS, "code_versions": CODE_VERSIONS}
    for table, query in queries.items():
        yield f"CREATE TEMP VIEW {table} AS {query}"  # It hides the table of that name.


def migration(connection: sqlite3.Connection) -> Iterator[str]:
    """The statements of one transaction that migrates a file of the earlier schema.

    The bodies of calls stay where they are: a run may have gigabytes of them.
    """
    rebuilt, present = _rebuilt(connection), _columns(connection, "calls")
    for name, (kind, _) in CALL_COLUMNS.items():
        if name not in present:
            yield f"ALTER TABLE calls ADD COLUMN {name} {kind}"
    values = ", ".join(f"{name} = {value}" for name, (_, value) in CALL_COLUMNS.items())
    yield f"UPDATE calls SET {values} WHERE num_bytes IS NULL"
    for index in ("episodes_by_status", "unsettled_episodes", "episodes_of_group", "calls_of_episode", *_CALL_INDEXES):
        yield f"DROP INDEX IF EXISTS {index}"
    for table in rebuilt:
        yield f"ALTER TABLE {table} RENAME TO earlier_{table}"
    yield from filter(str.strip, (REBUILT + CALL_INDEXES).split(";"))
    for table, columns in rebuilt.items():
        names = ", ".join(f'"{name}"' for name in columns)
        yield f"INSERT INTO {table} ({names}) {_select(columns, f'earlier_{table}')}"
        yield f"DROP TABLE earlier_{table}"
    yield f"INSERT INTO counts {COUNTS}"
    yield f"INSERT INTO code_versions {CODE_VERSIONS}"
    yield (
        "UPDATE meta SET value = json_remove(value, '$.counts', '$.dropped', '$.losses', '$.code_versions', "
        "'$.carry', '$.num_episodes', '$.num_groups') WHERE key = 'state'"
    )
    yield f"UPDATE meta SET value = '{SCHEMA_VERSION}' WHERE key = 'schema_version'"
