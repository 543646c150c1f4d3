"""`Gateway`: a run of a server without HTTP. `server/` adds the routes, `Runs` has the runs of a server.

It owns the swarm's state, the engine and the call path, and lives in one event loop. The swarm is synchronous and is
used in that event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from agentjet.compute import Compute
from agentjet.config import ServeConfig, parse_config
from agentjet.errors import (
    ConfigError,
    Conflict,
    Later,
    NotFound,
    RecipeError,
    RequestError,
    Unavailable,
    Unprocessable,
)
from agentjet.gateway import first_weights, observability
from agentjet.gateway.call_path import CallPath
from agentjet.gateway.checkpoints import CheckpointStore, PolicyVersions, chosen_policy
from agentjet.gateway.concurrency import AdmissionWaiters, Broadcast, Gate, GroupCommit, offload
from agentjet.gateway.engine import Engine
from agentjet.gateway.health import ServerFacts
from agentjet.gateway.observability import Activity, LoopLag, MetricsFile, Tracing, divergence, work_text
from agentjet.gateway.prompts import Demonstration, answer_all, num_characters
from agentjet.gateway.read import RunReader, VarianceReport, job_of, status_of
from agentjet.gateway.requests import CallChunk, CallRequest, apply_side_call_rules, with_rule
from agentjet.gateway.ticks import EventPages, SharedAnswers, Ticks
from agentjet.gateway.training_loop import OpenRun
from agentjet.protocol import (
    AbortRequest,
    BeginRequest,
    CloseGroupsRequest,
    ClusterView,
    Event,
    FinishRequest,
    JobBody,
    LoopView,
    ProcessView,
    ScaleRequest,
    SftRequest,
    SftResponse,
    StatusResponse,
)
from agentjet.recipes import hooks
from agentjet.swarm import EpisodeRecord, Journal, SwarmState
from agentjet.swarm.groups import AnsweredRollout, RolloutNeeded
from agentjet.types import (
    DEFAULT_RUN,
    JOURNAL,
    Conversation,
    Message,
    PolicyId,
    ProcessStatus,
    SamplerBounds,
    SamplersStatus,
)

log = logging.getLogger(__name__)

LEASE_CHECK_SECONDS = 0.5
"""Seconds between two checks of the leases."""
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
    ) -> None:
        """Opens the folder of the run and creates it if it is missing. `stopwatch` detects a blocked event loop, whose
        lag `lag` measures.

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
        self.policies = tuple(config.policies)
        """The policies that the settings name. Empty for a run with one policy without a name."""
        name = "" if self.policies else config.model.name
        self.model_name = Path(name).name if name and Path(name).is_dir() else name
        """The model name for requests. For a local model, the name of its folder. Empty with named policies."""
        self._clock = clock
        self._compute = compute
        self.began = clock()
        models = {policy: config.model_of(policy) for policy in config.policy_names}
        for model in models.values():
            first_weights.check(self.folder, model)
        self._journal = Journal.open(self.folder / JOURNAL, models=models)
        metrics = MetricsFile(self.folder / "metrics.jsonl", clock=clock)
        self.store = CheckpointStore(self.folder)
        try:
            metrics.check_journal(self._journal.read_state().policy_version)
            self.swarm = SwarmState(
                self._journal,
                config.job,
                policies=self.policies,
                clock=clock,
                stopwatch=stopwatch,
                policy_version=self.store.newest(),  # Episodes may begin before the worker has loaded it.
            )
            self.queries = self.swarm.queries
            self._commits = GroupCommit(self.swarm)
        except BaseException:
            self._journal.close()
            raise
        self._hooks = hooks.PlugInThreads(config.server.hook_timeout, run=run)
        self._turn = asyncio.Lock()
        """Held around `rollout` and `accept`, so that a recipe gets one call at a time, about the present state."""
        self.reader = RunReader(self._journal.reading, self.folder, live=self, threads=self._hooks)
        self._variance = VarianceReport(self.queries, self.reader.read)
        self.changed = Broadcast()
        self._waiters = AdmissionWaiters()
        self.swarm.store.on_event = self._on_event
        self.swarm.store.defers_hooks = True
        self.swarm.store.transcript_bytes = config.server.keep_transcripts * 1_000_000
        self.last_event = self._journal.last_event()
        """Sequence number of the newest event on disk."""
        self.ticks = Ticks(lambda: self.last_event, self.queries.event_kinds)
        self._pages = EventPages(lambda: self.last_event, self.queries.events)
        self.shared = SharedAnswers[Any](lambda: self.last_event)
        """Answers to the reads of viewers."""
        self.tracing = tracing or Tracing()
        """Makes no spans until its `tracer` is set."""
        self.lag = lag or LoopLag()
        self.activity = Activity(self.folder / "durations.json", monotonic=stopwatch)
        parts = OpenRun(
            run,
            config,
            self.swarm,
            self._commits,
            compute,
            Gate(),
            self.store,
            metrics,
            self.changed,
            self.tracing,
            self.activity,
            self.lag,
            self._hooks,
            self._variance,
        )
        self.engine = Engine(parts)
        self._admits = self._admission()
        self.versions = PolicyVersions(parts, self.engine)
        self._calls = CallPath(parts, self.engine, clock=clock)
        self._tasks: list[asyncio.Task[None]] = []
        """Those of a started run."""
        self.closing = False

    # ---- start and stop ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Brings the policies up in the background. Calls are held until then."""
        if self.swarm.job_notice:
            log.warning("run %s: %s", self.run, self.swarm.job_notice)
        await self._variance.start()
        self.engine.start()
        works = (self._check_leases(), self._decide_groups(), self._prune_journal())
        self._tasks = [asyncio.create_task(work) for work in works]

    async def ready(self) -> None:
        """Waits until the policies are up. Raises the error of a failed start: `ConfigError` for an unusable model."""
        await self.engine.wait_until_up()

    async def drain(self) -> None:
        """Stops the engine and ends event streams. Episodes can still finish or abort."""
        self.closing = True
        self.changed.notify()
        self.ticks.close()
        self._waiters.wake()
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
            self._calls.close()
            await self._calls.grammars.close()
            await self._commits.close()
            await self.reader.close()
            self._journal.close()

    async def stop_engine(self) -> None:
        """Saves a checkpoint and removes the policies. Calls and begins are refused until `start_engine`."""
        await self.engine.stop()

    async def start_engine(self) -> None:
        self.engine.start()

    # ---- episodes ---------------------------------------------------------------------------------------------------

    async def begin(self, request: BeginRequest, *, idempotency_key: str | None = None) -> EpisodeRecord:
        """Starts an episode. Waits up to `request.wait` seconds for a place in the batch. Raises `Later`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.wait
        while True:
            self.swarm.client_seen(request.client_id, request.ends_at_version)  # A refused client is alive, too.
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
                await self._waiters.wait(request.client_id if refusal.code == TOO_MANY_EPISODES else group, pause)

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
                with self.activity.work("rollout", "calling `rollout` of the recipe"):
                    answer = AnsweredRollout(question, await self._hooks.wait_for("hook", question.answer))

    def _begin_now(
        self, request: BeginRequest, idempotency_key: str | None, rollout: AnsweredRollout | None = None
    ) -> EpisodeRecord:
        if self.engine.state in NOT_SERVING:
            raise self.engine.refusal()
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
        if self.queries.status_counts()["live"] < most:  # The usual case, and cheap.
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
        policy = chosen_policy(self.config, request.policy)
        role = policy if self.policies else ""
        if self.engine.state in NOT_SERVING:
            raise self.engine.refusal()
        await self.ready()
        renderer = self.engine.renderers[policy]
        size = sum(num_characters(one.conversation) for one in given)
        await offload(size, request.digest)
        answered = await offload(size, answer_all, renderer, given, role, self.swarm.job.history, self._clock())
        trained = [call for one in answered for call, *_ in one.calls if not call.untrained]
        committed = self.swarm.demonstrated(request, idempotency_key)
        if committed is None and not request.check_only:
            slices = self.swarm.demonstrate(request, answered, policy, idempotency_key=idempotency_key)
            committed = await self._commits.in_slices(slices)
            self.changed.notify()
            await self.durable()
        return SftResponse(
            batch=None if committed is None else committed.batch,
            last_event=None if committed is None else committed.last_event,
            num_answers=len(trained),
            num_tokens=sum(len(call.completion) for call in trained),
        )

    def leases(self) -> dict[str, float]:
        """Returns the time at which each live episode expires without activity."""
        return {episode.id: self.swarm.expires_at(episode) for episode in self.queries.live()}

    async def heartbeat(self, episode_id: str) -> EpisodeRecord:
        return await self._durably(self.swarm.heartbeat(episode_id))

    async def finish(
        self, episode_id: str, request: FinishRequest, *, idempotency_key: str | None = None
    ) -> EpisodeRecord:
        return await self._durably(self.swarm.finish(episode_id, request, idempotency_key=idempotency_key))

    async def abort(
        self, episode_id: str, request: AbortRequest, *, idempotency_key: str | None = None
    ) -> EpisodeRecord:
        return await self._durably(self.swarm.abort(episode_id, request, idempotency_key=idempotency_key))

    async def close_groups(self, request: CloseGroupsRequest, *, idempotency_key: str | None = None) -> int:
        num_waiting = await self._commits.in_slices(self.swarm.close_groups(request, idempotency_key=idempotency_key))
        await self.durable()
        self.changed.notify()  # A group may be closing, without an event.
        return num_waiting

    async def _durably(self, episode: EpisodeRecord) -> EpisodeRecord:
        await self.durable()
        return episode

    def call(self, episode_id: str, role: str, request: CallRequest) -> AsyncGenerator[CallChunk]:
        """Yields the chunks of an answer. Asking for one more chunk after the last marks it as delivered.

        Closing the iterator earlier stops sampling, and recorded calls of the answer are not trained. Errors of the
        request are raised before the first chunk. Later errors are `Later`, or `Conflict` if the episode ended.
        """
        role, request = apply_side_call_rules(self.swarm.job.side_calls, role, request, self.policies)
        return self._calls.run(episode_id, role, request)

    async def count_tokens(self, episode_id: str, role: str, request: CallRequest) -> int:
        """Returns the prompt length of `request` in tokens. Nothing is recorded. Raises like `call`."""
        role, request = apply_side_call_rules(self.swarm.job.side_calls, role, request, self.policies)
        return await self._calls.count_tokens(episode_id, role, request)

    async def refused(self, episode_id: str, error: RequestError) -> None:
        """Counts a refused request on its episode. Does nothing if the journal refuses writes."""
        param = re.sub(r"\.\d+", "[]", error.param or "")
        with suppress(Later, NotFound):
            self.swarm.note(episode_id, refused=[f"{error.code}: {param}" if param else error.code])
            await self.durable()

    async def read_calls(self, episode_id: str) -> None:
        """Reads the earlier calls of a live episode after a restart. Await it before `call` and `lookup_call`."""
        await self._calls.read(episode_id)

    def lookup_call(self, episode_id: str, role: str, call_id: str) -> tuple[Conversation, Message] | None:
        """Returns conversation and answer of a call of a live episode. None if there is none, or of a raw prompt."""
        roles = dict.fromkeys([role, *(with_rule(role, rule, self.policies) for rule in self.swarm.job.side_calls)])
        trees = (self.swarm.tree(episode_id, name) for name in roles)
        exchange = next((tree.exchange(call_id) for tree in trees if tree.knows(call_id)), None)
        return None if exchange is None or exchange[0].messages[0].role == "prompt" else exchange

    # ---- the job ----------------------------------------------------------------------------------------------------

    async def replace_job(self, body: JobBody) -> JobBody:
        """Replaces the job settings from now on. A restart with unchanged command-line settings keeps them.

        Raises `Conflict` if the job was replaced since `body.revision`, `InvalidRequest` for invalid settings.
        """
        if body.revision != self.swarm.job_revision:
            raise self._revision_changed(body.revision)
        try:
            settings = {**self.config.model_dump(exclude={"job"}), "job": body.job}
            job = (await asyncio.to_thread(parse_config, settings, "request")).job  # It may import a plug-in.
            await self.engine.check_job(job)
            if body.revision != self.swarm.job_revision:
                raise self._revision_changed(body.revision)
        except (ConfigError, ValueError) as error:
            raise Unprocessable(str(error), code="invalid_setting", param="job") from None
        self.swarm.replace_job(job)
        self.changed.notify()
        self._waiters.wake()
        answer = job_of(self.queries)
        await self.durable()
        return answer

    def _revision_changed(self, revision: int) -> Conflict:
        return Conflict(
            f"The job settings are at revision {self.swarm.job_revision}, the request has {revision}: read them again.",
            code="job_revision_changed",
        )

    # ---- the cluster ------------------------------------------------------------------------------------------------

    def cluster(self) -> ClusterView:
        """Returns the processes that host the weights of the run's policies."""
        processes: list[ProcessView] = []
        samplers: dict[str, SamplersStatus] = {}
        for policy in self.config.policy_names:
            of = PolicyId(self.run, policy)
            processes += [ProcessView(policy=policy, **asdict(one)) for one in self._compute.processes(of)]
            if (found := self._compute.samplers(of)) is not None:
                samplers[policy] = found
        return ClusterView(processes=processes, samplers=samplers)

    async def scale(self, request: ScaleRequest) -> ClusterView:
        """Changes the number of replicas of a policy, or its bounds. Raises `InvalidRequest`."""
        policy = chosen_policy(self.config, request.policy)
        try:
            await self._compute.scale(PolicyId(self.run, policy), SamplerBounds.parse(request.samplers))
        except (ConfigError, ValueError) as error:
            raise Unprocessable(str(error), code="invalid_setting", param="samplers") from None
        return self.cluster()

    # ---- status and events -------------------------------------------------------------------------------------------

    async def durable(self) -> None:
        """Waits until all changes are on disk, so that no reader relies on one that is lost later. Raises `Later`."""
        await self._commits.durable()

    def waiting_for(self, *, names_silent: bool = True) -> str:
        """Returns a phrase for the thing that training waits for. It names the episode that is silent for long."""
        hosts = [self._compute.processes(PolicyId(self.run, policy)) for policy in self.config.policy_names]
        process = next(filter(None, map(waiting_for_process, hosts)), "")
        state, reason, doing = self.engine.state, self.engine.reason, self.doing()
        if self.swarm.store.file.refusal:
            return f"the disk. {self.swarm.store.file.refusal}"
        if state == "loading":
            return "; ".join(filter(None, [reason, process, doing])) or WAITING_FOR[state]
        if doing and state in ("sampling", "learning", "draining"):
            return f"the engine, {doing}"
        if state not in ("sampling", "learning"):
            return reason or WAITING_FOR[state]
        return process or divergence(self.queries.last_step) or self.queries.waiting_for(names_silent=names_silent)

    def doing(self) -> str:
        """Returns a phrase about slow work of the run, with its progress, or ''."""
        hosts = (self._compute.processes(PolicyId(self.run, policy)) for policy in self.config.policy_names)
        works = [one.work for processes in hosts for one in processes if one.work is not None]
        return work_text(works[0]) if works else self.activity.text

    async def current_status(self) -> StatusResponse:
        """Returns the status with the report about the newest batch, which `status` may lack for a moment."""
        await self._variance.refresh()
        return self.status()

    def status(self) -> StatusResponse:
        now, gap = self._clock(), self.lag.recent()
        return StatusResponse(
            **status_of(self.queries),
            zero_variance=self._variance.found,
            state=self.engine.state,
            waiting_for=self.waiting_for(),
            run=self.run,
            policies=self.policies,
            model=self.model_name,
            model_weights=self._model_weights(),
            calls_active=self._calls.num_open,
            clients={client: max(0.0, now - seen) for client, seen in self.queries.clients().items()},
            workers_started=self.engine.num_workers,
            workers_hung=self.engine.num_hung,
            replay_difference=self.engine.training.replay_difference,
            abandoned_hooks=self._abandoned_hooks(),
            unusable_checkpoints=[str(path) for path in self.store.unusable()],
            last_event=self.last_event,
            loop=None if gap is None else LoopView(cpu=gap.cpu, wall=gap.wall, held_by=gap.held_by),
            uptime=now - self.began,
        )

    def server_facts(self) -> ServerFacts:
        """Returns the facts about the server for the health rules."""
        engine = self.engine
        seen = max(self.queries.clients().values(), default=None)
        return ServerFacts(
            engine.state,
            engine.reason,
            self.swarm.store.file.refusal,
            engine.num_workers,
            engine.num_hung,
            len(self.store.unusable()),
            engine.training.checkpoint_error,
            None if seen is None else max(0.0, self._clock() - seen),
            self.queries.is_over,
            self.lag.recent(),
        )

    def _abandoned_hooks(self) -> list[str]:
        """Returns a sentence about each thread of a plug-in that did not end in time. Recipes are made for the whole
        server, so the default run names their threads.
        """
        others = (hooks.VALIDATORS, hooks.IMPORTS) if self.run == DEFAULT_RUN else ()
        return [sentence for threads in (self._hooks, *others) for sentence in threads.abandoned()]

    def _model_weights(self) -> str:
        """Returns the fingerprint of the first weights, or '' before they are loaded or if policies differ in them."""
        found = {renderer.model.weights for renderer in self.engine.renderers.values()}
        return found.pop() if len(found) == 1 else ""

    async def events(self, after: int = 0, *, keep_alive: float = 15.0) -> AsyncGenerator[Event | None]:
        """Yields events after number `after` until the gateway closes. Yields None after `keep_alive` idle seconds."""
        while not self.closing:
            page = [event for event in self.queries.events(after, EVENTS_PAGE) if event.seq <= self.last_event]
            for event in page:
                after = event.seq
                yield event
            if not page and not await self.changed.until(partial(self._has_events, after), keep_alive):
                yield None

    async def event_stream(self, after: int = 0, *, keep_alive: float = 15.0) -> AsyncGenerator[bytes | None]:
        """Yields pages of encoded events after number `after`; the rest as `events`."""
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
        observability.log_event(event)
        self.ticks.add(event)
        if event.kind == "episode" and event.body["status"] != "live":
            self._calls.episode_ended(event.body["episode_id"])
        self._wake_waiters(event)
        self.changed.notify()

    def _wake_waiters(self, event: Event) -> None:
        """Wakes the waiting begins that `event` may admit."""
        before, self._admits = self._admits, self._admission()
        if event.kind == "task_set" or before[1:] != self._admits[1:] or self._admits[0] > before[0]:
            self._waiters.wake()
        elif event.kind == "episode":
            body = event.body
            group = (body["client_id"], body["group"], body["task_set"])
            if body["status"] in ("live", "aborted", "expired"):  # Its group is open now, or has a free place.
                self._waiters.wake(group)
            if body["status"] != "live":
                self._waiters.wake(body["client_id"])

    def _admission(self) -> tuple[int, bool, int, int]:
        """Returns the facts on which the admission of every client depends."""
        swarm = self.swarm
        return self.queries.places_left, self.engine.state in NOT_SERVING, swarm.policy_version, swarm.job_revision

    async def _check_leases(self) -> None:
        """Expires leases soon after they end. Retries the disk while it refuses writes."""
        observability.run.set(self.run)
        now = asyncio.get_running_loop().time
        next_try, logged = 0.0, ""
        while True:
            try:
                await asyncio.sleep(LEASE_CHECK_SECONDS)
                if self.swarm.store.file.refusal and now() >= next_try:
                    next_try = now() + DISK_RETRY_SECONDS
                    self.swarm.store.probe_disk()
                while len(self.swarm.reap(ENDS_A_ROUND)) == ENDS_A_ROUND:
                    await asyncio.sleep(0)
                if self._can_decide():  # A group may be closing without an event.
                    self.changed.notify()
                if self.swarm.places.refresh() or self.swarm.store.is_undone:
                    self._waiters.wake()
                if self.swarm.store.is_undone:
                    self.swarm.store.is_undone = False
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
        observability.run.set(self.run)
        while True:
            await self.changed.until(self._can_decide)
            try:
                async with self._turn_of_recipe():
                    if (question := self.swarm.undecided()) is not None:
                        with self.activity.work("accept", "calling `accept` of the recipe"):
                            reason = await self._hooks.wait_for("hook", question.answer)
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
        observability.run.set(self.run)
        store = self.swarm.store
        store.is_prune_due = True  # An earlier server may have been stopped between two slices.
        while True:
            await self.changed.until(lambda: store.is_prune_due)
            store.is_prune_due = False
            try:
                for rows in await asyncio.to_thread(store.unneeded):
                    store.prune(rows)
                    await self.durable()
            except Later as later:  # The journal has logged it.
                store.is_prune_due = True
                await asyncio.sleep(later.retry_after)
            except Exception:  # The boundary: the journal must not grow without end.
                log.exception("the journal could not be pruned; the next checkpoint tries again")


def waiting_for_process(processes: Sequence[ProcessStatus]) -> str:
    """Returns the rank or replica without which a policy cannot learn or sample, or ''. `processes` are its own."""
    ranks = [one for one in processes if one.kind == "rank"]
    replicas = [one for one in processes if one.kind == "replica"]
    for process in ranks:
        if not process.is_ready:
            return f"{process.name}, which {process.state}"
    if not replicas and ranks:
        return "a sampler replica"
    if replicas and not any(one.is_ready for one in replicas):
        return f"a sampler replica: {replicas[0].name} {replicas[0].state}"
    return ""
