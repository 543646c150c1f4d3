"""From the record of a batch's episodes to its forest, as the swarm makes it, and what every such forest must keep."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

import numpy as np

from agentjet.config import JobConfig
from agentjet.swarm.facts import build
from agentjet.swarm.journal import Journal
from agentjet.swarm.state import Batch, EpisodeRecord
from agentjet.timeline import Forest
from agentjet.timeline.tree import OrphanReason, orphans
from agentjet.types import SOLE_POLICY
from tests.timeline.agents import Record, meaning


class RecordedJournal:
    """What `swarm.facts.build` reads of a journal."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def calls(self, episode_id: str) -> list[Any]:
        return [recorded for recorded in self.record.calls if recorded[0].episode_id == episode_id]

    def context_lengths(self) -> dict[str, int]:
        return {}

    def routes(self, episode_id: str) -> dict[str, bytes]:
        return {}

    def orphans(self, episode_id: str) -> dict[str, OrphanReason]:
        return orphans([call for call, *_ in self.calls(episode_id)], self.record.undelivered)


def build_batch(record: Record, episode_ids: Collection[str]) -> tuple[Forest, dict[str, float]]:
    """The forest and its metrics, as the swarm makes them of one group."""
    batch = Batch(0, (tuple(episode_ids),), JobConfig(), 0.0)
    episodes = {
        id: EpisodeRecord(id, i, "c", "t", "", "g", 1, "train", 0, 0.0, status="finished", reward=float(i))
        for i, id in enumerate(episode_ids)
    }
    training, metrics = build(cast(Journal, RecordedJournal(record)), batch, episodes, ())
    return training[SOLE_POLICY].forest, metrics


def train(record: Record, episode_ids: Collection[str]) -> tuple[Forest, dict[str, float]]:
    """The forest of a batch and its metrics, checked: every sampled token is there once, but for orphans, which are
    counted; in its context; under the sequence of its episode and role; and nothing is there twice.
    """
    unheard = check_orphans(record)
    trained = [call for call, _, _ in record.calls if call.completion and call.id not in unheard]
    forest, metrics = build_batch(record, episode_ids)
    numbers = check_contexts(forest, record)
    assert sorted(numbers) == sorted(number for call in trained for number in call.logprobs)
    lost = [call for call, _, _ in record.calls if call.id in unheard]
    assert metrics["forest/orphans"] == len(lost)
    assert metrics["forest/orphan_tokens"] == sum(len(call.completion) for call in lost)
    assert metrics["forest/drift"] == 0
    owners: dict[int, set[tuple[str, str]]] = {}
    for sequence, number in zip(forest["sequence"].tolist(), numbers, strict=True):
        call = record.tokens[number].call
        owners.setdefault(sequence, set()).add((call.episode_id, call.role))
    speakers = sorted({(call.episode_id, call.role) for call in trained})
    assert sorted(owner for some in owners.values() for owner in some) == speakers
    assert len(owners) == forest.num_sequences == len(speakers)
    assert forest.num_nodes == count_prefixes(record.tokens[call.logprobs[-1]].context for call in trained)
    return forest, metrics


def check_orphans(record: Record) -> set[str]:
    """The calls left out, with what makes them orphans checked in the agents' own terms."""
    calls = [call for call, _, _ in record.calls]
    found: set[str] = set()
    for episode_id in {call.episode_id for call in calls}:
        found |= set(orphans([call for call in calls if call.episode_id == episode_id], record.undelivered))
    repeated = {call.retry_of for call in calls}
    kept = {meaning(call) for call in calls if call.id not in found}
    for call in calls:
        if call.id in found:
            lost = call.id in repeated or call.id in record.undelivered or call.retry_of is not None
            assert lost, "an orphan got lost, or was tried again"
            assert meaning(call) not in record.sent_back - kept, "no agent continued from it"
    return found


def check_contexts(forest: Forest, record: Record) -> list[float]:
    """Every target stands where it was sampled; returns the targets' numbers."""
    order = np.arange(forest.num_nodes)
    for node, logprob, version in zip(forest.node, forest["logprob"], forest["version"], strict=True):
        sampled = record.tokens[float(logprob)]
        seen = np.flatnonzero((order <= node) & (node < forest.end))
        assert tuple(forest.tokens[seen].tolist()) == sampled.context
        assert forest.depth[node] == len(sampled.context) - 1
        assert version == sampled.call.versions[sampled.position]
    return [float(logprob) for logprob in forest["logprob"]]


def count_prefixes(rows: Iterable[Sequence[int]]) -> int:
    """Distinct non-empty prefixes, by a plain trie."""
    children: dict[tuple[int, int], int] = {}
    for tokens in rows:
        at = 0
        for token in tokens:
            at = children.setdefault((at, token), len(children) + 1)
    return len(children)
