"""The refusals of the placement on Ray that need no Ray, and the actor of a process outside of Ray.

1. Without Ray, the error has the command that installs it.
2. A node without the interpreter, or without the gateway's files, is refused with the thing to do.
3. A process that needs no shared files logs to the node's own folder.
4. The end of a process has its exit code and the last line of its log.
5. A cluster that was joined once and went away is asked again; one that was never joined is a wrong setting.
6. A start that is cancelled is stopped in the conductor, too.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import psutil
import pytest

from agentjet.errors import ConfigError, Later
from agentjet.processes import guardian, supervisor
from agentjet.processes.guardian import Launch, RayActor
from agentjet.processes.supervisor import RayPlacement, Supervisor, check_ray

GUARDIAN = Path(guardian.__file__).read_text()


def keeper(log_path: Path, *command: str, shared: bool = True) -> RayActor:
    return RayActor(Launch("r/p/rank-0", command, log_path, needs_shared_files=shared), GUARDIAN)


def test_no_ray() -> None:
    with pytest.raises(ConfigError, match=r"compute.address = 'auto' needs Ray: pip install '\.\[cluster\]'"):
        check_ray("auto", lambda name: None)


class FakeConductor:
    """Joins the cluster, or raises. It ends when a test says so. It never answers a start."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.died = error, asyncio.get_running_loop().create_future()
        self.starting, self.stopped = asyncio.Event(), list[object]()

    async def ask(self, op: str, _: object = None, subject: object = None) -> None:
        if self.error is not None:
            raise self.error
        if op == "start":
            self.starting.set()
            await asyncio.Future[None]()
        if op == "stop":
            await asyncio.sleep(0)
            self.stopped.append(subject)

    async def stop(self) -> None:
        if not self.died.done():
            self.died.set_result(None)


@pytest.fixture
def conductors(monkeypatch: pytest.MonkeyPatch) -> list[FakeConductor]:
    """Those that a placement gets, one after the other. They need no Ray."""
    conductors: list[FakeConductor] = []

    async def start(supervisor: Supervisor, launch: Launch) -> FakeConductor:
        return conductors.pop(0)

    monkeypatch.setattr(Supervisor, "start", start)
    monkeypatch.setattr(supervisor, "check_ray", lambda address: None)
    return conductors


@pytest.mark.anyio
async def test_a_start_that_is_cancelled_is_stopped(tmp_path: Path, conductors: list[FakeConductor]) -> None:
    conductors.append(conductor := FakeConductor(None))
    placement = RayPlacement("127.0.0.1", "auto", tmp_path)
    starting = asyncio.create_task(placement.start(Launch("p/rank-0", ("true",), tmp_path / "log")))
    await conductor.starting.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert conductor.stopped == ["p/rank-0"]
    await placement.close()


@pytest.mark.anyio
async def test_a_cluster_that_went_away_is_asked_again(tmp_path: Path, conductors: list[FakeConductor]) -> None:
    gone = ConfigError("nothing listens there")
    conductors += [FakeConductor(gone), FakeConductor(None), FakeConductor(gone), FakeConductor(None)]
    placement = RayPlacement("127.0.0.1", "auto", tmp_path)
    with pytest.raises(ConfigError, match="nothing listens there"):
        await placement.num_gpus()
    joined = conductors[0]
    assert await placement.num_gpus() is None
    await joined.stop()
    with pytest.raises(Later, match="is away, and is asked again every 10 s: nothing listens there"):
        await placement.num_gpus()
    assert await placement.num_gpus() is None and not conductors
    await placement.close()


@pytest.mark.parametrize(
    ("has_files", "command", "problem"),
    [
        (True, "/nowhere/python", r"^it has no /nowhere/python: install AgentJet there at the same path"),
        (False, sys.executable, r"server.data_dir \(checkpoints, logs\).* same path, such as NFS"),
    ],
)
def test_a_node_that_cannot_run_the_process(tmp_path: Path, has_files: bool, command: str, problem: str) -> None:
    log = tmp_path / "log"
    if has_files:
        log.touch()
    _, pid, reason = keeper(log, command, "-c", "1").start()
    assert pid == 0 and re.search(problem, reason)


@pytest.mark.parametrize(
    ("folder", "program", "end"),
    [
        ("missing", "print('hello')", "exit code 0; see {}/agentjet-logs/log, which ends with 'hello'"),
        (
            ".",
            "print('no memory'); print(); raise SystemExit(3)",
            "exit code 3; see {}/log, which ends with 'no memory'",
        ),
    ],
    ids=["a process that needs no shared files", "code and last line"],
)
def test_the_end_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, program: str, end: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "log").touch()
    kept = keeper(tmp_path / folder / "log", sys.executable, "-c", program, shared=False)
    _, pid, problem = kept.start()
    assert pid and not problem and kept.wait()[0] == f"ended with {end.format(tmp_path)}"


def test_stop_waits_for_the_end(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    kept = keeper(tmp_path / "log", "sleep", "600")
    _, pid, _ = kept.start()
    children = psutil.Process(pid).children()
    kept.stop()
    assert not psutil.pid_exists(pid) and not any(child.is_running() for child in children)
    assert kept.wait() == (f"ended by SIGKILL; see {tmp_path}/log", None, "", True)
