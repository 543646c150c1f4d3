"""The conductor: places ranks and replicas on a Ray cluster and watches them. The only process that imports Ray.

The server starts it and sends it requests (`RayPlacement`):

* `connect(address)`: join a running Ray cluster;
* `reserve(groups, seconds)`: take GPUs for groups of processes, for all or for none; `release(names)` gives them back;
* `start(Launch) -> place`: run a command in an actor, on the GPUs of its group;
* `ended(name) -> reason`: answered when the process has ended, for any reason;
* `stop(name)`: kill it; `gpus()`: the number of GPUs of the cluster.

Placement groups of Ray take the GPUs. The ranks of a policy share one, because they end together. Each replica has
another one, because replicas come and go, and Ray cannot give back a part of a placement group. A placement group ends
with the last process in it. The next ranks or replicas then get another one, where the cluster has room.

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
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from agentjet.errors import ComputeError, ConfigError, counted, install_extra
from agentjet.processes import guardian
from agentjet.processes.guardian import Launch, ProcessEnd, RayActor
from agentjet.processes.rpc import Answer, Link, ProcessRequest, answering
from agentjet.processes.supervisor import GpuGroup, accepts, check_address

log = logging.getLogger(__name__)

MIN_RAY = (2, 60)
WATCH_SECONDS = 1.0
"""Seconds between two connections to Ray's head."""
MAX_FAILED_PROBES = 3
FAREWELL_SECONDS = 5.0
"""Limit of the stops after Ray's head is gone."""
STOP_SECONDS = 15.0
"""Limit of an orderly stop; then Ray kills the actor."""
POLL_SECONDS = 0.2
"""Seconds between two questions whether Ray has the GPUs of a group."""
TOGETHER_SECONDS = 5.0
"""Time in which ranks that fit one node wait for one. Then they take several."""
GIVEN_BACK = "the GPUs were given back before all were free"


@dataclass
class Placed:
    """A process in its actor."""

    launch: Launch
    actor: Any = None
    """None before its GPUs are free."""
    wanted: str = ""
    """Id of the node on which it should be; "" if Ray chooses one with free GPUs."""
    place: str = "a node"
    reservation: Reservation | None = None
    """That of its GPUs, if it has some."""
    stopped: bool = False
    end: asyncio.Future[ProcessEnd] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(eq=False)
class Reservation:
    """A placement group: the GPUs of a group, with a bundle for each process."""

    group: GpuGroup
    users: list[Placed | None]
    """The processes by bundle."""
    handle: Any = None
    ready: asyncio.Task[None] = field(init=False)
    """Done when Ray has the GPUs. Raises the reason if it did not have them in time."""
    is_unused: bool = True
    """True before the first process. It then stays until `release`."""

    @property
    def has_failed(self) -> bool:
        return self.ready.done() and self.ready.exception() is not None

    @property
    def is_over(self) -> bool:
        return not (self.is_unused or any(self.users))


class Conductor:
    """Handles the requests of the gateway."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The reason once the Ray cluster is gone; every process is then reported as ended."""
        self._placed: dict[str, Placed] = {}
        self._reservations: list[Reservation] = []
        """Oldest first."""
        self._asked: dict[str, Sequence[GpuGroup]] = {}
        """The groups of the last `reserve`, by their names. `release` removes them."""
        self._reserving = asyncio.Lock()
        """Held while a policy gets its GPUs: two policies that have a part each would wait for each other."""
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

    async def reserve(self, groups: Sequence[GpuGroup], seconds: float) -> None:
        """Wait until Ray has the GPUs of all groups. Raises as `start`; then it has those of none.

        Calls take turns, and `seconds` count from its own turn. Replaces reservations of the same groups that no
        process used.
        """
        names = {group.name for group in groups}
        await self.release(names)
        self._asked |= dict.fromkeys(names, groups)
        async with self._reserving:
            deadline, made = asyncio.get_running_loop().time() + seconds, list[Reservation]()
            try:
                # The largest first: a small one could take a part of the only node with room for it.
                for group, count in sorted(Counter(groups).items(), key=lambda item: -item[0].size * item[0].gpus):
                    if any(self._asked.get(name) is not groups for name in names):
                        raise ComputeError(GIVEN_BACK)
                    new = [self._reservation(group, deadline, groups) for _ in range(count)]
                    made += new
                    await asyncio.gather(*(one.ready for one in new))
            except BaseException:
                for one in made:
                    self._remove(one)
                raise

    async def release(self, names: Set[str]) -> None:
        """Give back the GPUs of groups of these names that no process used. Ends a `reserve` of them. Idempotent."""
        self._asked = {name: groups for name, groups in self._asked.items() if name not in names}
        for one in [one for one in self._reservations if one.is_unused and one.group.name in names]:
            self._remove(one)

    async def start(self, launch: Launch) -> str:
        """Returns the place of the started process.

        Raises `ConfigError` if no node can run it, and `ComputeError` if none can at the moment.
        """
        await self.stop(launch.name)
        launch = replace(launch, environment={**launch.environment, guardian.RAY_HEAD: self._head})
        placed = self._placed[launch.name] = Placed(launch)
        try:
            if launch.gpus:
                strategy: Any = await self._take_bundle(placed)
            else:
                placed.wanted = self._emptiest(await asyncio.to_thread(ray.nodes))
                strategy = NodeAffinitySchedulingStrategy(placed.wanted, soft=True) if placed.wanted else "DEFAULT"
            if placed.stopped:  # Another start of this name came while it waited.
                raise ComputeError(f"{launch.name} was stopped before it started")
            remote: Any = ray.remote(RayActor)
            actor = placed.actor = remote.options(
                num_cpus=0,
                num_gpus=launch.gpus,
                # Bytes. Ray places an actor that asks for nothing at random, whatever its strategy.
                memory=None if launch.gpus else 1,
                max_restarts=0,
                max_concurrency=4,
                scheduling_strategy=strategy,
            ).remote(launch, self._guardian)
            node, pid, problem = await self._answer(actor.start.remote(), launch)
            placed.place = f"{node} process {pid}"
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
        if placed.actor is not None:
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

    async def _take_bundle(self, placed: Placed) -> PlacementGroupSchedulingStrategy:
        """Returns the place of a process among the GPUs of its group, and takes GPUs if the group has none left."""
        launch = placed.launch
        group = GpuGroup(launch.group or launch.name, launch.group_size, launch.gpus)
        free = (one for one in self._reservations if one.group == group and None in one.users and not one.has_failed)
        deadline = asyncio.get_running_loop().time() + launch.placement_seconds
        reservation = next(free, None) or self._reservation(group, deadline, [group])
        bundle = reservation.users.index(None)
        placed.reservation, reservation.users[bundle], reservation.is_unused = reservation, placed, False
        try:
            await asyncio.shield(reservation.ready)
        except (ComputeError, ConfigError):
            if launch.group:
                raise
            listed = listed_gpus(await asyncio.to_thread(gpus_of_nodes))  # It waits for nothing else of this server.
            text = f"{launch.name} needs {counted(launch.gpus, 'GPU')} on one node, and none has them free ({listed})"
            raise ComputeError(text) from None
        return PlacementGroupSchedulingStrategy(reservation.handle, bundle)

    def _reservation(self, group: GpuGroup, deadline: float, asked: Sequence[GpuGroup]) -> Reservation:
        """Returns a new reservation, which `ready` waits for. `asked` is all that is taken together."""
        reservation = Reservation(group, [None] * group.size)
        self._reservations.append(reservation)
        reservation.ready = asyncio.create_task(self._wait(reservation, deadline, asked))
        return reservation

    async def _wait(self, reservation: Reservation, deadline: float, asked: Sequence[GpuGroup]) -> None:
        """Wait until Ray has the GPUs. Raises `ConfigError` if no node is large enough, else `ComputeError`."""
        now, group = asyncio.get_running_loop().time, reservation.group
        together_until = now() + TOGETHER_SECONDS
        largest = max((count for _, count in await asyncio.to_thread(gpus_of_nodes)), default=0)
        # `PACK` alone may take a part of a node although another one has room for all.
        is_together = group.size > 1 and group.size * group.gpus <= largest
        reservation.handle = await asyncio.to_thread(asked_of_ray, group, "STRICT_PACK" if is_together else "PACK")
        try:
            while not await asyncio.to_thread(reservation.handle.wait, POLL_SECONDS):
                if now() >= deadline:
                    nodes = await asyncio.to_thread(gpus_of_nodes)
                    largest = max([self._largest, *(count for _, count in nodes)])
                    reason = why_not_placed(asked, nodes, self._own_gpus())
                    raise (ComputeError if max(one.gpus for one in asked) <= largest else ConfigError)(reason)
                if is_together and now() >= together_until:
                    log.warning("no node has the GPUs of the %s together: they take those of several", group.name)
                    await asyncio.to_thread(give_back, reservation.handle)
                    reservation.handle, is_together = await asyncio.to_thread(asked_of_ray, group, "PACK"), False
                await asyncio.sleep(POLL_SECONDS)
                if reservation not in self._reservations:
                    raise ComputeError(GIVEN_BACK)
        except BaseException:
            await asyncio.to_thread(give_back, reservation.handle)
            raise
        self._largest = max(self._largest, group.gpus)

    def _remove(self, reservation: Reservation) -> None:
        """Give back the GPUs of a reservation. Idempotent."""
        if reservation in self._reservations:
            self._reservations.remove(reservation)
            self._spawn(self._end_reservation(reservation))

    @staticmethod
    async def _end_reservation(reservation: Reservation) -> None:
        with contextlib.suppress(ComputeError, ConfigError, RayError):
            await reservation.ready
            await asyncio.to_thread(give_back, reservation.handle)

    def _own_gpus(self) -> int:
        """Returns the GPUs of the processes of this server."""
        used = [one.group for one in self._reservations if any(one.users) and one.ready.done()]
        return sum(group.size * group.gpus for group in used)

    async def _answer(self, reference: Any, launch: Launch) -> tuple[str, int, str]:
        """Returns the answer of a new actor. Raises `ComputeError` if it does not start."""
        seconds = launch.placement_seconds
        try:
            async with asyncio.timeout(seconds):
                answer: tuple[str, int, str] = await reference
                return answer
        except TimeoutError:
            raise ComputeError(
                f"{launch.name} did not start within {seconds:g} s: the cluster is busy or lost nodes"
            ) from None
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
        if placed.actor is not None:
            with contextlib.suppress(RayError):
                ray.kill(placed.actor, no_restart=True)
        if (reservation := placed.reservation) is not None:
            reservation.users = [None if user is placed else user for user in reservation.users]
            if reservation.is_over:
                self._remove(reservation)
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
                actors = [placed.actor for placed in present if placed.actor is not None]
                await asyncio.gather(*(actor.stop.remote() for actor in actors), return_exceptions=True)
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


def asked_of_ray(group: GpuGroup, strategy: str) -> Any:
    """Returns a new placement group, which may be pending."""
    return placement_group([{"GPU": group.gpus}] * group.size, strategy=strategy)


def give_back(handle: Any) -> None:
    with contextlib.suppress(RayError):  # The head is gone.
        remove_placement_group(handle)


def gpus_of_nodes() -> list[tuple[str, int]]:
    """Returns address and number of GPUs of each live node."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [(str(node["NodeManagerAddress"]), int(node["Resources"].get("GPU", 0))) for node in alive]


def listed_gpus(nodes: list[tuple[str, int]]) -> str:
    return ", ".join(f"{address} {count}" for address, count in sorted(nodes)) or "none"


def why_not_placed(asked: Sequence[GpuGroup], nodes: list[tuple[str, int]], own: int) -> str:
    """Returns the reason why the cluster did not have the GPUs of all these groups, with what would fit.

    `own` are the GPUs that this server uses.
    """
    counts = [count for _, count in nodes]
    largest, total = max(counts, default=0), sum(counts)
    listed = listed_gpus(nodes)
    sizes = Counter[tuple[str, int]]()
    for group in asked:
        sizes[group.name, group.gpus] += group.size
    too_large = [(name, gpus) for name, gpus in sizes if gpus > largest]
    if too_large:
        (name, gpus), *_ = too_large
        return (
            f"each of the {name} needs {counted(gpus, 'GPU')} on one node, and the largest has {largest}: set "
            f"compute.tensor_parallel to {max(1, largest)} ({listed})"
        )
    wanted = " and ".join(f"{size * gpus} for {name} ({size} x {gpus})" for (name, gpus), size in sizes.items())
    return (
        f"the cluster lacks free GPUs: needed together are {wanted}. It has {total} ({listed}), of which this server "
        f"uses {own}: lower compute.ranks or compute.samplers so that ranks + samplers x tensor_parallel is at most "
        f"{total}, or add nodes"
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
