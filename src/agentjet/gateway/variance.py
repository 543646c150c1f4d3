"""`VarianceReport`: the report of a run whose newest batches had no reward variance, with a prompt and its answers.

Facts in memory are collected in the event loop. Calls, which may have megabytes, are read in the reader's thread. A run
without a server has the same report: `zero_variance`.

Neither the start of a run nor its training depends on a report: one that cannot be read is logged and left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from agentjet.errors import Later
from agentjet.gateway import health
from agentjet.protocol import REPORTED_BATCHES, ScoredAnswer, ZeroVariance, batches_without_variance, report_lines
from agentjet.swarm import Journal
from agentjet.swarm.queries import FIRST_STEPS, Queries
from agentjet.types import Message, beginning

log = logging.getLogger(__name__)

Read = Callable[[Journal], ZeroVariance | None]
SHOWN_CHARACTERS = 200
"""Maximum length of a prompt or an answer in a report."""


class VarianceReport:
    """The report of one run that is being served."""

    def __init__(self, queries: Queries, read: Callable[[Read], Awaitable[ZeroVariance | None]]) -> None:
        """`read` runs a function in the reader's thread."""
        self.found: ZeroVariance | None = None
        """The report as last refreshed."""
        self._queries = queries
        self._read = read
        self._of: tuple[int, int] | None = None
        """Policy version and revision of the settings that `found` is about."""
        self._turn = asyncio.Lock()
        self._is_logged = False
        """True once the log has the present report, or if the run began with it."""
        self._logging: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._is_logged = await self.refresh() is not None

    async def close(self) -> None:
        for task in self._logging:
            task.cancel()
        await asyncio.gather(*self._logging, return_exceptions=True)

    def batch_learned(self) -> None:
        """Refreshes and logs the report in the background: pages may keep the reader's thread busy for long."""
        task = asyncio.create_task(self._log_new())
        self._logging.add(task)
        task.add_done_callback(self._logging.discard)

    async def _log_new(self) -> None:
        """Logs a report once, until a batch has variance again."""
        found = await self.refresh()
        if found is not None and not self._is_logged:
            log.warning("\n".join(report_lines(found)))
        self._is_logged = found is not None

    async def refresh(self) -> ZeroVariance | None:
        """Returns the report. Reads it if a batch was learned, or if settings changed. A busy journal leaves it."""
        async with self._turn:
            queries = self._queries
            of = queries.policy_version, queries.settings.revision
            if of != self._of:
                try:
                    facts = variance_facts(queries)
                    self.found = None if facts is None else await self._read(partial(zero_variance, facts))
                except Later:  # It is read the next time.
                    return self.found
                except Exception:  # The boundary: a row may be damaged, or of a plug-in that is missing.
                    log.exception("the batches without reward variance could not be reported")
                    self.found = None
                self._of = of
        return self.found


def variance_facts(queries: Queries) -> health.RunFacts | None:
    """Returns the facts in memory if the newest batches had no reward variance."""
    if batches_without_variance(queries.recent_steps) < REPORTED_BATCHES:
        return None
    return health.RunFacts(queries.recent_steps, queries.settings.job, queries.step_versions)


def zero_variance(facts: health.RunFacts, journal: Journal) -> ZeroVariance | None:
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
