"""The server's half of the backends: for each policy its ranks and its samplers. No torch.

`compute.backend` chooses for each policy:

* embedded: one rank, the worker, also samples. Policies of one worker share it.
* cluster: ranks for this policy alone, and replicas that have a copy of the weights. Replicas sample while the ranks
  learn, and while dead ranks are replaced: `add` keeps replicas of a policy whose model and settings are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from agentjet.compute.fleet import FrontWork, Others, RoutingFacts
from agentjet.compute.protocol import CAPABILITIES, EMBEDDED, Capabilities, LossSpec, Outputs
from agentjet.compute.ranks import COMPUTE_VARIABLES, STATES, Ranks, Room
from agentjet.compute.samplers import (
    Autoscaler,
    Samplers,
    StepMeter,
    check_gpus,
    check_routes,
    check_samplers,
    gpus_needed,
    most_on_cpus,
    sampler_python,
)
from agentjet.compute.weights import Publication
from agentjet.config import ComputeConfig, ModelConfig, OptimizerConfig, ServeConfig
from agentjet.errors import AgentJetError, ComputeError, ConfigError, PolicyRemoved, WorkerDied
from agentjet.processes.guardian import Launch
from agentjet.processes.rpc import Peer, uninterrupted
from agentjet.processes.supervisor import (
    GpuGroup,
    LocalPlacement,
    Placement,
    RayPlacement,
    Supervisor,
    Watchdog,
    first_of,
)
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import (
    WAITS_FOR_BATCH,
    CheckpointStamp,
    ModelInfo,
    Op,
    PolicyId,
    ProcessStatus,
    Sampled,
    SamplerBounds,
    SamplersStatus,
    SamplingParams,
    TokenScore,
)

log = logging.getLogger(__name__)

WORKER_VARIABLES = {
    **COMPUTE_VARIABLES,
    "GLIBC_TUNABLES": f"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={2**40}",
}
"""Environment of a worker. glibc keeps freed memory for the next batch (`rank.Heap`): new pages cost a virtual
machine up to a third of a step.
"""
RANK_COMMAND = (sys.executable, "-P", "-m", "agentjet.compute")
"""The program of every rank. Its argument is `server.hook_timeout`."""
OBSERVE_SECONDS = 1.0
DEATH_SECONDS = 5.0
"""Time in which the death of a learner is noticed whose weights could not be fetched."""
STARTS = "starts"


@dataclass(eq=False)
class Hosted:
    """A policy from `add` to `remove`."""

    model: ModelConfig
    settings: ComputeConfig
    room: Room
    ranks: Ranks
    samplers: Samplers | None = None
    """None if the rank samples, too."""
    num_groups: int = 1
    """Groups of ranks started so far."""
    rank_state: str = ""
    """State of the ranks while they have no request."""

    @property
    def is_learning(self) -> bool:
        """True if the ranks do something, or are replaced. Calls may be held."""
        return self.ranks.died.done() or bool(self.ranks.request or self.rank_state)

    @property
    def num_gpus(self) -> int:
        """GPUs that its processes need, also those that are being replaced. Those of a worker are not counted."""
        if self.samplers is None:
            return 0
        return self.room.gpus * gpus_needed(self.settings, self.settings.ranks, self.samplers.replicas.fleet.count)


def local_or_ray(host: str, address: str, log_folder: Path) -> Placement:
    """Returns the placement of a `compute.address`. Raises `ConfigError` if Ray is needed and missing."""
    return RayPlacement(host, address, log_folder) if address else LocalPlacement()


class ProcessCompute:
    """Implements `Compute` with processes."""

    def __init__(
        self, config: ServeConfig, make_placement: Callable[[str, str, Path], Placement] = local_or_ray
    ) -> None:
        self._config = config
        self._make_placement = make_placement
        self._log_folder = config.server.data_dir / "logs" / "cluster"
        self._supervisors: dict[tuple[str, str], Supervisor] = {}
        """By `compute.address` and `compute.host`."""
        self._local: Placement | None = None
        """That of all supervisors of this machine, whose GPUs it divides."""
        self._workers: dict[str, Ranks] = {}
        """The workers that new policies get, by name."""
        self.policies: dict[PolicyId, Hosted] = {}
        self._autoscaling: asyncio.Task[None] | None = None
        self.on_replicas: Callable[[PolicyId], None] = lambda policy: None
        """Called at each change of the replicas of a policy: fronts need `replicas` again. Often several in a row."""

    def capabilities(self, settings: ComputeConfig) -> Capabilities:
        return CAPABILITIES[settings.backend]

    async def add(
        self, policy: PolicyId, model: ModelConfig, *, worker: str = "", settings: ComputeConfig = EMBEDDED
    ) -> ModelInfo:
        if (hosted := self.policies.get(policy)) is not None and hosted.settings.backend != settings.backend:
            await self.remove(policy)
        if settings.backend == "embedded":
            return await self._add_to_worker(policy, model, worker, settings)
        return await self._add_ranks(policy, model, settings)

    async def remove(self, policy: PolicyId) -> None:
        if (hosted := self.policies.pop(policy, None)) is None:
            return
        if hosted.samplers is None:
            await self._leave(policy, hosted.ranks)
        else:
            await asyncio.gather(hosted.samplers.close(), hosted.ranks.close())
            await hosted.room.supervisor.placement.release({f"ranks of {policy}", f"replicas of {policy}"})

    def sample(
        self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Sampled, None]:
        hosted = self._hosted(policy)
        if hosted.samplers is not None:
            return hosted.samplers.sample(token_ids, params)
        return hosted.ranks.sample(policy, np.asarray(token_ids, np.int32), params)

    async def score(self, policy: PolicyId, token_ids: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        if (samplers := self._hosted(policy).samplers) is not None:
            return await samplers.replicas.score(token_ids, num_likeliest)
        tokens = np.asarray(token_ids, np.int32)
        return cast(list[TokenScore], await self._ask("score", policy, tokens, num_likeliest))

    async def load_batch(self, policy: PolicyId, batch: TrainingBatch) -> None:
        await self._hosted(policy).ranks.load_batch(policy, batch)

    async def forward_backward(self, op: Op, batch_id: int, loss: LossSpec) -> Outputs:
        await self._start_learning(op.policy_id)
        return cast(Outputs, await self._ask("forward_backward", op.policy_id, op, batch_id, loss))

    async def optim_step(self, op: Op, optimizer: OptimizerConfig) -> dict[str, float]:
        await self._start_learning(op.policy_id)
        return cast(dict[str, float], await self._ask("optim_step", op.policy_id, op, optimizer))

    async def publish(
        self, policy: PolicyId, version: int, *, to_samplers: bool = True, in_turns: bool = False
    ) -> Mapping[str, float]:
        hosted = self._hosted(policy)
        ranks, samplers = hosted.ranks, hosted.samplers
        if samplers is None:
            await ranks.ask("publish", policy, version)
            return {}
        publication: Publication | None = await ranks.ask("publish", policy, version, to_samplers)
        if publication is None:
            return {}
        adoption = asyncio.create_task(samplers.replicas.fleet.publish(publication, in_turns=in_turns))
        hosted.rank_state = "waits until the replicas have the weights"
        try:
            await first_of(adoption, ranks.died)
            if adoption.done() and isinstance(adoption.exception(), ComputeError):
                await first_of(ranks.died, timeout=DEATH_SECONDS)
            if ranks.died.done() and not (adoption.done() and adoption.exception() is None):
                raise copy.copy(ranks.died.result())  # The weights cannot be fetched from a rank that died.
            adoption.result()
        finally:
            hosted.rank_state = ""
            adoption.cancel()
            await asyncio.gather(adoption, return_exceptions=True)
        return {**samplers.metrics(), **samplers.meter.finish()}

    async def save(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        return cast(CheckpointStamp, await self._ask("save", policy, path))

    async def load(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        return cast(CheckpointStamp, await self._ask("load", policy, path))

    async def export(self, policy: PolicyId, path: Path, *, adapter: bool = False) -> None:
        await self._ask("export", policy, path, adapter)

    async def died(self, policies: Sequence[PolicyId]) -> WorkerDied:
        hosted = [self._hosted(policy) for policy in policies]
        ends = {one.ranks.died for one in hosted}
        ends |= {one.samplers.replicas.fleet.failed for one in hosted if one.samplers is not None}
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    def processes(self, policy: PolicyId) -> list[ProcessStatus]:
        hosted = self.policies.get(policy)
        if hosted is None:
            return []
        ranks, samplers, place = hosted.ranks, hosted.samplers, hosted.room.supervisor.place
        if samplers is None:
            at = "" if ranks.has_ended else place(ranks.names[0])
            state = "running" if at else "starting or ended"
            return [ProcessStatus("worker", "worker", state, at, work=ranks.work)]
        found: list[ProcessStatus] = []
        if not ranks.died.done():
            state = STATES.get(ranks.request, ranks.request or hosted.rank_state or WAITS_FOR_BATCH)
            is_ready = hosted.rank_state != STARTS and ranks.request != "load"
            found = [ProcessStatus(name, "rank", state, place=place(name), is_ready=is_ready) for name in ranks.names]
        return [*found, *(replace(one, place=place(one.name)) for one in samplers.replicas.fleet.status())]

    def samplers(self, policy: PolicyId) -> SamplersStatus | None:
        hosted = self.policies.get(policy)
        if hosted is None or hosted.samplers is None:
            return None
        samplers = hosted.samplers
        bounds, count = samplers.autoscaler.bounds, samplers.replicas.fleet.count
        return SamplersStatus(bounds, count, running=samplers.replicas.num_running, waiting=samplers.num_waiting)

    async def scale(self, policy: PolicyId, bounds: SamplerBounds) -> None:
        hosted = self.policies.get(policy)
        if hosted is None:
            raise ConfigError(f"the policy {policy} is not loaded, so it has no samplers to scale: start it first")
        if hosted.samplers is None:
            raise ConfigError(
                "compute.backend = 'embedded': one worker process samples and learns, so there are no replicas to "
                "scale; restart the server with compute.backend = 'cluster'"
            )
        if hosted.settings.colocated:
            raise ConfigError(
                "samplers cannot be scaled with compute.colocated: replicas share the GPUs of the ranks. Change "
                "compute.samplers, and start the server again"
            )
        check_samplers(bounds, await self._most_samplers(hosted), hosted.settings.tensor_parallel * hosted.room.gpus)
        hosted.samplers.autoscaler = Autoscaler(bounds, hosted.samplers.autoscaler.max_concurrent)
        fleet = hosted.samplers.replicas.fleet
        fleet.scale(bounds.clamp(fleet.count))

    # ---- fronts, which sample without this process -------------------------------------------------------------------

    def replicas(self, policy: PolicyId) -> RoutingFacts:
        """Returns the replicas of a policy, for fronts. A policy without replicas has the failure `PolicyRemoved`."""
        hosted = self.policies.get(policy)
        if hosted is None or hosted.samplers is None:
            return RoutingFacts(policy, failure=PolicyRemoved(f"policy {policy} has no replicas: add it first"))
        return hosted.samplers.replicas.fleet.facts()

    def heard(self, front: int, report: Mapping[PolicyId, FrontWork]) -> None:
        """Take the report of a front on its work (`RemoteSamplers.report`).

        A front must report more often than twice in `server.worker_timeout`: the watchdog of a replica counts no older
        work.
        """
        for policy, hosted in self.policies.items():
            if hosted.samplers is not None:
                hosted.samplers.heard(front, report.get(policy, FrontWork()))

    def front_gone(self, front: int) -> None:
        """Forget the work of a front that ended. Idempotent."""
        for hosted in self.policies.values():
            if hosted.samplers is not None:
                hosted.samplers.front_gone(front)

    def others(self, front: int) -> dict[PolicyId, dict[str, Others]]:
        """Returns the work of other processes at each replica, by policy, for `RemoteSamplers.others`.

        A front needs it after each report: work that lost a replica waits for it.
        """
        found = {policy: hosted.samplers for policy, hosted in self.policies.items()}
        return {policy: one.replicas.fleet.others(front) for policy, one in found.items() if one is not None}

    async def close(self) -> None:
        if self._autoscaling is not None:
            self._autoscaling.cancel()
            await asyncio.wait([self._autoscaling])
        await asyncio.gather(*(self.remove(policy) for policy in list(self.policies)))
        await asyncio.gather(*(worker.close() for worker in self._workers.values()))
        self._workers.clear()
        self._local = None
        while self._supervisors:
            await self._supervisors.popitem()[1].close()

    # ---- the embedded backend ----------------------------------------------------------------------------------------

    async def _add_to_worker(
        self, policy: PolicyId, model: ModelConfig, worker: str, settings: ComputeConfig
    ) -> ModelInfo:
        room = Room(self._supervisor("127.0.0.1", ""), self._config.server.data_dir / "logs")
        ranks = self._workers.get(worker)
        if ranks is None or ranks.has_ended:
            ranks = self._workers[worker] = self._worker(worker, room)
        replaced = self.policies.get(policy)
        self.policies[policy] = Hosted(model, settings, room, ranks)
        if replaced is not None and replaced.ranks is not ranks:
            await self._leave(policy, replaced.ranks)
        try:
            await ranks.start()
            info: ModelInfo = await ranks.ask("add", policy, model, self._config.sampler, settings)
        except AgentJetError:
            await self.remove(policy)
            raise
        return info

    def _worker(self, worker: str, room: Room) -> Ranks:
        name, log_name = f"the worker process {worker}".strip(), f"worker-{worker}" if worker else "worker"
        variables = {key: value for key, value in WORKER_VARIABLES.items() if key not in os.environ}
        launch = partial(Launch, log_path=room.log_path(log_name), environment=variables, shares_gpus=True)
        return self._new_ranks([name], room, launch)

    async def _leave(self, policy: PolicyId, ranks: Ranks) -> None:
        """Free a policy in a worker, or end the worker if it has no other policy."""
        if any(other.ranks is ranks for other in self.policies.values()):
            with contextlib.suppress(ComputeError):  # The worker died, or ends because the removal failed.
                await ranks.ask("remove", policy)
        else:
            await ranks.close()

    # ---- the cluster backend -----------------------------------------------------------------------------------------

    async def _add_ranks(self, policy: PolicyId, model: ModelConfig, settings: ComputeConfig) -> ModelInfo:
        hosted, has_served = self.policies.get(policy), False
        if hosted is not None and hosted.samplers is not None:
            fleet = hosted.samplers.replicas.fleet
            is_same = (hosted.model, hosted.settings) == (model, settings)
            has_served = is_same and fleet.has_served
            if not is_same or fleet.failed.done():
                await self.remove(policy)
                hosted = None
        if hosted is None:
            hosted = await self._host(policy, model, settings, has_served=has_served)
        else:
            assert hosted.samplers is not None
            await hosted.ranks.close()
            if settings.colocated and hosted.samplers.info.done():  # Replicas wait for it before they use a GPU.
                await hosted.samplers.replicas.fleet.suspend()
            hosted.num_groups += 1
            hosted.samplers.meter = StepMeter()  # The time of dead ranks is not learning time.
            hosted.ranks = self._group(policy, settings, hosted.room, hosted.num_groups)
        assert hosted.samplers is not None
        hosted.rank_state = STARTS
        info = await self._started(policy, hosted, hosted.samplers)
        hosted.rank_state = ""
        if not hosted.samplers.info.done():
            hosted.samplers.info.set_result(info)
        return info

    async def _host(self, policy: PolicyId, model: ModelConfig, settings: ComputeConfig, *, has_served: bool) -> Hosted:
        """Start the replicas of a policy. Raises `ConfigError` for settings that this place cannot honour."""
        sampler_python(settings)
        supervisor = self._supervisor(settings.host, settings.address)
        free = await self._free_gpus(supervisor, settings.address) if model.device != "cpu" else None
        check_gpus(policy, settings, free, model)
        check_routes(model)
        room = Room(supervisor, self._log_folder, gpus=0 if free is None else 1)
        if room.gpus:
            await self._reserve(policy, settings, room)
        samplers = Samplers(
            policy, model, settings, self._config, room,
            has_served=has_served, changed=lambda: self.on_replicas(policy),
        )  # fmt: skip
        ranks = self._group(policy, settings, room, group=1)
        hosted = self.policies[policy] = Hosted(model, settings, room, ranks, samplers)
        if self._autoscaling is None:
            self._autoscaling = asyncio.create_task(self._autoscale())
        return hosted

    @staticmethod
    async def _reserve(policy: PolicyId, settings: ComputeConfig, room: Room) -> None:
        """Take GPUs for the ranks and the first replicas of a policy, so that it starts as a whole or not at all."""
        groups = [GpuGroup(f"ranks of {policy}", settings.ranks, room.gpus)]
        groups += [GpuGroup(f"replicas of {policy}", 1, room.gpus * settings.tensor_parallel)] * settings.samplers.least
        try:
            await room.supervisor.placement.reserve(groups)
        except BaseException:  # Also if it is cancelled.
            await uninterrupted(room.supervisor.placement.release({group.name for group in groups}))
            raise

    def _group(self, policy: PolicyId, settings: ComputeConfig, room: Room, group: int) -> Ranks:
        def launch(name: str, command: tuple[str, ...]) -> Launch:
            return Launch(
                name,
                command,
                room.log_path(name.removesuffix(f".{group}")),  # The ranks of all groups write to one file.
                COMPUTE_VARIABLES,
                gpus=room.gpus,
                group=f"ranks of {policy}",
                group_size=settings.ranks,
                beside=f"replicas of {policy}" if settings.colocated else "",
                needs_shared_files=True,  # Checkpoints.
            )

        names = [f"{policy}/rank-{rank}.{group}" for rank in range(settings.ranks)]
        return self._new_ranks(names, room, launch, policy)

    async def _started(self, policy: PolicyId, hosted: Hosted, samplers: Samplers) -> ModelInfo:
        """Returns the model of started ranks. Raises the error of replicas that cannot start at once."""
        ranks, fleet = hosted.ranks, samplers.replicas.fleet

        async def load() -> ModelInfo:
            await ranks.start()
            await ranks.join()
            return cast(ModelInfo, await ranks.ask("add", policy, hosted.model, self._config.sampler, hosted.settings))

        start = asyncio.create_task(load())
        try:
            await first_of(start, fleet.failed)
            if not start.done():
                fleet.check()
            return await start
        finally:
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)

    async def _start_learning(self, policy: PolicyId) -> None:
        hosted = self._hosted(policy)
        if hosted.samplers is None:
            return
        if hosted.settings.colocated:
            hosted.rank_state = "waits until the replicas have freed the GPUs"
            try:
                await hosted.samplers.replicas.fleet.suspend()
            finally:
                hosted.rank_state = ""
        hosted.samplers.meter.start_learning()

    async def _autoscale(self) -> None:
        """Boundary: a failure, such as that of a Ray cluster, ends one attempt."""
        while True:
            await asyncio.sleep(OBSERVE_SECONDS)
            for policy, hosted in list(self.policies.items()):
                try:
                    if hosted.samplers is not None:
                        await self.observe(policy, hosted, hosted.samplers)
                except Exception:
                    log.exception("the samplers of policy %s could not be scaled", policy)

    async def observe(self, policy: PolicyId, hosted: Hosted, samplers: Samplers) -> None:
        """Change the number of replicas of a policy to that of its autoscaler. Called once a second."""
        fleet, autoscaler = samplers.replicas.fleet, samplers.autoscaler
        present, completions = fleet.count, samplers.replicas.num_running + samplers.num_waiting
        samplers.meter.waiting.append(samplers.num_waiting)
        if hosted.is_learning and not completions:
            return
        wanted = autoscaler.observe(present, completions)
        if wanted > present:
            wanted = max(present, min(wanted, await self._most_samplers(hosted)))
        if samplers.autoscaler is not autoscaler or self.policies.get(policy) is not hosted:
            return  # `scale` or `remove` came in between.
        if wanted != present and not fleet.failed.done():
            log.info("policy %s: %d samplers instead of %d, for %d completions", policy, wanted, present, completions)
            fleet.scale(wanted)

    async def _most_samplers(self, hosted: Hosted) -> int:
        """Returns the most replicas that fit the GPUs that no other process needs, or the CPU cores of this machine."""
        assert hosted.samplers is not None
        free = await self._free_gpus(hosted.room.supervisor, hosted.settings.address) if hosted.room.gpus else None
        present = hosted.samplers.replicas.fleet.count
        if free is None:
            return max(present, most_on_cpus(hosted.settings))
        return present + free // hosted.settings.tensor_parallel

    async def _free_gpus(self, supervisor: Supervisor, address: str) -> int | None:
        """Returns the number of GPUs at an address that no policy needs; None if there are no GPUs."""
        total = await supervisor.placement.num_gpus()
        if total is None:
            return None
        return total - sum(hosted.num_gpus for hosted in self.policies.values() if hosted.settings.address == address)

    # ---- both --------------------------------------------------------------------------------------------------------

    def _new_ranks(
        self,
        names: Sequence[str],
        room: Room,
        make_launch: Callable[[str, tuple[str, ...]], Launch],
        policy: PolicyId | None = None,
    ) -> Ranks:
        """Returns ranks that have not started. `make_launch` gets the name and the command of each."""
        server = self._config.server
        watchdog = Watchdog(server.worker_timeout)
        command = (*RANK_COMMAND, str(server.hook_timeout))

        async def launch(name: str) -> Peer:
            return await room.supervisor.start(make_launch(name, command), sign_seconds=watchdog.interval)

        return Ranks(names, launch, watchdog, policy)

    def _supervisor(self, host: str, address: str) -> Supervisor:
        if (address, host) not in self._supervisors:
            try:
                placement = None if address else self._local
                placement = placement or self._make_placement(host, address, self._log_folder)
                self._supervisors[address, host] = Supervisor(host, placement)
            except OSError as error:
                raise ConfigError(
                    f"compute.host = {host!r} is not an address of this machine ({error.strerror or error}): "
                    "give 127.0.0.1, or the address of this machine in the network of the cluster"
                ) from None
            if not address:
                self._local = placement
        return self._supervisors[address, host]

    def _hosted(self, policy: PolicyId) -> Hosted:
        """Raises `PolicyRemoved` for a policy that was not added."""
        if policy not in self.policies:
            raise PolicyRemoved(f"no worker has the policy {policy}: add it first")
        return self.policies[policy]

    async def _ask(self, op: str, policy: PolicyId, *args: Any) -> Any:
        return await self._hosted(policy).ranks.ask(op, policy, *args)
