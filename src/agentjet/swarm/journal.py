"""`Journal`: the SQLite file that holds every fact that must survive a crash. One writer at a time.

A transaction is on disk when it ends (`synchronous=FULL`), or, after `defer_commits`, when the next `commit` and `sync`
have returned, so that several share one wait. The journal stores and finds; the rules are elsewhere. Times are Unix
seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agentjet.config import JobConfig
from agentjet.protocol import Event
from agentjet.swarm.journal_file import JournalFile
from agentjet.swarm.records import (
    EPISODES_FROM,
    SELECT_CALLS,
    SELECT_EPISODES,
    STATUS,
    Batch,
    Episode,
    Group,
    JobSettings,
    OutcomeCounts,
    RecordedCall,
    pack_floats,
    pack_ints,
    read_call,
    read_episode,
    to_json,
    unpack_ints,
)
from agentjet.types import Call, CheckpointStamp, EpisodeStatus

IDEMPOTENCY_SECONDS = 86_400.0
"""Seconds for which an idempotency key is kept at least, longer than any client repeats a request."""
EVENTS_KEPT = 100_000


class Journal(JournalFile):
    """Typed rows in and out of the file. Construct it with `Journal.open`."""

    # ---- versions ------------------------------------------------------------------------------------------

    def is_empty(self) -> bool:
        """True if no episode has begun and no batch exists."""
        return not self._db.execute("SELECT 1 FROM episodes UNION ALL SELECT 1 FROM batches LIMIT 1").fetchone()

    def policy_version(self) -> int:
        newest = self._db.execute("SELECT MAX(batch_id) FROM steps").fetchone()[0]
        base = int(self._meta("base_version", "0"))
        return base if newest is None else max(base, int(newest) + 1)

    def set_base_version(self, policy_version: int) -> None:
        """Start an empty journal, or continue one after a rollback, at the version of a checkpoint."""
        self._set_meta("base_version", str(policy_version))
        self._set_meta("durable_version", str(policy_version))

    def checkpoint_digest(self, policy_version: int) -> str | None:
        """Digest of the checkpoint of that version; None if none was recorded."""
        row = self._db.execute("SELECT digest FROM checkpoints WHERE policy_version = ?", (policy_version,)).fetchone()
        return None if row is None else str(row[0])

    def put_checkpoint(self, stamp: CheckpointStamp) -> None:
        """Record a checkpoint as the one of its version."""
        self._db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?)", (stamp.policy_version, stamp.digest))

    def began_at(self, policy_version: int) -> bool:
        """True if the journal started, empty, at a checkpoint of that version."""
        return self._meta("base_version", "") == str(policy_version)

    def undigested_until(self) -> int:
        """Newest policy version whose checkpoint AgentJet 0.1 may have written without a digest; -1 for none."""
        return int(self._meta("undigested_until", "-1"))

    def durable_version(self) -> int:
        """First policy version from which batches can be replayed. Tokens of older batches may be pruned."""
        return int(self._meta("durable_version", "0"))

    def job_settings(self) -> JobSettings | None:
        """None before the first start, and if another AgentJet wrote settings that this one cannot read."""
        held = json.loads(self._meta("job_settings", "null"))
        try:
            return held and JobSettings(held["revision"], *map(JobConfig.model_validate, (held["given"], held["job"])))
        except ValueError:
            return None

    def put_job_settings(self, settings: JobSettings) -> None:
        jobs = {name: job.model_dump(mode="json") for name, job in (("given", settings.given), ("job", settings.job))}
        self._set_meta("job_settings", to_json({"revision": settings.revision, **jobs}))

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
            (
                *(e.seq, e.id, e.client_id, e.task_id, e.task_set, e.group, e.group_id, e.mode),
                *(e.policy_version, e.begun, e.code_version, e.team, e.at_version, e.temperature, e.instance_id),
            ),
        )

    def add_promise(self, episode: Episode, prepared: float) -> None:
        e = episode
        self._insert("promises", (e.id, e.reward, to_json(e.by_role), to_json(e.metrics), prepared))

    def add_finish(self, episode: Episode) -> None:
        e = episode
        self._insert(
            "finishes",
            (e.id, e.reward, to_json(e.by_role), to_json(e.metrics), e.num_calls, e.num_tokens, e.ended),
        )

    def add_abort(self, episode: Episode, for_batch: int) -> None:
        e = episode
        self._insert("aborts", (e.id, e.status, e.reason, e.num_calls, e.num_tokens, e.ended, for_batch))

    def put_notes(self, episode: Episode) -> None:
        """Insert or update the counts of what was noted and refused."""
        self._db.execute(
            "INSERT INTO notes VALUES (?, ?, ?) ON CONFLICT (episode_id) DO UPDATE SET "
            "noted = excluded.noted, refused = excluded.refused",
            (episode.id, to_json(episode.noted), to_json(episode.refused)),
        )

    def episode(self, episode_id: str) -> Episode | None:
        row = self._db.execute(f"{SELECT_EPISODES} WHERE e.id = ?", (episode_id,)).fetchone()
        return None if row is None else read_episode(row)

    def recent_episodes(
        self, limit: int, *, team: str = "", status: EpisodeStatus | None = None, before: str = ""
    ) -> list[Episode]:
        """The newest ones, newest first: all, those of a team, those of a status, those begun `before` an episode."""
        conditions = ["TRUE"]
        if before:
            conditions.append("e.seq < (SELECT seq FROM episodes WHERE id = :before)")
        if team:
            conditions.append("e.team = :team AND e.team != ''")  # the second half lets SQLite use the index
        if status:
            conditions.append(f"{STATUS} = :status")
        query = f"{SELECT_EPISODES} WHERE {' AND '.join(conditions)} ORDER BY e.seq DESC LIMIT :limit"
        rows = self._db.execute(query, {"team": team, "status": status, "limit": limit, "before": before})
        return [read_episode(row) for row in rows]

    def newest_instance(self, client_id: str) -> str:
        """The process that began the client's newest episode with an instance id; empty if there is none."""
        row = self._db.execute(
            "SELECT instance_id FROM episodes WHERE client_id = ? AND instance_id != '' ORDER BY seq DESC LIMIT 1",
            (client_id,),
        ).fetchone()
        return "" if row is None else str(row[0])

    def has_instance(self, client_id: str, instance_id: str) -> bool:
        """True if this process of the client ever began an episode."""
        return bool(
            self._db.execute(
                "SELECT 1 FROM episodes WHERE client_id = ? AND instance_id = ? AND instance_id != '' LIMIT 1",
                (client_id, instance_id),
            ).fetchone()
        )

    def unsettled_episodes(self) -> list[Episode]:
        """Live and prepared ones, and finished training ones that are neither trained nor dropped, the oldest first."""
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
            "WHERE s.batch_id IS NULL AND a.episode_id IS NULL AND length(c.versions) > 0 AND c.untrained = ''"
        )
        oldest: dict[str, int] = {}
        for episode_id, first in rows:
            version = unpack_ints(first)[0]
            oldest[episode_id] = min(version, oldest.get(episode_id, version))
        return oldest

    def counts(self) -> dict[str, int]:
        """Episodes by status, and finished training episodes as `trained`, `waiting` or `dropped`."""
        row = self._db.execute(
            "SELECT COUNT(*), COUNT(f.episode_id), "
            "COALESCE(SUM(a.status = 'aborted'), 0), COALESCE(SUM(a.status = 'expired'), 0), "
            f"COALESCE(SUM({STATUS} = 'prepared'), 0), "
            "COUNT(s.batch_id), COALESCE(SUM(f.episode_id IS NOT NULL AND g.state = 'dropped'), 0), "
            f"COALESCE(SUM(f.episode_id IS NOT NULL AND e.mode = 'train'), 0) {EPISODES_FROM}"
        ).fetchone()
        every, finished, aborted, expired, prepared, trained, dropped, finished_train = (int(n) for n in row)
        return {
            "live": every - finished - aborted - expired - prepared,
            "prepared": prepared,
            "finished": finished,
            "aborted": aborted,
            "expired": expired,
            "trained": trained,
            "waiting": finished_train - trained - dropped,
            "dropped": dropped,
        }

    def code_versions(self, limit: int) -> dict[str, OutcomeCounts]:
        """Outcomes of training episodes of the `limit` versions that were begun last, the newest at the end."""
        return self._tallies("e.code_version != ''", (limit,))

    def code_version(self, version: str) -> OutcomeCounts:
        """The same for one version that has episodes."""
        return self._tallies("e.code_version = ? AND e.code_version != ''", (version, 1))[version]

    def _tallies(self, condition: str, values: tuple[Any, ...]) -> dict[str, OutcomeCounts]:
        rows = self._db.execute(
            "SELECT e.code_version, COUNT(*), COUNT(f.episode_id), COUNT(a.episode_id), TOTAL(f.reward) "
            "FROM episodes e LEFT JOIN finishes f ON f.episode_id = e.id LEFT JOIN aborts a ON a.episode_id = e.id "
            f"WHERE {condition} AND e.mode = 'train' GROUP BY e.code_version ORDER BY MAX(e.seq) DESC LIMIT ?",
            values,
        ).fetchall()
        return {version: OutcomeCounts(*counts) for version, *counts in reversed(rows)}

    def lost_episodes(self, for_batch: int) -> dict[str, int]:
        """Episodes that ended unscored while the batch was filled: `surplus`, `stale`, `in_doubt`, `not_needed`,
        `replaced`, and `aborted` or `expired` for other reasons.
        """
        rows = self._db.execute(
            "SELECT CASE WHEN reason LIKE 'surplus:%' THEN 'surplus' WHEN reason LIKE 'stale:%' THEN 'stale' "
            "WHEN reason LIKE 'in doubt:%' THEN 'in_doubt' WHEN reason LIKE 'not needed:%' THEN 'not_needed' "
            "WHEN reason LIKE 'replaced:%' THEN 'replaced' "
            "ELSE status END AS how, COUNT(*) FROM aborts "
            "WHERE for_batch = ? GROUP BY how",
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
            *(to_json(asdict(call.ask)), call.fork, call.retry_of, call.context, call.support, call.untrained),
        )
        self._insert("calls", values)

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

    # ---- groups and batches --------------------------------------------------------------------------------

    def put_group(self, group: Group) -> None:
        """Insert or update a group. Its members follow from the episodes."""
        g = group
        self._db.execute(
            "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
            "touched = excluded.touched, state = excluded.state, reason = excluded.reason, "
            "closed = excluded.closed, for_batch = excluded.for_batch",
            (
                *(g.id, g.client_id, g.name, g.opened, g.touched, g.state, g.reason, g.closed, g.for_batch),
                *(g.task_set, g.code_version),
            ),
        )

    def unlearned_groups(self) -> list[Group]:
        """Open and complete groups that no batch contains, in the order they were opened."""
        rows = self._db.execute(
            "SELECT id, client_id, name, opened, touched, state, reason, closed, for_batch, task_set, code_version "
            "FROM groups WHERE state != 'dropped' AND id NOT IN (SELECT group_id FROM batch_groups) ORDER BY id"
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
                task_set=row[9],
                code_version=row[10],
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
        self._insert("batches", (batch.id, batch.job.model_dump_json(), batch.composed, to_json(batch.carry)))
        for g, (group_id, members) in enumerate(zip(group_ids, batch.groups, strict=True)):
            self._insert("batch_groups", (group_id, batch.id, g))
            for position, episode_id in enumerate(members):
                self._insert("batch_members", (episode_id, batch.id, g, position))

    def remove_batch(self, batch_id: int) -> None:
        """Delete a composed batch. Its episodes and groups stay."""
        for table in ("operations", "batch_members", "batch_groups"):
            self._db.execute(f"DELETE FROM {table} WHERE batch_id = ?", (batch_id,))
        self._db.execute("DELETE FROM batches WHERE id = ?", (batch_id,))

    def undo_batches(self, start: int, reason: str, for_batch: int) -> tuple[int, int]:
        """Drop the groups of the batches from `start` on, counted with `for_batch`, and delete these batches. Returns
        the numbers of batches and episodes.
        """
        self._db.execute(
            "UPDATE groups SET state = 'dropped', reason = ?, for_batch = ? "
            "WHERE id IN (SELECT group_id FROM batch_groups WHERE batch_id >= ?)",
            (reason, for_batch, start),
        )
        episodes = self._db.execute("DELETE FROM batch_members WHERE batch_id >= ?", (start,)).rowcount
        self._db.execute("DELETE FROM batch_groups WHERE batch_id >= ?", (start,))
        self._db.execute("DELETE FROM operations WHERE batch_id >= ?", (start,))
        batches = self._db.execute("DELETE FROM steps WHERE batch_id >= ?", (start,)).rowcount
        self._db.execute("DELETE FROM batches WHERE id >= ?", (start,))
        return batches, episodes

    def batches(self, policy_version: int) -> list[Batch]:
        """Batches from `policy_version` on, in order, learned or not."""
        rows = self._db.execute(
            "SELECT id, job, composed, carry FROM batches WHERE id >= ? ORDER BY id", (policy_version,)
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

    def carry(self) -> dict[str, float]:
        """Groups owed to each task set since the newest batch."""
        row = self._db.execute("SELECT carry FROM batches ORDER BY id DESC LIMIT 1").fetchone()
        return {} if row is None else dict(json.loads(row[0]))

    def _batch_groups(self, batch_id: int) -> tuple[tuple[str, ...], ...]:
        groups: dict[int, list[str]] = {}
        rows = self._db.execute(
            "SELECT group_position, episode_id FROM batch_members WHERE batch_id = ? ORDER BY group_position, position",
            (batch_id,),
        )
        for position, episode_id in rows:
            groups.setdefault(position, []).append(episode_id)
        return tuple(tuple(members) for members in groups.values())

    def put_operation(self, number: int, kind: str, batch_id: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO operations VALUES (?, ?, ?)", (number, kind, batch_id))

    def has_operation(self, number: int, kind: str, batch_id: int) -> bool:
        query = "SELECT 1 FROM operations WHERE number = ? AND kind = ? AND batch_id = ?"
        return self._db.execute(query, (number, kind, batch_id)).fetchone() is not None

    def operations(self) -> list[tuple[int, str, int]]:
        """All operations on the policy, in order: number, kind and batch."""
        return list(self._db.execute("SELECT number, kind, batch_id FROM operations ORDER BY number"))

    def add_step(self, batch_id: int, metrics: Mapping[str, float], learned: float) -> None:
        self._insert("steps", (batch_id, to_json(metrics), learned))

    def step(self, batch_id: int) -> dict[str, float]:
        """The metrics of a learned batch; empty if this run did not learn it."""
        row = self._db.execute("SELECT metrics FROM steps WHERE batch_id = ?", (batch_id,)).fetchone()
        return {} if row is None else dict(json.loads(row[0]))

    def recent_steps(self, limit: int) -> list[dict[str, float]]:
        """The metrics of the newest learned batches, the newest last."""
        rows = self._db.execute("SELECT metrics FROM steps ORDER BY batch_id DESC LIMIT ?", (limit,)).fetchall()
        return [json.loads(row[0]) for row in reversed(rows)]

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

    def events_of(self, kind: str) -> list[Event]:
        """All events of a kind that are kept, in order."""
        rows = self._db.execute("SELECT seq, kind, time, body FROM events WHERE kind = ? ORDER BY seq", (kind,))
        return [Event(seq=seq, kind=kind, time=time, body=json.loads(body)) for seq, kind, time, body in rows]

    def last_event(self) -> int:
        """Number of the newest event, 0 before the first."""
        return int(self._db.execute("SELECT MAX(seq) FROM events").fetchone()[0] or 0)

    def prune(self, policy_version: int, now: float) -> None:
        """Delete calls that no replay from `policy_version` on needs, old keys and old events."""
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
        self._db.execute(
            "DELETE FROM events WHERE seq <= (SELECT MAX(seq) FROM events) - ? "
            "AND kind NOT IN ('evaluation', 'rollback')",
            (EVENTS_KEPT,),
        )
        self._set_meta("durable_version", str(policy_version))
