"""`Gateway`: a run of a server without HTTP. `routes` adds the routes, `Runs` has the runs of a server.

It owns the swarm's state, the engine and the call path, and lives in one event loop. The swarm is synchronous and is
used in that event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from agentjet.compute import Compute
from agentjet.config import ServeConfig, parse_config
from agentjet.errors import ConfigError, Conflict, Later, RecipeError, Unavailable, Unprocessable
from agentjet.front.calls import Calls
from agentjet.front.concurrency import Gate, GroupCommit, offload
from agentjet.front.prompts import Demonstration, answer_all, num_characters
from agentjet.front.tracing import Tracing, present_run
from agentjet.protocol import (
    AbortRequest,
    BeginRequest,
    CloseGroupsRequest,
    Event,
    FinishRequest,
    JobBody,
    LoopView,
    SftRequest,
    SftResponse,
    StatusResponse,
)
from agentjet.recipes import hooks
from agentjet.server.checkpoints import CheckpointStore
from agentjet.server.fronts import FrontedCalls, FrontGate, Fronts, prune_file
from agentjet.server.health import ServerFacts
from agentjet.server.monitoring import (
    Activity,
    LoopLag,
    MetricsFile,
    StepTimer,
    Telemetry,
    divergence,
    log_event,
)
from agentjet.server.read import RunReader, VarianceReport, job_of, status_of
from agentjet.server.run_policies import EnginePhase, PolicyVersions, RunPolicies, check_source
from agentjet.server.ticks import EventPages, SharedAnswers, Ticks
from agentjet.server.training import Engine, TrainingLoop
from agentjet.swarm import EpisodeRecord, Journal, SwarmState
from agentjet.swarm.batches import check_rewards
from agentjet.swarm.groups import AnsweredRollout, RolloutNeeded
from agentjet.swarm.journal_file import create_segment, segments_of
from agentjet.swarm.state import Host
from agentjet.types import DEFAULT_RUN, JOURNAL

log = logging.getLogger(__name__)

LEASE_CHECK_SECONDS = 0.5
DISK_RETRY_SECONDS = 2.0
"""Seconds between two attempts to write to a disk that refused."""
ENDS_A_ROUND = 50
"""Episodes that end in one round of the event loop because their client is gone: about 10 ms."""
EVENTS_PAGE = 1000
TOO_MANY_EPISODES = "too_many_episodes"
WAITING_FOR = {
    "offline": "a start of the engine",
    "loading": "the worker, which loads the model",
    "draining": "the stop of the engine",
    "failed": "another start of the engine",
}
NOT_SERVING = ("offline", "draining", "failed")
"""States of the engine that refuse new episodes."""


class AdmissionWaiters:
    """Clients that wait for a place in the batch, by key.

    Each wake costs an admission check per waiter, so only the waiters that may be admitted are woken.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, set[asyncio.Future[None]]] = {}

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def wait(self, key: Hashable, timeout: float) -> None:
        """Returns after the next `wake` of this key or of all keys, or after `timeout` seconds."""
        woken = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(key, set())
        waiting.add(woken)
        try:
            await asyncio.wait([woken], timeout=timeout)
        finally:
            waiting.discard(woken)
            if not waiting:
                self._waiting.pop(key, None)

    def wake(self, *keys: Hashable) -> None:
        """Wakes the waiters of these keys, or all waiters if `keys` is empty."""
        for key in keys or list(self._waiting):
            for woken in self._waiting.get(key, ()):
                if not woken.done():
                    woken.set_result(None)


class Gateway:
    """Serves and trains the policies of one run. `await start()` first, `await close()` at the end."""

    def __init__(
        self,
        config: ServeConfig,
        compute: Compute,
        *,
        run: str = DEFAULT_RUN,
        clock: Callable[[], float] = time.time,
        stopwatch: Callable[[], float] = time.monotonic,
        tracing: Tracing | None = None,
        lag: LoopLag | None = None,
        fronts: Fronts | None = None,
    ) -> None:
        """Opens the folder of the run and creates it if it is missing. `stopwatch` detects a blocked event loop, whose
        lag `lag` measures. `fronts` answer the calls of the run; None if the gateway does.

        Raises `ConfigError` if the folder is in use or has other policies, or if its journal is incomplete.
        """
        self.config = config
        self.run = run
        self.folder = config.server.data_dir / "runs" / run
        try:
            for folder in reversed((self.folder, *self.folder.parents[:2])):
                folder.mkdir(0o700, parents=True, exist_ok=True)  # They will hold the conversations of agents.
        except OSError as error:
            raise ConfigError(
                f"the folder {str(self.folder)!r} of server.data_dir cannot be created: {error.strerror}"
            ) from None
        self._clock = clock
        self.hosted = RunPolicies(
            run, config, compute, self.folder, hooks.PlugInThreads(config.server.hook_timeout, run=run)
        )
        self.store = CheckpointStore(self.folder)
        metrics = MetricsFile(self.folder / "metrics.jsonl", clock=clock)
        self._journal = self._open_journal(0 if fronts is None else len(fronts))
        try:
            metrics.check_journal(self._journal.read_state().policy_version)
            self.swarm = SwarmState(
                self._journal,
                config.job,
                policies=self.hosted.names,
                clock=clock,
                stopwatch=stopwatch,
                policy_version=self.store.newest(),  # Episodes may begin before the worker has loaded it.
                host=Host(
                    self._on_event,
                    lambda episode_id: self.calls.undelivered(episode_id),
                    defers_hooks=True,
                    transcript_bytes=config.server.keep_transcripts * 1_000_000,
                ),
            )
            self.commits = GroupCommit(self.swarm)
        except BaseException:
            self._journal.close()
            raise
        self.queries = self.swarm.queries
        self.reader = RunReader(self._journal.reading, self.folder, live=self, threads=self.hosted.threads)
        self._variance = VarianceReport(self.queries, self.reader.read)
        self.last_event = self._journal.last_event()
        """Sequence number of the newest event on disk."""
        self.ticks = Ticks(lambda: self.last_event, self.queries.journal.event_kinds)
        self._pages = EventPages(lambda: self.last_event, self.queries.journal.events)
        self.shared = SharedAnswers[Any](lambda: self.last_event)
        """Answers to the reads of viewers."""
        self.phase = EnginePhase(self.swarm, Gate() if fronts is None else FrontGate(fronts, run))
        self.changed = self.phase.changed
        self.telemetry = Telemetry(
            tracing or Tracing(),
            lag or LoopLag(),
            Activity(self.folder / "durations.json", monotonic=stopwatch),
            metrics,
            StepTimer(self.phase.gate.busy_seconds),
        )
        self.versions = PolicyVersions(self.store, self.hosted, self.commits, self.phase, self.telemetry.activity)
        self.fronted = None if fronts is None else FrontedCalls(fronts, self.hosted, self.swarm, self.phase.gate, clock)
        """The calls of the run if fronts answer them."""
        self.calls = self.fronted or Calls(self.hosted, self.commits, self.phase.gate, self.telemetry.tracing, clock)
        forests = None if self.fronted is None else self.fronted.training_batches
        self.engine = Engine(TrainingLoop(self.versions, self.telemetry, forests), self.versions)
        self._turn = asyncio.Lock()
        """Held around `rollout` and `accept`, so that a recipe gets one call at a time, about the present state."""
        self.waiters = AdmissionWaiters()
        self._admits = self._admission()
        self._tasks: list[asyncio.Task[None]] = []
        """Those of a started run."""
        self.closing = False

    def _open_journal(self, fronts: int) -> Journal:
        models = {policy: self.config.model_of(policy) for policy in self.config.policy_names}
        for model in models.values():
            check_source(self.folder, model)
        journal = Journal.open(self.folder / JOURNAL, models=models)
        try:
            for front in range(fronts):
                create_segment(journal.path, front)
            journal.file.attach(segments_of(journal.path), live=True)
            if fronts:
                journal.file.read_calls_apart()
        except BaseException:
            journal.close()
            raise
        return journal

    # ---- start and stop ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Brings the policies up in the background. Calls are held until then."""
        if self.swarm.job_notice:
            log.warning("run %s: %s", self.run, self.swarm.job_notice)
        await self._variance.start()
        if self.fronted is not None:
            self.fronted.open()
        self.engine.start()
        works = (self._check_leases(), self._decide_groups(), self._prune_journal())
        self._tasks = [asyncio.create_task(work) for work in works]

    async def drain(self) -> None:
        """Stops the engine and ends event streams. Episodes can still finish or abort."""
        self.closing = True
        self.changed.notify()
        self.ticks.close()
        self.waiters.wake()
        await self.engine.stop()

    async def close(self) -> None:
        """Drains, ends unfinished answers and closes the journal. The backend stays open. Idempotent."""
        try:
            await self.drain()
            await self.versions.close()
        finally:  # The journal is released even if the worker fails to end.
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tasks = []
            await self._variance.close()
            await self.calls.close()
            await self.commits.close()
            await self.reader.close()
            self._journal.close()

    # ---- episodes ---------------------------------------------------------------------------------------------------

    async def begin(self, request: BeginRequest, *, idempotency_key: str | None = None) -> EpisodeRecord:
        """Starts an episode. Waits up to `request.wait` seconds for a place in the batch. Raises `Later`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.wait
        while True:
            self.swarm.leases.client_seen(request.client_id, request.ends_at_version)  # A refused client is alive, too.
            try:
                while self.swarm.begun(request, idempotency_key) is None and self.swarm.take_over(
                    request, ENDS_A_ROUND
                ):
                    await asyncio.sleep(0)
                return await self._durably(await self._begin(request, idempotency_key))
            except Later as later:
                left = deadline - loop.time()
                if isinstance(later, Unavailable) or left <= 0:
                    raise
                refusal = later
            group = (request.client_id, request.group_name, request.task_set)
            pause = min(left, self.swarm.job.lease_seconds / 2)  # A waiting client is alive: see above.
            with self.swarm.places.held(request, refusal):
                await self.waiters.wait(request.client_id if refusal.code == TOO_MANY_EPISODES else group, pause)

    async def _begin(self, request: BeginRequest, idempotency_key: str | None) -> EpisodeRecord:
        """Starts an episode now. The hook `rollout` of a plug-in is called for a new group. Raises `Later`."""
        with suppress(RolloutNeeded):
            return self._begin_now(request, idempotency_key)
        async with self._turn_of_recipe():
            answer = None
            while True:
                try:  # Another request may have opened the group, or changed the question.
                    return self._begin_now(request, idempotency_key, answer)
                except RolloutNeeded as needed:
                    question = needed.question
                with self.telemetry.activity.work("rollout", "calling `rollout` of the recipe"):
                    answer = AnsweredRollout(question, await self.hosted.threads.wait_for("hook", question.answer))

    def _begin_now(
        self, request: BeginRequest, idempotency_key: str | None, rollout: AnsweredRollout | None = None
    ) -> EpisodeRecord:
        if self.phase.state in NOT_SERVING:
            raise self.phase.refusal()
        self._check_limit(request, idempotency_key)
        return self.swarm.begin(request, idempotency_key=idempotency_key, rollout=rollout)

    @asynccontextmanager
    async def _turn_of_recipe(self) -> AsyncIterator[None]:
        """Context of calls of `rollout` or `accept`. Raises `Later` if the recipe fails or has failed, which stops
        training.
        """
        async with self._turn:
            if (failure := self.engine.training.error) is not None:
                raise self.engine.recipe_failed(failure)
            try:
                yield
            except RecipeError as error:
                raise self.engine.recipe_failed(error) from error

    def _check_limit(self, request: BeginRequest, idempotency_key: str | None) -> None:
        """Raises `Later` if the client has the maximum of live episodes. A repeated begin passes."""
        most = self.config.server.max_episodes_per_client
        if self.queries.journal.outcomes()["live"] < most:  # The usual case, and cheap.
            return
        if self.swarm.begun(request, idempotency_key) is not None:
            return
        self.swarm.take_over(request)
        if self.queries.holding().get(request.client_id, 0) >= most:
            raise Later(
                f"Client {request.client_id!r} has {most} live episodes, the maximum of "
                "server.max_episodes_per_client: finish or abort one.",
                retry_after=5.0,
                code=TOO_MANY_EPISODES,
            )

    async def demonstrate(
        self, request: SftRequest, given: Sequence[Demonstration], *, idempotency_key: str | None = None
    ) -> SftResponse:
        """Commits demonstrations as the next batch. Raises `InvalidRequest` for the first wrong one, and `Later`."""
        policy = self.hosted.chosen(request.policy)
        role = policy if self.hosted.names else ""
        if self.phase.state in NOT_SERVING:
            raise self.phase.refusal()
        recipe = self.swarm.job_of(request, policy).recipe
        await self.engine.wait_until_up()
        renderer = self.hosted.renderers[policy]
        size = sum(num_characters(one.conversation) for one in given)
        await offload(size, request.digest)
        answered = await offload(size, answer_all, renderer, given, role, self.swarm.job.history, self._clock())
        check_rewards(recipe, answered)
        trained = [call for one in answered for call, *_ in one.calls if not call.untrained]
        committed = self.swarm.demonstrated(request, idempotency_key)
        if committed is None and not request.check_only:
            slices = self.swarm.demonstrate(request, answered, policy, idempotency_key=idempotency_key)
            committed = await self.commits.in_slices(slices)
            self.changed.notify()
            await self.commits.durable()
        return SftResponse(
            batch=None if committed is None else committed.batch,
            last_event=None if committed is None else committed.last_event,
            num_answers=len(trained),
            num_tokens=sum(len(call.completion) for call in trained),
        )

    def leases(self) -> dict[str, float]:
        """Returns the time at which each live episode expires without activity."""
        return {episode.id: self.swarm.expires_at(episode) for episode in self.queries.store.live()}

    async def heartbeat(self, episode_id: str) -> EpisodeRecord:
        return await self._durably(self.swarm.heartbeat(episode_id))

    async def finish(
        self, episode_id: str, request: FinishRequest, *, idempotency_key: str | None = None
    ) -> EpisodeRecord:
        if self.fronted is not None and self.swarm.episode(episode_id).status == "live":
            self.swarm.check_finish(episode_id, request)
        async with self._ending(episode_id):
            return await self._durably(self.swarm.finish(episode_id, request, idempotency_key=idempotency_key))

    async def abort(
        self, episode_id: str, request: AbortRequest, *, idempotency_key: str | None = None
    ) -> EpisodeRecord:
        async with self._ending(episode_id):
            return await self._durably(self.swarm.abort(episode_id, request, idempotency_key=idempotency_key))

    def _ending(self, episode_id: str) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self.fronted is None else self.fronted.ending(episode_id)

    async def close_groups(self, request: CloseGroupsRequest, *, idempotency_key: str | None = None) -> int:
        num_waiting = await self.commits.in_slices(self.swarm.close_groups(request, idempotency_key=idempotency_key))
        await self.commits.durable()
        self.changed.notify()  # A group may be closing, without an event.
        return num_waiting

    async def _durably(self, episode: EpisodeRecord) -> EpisodeRecord:
        await self.commits.durable()
        return episode

    # ---- the job ----------------------------------------------------------------------------------------------------

    async def replace_job(self, body: JobBody) -> JobBody:
        """Replaces the job settings from now on. A restart with unchanged command-line settings keeps them.

        Raises `Conflict` if the job was replaced since `body.revision`, `InvalidRequest` for invalid settings.
        """
        self._check_revision(body.revision)
        try:
            settings = {**self.config.model_dump(exclude={"job"}), "job": body.job}
            job = (await asyncio.to_thread(parse_config, settings, "request")).job  # It may import a plug-in.
            await self.hosted.check_job(job)
            await self.engine.training.teachers.check(job, waits=False)
        except (ConfigError, ValueError) as error:
            raise Unprocessable(str(error), code="invalid_setting", param="job") from None
        self._check_revision(body.revision)  # Another request may have replaced it in the meantime.
        self.swarm.replace_job(job)
        self.changed.notify()
        self.waiters.wake()
        answer = job_of(self.queries)
        await self.commits.durable()
        if self.fronted is not None:
            self.fronted.push()
        return answer

    def _check_revision(self, revision: int) -> None:
        if revision != (present := self.swarm.job_revision):
            raise Conflict(
                f"The job settings are at revision {present}, the request has {revision}: read them again.",
                code="job_revision_changed",
            )

    # ---- status and events -------------------------------------------------------------------------------------------

    def waiting_for(self, *, names_silent: bool = True) -> str:
        """Returns a phrase for the thing that training waits for. It names the episode that is silent for long."""
        process = self.hosted.waiting_for()
        state, reason, doing = self.phase.state, self.phase.reason, self.doing()
        if self.swarm.file.refusal:
            return f"the disk. {self.swarm.file.refusal}"
        if state == "loading":
            return "; ".join(filter(None, [reason, process, doing])) or WAITING_FOR[state]
        if doing and state in ("sampling", "learning", "draining"):
            return f"the engine, {doing}"
        if state not in ("sampling", "learning"):
            return reason or WAITING_FOR[state]
        return process or divergence(self.swarm.last_step) or self.queries.waiting_for(names_silent=names_silent)

    def doing(self) -> str:
        """Returns a phrase about slow work of the run, with its progress, or ''."""
        return self.hosted.doing() or self.telemetry.activity.text

    async def current_status(self) -> StatusResponse:
        """Returns the status with the report about the newest batch, which `status` may lack for a moment."""
        await self._variance.refresh()
        return self.status()

    def status(self) -> StatusResponse:
        now, gap = self._clock(), self.telemetry.lag.recent()
        return StatusResponse(
            **status_of(self.queries),
            zero_variance=self._variance.found,
            state=self.phase.state,
            waiting_for=self.waiting_for(),
            run=self.run,
            policies=self.hosted.names,
            model=self.hosted.model_name,
            model_weights=self.hosted.common("weights"),
            machine=self.hosted.common("machine"),
            calls_active=self.calls.num_active,
            fronts=[] if self.fronted is None else self.fronted.fronts.views(),
            clients={client: max(0.0, now - seen) for client, seen in self.queries.leases.clients.items()},
            workers_started=self.hosted.num_starts,
            workers_hung=self.engine.num_hung,
            replay_difference=self.engine.training.replay_difference,
            abandoned_hooks=self._abandoned_hooks(),
            unusable_checkpoints=[str(path) for path in self.store.unusable()],
            last_event=self.last_event,
            loop=None if gap is None else LoopView(cpu=gap.cpu, wall=gap.wall, held_by=gap.held_by),
            uptime=now - self.calls.began,
        )

    def server_facts(self) -> ServerFacts:
        seen = max(self.queries.leases.clients.values(), default=None)
        return ServerFacts(
            state=self.phase.state,
            reason=self.phase.reason,
            problem=self.telemetry.activity.problem,
            refusal=self.swarm.file.refusal,
            workers_started=self.hosted.num_starts,
            workers_hung=self.engine.num_hung,
            unusable_checkpoints=len(self.store.unusable()),
            checkpoint_error=self.versions.checkpoint_error,
            client_seconds=None if seen is None else max(0.0, self._clock() - seen),
            is_over=self.queries.store.is_over,
            loop=self.telemetry.lag.recent(),
        )

    def _abandoned_hooks(self) -> list[str]:
        """Returns a sentence about each thread of a plug-in that did not end in time. Recipes are made for the whole
        server, so the default run names their threads.
        """
        others = (hooks.VALIDATORS, hooks.IMPORTS) if self.run == DEFAULT_RUN else ()
        return [sentence for threads in (self.hosted.threads, *others) for sentence in threads.abandoned()]

    async def events(self, after: int = 0) -> AsyncGenerator[Event]:
        """Yields events after number `after` until the gateway closes."""
        while not self.closing:
            page = [event for event in self.queries.journal.events(after, EVENTS_PAGE) if event.seq <= self.last_event]
            for event in page:
                after = event.seq
                yield event
            await self.changed.until(partial(self._has_events, after))

    async def event_stream(self, after: int = 0, *, keep_alive: float = 15.0) -> AsyncGenerator[bytes | None]:
        """As `events`, in encoded pages. Yields None after `keep_alive` idle seconds."""
        while not self.closing:
            await self._pages.turns.turn()
            after, page = self._pages.after(after)
            if page:
                yield page
            elif not await self.changed.until(partial(self._has_events, after), keep_alive):
                yield None

    def _has_events(self, after: int) -> bool:
        return self.closing or self.last_event > after

    def _on_event(self, event: Event) -> None:
        self.last_event = event.seq
        log_event(event)
        self.ticks.add(event)
        if event.kind == "episode" and event.body["status"] != "live":
            self.calls.episode_ended(event.body["episode_id"])
        if event.kind == "step":
            self._variance.batch_learned()
        self._wake_waiters(event)
        self.changed.notify()

    def _wake_waiters(self, event: Event) -> None:
        """Wakes the waiting begins that `event` may admit."""
        before, self._admits = self._admits, self._admission()
        if event.kind == "task_set" or before[1:] != self._admits[1:] or self._admits[0] > before[0]:
            self.waiters.wake()
        elif event.kind == "episode":
            body = event.body
            group = (body["client_id"], body["group"], body["task_set"])
            if body["status"] in ("live", "aborted", "expired"):  # Its group is open now, or has a free place.
                self.waiters.wake(group)
            if body["status"] != "live":
                self.waiters.wake(body["client_id"])

    def _admission(self) -> tuple[int, bool, int, int]:
        """Returns the facts on which the admission of every client depends."""
        swarm = self.swarm
        return self.queries.places_left, self.phase.state in NOT_SERVING, swarm.policy_version, swarm.job_revision

    async def _check_leases(self) -> None:
        """Expires leases soon after they end. Retries the disk while it refuses writes."""
        present_run.set(self.run)
        now = asyncio.get_running_loop().time
        next_try, logged = 0.0, ""
        while True:
            try:
                await asyncio.sleep(LEASE_CHECK_SECONDS)
                if self.swarm.file.refusal and now() >= next_try:
                    next_try = now() + DISK_RETRY_SECONDS
                    self.swarm.probe_disk()
                while len(self.swarm.reap(ENDS_A_ROUND)) == ENDS_A_ROUND:
                    await asyncio.sleep(0)
                if self._can_decide():  # A group may be closing without an event.
                    self.changed.notify()
                if self.swarm.places.refresh() or self.swarm.is_undone:
                    self.waiters.wake()
                if self.swarm.is_undone:
                    self.swarm.is_undone = False
                    self.changed.notify()
            except Later:  # The journal has logged it.
                pass
            except Exception as error:  # The boundary: leases must keep expiring. A repeated failure is logged once.
                if repr(error) != logged:
                    log.exception("leases could not be checked; retrying every %g s", LEASE_CHECK_SECONDS)
                logged = repr(error)

    async def _decide_groups(self) -> None:
        """Calls the hook `accept` of a plug-in for closing groups, which completes or drops them.

        After a failure of the recipe they wait until the engine is started again.
        """
        present_run.set(self.run)
        while True:
            await self.changed.until(self._can_decide)
            try:
                async with self._turn_of_recipe():
                    if (question := self.swarm.undecided()) is not None:
                        with self.telemetry.activity.work("accept", "calling `accept` of the recipe"):
                            reason = await self.hosted.threads.wait_for("hook", question.answer)
                        self.swarm.decide(question, reason)
            except Later as later:  # The journal or the engine has logged it.
                if self.engine.training.error is None:
                    await asyncio.sleep(later.retry_after)
            except Exception:  # The boundary: later groups must be decided, too.
                log.exception("a group could not be decided; retrying every %g s", DISK_RETRY_SECONDS)
                await asyncio.sleep(DISK_RETRY_SECONDS)

    def _can_decide(self) -> bool:
        return self.engine.training.error is None and self.queries.num_groups("closing") > 0

    async def _prune_journal(self) -> None:
        """Deletes what the journal need not keep, in slices. Other requests go on between them. The next time deletes
        the rows that a stop or a full disk leaves.
        """
        present_run.set(self.run)
        swarm = self.swarm
        swarm.is_prune_due = True  # An earlier server may have been stopped between two slices.
        while True:
            await self.changed.until(lambda: swarm.is_prune_due)
            swarm.is_prune_due = False
            try:
                for rows in await asyncio.to_thread(swarm.unneeded):
                    if not rows.schema:
                        swarm.prune(rows)
                        await self.commits.durable()
                    elif self.fronted is None or not await self.fronted.prune(rows):  # Its front may be gone.
                        await asyncio.to_thread(prune_file, swarm.file.segments[rows.schema], rows)
            except Later as later:  # The journal has logged it.
                swarm.is_prune_due = True
                await asyncio.sleep(later.retry_after)
            except Exception:  # The boundary: the journal must not grow without end.
                log.exception("the journal could not be pruned; the next checkpoint tries again")
