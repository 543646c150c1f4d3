"""`Learning`: batches, from their composition to the version they make. What can be replayed, and what no longer.

A batch is in the journal, whole, before it is learned; learning one again changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from agentjet.errors import CheckpointError
from agentjet.swarm import batches, checkpoints, groups, rollback
from agentjet.swarm.endings import STALE, SURPLUS, Endings
from agentjet.swarm.journal import Journal
from agentjet.swarm.outlook import Outlook
from agentjet.swarm.records import Batch
from agentjet.swarm.rollback import Rollback
from agentjet.timeline.forest import Forest
from agentjet.types import CheckpointStamp


class Learning(Outlook):
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
            job=self.job.in_force(),
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
        checkpoints.check(self._journal, stamp)

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
        rollback.check(self._journal, to)
        assert checkpoint.policy_version == self.policy_version + 1, "versions only rise"
        with self._ledger.transaction():
            self._journal.put_checkpoint(checkpoint)
            return rollback.carry_out(self._ledger, self._endings, to, self._clock())

    def _check_reach(self, policy_version: int) -> None:
        durable = self._journal.durable_version()
        if policy_version < durable:
            raise CheckpointError(
                f"The journal cannot replay from policy version {policy_version}: batches before {durable} were "
                f"pruned: the checkpoint of version {durable} covers them. Restore that one or a newer one."
            )
