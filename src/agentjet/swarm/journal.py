"""`Journal`: the SQLite file that holds every fact that must survive a crash. One writer at a time.

A transaction is on disk when it ends (`synchronous=FULL`), or, after `defer_commits`, when the next `commit` and `sync`
have returned, so that several share one wait. The journal stores and finds; the rules are elsewhere. Times are Unix
seconds.

Retention:

* facts are deleted once a snapshot contains their effect. The store writes a snapshot with each checkpoint, and after
  every `SNAPSHOT_EVERY` facts;
* with each snapshot the journal deletes calls that no replay needs, idempotency keys older than `IDEMPOTENCY_SECONDS`,
  all events except the newest `EVENTS_KEPT`, evaluations and rollbacks, and all settled episodes except the newest
  `EPISODES_KEPT`;
* batches, their members, operations and metrics are kept.

An `Origin` is what the weights of the policies follow from, besides the batches of the journal. It is recorded when a
data dir is created and compared at every start, because from another origin the same `policy_version` would be other
weights. Keys are settings, except `model_weights` (the fingerprint of the weights under `model.name`), `policies` (the
policies that the settings name, sorted) and `branched_from` (the data dir and the policy version that a branch began
at). Keys about a named policy have `POLICY/` in front.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from agentjet.config import JobConfig, ModelConfig
from agentjet.errors import ConfigError
from agentjet.protocol import Event
from agentjet.swarm.journal_file import JournalFile
from agentjet.swarm.schema import (
    SELECT_CALLS,
    RecordedCall,
    pack_floats,
    pack_ints,
    read_call,
    settled_row,
    to_json,
)
from agentjet.swarm.state import Batch, Episode, Fact, JobSettings, State
from agentjet.types import SOLE_POLICY, Call, CheckpointStamp, EpisodeStatus, ModelInfo, metrics_prefix

IDEMPOTENCY_SECONDS = 86_400.0
"""Longer than any client repeats a request."""
EVENTS_KEPT = 100_000
EPISODES_KEPT = 2_000_000
SNAPSHOT_EVERY = 20_000
"""Facts after which a snapshot is written without a checkpoint. A start reads at most so many facts."""


Origin = Mapping[str, str | int]

BRANCHED_FROM = "branched_from"
POLICIES = "policies"
FREE = ("model.device", "model.threads")
"""Change the weights by rounding only, and depend on the machine: logged, not refused."""


def of_settings(model: ModelConfig) -> Origin:
    """The part of a policy's origin that is known before a worker runs."""
    origin: dict[str, str | int] = {"model.name": model.name, "model.lora.rank": model.lora.rank}
    if model.lora.rank:
        origin["model.lora.alpha"] = model.lora.alpha
        origin["model.lora.target_modules"] = ",".join(sorted(map(str.strip, model.lora.target_modules.split(","))))
    if model.dtype != "auto":
        origin["model.dtype"] = model.dtype
    return origin


def of_worker(model: ModelInfo) -> Origin:
    """The part of a policy's origin that a worker reports, before it loads or learns anything."""
    origin: dict[str, str | int] = {"model.dtype": model.dtype, "model.device": model.device}
    if model.weights:
        origin["model_weights"] = model.weights
    if model.threads:
        origin["model.threads"] = model.threads
    return origin


def changes(recorded: Origin, given: Origin, folder: Path) -> list[str]:
    """Sentences about allowed differences. Raises `ConfigError` for the first one that is not allowed."""
    differing = [key for key in given if key in recorded and recorded[key] != given[key]]
    for key in differing:
        policy, slash, setting = key.rpartition("/")
        if setting not in FREE:
            named = f"{setting} = {recorded[key]!r}"
            if setting == "model_weights":
                name = recorded.get(f"{policy}{slash}model.name")
                named += f" (the fingerprint of the weights under model.name = {name!r})"
            named += f" for policy {policy!r}" if policy else ""
            raise ConfigError(
                f"The run in {str(folder)!r} was created with {named}; {given[key]!r} would change the meaning of its "
                "checkpoints. Restore the first one, or use a new run or a new server.data_dir, with an export of this "
                "policy (`agentjet export`) as model.name."
            )
    return [
        f"{key} was {recorded[key]!r} and is {given[key]!r}: batches that are learned again after a crash may lead to "
        "weights that differ by rounding"
        for key in differing
    ]


def _named(policies: Sequence[str]) -> str:
    return f"the policies {', '.join(sorted(policies))}" if policies else "no named policies"


class Journal:
    """Typed rows in and out of a journal file. Construct it with `Journal.open`."""

    def __init__(self, file: JournalFile) -> None:
        self.file = file
        self.path = file.path
        self._checked_origin: dict[str, str | int] = {}

    @classmethod
    def open(cls, path: Path, *, models: Mapping[str, ModelConfig] | None = None) -> Self:
        """Open or create a journal. `models` are those of the policies; `policy` alone if the settings name none.

        Raises `ConfigError` if another process has it open, the disk refuses it, it has an unknown schema, or it has
        other policies or another origin than `models`.
        """
        journal = cls(JournalFile.open(path))
        if models is None:
            return journal
        policies = () if models.keys() == {SOLE_POLICY} else tuple(models)
        try:
            has_begun = journal.read_state().num_episodes > 0
            if not has_begun and BRANCHED_FROM not in journal.origin:
                # A setting may be mistyped at the first start, so it counts only once an episode has begun.
                journal._db.execute("DELETE FROM meta WHERE key = 'origin'")
            # An origin is recorded before the first call. Without one, no policy was ever up.
            elif journal.origin and {*policies} != {*journal.policies}:
                raise ConfigError(
                    f"The run in {str(path.parent)!r} was created with {_named(journal.policies)}; the settings "
                    f"have {_named(policies)}. The policies of a run cannot change: restore [policies], or use "
                    "another run."
                )
            if policies:
                journal.check_origin({POLICIES: ",".join(sorted(policies))})
            for policy, model in models.items():
                journal.check_origin(of_settings(model), metrics_prefix(policy, policies))
        except (ConfigError, sqlite3.Error):
            journal.close()
            raise
        return journal

    @classmethod
    def open_read_only(cls, path: Path) -> Self:
        """See `JournalFile.open_read_only`."""
        return cls(JournalFile.open_read_only(path))

    @contextmanager
    def reading(self) -> Iterator[Self]:
        """The same journal on a read-only connection, for another thread. It reads committed changes only."""
        with closing(sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            yield type(self)(JournalFile(self.path, connection, -1))

    def close(self) -> None:
        """Close and unlock the file. Idempotent."""
        self.file.close()

    @property
    def _db(self) -> sqlite3.Connection:
        return self.file.db

    # ---- origin --------------------------------------------------------------------------------------------

    @property
    def origin(self) -> Origin:
        """The recorded origin. An older AgentJet recorded the model's name only."""
        recorded: dict[str, str | int] = json.loads(self.file.meta("origin", "{}"))
        return recorded

    def branch(self, origin: Origin, branched_from: str) -> None:
        """Start a new journal with the origin of another one, and record which one."""
        self.file.set_meta("origin", json.dumps({**origin, BRANCHED_FROM: branched_from}))

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that the settings named when the origin was recorded, sorted."""
        return tuple(filter(None, str(self.origin.get(POLICIES, "")).split(",")))

    def origin_of(self, policy: str) -> Origin:
        """The recorded origin of a policy, without the policy's name in its keys."""
        prefix = metrics_prefix(policy, self.policies)
        return {key.removeprefix(prefix): value for key, value in self.origin.items() if key.startswith(prefix)}

    def check_origin(self, given: Origin, prefix: str = "") -> list[str]:
        """Compare with the recorded origin; `prefix` comes in front of the keys. Returns sentences about allowed
        differences; raises `ConfigError` for others.
        """
        given = {f"{prefix}{key}": value for key, value in given.items()}
        changed = changes(self.origin, given, self.path.parent)
        self._checked_origin |= given
        return changed

    def record_origin(self) -> None:
        """Store the checked origin, because the policies were loaded with it."""
        if (now := {**self.origin, **self._checked_origin}) != self.origin:
            self.file.set_meta("origin", json.dumps(now))

    # ---- facts ---------------------------------------------------------------------------------------------

    def read_state(self) -> State:
        """The newest snapshot with the facts after it."""
        # One statement, so that a reader beside the server gets a snapshot and the facts that follow it.
        query = "SELECT -1 AS seq, body FROM snapshot UNION ALL SELECT seq, body FROM facts ORDER BY seq"
        state = State()
        for seq, body in self._db.execute(query):
            if seq < 0:
                state = State(json.loads(body))
                continue
            for fact in json.loads(body):
                state.apply(fact)
        state.log.clear()
        return state

    def num_facts(self) -> int:
        """Rows of facts since the snapshot."""
        return int(self._db.execute("SELECT COUNT(*) FROM facts").fetchone()[0])

    def add_facts(self, facts: Sequence[Fact]) -> None:
        """Record the facts of a transaction."""
        self.file.insert("facts", (None, to_json(facts)))

    def put_snapshot(self, state: State) -> None:
        """Replace the snapshot, and delete the facts that it contains."""
        self._db.execute("INSERT OR REPLACE INTO snapshot VALUES (0, ?)", (to_json(state.snapshot()),))
        self._db.execute("DELETE FROM facts")

    # ---- checkpoints and settings --------------------------------------------------------------------------

    def checkpoint_digest(self, policy_version: int) -> str | None:
        """Digest of the checkpoint of that version; None if none was recorded."""
        row = self._db.execute("SELECT digest FROM checkpoints WHERE policy_version = ?", (policy_version,)).fetchone()
        return None if row is None else str(row[0])

    def put_checkpoint(self, stamp: CheckpointStamp) -> None:
        """Record a checkpoint as the one of its version."""
        self._db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?)", (stamp.policy_version, stamp.digest))

    def undigested_until(self) -> int:
        """Newest policy version whose checkpoint AgentJet 0.1 may have written without a digest; -1 for none."""
        return int(self.file.meta("undigested_until", "-1"))

    def job_settings(self) -> JobSettings | None:
        """None before the first start, and if another AgentJet wrote settings that this one cannot read."""
        held = json.loads(self.file.meta("job_settings", "null"))
        try:
            return held and JobSettings(held["revision"], *map(JobConfig.model_validate, (held["given"], held["job"])))
        except ValueError:
            return None

    def put_job_settings(self, settings: JobSettings) -> None:
        jobs = {name: job.model_dump(mode="json") for name, job in (("given", settings.given), ("job", settings.job))}
        self.file.set_meta("job_settings", to_json({"revision": settings.revision, **jobs}))

    # ---- settled episodes ----------------------------------------------------------------------------------

    def add_settled(self, episode: Episode) -> None:
        self.file.insert("settled_episodes", settled_row(episode))

    def settled_episode(self, episode_id: str) -> Episode | None:
        row = self._db.execute("SELECT body FROM settled_episodes WHERE id = ?", (episode_id,)).fetchone()
        return None if row is None else Episode(**json.loads(row[0]))

    def settled_episodes(
        self, limit: int, *, status: EpisodeStatus | None = None, before: int | None = None
    ) -> list[Episode]:
        """The newest ones, newest first: all, those of a status, those with `seq` < `before`."""
        conditions = ["TRUE"]
        if before is not None:
            conditions.append("seq < :before")
        if status:
            conditions.append("status = :status")
        query = f"SELECT body FROM settled_episodes WHERE {' AND '.join(conditions)} ORDER BY seq DESC LIMIT :limit"
        rows = self._db.execute(query, {"status": status, "limit": limit, "before": before})
        return [Episode(**json.loads(body)) for (body,) in rows]

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

    def add_call(self, call: Call, encoded_suffix: Sequence[bytes], encoded_completion: Sequence[bytes]) -> None:
        pieces = [*encoded_suffix, *encoded_completion]
        values = (
            *(None, call.id, call.episode_id, call.role, call.parent, call.kept),
            *(pack_ints(call.suffix), pack_ints(call.completion), pack_floats(call.logprobs), pack_ints(call.versions)),
            *(b"".join(pieces), pack_ints([len(piece) for piece in pieces])),
            *(call.temperature, call.finish_reason, to_json(asdict(call.response)), call.prompt_key, call.created),
            *(to_json(asdict(call.ask)), call.fork, call.retry_of, call.context, call.support, call.untrained),
        )
        self.file.insert("calls", values)

    def calls(self, episode_id: str) -> list[RecordedCall]:
        """An episode's calls in the order they were recorded, with the encoded pieces of suffix and completion."""
        rows = self._db.execute(f"{SELECT_CALLS} WHERE episode_id = ? ORDER BY seq", (episode_id,))
        return [read_call(row) for row in rows]

    def add_undelivered(self, call_ids: Iterable[str]) -> None:
        """Record that these answers did not reach their agent."""
        for call_id in call_ids:
            self._db.execute("INSERT OR IGNORE INTO undelivered VALUES (?)", (call_id,))

    def undelivered(self, episode_id: str) -> frozenset[str]:
        """The episode's calls whose answer did not reach the agent, according to the transport."""
        rows = self._db.execute(
            "SELECT call_id FROM undelivered WHERE call_id IN (SELECT id FROM calls WHERE episode_id = ?)",
            (episode_id,),
        )
        return frozenset(row[0] for row in rows)

    # ---- batches -------------------------------------------------------------------------------------------

    def add_batch(self, batch: Batch) -> None:
        self.file.insert("batches", (batch.id, batch.job.model_dump_json(), batch.composed, to_json(batch.carry)))
        for g, members in enumerate(batch.groups):
            for position, episode_id in enumerate(members):
                self.file.insert("batch_members", (episode_id, batch.id, g, position))

    def carry(self) -> dict[str, float]:
        """Groups owed to each task set since the newest batch."""
        row = self._db.execute("SELECT carry FROM batches ORDER BY id DESC LIMIT 1").fetchone()
        return {} if row is None else dict(json.loads(row[0]))

    def remove_batches(self, start: int) -> None:
        """Delete the batches from `start` on, learned or not."""
        for table, column in (
            ("operations", "batch_id"),
            ("batch_members", "batch_id"),
            ("steps", "batch_id"),
            ("batches", "id"),
        ):
            self._db.execute(f"DELETE FROM {table} WHERE {column} >= ?", (start,))

    def drop_settled(self, episode_ids: Iterable[str], reason: str) -> None:
        """Turn trained episodes into dropped ones."""
        query = "UPDATE settled_episodes SET body = json_set(body, '$.trained_in', NULL, '$.dropped', ?) WHERE id = ?"
        self._db.executemany(query, [(reason, episode_id) for episode_id in episode_ids])

    def batches(self, start: int, stop: int | None = None) -> list[Batch]:
        """Batches from `start` on, before `stop`, in order, learned or not."""
        rows = self._db.execute(
            "SELECT id, job, composed, carry FROM batches WHERE id >= ? AND id < ? ORDER BY id",
            (start, 2**62 if stop is None else stop),
        ).fetchall()
        return [
            Batch(
                id=row[0],
                groups=self._batch_groups(row[0]),
                job=JobConfig.model_validate_json(row[1]),
                composed=row[2],
                carry=json.loads(row[3]),
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

    def put_operation(self, policy: str, number: int, kind: str, batch_id: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO operations VALUES (?, ?, ?, ?)", (policy, number, kind, batch_id))

    def operations(self, policy: str) -> list[tuple[int, str, int]]:
        """All operations on a policy, in order: number, kind and batch."""
        query = "SELECT number, kind, batch_id FROM operations WHERE policy = ? ORDER BY number"
        return list(self._db.execute(query, (policy,)))

    def add_step(self, batch_id: int, metrics: Mapping[str, float], learned: float) -> None:
        self.file.insert("steps", (batch_id, to_json(metrics), learned))

    def step(self, batch_id: int) -> dict[str, float]:
        """The metrics of a learned batch; empty if this run did not learn it."""
        row = self._db.execute("SELECT metrics FROM steps WHERE batch_id = ?", (batch_id,)).fetchone()
        return {} if row is None else dict(json.loads(row[0]))

    def recent_steps(self, limit: int) -> dict[int, dict[str, float]]:
        """The metrics of the newest learned batches by batch, the newest last."""
        rows = self._db.execute(
            "SELECT batch_id, metrics FROM steps ORDER BY batch_id DESC LIMIT ?", (limit,)
        ).fetchall()
        return {batch_id: json.loads(metrics) for batch_id, metrics in reversed(rows)}

    # ---- keys and events -----------------------------------------------------------------------------------

    def recall(self, scope: str, key: str) -> tuple[str, str] | None:
        """The fingerprint of the request that used this key, and the episode it was about."""
        row = self._db.execute(
            "SELECT fingerprint, episode_id FROM idempotency WHERE scope = ? AND key = ?", (scope, key)
        ).fetchone()
        return None if row is None else (str(row[0]), str(row[1]))

    def remember(self, scope: str, key: str, fingerprint: str, episode_id: str, created: float) -> None:
        self.file.insert("idempotency", (scope, key, fingerprint, episode_id, created))

    def add_event(self, kind: str, time: float, body: Mapping[str, Any]) -> Event:
        seq = self.file.insert("events", (None, kind, time, to_json(body)))
        return Event(seq=seq, kind=kind, time=time, body=dict(body))

    def events(self, after: int, limit: int) -> list[Event]:
        rows = self._db.execute(
            "SELECT seq, kind, time, body FROM events WHERE seq > ? ORDER BY seq LIMIT ?", (after, limit)
        )
        return [Event(seq=seq, kind=kind, time=time, body=json.loads(body)) for seq, kind, time, body in rows]

    def events_of(self, kind: str) -> list[Event]:
        """All events of a kind that are kept, in order: evaluations and rollbacks are never deleted."""
        assert kind in ("evaluation", "rollback"), "events of other kinds have no index"
        rows = self._db.execute(
            "SELECT seq, kind, time, body FROM events WHERE kind = ? AND kind IN ('evaluation', 'rollback') "
            "ORDER BY seq",
            (kind,),
        )
        return [Event(seq=seq, kind=kind, time=time, body=json.loads(body)) for seq, kind, time, body in rows]

    def last_event(self) -> int:
        """Number of the newest event, 0 before the first."""
        return int(self._db.execute("SELECT MAX(seq) FROM events").fetchone()[0] or 0)

    def prune(self, state: State, now: float) -> None:
        """Delete what the retention rule above does not keep."""
        needed = [*state.episodes, *(e for batch in self.batches(state.durable_version) for e in batch.episode_ids)]
        self._db.execute(
            "DELETE FROM calls WHERE episode_id IN "
            "(SELECT DISTINCT episode_id FROM calls EXCEPT SELECT value FROM json_each(?))",
            (json.dumps(needed),),
        )
        self._db.execute("DELETE FROM undelivered WHERE call_id NOT IN (SELECT id FROM calls)")
        self._db.execute("DELETE FROM idempotency WHERE created < ?", (now - IDEMPOTENCY_SECONDS,))
        self._db.execute(
            "DELETE FROM events WHERE seq <= (SELECT MAX(seq) FROM events) - ? "
            "AND kind NOT IN ('evaluation', 'rollback')",
            (EVENTS_KEPT,),
        )
        self._db.execute("DELETE FROM settled_episodes WHERE seq <= ?", (state.num_episodes - EPISODES_KEPT,))
