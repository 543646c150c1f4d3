"""`Journal`: the SQLite file that holds every fact that must survive, as a redo log. One writer at a time.

What a transaction wrote is on disk once it is committed (`synchronous=FULL`): when it ends, or, where `commits_itself`
was switched off, with the next `commit`, so that several share one wait for the disk. It stores and finds; what is
allowed is decided elsewhere. Times are Unix seconds.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from agentjet.config import JobConfig
from agentjet.errors import ConfigError, Later
from agentjet.protocol import Event
from agentjet.swarm.records import Batch, Episode, Group
from agentjet.swarm.rows import (
    EPISODES_FROM,
    SELECT_CALLS,
    SELECT_EPISODES,
    RecordedCall,
    pack_floats,
    pack_ints,
    read_call,
    read_episode,
    to_json,
    unpack_ints,
)
from agentjet.swarm.schema import MIGRATIONS, SCHEMA, SCHEMA_VERSION
from agentjet.types import Call

IDEMPOTENCY_SECONDS = 86_400.0
"""How long a key is remembered at least: far beyond any client's retries."""
EVENTS_KEPT = 100_000


class Journal:
    """Typed rows in and out of the file. Build with `Journal.open`."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: int) -> None:
        self.path = path
        self._db = connection
        self._lock = lock
        self._depth = 0
        self._lost: sqlite3.OperationalError | None = None
        self.commits_itself = True
        """Whether every transaction is committed as it ends."""

    # ---- the file ------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path, *, model: str = "") -> Self:
        """Open or create.

        Raises `ConfigError` when another process has it, or it belongs to another model or a newer AgentJet.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise ConfigError(
                f"server.data_dir = {str(path.parent)!r} is in use by another server: "
                "stop that one, or choose another folder"
            ) from None
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        journal = cls(path, connection, lock)
        try:
            journal._prepare(model)
        except sqlite3.DatabaseError as error:
            journal.close()
            raise ConfigError(f"{path} cannot be read as a journal ({error}); choose another server.data_dir") from None
        except ConfigError:
            journal.close()
            raise
        return journal

    def close(self) -> None:
        """Close the file and let others have it; idempotent."""
        self._db.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _prepare(self, model: str) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA foreign_keys = ON")
        if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            self._db.executescript(
                f"BEGIN IMMEDIATE; {SCHEMA} INSERT INTO meta VALUES ('schema_version', '{SCHEMA_VERSION}'); COMMIT;"
            )
        found = int(self._meta("schema_version", "0"))
        while found in MIGRATIONS:
            self._db.executescript(
                f"BEGIN IMMEDIATE; {MIGRATIONS[found]} "
                f"UPDATE meta SET value = '{found + 1}' WHERE key = 'schema_version'; COMMIT;"
            )
            found += 1
        if found != SCHEMA_VERSION:
            raise ConfigError(
                f"{self.path} has journal schema {found}, this AgentJet reads {SCHEMA_VERSION}: "
                "use the AgentJet that wrote it, or choose another server.data_dir"
            )
        owner = self._meta("model", "")
        if model and owner and owner != model:
            raise ConfigError(
                f"server.data_dir = {str(self.path.parent)!r} belongs to model {owner!r}, "
                f"not to model.name = {model!r}: choose another folder, or that model"
            )
        if model and not owner:
            self._set_meta("model", model)

    @property
    def in_transaction(self) -> bool:
        return self._depth > 0

    @property
    def has_uncommitted(self) -> bool:
        return self._db.in_transaction

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; nested ones join the outermost. An error undoes it, and nothing that ended before it.

        Raises `Later` (503) when the disk refuses the write.
        """
        if self._depth:
            yield
            return
        try:
            if not self._db.in_transaction:
                self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("SAVEPOINT one")
            self._depth = 1
            yield
            self._db.execute("RELEASE one")
            if self.commits_itself:
                self._db.execute("COMMIT")
        except BaseException as error:
            self._undo(error)
            if isinstance(error, sqlite3.OperationalError):
                raise _refused(error) from error
            raise
        finally:
            self._depth = 0

    def commit(self) -> None:
        """Have on disk what ended transactions wrote. Raises `Later`, and then all of it is undone."""
        assert not self._depth, "a commit comes between transactions"
        lost, self._lost = self._lost, None
        try:
            if lost is not None:
                raise lost
            if self._db.in_transaction:
                self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise _refused(error) from error

    def _undo(self, error: BaseException) -> None:
        """Back to before the transaction. A disk that refuses a write may take all that is uncommitted with it: then
        the next `commit` fails, so that nobody is told that it succeeded.
        """
        if self._db.in_transaction and not self.commits_itself:
            self._db.execute("ROLLBACK TO one")
            self._db.execute("RELEASE one")
        elif self._db.in_transaction:
            self._db.execute("ROLLBACK")
        elif isinstance(error, sqlite3.OperationalError) and not self.commits_itself:
            self._lost = error

    def _meta(self, key: str, default: str) -> str:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return default if row is None else str(row[0])

    def _set_meta(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    # ---- versions ------------------------------------------------------------------------------------------

    def is_empty(self) -> bool:
        """Whether no episode ever began and nothing was learned."""
        return not self._db.execute("SELECT 1 FROM episodes UNION ALL SELECT 1 FROM batches LIMIT 1").fetchone()

    def policy_version(self) -> int:
        newest = self._db.execute("SELECT MAX(batch_id) FROM steps").fetchone()[0]
        return int(self._meta("base_version", "0")) if newest is None else int(newest) + 1

    def set_base_version(self, policy_version: int) -> None:
        """Where an empty journal starts: what came before is in a checkpoint."""
        self._set_meta("base_version", str(policy_version))
        self._set_meta("durable_version", str(policy_version))

    def durable_version(self) -> int:
        """Batches below it cannot be replayed: their tokens may be gone."""
        return int(self._meta("durable_version", "0"))

    # ---- episodes ------------------------------------------------------------------------------------------

    def next_episode_seq(self) -> int:
        return self._next("SELECT MAX(seq) FROM episodes")

    def next_group_id(self) -> int:
        return self._next("SELECT MAX(id) FROM groups")

    def _next(self, newest: str) -> int:
        return int(self._db.execute(newest).fetchone()[0] or 0) + 1

    def add_episode(self, episode: Episode) -> None:
        e = episode
        self._insert(
            "episodes",
            (e.seq, e.id, e.client_id, e.task_id, e.task_set, e.group, e.group_id, e.mode, e.policy_version, e.begun),
        )

    def add_finish(self, episode: Episode) -> None:
        e = episode
        self._insert(
            "finishes",
            (e.id, e.reward, to_json(e.by_role), to_json(e.metrics), e.num_calls, e.num_tokens, e.ended),
        )

    def add_abort(self, episode: Episode, for_batch: int) -> None:
        e = episode
        self._insert("aborts", (e.id, e.status, e.reason, e.num_calls, e.num_tokens, e.ended, for_batch))

    def episode(self, episode_id: str) -> Episode | None:
        row = self._db.execute(f"{SELECT_EPISODES} WHERE e.id = ?", (episode_id,)).fetchone()
        return None if row is None else read_episode(row)

    def recent_episodes(self, limit: int) -> list[Episode]:
        """The newest ones, newest first."""
        return [
            read_episode(row) for row in self._db.execute(f"{SELECT_EPISODES} ORDER BY e.seq DESC LIMIT ?", (limit,))
        ]

    def unsettled_episodes(self) -> list[Episode]:
        """Live ones, and finished training ones that are neither trained nor dropped, in the order they began."""
        rows = self._db.execute(
            f"{SELECT_EPISODES} WHERE a.episode_id IS NULL AND (f.episode_id IS NULL OR "
            "(e.mode = 'train' AND s.batch_id IS NULL AND g.state != 'dropped')) ORDER BY e.seq"
        )
        return [read_episode(row) for row in rows]

    def oldest_versions(self) -> dict[str, int]:
        """The policy version of each unsettled episode's oldest token. Within a call versions never fall."""
        rows = self._db.execute(
            "SELECT c.episode_id, substr(c.versions, 1, 4) FROM calls c LEFT JOIN batch_members m USING (episode_id) "
            "LEFT JOIN steps s USING (batch_id) LEFT JOIN aborts a USING (episode_id) "
            "WHERE s.batch_id IS NULL AND a.episode_id IS NULL AND length(c.versions) > 0"
        )
        oldest: dict[str, int] = {}
        for episode_id, first in rows:
            version = unpack_ints(first)[0]
            oldest[episode_id] = min(version, oldest.get(episode_id, version))
        return oldest

    def counts(self) -> dict[str, int]:
        """Episodes by status, and the finished training ones by what became of them."""
        row = self._db.execute(
            "SELECT COUNT(*), COUNT(f.episode_id), "
            "COALESCE(SUM(a.status = 'aborted'), 0), COALESCE(SUM(a.status = 'expired'), 0), "
            "COUNT(s.batch_id), COALESCE(SUM(f.episode_id IS NOT NULL AND g.state = 'dropped'), 0), "
            f"COALESCE(SUM(f.episode_id IS NOT NULL AND e.mode = 'train'), 0) {EPISODES_FROM}"
        ).fetchone()
        every, finished, aborted, expired, trained, dropped, finished_train = (int(n) for n in row)
        return {
            "live": every - finished - aborted - expired,
            "finished": finished,
            "aborted": aborted,
            "expired": expired,
            "trained": trained,
            "waiting": finished_train - trained - dropped,
            "dropped": dropped,
        }

    def lost_episodes(self, for_batch: int) -> dict[str, int]:
        """Aborted and expired while the batch was being filled; apart from them those ended as `surplus` or `stale`."""
        rows = self._db.execute(
            "SELECT CASE WHEN reason LIKE 'surplus:%' THEN 'surplus' WHEN reason LIKE 'stale:%' THEN 'stale' "
            "ELSE status END AS how, COUNT(*) FROM aborts WHERE for_batch = ? GROUP BY how",
            (for_batch,),
        )
        return {str(status): int(count) for status, count in rows}

    # ---- calls ---------------------------------------------------------------------------------------------

    def add_call(self, call: Call, encoded_suffix: Sequence[bytes], encoded_completion: Sequence[bytes]) -> None:
        pieces = [*encoded_suffix, *encoded_completion]
        values = (
            *(None, call.id, call.episode_id, call.role, call.parent, call.kept),
            *(pack_ints(call.suffix), pack_ints(call.completion), pack_floats(call.logprobs), pack_ints(call.versions)),
            *(b"".join(pieces), pack_ints([len(piece) for piece in pieces])),
            *(call.temperature, call.finish_reason, to_json(asdict(call.response)), call.prompt_key, call.created),
            *(to_json(asdict(call.ask)), call.fork, call.retry_of, call.context, call.allowed),
        )
        self._insert("calls", values)

    def calls(self, episode_id: str) -> list[RecordedCall]:
        """An episode's calls in the order they were recorded, with the encoded pieces of suffix and completion."""
        rows = self._db.execute(f"{SELECT_CALLS} WHERE episode_id = ? ORDER BY seq", (episode_id,))
        return [read_call(row) for row in rows]

    def add_undelivered(self, call_ids: Iterable[str]) -> None:
        """These answers did not reach their agent."""
        for call_id in call_ids:
            self._db.execute("INSERT OR IGNORE INTO undelivered VALUES (?)", (call_id,))

    def undelivered(self, episode_id: str) -> frozenset[str]:
        """The episode's calls whose answer did not reach the agent, as far as the transport could tell."""
        rows = self._db.execute(
            "SELECT call_id FROM undelivered WHERE call_id IN (SELECT id FROM calls WHERE episode_id = ?)",
            (episode_id,),
        )
        return frozenset(row[0] for row in rows)

    # ---- groups and batches --------------------------------------------------------------------------------

    def put_group(self, group: Group) -> None:
        """Insert or update; members follow from the episodes."""
        g = group
        self._db.execute(
            "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
            "touched = excluded.touched, state = excluded.state, reason = excluded.reason, "
            "closed = excluded.closed, for_batch = excluded.for_batch",
            (g.id, g.client_id, g.name, g.opened, g.touched, g.state, g.reason, g.closed, g.for_batch),
        )

    def unlearned_groups(self) -> list[Group]:
        """Open and complete groups that are in no batch yet, in the order they were opened."""
        rows = self._db.execute(
            "SELECT id, client_id, name, opened, touched, state, reason, closed, for_batch FROM groups "
            "WHERE state != 'dropped' AND id NOT IN (SELECT group_id FROM batch_groups) ORDER BY id"
        ).fetchall()
        members = (
            "SELECT id FROM episodes WHERE group_id = ? AND id NOT IN (SELECT episode_id FROM aborts) ORDER BY seq"
        )
        return [
            Group(
                id=row[0],
                client_id=row[1],
                name=row[2],
                opened=row[3],
                touched=row[4],
                members=tuple(member[0] for member in self._db.execute(members, row[:1])),
                state=row[5],
                reason=row[6],
                closed=row[7],
                for_batch=row[8],
            )
            for row in rows
        ]

    def dropped_groups(self, for_batch: int) -> dict[str, int]:
        """Groups dropped while the batch was being filled, by reason."""
        rows = self._db.execute(
            "SELECT reason, COUNT(*) FROM groups WHERE state = 'dropped' AND for_batch = ? GROUP BY reason",
            (for_batch,),
        )
        return {str(reason): int(count) for reason, count in rows}

    def add_batch(self, batch: Batch, group_ids: Sequence[int]) -> None:
        self._insert("batches", (batch.id, batch.seed, batch.job.model_dump_json(), batch.composed))
        for g, (group_id, members) in enumerate(zip(group_ids, batch.groups, strict=True)):
            self._insert("batch_groups", (group_id, batch.id, g))
            for position, episode_id in enumerate(members):
                self._insert("batch_members", (episode_id, batch.id, g, position))

    def remove_batch(self, batch_id: int) -> None:
        """As if the batch had not been composed; its episodes and groups stay."""
        for table, column in (("batch_members", "batch_id"), ("batch_groups", "batch_id"), ("batches", "id")):
            self._db.execute(f"DELETE FROM {table} WHERE {column} = ?", (batch_id,))

    def batches(self, policy_version: int) -> list[Batch]:
        """Batches from `policy_version` on, in order, learned or not."""
        rows = self._db.execute(
            "SELECT id, seed, job, composed FROM batches WHERE id >= ? ORDER BY id", (policy_version,)
        ).fetchall()
        return [
            Batch(
                id=row[0],
                groups=self._batch_groups(row[0]),
                seed=row[1],
                job=JobConfig.model_validate_json(row[2]),
                composed=row[3],
            )
            for row in rows
        ]

    def _batch_groups(self, batch_id: int) -> tuple[tuple[str, ...], ...]:
        groups: dict[int, list[str]] = {}
        rows = self._db.execute(
            "SELECT group_position, episode_id FROM batch_members WHERE batch_id = ? ORDER BY group_position, position",
            (batch_id,),
        )
        for position, episode_id in rows:
            groups.setdefault(position, []).append(episode_id)
        return tuple(tuple(members) for members in groups.values())

    def add_step(self, batch_id: int, metrics: Mapping[str, float], learned: float) -> None:
        self._insert("steps", (batch_id, to_json(metrics), learned))

    def step(self, batch_id: int) -> dict[str, float]:
        """The metrics of a learned batch; empty when it was not learned here."""
        row = self._db.execute("SELECT metrics FROM steps WHERE batch_id = ?", (batch_id,)).fetchone()
        return {} if row is None else dict(json.loads(row[0]))

    # ---- keys, events, pruning -----------------------------------------------------------------------------

    def recall(self, scope: str, key: str) -> tuple[str, str] | None:
        """The fingerprint of the request that used this key, and the episode it was about."""
        row = self._db.execute(
            "SELECT fingerprint, episode_id FROM idempotency WHERE scope = ? AND key = ?", (scope, key)
        ).fetchone()
        return None if row is None else (str(row[0]), str(row[1]))

    def remember(self, scope: str, key: str, fingerprint: str, episode_id: str, created: float) -> None:
        self._insert("idempotency", (scope, key, fingerprint, episode_id, created))

    def add_event(self, kind: str, time: float, body: Mapping[str, Any]) -> Event:
        seq = self._insert("events", (None, kind, time, to_json(body)))
        return Event(seq=seq, kind=kind, time=time, body=dict(body))

    def events(self, after: int, limit: int) -> list[Event]:
        rows = self._db.execute(
            "SELECT seq, kind, time, body FROM events WHERE seq > ? ORDER BY seq LIMIT ?", (after, limit)
        )
        return [Event(seq=seq, kind=kind, time=time, body=json.loads(body)) for seq, kind, time, body in rows]

    def last_event(self) -> int:
        """Number of the newest event, 0 before the first."""
        return int(self._db.execute("SELECT MAX(seq) FROM events").fetchone()[0] or 0)

    def prune(self, policy_version: int, now: float) -> None:
        """Let go of the calls that no replay from `policy_version` on needs, of old keys and old events."""
        self._db.execute(
            "DELETE FROM calls WHERE episode_id IN (SELECT e.id FROM episodes e JOIN calls c ON c.episode_id = e.id "
            "LEFT JOIN finishes f ON f.episode_id = e.id LEFT JOIN aborts a ON a.episode_id = e.id "
            "LEFT JOIN groups g ON g.id = e.group_id LEFT JOIN batch_members m ON m.episode_id = e.id "
            "WHERE a.episode_id IS NOT NULL OR m.batch_id < ? "
            "OR (f.episode_id IS NOT NULL AND (e.mode = 'eval' OR g.state = 'dropped')))",
            (policy_version,),
        )
        self._db.execute("DELETE FROM undelivered WHERE call_id NOT IN (SELECT id FROM calls)")
        self._db.execute("DELETE FROM idempotency WHERE created < ?", (now - IDEMPOTENCY_SECONDS,))
        self._db.execute("DELETE FROM events WHERE seq <= (SELECT MAX(seq) FROM events) - ?", (EVENTS_KEPT,))
        self._set_meta("durable_version", str(policy_version))

    def _insert(self, table: str, values: Sequence[Any]) -> int:
        marks = ", ".join("?" * len(values))
        return int(self._db.execute(f"INSERT INTO {table} VALUES ({marks})", tuple(values)).lastrowid or 0)


def _refused(error: sqlite3.OperationalError) -> Later:
    return Later(
        f"The journal could not be written ({error}); nothing was recorded.",
        code="journal_unavailable",
        status=503,
        retry_after=5.0,
    )
