"""The guardian: a command and its children end with the launcher, with each other, and with the guardian.

It removes the folder of weights of a command that was killed, and leaves that of a process that lives.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agentjet.processes import guardian

GRANDCHILD = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); "


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        with process:  # Closes the pipes and waits.
            process.kill()


def guard(started: list[subprocess.Popen[str]], *command: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", guardian.__file__, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started.append(process)
    return process


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The command and its child, once that has started."""
    assert process.stdout is not None
    grandchild = psutil.Process(int(process.stdout.readline()))
    parent = grandchild.parent()
    assert parent is not None
    return [parent, grandchild]


def all_ended(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=30)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive if process.is_running())


def test_the_family_ends_with_the_launcher(started: list[subprocess.Popen[str]]) -> None:
    process = guard(started, sys.executable, "-c", GRANDCHILD + "p.wait()")
    processes = family(process)
    assert process.stdin is not None
    process.stdin.close()  # As the death of the launcher does.
    assert all_ended(processes)
    assert process.wait(30) == 128 + signal.SIGKILL


def test_children_end_with_the_command(started: list[subprocess.Popen[str]]) -> None:
    process = guard(started, sys.executable, "-c", GRANDCHILD + "sys.exit(3)")
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    assert process.wait(30) == 3
    assert not psutil.pid_exists(grandchild) or all_ended([psutil.Process(grandchild)])


@pytest.mark.skipif(sys.platform != "linux", reason="needs a Linux kernel")
def test_the_command_ends_with_the_guardian(started: list[subprocess.Popen[str]]) -> None:
    process = guard(started, sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    assert process.stdout is not None
    command = psutil.Process(int(process.stdout.readline()))
    os.kill(process.pid, signal.SIGKILL)
    assert all_ended([command])


def test_a_command_that_does_not_exist(started: list[subprocess.Popen[str]]) -> None:
    process = guard(started, "/nowhere/python", "-c", "1")
    assert process.wait(30) == guardian.NOT_STARTED
    assert process.stderr is not None and "/nowhere/python: No such file" in process.stderr.read()


def test_the_weights_of_a_killed_command_are_removed(
    started: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned, kept = (tmp_path / f"{guardian.PREFIX}{name}" for name in ("abandoned", "kept"))
    for folder in (abandoned, kept):
        folder.mkdir()
        (folder / guardian.LOCK).touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with (kept / guardian.LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = guard(started, sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        assert process.wait(30) == 128 + signal.SIGKILL
    assert kept.exists() and not abandoned.exists()


def test_a_place_that_cannot_be_written_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda place, mode: place != guardian.SHARED_MEMORY)
    assert guardian.SHARED_MEMORY not in guardian.places() != []
