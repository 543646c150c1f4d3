"""`Store`: the journal and the part of it that is held in memory, always equal to what a reopened journal would give.

It knows what is where, not what is allowed: the rules are `state.SwarmState`'s. Held are live and prepared episodes and
finished ones that still wait to train, the groups of the present batch, the batch being learned and the counts; all
else is looked up in the journal, so memory does not grow with the length of a run.

`CodeVersionStats`: what became of the training episodes of each version of the agents' code.

The job settings that hold: given when the server starts, replaced while it runs, kept over restarts.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from agentjet.config import JobConfig, changed_settings
from agentjet.errors import Conflict, Later
from agentjet.protocol import Event
from agentjet.protocol.bodies import Request
from agentjet.swarm.journal import Journal
from agentjet.swarm.records import Batch, Episode, Group, JobSettings, OutcomeCounts
from agentjet.timeline.tree import ConversationTree

COUNTED = ("live", "prepared", "finished", "aborted", "expired", "trained", "waiting", "dropped")
RECENT = 50
"""Batches that shares and rewards of task sets are shown over."""


class Store:
    """Every change happens inside `transaction()`: rows first, then memory. What fails rebuilds memory."""

    def __init__(self, journal: Journal, clock: Callable[[], float]) -> None:
        self.journal = journal
        self.on_event: Callable[[Event], None] | None = None
        self.on_uncommitted: Callable[[], None] = lambda: None
        """Called when something was written that a `commit` must follow."""
        self.undelivered_calls: Callable[[str], Sequence[str]] = lambda episode_id: ()
        """Which recorded calls of an episode are still on their way to its agent."""
        self._clock = clock
        self.revision = 0
        """Rises with every change. Not journaled."""
        self._outbox: list[Event] = []
        self._committed: list[Event] = []
        self.load()

    def load(self) -> None:
        """Memory anew from the journal."""
        self.revision += 1
        journal = self.journal
        self.episodes: dict[str, Episode] = {episode.id: episode for episode in journal.unsettled_episodes()}
        self.groups: dict[int, Group] = {group.id: group for group in journal.unlearned_groups()}
        settings = journal.job_settings()
        assert settings is not None, "a swarm takes up its job settings before it reads its journal"
        self.settings: JobSettings = settings
        self.policy_version: int = journal.policy_version()
        batches = journal.batches(self.policy_version)
        self.pending: Batch | None = batches[0] if batches else None
        self.carry: Mapping[str, float] = journal.carry()
        """What each task set is owed, in groups, since the newest batch."""
        self.last_step: dict[str, float] = journal.step(self.policy_version - 1)
        self.recent_steps: deque[dict[str, float]] = deque(journal.recent_steps(RECENT), RECENT)
        """Metrics of the newest learned batches, the newest last."""
        self.oldest: dict[str, int] = journal.oldest_versions()
        """The policy version of the oldest token of each episode held here."""
        self.trees: dict[tuple[str, str], ConversationTree] = {}
        self._counts: Counter[str] = Counter(journal.counts())
        self.code_versions = CodeVersionStats(journal)

    @property
    def next_batch(self) -> int:
        """The batch that is being filled."""
        return self.policy_version + (self.pending is not None)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Several changes as one: all or nothing; nested ones join the outermost. Its events go out once it is
        committed.
        """
        outermost = not self.journal.in_transaction
        self.revision += 1
        kept = len(self._outbox)
        try:
            with self.journal.transaction():
                yield
        except BaseException:
            if outermost:
                del self._outbox[kept if self.journal.has_uncommitted else 0 :]
                self.load()
            raise
        if outermost:
            if self.journal.has_uncommitted:
                self.on_uncommitted()
            else:
                self._committed, self._outbox = self._outbox, []
                self.announce()

    def commit(self) -> None:
        """Commit what was written. Raises `Later`, and then all of it is undone, in memory, too."""
        try:
            self.journal.commit()
        except Later:
            self._outbox.clear()
            self.load()
            raise
        self._committed += self._outbox
        self._outbox.clear()

    def announce(self) -> None:
        """Send out the events of what was committed."""
        committed, self._committed = self._committed, []
        for event in committed:
            if self.on_event is not None:
                self.on_event(event)

    def emit(self, kind: str, body: Mapping[str, Any]) -> None:
        """Journal an event; it reaches `on_event` after the commit."""
        with self.transaction():
            self._outbox.append(self.journal.add_event(kind, self._clock(), body))

    # ---- episodes and groups -------------------------------------------------------------------------------

    def put(self, episode: Episode) -> None:
        """Replace an episode in memory and in the counts; one that is settled leaves memory."""
        before = self.episodes.pop(episode.id, None)
        if before is not None:
            self._counts.subtract(_categories(before))
        self._counts.update(_categories(episode))
        self.code_versions.put(before, episode)
        if {"live", "prepared", "waiting"} & set(_categories(episode)):
            self.episodes[episode.id] = episode
        else:
            self.oldest.pop(episode.id, None)

    def put_group(self, group: Group) -> None:
        """Write a group; a dropped one leaves memory."""
        self.journal.put_group(group)
        if group.state == "dropped":
            self.groups.pop(group.id, None)
        else:
            self.groups[group.id] = group

    def live(self) -> list[Episode]:
        return [episode for episode in self.episodes.values() if episode.status == "live"]

    def undecided(self) -> list[Episode]:
        """Live and prepared episodes: those whose reward may yet count or not."""
        return [episode for episode in self.episodes.values() if episode.ended is None]

    def counts(self) -> dict[str, int]:
        return {name: self._counts[name] for name in COUNTED}

    # ---- idempotency ---------------------------------------------------------------------------------------

    def recall(self, scope: str, key: str | None, request: Request) -> str | None:
        """The episode that this very request was about before, if it was.

        Raises `Conflict` for the key with another body.
        """
        known = None if key is None else self.journal.recall(scope, key)
        if known is None:
            return None
        fingerprint, episode_id = known
        if fingerprint != _fingerprint(request):
            raise Conflict(
                f"Idempotency-Key {key!r} was used before for another request; a new request needs a new key.",
                code="idempotency_key_reused",
            )
        return episode_id

    def remember(self, scope: str, key: str | None, request: Request, episode_id: str) -> None:
        """Inside the transaction that has the effect, so that key and effect are on disk together or not at all."""
        if key is not None:
            self.journal.remember(scope, key, _fingerprint(request), episode_id, self._clock())


def _categories(episode: Episode) -> list[str]:
    if episode.status != "finished" or episode.mode == "eval":
        return [episode.status]
    if episode.trained_in is not None:
        return ["finished", "trained"]
    return ["finished", "dropped" if episode.dropped else "waiting"]


def _fingerprint(request: Request) -> str:
    """Digest of what a request asks for. `wait` and `instance_id` are how it asks and who does."""
    return hashlib.sha256(request.model_dump_json(exclude={"wait", "instance_id"}).encode()).hexdigest()


KEPT = 20
"""Versions in memory, by last use; what the journal knows of the others is looked up when they are used again."""


class CodeVersionStats:
    """Equal at any time to what the journal would give. Episodes that name no version are in none."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.tallies: dict[str, OutcomeCounts] = journal.code_versions(KEPT)
        """By version, the one last begun last."""

    def put(self, before: Episode | None, episode: Episode) -> None:
        """An episode was journaled as new (`before` is None), or as changed."""
        version = episode.code_version
        if not version or episode.mode != "train":
            return
        if before is None:
            tally = self.tallies.pop(version, None)
            self.tallies[version] = self._journal.code_version(version) if tally is None else tally.begun()
            if len(self.tallies) > KEPT:
                del self.tallies[next(iter(self.tallies))]
        elif before.ended is None and episode.ended is not None and version in self.tallies:
            self.tallies[version] = self.tallies[version].ended(episode.reward)


def load_or_create_job(journal: Journal, given: JobConfig) -> str:
    """Put in force what was in force before the restart, or `given`, where that is not what was given then.

    Returns, in words, what somebody who knows only the one may not expect; empty where there is nothing to say.
    """
    kept = journal.job_settings()
    if kept is None:
        journal.put_job_settings(JobSettings(1, given, given))
        return ""
    if kept.given.with_defaults() == given.with_defaults():
        if changed := changed_settings(given, kept.job):
            return (
                f"the job settings are those of revision {kept.revision}, which replaced the given ones: "
                f"{', '.join(changed)}"
            )
        return ""
    journal.put_job_settings(JobSettings(kept.revision + 1, given, given))
    lost = f" (those in force were of revision {kept.revision})" if kept.job != kept.given else ""
    changed = changed_settings(kept.job, given)
    return f"the job settings are the ones given at this start{lost}: {', '.join(changed) or 'nothing changed'}"
