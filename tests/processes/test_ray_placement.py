"""The refusals of the placement on Ray that need no Ray, and the actor of a process outside of Ray.

1. Without Ray, the error has the command that installs it.
2. A node without the interpreter, or without the gateway's files, is refused with the thing to do.
3. A process that needs no shared files logs to the node's own folder.
4. The end of a process has its exit code and the last line of its log.
5. A cluster that was joined once and went away is asked again; one that was never joined is a wrong setting.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from agentjet.errors import ConfigError, Later
from agentjet.processes import guardian, ray_placement
from agentjet.processes.guardian import Launch, RayActor
from agentjet.processes.ray_placement import RayPlacement, check_ray
from agentjet.processes.supervisor import Supervisor

GUARDIAN = Path(guardian.__file__).read_text()


def keeper(log_path: Path, *command: str, shared: bool = True) -> RayActor:
    return RayActor(Launch("r/p/rank-0", command, log_path, needs_shared_files=shared), GUARDIAN)


def test_no_ray() -> None:
    with pytest.raises(ConfigError, match=r"compute.address = 'auto' needs Ray: pip install '\.\[cluster\]'"):
        check_ray("auto", lambda name: None)


class FakeConductor:
    """Joins the cluster, or raises. It ends when a test says so."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.died = error, asyncio.get_running_loop().create_future()

    async def ask(self, *_: object) -> None:
        if self.error is not None:
            raise self.error

    async def stop(self) -> None:
        if not self.died.done():
            self.died.set_result(None)


@pytest.mark.anyio
async def test_a_cluster_that_went_away_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ConfigError("nothing listens there")
    conductors = [FakeConductor(gone), FakeConductor(None), FakeConductor(gone), FakeConductor(None)]

    async def start(supervisor: Supervisor, launch: Launch) -> FakeConductor:
        return conductors.pop(0)

    monkeypatch.setattr(Supervisor, "start", start)
    monkeypatch.setattr(ray_placement, "check_ray", lambda address: None)  # The conductor is a fake: it needs no Ray.
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


def test_a_node_without_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    _, pid, problem = keeper(tmp_path / "log", "/nowhere/python", "-c", "1").start()
    assert pid == 0 and problem.startswith("it has no /nowhere/python: install AgentJet there at the same path")


def test_a_node_without_the_gateways_files(tmp_path: Path) -> None:
    _, pid, problem = keeper(tmp_path / "missing" / "log", sys.executable, "-c", "1").start()
    assert pid == 0 and "server.data_dir (checkpoints, logs)" in problem and "same path, such as NFS" in problem


def test_a_process_that_needs_no_shared_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kept = keeper(tmp_path / "missing" / "log", sys.executable, "-c", "print('hello')", shared=False)
    _, pid, problem = kept.start()
    assert pid and not problem
    assert kept.wait() == f"ended with exit code 0; see {tmp_path}/agentjet-logs/log: hello"


def test_the_end_has_code_and_last_line(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    kept = keeper(tmp_path / "log", sys.executable, "-c", "print('no memory'); print(); raise SystemExit(3)")
    kept.start()
    assert kept.wait() == f"ended with exit code 3; see {tmp_path}/log: no memory"


def test_stop_waits_for_the_end(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    kept = keeper(tmp_path / "log", "sleep", "600")
    _, pid, _ = kept.start()
    children = psutil.Process(pid).children()
    kept.stop()
    assert not psutil.pid_exists(pid) and not any(child.is_running() for child in children)
    assert kept.wait() == f"was killed by signal 9; see {tmp_path}/log"
