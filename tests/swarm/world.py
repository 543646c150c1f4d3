"""A swarm on a temporary journal with a clock that only the test moves."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentjet.config import JobConfig
from agentjet.protocol import AbortRequest, BeginRequest, FinishRequest
from agentjet.recipes.registry import make_recipe
from agentjet.swarm import Batch, EpisodeRecord, Journal, SwarmState
from agentjet.swarm.conversations import Conversations
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest
from agentjet.types import SOLE_POLICY, Call, Message, ToolCall

LEASE = 100.0
MAX_SECONDS = 1000.0


class World:
    """Short words for long requests; `reopen` is a restart of the server on the same folder."""

    def __init__(self, folder: Path, *, policies: tuple[str, ...] = (), **job: Any) -> None:
        settings = {"batch_size": 2, "group_size": 2, "lease_seconds": LEASE, "max_episode_seconds": MAX_SECONDS}
        self.job = JobConfig(**(settings | job | {"recipe": make_recipe(job.get("recipe", "grpo"))}))
        self.policies = policies
        self.path = folder / "journal.sqlite"
        self.now = 1000.0
        self.num_calls = 0
        self.open()

    def open(self) -> None:
        self.journal = self.open_journal()
        self.journal.file.db.execute("PRAGMA synchronous = OFF")  # no test pulls the plug; waiting for the disk is slow
        self.swarm = SwarmState(self.journal, self.job, policies=self.policies, clock=lambda: self.now)

    def open_journal(self) -> Journal:
        return Journal.open(self.path)

    def close(self) -> None:
        self.journal.close()

    def reopen(self) -> SwarmState:
        self.close()
        self.open()
        return self.swarm

    def training(self, batch: Batch) -> TrainingBatch:
        """The batch of the one policy of a run without named policies."""
        return self.swarm.batches.training_batches(batch)[SOLE_POLICY]

    def forest(self, batch: Batch) -> Forest:
        """The forest of a batch, with the advantages that its recipe computes."""
        return batch.job.recipe.columns(self.training(batch), {})[0]

    def begin(self, group: str = "g", *, key: str | None = None, **request: Any) -> EpisodeRecord:
        asked = {"task_id": "t", "group": group} | request
        return self.swarm.begin(BeginRequest(**asked), idempotency_key=key)

    def finish(self, episode: EpisodeRecord, reward: float, *, key: str | None = None, **request: Any) -> EpisodeRecord:
        return self.swarm.finish(episode.id, FinishRequest(reward=reward, **request), idempotency_key=key)

    def abort(self, episode: EpisodeRecord, reason: str = "", *, key: str | None = None) -> EpisodeRecord:
        return self.swarm.abort(episode.id, AbortRequest(reason=reason), idempotency_key=key)

    def call(
        self,
        episode: EpisodeRecord,
        *tokens: int,
        parent: Call | None = None,
        kept: int = 0,
        to: Conversations | None = None,
        **changes: Any,
    ) -> Call:
        """Record a call, `to` a front: prompt (1, 2) or what `parent` keeps and then 3, answer `tokens`."""
        self.num_calls += 1
        call = Call(
            id=f"{episode.id}.{self.num_calls}",
            episode_id=episode.id,
            role="",
            parent=parent.id if parent else None,
            kept=kept,
            suffix=(3,) if parent else (1, 2),
            completion=tokens,
            logprobs=tuple(-0.1 * token for token in tokens),
            versions=(self.swarm.policy_version,) * len(tokens),
            temperature=1.0,
            finish_reason="stop",
            response=Message("assistant", f"{tokens}", tool_calls=(ToolCall("c1", "add", '{"a": 1}'),)),
            prompt_key="prompt",
            created=self.now,
        )
        call = replace(call, **changes)
        (to or self.swarm).record_call(call, [b"p"] * len(call.suffix), [f"é{token}".encode() for token in tokens])
        return call

    def prune(self) -> int:
        """Delete what the journal need not keep, as a server does. Returns the number of slices."""
        slices = self.swarm.unneeded()
        for rows in slices:
            self.swarm.prune(rows)
        return len(slices)

    def play(self, group: str, *rewards: float, **request: Any) -> list[EpisodeRecord]:
        """Episodes of a group that each make one call and finish with the given rewards."""
        begun = [self.begin(group, **request) for _ in rewards]
        for episode, reward in zip(begun, rewards, strict=True):
            self.call(episode, 7, 8)
            self.finish(episode, reward)
        return begun

    def kinds(self) -> list[str]:
        return [event.kind for event in self.swarm.queries.journal.events()]


@contextmanager
def refused_commits(journal: Journal, error: Exception | None = None) -> Iterator[None]:
    """Context in which the disk refuses commits."""
    real, refusal = journal.file.db, error or sqlite3.OperationalError("database or disk is full")

    class Full:
        def execute(self, statement: str, *args: object) -> sqlite3.Cursor:
            if statement == "COMMIT":
                raise refusal
            return real.execute(statement, *args)

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    journal.file.db = Full()  # type: ignore[assignment]
    try:
        yield
    finally:
        journal.file.db = real
