"""The part `sandbox` of `bench.environments`.

The attempts of `tests/sandbox/attempts.py`, really made: as this user and, by root, as a plain user.
`sandbox_attempts` counts them, `sandbox_through` those that got through. `sandbox_bare` counts attempts that get
through without a sandbox, of those that are harmless there: it shows that the table is not empty words.
`sandbox_ms` and `sandbox_model_ms` are the CPU milliseconds of a start beyond the bare command, medians of 25: of
this process and of those that it waits for. `sandbox_inside_ms` are those in the sandbox, which its end hides from
the accounts of its caller: the mounts, and the Python that closes the sandbox before the command.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any, Literal

from rich.table import Table

from agentjet.sandbox import Sandbox
from bench.machine import ROOT, grid
from tests.sandbox.attempts import BARE

LEAST = {"sandbox_attempts": 60, "sandbox_bare": 20}
MOST = {"sandbox_through": 0, "sandbox_ms": 10, "sandbox_model_ms": 60}
Found = tuple[dict[str, Any], list[Table]]

STARTS = 25
NOBODY = 65_534
CPU_TIME = "cat /proc/1/schedstat /proc/$$/schedstat"
"""Prints the nanoseconds of CPU of the first process and of this one."""


def attempted(*arguments: str, user: int = 0) -> dict[str, str]:
    """What attempts got, by a process of this user or of another one."""
    with place_of(user) as place:
        environment = {**os.environ, "HOME": str(place), "TMPDIR": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, sys.path)])
        command = [python_of(user), "-m", "tests.sandbox.attempts", str(place / "attempts"), *arguments]
        identity = {"user": user, "group": user, "extra_groups": []} if user else {}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True, **identity)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])["got"]
    return found


@contextmanager
def place_of(user: int) -> Iterator[Path]:
    """A folder that serves as the home of a user."""
    with tempfile.TemporaryDirectory(prefix="agentjet-bench-", ignore_cleanup_errors=True) as name:
        (Path(name) / "attempts").mkdir()
        if user:
            shutil.chown(name, user, user)
            shutil.chown(Path(name) / "attempts", user, user)
        yield Path(name)


def python_of(user: int) -> str:
    """An interpreter that the user may run: this one may lie in the home of root."""
    choices = (sys.executable, *filter(None, map(shutil.which, ("python3", "/usr/bin/python3"))))
    for choice in choices:
        identity = {"user": user, "group": user, "extra_groups": []} if user else {}
        try:
            subprocess.run([choice, "-c", "pass"], check=True, capture_output=True, **identity)  # type: ignore[call-overload]
        except (OSError, subprocess.CalledProcessError):
            continue
        return choice
    raise SystemExit(f"no Python that user {user} may run: install one below /usr")


def spent() -> float:
    """CPU seconds of this process and of those that it waited for."""
    used = [getrusage(who) for who in (RUSAGE_SELF, RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def start_ms(network: Literal["none", "model"]) -> tuple[float, float]:
    """CPU milliseconds of a start, outside and inside, beyond those of the same command without a sandbox."""
    shell = ["/bin/sh", "-c", CPU_TIME]
    bare, starts = [], []
    with tempfile.TemporaryDirectory() as folder:
        sandbox = Sandbox(folder=Path(folder), network=network, model_url="http://127.0.0.1:9/v1")
        for _ in range(STARTS + 1):
            before = spent()
            done = subprocess.run(["/bin/sh", "-c", CPU_TIME], stdout=subprocess.PIPE, check=True)
            bare.append((spent() - before, int(done.stdout.split()[3])))
            before = spent()
            process = sandbox.start(shell, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            process.wait()
            outside = spent() - before
            assert process.stdout is not None
            with process.stdout as output:
                words = output.read().split()
            starts.append((outside, int(words[0]) + int(words[3])))
    (outside, inside), (waited, shell_ns) = (
        [statistics.median(values) for values in zip(*rows[1:], strict=True)] for rows in (starts, bare)
    )
    return 1e3 * (outside - waited), (inside - shell_ns) / 1e6


def measured() -> Found:
    passes = {pwd.getpwuid(os.getuid()).pw_name: attempted()}
    if os.getuid() == 0:
        passes["a user"] = attempted(user=NOBODY)
    bare = attempted("--bare")
    through = {f"{name}, {who}": got for who, found in passes.items() for name, got in found.items() if got}
    rows = {
        who: {"attempts": len(found), "got through": sum(map(bool, found.values()))} for who, found in passes.items()
    }
    rows["without a sandbox"] = {"attempts": len(BARE), "got through": sum(map(bool, bare.values()))}
    outside, inside = start_ms("none")
    figures = {
        "sandbox_attempts": min(len(found) for found in passes.values()),
        "sandbox_through": len(through),
        "sandbox_bare": sum(map(bool, bare.values())),
        "sandbox_ms": round(outside, 1),
        "sandbox_model_ms": round(start_ms("model")[0], 1),
        "sandbox_inside_ms": round(inside, 1),
    }
    return figures, [grid(rows), *([grid({name: {"got": got} for name, got in through.items()})] if through else [])]
