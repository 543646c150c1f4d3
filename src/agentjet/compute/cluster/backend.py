"""The gateway's half of the cluster backend: for each policy a learner group and sampler replicas. No torch.

Replicas have their own copy of the weights. They sample while the ranks learn, and while a dead learner group is
replaced: `add` keeps the replicas of a policy whose model and settings are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

from agentjet.compute.cluster.fleet import Fleet
from agentjet.compute.cluster.hub import Hub, Peer
from agentjet.compute.cluster.keeper import Launch
from agentjet.compute.cluster.launcher import Launcher, LocalLauncher, cause_of, with_cause
from agentjet.compute.cluster.learner_group import LearnerGroup
from agentjet.compute.cluster.meters import Autoscaler, StepMeter
from agentjet.compute.cluster.ray_launcher import RayLauncher, check_ray
from agentjet.compute.cluster.replicas import Replicas
from agentjet.compute.cluster.site import Site, first_of
from agentjet.compute.cluster.weights import Publication
from agentjet.compute.protocol import CAPABILITIES, EMBEDDED, Capabilities, LossSpec, Outputs
from agentjet.config import ComputeConfig, ModelConfig, OptimizerConfig, ServeConfig
from agentjet.config.loader import cache_dir
from agentjet.errors import ComputeError, ConfigError, PolicyRemoved, WorkerDied
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import (
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

RANK_MODULE = "agentjet.compute.cluster.rank"
REPLICA_MODULE = "agentjet.compute.cluster.replica"
REPLICA_PATH = Path(__file__).parent / "replica_path"
"""On a replica's `PYTHONPATH`: it imports the server's copy of AgentJet."""
OBSERVE_SECONDS = 1.0
"""Seconds between two observations of the autoscalers."""
LOAD_SECONDS = 1800.0
"""Time for a replica to load its model. Files may come from a hub or a slow disk."""
DEATH_SECONDS = 5.0
"""Time in which the death of a learner is noticed whose weights could not be fetched."""


@dataclass(eq=False)
class HostedPolicy:
    """A policy from `add` to `remove`."""

    model: ModelConfig
    settings: ComputeConfig
    site: Site
    gpus: int
    """GPUs of each rank: 1, or 0 without GPUs."""
    meter: StepMeter = field(default_factory=StepMeter)
    info: asyncio.Future[ModelInfo] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The loaded model. Replicas start at once and wait for it."""
    ranks: LearnerGroup | None = None
    log_starts: dict[str, int] = field(default_factory=dict)
    """Bytes that the log of each replica had when it was started."""
    num_groups: int = 0
    """Learner groups started so far."""
    rank_state: str = ""
    """State of the ranks while they have no request."""
    fleet: Fleet = field(init=False)
    replicas: Replicas = field(init=False)
    autoscaler: Autoscaler = field(init=False)

    @property
    def has_ranks(self) -> bool:
        """True if the learner group lives; it may be starting."""
        return self.ranks is not None and not self.ranks.died.done()

    @property
    def is_learning(self) -> bool:
        """True if the ranks do something, or are replaced. Calls may be held."""
        return self.ranks is None or not self.has_ranks or bool(self.ranks.request or self.rank_state)

    @property
    def num_gpus(self) -> int:
        """GPUs that its processes need, also those that are being replaced."""
        return self.gpus * gpus_needed(self.settings, self.settings.ranks, self.fleet.count)


def local_or_ray(hub: Hub, address: str, log_folder: Path) -> Launcher:
    """Returns the launcher of a `compute.address`. Raises `ConfigError` if Ray is needed and missing."""
    if not address:
        return LocalLauncher()
    check_ray(address)
    return RayLauncher(hub, address, log_folder)


class ClusterCompute:
    """Implements `Compute` with learner ranks and sampler replicas in separate processes."""

    def __init__(self, config: ServeConfig, make_launcher: Callable[[Hub, str, Path], Launcher] = local_or_ray) -> None:
        self._config = config
        self._make_launcher = make_launcher
        self._log_folder = config.server.data_dir / "logs" / "cluster"
        self._sites: dict[tuple[str, str], Site] = {}
        """By `compute.address` and `compute.host`."""
        self._local: Launcher | None = None
        """That of all sites of this machine, whose GPUs it divides."""
        self._policies: dict[PolicyId, HostedPolicy] = {}
        self._autoscaling: asyncio.Task[None] | None = None

    def capabilities(self, settings: ComputeConfig) -> Capabilities:
        return CAPABILITIES["cluster"]

    async def add(
        self, policy: PolicyId, model: ModelConfig, *, worker: str = "", settings: ComputeConfig = EMBEDDED
    ) -> ModelInfo:
        hosted, has_served = self._policies.get(policy), False
        if hosted is not None:
            is_same = (hosted.model, hosted.settings) == (model, settings)
            has_served = is_same and hosted.fleet.has_served
            if not is_same or hosted.fleet.failed.done():
                await self.remove(policy)
                hosted = None
        if hosted is None:
            hosted = await self._host(policy, model, settings)
            hosted.fleet.has_served = has_served
        elif hosted.ranks is not None:
            await hosted.ranks.close()
            if settings.colocated and hosted.info.done():  # Replicas wait for it before they use a GPU.
                await hosted.fleet.suspend()
        hosted.num_groups += 1
        hosted.meter = StepMeter()  # The time of a dead group is not learning time.
        names = [f"{policy}/rank-{rank}.{hosted.num_groups}" for rank in range(settings.ranks)]
        launch, server = partial(self._start_rank, policy, hosted), self._config.server
        hosted.ranks = LearnerGroup(
            policy, names, launch, hosted.site, timeout=server.worker_timeout, hook_timeout=server.hook_timeout
        )
        hosted.rank_state = STARTS
        info = await self._started(hosted, hosted.ranks)
        hosted.rank_state = ""
        if not hosted.info.done():
            hosted.info.set_result(info)
        return info

    async def _started(self, hosted: HostedPolicy, ranks: LearnerGroup) -> ModelInfo:
        """Returns the model of started ranks. Raises the error of replicas that cannot start at once."""
        start = asyncio.create_task(ranks.start(hosted.model, hosted.settings))
        try:
            await first_of(start, hosted.fleet.failed)
            if not start.done():
                hosted.fleet.check()
            return await start
        finally:
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)

    async def remove(self, policy: PolicyId) -> None:
        if (hosted := self._policies.pop(policy, None)) is not None:
            hosted.info.cancel()
            works = [hosted.fleet.close(), *([hosted.ranks.close()] if hosted.ranks is not None else [])]
            await asyncio.gather(*works)

    async def sample(
        self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Sampled, None]:
        hosted = self._hosted(policy)
        if hosted.fleet.failed.done():
            raise copy.copy(hosted.fleet.failed.result())
        async with contextlib.aclosing(hosted.replicas.sample(token_ids, params)) as pieces:
            async for piece in pieces:
                hosted.meter.received(len(piece.tokens))
                yield piece

    async def score(self, policy: PolicyId, token_ids: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        return await self._hosted(policy).replicas.score(token_ids, num_likeliest)

    async def load_batch(self, policy: PolicyId, batch: TrainingBatch) -> None:
        await self._ranks(policy).load_batch(batch)

    async def forward_backward(self, op: Op, batch_id: int, loss: LossSpec) -> Outputs:
        await self._start_learning(op.policy_id)
        return cast(Outputs, await self._ranks(op.policy_id).ask("forward_backward", op, batch_id, loss))

    async def optim_step(self, op: Op, optimizer: OptimizerConfig) -> dict[str, float]:
        await self._start_learning(op.policy_id)
        return cast(dict[str, float], await self._ranks(op.policy_id).ask("optim_step", op, optimizer))

    async def _start_learning(self, policy: PolicyId) -> None:
        hosted = self._hosted(policy)
        if hosted.settings.colocated:
            hosted.rank_state = "waits until the replicas have freed the GPUs"
            try:
                await hosted.fleet.suspend()
            finally:
                hosted.rank_state = ""
        hosted.meter.start_learning()

    async def publish(
        self, policy: PolicyId, version: int, *, to_samplers: bool = True, in_turns: bool = False
    ) -> Mapping[str, float]:
        hosted, ranks = self._hosted(policy), self._ranks(policy)
        publication: Publication | None = await ranks.ask("publish", version, to_samplers)
        if publication is None:
            return {}
        adoption = asyncio.create_task(hosted.fleet.publish(publication, in_turns=in_turns))
        hosted.rank_state = "waits until the replicas have the weights"
        try:
            await first_of(adoption, ranks.died)
            if adoption.done() and isinstance(adoption.exception(), ComputeError):
                await asyncio.wait([ranks.died], timeout=DEATH_SECONDS)
            if ranks.died.done() and not (adoption.done() and adoption.exception() is None):
                raise copy.copy(ranks.died.result())  # The weights cannot be fetched from a rank that died.
            adoption.result()
        finally:
            hosted.rank_state = ""
            adoption.cancel()
            await asyncio.gather(adoption, return_exceptions=True)
        return {**hosted.replicas.metrics(), **hosted.meter.finish()}

    async def save(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        return cast(CheckpointStamp, await self._ranks(policy).ask("save", path))

    async def load(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        return cast(CheckpointStamp, await self._ranks(policy).ask("load", path))

    async def export(self, policy: PolicyId, path: Path, *, adapter: bool = False) -> None:
        await self._ranks(policy).ask("export", path, adapter)

    async def died(self, policies: Sequence[PolicyId]) -> WorkerDied:
        ends = {end for policy in policies for end in (self._ranks(policy).died, self._hosted(policy).fleet.failed)}
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    def processes(self, policy: PolicyId) -> list[ProcessStatus]:
        hosted = self._policies.get(policy)
        if hosted is None:
            return []
        site, ranks = hosted.site, hosted.ranks
        found: list[ProcessStatus] = []
        if ranks is not None and hosted.has_ranks:
            state = _RANK_STATES.get(ranks.request, ranks.request or hosted.rank_state or "waits for a batch")
            is_ready = hosted.rank_state != STARTS and ranks.request != "load"
            found = [
                ProcessStatus(name, "rank", state, place=site.place(name), is_ready=is_ready) for name in ranks.names
            ]
        return [*found, *(replace(one, place=site.place(one.name)) for one in hosted.replicas.status())]

    def samplers(self, policy: PolicyId) -> SamplersStatus | None:
        hosted = self._policies.get(policy)
        if hosted is None:
            return None
        replicas = hosted.replicas
        return SamplersStatus(
            hosted.autoscaler.bounds, hosted.fleet.count, running=replicas.num_running, waiting=replicas.num_waiting
        )

    async def scale(self, policy: PolicyId, bounds: SamplerBounds) -> None:
        hosted = self._policies.get(policy)
        if hosted is None:
            raise ConfigError(f"the policy {policy} is not loaded, so it has no samplers to scale: start it first")
        if hosted.settings.colocated:
            raise ConfigError(
                "samplers cannot be scaled with compute.colocated: replicas share the GPUs of the ranks. Change "
                "compute.samplers, and start the server again"
            )
        check_samplers(bounds, await self._most_samplers(hosted), hosted.settings.tensor_parallel * hosted.gpus)
        hosted.autoscaler = Autoscaler(bounds, self._config.sampler.max_concurrent)
        hosted.fleet.scale(bounds.clamp(hosted.fleet.count))

    async def close(self) -> None:
        if self._autoscaling is not None:
            self._autoscaling.cancel()
            await asyncio.wait([self._autoscaling])
        await asyncio.gather(*(self.remove(policy) for policy in list(self._policies)))
        sites = list(self._sites.values())
        self._sites.clear()
        self._local = None
        for site in sites:
            await site.close()

    # ---- the number of replicas -------------------------------------------------------------------------------------

    async def _autoscale(self) -> None:
        """Boundary: a failure, such as that of a Ray cluster, ends one attempt."""
        while True:
            await asyncio.sleep(OBSERVE_SECONDS)
            for policy, hosted in list(self._policies.items()):
                try:
                    await self.observe(policy, hosted)
                except Exception:
                    log.exception("the samplers of policy %s could not be scaled", policy)

    async def observe(self, policy: PolicyId, hosted: HostedPolicy) -> None:
        """Change the number of replicas of a policy to that of its autoscaler. Called once a second."""
        replicas, present = hosted.replicas, hosted.fleet.count
        completions = replicas.num_running + replicas.num_waiting
        hosted.meter.count_waiting(replicas.num_waiting)
        if hosted.is_learning and not completions:
            return
        autoscaler = hosted.autoscaler
        wanted = autoscaler.observe(present, completions)
        if wanted > present:
            wanted = max(present, min(wanted, await self._most_samplers(hosted)))
        if hosted.autoscaler is not autoscaler or self._policies.get(policy) is not hosted:
            return  # `scale` or `remove` came in between.
        if wanted != present and not hosted.fleet.failed.done():
            log.info("policy %s: %d samplers instead of %d, for %d completions", policy, wanted, present, completions)
            hosted.fleet.scale(wanted)

    async def _most_samplers(self, hosted: HostedPolicy) -> int:
        """Returns the most replicas that fit the GPUs that no other process needs, or the CPU cores of this machine."""
        free = await self._free_gpus(hosted.site, hosted.settings.address) if hosted.gpus else None
        present = hosted.fleet.count
        if free is None:
            return max(present, most_on_cpus(hosted.settings))
        return present + free // hosted.settings.tensor_parallel

    async def _free_gpus(self, site: Site, address: str) -> int | None:
        """Returns the number of GPUs at an address that no policy needs; None if there are no GPUs."""
        total = await site.num_gpus()
        if total is None:
            return None
        return total - sum(hosted.num_gpus for hosted in self._policies.values() if hosted.settings.address == address)

    # ---- starting processes -----------------------------------------------------------------------------------------

    async def _host(self, policy: PolicyId, model: ModelConfig, settings: ComputeConfig) -> HostedPolicy:
        """Start the replicas of a policy. Raises `ConfigError` for settings that this place cannot honour."""
        python = sampler_python(settings)
        site = await self._site(settings)
        free = await self._free_gpus(site, settings.address) if model.device != "cpu" else None
        check_gpus(policy, settings, free, model)
        hosted = self._policies[policy] = HostedPolicy(model, settings, site, gpus=0 if free is None else 1)
        hosted.autoscaler = Autoscaler(settings.samplers, self._config.sampler.max_concurrent)
        hosted.fleet = Fleet(
            policy,
            partial(self._start_replica, policy, hosted, python),
            site.stop,
            settings.samplers.least,
            self._config.sampler,
            timeout=self._config.server.worker_timeout,
            explain=lambda name: cause_of(self._log_path(name), hosted.log_starts.pop(name, 0)),
        )
        hosted.replicas = Replicas(hosted.fleet)
        if self._autoscaling is None:
            self._autoscaling = asyncio.create_task(self._autoscale())
        return hosted

    async def _site(self, settings: ComputeConfig) -> Site:
        key = settings.address, settings.host
        if key not in self._sites:
            hub = Hub(settings.host)
            try:
                await hub.open()
            except OSError as error:
                raise ConfigError(
                    f"compute.host = {settings.host!r} is not an address of this machine ({error.strerror or error}): "
                    "give 127.0.0.1, or the address of this machine in the network of the cluster"
                ) from None
            launcher = None if settings.address else self._local
            launcher = launcher or self._make_launcher(hub, settings.address, self._log_folder)
            if not settings.address:
                self._local = launcher
            self._sites[key] = Site(hub, launcher)
        return self._sites[key]

    async def _start_rank(self, policy: PolicyId, hosted: HostedPolicy, name: str, rank: int) -> Peer:
        launch = Launch(
            name,
            (sys.executable, "-P", "-m", RANK_MODULE),
            self._log_path(f"{policy}/rank-{rank}"),  # The ranks of all groups write to one file.
            gpus=hosted.gpus,
            beside=f"{policy}/replica-" if hosted.settings.colocated else "",
            needs_shared_files=True,  # Checkpoints.
        )
        return await hosted.site.start(launch)

    async def _start_replica(self, policy: PolicyId, hosted: HostedPolicy, python: str, name: str) -> Peer:
        """See `fleet.Start`."""
        settings, log_path = hosted.settings, self._log_path(name)
        hosted.log_starts[name] = log_path.stat().st_size if log_path.exists() else 0
        found = os.pathsep.join(filter(None, (str(REPLICA_PATH), os.environ.get("PYTHONPATH"))))
        try:
            launch = Launch(
                name,
                (python, "-m", REPLICA_MODULE),
                log_path,
                {"PYTHONPATH": found},
                gpus=hosted.gpus * settings.tensor_parallel,
                beside=f"{policy}/rank-" if settings.colocated else "",
            )
            peer = await hosted.site.start(launch)
        except WorkerDied as error:
            is_no_python = "with exit code" in str(error) and not settings.address
            if "No module named" in str(error) or (is_no_python and not hosted.fleet.has_served):
                raise ConfigError(f"{error}. {_way_out(python)}") from None
            raise
        try:
            info = await asyncio.shield(hosted.info)
            async with asyncio.timeout(LOAD_SECONDS):
                await peer.ask("load", policy, hosted.model, info, self._config.sampler, settings)
        except TimeoutError:
            peer.close()
            raise WorkerDied(f"{name} did not load for {LOAD_SECONDS:g} s; see {log_path}") from None
        except ConfigError as error:
            peer.close()
            raise with_cause(error, cause_of(log_path, hosted.log_starts[name])) from None
        except BaseException:
            peer.close()
            raise
        return peer

    def _log_path(self, name: str) -> Path:
        return self._log_folder / f"{name.replace('/', '-')}.log"

    def _hosted(self, policy: PolicyId) -> HostedPolicy:
        """Raises `PolicyRemoved` for a policy that was not added."""
        if policy not in self._policies:
            raise PolicyRemoved(f"the cluster has no policy {policy}: add it first")
        return self._policies[policy]

    def _ranks(self, policy: PolicyId) -> LearnerGroup:
        ranks = self._hosted(policy).ranks
        if ranks is None:
            raise PolicyRemoved(f"the cluster has no learner of the policy {policy}: add it first")
        return ranks


STARTS = "starts"
_RANK_STATES = {
    "rendezvous": "meets the other ranks",
    "join": "meets the other ranks",
    "add": "loads the model",
    "load_batch": "receives a batch",
    "forward_backward": "computes gradients",
    "optim_step": "updates the weights",
    "publish": "writes the weights for the samplers",
    "save": "writes a checkpoint",
    "load": "loads a checkpoint",
    "export": "writes an export",
}
"""The states of a rank, by request."""


def sampler_python(settings: ComputeConfig) -> str:
    """Returns the interpreter of the environment with vLLM. Raises `ConfigError` if there is none on this machine.

    In a Ray cluster, the nodes of the replicas must have it at the same path.
    """
    python = settings.sampler_python or str(cache_dir() / "sampler-venv" / "bin" / "python")
    if shutil.which(python) is None and not settings.address:
        raise ConfigError(f"{python} is not a program. {_way_out(python)}")
    return python


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
