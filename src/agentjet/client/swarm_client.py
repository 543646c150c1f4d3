"""`AsyncSwarm`: a client of one run of a server, for asynchronous code; `Swarm`: the same for synchronous code.

`Swarm` runs the methods of an `AsyncSwarm` on an event loop in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, Unpack
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter

from agentjet import protocol
from agentjet.client.agent_source import AgentSource, AgentVersion, ModuleSource
from agentjet.client.connection import Connection, Retry, load_settings, reach_directly
from agentjet.client.demonstrations import Example, checked_demonstrations, recipe_name
from agentjet.client.episode import (
    AsyncEpisode,
    Endpoint,
    Episode,
    Returned,
    begin_episode,
    checked_reward,
    close_groups,
    episode_path,
    finish_body,
)
from agentjet.client.inputs import (
    ONE_TASK_SET,
    build_request,
    check_agent,
    check_commands,
    check_finite,
    check_policy,
    checked_tasks,
    edited,
    is_stream,
    listed_tasks,
)
from agentjet.client.live_reload import first_version
from agentjet.client.report import EvalReport, TrainReport
from agentjet.client.rollout import Agent, RolloutSpec, TaskStream
from agentjet.client.teacher import Collected, CollectedFile, collect
from agentjet.client.threads import LoopThread, raise_on_signals
from agentjet.client.training import (
    CHECKPOINT_WAIT,
    EVAL_WAIT,
    PIN_TASK_ID,
    HeldOutEvaluations,
    SftReport,
    SftTraining,
    Training,
    check_held_out,
    pin_policy_version,
    record_if_possible,
    record_score,
    run_evaluation,
    trained_held_out,
)
from agentjet.errors import AgentJetError, ConfigError
from agentjet.protocol import EpisodeFilters, EpisodeView, Event
from agentjet.types import DEFAULT_RUN, Mode, Task

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
SCALE_WAIT = 60.0
"""Longest wait for the answer of `scale`: a cluster is asked for its free GPUs."""


class AsyncSwarm:
    """A client of one run of a server. Use it from one event loop; close it, or use it as a context manager.

    `url` and `token` default to AGENTJET_URL and AGENTJET_TOKEN. An address that ends in `/runs/NAME` is that of a run
    of the server; others mean its default run.

    `client_id` identifies this client to the server; by default it is random. If a process begins episodes with the
    `client_id` of an earlier one, the server aborts the live episodes of the earlier one. Several processes that act as
    one client share an `instance_id`, too; "" aborts nothing.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        client_id: str | None = None,
        instance_id: str | None = None,
        retry: Retry | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._settings = load_settings(url, token, client_id, instance_id)
        self._retry, self._transport = retry or Retry(), transport
        self.connection = Connection(self._settings, retry=self._retry, transport=transport)
        self.url: str = self._settings.url
        """The server's address."""

    def episode_request(
        self, task_id: str, task_set: str = "", group: str = "", mode: Mode = "train", *, code_version: str = ""
    ) -> protocol.BeginRequest:
        """The request for an episode of this client. Raises `InvalidRequest` naming the wrong field."""
        return build_request(
            protocol.BeginRequest,
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
        """Begin an episode. The caller must `finish` or `abort` it.

        Waits up to `wait` seconds for room in the present batch, then raises `Later`.
        """
        return await begin_episode(self.connection, self.episode_request(task_id, task_set, group, mode), wait=wait)

    @asynccontextmanager
    async def episode(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> AsyncIterator[AsyncEpisode]:
        """An episode as a context manager: leaving it without `finish`, or by an exception, aborts."""
        episode = await self.begin(task_id, task_set=task_set, group=group, mode=mode, wait=wait)
        async with episode:
            yield episode

    async def finish(self, episode_id: str, reward: Returned) -> protocol.EpisodeView:
        """End an episode that another process began, with its reward. Raises as `AsyncEpisode.finish` does."""
        policies = (await self.status()).policies if isinstance(reward, Mapping) else ()
        return await self._end(episode_id, "finish", finish_body(checked_reward(reward, policies)))

    async def abort(self, episode_id: str, reason: str = "") -> protocol.EpisodeView:
        """End an episode that another process began, without a score."""
        return await self._end(episode_id, "abort", protocol.AbortRequest(reason=reason[:2000]))

    async def close_group(self, group: str, *, task_set: str = "") -> None:
        """Close a group of which this client begins no further episode, because it gave an attempt up or stops.

        `group` is that of its episodes: `episode.group`. Training then waits for the live episodes of the group only.
        The group is trained if at least `job.min_group_size` of them finished, or if that is 0, as many as the recipe
        needs. Without this request training waits `job.lease_seconds` for the missing ones. `train` sends it for its
        groups.
        """
        await close_groups(self.connection, [build_request(protocol.GroupName, group=group, task_set=task_set)])

    async def _end(
        self, episode_id: str, verb: str, body: protocol.FinishRequest | protocol.AbortRequest
    ) -> protocol.EpisodeView:
        return await self._send(protocol.EpisodeView, "POST", episode_path(episode_id, verb), body=body)

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
        reproducible: bool = False,
    ) -> TrainReport:
        """Run `agent` on `tasks` until the policies of the run have learned `steps` more batches.

        The agent returns a number or a `Reward`; in a run with named policies also one of these for each policy.
        `seed` determines the order of the tasks. Each visit of a task is a group of the job's `group_size` episodes.
        A generator of tasks is read as the run goes on, in its order, and may be endless: see `TaskStream`. If
        the agent raises, its episode is aborted and attempted up to twice more. Other clients may contribute to the
        same batches. Episodes that are live when the last batch is learned, or when this is cancelled, are aborted.

        Raises `InvalidRequest` if the job ends before `steps`. Raises `Conflict` if the engine is stopped or has
        failed. Raises `AgentFailing` if not one episode could be finished.

        `reload` runs the agent from a copy of its folder, or of its package, and makes a new copy when a file in it
        changes: see `LiveReload`. The watched files are shown first. Raises `ConfigError` if the agent cannot be
        reloaded. `code_version` replaces the hash of the agent's files.

        With `eval_tasks`, the newest policy version is evaluated on them: before the first batch, after every
        `eval_every` batches and at the end. See `evaluate` with `record=True`. The run ends early when `stop_after`
        evaluations in a row brought no new best score.

        With `reproducible`, `seed` and `job.seed` also determine the answers, and groups begin in the order of the
        tasks. A run with the same seeds then has the same groups, episodes' seeds and order of batches if
        `job.max_staleness` is 0, no other client contributes and no episode fails. Its answers are the same up to
        rounding: with `concurrency` above 1, the calls that share a pass of the model depend on time, and so do the
        last bits of its numbers, which now and then choose another token. For equal batches and equal weights use
        `concurrency = 1`. Groups begin one after another, which takes a round trip each.
        """
        check_agent(agent, steps=steps, concurrency=concurrency, eval_repeats=eval_repeats)
        source = TaskStream(tasks, "tasks") if is_stream(tasks) else listed_tasks(tasks)
        if reproducible and not isinstance(source, TaskStream) and len({task.task_set for task in source}) > 1:
            raise ValueError(ONE_TASK_SET)
        eval_tasks = checked_tasks(eval_tasks, "eval_tasks")
        check_commands(agent, [*(() if isinstance(source, TaskStream) else source), *eval_tasks])
        check_held_out(eval_tasks, eval_every, stop_after)
        if not isinstance(source, TaskStream) and (note := trained_held_out(source, eval_tasks)):
            log.warning("%s", note)
        reach_directly(self.url)
        module = ModuleSource(agent) if reload is True else None
        first_tasks = [source.first] if isinstance(source, TaskStream) else source
        if module is not None and (note := module.mismatch(first_tasks)):
            log.warning("%s", note)
        code = module if reload is True else reload or None
        held_out = None
        if eval_tasks and eval_tasks.identity:  # Computed before an agent may change a payload.
            options: dict[str, Any] = {"repeats": eval_repeats, "concurrency": concurrency, "progress": False}
            options |= {"at_version": "newest", "record": True}
            held_out = HeldOutEvaluations(
                lambda version: self.evaluate(version.agent, eval_tasks, code_version=version.code_version, **options),
                eval_every,
                stop_after,
            )
        try:
            version = await first_version(agent, code, code_version)
            connection, status, request = self.connection, await self.status(), self.episode_request
            training = Training(
                connection, status, request, version, source, steps, seed, progress, code, held_out, reproducible
            )
            return await training.run(concurrency)
        except (AgentJetError, asyncio.CancelledError) as error:
            raise error.with_traceback(None) from None  # The internal frames do not help a user.
        finally:
            if module is not None:
                module.close()

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
        record: bool | None = None,
        seed: int | None = None,
    ) -> EvalReport:
        """Run `agent` on every task `repeats` times and report. These episodes are not trained on.

        A failed episode is attempted up to twice more, then reported as aborted: it counts in no mean.

        * `temperature` replaces that of every call; 0 is greedy. By default the agent's applies, or the job's.
        * `at_version` is the policy version that answers throughout; "newest" is the present one. Learning waits for
          it, at most `job.max_episode_seconds`. Raises `Conflict` (`version_gone`) if the server is at another version.
        * With `endpoint` the agent calls another model, and the server gets no requests.
        * The server stores the score if one policy version answered throughout, see `evaluations`. Otherwise a line
          has the reason. `record=False` prevents it. `record=True` needs `at_version` and makes it a held-out score:
          the best checkpoint and the health depend on it.
        * `seed` determines the answers of a policy version, together with `job.seed`. By default each evaluation draws
          others.
        """
        check_agent(agent, repeats=repeats, concurrency=concurrency)
        tasks = listed_tasks(tasks)
        task_list = tasks.identity
        check_commands(agent, tasks)
        check_policy(at_version, temperature, seed, of_server=endpoint is None, record=bool(record))
        version = AgentVersion.of(agent, code_version)
        reach_directly(self.url)
        pinned: int | None = None

        async def start(spec: RolloutSpec) -> tuple[AsyncEpisode, Agent]:
            task, code = spec.task, version.code_version
            request = self.episode_request(task.id, task.task_set, mode="eval", code_version=code)
            if endpoint is not None:
                return endpoint.begin(request), version.agent
            request = request.model_copy(update={"at_version": pinned, "temperature": temperature, "seed": spec.seed})
            return await begin_episode(self.connection, request, wait=EVAL_WAIT), version.agent

        try:
            async with AsyncExitStack() as stack:
                if at_version is not None:
                    pin = self.episode_request(PIN_TASK_ID, mode="eval")
                    pinned = await stack.enter_async_context(pin_policy_version(self.connection, pin, at_version))
                base = "" if seed is None else f"evaluation/{seed}"
                report = await run_evaluation(
                    start,
                    tasks,
                    repeats=repeats,
                    concurrency=concurrency,
                    progress=progress,
                    base=base,
                    capacity=getattr(agent, "capacity", None),
                )
                why = ""
                if record and pinned is not None:
                    await record_score(self.connection, pinned, report, task_list, held_out=True)
                elif record is None and endpoint is None:
                    why = await record_if_possible(self.connection, report, task_list)
                if why:
                    (print if progress else log.info)(f"The score is not recorded: {why.rstrip('.')}.")
                return report
        except (AgentJetError, asyncio.CancelledError) as error:
            raise error.with_traceback(None) from None

    async def sft(
        self,
        demonstrations: Iterable[Mapping[str, Any] | protocol.DemonstrationBody | Example],
        *,
        epochs: int = 1,
        batch_size: int = 16,
        lr: float | None = None,
        policy: str = "",
        seed: int = 0,
        progress: bool = True,
        recipe: str | Mapping[str, Any] = "",
    ) -> SftReport:
        """Train a policy on conversations with given answers: supervised fine-tuning, or preferences.

        Each demonstration has `messages` in OpenAI's chat format, and perhaps `tools`. All assistant messages are
        learned, except those with `"weight": 0`. Each batch of `batch_size` demonstrations is one policy version.
        `lr` is a constant learning rate; by default that of the job applies. All demonstrations are checked first.
        Training episodes of other clients that become older than `job.max_staleness` are dropped as `stale`.

        `recipe` is `sft`, `dpo` or `kto`, or a table with `name` and parameters. With `dpo` each demonstration has a
        prompt in `messages`, and the answers `chosen` and `rejected`; with `kto` a `completion` and its `label`. The
        forms are those of TRL: see docs/warm-starts.md.

        Raises `ValueError` or `InvalidRequest` for a wrong demonstration, before anything is learned. Raises
        `InvalidRequest` if the job ends before the batches, and `Conflict` if the engine is stopped or has failed.
        """
        given = checked_demonstrations(demonstrations, recipe_name(recipe))
        return await SftTraining(self.connection, given, epochs, batch_size, lr, policy, seed, progress, recipe).run()

    async def collect(
        self,
        agent: Agent,
        tasks: Iterable[Task],
        teacher: Endpoint,
        file: str | Path,
        *,
        keep: float = 1.0,
        repeats: int = 1,
        concurrency: int = 16,
        progress: bool = True,
    ) -> Collected:
        """Run `agent` on every task `repeats` times with a stronger model instead of the policy, and write its answers
        to `file` as demonstrations for `sft`.

        Episodes with a reward of at least `keep` are kept; others go to the file with `.low` in its name. An episode in
        these files is not repeated, so an interrupted collection continues. The agent calls chat completions, with
        `episode.base_url` and `episode.api_key`. The server of this client gets no requests.

        A failed episode is attempted up to twice more, then left out. Raises `TeacherFailed` if the teacher is not
        reachable, or refuses the key or the model; `AgentFailing` if the first episodes all fail. Raises `ConfigError`
        if no episode of the file is kept.
        """
        check_agent(agent, repeats=repeats, concurrency=concurrency)
        listed = listed_tasks(tasks)
        check_commands(agent, listed)
        collected_file = CollectedFile(Path(file), keep)
        reach_directly("http://127.0.0.1")
        try:
            collected = await collect(
                agent,
                listed,
                teacher,
                collected_file,
                self.episode_request("collected", mode="eval"),
                repeats=repeats,
                concurrency=concurrency,
                progress=progress,
                retry=self._retry,
            )
        except (AgentJetError, asyncio.CancelledError) as error:
            raise error.with_traceback(None) from None
        if not collected.file.num_kept:
            raise ConfigError(f"there is nothing to learn: {collected.reasons}")
        return collected

    # ---- the server -----------------------------------------------------------------------------------------------

    async def episodes(
        self, limit: int = 20, *, before: str = "", **filters: Unpack[protocol.EpisodeFilters]
    ) -> protocol.EpisodeList:
        """A page of the episodes that match every filter, newest first, or in the order of `sort`.

        `next` of a page is `before` of the page that follows it. The filters, such as `status="aborted"`, `task_set`,
        `min_reward` and `reason`, are the fields of `EpisodeQuery`. Raises `InvalidRequest` naming the wrong one, and
        `NotFound` if there is no episode `before`.
        """
        wanted = build_request(protocol.EpisodeQuery, limit=limit, before=before, **filters)
        return await self._read(protocol.EpisodeList, "/episodes", **wanted.model_dump(exclude_unset=True))

    async def all_episodes(self, **filters: Unpack[protocol.EpisodeFilters]) -> AsyncGenerator[protocol.EpisodeView]:
        """All episodes that match every filter, read page by page. Arguments and errors are those of `episodes`."""
        before: str | None = ""
        while before is not None:
            page = await self.episodes(protocol.MOST_EPISODES, before=before, **filters)
            for episode in page.episodes:
                yield episode
            before = page.next

    async def episode_tree(self, episode_id: str) -> protocol.EpisodeTree:
        """An episode with every call, token by token. Raises `NotFound`."""
        return await self._read(protocol.EpisodeTree, episode_path(episode_id))

    async def group(self, group_id: int) -> protocol.GroupView:
        """A group with its episodes and their advantages. Raises `NotFound`."""
        return await self._read(protocol.GroupView, f"/groups/{group_id}")

    async def batches(self, limit: int = 100, *, before: int | None = None) -> protocol.BatchList:
        """A page of batches, newest first: the newest `limit`, or those before batch `before`.

        `next` of a page is `before` of the page that follows it.
        """
        return await self._read(protocol.BatchList, "/batches", limit=limit, before=before)

    async def batch(self, batch_id: int) -> protocol.BatchView:
        """A batch with its groups, rewards and advantages, the episodes that were lost before it, and the job settings
        that changed. Raises `NotFound`.
        """
        return await self._read(protocol.BatchView, f"/batches/{batch_id}")

    async def steps(
        self, after: int | None = None, limit: int = 1000, *, metrics: Sequence[str] = ()
    ) -> protocol.StepList:
        """Metrics of learned batches: the oldest `limit` above policy version `after`, else the newest `limit`.

        `metrics` are the names of those to return, by default all.
        """
        return await self._read(protocol.StepList, "/steps", limit=limit, after=after, metric=list(metrics))

    async def status(self) -> protocol.StatusResponse:
        """The server's present status."""
        return await self._read(protocol.StatusResponse, "/status")

    async def health(self) -> protocol.HealthView:
        """The trend of the training reward, and the health rules with their results."""
        return await self._read(protocol.HealthView, "/health")

    async def waiting(self) -> protocol.WaitingView:
        """The groups that fill the present batch, with the state of each episode."""
        return await self._read(protocol.WaitingView, "/waiting")

    def events(self, after: int = 0) -> AsyncGenerator[protocol.Event]:
        """The server's events numbered above `after`, without end, across restarts of the server."""
        return self.connection.events(after)

    async def job(self) -> protocol.JobBody:
        """The job's settings and their revision."""
        return await self._read(protocol.JobBody, "/job")

    async def change_job(self, changes: Mapping[str, Any]) -> protocol.JobBody:
        """Change single job settings by dotted name, such as `{"optimizer.lr": 1e-5}`; the others stay.

        Raises `ConfigError` or `InvalidRequest` naming the key, the value and the nearest key. Raises `Conflict` if
        another client changes them at the same moment. Needs the admin token.
        """
        now = await self.job()
        body = protocol.JobBody(revision=now.revision, job=edited(now.job, changes))
        check_finite(body.job)
        return await self._send(protocol.JobBody, "PUT", "/job", body=body)

    async def evaluations(self) -> list[protocol.EvaluationView]:
        """The evaluations recorded on the server, oldest first. See `evaluate`."""
        return await self._read(list[protocol.EvaluationView], "/evaluations")

    async def start(self) -> protocol.StatusResponse:
        """Resume training. Needs the admin token."""
        return await self._send(protocol.StatusResponse, "POST", "/start")

    async def stop(self) -> protocol.StatusResponse:
        """Stop training and sampling, after the batch being learned. Needs the admin token."""
        return await self._send(protocol.StatusResponse, "POST", "/stop")

    async def cluster(self) -> protocol.ClusterView:
        """The processes that host the weights of the run."""
        return await self._read(protocol.ClusterView, "/cluster")

    async def scale(self, samplers: int | str, *, policy: str = "") -> protocol.ClusterView:
        """Change the number of sampler replicas of a policy, or its bounds: `"2..8"`. New ones start in the background.

        Needs the admin token. Raises `InvalidRequest` if the server has no replicas or not enough GPUs.
        """
        body = build_request(protocol.ScaleRequest, samplers=samplers, policy=policy)
        return await self._send(protocol.ClusterView, "POST", "/cluster/scale", body=body, server_wait=SCALE_WAIT)

    async def runs(self) -> list[protocol.RunView]:
        """The runs of the server, the default run first. Needs the server's admin token, as do `start_run` and
        `end_run`."""
        return (await self._read(protocol.RunList, "/runs")).runs

    async def start_run(
        self,
        name: str,
        *,
        job: Mapping[str, Any] | None = None,
        policies: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> protocol.RunView:
        """Create a run on the server, open it again, or change its job settings. `of_run` gives its client.

        `job` and `policies` are as `[job]` and `[policies]` of a settings file; keys of `job` may be dotted, as in
        `change_job`. Without `job` the run keeps its settings; a new run has those that the server was started
        with. Settings that `job` does not name get their defaults. Raises `InvalidRequest` for a wrong name or setting,
        and `Conflict` if the run exists with other policies.
        """
        protocol.check_run_name(name)
        check_finite(job or {})
        check_finite(policies or {}, "policies.")
        body = build_request(
            protocol.RunSettings, policies=dict(policies or {}), job=None if job is None else edited({}, job)
        )
        return await self._send(protocol.RunView, "PUT", f"/runs/{name}", body=body, server_wait=CHECKPOINT_WAIT)

    async def end_run(self, name: str) -> protocol.RunView:
        """Save a checkpoint of a run and close it. Its files stay, and `start_run` opens it again."""
        protocol.check_run_name(name)
        return await self._send(protocol.RunView, "DELETE", f"/runs/{name}", server_wait=CHECKPOINT_WAIT)

    def of_run(self, name: str, token: str | None = None) -> Self:
        """A client of another run of this server, with the same identity. Close it, too.

        `token` is a token of that run; by default the one of this client is sent.
        """
        protocol.check_run_name(name)
        settings = self._settings
        return type(self)(
            settings.server_url if name == DEFAULT_RUN else f"{settings.server_url}/runs/{name}",
            settings.token if token is None else token,
            client_id=settings.client_id,
            instance_id=settings.instance_id,
            retry=self._retry,
            transport=self._transport,
        )

    async def checkpoints(self) -> list[protocol.CheckpointInfo]:
        """The checkpoints on the server's disk, oldest first."""
        return await self._read(list[protocol.CheckpointInfo], "/checkpoints")

    async def checkpoint(self) -> protocol.CheckpointInfo:
        """Save a checkpoint of the present policy, between two batches."""
        return await self._send(protocol.CheckpointInfo, "POST", "/checkpoints", server_wait=CHECKPOINT_WAIT)

    async def tag(self, policy_version: int, name: str) -> list[protocol.CheckpointInfo]:
        """Name a checkpoint, which is then kept until `untag`. Raises `InvalidRequest`, `NotFound`, `Conflict`."""
        protocol.check_tag(name)
        body = build_request(protocol.TagRequest, policy_version=policy_version)
        return await self._send(list[protocol.CheckpointInfo], "PUT", f"/tags/{quote(name, safe='')}", body=body)

    async def untag(self, name: str) -> list[protocol.CheckpointInfo]:
        """Remove the name of a checkpoint. Raises `InvalidRequest`, `NotFound`."""
        protocol.check_tag(name)
        return await self._send(list[protocol.CheckpointInfo], "DELETE", f"/tags/{quote(name, safe='')}")

    async def export(self, *, adapter: bool = False, policy: str = "") -> protocol.CheckpointInfo:
        """Write the present policy to the server's disk, between two batches. `policy` names one of several.

        Writes a plain Hugging Face folder, or with `adapter` its adapter alone as a PEFT folder. Raises
        `InvalidRequest` for the adapter of a policy without one.
        """
        body = build_request(protocol.ExportRequest, adapter=adapter, policy=policy)
        return await self._send(protocol.CheckpointInfo, "POST", "/exports", body=body, server_wait=CHECKPOINT_WAIT)

    async def session_code(self, role: protocol.Role = "viewer") -> protocol.SessionCode:
        """A one-time code that opens the page of the run within a minute: `SERVER/#code=CODE`."""
        body = protocol.SessionRequest(role=role)
        return await self._send(protocol.SessionCode, "POST", "/sessions", body=body)

    async def _read(self, view: type[T], path: str, **query: Any) -> T:
        """The answer to a read. Parameters that are None or empty are left out."""
        given = httpx.QueryParams({name: value for name, value in query.items() if value not in (None, "", [])})
        return await self._send(view, "GET", f"{path}?{given}" if given else path)

    async def _send(
        self, view: type[T], method: str, path: str, *, body: BaseModel | None = None, server_wait: float = 0.0
    ) -> T:
        answer = await self.connection.request(method, path, body=body, server_wait=server_wait)
        return TypeAdapter(view).validate_python(answer)

    async def close(self) -> None:
        """Close the connections."""
        await self.connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class Interrupted(SystemExit, KeyboardInterrupt):
    """Ctrl-C during a run. `except KeyboardInterrupt` catches it. A script that does not catch it ends with the message
    and status 1, as after `sys.exit(message)`, without a traceback. A prompt, or a notebook, gets a plain
    `KeyboardInterrupt`: `SystemExit` would end a prompt."""


def blocking(verb: Callable[Concatenate[AsyncSwarm, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Swarm, P], T]:
    """A method of the asynchronous client as a synchronous method with the same signature."""

    @wraps(verb)
    def run(self: Swarm, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(verb(self._client, *args, **kwargs))

    return run


def blocking_begin(
    verb: Callable[Concatenate[AsyncSwarm, P], Coroutine[Any, Any, AsyncEpisode]],
) -> Callable[Concatenate[Swarm, P], Episode]:
    """The same for a method that returns an episode."""

    @wraps(verb)
    def begin(self: Swarm, /, *args: P.args, **kwargs: P.kwargs) -> Episode:
        return Episode(self._loop.run(verb(self._client, *args, **kwargs)), self._loop.run)

    return begin


def blocking_run(
    verb: Callable[Concatenate[AsyncSwarm, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Swarm, P], T]:
    """The same for a method that runs agents. Ctrl-C aborts the live episodes, then raises `Interrupted`; SIGTERM, then
    `SystemExit`."""

    @wraps(verb)
    def run_agents(self: Swarm, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with raise_on_signals():
                return self._loop.run(verb(self._client, *args, **kwargs))
        except AgentJetError as error:  # The author of the script sees the message, under the line of the script.
            raise error.with_traceback(None) from None
        except KeyboardInterrupt:
            is_interactive = hasattr(sys, "ps1")
            raise (KeyboardInterrupt if is_interactive else Interrupted)(
                "interrupted: this client's live episodes were aborted (or end with their leases); "
                "finished training steps are kept"
            ) from None

    return run_agents


class Swarm:
    """A client of one run of a server for synchronous code. May be used from several threads. Close it, or use it as a
    context manager.

    Arguments and methods are those of `AsyncSwarm`. Ctrl-C in `train` and `evaluate` aborts the live episodes, then
    raises a `KeyboardInterrupt`; a script that does not catch it ends with a message. SIGTERM aborts them too, then
    raises `SystemExit`. A signal that comes twice within two seconds counts once. A child process makes its own client
    after `fork()`: one that was used before raises `RuntimeError` there.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        client_id: str | None = None,
        instance_id: str | None = None,
        retry: Retry | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        named = {"client_id": client_id, "instance_id": instance_id}
        self._use(AsyncSwarm(url, token, **named, retry=retry, transport=transport))

    def _use(self, client: AsyncSwarm) -> None:
        self._client, self._loop = client, LoopThread()
        self.url: str = client.url
        """The server's address."""

    def of_run(self, name: str, token: str | None = None) -> Swarm:
        """See `AsyncSwarm.of_run`."""
        swarm = Swarm.__new__(Swarm)
        swarm._use(self._client.of_run(name, token))
        return swarm

    begin = blocking_begin(AsyncSwarm.begin)
    episode = begin  # An `Episode` is a context manager.
    finish = blocking(AsyncSwarm.finish)
    abort = blocking(AsyncSwarm.abort)
    close_group = blocking(AsyncSwarm.close_group)
    train = blocking_run(AsyncSwarm.train)
    evaluate = blocking_run(AsyncSwarm.evaluate)
    sft = blocking_run(AsyncSwarm.sft)
    collect = blocking_run(AsyncSwarm.collect)
    episodes = blocking(AsyncSwarm.episodes)
    episode_tree = blocking(AsyncSwarm.episode_tree)
    group = blocking(AsyncSwarm.group)
    batches = blocking(AsyncSwarm.batches)
    batch = blocking(AsyncSwarm.batch)
    steps = blocking(AsyncSwarm.steps)
    evaluations = blocking(AsyncSwarm.evaluations)
    status = blocking(AsyncSwarm.status)
    health = blocking(AsyncSwarm.health)
    waiting = blocking(AsyncSwarm.waiting)
    job = blocking(AsyncSwarm.job)
    change_job = blocking(AsyncSwarm.change_job)
    start = blocking(AsyncSwarm.start)
    stop = blocking(AsyncSwarm.stop)
    cluster = blocking(AsyncSwarm.cluster)
    scale = blocking(AsyncSwarm.scale)
    runs = blocking(AsyncSwarm.runs)
    start_run = blocking(AsyncSwarm.start_run)
    end_run = blocking(AsyncSwarm.end_run)
    checkpoints = blocking(AsyncSwarm.checkpoints)
    checkpoint = blocking(AsyncSwarm.checkpoint)
    tag = blocking(AsyncSwarm.tag)
    untag = blocking(AsyncSwarm.untag)
    export = blocking(AsyncSwarm.export)
    session_code = blocking(AsyncSwarm.session_code)

    def all_episodes(self, **filters: Unpack[EpisodeFilters]) -> Iterator[EpisodeView]:
        """See `AsyncSwarm.all_episodes`."""
        return self._loop.iterate(self._client.all_episodes(**filters))

    def events(self, after: int = 0) -> Iterator[Event]:
        """See `AsyncSwarm.events`."""
        return self._loop.iterate(self._client.events(after))

    def close(self) -> None:
        """Close the connections and end the thread."""
        if self._loop.is_forked:  # The parent closes them.
            return
        if not self._loop.abandoned:
            self._loop.run(self._client.close())
        self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
