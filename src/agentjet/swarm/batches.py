"""`Batches`: the verbs of the training loop, from the composition of a batch to the policy version that it makes.

A batch is in the journal, whole, before it is learned. Learning it again changes nothing.

`roll_back` goes back to an earlier policy version. The server is stopped, and the caller provides the checkpoint.
Policy versions only rise: the version after a rollback is a new number with the weights of the earlier version, and no
batch leads to it. So a number always names the same weights, and staleness, caches and names of checkpoints stay right.
The episodes of the undone batches and those that waited to train are dropped as `rolled_back`. Their groups count in
the next batch that is learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

from agentjet.config import JobConfig
from agentjet.errors import CheckpointError, ConfigError, Conflict, InvalidRequest, Later
from agentjet.protocol import SftRequest
from agentjet.recipes.recipe import Recipe
from agentjet.swarm import facts
from agentjet.swarm.groups import STALE, SURPLUS, GroupRules
from agentjet.swarm.journal import Journal, RecordedCall, encode_call
from agentjet.swarm.places import RETRY_SECONDS
from agentjet.swarm.state import RECENT_STEPS, Batch, EpisodeRecord, Group, State, Store, new_episode_id
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import CheckpointStamp, OperationKind

NOT_FINITE = "batch/not_finite/"
"""Beginning of the metrics that name a metric which was left out, because it was not finite. Their value is 1."""
MEMBERS_A_SLICE = 16
"""Members of a learned batch that one transaction records, in about a millisecond of CPU time."""
ROLLBACK = "rollback"
ROLLED_BACK = "rolled_back"
ROLLED_BACK_REASON = "rolled back: the policy went back to an earlier version"
WAY_OUT = (
    "Restore journal.sqlite together with its -wal and -shm files, or move only checkpoints/ to runs/default/ of a new "
    "server.data_dir."
)
"""For a data dir whose journal lost its end."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """The effects of a rollback; also the body of its event."""

    to: int
    """The version whose weights the policy has again."""
    policy_version: int
    """The new number of these weights."""
    batches: int
    """Learned batches that were undone."""
    trained: int
    """Episodes of these batches, now dropped."""
    waiting: int
    """Finished episodes that had waited to train, now dropped."""
    live: int
    """Episodes that were aborted."""


class Batches:
    """Composes batches, builds their forests and records what was learned."""

    def __init__(self, store: Store, groups: GroupRules, clock: Callable[[], float]) -> None:
        self._store = store
        self._journal = store.journal
        self._groups = groups
        self._mixture = groups.mixture
        self._clock = clock
        self._forest_metrics: dict[int, dict[str, float]] = {}

    def ready(self) -> bool:
        """True if the present batch has its groups and may be composed."""
        store = self._store
        if store.pending is not None or store.num_pinned() or store.is_over:
            return False
        return self._mixture.chosen() is not None

    def compose(self) -> Batch:
        """Commit the next batch, its members, their order and its settings, before any of it is learned."""
        store, chosen = self._store, self._mixture.chosen()
        assert self.ready() and chosen is not None, "compose() pairs with ready()"
        batch = Batch(
            id=store.policy_version,
            groups=self._ordered(chosen),
            job=store.job,
            composed=self._clock(),
            carry=self._mixture.carry(chosen),
        )
        with store.transaction():
            self._journal.add_batch(batch)
            for group in chosen:
                store.put_group(replace(group, state="batched"))
            store.pending = batch
            self._mixture.start_batch()
            if not store.job.max_staleness:
                self._groups.drop_groups(list(store.groups.values()), "surplus", SURPLUS, batch.composed)
        return batch

    def _ordered(self, chosen: Sequence[Group]) -> tuple[tuple[str, ...], ...]:
        """Members by group. Groups with seeds come in the order they began, their members by seed: a reproducible run
        has the same batches.
        """

        def seed(member: str) -> int | None:
            return self._store.episodes[member].seed

        ordered = sorted(chosen, key=lambda group: 0 if seed(group.members[0]) is None else group.id)
        return tuple(tuple(sorted(group.members, key=lambda member: seed(member) or 0)) for group in ordered)

    def training_batches(self, batch: Batch) -> dict[str, TrainingBatch]:
        """The forest and the facts of a batch for each policy, from the journal alone: a replay reads the same bytes.

        May run in another thread; it reads committed rows only. Raises `CheckpointError` when a durable checkpoint
        covers the batch and its tokens were pruned.
        """
        with self.reading(batch) as (journal, members):
            training, metrics = facts.build(journal, batch, members, self._store.policies)
        self.built(batch, metrics)
        return training

    def built(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of the forests of a batch until it is learned."""
        self._forest_metrics = {batch.id: dict(metrics)}

    @contextmanager
    def reading(self, batch: Batch) -> Iterator[tuple[Journal, dict[str, EpisodeRecord]]]:
        """Context of the journal for another thread, and the episodes of a batch. Raises `CheckpointError`."""
        self.check_reach(batch.id)
        with self._journal.reading() as journal:
            members = {}
            for episode_id in batch.episode_ids:
                episode = self._store.episodes.get(episode_id) or journal.episode(episode_id)
                assert episode is not None, "the journal keeps episodes longer than batches are replayed"
                members[episode_id] = episode
            yield journal, members

    def record_operation(self, policy: str, number: int, kind: OperationKind, batch: Batch) -> None:
        """Record an operation on a policy, before it is applied. A replayed operation changes nothing."""
        with self._store.transaction():
            self._journal.put_operation(policy, number, kind, batch.id)

    def offered(self, batch: Batch) -> None:
        """Record that separate samplers may get the weights of `batch` from now on. Then it is never given up."""
        if batch.id + 1 > self._store.state.offered_version:
            with self._store.transaction():
                self._store.change(offered_version=batch.id + 1)

    def is_offered(self, batch: Batch) -> bool:
        """True if separate samplers may have the weights of `batch`."""
        return batch.id < self._store.state.offered_version

    def differing(self, batch: Batch, fingerprints: Mapping[str, int]) -> list[str]:
        """Returns the policies whose weights differ from those that the batch led to when it was learned first."""
        known = self._journal.fingerprints(batch.id)
        return [policy for policy, found in fingerprints.items() if known.get(policy, found) != found]

    def learned(
        self, batch: Batch, metrics: Mapping[str, float], fingerprints: Mapping[str, int] | None = None
    ) -> dict[str, float]:
        """Record that `batch` took the policies to version `batch.id + 1`. A replayed batch changes nothing.

        Returns all its metrics. JSON and charts cannot hold those that are not finite: `NOT_FINITE` names them.
        """
        with self._store.transaction():
            *_, merged = self.learned_in_slices(batch, metrics, fingerprints)
        return merged

    def learned_in_slices(
        self, batch: Batch, metrics: Mapping[str, float], fingerprints: Mapping[str, int] | None = None
    ) -> Iterator[dict[str, float]]:
        """As `learned`, in slices. Yields at last the metrics: see `GroupCommit.in_slices`."""
        store = self._store
        if batch.id < store.policy_version:
            yield self._journal.step(batch.id)
            return
        assert store.pending is not None and batch.id == store.pending.id, "batches are learned in order"
        uniform, is_given = [], facts.are_given([store.episodes[member] for member in batch.episode_ids])
        for group in () if is_given else batch.groups:  # Their turns may be many.
            own, of_turns = [store.episodes[member] for member in group], batch.job.recipe.needs_call_rewards
            uniform.append(facts.is_uniform(self._journal, own, store.policies, of_turns=of_turns))
            yield {}
        merged = {
            **facts.episode_metrics([store.episodes[e] for e in batch.episode_ids], store.policies),
            **facts.share_metrics(batch, store.episodes, uniform),
            **facts.loss_metrics(
                self._journal.counts("lost_groups", batch.id), self._journal.counts("lost_episodes", batch.id)
            ),
            **self._forest_metrics.get(batch.id, {}),
            **metrics,
        }
        named = {f"{NOT_FINITE}{name}": 1.0 for name, value in merged.items() if not math.isfinite(value)}
        merged = {name: value for name, value in merged.items() if math.isfinite(value)} | named
        with store.transaction():
            self._journal.add_step(batch.id, merged)
            if fingerprints:
                self._journal.put_fingerprints(batch.id, fingerprints)
            for episode_id in _shown(batch, store.episodes):
                self._journal.keep_transcript(episode_id, f"batch {batch.id}", len(batch.episode_ids))
            store.change(policy_version=batch.id + 1)
            store.pending, store.steps = None, self._journal.steps(None, RECENT_STEPS)
            self._mixture.start_batch()
            self._groups.drop_groups(self._groups.stale(), "stale", STALE, self._clock())
            store.emit("step", {"policy_version": batch.id + 1, "metrics": merged})
        yield merged
        members = batch.episode_ids
        for start in range(0, len(members), MEMBERS_A_SLICE):
            with store.transaction():  # Each writes the whole state once.
                for episode_id in members[start : start + MEMBERS_A_SLICE]:
                    store.put(replace(store.episodes[episode_id], trained_in=batch.id))
            yield merged

    def quarantine(self, batch: Batch, reason: str) -> None:
        """Give the pending batch up, because every worker that learns it crashes; training goes on without it.

        Its groups are dropped as `poisoned` and counted with the next batch that is learned.
        """
        store = self._store
        assert store.pending is not None and batch.id == store.pending.id, "only the pending batch can be given up"
        assert not self.is_offered(batch), "its version would name two weights"
        with store.transaction():
            pending = self._pending_groups()
            self._journal.remove_batches(batch.id)
            store.pending = None
            for group in pending:
                self._groups.drop(group, "poisoned", self._clock())
            store.emit(
                "batch",
                {"batch": batch.id, "state": "set_aside", "reason": reason, "episodes": list(batch.episode_ids)},
            )

    def _pending_groups(self) -> list[Group]:
        """The groups of the pending batch as they were before its composition."""
        found = []
        for members in () if self._store.pending is None else self._store.pending.groups:
            first = self._store.episodes[members[0]]
            assert first.group_id is not None
            group = Group(first.group_id, first.client_id, first.group, first.begun, first.begun, members, "complete")
            found.append(replace(group, task_set=first.task_set, code_version=first.code_version))
        return found

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def checkpointed(self, policy_version: int) -> None:
        """Record that only checkpoints before `policy_version` would replay earlier batches, whose calls may go.

        Pass the *oldest* checkpoint that is kept, so that recovery can use it.
        """
        if policy_version > self._store.state.durable_version:
            with self._store.transaction():
                self._store.change(durable_version=policy_version)
            self._store.is_prune_due = True

    def from_version(self, policy_version: int) -> list[Batch]:
        """The batches that a worker at `policy_version` has yet to learn, in order, with the pending batch.

        Raises `CheckpointError` when the journal does not reach back so far.
        """
        self.check_reach(policy_version)
        return self._journal.batches(policy_version)

    def read_recipes(self, policy_version: int) -> None:
        """Makes the recipes of the batches from a version on. Call it in a thread before `resume`, which then runs no
        validators of a plug-in in the event loop. Raises `ConfigError`.
        """
        with self._journal.reading() as journal:
            journal.batches(policy_version)

    def record_checkpoint(self, stamp: CheckpointStamp) -> None:
        """Record a checkpoint as the one of its version. Call it before the checkpoint's folder takes its name."""
        with self._store.transaction():
            self._journal.put_checkpoint(stamp)

    def check_checkpoint(self, stamp: CheckpointStamp) -> None:
        check_stamp(self._journal, self._store.state, stamp)

    def resume(self, stamp: CheckpointStamp | None) -> list[Batch]:
        """Returns the batches to replay after a worker loaded a checked checkpoint, or None at version 0.

        An empty journal starts at the checkpoint. Raises `CheckpointError` when the journal does not reach back so far.
        """
        if stamp is None:
            return self.from_version(0)
        version = stamp.policy_version
        with self._store.transaction():
            if self._journal.is_empty:
                self._store.start_at(version)
            if stamp.digest and self._journal.checkpoint_digest(version) is None:
                self._journal.put_checkpoint(stamp)
        return self.from_version(version)

    def check_reach(self, policy_version: int) -> None:
        durable = self._store.state.durable_version
        if policy_version < durable:
            raise CheckpointError(
                f"The journal cannot replay from policy version {policy_version}: batches before {durable} were "
                f"pruned: the checkpoint of version {durable} covers them. Restore that one or a newer one."
            )

    # ---- rollback ------------------------------------------------------------------------------------------

    def roll_back(self, to: int, checkpoint: CheckpointStamp) -> Rollback:
        """Undo the batches from version `to` on, on a stopped server. Raises `CheckpointError`.

        `checkpoint` has the weights of `to` under `State.next_unused_version`.
        """
        store, journal = self._store, self._journal
        check_rollback(journal, store.state, to)
        version, now = store.state.next_unused_version, self._clock()
        assert checkpoint.policy_version == version, "versions only rise"
        with store.transaction():
            journal.put_checkpoint(checkpoint)
            undone = journal.batches(to, store.policy_version)
            trained = [episode_id for batch in undone for episode_id in batch.episode_ids]
            for group in self._pending_groups():
                store.put_group(group)
            journal.remove_batches(to)
            journal.forget_tasks()  # They are of the undone policy, too.
            store.start_at(version)
            store.pending = None
            for episode_id in trained:
                if (episode := journal.episode(episode_id)) is not None:  # Not pruned since.
                    journal.put_episode(replace(episode, trained_in=None, dropped=ROLLED_BACK))
            journal.count("outcome", "trained", -len(trained))
            journal.count("outcome", "dropped", len(trained))
            if undone:
                journal.count("dropped", ROLLED_BACK, len(trained))
            journal.count("lost_groups", ROLLED_BACK, sum(len(batch.groups) for batch in undone), batch=version)
            store.steps = journal.steps(None, RECENT_STEPS)
            live, waiting = store.live(), journal.outcomes()["waiting"]
            for episode in live:
                self._groups.end_unscored(episode, ROLLED_BACK_REASON, now)
            self._groups.drop_groups(list(store.groups.values()), ROLLED_BACK, ROLLED_BACK_REASON, now)
            done = Rollback(to, version, len(undone), len(trained), waiting, len(live))
            store.emit(ROLLBACK, asdict(done))
        return done


def _shown(batch: Batch, episodes: Mapping[str, EpisodeRecord]) -> list[str]:
    """The best and the worst member of a batch, and the group with the median mean reward."""
    rewards = {member: episodes[member].reward or 0.0 for member in batch.episode_ids}
    by_reward = sorted(rewards, key=rewards.__getitem__)
    by_mean = sorted(batch.groups, key=lambda group: fmean(rewards[member] for member in group))
    return list(dict.fromkeys([by_reward[-1], by_reward[0], *by_mean[len(by_mean) // 2]]))


def check_rollback(journal: Journal, state: State, version: int) -> None:
    """Raises `CheckpointError` unless the present weights descend from that earlier version."""
    now = state.policy_version
    if version >= now:
        raise CheckpointError(f"policy version {version} is not before the present one, {now}: name an earlier one")
    for done in journal.events_of(ROLLBACK):
        if done.body["to"] < version < done.body["policy_version"]:
            raise CheckpointError(
                f"policy version {version} was undone by the rollback to version {done.body['to']}: the present "
                "weights do not descend from it; begin a new data dir from it with `agentjet checkpoints branch`"
            )


# ---- checkpoints that belong to a journal ------------------------------------------------------------------


def check_stamp(journal: Journal, state: State, stamp: CheckpointStamp) -> None:
    """Raises `CheckpointError` unless the checkpoint belongs to the journal. Raises `ConfigError` if the journal ends
    before the checkpoint, because then the journal may have lost its end.

    It belongs if the journal recorded its digest, or if the journal is empty or begins at it.
    """
    version, recorded = stamp.policy_version, journal.checkpoint_digest(stamp.policy_version)
    if recorded is not None and recorded != stamp.digest:
        raise CheckpointError(
            f"The checkpoint of policy version {version} has another digest than the one in the journal."
        )
    if journal.is_empty:
        return
    if version > (end := state.policy_version):
        raise ConfigError(
            f"The checkpoint of policy version {version} is newer than the journal, which ends at {end}. If another "
            f"run wrote the checkpoint, move it away. Otherwise the journal lost its end. {WAY_OUT}"
        )
    if recorded is None and version != state.base_version:
        raise CheckpointError(
            f"The journal did not record a checkpoint of policy version {version}: they belong to different runs."
        )


def check_state_origin(journal: Journal, policy: str, state: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if the state of a policy's checkpoint has another origin than the journal, as far as both
    record it.
    """
    origin = journal.origin.of(policy)
    recorded = {"model_weights": origin.get("model_weights"), "dtype": origin.get("model.dtype")}
    if "model.lora.rank" in origin:
        recorded["adapters"] = bool(origin["model.lora.rank"])
    for key, ours in recorded.items():
        if ours is not None and (theirs := state.get(key, ours)) != ours:
            raise ConfigError(
                f"The checkpoint of policy version {state['policy_version']} has {key} = {theirs!r}, its journal "
                f"{ours!r}: they belong to different runs. Take a checkpoint that this run wrote."
            )


@dataclass(frozen=True, slots=True)
class Answered:
    """The calls of a demonstration in order, without the id of their episode and without versions."""

    task_id: str
    calls: tuple[RecordedCall, ...]
    reward: float | None = None
    """As in `DemonstrationBody`, like `group`."""
    group: str = ""


class Committed(NamedTuple):
    """A batch of demonstrations that is in the journal."""

    batch: int
    """Its id, which may have been that of a batch that was given up."""
    last_event: int
    """Number of the newest event at that time. Later ones are about this batch."""


# ---- demonstrations: finished episodes whose answers were given ---------------------------------------------


def compose_demonstrations(
    store: Store,
    request: SftRequest,
    answered: Sequence[Answered],
    job: JobConfig,
    now: float,
    idempotency_key: str | None,
) -> Iterator[Committed | None]:
    """Commit demonstrations as the next batch, with the settings `job`, before any of them is learned.

    Such an episode is a group of one unless the request names a group. It has no reward, so that no mean counts it; the
    reward of its answers is that of its calls. Its batch takes the policies to the next version like any other: the
    journal, the training loop and the replay do not distinguish them.

    Works in slices and yields the batch at last: see `GroupCommit.in_slices`.

    Raises `Later` (`not_sampling`) while another batch is being learned or an evaluation needs the present version.
    Raises `Conflict` (`training_over`) if `job.max_steps` is reached.
    """
    if store.is_over:
        raise Conflict(
            f"Training is over: job.max_steps = {job.max_steps} is reached; raise it to learn more.",
            code="training_over",
        )
    if store.pending is not None:
        raise Later("The worker is learning a batch.", code="not_sampling", retry_after=RETRY_SECONDS)
    if pinned := store.num_pinned():
        raise Later(
            f"{pinned} evaluation episodes need policy version {store.policy_version}.",
            code="not_sampling",
            retry_after=RETRY_SECONDS,
        )
    named: dict[str, list[Answered]] = {}
    for number, one in enumerate(answered):
        named.setdefault(one.group or f"/{number}", []).append(one)
    groups = {tuple(new_episode_id(now) for _ in members): members for members in named.values()}
    batch = Batch(store.policy_version, tuple(groups), job, composed=now, carry=store.carry)
    with store.transaction():
        store.journal.add_batch(batch)
        store.pending = batch  # No other batch is composed between the slices.
    yield None
    for episode_ids, members in groups.items():
        group = Group(
            store.journal.num_groups + 1,
            request.client_id,
            members[0].group or members[0].task_id,
            opened=now,
            touched=now,
            state="batched",
        )
        for episode_id, one in zip(episode_ids, members, strict=True):
            with store.transaction():
                _record(store, group, one, episode_id, now)
            yield None
    with store.transaction():
        committed = Committed(batch.id, store.journal.last_event())
        store.remember(sft_scope(request), idempotency_key, request, f"{committed.batch} {committed.last_event}")
    yield committed


def check_rewards(recipe: Recipe, answered: Sequence[Answered]) -> None:
    """Raises `InvalidRequest` for demonstrations without the rewards that the recipe learns from."""
    if recipe.takes_given == "scored" and all(one.reward is None for one in answered):
        raise InvalidRequest(
            f"no demonstration has a reward, and the recipe {recipe.name} learns from good and bad answers: give a "
            "reward, above 0 for a good answer",
            param="reward",
        )
    if recipe.takes_given != "compared":
        return
    rewards: dict[str, set[float | None]] = {}
    for one in answered:
        rewards.setdefault(one.group, set()).add(one.reward)
    for one in answered:
        if not one.group or len(rewards[one.group] - {None}) < 2:
            raise InvalidRequest(
                f"{one.task_id}: the recipe {recipe.name} compares answers, and no other one with the same group has "
                "another reward: give a preferred and a rejected answer the same group and different rewards",
                param="reward",
            )


def _record(store: Store, group: Group, given: Answered, episode_id: str, now: float) -> None:
    """Records a demonstration as an episode that has finished, with its calls."""
    version = store.policy_version
    store.put_group(group)
    trained = [call for call, *_ in given.calls if not call.untrained]
    episode = EpisodeRecord(
        id=episode_id,
        seq=store.journal.num_episodes + 1,
        client_id=group.client_id,
        task_id=given.task_id,
        task_set="",
        group=group.name,
        group_id=group.id,
        mode="train",
        policy_version=version,
        begun=now,
        status="finished",
        ended=now,
        num_calls=len(given.calls),
        num_tokens=sum(len(call.completion) for call in trained),
        call_rewards={} if given.reward is None else {call.id: given.reward for call in trained},
        oldest_version=version,
    )
    for call, suffix, completion in given.calls:
        call = replace(call, episode_id=episode.id, versions=(version,) * len(call.completion))
        store.journal.add_call(call, encode_call(call, suffix, completion))
    store.put(episode)


def sft_scope(request: SftRequest) -> str:
    """Scope of the idempotency keys of demonstrations: each client has its own."""
    return f"sft/{request.client_id}"
