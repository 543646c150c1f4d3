"""Groups: admission of episodes, completion, drops, and the ends of episodes in them.

A group has one client, one task set and one code version, so that its episodes are comparable. It is open until
as many members have finished as the group's size. An aborted or expired member frees its place. A client that begins
no further episode of a group leaves it: the group closes with its last live member.
A client that is gone leaves nothing. Then a group below full size without a live member closes after `lease_seconds`
without a new member. An abort may delay a batch that long, once more after a restart; an expired lease adds no delay.

With `Store.defers_hooks` no hook of a plug-in is called here. Then a new group raises `RolloutNeeded`, and a group that
all members have ended is `closing` until `decide`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from agentjet.errors import Conflict, Later
from agentjet.protocol import BeginRequest, CloseGroupsRequest
from agentjet.recipes import hooks
from agentjet.recipes.recipe import FinishedGroup, Recipe
from agentjet.recipes.rollout import Rollout, TaskStats
from agentjet.swarm.facts import is_uniform
from agentjet.swarm.places import RETRY_SECONDS, Mixture, Places
from agentjet.swarm.state import EpisodeRecord, Group, Leases, Store, not_needed
from agentjet.types import EpisodeStatus

MAX_STEPS_RETRY_SECONDS = 60.0
SURPLUS = "surplus: training had enough without it"
STALE = "stale: its tokens are older than job.max_staleness allows"
STALLED = "stalled: its task set finished nothing for as long as an episode may last, while others waited for it"
HAS_STEPS = "not needed: its client's run has its steps"
REPLACED = "replaced: another process of this client has taken its places over"
OWN_REASONS = frozenset(
    {"too_few", "no_tokens", "no_members", "stalled", "surplus", "stale", "poisoned", "rolled_back"}
)
"""Reasons to drop a group that are not those of recipes."""


class RolloutQuestion(NamedTuple):
    """The arguments of the hook `rollout` for a new group."""

    recipe: Recipe
    task: TaskStats
    default: Rollout
    version: int

    def answer(self) -> Rollout:
        """Calls the hook. Raises `RecipeError` if it is wrong, `InvalidRequest` if the task is."""
        return hooks.rollout(*self)


class AnsweredRollout(NamedTuple):
    """The answer of the hook `rollout`. It holds for this question only."""

    question: RolloutQuestion
    rollout: Rollout


class RolloutNeeded(Exception):
    """A new group needs an answer of the hook `rollout`. The group was not opened."""

    def __init__(self, question: RolloutQuestion) -> None:
        super().__init__(question)
        self.question = question


class Undecided(NamedTuple):
    """A closing group, with the arguments of the hook `accept`."""

    group: Group
    recipe: Recipe
    finished: FinishedGroup

    def answer(self) -> str:
        """Calls the hook. Returns its reason to drop the group, or ''. Raises `RecipeError` if the hook is wrong."""
        return hooks.accept(self.recipe, self.finished, OWN_REASONS)


class GroupRules:
    """Admits episodes to groups, completes and drops groups, and ends episodes, with the effects on their groups and
    leases. Its changes are made inside transactions of the store.
    """

    def __init__(self, store: Store, leases: Leases, mixture: Mixture, places: Places) -> None:
        self.leases = leases
        self.mixture = mixture
        self.places = places
        self._store = store

    # ---- admission -----------------------------------------------------------------------------------------

    def admit(self, request: BeginRequest, now: float, rollout: AnsweredRollout | None = None) -> Group:
        """Returns the group that a new training episode joins. A new one has no members yet; `rollout` is for it.

        Raises `Later` when the present batch needs no episode. Raises `Conflict` with one of these codes:

        * `group_closed`: the request may only join a group, and there is none to join; or the group has fewer places;
        * `task_set_unknown`: the task set has no weight;
        * `task_set_full`: the task set has its share, and the request does not wait;
        * `task_skipped`: the recipe skips the task, and the request asks for this answer.
        """
        job = self._store.job
        self.mixture.register(request.task_set)
        if self._store.pending is not None and not job.max_staleness:
            if not request.join_only:
                self.places.refused(request)
            raise Later("The worker is learning a batch.", code="not_sampling", retry_after=RETRY_SECONDS)
        if self._store.is_over:
            raise Later(
                f"Training is over: job.max_steps = {job.max_steps} is reached.",
                code="not_sampling",
                retry_after=MAX_STEPS_RETRY_SECONDS,
            )
        name = request.group_name
        group = self._open_group(request, name)
        if group is not None:
            self._check_place(request, group)
            if len(group.members) < self.size(group) + job.spare_episodes:
                return group
            raise Later(
                f"Group {name!r} has its {self.size(group)} episodes.", code="group_full", retry_after=RETRY_SECONDS
            )
        if request.join_only:
            raise Conflict(f"There is no open group {name!r} to join.", code="group_closed")
        self.places.check(request)
        group = self._new_group(request, now, rollout)
        self._check_place(request, group)
        return group

    def size(self, group: Group) -> int:
        """Number of finished members that complete the group."""
        return group.size or self._store.job.group_size

    def _new_group(self, request: BeginRequest, now: float, answered: AnsweredRollout | None) -> Group:
        """Returns a group as the recipe wants it to be sampled.

        Raises `Conflict` (`task_skipped`). Raises `RolloutNeeded` unless `answered` has the answer to the present
        question. Raises like `RolloutQuestion.answer`.
        """
        job, task = self._store.job, self._store.journal.task(request.task_set, request.task_id)
        default = Rollout(job.group_size, job.temperature, job.max_turns)
        known = replace(task, last_step=self._store.last_step)
        question = RolloutQuestion(job.recipe, known, default, self._store.policy_version)
        if answered is not None and answered.question == question:
            rollout = answered.rollout
        elif self._defers_hooks():
            raise RolloutNeeded(question)
        else:
            rollout = question.answer()
        if rollout.skip and request.unless_skipped:
            raise Conflict(
                f"The recipe {job.recipe.name!r} skips task {request.task_id!r} at policy version "
                f"{self._store.policy_version}: {rollout.skip}. Begin another task, or this one without "
                "unless_skipped.",
                code="task_skipped",
            )
        return Group(
            self._store.journal.num_groups + 1,
            request.client_id,
            request.group_name,
            opened=now,
            touched=now,
            task_set=request.task_set,
            code_version=request.code_version,
            size=0 if rollout.episodes == job.group_size else rollout.episodes,
            temperature=None if rollout.temperature == job.temperature else rollout.temperature,
            max_turns=rollout.max_turns,
            task_mean=task.mean_reward,
        )

    def _check_place(self, request: BeginRequest, group: Group) -> None:
        """Raises `Conflict` (`group_closed`) for a place that the group does not have. A spare one may only join."""
        num = self.size(group)
        if request.place >= num and not request.join_only:
            raise Conflict(
                f"Group {group.name!r} has {num} episodes, so it has no place {request.place}.", code="group_closed"
            )

    def _open_group(self, request: BeginRequest, name: str) -> Group | None:
        wanted = (request.client_id, name, request.task_set)
        return next(
            (
                group
                for group in self._store.groups.values()
                if group.state == "open"
                and not group.is_left
                and (group.client_id, group.name, group.task_set) == wanted
                and (self._store.job.mix_code_versions or group.code_version == request.code_version)
            ),
            None,
        )

    def check_pin(self, at_version: int, now: float) -> None:
        """Raises if an evaluation episode cannot run at `at_version` from its begin to its end.

        `Conflict` (`version_gone`) if the server is at another version. `Later` (`not_sampling`) if it is about to be:
        while it learns, and when a whole batch has waited for evaluations for `max_episode_seconds`.
        """
        if at_version != self._store.policy_version:
            raise Conflict(
                f"The server is at policy version {self._store.policy_version}, not at {at_version}: "
                "begin at that one, or without at_version at the newest.",
                code="version_gone",
            )
        chosen = self.mixture.chosen()
        waits_since = max((group.closed or now for group in chosen), default=now) if chosen else now
        if self._store.pending is not None or now - waits_since >= self._store.job.max_episode_seconds:
            raise Later(
                f"Policy version {at_version} is about to learn.", code="not_sampling", retry_after=RETRY_SECONDS
            )

    def named(self, request: CloseGroupsRequest) -> list[Group]:
        """The open groups that a client leaves, of any code version."""
        names = {(request.client_id, name.group, name.task_set) for name in request.groups}
        return [
            group
            for group in self._store.groups.values()
            if group.state == "open" and (group.client_id, group.name, group.task_set) in names
        ]

    def outdated(self, request: BeginRequest) -> list[Group]:
        """The client's open groups of code versions that it no longer runs, so that no episode will join them.

        A client no longer runs a version if it begins an episode of another one and has no live episode of the version.
        """
        if self._store.job.mix_code_versions or request.mode != "train":
            return []
        older = [
            group
            for group in self._store.groups.values()
            if group.code_version != request.code_version
            and group.state == "open"
            and group.client_id == request.client_id
        ]
        if not older:
            return []
        own = [episode for episode in self._store.live() if episode.client_id == request.client_id]
        running = {episode.code_version for episode in own if episode.mode == "train"}
        return [group for group in older if group.code_version not in running]

    # ---- completion and drops ------------------------------------------------------------------------------

    def member_finished(self, episode: EpisodeRecord, now: float) -> None:
        """Record that a member finished, which renews the wait for other members."""
        group = self._group_of(episode)
        if group is not None:
            self._store.put_group(replace(group, touched=now))

    def _member_lost(self, episode: EpisodeRecord, now: float) -> None:
        """Free the place of a member that aborted or expired. A group without members is dropped."""
        group = self._group_of(episode)
        if group is None:
            return
        members = tuple(member for member in group.members if member != episode.id)
        touched = now if episode.status == "aborted" else group.touched
        self._store.put_group(replace(group, members=members, touched=touched))
        if not members:
            self.drop(self._store.groups[group.id], "no_members", now)

    def stale(self) -> list[Group]:
        """The groups with a token that is too old for the batch being filled."""
        too_old = self._store.policy_version - self._store.job.max_staleness
        return [
            group
            for group in self._store.groups.values()
            if any(
                (version := self._store.episodes[member].oldest_version) is not None and version < too_old
                for member in group.members
            )
        ]

    def _refill_deadline(self, group: Group) -> float | None:
        """Time at which a short group closes without a new member; None while a member is live."""
        if group.state != "open" or self.has_live_member(group):
            return None
        # No episode could join while the server was down, so a restart renews the wait, but only once: a server that
        # restarts again and again would otherwise never close the group.
        seconds = self._store.job.lease_seconds
        return min(max(group.touched, self.leases.epoch), group.touched + seconds) + seconds

    def has_live_member(self, group: Group) -> bool:
        return any(self._store.episodes[member].ended is None for member in group.members)

    def short(self) -> list[tuple[float, Group]]:
        """The groups that wait for members and have no live one, with the times at which they close, in that order."""
        short = [
            (deadline, group)
            for group in self._store.groups.values()
            if (deadline := self._refill_deadline(group)) is not None
        ]
        return sorted(short, key=lambda one: (one[0], one[1].id))

    def missing_members(self, now: float) -> str:
        """A phrase for the members that training waits for, and when it stops waiting; empty if every open group has a
        live member. Names the group that closes first, and the way out.
        """
        short = self.short()
        if not short:
            return ""
        deadline, group = short[0]
        more = f" (and of {len(short) - 1} more)" if len(short) > 1 else ""
        return (
            f"a refill of group {group.name!r} of client {group.client_id!r}{more}, which has {len(group.members)} of "
            f"{self.size(group)} episodes and closes in {max(0.0, deadline - now):.0f} s "
            "(lower job.lease_seconds to close it sooner; the rule refill has the reason)"
        )

    def close(self, group: Group, now: float) -> None:
        """End a group whose members have all finished. It is dropped with a reason, or the recipe decides."""
        members, full = [self._store.episodes[member] for member in group.members], self.size(group)
        self._count_task(members)
        if len(members) < min(self._store.job.min_group_size or self._store.job.recipe.smallest_group, full):
            self.drop(group, "too_few", now)
        elif not any(member.num_tokens for member in members):
            self.drop(group, "no_tokens", now)
        else:
            closing = replace(group, state="closing", reason="short" if len(members) < full else "", closed=now)
            if self._defers_hooks():
                self._store.put_group(closing)
            else:
                self.decide(closing, self.question(closing).answer(), now)

    def decide(self, group: Group, reason: str, now: float) -> None:
        """Complete a closing group, or drop it for the recipe's reason, unless that drops too many."""
        cap = self._store.job.recipe.max_dropped_groups or 10 * self._store.job.batch_size
        lost = self._store.journal.counts("lost_groups", self._store.next_batch)
        if reason and sum(count for name, count in lost.items() if name not in OWN_REASONS) < cap:
            self.drop(group, reason, now)
            return
        self._store.put_group(replace(group, state="complete"))
        self._announce(self._store.groups[group.id])

    def _defers_hooks(self) -> bool:
        return self._store.defers_hooks and hooks.is_plug_in(type(self._store.job.recipe))

    def _count_task(self, members: Sequence[EpisodeRecord]) -> None:
        """Add a group that ended to the statistics of its task."""
        first = members[0]
        task = self._store.journal.task(first.task_set, first.task_id)
        rewards, turns = [member.reward or 0.0 for member in members], [member.num_calls for member in members]
        self._store.journal.put_task(task.with_group(rewards, turns, first.policy_version))

    def question(self, group: Group) -> Undecided:
        members, recipe = [self._store.episodes[member] for member in group.members], self._store.job.recipe
        finished = FinishedGroup(
            task_id=members[0].task_id,
            task_set=members[0].task_set,
            rewards=[member.reward or 0.0 for member in members],
            metrics=[member.metrics for member in members],
            num_tokens=[member.num_tokens for member in members],
            is_uniform=is_uniform(
                self._store.journal, members, self._store.policies, of_turns=recipe.needs_call_rewards
            ),
        )
        return Undecided(group, recipe, finished)

    def drop(self, group: Group, reason: str, now: float) -> None:
        """Drop a group; it will not be trained. Drops are counted by reason."""
        dropped = replace(group, state="dropped", reason=reason, closed=now)
        self._store.put_group(dropped)
        for episode in [self._store.episodes[member] for member in group.members]:
            if episode.status == "finished":
                self._store.put(replace(episode, dropped=reason))
        self._announce(dropped)

    def _announce(self, group: Group) -> None:
        body = {"group": group.name, "client_id": group.client_id, "state": group.state, "reason": group.reason}
        self._store.emit("group", {**body, "episodes": list(group.members)})

    def _group_of(self, episode: EpisodeRecord) -> Group | None:
        return None if episode.group_id is None else self._store.groups.get(episode.group_id)

    # ---- ends of episodes ----------------------------------------------------------------------------------

    def expire(self, episode: EpisodeRecord, now: float) -> EpisodeRecord:
        """End an episode after its lease or its maximum."""
        job = self._store.job
        if now - episode.begun >= job.max_episode_seconds:
            reason = f"older than job.max_episode_seconds = {job.max_episode_seconds:g}"
        else:
            reason = f"no sign of life for job.lease_seconds = {job.lease_seconds:g}"
        return self.end_unscored(episode, reason, now, status="expired")

    def end_unscored(
        self, episode: EpisodeRecord, reason: str, now: float, *, status: EpisodeStatus = "aborted"
    ) -> EpisodeRecord:
        """End an episode without a reward, and free its place in its group."""
        needless = not_needed(reason) if status == "aborted" else ""
        episode = replace(episode, status=status, ended=now, reason=reason, not_needed=needless)
        self._store.put(episode)
        self.release(episode)
        self._member_lost(episode, now)
        return episode

    def close_if_complete(self, episode: EpisodeRecord, now: float) -> None:
        """After an end: close the episode's group if it is complete, and abort its live members as surplus. A group
        that its client left closes without its full size after its last live member.
        """
        group, store = self._group_of(episode), self._store
        if group is None or group.state != "open":
            return
        if group.is_left and not self.has_live_member(group):
            self.close(group, now)
        elif sum(store.episodes[member].status == "finished" for member in group.members) >= self.size(group):
            self._abort_live_members(group, SURPLUS, now)
            self.close(store.groups[group.id], now)

    def leave(self, group: Group, now: float) -> None:
        """Record that the group gets no further member. It closes at once if no member is live."""
        self._store.put_group(replace(group, is_left=True))
        if not self.has_live_member(group):
            self.close(self._store.groups[group.id], now)

    def drop_groups(self, unwanted: Sequence[Group], reason: str, abort_reason: str, now: float) -> None:
        """Drop groups that will not be trained, and abort their live members."""
        for group in unwanted:
            self._abort_live_members(group, abort_reason, now)
            if group.id in self._store.groups:
                self.drop(self._store.groups[group.id], reason, now)

    def release(self, episode: EpisodeRecord) -> None:
        """Release the lease of an episode that has ended. Answers still in flight are marked undelivered."""
        self._store.journal.add_undelivered(self._store.undelivered_calls(episode.id))
        self._store.restores.append(self.leases.remove(episode))

    def _abort_live_members(self, group: Group, reason: str, now: float) -> None:
        for episode in [self._store.episodes[member] for member in group.members]:
            if episode.status == "live":
                self.end_unscored(episode, reason, now)
