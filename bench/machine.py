"""Runs contenders in the served worker's environment, prints the machine's load average before and after, and
measures the device.

Every contender is a separate process. The way in which OpenMP's threads wait for each other is part of the environment
and matters more than most code: spinning threads are quick on an idle machine, and slow beside other programs.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentjet.compute.backend import WORKER_VARIABLES

WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
SERVED = "as served"
"""The product's own way of waiting."""
WAITS = {
    SERVED: {"OMP_WAIT_POLICY": WORKER_VARIABLES["OMP_WAIT_POLICY"]},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "spin 1000": {"GOMP_SPINCOUNT": "1000"},
    "spin 10000": {"GOMP_SPINCOUNT": "10000"},
    "default": {},
    "active": {"OMP_WAIT_POLICY": "ACTIVE"},
}
"""When a thread that waits for others falls asleep: at once, after some turns of a loop (`default`: 300,000), never."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A contender that ended; `load` is the machine's, over the last minute, before and after it."""

    code: int
    output: str
    errors: str
    load: tuple[float, float]

    @property
    def failed(self) -> str:
        """Why, as the last line that it wrote; empty where it succeeded."""
        return (self.errors.strip().splitlines() or [f"exit {self.code}"])[-1] if self.code else ""


def environment(threads: int, waiting: str = SERVED, **extra: str) -> dict[str, str]:
    """The served worker's environment, with a number of threads and a way of waiting. The caller's own is ignored."""
    kept = {name: value for name, value in os.environ.items() if name not in WAIT_VARIABLES}
    served = {name: value for name, value in WORKER_VARIABLES.items() if name not in WAIT_VARIABLES}
    count = str(threads)
    return {**kept, **served, **WAITS[waiting], "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, **extra}


def run_contender(name: str, module: Sequence[str], environment: dict[str, str]) -> Finished:
    """Run `python -m` of `module` with its arguments, and print one line about it."""
    before = os.getloadavg()[0]
    print(f"{name}: load average {before:.2f} before", end="", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", *module], env=environment, capture_output=True, text=True)
    after = os.getloadavg()[0]
    print(f", {after:.2f} after", file=sys.stderr, flush=True)
    return Finished(done.returncode, done.stdout, done.stderr, (round(before, 2), round(after, 2)))


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Other programs: so many processes that compute without a pause."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def peak_memory() -> int:
    """Most bytes that this process had so far: on the GPU if there is one, else resident."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def copy_bandwidth() -> float:
    """Bytes a second that the GPU, or this machine without one, reads and writes in a copy."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size, seconds = 2**30 if device.type == "cuda" else 2**26, []
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * size / min(seconds)
