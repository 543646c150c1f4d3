"""Batches of demonstrations: finished episodes whose answers were given, not sampled.

Such an episode has no reward and is a group of one. Its batch takes the policies to the next version like any other:
the journal, the training loop and the replay do not distinguish them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agentjet.config import JobConfig
from agentjet.errors import Conflict, Later
from agentjet.protocol import SftRequest
from agentjet.swarm.groups import announce, training_is_over
from agentjet.swarm.journal import RecordedCall, encode_call
from agentjet.swarm.mixture import RETRY_SECONDS
from agentjet.swarm.state import Batch, EpisodeRecord, Group, new_episode_id
from agentjet.swarm.store import Store


@dataclass(frozen=True, slots=True)
class Answered:
    """The calls of a demonstration in order, without the id of their episode and without versions."""

    task_id: str
    calls: tuple[RecordedCall, ...]


class Committed(NamedTuple):
    """A batch of demonstrations that is in the journal."""

    batch: int
    """Its id, which may have been that of a batch that was given up."""
    last_event: int
    """Number of the newest event at that time. Later ones are about this batch."""


def learned_before(store: Store, request: SftRequest, idempotency_key: str | None) -> Committed | None:
    """The batch of an earlier copy of this request. Raises `Conflict` for the key of another request."""
    known = store.recall(_scope(request), idempotency_key, request)
    return None if known is None else Committed(*map(int, known.split()))


def compose(
    store: Store,
    request: SftRequest,
    answered: Sequence[Answered],
    job: JobConfig,
    now: float,
    idempotency_key: str | None,
) -> Iterator[Committed | None]:
    """Commit demonstrations as the next batch, with the settings `job`, before any of them is learned.

    Works in slices and yields the batch at last: see `GroupCommit.in_slices`.

    Raises `Later` (`not_sampling`) while another batch is being learned or an evaluation needs the present version.
    Raises `Conflict` (`training_over`) if `job.max_steps` is reached.
    """
    if training_is_over(store):
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
    episode_ids = [new_episode_id(now) for _ in answered]
    groups = tuple((episode_id,) for episode_id in episode_ids)
    batch = Batch(store.policy_version, groups, job, composed=now, carry=store.carry)
    with store.transaction():
        store.journal.add_batch(batch)
        store.pending = batch  # No other batch is composed between the slices.
    yield None
    for episode_id, one in zip(episode_ids, answered, strict=True):
        with store.transaction():
            _record(store, request, one, episode_id, now)
        yield None
    with store.transaction():
        committed = Committed(batch.id, store.journal.last_event())
        store.remember(_scope(request), idempotency_key, request, f"{committed.batch} {committed.last_event}")
    yield committed


def _record(store: Store, request: SftRequest, given: Answered, episode_id: str, now: float) -> None:
    """Records a demonstration as an episode that has finished, with its calls."""
    version = store.policy_version
    group = Group(
        store.journal.num_groups + 1, request.client_id, given.task_id, opened=now, touched=now, state="batched"
    )
    store.put_group(group)
    episode = EpisodeRecord(
        id=episode_id,
        seq=store.journal.num_episodes + 1,
        client_id=request.client_id,
        task_id=given.task_id,
        task_set="",
        group=given.task_id,
        group_id=group.id,
        mode="train",
        policy_version=version,
        begun=now,
        status="finished",
        ended=now,
        num_calls=len(given.calls),
        num_tokens=sum(len(call.completion) for call, *_ in given.calls if not call.untrained),
        oldest_version=version,
    )
    for call, suffix, completion in given.calls:
        call = replace(call, episode_id=episode.id, versions=(version,) * len(call.completion))
        store.journal.add_call(call, encode_call(call, suffix, completion))
    store.put(episode)
    announce(store, episode)


def _scope(request: SftRequest) -> str:
    return f"sft/{request.client_id}"
