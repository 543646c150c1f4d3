"""`ProcessCompute` with ranks and replicas that are threads of this process and connect over real TCP.

Pinned here:
1. every rank gets every request, in order, as the same bytes; the answer of rank 0 counts, and an error of any;
2. the death of a rank ends its group and names the reason; `add` makes a new group and keeps the replicas;
3. ranks that disagree are ended, and so is a group whose rank does not answer;
4. `publish` reaches the replicas, but not for versions that are applied again; a learner that dies ends it;
5. settings that cannot be honoured are refused by name, with what would fit;
6. the work of fronts counts as that of the server: in the status, the metrics and the number of samplers;
7. removing a policy fails its requests with `PolicyRemoved` and ends its processes;
8. GPUs of ranks and first replicas are reserved before anything starts; if they cannot be had, nothing starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentjet.cli import server_process
from agentjet.compute import backend, ranks, samplers
from agentjet.compute.backend import Hosted, ProcessCompute
from agentjet.compute.fleet import FrontWork, Others, ReplicaWork, RoutedCompletion
from agentjet.compute.samplers import StepMeter, check_gpus, check_sampler_python, sampler_python
from agentjet.config import ComputeConfig, ModelConfig, OptimizerConfig, SamplerLimits, ServeConfig
from agentjet.errors import AgentJetError, CheckpointError, ComputeError, ConfigError, PolicyRemoved, WorkerDied
from agentjet.processes.guardian import Launch, ProcessEnd
from agentjet.processes.rpc import Answer, Link, Process, ProcessRequest, dial, encode, read
from agentjet.processes.supervisor import GpuGroup, LocalPlacement
from agentjet.types import CheckpointStamp, Op, PolicyId, Sampled, SamplerBounds, SamplingParams
from tests.cluster.fake_replica import INFO, publication
from tests.fakes import Clock

pytestmark = pytest.mark.anyio

POLICY = PolicyId()
Handler = Callable[[ProcessRequest], Any]
"""Returns the answer to a request, or raises it."""


class ThreadProcess:
    """A "process": a thread that connects to the gateway and answers requests."""

    pid, log_path = 0, Path()

    def __init__(self, environment: Mapping[str, str], handler: Handler) -> None:
        self.requests: list[ProcessRequest] = []
        self.ended: asyncio.Future[ProcessEnd] = asyncio.get_running_loop().create_future()
        self._handler = handler
        self._where = [environment[name] for name in Link.VARIABLES]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        address, name, secret = self._where
        try:
            self.connection = dial(address, name, secret.encode())
        except (OSError, ComputeError):  # The test is over.
            return
        with contextlib.suppress(EOFError, OSError), self.connection, self.connection.makefile("rb") as stream:
            while True:
                request = read(stream)
                self.requests.append(request)
                try:
                    answer: Any = Answer(request.id, self._handler(request))
                except AgentJetError as error:
                    answer = Answer(request.id, error=error)
                if request.op == "sample":
                    answer = [(request.id, answer.result)]
                if request.op != "cancel" and (request.op == "sample" or answer.result is not NotImplemented):
                    self.connection.sendall(encode(answer))

    @property
    def place(self) -> str:
        return f"thread {self._where[1]}"

    async def stop(self) -> None:
        self.end("was stopped")

    def end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(ProcessEnd(reason))
        with contextlib.suppress(AttributeError, OSError):  # It has not connected yet, or it closed already.
            self.connection.shutdown(2)


class ThreadLauncher:
    """Starts threads. `handlers` are by kind: "rank" or "replica"."""

    def __init__(self, gpus: int | None = None) -> None:
        self.gpus = gpus
        self.running: dict[str, ThreadProcess] = {}
        self.all: dict[str, ThreadProcess] = {}
        self.special: dict[str, Handler] = {}
        """Handlers of processes by name."""
        self.programs: LocalPlacement | None = None
        """Starts the replicas as processes."""
        self.version = 0
        self.reserved: list[GpuGroup] = []
        self.refusal: ComputeError | None = None

    async def num_gpus(self) -> int | None:
        return self.gpus

    async def reserve(self, groups: Sequence[GpuGroup]) -> None:
        self.reserved += groups
        if self.refusal is not None:
            raise self.refusal

    async def release(self, names: Set[str]) -> None:
        self.reserved = [group for group in self.reserved if group.name not in names]

    async def start(self, launch: Launch) -> Process:
        name = launch.name
        if self.programs is not None and "replica" in name:
            return await self.programs.start(launch)
        handler = self.special.get(name, self.rank if "rank" in name else self.replica)
        process = self.running[name] = self.all[name] = ThreadProcess(launch.environment, handler)
        process.ended.add_done_callback(lambda _: self.running.pop(name))
        return process

    async def close(self) -> None:
        for process in list(self.running.values()):
            await process.stop()

    def kill(self, name: str) -> None:
        """As SIGKILL."""
        self.running[name].end("ended by SIGKILL")

    def ops(self, name: str) -> list[str]:
        return [request.op for request in self.all[name].requests]

    def rank(self, request: ProcessRequest) -> Any:
        if request.op == "publish":
            self.version, wanted = request.args
            return publication(self.version) if wanted else None
        fixed = {"rendezvous": "127.0.0.1:1", "add": INFO, "optim_step": {"optim/steps": 1.0}}
        return fixed.get(request.op, CheckpointStamp(0, "digest", 0) if request.op in ("save", "load") else None)

    def replica(self, request: ProcessRequest) -> Any:
        if request.op == "load":
            return "127.0.0.1:9", request.args[2].limits
        if request.op == "adopt":
            return list(request.args[0].probe_logprobs)
        return Sampled((7,), (-0.5,), self.version, "stop") if request.op == "sample" else None


@asynccontextmanager
async def cluster(tmp_path: Path, gpus: int | None = None) -> AsyncIterator[tuple[ProcessCompute, ThreadLauncher]]:
    launcher = ThreadLauncher(gpus)
    config = ServeConfig.model_validate({"server": {"data_dir": tmp_path / "d"}})
    compute = ProcessCompute(config, lambda host, address, folder: launcher)
    try:
        async with asyncio.timeout(60):
            yield compute, launcher
    finally:
        await compute.close()


def settings(**changed: Any) -> ComputeConfig:
    values = {"backend": "cluster", "ranks": 2, "sampler_python": "/bin/sh", **changed}
    return ComputeConfig.model_validate(values)


async def sampled(compute: ProcessCompute) -> list[Sampled]:
    return [piece async for piece in compute.sample(POLICY, [1, 2], SamplingParams(max_tokens=4))]


async def step(compute: ProcessCompute) -> dict[str, float]:
    return await compute.optim_step(Op.of(POLICY, 0), OptimizerConfig())


async def test_requests_reach_all_ranks_and_samples_reach_replicas(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (compute, launcher):
        assert await compute.add(POLICY, ModelConfig(), settings=settings()) == INFO
        metrics = await compute.publish(POLICY, 0)
        assert metrics["sampler/replicas"] == 1
        assert [piece.tokens for piece in await sampled(compute)] == [(7,)]
        assert await step(compute) == {"optim/steps": 1.0}
        assert launcher.ops("default/policy/rank-0.1") == ["rendezvous", "join", "add", "publish", "optim_step"]
        assert launcher.ops("default/policy/rank-1.1") == ["join", "add", "publish", "optim_step"]
        kinds = [(one.kind, one.place) for one in compute.processes(POLICY)]
        assert kinds[:2] == [("rank", f"thread default/policy/rank-{rank}.1") for rank in (0, 1)]
        assert kinds[2][0] == "replica"


async def test_versions_that_are_applied_again_do_not_reach_the_samplers(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (compute, launcher):
        await compute.add(POLICY, ModelConfig(), settings=settings())
        await compute.publish(POLICY, 3)
        assert await compute.publish(POLICY, 1, to_samplers=False) == {}
        await compute.publish(POLICY, 4, in_turns=True)
        adopted = [
            one.args[0].version for one in launcher.all["default/policy/replica-1"].requests if one.op == "adopt"
        ]
        assert adopted == [3, 4]


async def test_a_rank_that_dies_ends_its_group_and_the_next_group_keeps_the_replicas(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (compute, launcher):
        await compute.add(POLICY, ModelConfig(), settings=settings())
        await compute.publish(POLICY, 0)
        launcher.kill("default/policy/rank-1.1")
        died = await compute.died([POLICY])
        assert died.during == str(POLICY) and "rank-1.1 ended by SIGKILL" in str(died)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await step(compute)
        assert (await sampled(compute))[0].tokens == (7,), "the replicas go on"
        await compute.add(POLICY, ModelConfig(), settings=settings())
        assert "default/policy/rank-0.1" not in launcher.running and "default/policy/rank-0.2" in launcher.running
        assert await step(compute) == {"optim/steps": 1.0}
        assert [name for name in launcher.all if "replica" in name] == ["default/policy/replica-1"]
        await compute.add(POLICY, ModelConfig(), settings=settings(tensor_parallel=1, samplers=2))
        await compute.publish(POLICY, 1)
        assert [name for name in launcher.running if "rank" in name] == [
            "default/policy/rank-0.1",
            "default/policy/rank-1.1",
        ], "other settings begin with nothing"


async def test_an_error_that_all_ranks_raise_leaves_the_group(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (compute, launcher):

        def damaged(request: ProcessRequest) -> Any:
            if request.op == "load":
                raise CheckpointError("damaged")
            return launcher.rank(request)

        launcher.special = {f"default/policy/rank-{rank}.1": damaged for rank in (0, 1)}
        await compute.add(POLICY, ModelConfig(), settings=settings())
        with pytest.raises(CheckpointError, match="damaged"):
            await compute.load(POLICY, tmp_path)
        assert await step(compute) == {"optim/steps": 1.0}


@pytest.mark.parametrize("other", ["succeeds", "never answers"])
async def test_ranks_that_do_not_agree_are_ended(tmp_path: Path, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "ANSWER_SECONDS", 0.05)
    async with cluster(tmp_path) as (compute, launcher):

        def alone(request: ProcessRequest) -> Any:
            if request.op == "optim_step":
                raise ComputeError("only here")
            return launcher.rank(request)

        def silent(request: ProcessRequest) -> Any:
            return NotImplemented if request.op == "optim_step" else launcher.rank(request)

        launcher.special = {"default/policy/rank-1.1": alone}
        if other == "never answers":
            launcher.special["default/policy/rank-0.1"] = silent
        await compute.add(POLICY, ModelConfig(), settings=settings())
        with pytest.raises(ComputeError, match="only here"):
            await step(compute)
        assert "rank-1.1 failed alone" in str(await compute.died([POLICY]))


async def test_a_learner_that_dies_during_a_publish_ends_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (compute, launcher):
        adopting = threading.Event()

        def stuck(request: ProcessRequest) -> Any:
            if request.op == "adopt" and request.args[0].version == 1:
                adopting.set()
                return NotImplemented
            return launcher.replica(request)

        launcher.special = {"default/policy/replica-1": stuck}
        await compute.add(POLICY, ModelConfig(), settings=settings())
        await compute.publish(POLICY, 0)
        publishing = asyncio.create_task(compute.publish(POLICY, 1))
        await asyncio.to_thread(adopting.wait)
        launcher.kill("default/policy/rank-0.1")
        with pytest.raises(WorkerDied, match=r"rank-0\.1 ended by SIGKILL"):
            await publishing


async def test_removal_fails_requests_and_ends_processes(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (compute, launcher):
        asked = threading.Event()

        def silent(request: ProcessRequest) -> Any:
            if request.op == "optim_step":
                asked.set()
                return NotImplemented
            return launcher.rank(request)

        launcher.special = {f"default/policy/rank-{rank}.1": silent for rank in (0, 1)}
        await compute.add(POLICY, ModelConfig(), settings=settings())
        stepping = asyncio.create_task(step(compute))
        await asyncio.to_thread(asked.wait)
        await compute.remove(POLICY)
        with pytest.raises(PolicyRemoved):
            await stepping
        assert not launcher.running and compute.processes(POLICY) == []
        with pytest.raises(PolicyRemoved):
            await sampled(compute)
        await compute.remove(POLICY)


async def test_a_model_that_a_replica_does_not_hold_is_refused(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (compute, launcher):

        def refuse(request: ProcessRequest) -> Any:
            raise ConfigError("vLLM does not hold this model")

        launcher.special = {"default/policy/replica-1": refuse}
        with pytest.raises(ConfigError, match="does not hold"):
            await compute.add(POLICY, ModelConfig(), settings=settings())
            await compute.publish(POLICY, 0)


@pytest.mark.parametrize(
    ("program", "says"), [("/bin/echo", "exit code 0.*'-m agentjet"), (sys.executable, "environment .* lacks vllm")]
)
async def test_a_program_that_runs_no_replica_is_refused(tmp_path: Path, program: str, says: str) -> None:
    async with cluster(tmp_path) as (compute, launcher):
        launcher.programs = LocalPlacement(list)
        with pytest.raises(ConfigError, match=rf"{says}.*compute\.sampler_python"):
            await compute.add(POLICY, ModelConfig(), settings=settings(sampler_python=program))
            await compute.publish(POLICY, 0)
        await launcher.programs.close()


async def test_replicas_that_cannot_start_end_a_start_at_once(tmp_path: Path) -> None:
    """The ranks may load a model for minutes."""
    async with cluster(tmp_path) as (compute, launcher):
        loading = threading.Event()

        def load(request: ProcessRequest) -> Any:
            return loading.wait(30) if request.op == "add" else launcher.rank(request)

        launcher.special = {f"default/policy/rank-{rank}.1": load for rank in range(2)}
        launcher.programs = LocalPlacement(list)
        try:
            with pytest.raises(ConfigError, match="exit code 0"):
                await compute.add(POLICY, ModelConfig(), settings=settings(sampler_python="/bin/echo"))
            assert not loading.is_set()
        finally:
            loading.set()
            await launcher.programs.close()


async def test_a_refusal_quotes_the_first_error_of_the_replica_s_log(tmp_path: Path) -> None:
    cause = "RuntimeError: not enough shared memory: 160 MiB required, 64 MiB free"
    async with cluster(tmp_path) as (compute, launcher):

        def refuse(request: ProcessRequest) -> Any:
            log = tmp_path / "d" / "logs" / "cluster" / "default-policy-replica-1.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"(EngineCore pid=8) ERROR 11-24 04:56:03 [core.py:1] {cause}\n")
            raise ConfigError("vLLM cannot hold the model (RuntimeError: Engine core initialization failed)")

        launcher.special = {"default/policy/replica-1": refuse}
        with pytest.raises(ConfigError, match=r"shared memory in /dev/shm .*64 MiB free.*--shm-size"):
            await compute.add(POLICY, ModelConfig(), settings=settings())
            await compute.publish(POLICY, 0)


@pytest.mark.parametrize(
    ("asked", "free", "message"),
    [
        ({"samplers": 9}, None, "samplers = 9: at most 8 replicas fit the CPU cores of this machine, one for each"),
        ({"ranks": 4, "samplers": 4}, 6, "need 8 GPUs, and 6 are free; would fit: ranks = 4 with samplers = 2"),
        ({"ranks": 2, "samplers": 1, "tensor_parallel": 4}, 5, "would fit: ranks = 1 with samplers = 1"),
        ({"ranks": 1, "samplers": 1}, 1, "at least 2 are needed.*backend = 'embedded'"),
        ({"ranks": 1, "tensor_parallel": 2}, None, "tensor_parallel = 2 needs GPUs"),
        (
            {"ranks": 4, "samplers": 4, "colocated": True},
            3,
            "4 GPUs, and 3 are free; would fit: ranks = 3 with samplers = 3",
        ),
    ],
)
def test_too_few_gpus_are_refused_with_what_would_fit(
    asked: dict[str, int], free: int | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    with pytest.raises(ConfigError, match=message):
        check_gpus(POLICY, settings(**asked), free, ModelConfig())
    check_gpus(POLICY, settings(ranks=2, samplers=2), 4, ModelConfig())
    check_gpus(POLICY, settings(ranks=4, samplers=2, tensor_parallel=2, colocated=True), 4, ModelConfig())
    check_gpus(POLICY, settings(samplers="1..9"), None, ModelConfig())
    check_gpus(POLICY, settings(samplers=9, address="auto"), None, ModelConfig())


@pytest.mark.parametrize(
    ("python", "said"), [("/nowhere", "is not a program"), ("/bin/echo", "is not a Python"), ("/bin/false", "a Python")]
)
def test_a_server_without_a_python_for_replicas_ends_before_it_loads(tmp_path: Path, python: str, said: str) -> None:
    server = {"data_dir": str(tmp_path / "d"), "port": 0}
    config = ServeConfig.model_validate({"server": server, "compute": settings(sampler_python=python).model_dump()})
    with pytest.raises(ConfigError, match=rf"{python} .*{said}.*compute\.sampler_python.*'{python}'"):
        server_process.run(config)
    assert not (tmp_path / "d" / "runs").exists()
    check_sampler_python(settings(sampler_python=sys.executable))
    check_sampler_python(settings(sampler_python=python, address="auto"))  # Other machines may have it.


async def test_settings_that_cannot_be_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agentjet cluster install.*compute\.sampler_python"):
        sampler_python(settings(sampler_python=str(tmp_path / "nothing")))
    async with cluster(tmp_path) as (compute, _):
        with pytest.raises(ConfigError, match=r"compute\.host = '192\.0\.2\.1' is not an address of this machine"):
            await compute.add(POLICY, ModelConfig(), settings=settings(host="192.0.2.1"))
        with pytest.raises(ConfigError, match=r"model\.device = 'cuda' and there are no GPUs"):
            await compute.add(POLICY, ModelConfig(device="cuda"), settings=settings())
    with pytest.raises(ValueError, match="sharding = 'sharded' with ranks = 1"):
        ComputeConfig(backend="cluster", sharding="sharded")
    for changed, message in (
        ({"address": "auto"}, "with an address"),
        ({"samplers": "1..2"}, "with samplers = '1..2'"),
    ):
        with pytest.raises(ValueError, match=f"colocated = true {message}"):
            settings(colocated=True, **changed)
    config = {"compute": {"backend": "cluster"}, "policies": {"a": {"worker": "x"}}}
    with pytest.raises(ValueError, match=r"policies\.a\.worker = 'x'"):
        ServeConfig.model_validate(config)


async def test_colocated_replicas_are_suspended_while_the_ranks_learn_or_are_replaced(tmp_path: Path) -> None:
    replica = "default/policy/replica-1"
    async with cluster(tmp_path, gpus=2) as (compute, launcher):
        await compute.add(POLICY, ModelConfig(), settings=settings(colocated=True))
        await compute.publish(POLICY, 0)
        assert await sampled(compute)
        for _ in range(2):
            await step(compute)
        assert launcher.ops(replica) == ["load", "adopt", "sample", "suspend"]
        with pytest.raises(ConfigError, match=r"cannot be scaled with compute\.colocated"):
            await compute.scale(POLICY, SamplerBounds(2, 2))
        await compute.publish(POLICY, 1)
        assert await sampled(compute)
        launcher.kill("default/policy/rank-1.1")
        await compute.died([POLICY])
        await compute.add(POLICY, ModelConfig(), settings=settings(colocated=True))
        assert launcher.ops(replica)[4:] == ["adopt", "sample", "suspend"]
        await compute.publish(POLICY, 1)
        assert await sampled(compute)


async def test_the_gpus_of_a_policy_are_reserved_together(tmp_path: Path) -> None:
    group_of_ranks, replicas = GpuGroup("ranks of default/policy", 2, 1), GpuGroup("replicas of default/policy", 1, 2)
    async with cluster(tmp_path, gpus=8) as (compute, launcher):
        launcher.refusal = ComputeError("the cluster lacks free GPUs")
        with pytest.raises(ComputeError, match="lacks free GPUs"):
            await compute.add(POLICY, ModelConfig(), settings=settings(samplers="2..3", tensor_parallel=2))
        assert not launcher.all and not launcher.reserved and not compute.policies
        launcher.refusal = None
        await compute.add(POLICY, ModelConfig(), settings=settings(samplers="2..3", tensor_parallel=2))
        assert launcher.reserved == [group_of_ranks, replicas, replicas]
        await compute.remove(POLICY)
        assert not launcher.reserved


async def test_samplers_are_scaled_within_the_gpus(tmp_path: Path) -> None:
    async with cluster(tmp_path, gpus=4) as (compute, _):
        await compute.add(POLICY, ModelConfig(), settings=settings())
        with pytest.raises(ConfigError, match="samplers = 4: at most 2 replicas fit the free GPUs, 1 for each"):
            await compute.scale(POLICY, SamplerBounds(4, 4))
        await compute.scale(POLICY, SamplerBounds(2, 2))
        await compute.publish(POLICY, 0)
        assert len([one for one in compute.processes(POLICY) if one.kind == "replica"]) == 2


async def test_samplers_are_scaled_within_the_cores_without_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    async with cluster(tmp_path) as (compute, _):
        await compute.add(POLICY, ModelConfig(), settings=settings())
        with pytest.raises(ConfigError, match="samplers = 50: at most 3 replicas fit the CPU cores of this machine"):
            await compute.scale(POLICY, SamplerBounds(50, 50))
        await compute.scale(POLICY, SamplerBounds(3, 50))


async def test_the_work_of_fronts_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "OBSERVE_SECONDS", 3600)  # The test observes.
    async with cluster(tmp_path) as (compute, _):
        changed: list[PolicyId] = []
        compute.on_replicas = changed.append
        await compute.add(POLICY, ModelConfig(), settings=settings(samplers="1..8"))
        assert compute.replicas(POLICY).replicas == () and compute.replicas(POLICY).failure is None
        await compute.publish(POLICY, 3)
        facts, name = compute.replicas(POLICY), "default/policy/replica-1"
        assert [(one.name, one.address, one.version, one.is_ready) for one in facts.replicas] == [
            (name, "127.0.0.1:9", 3, True)
        ]
        assert set(changed) == {POLICY} and (facts.replicas[0].num_places, facts.routes) == (80, INFO.routes)
        compute.heard(1, {POLICY: FrontWork(70, 5, 2, {name: ReplicaWork(60, 1, 9)})})
        compute.heard(2, {POLICY: FrontWork(0, 5, 1, {name: ReplicaWork(3, 1, 9)})})
        compute.heard(3, {})
        found, (*_, replica) = compute.samplers(POLICY), compute.processes(POLICY)
        assert found is not None and (found.running, found.waiting, replica.completions) == (63, 70, 63)
        assert [compute.others(front)[POLICY][name] for front in (1, 2, 3)] == [
            Others(3, may_risk=True),
            Others(60, may_risk=False),
            Others(63, may_risk=False),
        ]
        hosted = compute.policies[POLICY]
        assert hosted.samplers is not None
        for _ in range(samplers.RISE_SECONDS):
            await compute.observe(POLICY, hosted, hosted.samplers)
        assert hosted.samplers.replicas.fleet.count == min(3, samplers.most_on_cpus(hosted.settings))
        for _ in range(2):
            compute.front_gone(1)
        assert (found := compute.samplers(POLICY)) is not None and (found.running, found.waiting) == (3, 0)
        assert compute.others(2)[POLICY][name] == Others(0, may_risk=True)
        assert (await compute.publish(POLICY, 4))["sampler/resumed"] == 3
        compute.heard(2, {POLICY: FrontWork(faults={name: "reported wrong routes"})})
        assert name not in {one.name for one in compute.replicas(POLICY).replicas}
        await compute.remove(POLICY)
        assert isinstance(compute.replicas(POLICY).failure, PolicyRemoved)
        compute.heard(2, {POLICY: FrontWork()})
        assert compute.others(2) == {}


async def test_the_number_of_samplers_follows_the_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "OBSERVE_SECONDS", 3600)  # The test observes.
    monkeypatch.setattr(samplers, "FALL_SECONDS", 20)
    async with cluster(tmp_path, gpus=6) as (compute, launcher):
        release = threading.Event()

        def hold(request: ProcessRequest) -> Any:
            if request.op == "sample":
                release.wait()
            return launcher.replica(request)

        launcher.special = {f"default/policy/replica-{number}": hold for number in range(1, 9)}
        await compute.add(POLICY, ModelConfig(), settings=settings(samplers="2..8"))
        await compute.publish(POLICY, 0)
        hosted = compute.policies[POLICY]
        assert hosted.samplers is not None

        async def wait(seconds: int) -> int:
            for _ in range(seconds):
                await compute.observe(POLICY, hosted, hosted.samplers)
            found = compute.samplers(POLICY)
            assert found is not None and str(found.bounds) == "2..8"
            return found.wanted

        assert await wait(30) == 2
        calls = [asyncio.create_task(sampled(compute)) for _ in range(3 * 64)]
        await asyncio.sleep(0)
        assert await wait(9) == 2 and await wait(1) == 3, "10 s of more completions"
        calls += [asyncio.create_task(sampled(compute)) for _ in range(9 * 64)]
        await asyncio.sleep(0)
        assert await wait(10) == 4, "6 GPUs are enough for 2 ranks and 4 replicas"
        found = compute.samplers(POLICY)
        assert found is not None and found.running + found.waiting == 12 * 64
        launcher.kill("default/policy/rank-1.1")
        await compute.died([POLICY])
        release.set()
        await asyncio.gather(*calls)
        assert await wait(60) == 4, "a pause while ranks are replaced does not count"
        await compute.add(POLICY, ModelConfig(), settings=settings(samplers="2..8"))
        assert await wait(19) == 4 and await wait(1) == 2
        metrics = await compute.publish(POLICY, 1)
        assert metrics["sampler/replicas_wanted"] == 2 and metrics["sampler/waiting"] == 0
        await compute.scale(POLICY, SamplerBounds(3, 3))
        assert {one.wanted for one in [compute.samplers(POLICY)] if one is not None} == {3}


async def test_a_replica_reports_how_much_it_samples_at_a_time(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (compute, launcher):
        report = lambda request: ("", SamplerLimits(4, 4096)) if request.op == "load" else launcher.replica(request)  # noqa: E731
        launcher.special = {"default/policy/replica-1": report}
        await compute.add(POLICY, ModelConfig(), settings=settings())
        await compute.publish(POLICY, 0)
        await compute.scale(POLICY, SamplerBounds(1, 8))
        samplers = compute.policies[POLICY].samplers
        assert samplers is not None and samplers.autoscaler.observe(1, 5) == 1
        assert [samplers.autoscaler.observe(1, 9) for _ in range(10)][-1] == 3, "9 completions, 4 for each"
        (replica,) = samplers.replicas.fleet.replicas
        works = [RoutedCompletion(np.array([number], np.int32)) for number in range(6)]
        for work in works[:5]:
            assert replica.load.has_place(work)
            replica.load.add(work)
        assert not replica.load.has_place(works[5]), "a quarter more than it samples"


async def test_bounds_that_change_while_the_autoscaler_asks_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "OBSERVE_SECONDS", 3600)
    async with cluster(tmp_path, gpus=6) as (compute, _):
        await compute.add(POLICY, ModelConfig(), settings=settings(samplers="1..4"))
        hosted = compute.policies[POLICY]
        assert hosted.samplers is not None
        monkeypatch.setattr(hosted.samplers.autoscaler, "observe", lambda *_: 4)
        most = compute._most_samplers

        async def slow(policy: Hosted) -> int:
            monkeypatch.setattr(compute, "_most_samplers", most)
            await compute.scale(POLICY, SamplerBounds(2, 2))
            return await most(policy)

        monkeypatch.setattr(compute, "_most_samplers", slow)
        await compute.observe(POLICY, hosted, hosted.samplers)
        assert {one.wanted for one in [compute.samplers(POLICY)] if one is not None} == {2}


def test_the_meters_measure_overlap_and_idle_time() -> None:
    clock = Clock(0.0)
    meter = StepMeter(clock)
    for _ in range(10):  # Ten seconds of sampling, then ten of learning, half of which is sampling.
        clock.advance(1.0)
        meter.received(8)
    meter.waiting += [4, 1]
    meter.start_learning()
    for _ in range(5):
        clock.advance(2.0)
        meter.received(5)  # At most 0.2 s a token.
    metrics = meter.finish()
    assert metrics["sampler/overlap"] == pytest.approx(0.5) and metrics["sampler/waiting"] == 2.5
    assert metrics["learner/idle"] == pytest.approx(0.5) and metrics["sampler/idle"] == pytest.approx(0.25)
    clock.advance(1.0)
    assert meter.finish() == {"sampler/idle": 1.0}


async def test_the_addresses_of_a_machine_divide_its_gpus(tmp_path: Path) -> None:
    compute = ProcessCompute(ServeConfig.model_validate({"server": {"data_dir": tmp_path / "d"}}))
    one, two = [compute._supervisor(host, "") for host in ("127.0.0.1", "localhost")]
    assert one is not two and one.placement is two.placement
    await compute.close()
