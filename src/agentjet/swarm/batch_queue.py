"""`Batches`: batches, from their composition to the version they make. What can be replayed, and what no longer.

A batch is in the journal, whole, before it is learned; learning one again changes nothing.

Going back to an earlier policy version. The server is stopped; the caller provides the checkpoint.

Policy versions only rise. The version after a rollback is a number that was never used: it has the weights of the
earlier version, and no batch leads to it. So a number always names the same weights, and staleness, caches and
names of checkpoints stay right. The episodes of the undone batches are dropped as `rolled_back`, together with those
that waited to train; their groups count in the next batch that is learned.

Whether a checkpoint belongs to a journal. The server asks before it loads one, a rollback or a branch before it
copies one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from agentjet.errors import CheckpointError, ConfigError
from agentjet.swarm import batches, groups
from agentjet.swarm.journal import Journal
from agentjet.swarm.leases import STALE, SURPLUS, Endings
from agentjet.swarm.queries import Queries
from agentjet.swarm.records import Batch
from agentjet.swarm.state_store import Store
from agentjet.timeline.forest import Forest
from agentjet.types import CheckpointStamp


class Batches(Queries):
    """The verbs of the training loop."""

    def __init__(self, journal: Journal, *, clock: Callable[[], float], stopwatch: Callable[[], float]) -> None:
        super().__init__(journal, clock=clock, stopwatch=stopwatch)
        self._endings = Endings(self._ledger, self._leases)
        self._forest_metrics: dict[int, dict[str, float]] = {}

    def compose(self) -> Batch:
        """Commit the next batch, its members, their order and its settings, before any of it is learned."""
        chosen = self._mixing.chosen(self.job)
        assert self.ready() and chosen is not None, "compose() pairs with ready()"
        batch = Batch(
            id=self.policy_version,
            groups=tuple(group.members for group in chosen),
            job=self.job.with_defaults(),
            composed=self._clock(),
            carry=self._mixing.carry(self.job, chosen),
        )
        with self._ledger.transaction():
            self._journal.add_batch(batch, [group.id for group in chosen])
            for group in chosen:
                del self._ledger.groups[group.id]
            self._ledger.pending, self._ledger.carry = batch, batch.carry
            self._mixing.refilling()
            if not self.job.max_staleness:
                self._endings.clear(list(self._ledger.groups.values()), "surplus", SURPLUS, batch.composed)
        return batch

    def forest(self, batch: Batch) -> Forest:
        """The batch as prefix trees with advantages, from the journal alone: a replay sees the same bytes.

        Raises `CheckpointError` when a durable checkpoint has covered the batch and its tokens were pruned.
        """
        self._check_reach(batch.id)
        members = {episode_id: self.episode(episode_id) for episode_id in batch.episode_ids}
        forest, counts = batches.build(self._journal, batch, members)
        self._forest_metrics = {batch.id: {**batches.forest_metrics(batch, forest), **counts}}
        return forest

    def learned(self, batch: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
        """Record that `batch` took the policy to version `batch.id + 1`; returns all its metrics,
        but for those that are no finite number, which neither JSON nor a chart has a place for.

        A replayed batch changes nothing.
        """
        if batch.id < self.policy_version:
            return self._journal.step(batch.id)
        assert self.pending is not None and batch.id == self.pending.id, "batches are learned in order"
        members = [self._ledger.episodes[episode_id] for episode_id in batch.episode_ids]
        merged = {
            **batches.episode_metrics(members),
            **batches.share_metrics(batch, self._ledger.episodes),
            **batches.loss_metrics(self._journal.dropped_groups(batch.id), self._journal.lost_episodes(batch.id)),
            **self._forest_metrics.get(batch.id, {}),
            **metrics,
        }
        merged = {name: value for name, value in merged.items() if math.isfinite(value)}
        with self._ledger.transaction():
            self._journal.add_step(batch.id, merged, self._clock())
            self._ledger.policy_version = batch.id + 1
            self._ledger.pending = None
            self._ledger.last_step = merged
            self._ledger.recent_steps.append(merged)
            self._mixing.refilling()
            for episode in members:
                self._ledger.put(replace(episode, trained_in=batch.id))
            self._endings.clear(groups.stale(self._ledger, self.job), "stale", STALE, self._clock())
            self._ledger.emit("step", {"policy_version": batch.id + 1, "metrics": merged})
        return merged

    def set_aside(self, batch: Batch, reason: str) -> None:
        """Give the pending batch up: its groups are dropped as `poisoned`, counted with the next batch that is learned.

        For a batch that kills every worker that tries it, so that it does not end the training with them.
        """
        assert self.pending is not None and batch.id == self.pending.id, "only the pending batch can be set aside"
        now, members = self._clock(), set(batch.episode_ids)
        with self._ledger.transaction():
            self._journal.remove_batch(batch.id)
            self._ledger.pending, self._ledger.carry = None, self._journal.carry()
            for group in self._journal.unlearned_groups():
                if members & set(group.members):
                    groups.drop(self._ledger, group, "poisoned", now)
            self._ledger.emit(
                "batch",
                {"batch": batch.id, "state": "set_aside", "reason": reason, "episodes": list(batch.episode_ids)},
            )

    def checkpointed(self, policy_version: int) -> None:
        """Checkpoints from `policy_version` on are durable: what only earlier ones would replay is pruned.

        Pass the *oldest* checkpoint still kept, so that recovery can fall back to it.
        """
        if policy_version > self._journal.durable_version():
            with self._ledger.transaction():
                self._journal.prune(policy_version, self._clock())

    def batches_from(self, policy_version: int) -> list[Batch]:
        """What a worker that stands at `policy_version` has yet to learn, in order, the pending batch included.

        Raises `CheckpointError` when the journal no longer reaches back so far.
        """
        self._check_reach(policy_version)
        return self._journal.batches(policy_version)

    def record_checkpoint(self, stamp: CheckpointStamp) -> None:
        """Record what was written as the checkpoint of its version. Call it before the checkpoint takes its name."""
        with self._ledger.transaction():
            self._journal.put_checkpoint(stamp)

    def check_checkpoint(self, stamp: CheckpointStamp) -> None:
        """Raises `CheckpointError` unless the checkpoint belongs to this journal, `ConfigError` where the journal ends
        before it.
        """
        check_stamp(self._journal, stamp)

    def recorded_digest(self, policy_version: int) -> str | None:
        """Digest of the checkpoint of that version; None if none was recorded."""
        return self._journal.checkpoint_digest(policy_version)

    def resume(self, stamp: CheckpointStamp | None) -> list[Batch]:
        """A worker was restored to a checkpoint that was checked, or is at version 0 without one: returns the batches
        to replay.

        An empty journal starts at the checkpoint. Raises `CheckpointError` when the journal does not reach back so far.
        """
        if stamp is None:
            return self.batches_from(0)
        version = stamp.policy_version
        with self._ledger.transaction():
            if self._journal.is_empty():
                self._journal.set_base_version(version)
                self._ledger.policy_version = version
            if stamp.digest and self._journal.checkpoint_digest(version) is None:
                self._journal.put_checkpoint(stamp)
        return self.batches_from(version)

    def roll_back(self, to: int, checkpoint: CheckpointStamp) -> Rollback:
        """Undo the batches from version `to` on; `checkpoint` has the weights of `to` under the number of the version
        that follows the present one. On a stopped server: see `rollback`. Raises `CheckpointError`.
        """
        check_rollback(self._journal, to)
        assert checkpoint.policy_version == self.policy_version + 1, "versions only rise"
        with self._ledger.transaction():
            self._journal.put_checkpoint(checkpoint)
            return carry_out(self._ledger, self._endings, to, self._clock())

    def _check_reach(self, policy_version: int) -> None:
        durable = self._journal.durable_version()
        if policy_version < durable:
            raise CheckpointError(
                f"The journal cannot replay from policy version {policy_version}: batches before {durable} were "
                f"pruned: the checkpoint of version {durable} covers them. Restore that one or a newer one."
            )


KIND = "rollback"
REASON = "rolled_back"
WORDS = "rolled back: the policy went back to an earlier version"


@dataclass(frozen=True, slots=True)
class Rollback:
    """The effects of a rollback; also the body of its event."""

    to: int
    """The version whose weights the policy has again."""
    policy_version: int
    """The version that these weights are from here on."""
    batches: int
    """Learned batches that were undone."""
    trained: int
    """Episodes of these batches, now dropped."""
    waiting: int
    """Finished episodes that had waited to train, now dropped."""
    live: int
    """Episodes that were aborted."""


def check_rollback(journal: Journal, version: int) -> None:
    """Raises `CheckpointError` unless the present weights descend from that earlier version."""
    now = journal.policy_version()
    if version >= now:
        raise CheckpointError(f"policy version {version} is not before the present one, {now}: name an earlier one")
    for done in journal.events_of(KIND):
        if done.body["to"] < version < done.body["policy_version"]:
            raise CheckpointError(
                f"policy version {version} was undone by the rollback to version {done.body['to']}: the present "
                "weights do not descend from it; begin a new data dir from it with `agentjet checkpoints branch`"
            )


def carry_out(ledger: Store, endings: Endings, to: int, now: float) -> Rollback:
    """Undo the batches from `to` on, inside a transaction. See `check_rollback`."""
    journal, version = ledger.journal, ledger.policy_version + 1
    assert journal.in_transaction, "a rollback happens as a whole"
    if ledger.pending is not None:
        journal.remove_batch(ledger.pending.id)
    batches, trained = journal.undo_batches(to, REASON, version)
    journal.set_base_version(version)
    ledger.load()
    live, waiting = ledger.live(), ledger.counts()["waiting"]
    for episode in live:
        endings.lose(replace(episode, status="aborted", ended=now, reason=WORDS))
    endings.clear(list(ledger.groups.values()), REASON, WORDS, now)
    done = Rollback(to, version, batches, trained, waiting, len(live))
    body: Mapping[str, int] = asdict(done)
    ledger.emit(KIND, body)
    return done


WAY_OUT = (
    "Restore journal.sqlite together with its -wal and -shm files, or move only checkpoints/ to a new server.data_dir."
)
"""For a data dir whose journal lost its end."""


def check_stamp(journal: Journal, stamp: CheckpointStamp) -> None:
    """Raises `CheckpointError` unless the checkpoint belongs to the journal, and `ConfigError` where it is rather the
    journal that is wrong, because it ends before the checkpoint.

    It belongs if the journal recorded its digest, if the journal is empty or begins at it, or if AgentJet 0.1 wrote it.
    """
    version, recorded = stamp.policy_version, journal.checkpoint_digest(stamp.policy_version)
    if recorded is not None and recorded != stamp.digest:
        raise CheckpointError(
            f"The checkpoint of policy version {version} has another digest than the one in the journal."
        )
    if journal.is_empty():
        return
    if version > (end := journal.policy_version()):
        raise ConfigError(
            f"The checkpoint of policy version {version} is newer than the journal, which ends at {end}. If another "
            f"run wrote the checkpoint, move it away. Otherwise the journal lost its end. {WAY_OUT}"
        )
    if recorded is None and not _may_adopt(journal, stamp):
        raise CheckpointError(
            f"The journal did not record a checkpoint of policy version {version}: they belong to different runs."
        )


def _may_adopt(journal: Journal, stamp: CheckpointStamp) -> bool:
    """Whether a checkpoint that the journal did not record may be loaded all the same."""
    if journal.began_at(stamp.policy_version):
        return True
    return not stamp.digest and stamp.policy_version <= journal.undigested_until()


def check_state_origin(journal: Journal, state: Mapping[str, Any]) -> None:
    """Raises `ConfigError` where a checkpoint's state has another origin than the journal, as far as both know it."""
    origin = journal.origin
    recorded = {"model_weights": origin.get("model_weights"), "dtype": origin.get("model.dtype")}
    if "model.lora.rank" in origin:
        recorded["adapters"] = bool(origin["model.lora.rank"])
    for key, ours in recorded.items():
        if ours is not None and (theirs := state.get(key, ours)) != ours:
            raise ConfigError(
                f"The checkpoint of policy version {state['policy_version']} has {key} = {theirs!r}, its journal "
                f"{ours!r}: they belong to different runs. Take a checkpoint that this run wrote."
            )
