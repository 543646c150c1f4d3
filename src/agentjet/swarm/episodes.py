"""`SwarmState`: the store of a run with the rules of its episodes. `Queries`: reads of a store, live or recorded.

Invariants:
* an acknowledged change is on disk: see `Transactions.defer_commits`;
* a finished training episode is in exactly one of: waiting, one batch, a group dropped for a named reason;
* only the episodes that the present batch needs are admitted, or, with `max_staleness`, as many batches as may wait
  without getting too old. Groups that do get too old are dropped and counted;
* no client holds all places for ever: see `places`;
* an episode never outlives its lease or `max_episode_seconds`, even if `reap` is called late.

No HTTP and no waiting. Time comes from the injected clock only.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

from agentjet.config import JobConfig, first_mistake
from agentjet.errors import ConfigError, Conflict, InvalidRequest, Later, Unprocessable, counted, did_you_mean
from agentjet.protocol import (
    AbortRequest,
    BeginRequest,
    CloseGroupsRequest,
    EvaluationRequest,
    FinishRequest,
    SftRequest,
    duration,
)
from agentjet.swarm.batches import Answered, Batches, Committed, compose_demonstrations, sft_scope
from agentjet.swarm.conversations import Conversations
from agentjet.swarm.facts import turns_of
from agentjet.swarm.groups import HAS_STEPS, REPLACED, STALLED, AnsweredRollout, GroupRules, Undecided
from agentjet.swarm.journal import Journal
from agentjet.swarm.origin import of_worker
from agentjet.swarm.places import RETRY_SECONDS, Mixture, Places
from agentjet.swarm.state import CallCounts, EpisodeRecord, Group, Host, JobSettings, Leases, Store, new_episode_id
from agentjet.types import ModelInfo, wrong_reward_name


class SwarmState(Store, Conversations):
    """The store of a run, with the rules by which episodes begin, call and end. Synchronous; one thread at a time."""

    def __init__(
        self,
        journal: Journal,
        job: JobConfig,
        *,
        clock: Callable[[], float] = time.time,
        policies: tuple[str, ...] = (),
        stopwatch: Callable[[], float] = lambda: 0.0,
        policy_version: int | None = None,
        host: Host = Host(),  # noqa: B008 (it is immutable)
    ) -> None:
        """An empty journal starts with `job`, at the checkpoint of `policy_version`. A journal with history has its own
        version, and perhaps job settings that replaced `job`. `policies` are those that the settings of the run name.
        `stopwatch` is a monotonic clock: see `Leases`.
        """
        super().__init__(journal, clock, policies, host)
        with self.transaction():
            if policy_version is not None and self.journal.is_empty:
                self.start_at(policy_version)
            self.job_notice = self.start_job(job)
            """A sentence for the log if the settings in force differ from `job`, else empty."""
        self.leases = Leases(clock, stopwatch)
        self.mixture = Mixture(self, clock)
        self.places = Places(self, self.leases, self.mixture, clock)
        self.group_rules = GroupRules(self, self.leases, self.mixture, self.places)
        self.queries = Queries(self, self.group_rules, clock)
        self.batches = Batches(self, self.group_rules, clock)
        if journal.file.segments:  # A killed front may have counted calls that it did not report.
            with self.transaction():
                for episode in self.live():
                    if (counts := journal.newest_counts(episode.id)) is not None:
                        self.account(episode.id, counts)

    # ---- the run -------------------------------------------------------------------------------------------

    def replace_job(self, job: JobConfig) -> None:
        """Put other settings in force from here on. A batch keeps those it was composed with."""
        with self.transaction():
            self.put_job(job)

    def check_origin(self, policy: str, info: ModelInfo) -> None:
        """Compare a new worker, before it loads or learns anything, with the origin of a policy.

        Raises `ConfigError` if the weights would differ.
        """
        self.journal.check_origin(policy, of_worker(info))

    def record_origin(self) -> None:
        """Store the checked origins, because the workers and the newest checkpoint agree with them."""
        with self.transaction():
            self.journal.record_origin()

    def record_models(self, control_tokens: Mapping[str, Mapping[int, str]], contexts: Mapping[str, int]) -> None:
        """Store the names of control tokens and the contexts by policy, which people's records need without a model."""
        with self.transaction():
            self.journal.put_control_tokens(control_tokens)
            self.journal.put_context_lengths(contexts)

    def record_evaluation(self, request: EvaluationRequest, *, idempotency_key: str | None = None) -> None:
        """Store the score of a policy version, once per key. Raises `InvalidRequest` for a version not learned yet."""
        scope = f"evaluation/{request.client_id}"
        if self.recall(scope, idempotency_key, request) is not None:
            return
        if request.policy_version > self.policy_version:
            raise Unprocessable(
                f"policy_version = {request.policy_version}: the policy is at version {self.policy_version}; report "
                "the version that was evaluated",
                code="version_unknown",
                param="policy_version",
            )
        with self.transaction():
            self.emit("evaluation", request.model_dump())
            self.remember(scope, idempotency_key, request, str(request.policy_version))

    # ---- begin ---------------------------------------------------------------------------------------------

    def begin(
        self, request: BeginRequest, *, idempotency_key: str | None = None, rollout: AnsweredRollout | None = None
    ) -> EpisodeRecord:
        """Start an episode. Raises `RolloutNeeded` if it needs another answer of the recipe than `rollout`.

        Raises `Later` when the present batch needs none: `not_sampling`, `batch_full`, `task_set_full`, `group_full`.
        Raises `Conflict`:

        * `group_closed`: it may only join a group, and there is none; or the recipe wants fewer episodes;
        * `task_skipped`: the recipe skips the task at present, for a request with `unless_skipped`;
        * `task_set_unknown`: `job.task_weights` has no place for its task set;
        * `task_set_full`: the same at present, for a request with `unless_full`;
        * `recipe_needs_answers`: the recipe learns from demonstrations only;
        * `version_gone`: it is pinned to a version that is not the present one;
        * `client_replaced`: a newer process of the client has begun episodes.
        """
        known = self.begun(request, idempotency_key)
        if known is not None:
            return known
        if request.mode == "train" and self.job.recipe.only_given:
            raise Conflict(
                f"The recipe {self.job.recipe.name} learns from demonstrations only: send them with agentjet sft or "
                "swarm.sft, or choose a recipe for sampled answers, such as job.recipe = 'rft'.",
                code="recipe_needs_answers",
            )
        self.take_over(request)
        now = self._clock()
        if outdated := self.group_rules.outdated(request):
            with self.transaction():
                for group in outdated:
                    self.group_rules.close(group, now)
        if request.at_version is not None:
            self.group_rules.check_pin(request.at_version, now)
        joined = None
        if request.mode == "train":
            joined = self.group_rules.admit(request, now, rollout)
        with self.transaction():
            episode = EpisodeRecord(
                id=new_episode_id(now),
                seq=self.journal.num_episodes + 1,
                client_id=request.client_id,
                task_id=request.task_id,
                task_set=request.task_set,
                group=request.group_name,
                group_id=None if joined is None else joined.id,
                mode=request.mode,
                policy_version=self.policy_version,
                begun=now,
                code_version=request.code_version,
                at_version=request.at_version,
                temperature=request.temperature if joined is None else joined.temperature,
                max_turns=self.job.max_turns if joined is None else joined.max_turns,
                task_mean=None if joined is None else joined.task_mean,
                instance_id=request.instance_id,
                seed=request.seed,
            )
            if joined is not None:
                if not joined.members:
                    self.places.opened(request)
                members = (*joined.members, episode.id)
                self.put_group(replace(joined, members=members, touched=now))
            is_counted = episode.mode == "train" and bool(episode.code_version)
            if is_counted and episode.code_version not in self.journal.code_versions():
                self.emit("code_version", {"code_version": episode.code_version, "client_id": episode.client_id})
            self.put(episode)
            if episode.instance_id:
                self.journal.add_instance(episode.client_id, episode.instance_id)
            self.remember(_begin_scope(request), idempotency_key, request, episode.id)
            self.leases.renew(episode)
            self.restores.append(partial(self.leases.remove, episode))
        return episode

    def begun(self, request: BeginRequest, idempotency_key: str | None) -> EpisodeRecord | None:
        """The episode that an earlier copy of this request began. Raises `Conflict` for the key of another request."""
        known = self.recall(_begin_scope(request), idempotency_key, request)
        return None if known is None else self.episode(known)

    def take_over(self, request: BeginRequest, most: int | None = None) -> bool:
        """Abort the live episodes of the client's earlier process, and close its groups without live members.

        The earlier process was killed, and its leases would keep its places. `begin` calls this first. With `most`, so
        many episodes are aborted; returns True if others are left. Raises `Conflict` (`client_replaced`) for a process
        that was itself replaced: two running ones would end each other's episodes.
        """
        known = self.journal.instances(request.client_id) if request.instance_id else []
        if not known or known[-1] == request.instance_id:
            return False
        if request.instance_id in known:
            raise Conflict(
                f"Another process of client {request.client_id!r} has begun episodes since and taken the places of "
                "this one: end this process, or give the two different names (client_id) or the same instance_id.",
                code="client_replaced",
            )
        now = self._clock()
        replaced = [e for e in self.live() if e.client_id == request.client_id and e.instance_id]
        for episode in replaced[:most]:
            with self.transaction():
                self.mixture.record_end(self.group_rules.end_unscored(episode, REPLACED, now))
        if most is not None and len(replaced) > most:
            return True
        for group in list(self.groups.values()):
            members = [self.episodes[member] for member in group.members]
            is_left = all(member.ended is not None and member.instance_id for member in members)
            if group.client_id == request.client_id and group.state == "open" and is_left:
                with self.transaction():
                    self.group_rules.close(group, now)
        return False

    # ---- demonstrations ------------------------------------------------------------------------------------

    def demonstrated(self, request: SftRequest, idempotency_key: str | None) -> Committed | None:
        """The batch of an earlier copy of this request. Raises `Conflict` for the key of another request."""
        known = self.recall(sft_scope(request), idempotency_key, request)
        return None if known is None else Committed(*map(int, known.split()))

    def job_of(self, request: SftRequest, policy: str) -> JobConfig:
        """The settings of the batch of a request. Raises `Unprocessable` for a recipe of sampled answers."""
        try:
            return self.job.for_demonstrations(request.lr, policy, request.recipe)
        except ValueError as error:
            raise Unprocessable(first_mistake(error), code="invalid_setting", param="recipe") from None

    def demonstrate(
        self, request: SftRequest, answered: Sequence[Answered], policy: str, *, idempotency_key: str | None = None
    ) -> Iterator[Committed | None]:
        """See `compose_demonstrations`. `policy` learns. Raises `Later` (`not_sampling`) for a complete batch, too."""
        if self.batches.ready():
            raise Later("A complete batch is learned first.", code="not_sampling", retry_after=RETRY_SECONDS)
        job = self.job_of(request, policy)
        yield from compose_demonstrations(self, request, answered, job, self._clock(), idempotency_key)

    # ---- ends ----------------------------------------------------------------------------------------------

    def finish(self, episode_id: str, request: FinishRequest, *, idempotency_key: str | None = None) -> EpisodeRecord:
        """End an episode with its reward. The same reward again gives the same answer.

        Raises `InvalidRequest` (`invalid_reward`) when `by_role` has an unknown name or lacks a policy of the run, or
        rewards of calls are wrong, or are missing although the recipe needs them.
        Raises `Conflict`: `episode_expired`, `episode_aborted`, or `episode_finished` when it ended with another
        reward.
        """
        self._check_roles(request)
        scope = f"finish/{episode_id}"
        if self.recall(scope, idempotency_key, request) is not None:
            return self.episode(episode_id)
        episode = self.up_to_date(episode_id)
        score: dict[str, Any] = {
            "reward": request.reward,
            "by_role": dict(request.by_role),
            "call_rewards_digest": digest(request),
            "metrics": dict(request.metrics),
            "reward_text": request.text,
        }
        if episode.status == "finished" and episode == replace(episode, **score):
            return episode
        episode = self._live(episode_id)
        self.leases.renew(episode)  # If its commit is undone, the client has a lease to repeat it.
        # Turns are those before the end: it marks answers in flight undelivered, and calls are pruned later.
        of_calls = call_rewards(self.journal, episode_id, request)
        recipe = self.job.recipe
        if recipe.needs_call_rewards and not of_calls and episode.mode == "train" and episode.num_calls:
            raise Unprocessable(
                f"The recipe {recipe.name} needs rewards of calls: finish the episode with by_turn or by_call.",
                code="invalid_reward",
                param="by_turn",
            )
        now = self._clock()
        with self.transaction():
            episode = replace(episode, status="finished", ended=now, call_rewards=of_calls, **score)
            self.put(episode)
            self.remember(scope, idempotency_key, request, episode_id)
            self.group_rules.member_finished(episode, now)
            self.group_rules.release(episode)
            self.group_rules.close_if_complete(episode, now)
            self.mixture.record_end(episode)
        return self.episode(episode_id)

    def abort(self, episode_id: str, request: AbortRequest, *, idempotency_key: str | None = None) -> EpisodeRecord:
        """End an episode without a reward, and free its place.

        An episode that ended unscored is returned unchanged. Raises `Conflict` (`episode_finished`) on a scored one.
        """
        scope = f"abort/{episode_id}"
        if self.recall(scope, idempotency_key, request) is not None:
            return self.episode(episode_id)
        episode = self.up_to_date(episode_id)
        if episode.status in ("aborted", "expired"):
            return episode
        episode = self._live(episode_id)
        self.leases.renew(episode)
        now = self._clock()
        with self.transaction():
            self.remember(scope, idempotency_key, request, episode_id)
            episode = self.group_rules.end_unscored(episode, request.reason, now)
            self.group_rules.close_if_complete(episode, now)
            self.mixture.record_end(episode)
        return episode

    def close_groups(self, request: CloseGroupsRequest, *, idempotency_key: str | None = None) -> Iterator[int]:
        """Close groups of which the client begins no further episode, or drop those that it does not need, in slices.

        Yields at last the number of those that still wait for live members. A repeated request has one effect: a later
        group of the same name stays open. See `GroupCommit.in_slices`.
        """
        scope = f"close/{request.client_id}"
        if self.recall(scope, idempotency_key, request) is None:
            now, left = self._clock(), self.group_rules.named(request)
            with self.transaction():
                self.remember(scope, idempotency_key, request, "")
            yield 0
            for known in left:
                group = self.groups.get(known.id)
                if group is not None and group.state == "open":  # It may have changed since the slice before.
                    with self.transaction():
                        if request.not_needed:
                            self.group_rules.drop_groups([group], "surplus", HAS_STEPS, now)
                        else:
                            self.group_rules.leave(group, now)
                yield 0
        yield sum(group.is_left for group in self.group_rules.named(request))

    def undecided(self) -> Undecided | None:
        """The closing group that ended first; None without any."""
        closing = [group for group in self.groups.values() if group.state == "closing"]
        if not closing:
            return None
        return self.group_rules.question(min(closing, key=lambda group: (group.closed, group.id)))

    def decide(self, question: Undecided, reason: str) -> None:
        """Complete a closing group, or drop it for the recipe's reason. Does nothing if the group has ended since."""
        if self.groups.get(question.group.id) == question.group:
            with self.transaction():
                self.group_rules.decide(question.group, reason, self._clock())

    # ---- calls ---------------------------------------------------------------------------------------------

    def put_calls(self, episode: EpisodeRecord) -> None:
        self.put(episode)

    def account(self, episode_id: str, counts: CallCounts) -> None:
        """Record the counts that the front of an episode has, also after it has ended."""
        before = self.episode(episode_id)
        episode = replace(before, **counts._asdict())
        if episode == before:
            return
        with self.transaction():
            if episode_id in self.episodes:
                self.put(episode)
            else:
                self.journal.put_episode(episode)

    def check_finish(self, episode_id: str, request: FinishRequest) -> None:
        """Raises the errors that `finish` raises for names of rewards: its front need not end the episode for them."""
        self._check_roles(request)
        call_rewards(self.journal, episode_id, request)

    def _check_roles(self, request: FinishRequest) -> None:
        if self.policies and (wrong := wrong_reward_name(request.by_role, self.policies)):
            raise Unprocessable(wrong[1], code="invalid_reward", param=wrong[0])

    # ---- time ----------------------------------------------------------------------------------------------

    def expires_at(self, episode: EpisodeRecord) -> float:
        return self.leases.expires_at(episode, self.job)

    def reap(self, most: int | None = None, *, first: str = "") -> list[EpisodeRecord]:
        """Expire episodes after their lease or maximum, close short groups after their wait; returns the expired.

        Call it often: it is what frees the places of the lost. With `most`, so many of each end in one call, the
        episode `first` before others.
        """
        self.leases.check_stall()
        now = self._clock()
        expired, over = [], [episode for episode in self.live() if self.expires_at(episode) <= now]
        for episode in sorted(over, key=lambda episode: episode.id != first)[:most]:
            with self.transaction():
                expired.append(self.group_rules.expire(episode, now))
                self.group_rules.close_if_complete(episode, now)
        short = [group for deadline, group in self.group_rules.short() if deadline <= now]
        for group in short[:most]:
            with self.transaction():
                self.group_rules.close(group, now)
        self.mixture.remove_absent()
        if late := self.mixture.late():
            with self.transaction():
                self.group_rules.drop_groups(self.mixture.stall(late), "stalled", STALLED, now)
        return expired

    # ---- inside --------------------------------------------------------------------------------------------

    def up_to_date(self, episode_id: str) -> EpisodeRecord:
        """The episode, expired if its time is over, even if `reap` was not called since."""
        episode = self.episode(episode_id)
        if episode.ended is None and self.expires_at(episode) <= self._clock():
            self.reap(1, first=episode_id)
            episode = self.episode(episode_id)
        return episode


def _begin_scope(request: BeginRequest) -> str:
    """Scope of idempotency keys: each client has its own."""
    return f"begin/{request.client_id}"


SILENT_SECONDS = 20.0
"""`waiting_for` names an episode after so long without a call."""
GONE_SECONDS = 30.0
"""Seconds without a call or a heartbeat from which a client may be gone."""
FIRST_STEPS = 10
"""Steps that are the beginning of a run."""


def is_gone(unheard: float, lease_seconds: float) -> bool:
    """True if the client of an episode is gone: it sends several heartbeats within a lease. `unheard` is the number of
    seconds since a call or a heartbeat.
    """
    return unheard >= max(GONE_SECONDS, lease_seconds / 2)


class Refill(NamedTuple):
    """The groups of the present batch that lost members and wait for other ones, without a live one."""

    num_groups: int
    client_id: str
    """The client of the group that closes first."""
    seconds: float
    """Until that group closes."""


class Silence(NamedTuple):
    """Silence of a live episode, in seconds."""

    seconds: float
    """Since its last call; 0 during a call."""
    expires_in: float
    """Until it ends without a reward, unless its client shows activity."""
    ends_in: float
    """Until `job.max_episode_seconds` ends it."""
    unheard: float
    """Since a call or a heartbeat of it."""

    def cause(self, job: JobConfig) -> str:
        if is_gone(self.unheard, job.lease_seconds):
            return f"its client is gone: no heartbeat for {duration(self.unheard)}"
        return "does a tool hang?"


class Queries:
    """Episodes, groups, batches and counts as they are now."""

    def __init__(self, store: Store, group_rules: GroupRules, clock: Callable[[], float]) -> None:
        self.store = store
        self.journal = store.journal
        self.group_rules = group_rules
        self.leases = group_rules.leases
        self.mixture = group_rules.mixture
        self.places = group_rules.places
        self._clock = clock

    @classmethod
    def recorded(cls, journal: Journal, clock: Callable[[], float]) -> Self:
        """The queries of a run whose server does not run here. The journal may be read-only. Leases are unknown.

        Raises `ConfigError` if the job settings can no longer be read, or if the run never started.
        """
        store = Store(journal, clock, journal.origin.named)
        if store.settings is None:
            raise ConfigError(f"{journal.path} is empty: its server never started")
        leases, mixture = Leases(clock, lambda: 0.0), Mixture(store, clock)
        places = Places(store, leases, mixture, clock)
        return cls(store, GroupRules(store, leases, mixture, places), clock)

    # ---- groups and batches --------------------------------------------------------------------------------

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that fill the present batch, in the order they were opened."""
        return tuple(self.store.groups.values())

    def num_groups(self, state: str) -> int:
        return sum(group.state == state for group in self.store.groups.values())

    def group_size(self, episode: EpisodeRecord) -> int:
        """Number of finished episodes that complete its group; 0 for eval episodes."""
        if episode.group_id is None:
            return 0
        group = self.store.groups.get(episode.group_id)
        return self.store.job.group_size if group is None else self.group_rules.size(group)

    def members(self, group: Group) -> list[EpisodeRecord]:
        """The live and finished members of a group of the present batch, in the order they began."""
        return [self.store.episodes[member] for member in group.members]

    def silence(self, episode: EpisodeRecord) -> Silence:
        job, now = self.store.job, self._clock()
        left = self.leases.expires_at(episode, job) - now
        last = episode.begun + job.max_episode_seconds - now
        silent = self.leases.silent_seconds(episode)
        return Silence(silent, max(0.0, left), max(0.0, last), self.leases.unheard_seconds(episode))

    def most_silent(self) -> EpisodeRecord | None:
        """The live training episode whose last call is the oldest."""
        live = [episode for episode in self.store.live() if episode.group_id is not None]
        return max(live, key=self.leases.silent_seconds, default=None)

    def refill(self) -> Refill | None:
        """The groups of the present batch that lost members and have no live one; None without any."""
        short = self.group_rules.short()
        if not short:
            return None
        deadline, first = short[0]
        return Refill(len(short), first.client_id, max(0.0, deadline - self._clock()))

    @property
    def num_lost(self) -> int:
        """Number of aborted and expired episodes while the present batch was filled, without those not needed."""
        lost = self.journal.counts("lost_episodes", self.store.next_batch)
        return lost.get("aborted", 0) + lost.get("expired", 0)

    @property
    def ends_at_version(self) -> int:
        """The policy version at which training ends; 0 if unknown."""
        return self.settings.job.max_steps or self.leases.ends_at_version()

    @property
    def places_left(self) -> int:
        """Number of training groups that may be begun now. Negative if clients opened some in place of silent ones."""
        store = self.store
        if store.is_over or (store.pending is not None and not store.job.max_staleness):
            return 0
        return store.num_places - len(store.groups)

    @property
    def recent_steps(self) -> Sequence[Mapping[str, float]]:
        """Metrics of the newest learned batches, at most 50, the newest last."""
        return [step.metrics for step in self.store.steps]

    @property
    def step_versions(self) -> Sequence[int]:
        """The policy version after each of `recent_steps`. A rollback leaves a gap."""
        return [step.version for step in self.store.steps]

    # ---- the run -------------------------------------------------------------------------------------------

    @property
    def settings(self) -> JobSettings:
        settings = self.store.settings
        assert settings is not None, "job settings are stored before they are used"
        return settings

    def holding(self) -> dict[str, int]:
        return dict(Counter(episode.client_id for episode in self.store.live()))

    def waiting_for(self, *, names_silent: bool = True) -> str:
        """A phrase for the thing that training waits for, which names the episode that is silent for long."""
        store, job = self.store, self.store.job
        if store.pending is not None:
            return f"the worker, to learn batch {store.pending.id}"
        if store.is_over:
            return f"nothing: job.max_steps = {job.max_steps} is reached"
        pinned = store.num_pinned()
        if pinned and self.mixture.chosen() is not None:
            return f"{counted(pinned, 'evaluation episode')} pinned to policy version {store.policy_version}"
        if not store.groups:
            running = sum(episode.mode == "eval" for episode in store.live())
            beside = f"; {counted(running, 'evaluation episode')} at work" if running else ""
            return f"clients, to begin training episodes{beside}"
        live = sum(episode.group_id is not None for episode in store.live())
        closing = self.num_groups("closing")
        awaited = ["rewards" if live else "", "`accept` of the recipe" if closing else ""]
        awaited.append(self.group_rules.missing_members(self._clock()))
        wanted = " and ".join(filter(None, awaited)) or "clients, to begin training episodes"
        if sets := self.mixture.waiting_for():
            wanted += f" of {sets}"
        return (
            f"{wanted}: {self.num_groups('complete')} of {job.batch_size} groups are complete, "
            f"{self.num_groups('open')} open, {f'{closing} closing, ' if closing else ''}"
            f"{counted(live, 'episode')} live{self._waiting_client()}{self._silent() if names_silent else ''}"
        )

    def _waiting_client(self) -> str:
        """A phrase for a client that waits for a place, and for the other one that holds the most open groups."""
        holders = self.places.holders()
        waiting = [client for client, one in holders.items() if one.waits]
        for holder, one in holders.items():
            if one.num_open and (others := [name for name in waiting if name != holder]):
                more = f" and {len(others) - 1} more wait" if others[1:] else " waits"
                silent = f" ({one.num_silent} silent, so others may open as many)" if one.num_silent else ""
                held = counted(one.num_open, "open group")
                return f"; client {others[0]!r}{more} for a place, {holder!r} holds {held}{silent}"
        return ""

    def _silent(self) -> str:
        """A phrase for the live training episode without a call for longest, if that is long."""
        episode = self.most_silent()
        if episode is None or (silence := self.silence(episode)).seconds < SILENT_SECONDS:
            return ""
        return (
            f"; {episode.id} of task {episode.task_id}, client {episode.client_id}, is silent for "
            f"{duration(silence.seconds)} ({silence.cause(self.store.job)}): its lease has "
            f"{duration(silence.expires_in)} left, the episode at most {duration(silence.ends_in)}"
        )


# ---- rewards of single calls --------------------------------------------------------------------------------


def call_rewards(journal: Journal, episode_id: str, request: FinishRequest) -> dict[str, float]:
    """Returns the reward of each call that the request names, by call id, in the order of the calls.

    A turn is the number of a call among the calls of its role that train. `by_call` wins over `by_turn`. Raises
    `InvalidRequest` (`invalid_reward`) for an unknown call or role, and for more turns than the role has.
    """
    if not (request.by_call or request.by_turn):
        return {}
    turns = turns_of(journal, episode_id)
    given: dict[str, float] = {}
    for role, rewards in request.by_turn.items():
        if role not in turns:
            way_out = did_you_mean(role, list(turns), f"it has {', '.join(map(repr, turns)) or 'none'}")
            raise _refused(f"by_turn[{role!r}]: the episode has no role {role!r}; {way_out}", "by_turn")
        if len(rewards) > len(turns[role]):
            raise _refused(
                f"by_turn[{role!r}] has {len(rewards)} rewards, and the role has {len(turns[role])} calls that train: "
                "give one for each of them at most",
                "by_turn",
            )
        given |= dict(zip(turns[role], rewards, strict=False))
    calls = dict.fromkeys(call.id for call in journal.call_facts(episode_id))
    for sent, reward in request.by_call.items():
        name = re.sub(r"^(chatcmpl|cmpl)-|^(resp|msg)_", "", sent)  # The `id` of an answer has its dialect in front.
        if name not in calls:
            raise _refused(f"by_call[{name!r}]: the episode has no such call; give the `id` of an answer", "by_call")
        given[name] = reward
    return {call: given[call] for call in calls if call in given}


def digest(request: FinishRequest) -> str:
    """Digest of the rewards of calls as they were sent; empty without any."""
    if not (request.by_call or request.by_turn):
        return ""
    sent = json.dumps([request.model_dump()[name] for name in ("by_call", "by_turn")], sort_keys=True)
    return hashlib.sha256(sent.encode()).hexdigest()[:16]


def _refused(message: str, param: str) -> InvalidRequest:
    return Unprocessable(message, code="invalid_reward", param=param)
