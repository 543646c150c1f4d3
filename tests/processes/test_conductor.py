"""The conductor on a real local Ray cluster of two raylets: placement, every kind of death, bad input.

1. Processes start with their environment, on nodes with free GPUs; a stop frees them.
2. After a SIGKILL of process, actor, raylet, conductor or Ray's head, and after the end of the gateway, every process
   has ended, and the reason is reported.
3. A node that joins gets work. A cluster without room says what would fit.
4. The ranks and the first replicas of a policy get their GPUs together, or none of them does. Ranks are on one node if
   one has room, and on several ones else; they and later replicas are placed again after the end of a node.
5. A wrong address, another version of Ray, and files that are not shared are refused with the way out.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from agentjet.errors import ComputeError, ConfigError
from agentjet.processes.guardian import Launch
from agentjet.processes.supervisor import GpuGroup, RayPlacement, RayProcess
from tests.processes.raylets import LocalCluster

pytestmark = [pytest.mark.needs("ray"), pytest.mark.anyio, pytest.mark.thorough]

SLEEPER = (
    sys.executable,
    "-c",
    "import os, time; print(os.environ['COLOUR'], os.getpid(), flush=True); time.sleep(3600)",
)
"""Prints its environment and process id. Its log is the only connection to the test."""


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[LocalCluster]:
    made = LocalCluster()
    yield made
    made.shutdown()


@contextlib.asynccontextmanager
async def launching(address: str, folder: Path) -> AsyncIterator[RayPlacement]:
    launcher = RayPlacement("127.0.0.1", address, folder)
    launcher.placement_seconds = 120.0  # Busy machines start workers slowly.
    try:
        yield launcher
    finally:
        await launcher.close()


class Sleeper(psutil.Process):
    """A process, and its handle."""

    def __init__(self, pid: int, launched: RayProcess) -> None:
        super().__init__(pid)
        self.launched = launched


async def started(
    launcher: RayPlacement, name: str, folder: Path, gpus: int = 0, group: str = "sleepers", group_size: int = 1
) -> Sleeper:
    """Start a sleeper."""
    log = folder / f"{name}.log"
    launch = Launch(name, SLEEPER, log, {"COLOUR": "green"}, gpus, group=group, group_size=group_size)
    ray_process = await launcher.start(launch)
    async with asyncio.timeout(60):
        while not (words := log.read_text().split()):
            await asyncio.sleep(0.05)
    assert words[-2] == "green"
    return Sleeper(int(words[-1]), ray_process)


async def gone(*processes: psutil.Process) -> bool:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 30)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive if process.is_running())


async def reason(process: Sleeper) -> str:
    return (await asyncio.wait_for(asyncio.shield(process.launched.ended), 60)).reason


def conductor_of(gateway: psutil.Process) -> psutil.Process:
    """The child of a guardian of the gateway."""
    found = [child for guardian in gateway.children() for child in guardian.children()]
    return next(one for one in found if one.cmdline()[-1] == "agentjet.processes.conductor")


def actor_of(process: psutil.Process) -> psutil.Process:
    """The Ray actor: the parent of the guardian, which is the parent of the process."""
    return process.parents()[1]


async def test_start_stop_and_gpus(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    async with launching(ray_cluster.address, tmp_path) as launcher:
        assert await launcher.num_gpus() == 1
        process = await started(launcher, "one", tmp_path, gpus=1)
        assert process.launched.place
        assert process.environ()["CUDA_VISIBLE_DEVICES"] == "0"
        await process.launched.stop()
        assert await gone(process) and "was stopped" in await reason(process)
        again = await started(launcher, "again", tmp_path, gpus=1)
        other = await started(launcher, "two", tmp_path)
        assert other.environ()["CUDA_VISIBLE_DEVICES"] == ""
    assert await gone(again, other)


async def test_a_killed_process_and_a_killed_actor(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    async with launching(ray_cluster.address, tmp_path) as launcher:
        first = await started(launcher, "first", tmp_path, gpus=1)
        second = await started(launcher, "second", tmp_path)
        killed = time.monotonic()
        first.kill()
        assert "ended by SIGKILL; see" in await reason(first)
        print(f"process: {time.monotonic() - killed:.2f} s")
        assert not second.launched.ended.done()
        killed = time.monotonic()
        actor_of(second).kill()
        assert "lost its node or actor" in await reason(second)
        print(f"actor: {time.monotonic() - killed:.2f} s")
        assert await gone(second)


async def test_a_killed_conductor(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    async with launching(ray_cluster.address, tmp_path) as launcher:
        process = await started(launcher, "one", tmp_path)
        conductor = conductor_of(psutil.Process())
        conductor.kill()
        assert "ended with the conductor" in await reason(process)
        assert await gone(process)
        again = await started(launcher, "again", tmp_path)  # By a new conductor.
        assert conductor_of(psutil.Process()) != conductor
    assert await gone(again)


GATEWAY = """
import asyncio, psutil, sys
from pathlib import Path
from agentjet.processes.supervisor import RayPlacement, RayProcess
from tests.processes.test_conductor import conductor_of, started

async def main():
    launcher = RayPlacement("127.0.0.1", sys.argv[1], Path(sys.argv[2]))
    process = await started(launcher, "one", Path(sys.argv[2]))
    print(process.pid, conductor_of(psutil.Process()).pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


async def test_a_killed_gateway(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GATEWAY, ray_cluster.address, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as gateway:
        assert gateway.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in (await asyncio.to_thread(gateway.stdout.readline)).split()]
        gateway.kill()
        assert len(processes) == 2 and await gone(*processes)


async def test_no_room(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    async with launching(ray_cluster.address, tmp_path) as launcher:
        await started(launcher, "one", tmp_path, gpus=1)
        launcher.placement_seconds = 0.5
        with pytest.raises(ConfigError, match=r"needs 4 GPUs on one node, and the largest has 1: set compute.tensor_p"):
            await started(launcher, "big", tmp_path, gpus=4)
        with pytest.raises(ComputeError, match=r"1 for sleepers \(1 x 1\)\. It has 1 .*this server uses 1: lower"):
            await started(launcher, "two", tmp_path, gpus=1)
        with pytest.raises(ComputeError, match=r"^lonely needs 1 GPU on one node, and none has them free \("):
            await launcher.start(Launch("lonely", SLEEPER, tmp_path / "lonely.log", gpus=1))
        launcher.placement_seconds = 0.0
        with pytest.raises(ComputeError, match="did not start within 0 s: the cluster is busy or lost nodes"):
            await started(launcher, "late", tmp_path, gpus=0)


def node_of(process: psutil.Process) -> psutil.Process:
    """The raylet of the process."""
    return actor_of(process).parents()[0]


async def test_what_starts_together_has_its_gpus_together(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    node = ray_cluster.join(2)
    raylet = node.all_processes["raylet"][0].process

    async def ranks(*names: str) -> list[Sleeper]:
        return await asyncio.gather(*(started(launcher, name, tmp_path, 1, "ranks", 2) for name in names))

    async with launching(ray_cluster.address, tmp_path) as launcher:
        await launcher.reserve([GpuGroup("ranks", 2, 1), GpuGroup("replicas", 1, 1)])
        first = await ranks("rank-0", "rank-1")
        replica = await started(launcher, "replica-1", tmp_path, 1, "replicas")
        assert [node_of(rank).pid for rank in first] == [raylet.pid] * 2 and node_of(replica).pid != raylet.pid

        await first[0].launched.stop()
        launcher.placement_seconds = 1.0
        lacking = (
            r"together are 1 for ranks of q \(1 x 1\) and 2 for replicas of q \(2 x 1\)\. It has 3 .*server uses 3: "
        )
        with pytest.raises(ComputeError, match=lacking):
            await launcher.reserve([GpuGroup("ranks of q", 1, 1), *[GpuGroup("replicas of q", 1, 1)] * 2])
        launcher.placement_seconds = 120.0
        await first[1].launched.stop()
        later = await started(launcher, "replica-2", tmp_path, 1, "replicas")
        assert node_of(later).pid == raylet.pid, "nothing is held for q, and nothing for ranks that ended"

        await replica.launched.stop()
        scattered = await ranks("rank-0.2", "rank-1.2")
        nodes = [node_of(rank).pid for rank in scattered]
        assert raylet.pid in nodes and len(set(nodes)) == 2, "the other node has one GPU"

        raylet.kill()
        assert await gone(later, scattered[nodes.index(raylet.pid)])
        for rank in scattered:
            await rank.launched.stop()
        again = asyncio.gather(ranks("rank-0.3", "rank-1.3"), started(launcher, "replica-3", tmp_path, 1, "replicas"))
        raylet.wait()
        ray_cluster.cluster.remove_node(node, allow_graceful=False)
        node = ray_cluster.join(2)
        await again

        await launcher.release({"ranks", "replicas"})
        assert not any(rank.launched.ended.done() for rank in (await again)[0]), "only what no process uses"
    raylet = node.all_processes["raylet"][0].process
    raylet.kill()
    raylet.wait()
    ray_cluster.cluster.remove_node(node, allow_graceful=False)


async def test_a_start_that_is_cancelled_takes_no_gpu(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    async with launching(ray_cluster.address, tmp_path) as launcher:
        first = await started(launcher, "first", tmp_path, gpus=1)
        cancelled = asyncio.create_task(started(launcher, "cancelled", tmp_path, gpus=1, group="others"))
        while not (tmp_path / "cancelled.log").exists():
            await asyncio.sleep(0)
        await launcher.num_gpus()  # The conductor has the request before this one.
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await first.launched.stop()
        await started(launcher, "next", tmp_path, gpus=1)
        assert not (tmp_path / "cancelled.log").read_text()


async def test_a_node_joins_and_dies(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    async with launching(ray_cluster.address, tmp_path) as launcher:
        waiting = asyncio.create_task(started(launcher, "big", tmp_path, gpus=2))
        node = ray_cluster.join()
        process = await waiting
        assert await launcher.num_gpus() == 3
        killed = time.monotonic()
        raylet = node.all_processes["raylet"][0].process
        raylet.kill()
        assert await gone(process)
        print(f"process on the dead node: {time.monotonic() - killed:.2f} s")
        assert "the raylet of its node died" in await reason(process)
        print(f"raylet: {time.monotonic() - killed:.2f} s")
        raylet.wait()
        ray_cluster.cluster.remove_node(node, allow_graceful=False)


async def test_wrong_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for address, problem in {
        "127.0.0.1:1": "nothing listens there",
        "ray://127.0.0.1:10001": "not an address of a Ray cluster: give HOST:PORT",
        "somewhere": "not an address of a Ray cluster",
    }.items():
        async with launching(address, tmp_path) as launcher:
            with pytest.raises(ConfigError, match=f"compute.address = '{address}'.*{problem}"):
                await launcher.start(Launch("one", SLEEPER, tmp_path / "log"))


async def test_reasons_of_refusals() -> None:
    from agentjet.processes.conductor import check_version, why_not_joined

    with pytest.raises(ConfigError, match=r"Ray 2.9.3 is installed and AgentJet needs 2.60 or newer: pip install"):
        check_version("2.9.3")
    mismatch = "Version mismatch: The cluster was started with:\n    Ray: 2.50.0\nThis process was started with 2.60.0"
    assert "the cluster has another version of Ray or Python: install the version of the cluster" in why_not_joined(
        "auto", mismatch
    )
    assert "needs its Ray token: copy ~/.ray/auth_token" in why_not_joined("auto", "Authentication token is missing")
    lost = "Can't find a node with IP address 10.0.0.9"
    assert "run `ray start --address=h:1` here first" in why_not_joined("h:1", lost)


async def test_the_head_goes_away(tmp_path: Path) -> None:
    """Last, because it ends a cluster."""
    made = LocalCluster()
    try:
        made.join(0)
        async with launching(made.address, tmp_path) as launcher:
            process = await started(launcher, "one", tmp_path, gpus=1)
            killed = time.monotonic()
            made.cluster.head_node.kill_gcs_server()
            assert "the head of the Ray cluster" in await reason(process)
            print(f"head: {time.monotonic() - killed:.2f} s")
            assert await gone(process)
    finally:
        made.shutdown()
