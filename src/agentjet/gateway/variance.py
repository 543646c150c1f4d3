"""`VarianceReport`: the report of a run whose newest batches had no reward variance, with a prompt and its answers.

Facts in memory are collected in the event loop. Calls, which may have megabytes, are read in the reader's thread. A run
without a server has the same report: `zero_variance`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial

from agentjet.errors import Later
from agentjet.gateway import health
from agentjet.gateway.reader import Reader
from agentjet.protocol import REPORTED_BATCHES, ScoredAnswer, ZeroVariance, batches_without_variance
from agentjet.swarm import Journal
from agentjet.swarm.queries import FIRST_STEPS, Queries
from agentjet.types import Message, beginning

SHOWN_CHARACTERS = 200
"""Maximum length of a prompt or an answer in a report."""


class VarianceReport:
    """The report of one run that is being served."""

    def __init__(self, queries: Queries, reader: Reader) -> None:
        self.found: ZeroVariance | None = None
        """The report as last refreshed."""
        self._queries = queries
        self._reader = reader
        self._of: tuple[int, int] | None = None
        """Policy version and revision of the settings that `found` is about."""
        self._turn = asyncio.Lock()

    async def refresh(self) -> ZeroVariance | None:
        """Returns the report. Reads it if a batch was learned, or if settings changed. A busy journal leaves it."""
        async with self._turn:
            queries = self._queries
            of = queries.policy_version, queries.settings.revision
            if of != self._of:
                facts = variance_facts(queries)
                with suppress(Later):
                    self.found = None if facts is None else await self._reader.read(partial(zero_variance, facts))
                    self._of = of
        return self.found


def variance_facts(queries: Queries) -> health.Facts | None:
    """Returns the facts in memory if the newest batches had no reward variance."""
    if batches_without_variance(queries.recent_steps) < REPORTED_BATCHES:
        return None
    return health.Facts(queries.recent_steps, queries.settings.job, queries.step_versions)


def zero_variance(facts: health.Facts, journal: Journal) -> ZeroVariance | None:
    """Returns the report, with the first group of the newest batch; None if the run is solved."""
    facts = replace(facts, first=journal.first_steps(FIRST_STEPS))
    newest = facts.steps[-1]
    members = [journal.known_episode(member) for member in journal.first_group(facts.versions[-1] - 1)]
    if not members or health.is_solved(facts):
        return None
    asked = journal.first_call(members[0].id)
    prompt = () if asked is None else asked.ask.messages
    last = [(member, journal.last_call(member.id)) for member in members]
    answers = Counter(("" if call is None else _text(call.response), member.reward or 0.0) for member, call in last)
    fell = health.reward(facts)
    return ZeroVariance(
        batches=batches_without_variance(facts.steps),
        truncated=newest.get("completion/truncated", 0.0),
        limit=health.cutting_limit([newest], facts.job)[0],
        task_id=members[0].task_id,
        prompt=beginning(prompt[-1].content, SHOWN_CHARACTERS) if prompt else "",
        answers=[ScoredAnswer(answer=a, reward=r, count=count) for (a, r), count in answers.most_common()],
        rewards_fell=fell is not None and fell.level == "bad",
    )


def _text(response: Message) -> str:
    calls = [f"{call.name}({call.arguments})" for call in response.tool_calls]
    return beginning(" ".join([response.content, *calls]).strip(), SHOWN_CHARACTERS)
