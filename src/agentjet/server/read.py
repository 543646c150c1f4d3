"""`RunReader`: every read of a run, from its journal and, if a server has the run, from that server's memory.

`agentjet look` reads runs without a server with it: they ended, were killed, or another process is writing them.
Nothing changes. A read sees one committed state of the journal and never waits for its writer. It runs in one thread.
Answers are encoded there, because a long one would hold the event loop. Recipes are called after a read, because the
thread would be missing to all other reads.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from agentjet import __version__
from agentjet.errors import ConfigError, Later, ServerFailed, Unavailable, run_closed
from agentjet.protocol import (
    REPORTED_BATCHES,
    CellView,
    CheckpointInfo,
    ClusterView,
    CodeVersionStatus,
    EpisodeForm,
    EpisodeQuery,
    EvaluationView,
    HealthView,
    JobBody,
    Response,
    ScoredAnswer,
    StatusResponse,
    StepList,
    WaitingGroupView,
    WaitingView,
    ZeroVariance,
    batches_without_variance,
    flatten,
    report_lines,
)
from agentjet.recipes.hooks import PlugInThreads
from agentjet.server import records
from agentjet.server.checkpoints import CheckpointStore
from agentjet.server.health import (
    REASONS,
    RunFacts,
    ServerFacts,
    SilentEpisode,
    cutting_limit,
    health,
    is_solved,
    reward,
)
from agentjet.server.records import Unfinished
from agentjet.swarm import EpisodeRecord, Journal
from agentjet.swarm.episodes import FIRST_STEPS, Queries, Silence
from agentjet.swarm.facts import AdvantageHook, Members
from agentjet.swarm.state import Group
from agentjet.types import JOURNAL, SOLE_POLICY, EpisodeFilter, Message, beginning

if TYPE_CHECKING:  # A gateway has a reader.
    from agentjet.server.gateway import Gateway

log = logging.getLogger(__name__)
Result = TypeVar("Result")
View = TypeVar("View", bound=Response)

MOST_READS = 16
"""Reads that may wait for the thread. Further ones are refused."""
CLOSING_SECONDS = 1.0
MOST_STEPS = 1_000_000
OFFLINE = "unknown: the run is read from its folder; a server that runs it has the live page (`agentjet open`)"
MAX_GROUPS = 200
"""Groups in a view. A batch may have thousands, which no screen shows."""
MAX_LOST = 200
"""Newest lost episodes that are read to fill cells."""
COMPARED = 50
"""Newest finished episodes whose durations are read."""
SHOWN_CHARACTERS = 200
"""Maximum length of a prompt or an answer in a report."""
NUMBERS = re.compile(r"\b\w*\d\w*")  # Without \b, its time is quadratic in the length of a word.
LOST: tuple[EpisodeFilter, ...] = ("aborted", "expired")


class RunReader:
    """Reads a run. Close it at the end."""

    def __init__(
        self,
        connect: Callable[[], AbstractContextManager[Journal]],
        folder: Path,
        *,
        live: Gateway | None = None,
        threads: PlugInThreads | None = None,
        name: str = "",
        title: str = "",
    ) -> None:
        """`connect` opens the journal read-only. That of a live run stays open: opening takes longer than a short read.
        `live` is the gateway of a run that a server has, with the facts that the journal lacks.
        `threads` call hooks of plug-ins. `name` is the run's name in answers, `title` is for people.
        """
        self.folder = folder
        self.name = name or folder.name
        self.title = title or str(folder)
        self._live = live
        self._connect = connect
        self._opened = ExitStack()
        """The open journal. The thread opens and closes it."""
        self._journal: Journal | None = None
        self._checkpoints = CheckpointStore(folder)
        self._advantages = AdvantageHook(threads or PlugInThreads())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._num_reads = 0
        self._is_closed = False

    @classmethod
    def at(cls, folder: Path, *, name: str = "", title: str = "") -> Self:
        """Returns the reader of a run's folder, without a server."""
        return cls(lambda: closing(Journal.open_read_only(folder / JOURNAL)), folder, name=name, title=title)

    def check(self) -> None:
        """Raises `ConfigError` if the journal cannot be read, for example because a newer AgentJet wrote it."""
        with self._connect():
            pass

    async def read(self, work: Callable[[Journal], Result]) -> Result:
        """Returns the result of `work`, which runs in the thread.

        Raises `Later` if too many reads wait or the journal is busy, and `ServerFailed` for a journal that this
        version of AgentJet cannot read.
        """
        if self._num_reads >= MOST_READS:
            raise Unavailable(
                f"{MOST_READS} reads of this run are waiting: read again later.",
                code="too_many_reads",
                retry_after=1.0,
            )
        if self._is_closed:
            raise run_closed()
        self._num_reads += 1
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work)
        finally:
            self._num_reads -= 1
        if self._live is not None:  # What was read is committed, but perhaps not on disk.
            await self._live.commits.durable()
        return found

    # ---- records -----------------------------------------------------------------------------------------------------

    async def steps(self, after: int | None, limit: int, names: Collection[str] = ()) -> bytes:
        """Returns a `StepList`: see `Journal.steps`."""
        return await self._encoded(lambda journal: records.steps(journal, after, limit, names))

    async def all_steps(self) -> StepList:
        return await self.read(lambda journal: records.steps(journal, 0, MOST_STEPS))

    async def episodes(self, query: EpisodeQuery) -> bytes:
        """Returns an `EpisodeList`. Raises `NotFound` or `InvalidRequest` for a wrong `before`."""
        leases = self._leases()
        return await self._encoded(lambda journal: records.episodes(journal, query, leases))

    async def episode(self, episode_id: str, form: EpisodeForm = "tokens") -> bytes:
        """Returns an `EpisodeTree`, or `EpisodeRuns` for `runs`. Raises `NotFound`."""
        leases = self._leases()
        return await self._encoded(lambda journal: records.episode(journal, episode_id, form, leases))

    async def group(self, group_id: int) -> bytes:
        leases = self._leases()
        return await self._finished(lambda journal: records.group(journal, group_id, leases))

    async def batches(self, before: int | None, limit: int) -> bytes:
        return await self._encoded(lambda journal: records.batches(journal, before, limit))

    async def batch(self, batch_id: int) -> bytes:
        return await self._finished(lambda journal: records.batch(journal, batch_id))

    async def evaluations(self) -> list[EvaluationView]:
        return await self.read(Journal.evaluations)

    async def checkpoints(self) -> list[CheckpointInfo]:
        """Returns the checkpoints on disk, the oldest first, with their tags and scores."""
        return self._checkpoints.scored(await self.evaluations())

    async def settings(self) -> dict[str, Any]:
        """Returns the origin of the run and its job settings, by name, for a comparison."""
        return await self.read(settings_of)

    # ---- state -------------------------------------------------------------------------------------------------------

    async def status(self) -> StatusResponse:
        """Returns the status of the server, or the state at the end of the journal, which lacks times of clients."""
        if self._live is None:
            return await self.read(self._recorded_status)
        return await self._live.current_status()

    async def job(self) -> JobBody:
        return job_of(self._live.queries) if self._live is not None else await self.read(lambda j: job_of(_recorded(j)))

    def cluster(self) -> ClusterView:
        return ClusterView(processes=[]) if self._live is None else self._live.hosted.cluster()

    async def health(self) -> HealthView:
        """Returns the answers to "is it learning?" and "is it healthy?". A busy journal leaves out what only it has.
        Without a server: only rules that the records decide.
        """
        checkpoints = [info.policy_version for info in self._checkpoints.listing()]
        server = None if self._live is None else self._live.server_facts()
        try:
            return await self._combined(lambda queries: partial(health_of, facts_of(queries, checkpoints, server)))
        except Later:
            if self._live is None:
                raise
            return health(facts_of(self._live.queries, checkpoints, server))

    async def waiting(self) -> WaitingView:
        """Returns the groups that fill the present batch, with their episodes. Leases are not recorded."""
        live = self._live
        text = OFFLINE if live is None else live.waiting_for(names_silent=False)  # The silent episode is a cell.
        return await self._combined(lambda queries: waiting_of(queries, text, has_leases=live is not None))

    def _recorded_status(self, journal: Journal) -> StatusResponse:
        queries, origin = _recorded(journal), journal.origin
        sole, uniform = {} if origin.named else origin.of(SOLE_POLICY), variance_facts(queries)
        name = str(sole.get("model.name", ""))
        return StatusResponse(
            **status_of(queries),
            zero_variance=None if uniform is None else zero_variance(uniform, journal),
            state="offline",
            waiting_for=OFFLINE,
            run=self.name,
            policies=origin.named,
            model=Path(name).name if Path(name).is_dir() else name,
            model_weights=str(sole.get("model_weights", "")),
            calls_active=0,
            clients={},
            unusable_checkpoints=[str(path) for path in self._checkpoints.unusable()],
            last_event=journal.last_event(),
            uptime=0.0,
        )

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _leases(self) -> Mapping[str, float]:
        return {} if self._live is None else self._live.leases()

    async def _combined(self, collect: Callable[[Queries], Callable[[Journal], Result]]) -> Result:
        """Returns the result of the function that `collect` returns, which gets the journal in the thread. `collect`
        gets the memory of a live run in the event loop.
        """
        if self._live is not None:
            return await self.read(collect(self._live.queries))
        return await self.read(lambda journal: collect(_recorded(journal))(journal))

    async def _encoded(self, work: Callable[[Journal], Response]) -> bytes:
        """Returns the JSON of the body that `work` returns. Numbers that are not finite are null."""
        return await self.read(lambda journal: _json(work(journal)))

    async def _finished(self, work: Callable[[Journal], Unfinished[View]]) -> bytes:
        """As `_encoded`, of a view with advantages."""
        unfinished = await self.read(work)
        found = unfinished.advantages
        if isinstance(found, Members):
            found = await self._advantages(found)
        return await asyncio.to_thread(lambda: _json(unfinished.finish(found)))

    def _run(self, work: Callable[[Journal], Result]) -> Result:
        try:
            if self._journal is None:
                self._journal = self._opened.enter_context(self._connect())
            self._journal.file.db.execute("BEGIN")  # All its statements see the same state.
            try:
                return work(self._journal)
            finally:
                self._journal.file.db.rollback()
        except ConfigError as error:
            raise ServerFailed(f"{error}.", code="journal_unreadable") from None
        except sqlite3.OperationalError as error:
            self._disconnect()
            raise Unavailable(
                f"The journal cannot be read now ({error}): read again later.",
                code="journal_unavailable",
                retry_after=1.0,
            ) from None
        finally:
            if self._live is None:
                self._disconnect()

    def _disconnect(self) -> None:
        self._journal = None
        self._opened.close()

    async def close(self) -> None:
        """Refuses further reads and ends the thread after those that wait. A read that takes longer than
        `CLOSING_SECONDS` is interrupted. Idempotent.
        """
        if not self._is_closed:
            self._is_closed = True
            self._thread.submit(self._disconnect)
        ended = asyncio.create_task(asyncio.to_thread(self._thread.shutdown))
        while not (await asyncio.wait([ended], timeout=CLOSING_SECONDS))[0]:
            if self._journal is not None:
                self._journal.file.interrupt()
        await ended


def _json(view: Response) -> bytes:
    return view.model_dump_json().encode()


def _recorded(journal: Journal) -> Queries:
    return Queries.recorded(journal, time.time)


# ---- status and settings ---------------------------------------------------------------------------------------------


def status_of(queries: Queries) -> dict[str, Any]:
    """Returns the fields of the status that the journal determines, also without a running server. `zero_variance`,
    which reads calls, is not among them.
    """
    job = queries.settings.job
    return {
        "version": __version__,
        "policy_version": queries.store.policy_version,
        "branched_from": queries.journal.origin.branched_from,
        "batch_size": job.batch_size,
        "group_size": job.group_size,
        "spare_episodes": job.spare_episodes,
        "max_steps": job.max_steps,
        "ends_at_version": queries.ends_at_version,
        "groups_complete": queries.num_groups("complete"),
        "groups_open": queries.num_groups("open"),
        "episodes": queries.journal.outcomes(),
        "dropped": queries.journal.counts("dropped"),
        "last_step": queries.store.last_step,
        "holding": queries.holding(),
        "places": queries.places.holders(),
        "code_versions": {
            version: CodeVersionStatus.model_validate(tally, from_attributes=True)
            for version, tally in queries.journal.code_versions().items()
        },
        "task_sets": queries.mixture.shares(),
    }


def job_of(queries: Queries) -> JobBody:
    settings = queries.settings
    return JobBody(revision=settings.revision, job=settings.job.model_dump(mode="json"))


def settings_of(journal: Journal) -> dict[str, Any]:
    try:
        held = journal.job_settings()
    except ConfigError:  # Other settings can be compared without the package of the run's recipe.
        held = None
    job = flatten(held.job.model_dump(mode="json"), "job.") if held is not None else ()
    return {**journal.origin.flattened(), **dict(job)}


# ---- health ----------------------------------------------------------------------------------------------------------


def facts_of(queries: Queries, checkpoints: Sequence[int], server: ServerFacts | None = None) -> RunFacts:
    """Returns the facts in memory. `checkpoints` are policy versions. `server` is None for a run without a server."""
    members = [episode for group in queries.groups for episode in queries.members(group)]
    finished = sum(episode.status == "finished" for episode in members)
    versions = [*queries.journal.code_versions().items()]
    return RunFacts(
        steps=queries.recent_steps,
        job=queries.settings.job,
        versions=queries.step_versions,
        finished=finished,
        lost=queries.num_lost,
        checkpoints=checkpoints,
        silent=None if server is None else _silent(queries),
        refill=queries.refill() if server is not None and queries.num_lost else None,
        newest_code=versions[-1] if len(versions) > 1 else None,
        policies=queries.store.policies,
        server=server,
    )


def _silent(queries: Queries) -> SilentEpisode | None:
    found = queries.most_silent()
    if found is None:
        return None
    silence = queries.silence(found)
    return SilentEpisode(found.id, found.task_id, found.client_id, silence.seconds, silence.unheard, silence.expires_in)


def health_of(facts: RunFacts, journal: Journal) -> HealthView:
    """Returns the health, with what only the journal has: evaluations, reasons of lost episodes, usual durations."""
    reason, client, code = usual_reason(newest_lost(journal, min(facts.num_lost, REASONS)))
    return health(
        replace(
            facts,
            evaluations=journal.evaluations(),
            reason=reason,
            failing_client=client,
            failing_code=code,
            first=[step.metrics for step in journal.steps(0, FIRST_STEPS)],
            longest_seconds=None if facts.silent is None else longest_seconds(journal),
        )
    )


def longest_seconds(journal: Journal) -> float | None:
    """The longest duration of the newest finished training episodes; None before the first."""
    page = journal.find_episodes(EpisodeQuery(limit=COMPARED, status="finished", mode="train"))
    return max((one.ended - one.begun for one in page.episodes if one.ended is not None), default=None)


# ---- the groups of the present batch ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FillingGroup:
    """A group of the present batch with its members, and the silence and lease of the live ones by episode."""

    group: Group
    size: int
    members: Sequence[EpisodeRecord]
    silences: dict[str, Silence]


def waiting_of(queries: Queries, text: str, *, has_leases: bool) -> Callable[[Journal], WaitingView]:
    """Collects the groups that fill the present batch, at most `MAX_GROUPS`, from memory.

    The returned function makes the view. Lost episodes, which only the journal has, fill places that are free again.
    """
    view = WaitingView(
        text=text,
        needed=queries.settings.job.batch_size,
        places=queries.store.num_places,
        num_groups=len(queries.groups),
        groups=[],
    )
    found = []
    for group in queries.groups[:MAX_GROUPS]:
        members = queries.members(group)
        live = [one for one in members if one.status == "live"] if has_leases else []
        silences = {one.id: queries.silence(one) for one in live}
        found.append(FillingGroup(group, queries.group_rules.size(group), members, silences))
    num_lost = queries.num_lost

    def of_journal(journal: Journal) -> WaitingView:
        failed: dict[int | None, list[EpisodeRecord]] = {}
        if num_lost and any(len(one.members) < one.size for one in found):
            for episode in newest_lost(journal, min(num_lost, MAX_LOST)):
                failed.setdefault(episode.group_id, []).append(episode)
        return view.model_copy(update={"groups": [_group_view(one, failed.get(one.group.id, [])) for one in found]})

    return of_journal


def newest_lost(journal: Journal, limit: int) -> list[EpisodeRecord]:
    """Returns up to `limit` newest training episodes that were aborted or expired, although they were needed."""
    if not limit:
        return []
    wanted = [EpisodeQuery(limit=limit, status=status, mode="train") for status in LOST]
    found = [one for query in wanted for one in journal.find_episodes(query).episodes]
    return sorted(found, key=lambda episode: episode.seq, reverse=True)[:limit]


def usual_reason(lost: Iterable[EpisodeRecord]) -> tuple[str, str, str]:
    """The most frequent reason of these episodes, or '', and the client and code version if all with it have one.

    Reasons that differ in numbers, such as durations and ids, count as one; the most frequent of these is returned.
    """
    alike: dict[str, list[EpisodeRecord]] = {}
    for episode in lost:
        if episode.reason:
            alike.setdefault(NUMBERS.sub("#", episode.reason), []).append(episode)
    if not alike:
        return "", "", ""
    most = max(alike.values(), key=len)
    [(reason, _)] = Counter(episode.reason for episode in most).most_common(1)
    clients, codes = {episode.client_id for episode in most}, {episode.code_version for episode in most}
    return reason, clients.pop() if len(clients) == 1 else "", codes.pop() if len(codes) == 1 else ""


def _group_view(one: FillingGroup, failed: Sequence[EpisodeRecord]) -> WaitingGroupView:
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


# ---- batches without reward variance ---------------------------------------------------------------------------------


class VarianceReport:
    """The report of a served run whose newest batches had no reward variance, with a prompt and its answers.

    Facts in memory are collected in the event loop. Calls, which may have megabytes, are read in the reader's thread.
    Neither the start of a run nor its training depends on a report: one that cannot be read is logged and left out.
    """

    def __init__(
        self,
        queries: Queries,
        read: Callable[[Callable[[Journal], ZeroVariance | None]], Awaitable[ZeroVariance | None]],
    ) -> None:
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
            of = queries.store.policy_version, queries.settings.revision
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


def variance_facts(queries: Queries) -> RunFacts | None:
    """Returns the facts in memory if the newest batches had no reward variance."""
    if batches_without_variance(queries.recent_steps) < REPORTED_BATCHES:
        return None
    return RunFacts(queries.recent_steps, queries.settings.job, queries.step_versions)


def zero_variance(facts: RunFacts, journal: Journal) -> ZeroVariance | None:
    """Returns the report, with the first group of the newest batch; None if the run is solved."""
    facts = replace(facts, first=[step.metrics for step in journal.steps(0, FIRST_STEPS)])
    newest = facts.steps[-1]
    members = [journal.known_episode(member) for member in journal.first_group(facts.versions[-1] - 1)]
    if not members or is_solved(facts):
        return None
    asked = journal.first_call(members[0].id)
    prompt = () if asked is None else asked.ask.messages
    last = [(member, journal.last_call(member.id)) for member in members]
    answers = Counter(("" if call is None else _text(call.response), member.reward or 0.0) for member, call in last)
    fell = reward(facts)
    return ZeroVariance(
        batches=batches_without_variance(facts.steps),
        truncated=newest.get("completion/truncated", 0.0),
        limit=cutting_limit([newest], facts.job)[0],
        task_id=members[0].task_id,
        prompt=beginning(prompt[-1].content, SHOWN_CHARACTERS) if prompt else "",
        answers=[ScoredAnswer(answer=a, reward=r, count=count) for (a, r), count in answers.most_common()],
        rewards_fell=fell is not None and fell.level == "bad",
    )


def _text(response: Message) -> str:
    calls = [f"{call.name}({call.arguments})" for call in response.tool_calls]
    return beginning(" ".join([response.content, *calls]).strip(), SHOWN_CHARACTERS)
