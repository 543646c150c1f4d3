"""`AsyncSwarm`: the client of one server. Every request is written here, once; `Swarm` drives this class from
synchronous code.

`Swarm`: the client of one server for synchronous code. It holds no logic: `AsyncSwarm` does the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

import httpx

from agentjet.client.agent_source import AgentSource, AgentVersion, ModuleSource, code_version_of
from agentjet.client.connection import Connection, Retry, load_settings
from agentjet.client.episode import AsyncEpisode, Endpoint, Episode, begin, checked_reward, finish_body
from agentjet.client.evaluation import (
    CHECKPOINT_WAIT,
    EVAL_WAIT,
    PIN_TASK_ID,
    pin_policy_version,
    record_score,
    run_evaluation,
)
from agentjet.client.inputs import (
    begin_request,
    change,
    check_finite,
    check_policy,
    check_run,
    checked_tasks,
    request_of,
    require_tasks,
)
from agentjet.client.report import EvalReport, TrainReport
from agentjet.client.rollout import Agent, RolloutSpec, StartedRollout
from agentjet.client.threads import SyncClient, driven, driven_run
from agentjet.client.training import HeldOutEvaluations, Training
from agentjet.client.training import check as check_held_out
from agentjet.errors import AgentJetError
from agentjet.protocol import (
    AbortRequest,
    BeginRequest,
    CheckpointInfo,
    EpisodeList,
    EpisodeTree,
    EpisodeView,
    EvaluationView,
    Event,
    ExportRequest,
    FinishRequest,
    JobBody,
    LeaseRequest,
    LeaseView,
    RunRequest,
    StatusResponse,
    TagRequest,
    check_tag,
)
from agentjet.types import Mode, Reward, Task


class AsyncSwarm:
    """A client of one server. Use it from one event loop; close it, or use it as a context manager.

    `url` and `token` default to AGENTJET_URL and AGENTJET_TOKEN. `lease` is the epoch of the lease under which it
    works: see `take_lease`.
    `client_id` names this client to the server; without one each client has a random name. A process that begins with
    the `client_id` of an earlier one takes its places over: the episodes which that one left live are aborted. Several
    processes that are one client give the same `instance_id`, too; "" takes nothing over.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        client_id: str | None = None,
        lease: int | None = None,
        instance_id: str | None = None,
        retry: Retry | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._settings = load_settings(url, token, client_id, lease, instance_id)
        self._retry, self._transport = retry or Retry(), transport
        self._connection = Connection(self._settings, retry=self._retry, transport=transport)

    def again(self) -> Self:
        """Another client of the same server under the same name, for another event loop."""
        known = self._settings
        return type(self)(
            known.url,
            known.token,
            client_id=known.client_id,
            lease=known.lease,
            instance_id=known.instance_id,
            retry=self._retry,
            transport=self._transport,
        )

    @property
    def url(self) -> str:
        """The server's address."""
        return self._settings.url

    @property
    def connection(self) -> Connection:
        """The way of its requests."""
        return self._connection

    def asking(
        self, task_id: str, task_set: str = "", group: str = "", mode: Mode = "train", *, code_version: str = ""
    ) -> BeginRequest:
        """The request for an episode of this client. Raises `InvalidRequest` naming what is wrong in it."""
        return begin_request(
            task_id=task_id,
            task_set=task_set,
            group=group,
            mode=mode,
            client_id=self._settings.client_id,
            instance_id=self._settings.instance_id,
            code_version=code_version,
        )

    # ---- episodes -------------------------------------------------------------------------------------------------

    async def begin(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> AsyncEpisode:
        """Begin an episode; whoever begins it must `finish` or `abort` it.

        Waits up to `wait` seconds for room in the present batch, then raises `Later`.
        """
        return await begin(self._connection, self.asking(task_id, task_set, group, mode), wait=wait)

    @asynccontextmanager
    async def episode(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> AsyncIterator[AsyncEpisode]:
        """An episode as a context: leaving it without `finish`, or by an exception, aborts."""
        episode = await self.begin(task_id, task_set=task_set, group=group, mode=mode, wait=wait)
        async with episode:
            yield episode

    async def finish(self, episode_id: str, reward: float | Reward) -> EpisodeView:
        """End an episode that somebody else began, with its reward. Raises as `AsyncEpisode.finish` does."""
        return await self._end(episode_id, "finish", finish_body(checked_reward(reward)))

    async def abort(self, episode_id: str, reason: str = "") -> EpisodeView:
        """End an episode that somebody else began, without a score."""
        return await self._end(episode_id, "abort", AbortRequest(reason=reason[:2000]))

    async def _end(self, episode_id: str, verb: str, body: FinishRequest | AbortRequest) -> EpisodeView:
        path = f"/episodes/{quote(episode_id, safe='')}/{verb}"
        return EpisodeView.model_validate(await self._connection.request("POST", path, body=body))

    # ---- running agents -------------------------------------------------------------------------------------------

    async def train(
        self,
        agent: Agent,
        tasks: Iterable[Task],
        *,
        steps: int,
        concurrency: int = 32,
        seed: int = 0,
        progress: bool = True,
        reload: bool | AgentSource = False,
        code_version: str | None = None,
        eval_tasks: Iterable[Task] = (),
        eval_every: int = 0,
        eval_repeats: int = 1,
        stop_after: int = 0,
    ) -> TrainReport:
        """Run `agent` on `tasks` until the policy has learned `steps` more batches.

        Tasks are visited in an order that `seed` determines, each as a group of the job's `group_size` episodes. An
        exception in the agent aborts its episode, which is begun anew up to twice. Other clients may be feeding the
        same batches. Episodes still live when the last batch is learned, or when this is cancelled, are aborted. Raises
        `InvalidRequest` when the job ends before `steps`, `Conflict` when the engine is stopped or has failed,
        `AgentFailing` when not one episode could be finished.

        `reload` takes up the agent's module, and those beside it, when their files change: see `LiveCode`. Raises
        `ConfigError` when the agent cannot be loaded anew. `code_version` names the agent's version to the server where
        the hash of its files is not wanted.

        With `eval_tasks` the newest policy version is run_evaluation on them before the first batch, after every
        `eval_every` batches and at the end; see `evaluate` with `record=True`. The run ends early when `stop_after`
        evaluations in a row brought no new best score.
        """
        check_run(agent, steps=steps, concurrency=concurrency, eval_repeats=eval_repeats)
        tasks = require_tasks("train", tasks)
        eval_tasks = checked_tasks(eval_tasks, named="eval_tasks")
        check_held_out(eval_tasks, eval_every, stop_after)
        code = ModuleSource(agent) if reload is True else reload or None
        version = AgentVersion(code_version_of(agent) if code_version is None else code_version, agent)
        held_out = None
        if eval_tasks:

            def evaluate(version: AgentVersion) -> Coroutine[Any, Any, EvalReport]:
                return self.evaluate(
                    version.agent,
                    eval_tasks,
                    repeats=eval_repeats,
                    concurrency=concurrency,
                    progress=False,
                    code_version=version.code_version,
                    at_version="newest",
                    record=True,
                )

            held_out = HeldOutEvaluations(evaluate, eval_every, stop_after)
        training = Training(self._connection, version, tasks, code, held_out)
        try:
            return await training.run(steps, concurrency=concurrency, seed=seed, progress=progress)
        except (AgentJetError, asyncio.CancelledError) as error:
            raise error.with_traceback(None) from None  # The frames inside tell a user nothing.

    async def evaluate(
        self,
        agent: Agent,
        tasks: Iterable[Task],
        *,
        repeats: int = 1,
        concurrency: int = 64,
        progress: bool = True,
        code_version: str | None = None,
        temperature: float | None = None,
        at_version: int | Literal["newest"] | None = None,
        endpoint: Endpoint | None = None,
        record: bool = False,
    ) -> EvalReport:
        """Run `agent` on every task `repeats` times and report; nothing of it is trained on.

        An episode whose agent fails is begun anew up to twice, then reported as aborted: it counts in no mean.
        `temperature` replaces that of every call, 0 is greedy; by default it is the agent's, or the job's.
        `at_version` is the policy version that answers throughout, "newest" the present one: learning waits for it, at
        most `job.max_episode_seconds`. Raises `Conflict` (`version_gone`) when the server is at another one. With
        `endpoint` the agent talks to another model instead, and the server is not asked at all. `record` stores the
        score on the server, see `evaluations`; it needs `at_version`.
        """
        check_run(agent, repeats=repeats, concurrency=concurrency)
        tasks = require_tasks("evaluate", tasks)
        check_policy(at_version, temperature)
        if record and at_version is None:
            raise ValueError("record = True needs at_version, such as 'newest': a score is of one policy version")
        if endpoint is not None and (at_version, temperature) != (None, None):
            raise ValueError(
                "at_version and temperature are for the policy of a server: an endpoint has no versions, and is asked "
                "with the agent's own temperature"
            )
        version = AgentVersion(code_version_of(agent) if code_version is None else code_version, agent)

        async def run(pinned: int | None) -> EvalReport:
            async def begun(slot: RolloutSpec) -> StartedRollout:
                task, code = slot.task, version.code_version
                request = self.asking(task.id, task.task_set, mode="eval", code_version=code)
                if endpoint is not None:
                    return StartedRollout(endpoint.begin(request), version.agent)
                request = request.model_copy(update={"at_version": pinned, "temperature": temperature})
                return StartedRollout(await begin(self._connection, request, wait=EVAL_WAIT), version.agent)

            return await run_evaluation(begun, tasks, repeats=repeats, concurrency=concurrency, progress=progress)

        try:
            if at_version is None:
                return await run(None)
            async with pin_policy_version(
                self._connection, self.asking(PIN_TASK_ID, mode="eval"), at_version
            ) as pinned:
                report = await run(pinned)
                if record:
                    await record_score(self._connection, self._settings.client_id, pinned, report)
                return report
        except (AgentJetError, asyncio.CancelledError) as error:
            raise error.with_traceback(None) from None

    # ---- the server -----------------------------------------------------------------------------------------------

    async def episodes(self, limit: int = 20, *, before: str = "") -> EpisodeList:
        """The newest episodes, newest first; those begun before the one with the id `before`, where it is given."""
        path = f"/episodes?limit={limit}" + (f"&before={quote(before, safe='')}" if before else "")
        return EpisodeList.model_validate(await self._connection.request("GET", path))

    async def episode_tree(self, episode_id: str) -> EpisodeTree:
        """An episode with every call, token by token. Raises `NotFound`."""
        path = f"/episodes/{quote(episode_id, safe='')}"
        return EpisodeTree.model_validate(await self._connection.request("GET", path))

    async def status(self) -> StatusResponse:
        """What the server is doing."""
        return StatusResponse.model_validate(await self._connection.request("GET", "/status"))

    async def events(self, after: int = 0) -> AsyncGenerator[Event]:
        """What happens on the server, from the event numbered `after` on, without end, across restarts of the
        server."""
        async with aclosing(self._connection.events(after)) as events:
            async for event in events:
                yield event

    async def job(self) -> JobBody:
        """The job's settings and their revision."""
        return JobBody.model_validate(await self._connection.request("GET", "/job"))

    async def set_job(self, job: Mapping[str, Any], *, revision: int) -> JobBody:
        """Replace the job's settings, if they are still those of `revision`; else raises `Conflict`. Takes the admin
        token."""
        return await self._put_job(request_of(JobBody, revision=revision, job=dict(job)))

    async def change_job(self, changes: Mapping[str, Any]) -> JobBody:
        """Change single job settings by dotted name, such as `{"optimizer.lr": 1e-5}`; the others stay as they are.

        Raises `ConfigError` or `InvalidRequest` naming the key, the value and the nearest key. Takes the admin token.
        """
        return await change(self.job, self._put_job, changes)

    async def _put_job(self, body: JobBody) -> JobBody:
        check_finite(body.job)
        return JobBody.model_validate(await self._connection.request("PUT", "/job", body=body))

    async def evaluations(self) -> list[EvaluationView]:
        """Every evaluation that was recorded on the server, in the order they came."""
        answer = await self._connection.request("GET", "/evaluations")
        return [EvaluationView.model_validate(item) for item in answer]

    async def start(self) -> StatusResponse:
        """Let training go on. Takes the admin token."""
        return StatusResponse.model_validate(await self._connection.request("POST", "/start"))

    async def stop(self) -> StatusResponse:
        """Stop training and sampling, after the batch being learned. Takes the admin token."""
        return StatusResponse.model_validate(await self._connection.request("POST", "/stop"))

    async def take_lease(self, holder: str, seconds: float, *, epoch: int | None = None) -> LeaseView:
        """Have the server for oneself, for a time: only clients made with `lease=` its epoch begin episodes meanwhile.

        With the `epoch` of a lease that is still held it is renewed. Raises `Conflict` (`leased`, `lease_over`). Takes
        the admin token, as do the next two.
        """
        body = request_of(LeaseRequest, holder=holder, seconds=seconds, epoch=epoch)
        return LeaseView.model_validate(await self._connection.request("PUT", "/lease", body=body))

    async def end_lease(self) -> LeaseView:
        """End the lease, whoever has it; the server goes back to its own run."""
        answer = await self._connection.request("DELETE", "/lease", server_wait=CHECKPOINT_WAIT)
        return LeaseView.model_validate(answer)

    async def enter_run(self, name: str, job: Mapping[str, Any]) -> StatusResponse:
        """Have the server serve a run of this lease: from the base model, or from where it was left."""
        body = request_of(RunRequest, name=name, job=dict(job))
        answer = await self._connection.request("PUT", "/run", body=body, server_wait=CHECKPOINT_WAIT)
        return StatusResponse.model_validate(answer)

    async def checkpoints(self) -> list[CheckpointInfo]:
        """The checkpoints on the server's disk, oldest first."""
        answer = await self._connection.request("GET", "/checkpoints")
        return [CheckpointInfo.model_validate(item) for item in answer]

    async def checkpoint(self) -> CheckpointInfo:
        """Save a checkpoint of the present policy, between two batches."""
        answer = await self._connection.request("POST", "/checkpoints", server_wait=CHECKPOINT_WAIT)
        return CheckpointInfo.model_validate(answer)

    async def tag(self, policy_version: int, name: str) -> list[CheckpointInfo]:
        """Name a checkpoint, which is then kept until `untag`. Raises `InvalidRequest`, `NotFound`, `Conflict`."""
        check_tag(name)
        body = request_of(TagRequest, policy_version=policy_version)
        answer = await self._connection.request("PUT", f"/tags/{quote(name, safe='')}", body=body)
        return [CheckpointInfo.model_validate(item) for item in answer]

    async def untag(self, name: str) -> list[CheckpointInfo]:
        """Remove the name of a checkpoint. Raises `InvalidRequest`, `NotFound`."""
        check_tag(name)
        answer = await self._connection.request("DELETE", f"/tags/{quote(name, safe='')}")
        return [CheckpointInfo.model_validate(item) for item in answer]

    async def export(self, *, adapter: bool = False) -> CheckpointInfo:
        """Have the present policy written on the server's disk, between two batches: as a plain Hugging Face folder, or
        its `adapter` alone as a PEFT folder. Raises `InvalidRequest` for the adapter of a policy without one.
        """
        body = ExportRequest(adapter=adapter)
        answer = await self._connection.request("POST", "/exports", body=body, server_wait=CHECKPOINT_WAIT)
        return CheckpointInfo.model_validate(answer)

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Swarm(SyncClient[AsyncSwarm]):
    """A client of one server. May be used from several threads. Its methods are those of `AsyncSwarm`; Ctrl-C in
    `train` and `evaluate` aborts the live episodes, then raises a `KeyboardInterrupt`, which ends a script that does
    not catch it with a sentence; SIGTERM, then `SystemExit`.

    `url` and `token` default to AGENTJET_URL and AGENTJET_TOKEN. `lease` is the epoch of the lease under which it
    works: see `take_lease`.
    `client_id` names this client to the server; without one each client has a random name. A process that begins with
    the `client_id` of an earlier one takes its places over: the episodes which that one left live are aborted. Several
    processes that are one client give the same `instance_id`, too; "" takes nothing over.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        client_id: str | None = None,
        lease: int | None = None,
        instance_id: str | None = None,
        retry: Retry | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        named = {"client_id": client_id, "instance_id": instance_id}
        super().__init__(AsyncSwarm(url, token, **named, lease=lease, retry=retry, transport=transport))

    @property
    def asynchronous(self) -> AsyncSwarm:
        """A client of the same server under the same name, for the caller's own event loop."""
        return self._client.again()

    @property
    def url(self) -> str:
        """The server's address."""
        return self._client.url

    def begin(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> Episode:
        """See `AsyncSwarm.begin`."""
        begun = self._loop.run(self._client.begin(task_id, task_set=task_set, group=group, mode=mode, wait=wait))
        return begun.driven(self._loop.run)

    @contextmanager
    def episode(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> Iterator[Episode]:
        """An episode as a context: leaving it without `finish`, or by an exception, aborts."""
        with self.begin(task_id, task_set=task_set, group=group, mode=mode, wait=wait) as episode:
            yield episode

    finish = driven(AsyncSwarm.finish)
    abort = driven(AsyncSwarm.abort)
    train = driven_run(AsyncSwarm.train)
    evaluate = driven_run(AsyncSwarm.evaluate)
    episodes = driven(AsyncSwarm.episodes)
    episode_tree = driven(AsyncSwarm.episode_tree)
    evaluations = driven(AsyncSwarm.evaluations)
    status = driven(AsyncSwarm.status)
    job = driven(AsyncSwarm.job)
    set_job = driven(AsyncSwarm.set_job)
    change_job = driven(AsyncSwarm.change_job)
    start = driven(AsyncSwarm.start)
    stop = driven(AsyncSwarm.stop)
    take_lease = driven(AsyncSwarm.take_lease)
    end_lease = driven(AsyncSwarm.end_lease)
    enter_run = driven(AsyncSwarm.enter_run)
    checkpoints = driven(AsyncSwarm.checkpoints)
    checkpoint = driven(AsyncSwarm.checkpoint)
    tag = driven(AsyncSwarm.tag)
    untag = driven(AsyncSwarm.untag)
    export = driven(AsyncSwarm.export)

    def events(self, after: int = 0) -> Iterator[Event]:
        """See `AsyncSwarm.events`."""
        return self._loop.iterate(self._client.events(after))
