"""The health of a run and the groups that training waits for; `Overview` has both of a run that is served.

Facts in memory are collected in the event loop. Journal reads, rules and views run in the reader's thread. A run
without a server has the same views, from `Queries.recorded`: `facts_of` and `health_of`, and `waiting_of`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from agentjet.errors import Later
from agentjet.gateway.engine import Engine
from agentjet.gateway.health import REASONS, CodeCounts, Facts, Refill, ServerFacts, SilentEpisode, health
from agentjet.gateway.reader import Reader
from agentjet.gateway.training_loop import OpenRun
from agentjet.protocol import CellView, EpisodeQuery, HealthView, WaitingGroupView, WaitingView
from agentjet.swarm import Episode, Journal
from agentjet.swarm.queries import FIRST_STEPS, Queries, Silence
from agentjet.swarm.records import find_episodes
from agentjet.swarm.state import Group
from agentjet.types import EpisodeFilter

MAX_GROUPS = 200
"""Groups in a view. A batch may have thousands, which no screen shows."""
MAX_LOST = 200
"""Newest lost episodes that are read to fill cells."""
NUMBERS = re.compile(r"\b\w*\d\w*")  # Without \b, its time is quadratic in the length of a word.
COMPARED = 50
"""Newest finished episodes whose durations are read."""
LOST: tuple[EpisodeFilter, ...] = ("aborted", "expired")


@dataclass(frozen=True, slots=True)
class FillingGroup:
    """A group of the present batch with its members, and the silence and lease of the live ones by episode."""

    group: Group
    size: int
    members: Sequence[Episode]
    silences: dict[str, Silence]


class Overview:
    """Health and waiting groups of one run that is being served."""

    def __init__(
        self, run: OpenRun, engine: Engine, reader: Reader, clock: Callable[[], float], waiting_for: Callable[[], str]
    ) -> None:
        """`waiting_for` returns the phrase of the status, without the silent episode, which is one of the cells."""
        self._run = run
        self._engine = engine
        self._reader = reader
        self._clock = clock
        self._waiting_for = waiting_for

    async def health(self) -> HealthView:
        """Returns the answers to "is it learning?" and "is it healthy?". A busy journal leaves out what only it has."""
        facts = facts_of(self._run.swarm.queries, self._checkpoints(), self._server_facts())
        try:
            return await self._reader.read(lambda journal: health_of(facts, journal))
        except Later:
            return health(facts)

    async def waiting(self) -> WaitingView:
        """Returns the groups that fill the present batch, with their episodes. Raises `Later`."""
        return await self._reader.read(waiting_of(self._run.swarm.queries, self._waiting_for(), has_leases=True))

    def _server_facts(self) -> ServerFacts:
        engine, queries = self._engine, self._run.swarm.queries
        seen = max(queries.clients().values(), default=None)
        return ServerFacts(
            engine.state,
            engine.reason,
            self._run.swarm.store.file.refusal,
            engine.num_workers,
            engine.num_hung,
            len(self._run.store.unusable()),
            engine.training.checkpoint_error,
            None if seen is None else max(0.0, self._clock() - seen),
            queries.is_over,
            self._run.lag.recent(),
        )

    def _checkpoints(self) -> list[int]:
        return [info.policy_version for info in self._run.store.listing()]


def facts_of(queries: Queries, checkpoints: Sequence[int], server: ServerFacts | None = None) -> Facts:
    """Returns the facts in memory. `checkpoints` are policy versions. `server` is None for a run without a server."""
    members = [episode for group in queries.groups for episode in queries.members(group)]
    finished = sum(episode.status == "finished" for episode in members)
    return Facts(
        steps=queries.recent_steps,
        job=queries.settings.job,
        versions=queries.step_versions,
        finished=finished,
        lost=queries.num_lost,
        checkpoints=checkpoints,
        silent=None if server is None else _silent(queries),
        refill=None if server is None else _refill(queries),
        newest_code=_newest_code(queries),
        policies=queries.policies,
        server=server,
    )


def _silent(queries: Queries) -> SilentEpisode | None:
    found = queries.most_silent()
    if found is None:
        return None
    silence = queries.silence(found)
    return SilentEpisode(found.id, found.task_id, found.client_id, silence.seconds, silence.unheard, silence.expires_in)


def _refill(queries: Queries) -> Refill | None:
    """The groups that wait because members failed."""
    found = queries.refill()
    return None if found is None or not queries.num_lost else Refill(*found)


def _newest_code(queries: Queries) -> CodeCounts | None:
    """The outcomes of the code version used last; None if the agent has one version only."""
    versions = queries.code_versions()
    if len(versions) < 2:
        return None
    version, counts = [*versions.items()][-1]
    return CodeCounts(version, counts.finished, counts.aborted)


def health_of(facts: Facts, journal: Journal) -> HealthView:
    """Returns the health, with what only the journal has: evaluations, reasons of lost episodes, usual durations."""
    reason, client, code = usual_reason(newest_lost(journal, min(facts.num_lost, REASONS)))
    return health(
        replace(
            facts,
            evaluations=journal.evaluations(),
            reason=reason,
            failing_client=client,
            failing_code=code,
            first=journal.first_steps(FIRST_STEPS),
            longest_seconds=None if facts.silent is None else longest_seconds(journal),
        )
    )


def longest_seconds(journal: Journal) -> float | None:
    """The longest duration of the newest finished training episodes; None before the first."""
    page = find_episodes(journal, EpisodeQuery(limit=COMPARED, status="finished", mode="train"))
    return max((one.ended - one.begun for one in page.episodes if one.ended is not None), default=None)


def waiting_of(queries: Queries, text: str, *, has_leases: bool) -> Callable[[Journal], WaitingView]:
    """Collects the groups that fill the present batch, at most `MAX_GROUPS`, from memory.

    The returned function makes the view. Lost episodes, which only the journal has, fill places that are free again.
    """
    view = WaitingView(
        text=text,
        needed=queries.settings.job.batch_size,
        places=queries.places,
        num_groups=len(queries.groups),
        groups=[],
    )
    found = []
    for group in queries.groups[:MAX_GROUPS]:
        members = queries.members(group)
        live = [one for one in members if one.status == "live"] if has_leases else []
        silences = {one.id: queries.silence(one) for one in live}
        found.append(FillingGroup(group, queries.size(group), members, silences))
    num_lost = queries.num_lost

    def of_journal(journal: Journal) -> WaitingView:
        failed: dict[int | None, list[Episode]] = {}
        if num_lost and any(len(one.members) < one.size for one in found):
            for episode in newest_lost(journal, min(num_lost, MAX_LOST)):
                failed.setdefault(episode.group_id, []).append(episode)
        return view.model_copy(update={"groups": [_group_view(one, failed.get(one.group.id, [])) for one in found]})

    return of_journal


def newest_lost(journal: Journal, limit: int) -> list[Episode]:
    """Returns up to `limit` newest training episodes that were aborted or expired, although they were needed."""
    if not limit:
        return []
    wanted = [EpisodeQuery(limit=limit, status=status, mode="train") for status in LOST]
    found = [one for query in wanted for one in find_episodes(journal, query).episodes]
    return sorted(found, key=lambda episode: episode.seq, reverse=True)[:limit]


def usual_reason(lost: Iterable[Episode]) -> tuple[str, str, str]:
    """The most frequent reason of these episodes, or '', and the client and code version if all with it have one.

    Reasons that differ in numbers, such as durations and ids, count as one; the most frequent of these is returned.
    """
    alike: dict[str, list[Episode]] = {}
    for episode in lost:
        if episode.reason:
            alike.setdefault(NUMBERS.sub("#", episode.reason), []).append(episode)
    if not alike:
        return "", "", ""
    most = max(alike.values(), key=len)
    [(reason, _)] = Counter(episode.reason for episode in most).most_common(1)
    clients, codes = {episode.client_id for episode in most}, {episode.code_version for episode in most}
    return reason, clients.pop() if len(clients) == 1 else "", codes.pop() if len(codes) == 1 else ""


def _group_view(one: FillingGroup, failed: Sequence[Episode]) -> WaitingGroupView:
    cells = []
    for episode in one.members:
        silence = one.silences.get(episode.id)
        cells.append(
            CellView(
                episode_id=episode.id,
                state="live" if episode.status == "live" else "finished",
                reward=episode.reward,
                silent_seconds=None if silence is None else silence.seconds,
                expires_in=None if silence is None else silence.expires_in,
                ends_in=None if silence is None else silence.ends_in,
            )
        )
    free = max(0, one.size - len(cells))
    cells += [CellView(episode_id=episode.id, state="failed") for episode in failed[:free]]
    return WaitingGroupView(
        id=one.group.id,
        name=one.group.name,
        task_id=one.members[0].task_id if one.members else "",
        task_set=one.group.task_set,
        state=one.group.state,
        size=one.size,
        cells=cells,
    )
