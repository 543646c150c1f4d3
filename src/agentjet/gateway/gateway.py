"""`Gateway`: the running server without HTTP. It owns the swarm's state, the engine and the path of a call;
`server/` puts routes on it.

Lives in one event loop; the swarm is synchronous and is only touched from there.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from agentjet import __version__
from agentjet.compute import Compute
from agentjet.config import JobConfig, ServeConfig, parse_job
from agentjet.errors import ConfigError, Conflict, InvalidRequest, Later, NotFound, RequestError
from agentjet.gateway import views
from agentjet.gateway.call_path import CallPath
from agentjet.gateway.checkpoints import CheckpointStore, remove_old_exports
from agentjet.gateway.concurrency import (
    LARGE,
    TOO_MANY_EPISODES,
    AdmissionWaiters,
    Broadcast,
    CallLimits,
    Gate,
    GroupCommit,
    offload,
    too_many_episodes,
)
from agentjet.gateway.engine import Engine
from agentjet.gateway.observability import DIVERGED, MetricsFile, Tracing, has_diverged
from agentjet.gateway.requests import CallChunk, CallRequest, apply_side_call_rules
from agentjet.gateway.versions import PolicyVersions
from agentjet.protocol import (
    AbortRequest,
    BeginRequest,
    CheckpointInfo,
    EpisodeTree,
    EpisodeView,
    Event,
    FinishRequest,
    JobBody,
    StatusResponse,
)
from agentjet.swarm import Episode, Journal, SwarmState
from agentjet.swarm.groups import group_name
from agentjet.types import Conversation, EpisodeStatus, Message

log = logging.getLogger(__name__)

LEASE_CHECK_SECONDS = 1.0
"""Seconds between two looks at the clock for leases, at most."""
DISK_RETRY_SECONDS = 2.0
"""Seconds between two tries of a disk that refuses."""
EVENTS_PAGE = 1000
NOT_SERVING = ("offline", "draining", "failed")
"""States of the engine in which no episode begins."""


class Gateway:
    """One policy being served and trained. `await start()` first, `await close()` at the end."""

    def __init__(
        self,
        config: ServeConfig,
        compute: Compute,
        *,
        clock: Callable[[], float] = time.time,
        stopwatch: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the data dir, making it where it is missing. The `stopwatch` tells when the event loop stood still.

        Raises `ConfigError` when it is in use or another policy's, or its journal lost its end.
        """
        self.config = config
        data_dir = config.server.data_dir
        try:
            data_dir.mkdir(0o700, parents=True, exist_ok=True)  # It will hold what agents ask and hear.
        except OSError as error:
            raise ConfigError(f"server.data_dir = {str(data_dir)!r} cannot be made: {error.strerror}") from None
        name = config.model.name
        self._model_name = Path(name).name if Path(name).is_dir() else name
        self._clock = clock
        self.began = clock()
        self._journal = Journal.open(data_dir / "journal.sqlite", model=config.model)
        metrics = MetricsFile(data_dir / "metrics.jsonl", clock=clock)
        try:
            metrics.check_journal(self._journal.read_state().policy_version)
        except ConfigError:
            self._journal.close()
            raise
        self.store = CheckpointStore(data_dir)
        # Known before the worker has loaded it: episodes begin meanwhile, and the journal is empty no longer.
        newest = self.store.newest()
        self.swarm = SwarmState(self._journal, config.job, clock=clock, stopwatch=stopwatch, policy_version=newest)
        self._commits = GroupCommit(self.swarm)
        self.changed = Broadcast()
        self._room = AdmissionWaiters()
        self.swarm.store.on_event = self._on_event
        self.last_event = self._journal.last_event()
        """Number of the newest event that is on disk."""
        self._compute = compute
        self._gate = Gate()
        self.tracing = Tracing()
        """Off; whoever wants spans sets its `tracer`."""
        self.engine = Engine(
            self.swarm, self._commits, compute, self._gate, self.store, metrics, self.changed, tracing=self.tracing
        )
        self._admits = self._admission()
        self.versions = PolicyVersions(self.swarm, self._commits, self.engine, self.store)
        self._calls = CallPath(
            self.swarm,
            self._commits,
            compute,
            self._gate,
            self.engine,
            config.server.call_timeout,
            limits=CallLimits(config.server),
            tracing=self.tracing,
            clock=clock,
        )
        self._reaper: asyncio.Task[None] | None = None
        self.closing = False

    # ---- life -------------------------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The name agents ask for: the model's own, without the folders of a local one."""
        return self._model_name

    async def start(self) -> None:
        """Begin to bring the worker up; calls and episodes are accepted at once, and held until it is there."""
        if self.swarm.job_notice:
            log.warning("%s", self.swarm.job_notice)
        self.engine.start()
        self._reaper = asyncio.create_task(self._reap())

    async def ready(self) -> None:
        """Wait until the worker is up. Raises what made it impossible: `ConfigError` for a model that cannot be had."""
        await self.engine.settled()

    async def drain(self) -> None:
        """Refuse calls, end the event streams and the batch being learned, save, end the worker.

        Episodes can still be ended.
        """
        self.closing = True
        self.changed.notify()
        self._room.wake()
        await self.engine.stop()

    async def close(self) -> None:
        """`drain`, then end what is still being answered, then close the journal; idempotent."""
        try:
            await self.drain()
        finally:  # Whatever the worker does at its end, the data dir is free for the next.
            if self._reaper is not None:
                self._reaper.cancel()
                await asyncio.wait([self._reaper])
                self._reaper = None
            self._calls.deliveries.close()
            await self._commits.close()
            self._journal.close()

    async def stop_engine(self) -> None:
        """Save a checkpoint and end the worker; episodes stay, calls and begins are refused until `start_engine`."""
        await self.engine.stop()

    async def start_engine(self) -> None:
        """Bring the worker up again."""
        self.engine.start()

    # ---- episodes ---------------------------------------------------------------------------------------------------

    async def begin(self, request: BeginRequest, *, idempotency_key: str | None = None) -> Episode:
        """Start an episode, waiting up to `request.wait` seconds for room. Raises `Later`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.wait
        while True:
            self.swarm.client_seen(request.client_id)  # Whoever polls and is refused is a client all the same.
            if self.engine.state in NOT_SERVING:
                raise self.engine.refusal()
            try:
                self._check_limit(request, idempotency_key)
                episode = self.swarm.begin(request, idempotency_key=idempotency_key)
                await self._commits.durable()
                return episode
            except Later as later:
                left = deadline - loop.time()
                if later.status != 429 or left <= 0:
                    raise
                is_limit = later.code == TOO_MANY_EPISODES
            group = (request.client_id, group_name(request), request.task_set)
            # A client that waits here is alive: it is seen every half lease.
            await self._room.wait(request.client_id if is_limit else group, min(left, self.swarm.job.lease_seconds / 2))

    def _check_limit(self, request: BeginRequest, idempotency_key: str | None) -> None:
        """Raises `Later` when the client holds as many live episodes as it may. A begin that is repeated may pass."""
        most = self.config.server.max_episodes_per_client
        counts = self.swarm.queries.status_counts()
        if counts["live"] + counts["prepared"] < most:  # Cheap, and nearly always so.
            return
        if self.swarm.begun(request, idempotency_key) is not None:
            return
        if self.swarm.is_due():
            self.swarm.reap()
        self.swarm.take_over(request)
        if self.swarm.queries.num_live_or_prepared(request.client_id) >= most:
            raise too_many_episodes(request.client_id, most)

    async def heartbeat(self, episode_id: str) -> Episode:
        return await self._durably(self.swarm.heartbeat(episode_id))

    async def prepare(self, episode_id: str, request: FinishRequest, *, idempotency_key: str | None = None) -> Episode:
        return await self._durably(self.swarm.prepare(episode_id, request, idempotency_key=idempotency_key))

    async def finish(self, episode_id: str, request: FinishRequest, *, idempotency_key: str | None = None) -> Episode:
        return await self._durably(self.swarm.finish(episode_id, request, idempotency_key=idempotency_key))

    async def abort(self, episode_id: str, request: AbortRequest, *, idempotency_key: str | None = None) -> Episode:
        return await self._durably(self.swarm.abort(episode_id, request, idempotency_key=idempotency_key))

    async def _durably(self, episode: Episode) -> Episode:
        await self._commits.durable()
        return episode

    def call(
        self, episode_id: str, role: str, request: CallRequest, *, hang_up: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[CallChunk]:
        """The chunks of an answer, which was delivered when the iterator is asked for one more after the last.

        Closing it before cancels the sampling; nothing more is recorded, and what was is never trained. `hang_up` is
        called when the answer must end while a chunk that was given out is still being read.
        Raises, before the first chunk, every `RequestError` there is. A call already answered in part can only fail
        with `Later`, or `Conflict` when its episode ended.
        """
        role, request = apply_side_call_rules(self.swarm.job.side_calls, role, request)
        if request.others:
            return self._calls.run_all(episode_id, role, request, hang_up)
        return self._calls.run(episode_id, role, request, hang_up)

    async def count_tokens(self, episode_id: str, role: str, request: CallRequest) -> int:
        """Length of the prompt that `request` is for the policy; nothing is recorded. Raises like `call`."""
        role, request = apply_side_call_rules(self.swarm.job.side_calls, role, request)
        return await self._calls.count_tokens(episode_id, role, request.conversation, request.num_bytes)

    async def refused(self, episode_id: str, error: RequestError) -> None:
        """Counts a refused request on its episode. A refusal of the disk leaves it uncounted."""
        param = re.sub(r"\.\d+", "[]", error.param or "")
        with suppress(Later, NotFound):
            self.swarm.note(episode_id, refused=[f"{error.code}: {param}" if param else error.code])
            await self._commits.durable()

    def past(self, episode_id: str, role: str, call_id: str) -> tuple[Conversation, Message] | None:
        """What a call of a live episode and role was asked, and what it answered; None when there is no such call, or
        it continued a raw prompt.
        """
        roles = (role,) if role else ("", *dict.fromkeys(rule.role for rule in self.swarm.job.side_calls if rule.role))
        trees = (self.swarm.tree(episode_id, name) for name in roles)
        exchange = next((tree.exchange(call_id) for tree in trees if tree.knows(call_id)), None)
        return None if exchange is None or exchange[0].messages[0].role == "prompt" else exchange

    async def episode_tree(self, episode_id: str) -> EpisodeTree:
        """An episode opened up, as it is on disk. Raises `NotFound`, or `Later`."""
        episode = self.swarm.episode(episode_id)
        await self.durable()

        def read() -> EpisodeTree:
            with self._journal.reading() as journal:
                return views.tree(journal, episode, self.engine.renderer)

        return await offload(LARGE, read)

    async def recent_episodes(
        self, limit: int, *, team: str = "", status: EpisodeStatus | None = None, before: str = ""
    ) -> list[EpisodeView]:
        """The newest episodes, newest first, as they are on disk: all, those of a team, those of a status, those begun
        `before` an episode.

        Raises `Later`, and `NotFound` if `before` does not exist.
        """
        await self.durable()
        found = self.swarm.queries.recent_episodes(limit, team=team, status=status, before=before)
        return list(map(views.view, found))

    # ---- the job ----------------------------------------------------------------------------------------------------

    def job(self) -> JobBody:
        return JobBody(revision=self.swarm.job_revision, job=self.swarm.job.model_dump(mode="json"))

    async def replace_job(self, body: JobBody) -> JobBody:
        """Put new job settings in force, for what is composed and sampled from now on.

        They survive a restart, unless it is given other settings than this start was. Raises `Conflict` when they
        changed since they were read.
        """
        revision = self.swarm.job_revision
        if body.revision != revision:
            raise Conflict(
                f"The job settings are at revision {revision}, yours were read at {body.revision}: read them again.",
                code="job_revision_changed",
            )
        try:
            job: JobConfig = parse_job(body.job)
            ServeConfig.model_validate({**self.config.model_dump(exclude={"job"}), "job": job.model_dump()})
            self.engine.check_room(job)
        except (ConfigError, ValueError) as error:
            raise InvalidRequest(str(error), code="invalid_setting", status=422, param="job") from None
        self.swarm.replace_job(job)
        self.changed.notify()
        self._room.wake()
        answer = self.job()
        await self._commits.durable()
        return answer

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    async def checkpoint(self) -> CheckpointInfo:
        """Save the present policy between two batches.

        Raises `CheckpointError`, or `IllegalInState` when the engine is stopped.
        """
        return await self.engine.between_batches("checkpoint", self.engine.checkpoint)

    async def export(self, *, adapter: bool = False) -> CheckpointInfo:
        """Write the present policy as a plain Hugging Face folder under `exports/` in the data dir, or its adapter
        alone as a PEFT folder, and remove all but the newest `server.keep_exports`.

        Raises `InvalidRequest` for the adapter of a policy without one, `Conflict` for a policy that has diverged.
        """
        if adapter and not self.config.model.lora.rank:
            raise InvalidRequest(
                "adapter = true, but model.lora.rank = 0: the server trains all weights, so the policy has no adapter; "
                "export the whole model, without --adapter",
                code="no_adapter",
                status=422,
                param="adapter",
            )

        async def errand() -> CheckpointInfo:
            self.engine.refuse_diverged()
            version = self.swarm.policy_version
            name = f"step_{version:06d}{'-adapter' if adapter else ''}"
            path = self.config.server.data_dir / "exports" / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                await self._compute.export(path, adapter=adapter)
                await asyncio.to_thread(remove_old_exports, path.parent, self.config.server.keep_exports)
            return CheckpointInfo(policy_version=version, path=str(path.resolve()), created=path.stat().st_mtime)

        return await self.engine.between_batches("export", errand)

    # ---- what others may know ---------------------------------------------------------------------------------------

    async def durable(self) -> None:
        """Until all that can be seen now is on disk: whoever lost an answer and looks what became of it relies on that.

        Raises `Later`.
        """
        await self._commits.durable()

    def status(self) -> StatusResponse:
        swarm, job, now = self.swarm, self.swarm.job, self._clock()
        return StatusResponse(
            version=__version__,
            state=self.engine.state,
            waiting_for=self._waiting_for(),
            model=self.model_name,
            model_weights=self.engine.card.weights if self.engine.card else "",
            policy_version=swarm.policy_version,
            branched_from=swarm.queries.branched_from,
            batch_size=job.batch_size,
            group_size=job.group_size,
            spare_episodes=job.spare_episodes,
            max_steps=job.max_steps,
            groups_complete=swarm.queries.num_groups("complete"),
            groups_open=swarm.queries.num_groups("open"),
            episodes=swarm.queries.status_counts(),
            calls_active=len(self._calls.deliveries),
            last_step=swarm.last_step,
            clients={client: max(0.0, now - seen) for client, seen in swarm.queries.clients().items()},
            holding=swarm.queries.holding(),
            code_versions=views.code_versions(swarm),
            task_sets=views.task_sets(swarm),
            workers_started=self.engine.num_workers,
            workers_hung=self.engine.num_hung,
            unusable_checkpoints=[str(path) for path in self.store.unusable()],
            zero_variance=views.zero_variance(swarm),
            last_event=self.last_event,
            uptime=now - self.began,
        )

    def _waiting_for(self) -> str:
        if self.swarm.store.file.refusal:
            return f"the disk. {self.swarm.store.file.refusal}"
        if self.engine.state not in ("sampling", "learning"):
            return self.engine.reason or _WORDS[self.engine.state]
        return DIVERGED if has_diverged(self.swarm.last_step) else self.swarm.queries.waiting_for()

    async def events(self, after: int = 0, *, keep_alive: float = 15.0) -> AsyncGenerator[Event | None]:
        """Events numbered above `after`, until the gateway closes; None when none came for `keep_alive` seconds."""
        while not self.closing:
            page = [event for event in self.swarm.queries.events(after, EVENTS_PAGE) if event.seq <= self.last_event]
            for event in page:
                after = event.seq
                yield event
            if not page and not await self.changed.until(partial(self._is_news, after), keep_alive):
                yield None

    def _is_news(self, after: int) -> bool:
        return self.closing or self.last_event > after

    def _on_event(self, event: Event) -> None:
        self.last_event = event.seq
        _log_event(event)
        if event.kind == "episode" and event.body["status"] != "live":
            self._calls.deliveries.episode_ended(event.body["episode_id"])
        self._make_room(event)
        self.changed.notify()

    def _make_room(self, event: Event) -> None:
        """Wake the begins that may find a place after `event`, and no others."""
        before, self._admits = self._admits, self._admission()
        if event.kind == "task_set" or before[1:] != self._admits[1:] or self._admits[0] > before[0]:
            self._room.wake()
        elif event.kind == "episode":
            body = event.body
            group = (body["client_id"], body["group"], body["task_set"])
            if body["status"] in ("live", "aborted", "expired"):  # It opened its group, or left a place in it.
                self._room.wake(group)
            if body["status"] != "live":
                self._room.wake(body["client_id"])

    def _admission(self) -> tuple[int, bool, int, int]:
        """The facts that the admission of every client depends on; a change of them may admit one that waits."""
        swarm = self.swarm
        return swarm.queries.places_left, self.engine.state in NOT_SERVING, swarm.policy_version, swarm.job_revision

    async def _reap(self) -> None:
        """Reclaim what outlived its lease, when it does; while the disk refuses writes, see whether it takes one."""
        now = asyncio.get_running_loop().time
        next_try, logged = 0.0, ""
        while True:
            try:
                deadline = self.swarm.no_deadline_before()
                nap = (
                    LEASE_CHECK_SECONDS
                    if deadline is None
                    else min(LEASE_CHECK_SECONDS, max(0.001, deadline - self._clock()))
                )
                await self.changed.wait(nap)
                if self.swarm.store.file.refusal and now() >= next_try:
                    next_try = now() + DISK_RETRY_SECONDS
                    self.swarm.store.probe_disk()
                if self.swarm.is_due():
                    self.swarm.reap()
            except Later:  # The journal has said why.
                await asyncio.sleep(LEASE_CHECK_SECONDS)
            except Exception as error:  # The boundary: leases must go on ending. The same failure is logged once.
                if repr(error) != logged:
                    log.exception("leases could not be looked at; this is tried again every %g s", LEASE_CHECK_SECONDS)
                logged = repr(error)
                await asyncio.sleep(LEASE_CHECK_SECONDS)


def _log_event(event: Event) -> None:
    """One record an event, with the episode or batch it is about; programs find its body in `event`."""
    body = event.body
    about = {name: body[name] for name in ("episode_id",) if name in body}
    if event.kind == "step":
        about["batch_id"] = body["policy_version"] - 1
    what = body.get("status") or body.get("state") or body.get("policy_version", "")
    log.info("event %d: %s %s", event.seq, event.kind, what, extra={**about, "event": event.model_dump()})


_WORDS = {
    "offline": "somebody to start the engine",
    "loading": "the worker, to load the model",
    "draining": "the engine to stop",
    "failed": "somebody to start the engine again",
}
