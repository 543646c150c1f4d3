"""The conductor's reservations, with groups of GPUs that the test frees. Pinned here:

1. a `reserve` that is given up while it waits for its turn, or for its GPUs, takes none;
2. the time of a `reserve` counts from its turn;
3. the GPUs of a wait that Ray fails are given back;
4. Ray's head may vanish while a process waits for GPUs.

The same on a Ray cluster: `tests/processes/test_conductor.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agentjet.errors import ComputeError
from agentjet.processes.guardian import Launch
from agentjet.processes.supervisor import GpuGroup

if TYPE_CHECKING:
    from agentjet.processes.conductor import Conductor

pytestmark = [pytest.mark.needs("ray"), pytest.mark.anyio]

P, Q = (GpuGroup(f"ranks of {name}", 2, 1) for name in "pq")


class FakeGroup:
    """A placement group of Ray."""

    def __init__(self, cluster: FakeRay, group: GpuGroup) -> None:
        self.name, self._cluster = group.name, cluster

    def wait(self, seconds: float) -> bool:
        if self._cluster.error is not None:
            raise self._cluster.error
        time.sleep(0.001)
        return self._cluster.is_free


class FakeRay:
    def __init__(self) -> None:
        self.is_free = False
        """True if each group gets its GPUs."""
        self.error: Exception | None = None
        self.asked: list[FakeGroup] = []
        self.given_back: list[FakeGroup] = []

    def ask(self, group: GpuGroup, strategy: str) -> FakeGroup:
        self.asked.append(found := FakeGroup(self, group))
        return found


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    from agentjet.processes import conductor

    fake = FakeRay()
    for name, value in {
        "asked_of_ray": fake.ask,
        "give_back": fake.given_back.append,
        "gpus_of_nodes": lambda: [("node", 8)],
        "accepts": lambda head: False,
        "POLL_SECONDS": 0.001,
        "WATCH_SECONDS": 0.001,
    }.items():
        monkeypatch.setattr(conductor, name, value)
    return fake


def new_conductor() -> Conductor:
    from agentjet.processes.conductor import Conductor

    return Conductor()


async def all_given_back(conductor: Conductor, fake_ray: FakeRay) -> bool:
    await asyncio.gather(*conductor._tasks)
    return set(fake_ray.given_back) == set(fake_ray.asked)


async def test_a_reservation_that_is_given_up_takes_nothing(fake_ray: FakeRay) -> None:
    conductor = new_conductor()
    first = asyncio.create_task(conductor.reserve([P], 600.0))
    while not fake_ray.asked:
        await asyncio.sleep(0.001)
    second = asyncio.create_task(conductor.reserve([Q], 600.0))
    await asyncio.sleep(0)
    for group in (Q, P):
        await conductor.release({group.name})
    for reserving in (first, second):
        with pytest.raises(ComputeError, match="the GPUs were given back before all were free"):
            await reserving
        fake_ray.is_free = True
    assert [one.name for one in fake_ray.asked] == [P.name] and await all_given_back(conductor, fake_ray)

    await conductor.reserve([P, Q], 600.0)
    assert len(fake_ray.asked) == 3 and not await all_given_back(conductor, fake_ray)
    await conductor.release({P.name, Q.name})
    assert await all_given_back(conductor, fake_ray)


async def test_the_time_of_a_reservation_counts_from_its_turn(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    conductor, loop, deadlines = new_conductor(), asyncio.get_running_loop(), list[float]()

    async def wait(reservation: Any, deadline: float, asked: Sequence[GpuGroup]) -> None:
        deadlines.append(deadline)

    monkeypatch.setattr(conductor, "_wait", wait)
    async with conductor._reserving:
        reserving = asyncio.create_task(conductor.reserve([P], 600.0))
        await asyncio.sleep(0.01)
        turn = loop.time()
    await reserving
    assert deadlines[0] >= turn + 600.0


async def test_a_wait_that_ray_fails_gives_the_gpus_back(fake_ray: FakeRay) -> None:
    from ray.exceptions import RaySystemError

    conductor, fake_ray.error = new_conductor(), RaySystemError("no answer")
    with pytest.raises(RaySystemError):
        await conductor.reserve([P], 600.0)
    assert fake_ray.asked and await all_given_back(conductor, fake_ray)


async def test_the_head_is_gone_while_a_process_waits_for_gpus(fake_ray: FakeRay, tmp_path: Path) -> None:
    conductor = new_conductor()
    starting = asyncio.create_task(conductor.start(Launch("one", ("true",), tmp_path / "log", gpus=1)))
    while not fake_ray.asked:
        await asyncio.sleep(0.001)
    ended = asyncio.create_task(conductor.ended("one"))
    await conductor._watch_head("10.0.0.1:6379")
    assert "the head of the Ray cluster at 10.0.0.1:6379 is gone" in (await ended).reason
    assert conductor.lost.done()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert await all_given_back(conductor, fake_ray)
