"""The conductor: places ranks and replicas on a Ray cluster and watches them. The only process that imports Ray.

The server starts it and sends it requests (`RayPlacement`):

* `connect(address)`: join a running Ray cluster;
* `start(Launch) -> place`: run a command in an actor, on a node with enough free GPUs;
* `ended(name) -> reason`: answered when the process has ended, for any reason;
* `stop(name)`: kill it; `gpus()`: the number of GPUs of the cluster.

Everything ends with its owner. The conductor ends with its connection. Ray ends the actors of a conductor that ended,
and the guardian of each process ends that process with its actor. If Ray's head is gone, the conductor answers every
`ended` and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agentjet.errors import ComputeError, ConfigError, install_extra
from agentjet.processes import guardian
from agentjet.processes.guardian import Launch, ProcessEnd, RayActor
from agentjet.processes.rpc import Answer, Link, ProcessRequest, answering
from agentjet.processes.supervisor import accepts, check_address

log = logging.getLogger(__name__)

MIN_RAY = (2, 60)
WATCH_SECONDS = 1.0
"""Seconds between two connections to Ray's head."""
MAX_FAILED_PROBES = 3
FAREWELL_SECONDS = 5.0
"""Limit of the stops after Ray's head is gone."""
STOP_SECONDS = 15.0
"""Limit of an orderly stop; then Ray kills the actor."""


@dataclass
class Placed:
    """A process in its actor."""

    launch: Launch
    actor: Any
    wanted: str
    """Id of the node on which it should be; "" if Ray chooses one with free GPUs."""
    place: str = "a node"
    stopped: bool = False
    end: asyncio.Future[ProcessEnd] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Conductor:
    """Handles the requests of the gateway."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The reason once the Ray cluster is gone; every process is then reported as ended."""
        self._placed: dict[str, Placed] = {}
        self._largest = 0
        """GPUs of the largest process placed so far: the cluster had such a node, and may have it again."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._guardian = Path(guardian.__file__).read_text(encoding="utf-8")
        self._head = ""

    async def connect(self, address: str) -> None:
        """Join the cluster. Raises `ConfigError` with the way out."""
        check_version(ray.__version__)
        if address != "auto":
            await asyncio.to_thread(check_address, address)
        try:
            await asyncio.to_thread(
                ray.init, address, namespace="agentjet", log_to_driver=False, configure_logging=False
            )
        except (OSError, RuntimeError, ValueError, RayError) as error:
            raise ConfigError(why_not_joined(address, str(error))) from None
        cloudpickle.register_pickle_by_value(guardian)
        self._head = str(ray.get_runtime_context().gcs_address)
        log.info("joined the Ray cluster at %s", self._head)
        self._spawn(self._watch_head(self._head))

    async def start(self, launch: Launch) -> str:
        """Returns the place of the started process.

        Raises `ConfigError` if no node can run it, and `ComputeError` if none can at the moment.
        """
        await self.stop(launch.name)
        launch = replace(launch, environment={**launch.environment, guardian.RAY_HEAD: self._head})
        remote: Any = ray.remote(RayActor)
        node = "" if launch.gpus else self._emptiest(await asyncio.to_thread(ray.nodes))
        strategy: Any = NodeAffinitySchedulingStrategy(node, soft=True) if node else "DEFAULT"
        actor = remote.options(
            num_cpus=0,
            num_gpus=launch.gpus,
            memory=1,  # Bytes. Ray places an actor that asks for nothing at random, whatever its strategy.
            max_restarts=0,
            max_concurrency=4,
            scheduling_strategy=strategy,
        ).remote(launch, self._guardian)
        placed = self._placed[launch.name] = Placed(launch, actor, node)
        try:
            node, pid, problem = await self._answer(actor.start.remote(), launch)
            placed.place = f"{node} process {pid}"
            self._largest = max(self._largest, launch.gpus)
        except BaseException:
            self._forget(placed)
            raise
        if problem:
            self._forget(placed)
            raise ConfigError(f"{launch.name} cannot run on the node {node}: {problem}")
        self._spawn(self._watch(placed))
        return placed.place

    async def ended(self, name: str) -> ProcessEnd:
        """Returns the end of a process, once it has ended."""
        if name not in self._placed:
            return ProcessEnd(f"{name} was not started")
        end = await asyncio.shield(self._placed[name].end)
        self._placed.pop(name, None)
        return end

    async def stop(self, name: str) -> None:
        """Kill the process and wait for its end. Idempotent."""
        placed = self._placed.pop(name, None)
        if placed is None or placed.end.done():
            return
        placed.stopped = True
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await placed.actor.stop.remote()
        self._end(placed, ProcessEnd("was stopped"))

    async def gpus(self) -> int:
        """Returns the number of GPUs of the cluster."""
        return sum(count for _, count in await asyncio.to_thread(gpus_of_nodes))

    def _emptiest(self, nodes: list[dict[str, Any]]) -> str:
        """Returns the node for a process without GPUs: one with the fewest of ours. Ray may put all on one node."""
        used = Counter(placed.wanted for placed in self._placed.values() if not placed.end.done())
        return min((node["NodeID"] for node in nodes if node["Alive"]), key=lambda node: used[node], default="")

    def _own_gpus(self) -> int:
        return sum(placed.launch.gpus for placed in self._placed.values() if not placed.end.done())

    async def _answer(self, reference: Any, launch: Launch) -> tuple[str, int, str]:
        """Returns the answer of a new actor. Raises `ConfigError` if no node is large enough, else `ComputeError`."""
        try:
            async with asyncio.timeout(launch.placement_seconds):
                answer: tuple[str, int, str] = await reference
                return answer
        except TimeoutError:
            nodes = await asyncio.to_thread(gpus_of_nodes)
            reason = why_not_placed(launch, nodes, self._own_gpus() - launch.gpus)
            largest = max([self._largest, *(count for _, count in nodes)])
            is_waiting = launch.gpus <= largest or not launch.group  # without a group, nothing else waits for it
            raise (ComputeError if is_waiting else ConfigError)(reason) from None
        except RayError as error:
            raise ComputeError(f"{launch.name} did not start: {first_line(error)}") from None

    async def _watch(self, placed: Placed) -> None:
        """Wait for the end of a process or its actor, and report the reason."""
        try:
            end = ProcessEnd(*await placed.actor.wait.remote())
        except RayActorError as error:  # Also for an actor that is out of reach: it is killed, and so is its process.
            end = ProcessEnd(f"lost its node or actor: {first_line(error)}")
        except RayError as error:
            end = ProcessEnd(f"cannot be watched: {first_line(error)}")
        if not placed.stopped:  # Else the one who stopped it reports the reason.
            self._end(placed, end)

    def _end(self, placed: Placed, end: ProcessEnd) -> None:
        with contextlib.suppress(RayError):
            ray.kill(placed.actor, no_restart=True)
        if not placed.end.done():
            placed.end.set_result(replace(end, reason=f"(on {placed.place}) {end.reason}"))

    def _forget(self, placed: Placed) -> None:
        self._end(placed, ProcessEnd("did not start"))
        if self._placed.get(placed.launch.name) is placed:
            del self._placed[placed.launch.name]

    async def _watch_head(self, head: str) -> None:
        """Report all processes as ended once Ray's head does not accept connections."""
        failed = 0
        while failed < MAX_FAILED_PROBES:
            await asyncio.sleep(WATCH_SECONDS)
            failed = 0 if await asyncio.to_thread(accepts, head) else failed + 1
        reason = f"ended because the head of the Ray cluster at {head} is gone"
        present = [placed for placed in self._placed.values() if not placed.end.done()]
        for placed in present:
            placed.stopped = True
        with contextlib.suppress(TimeoutError):  # Actors still answer: requests to them do not pass the head.
            async with asyncio.timeout(FAREWELL_SECONDS):
                await asyncio.gather(*(placed.actor.stop.remote() for placed in present), return_exceptions=True)
        for placed in present:
            if not placed.end.done():
                placed.end.set_result(ProcessEnd(f"(on {placed.place}) {reason}"))
        await asyncio.sleep(0)
        self.lost.set_result(reason)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def check_version(version: str) -> None:
    """Raises `ConfigError` for a version of Ray that is too old."""
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_RAY:
        needed = ".".join(map(str, MIN_RAY))
        raise ConfigError(
            f"Ray {version} is installed and AgentJet needs {needed} or newer: {install_extra('cluster')}"
        )


def why_not_joined(address: str, message: str) -> str:
    """Returns the sentence for an error of `ray.init`."""
    stated = f"compute.address = {address!r}: "
    found = " ".join(message.split())
    if "Version mismatch" in message:
        way_out = f"install the version of the cluster here, or that of this machine on all nodes ({found})"
        return f"{stated}the cluster has another version of Ray or Python: {way_out}"
    if "Could not find any running Ray" in message:
        return f"{stated}no Ray cluster runs on this machine: run `ray start --head`, or give HOST:PORT of the head"
    if "auth" in message.lower() and "token" in message.lower():
        way_out = "copy ~/.ray/auth_token of its head to this machine, or set RAY_AUTH_TOKEN"
        return f"{stated}the cluster needs its Ray token: {way_out} ({found})"
    if "IP address" in message or "raylet" in message.lower():
        way_out = f"run `ray start --address={address}` here first ({found})"
        return f"{stated}this machine is not a node of the cluster: {way_out}"
    return f"{stated}{found}"


def gpus_of_nodes() -> list[tuple[str, int]]:
    """Returns address and number of GPUs of each live node."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [(str(node["NodeManagerAddress"]), int(node["Resources"].get("GPU", 0))) for node in alive]


def why_not_placed(launch: Launch, nodes: list[tuple[str, int]], own: int) -> str:
    """Returns the reason why no node had enough free GPUs, with what would fit."""
    counts = [count for _, count in nodes]
    largest, total = max(counts, default=0), sum(counts)
    listed = ", ".join(f"{address} {count}" for address, count in sorted(nodes)) or "none"
    if not launch.gpus:
        return f"{launch.name} did not start within {launch.placement_seconds:g} s: the cluster is busy or lost nodes"
    start = f"{launch.name} needs {launch.gpus} GPUs on one node"
    if not launch.group:
        return f"{start}, and none has them free ({listed})"
    if launch.gpus > largest:
        return f"{start}, and the largest has {largest}: set compute.tensor_parallel to {max(1, largest)} ({listed})"
    return (
        f"{start}, and none has them free. The cluster has {total} ({listed}), of which this server uses {own}: lower "
        f"compute.ranks or compute.samplers so that ranks + samplers x tensor_parallel is at most {total}, or add nodes"
    )


def first_line(error: Exception) -> str:
    """Returns the first line of a Ray error that is not its class alone."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if " " in line), type(error).__name__)


async def serve(link: Link) -> None:
    """Answer requests until the connection ends or the Ray cluster is gone."""
    conductor = Conductor()
    tasks: set[asyncio.Task[None]] = set()

    async def handle(request: ProcessRequest) -> None:
        with answering(request, link.send):
            link.send(Answer(request.id, await getattr(conductor, request.op)(*request.args)))

    async def accept() -> None:
        async for request in link.requests():
            tasks.add(task := asyncio.create_task(handle(request)))
            task.add_done_callback(tasks.discard)

    tasks.add(asyncio.create_task(accept()))
    log.error("%s", await conductor.lost)
    os._exit(1)  # Ray's own shutdown would wait for the head that is gone.


if __name__ == "__main__":
    asyncio.run(serve(Link.of_program()))
