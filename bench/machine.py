"""What benches share: processes and their environments, measures of a machine, and the last line of a bench.

Every contender is a separate process. The way in which OpenMP's threads wait for each other is part of its environment
and matters more than most code: spinning threads are quick on an idle machine, and slow beside other programs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import random
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentjet.compute.backend import WORKER_VARIABLES

ROOT = Path(__file__).parents[1]
CASES = Path(__file__).parent / "cases"  # Data files: cases, texts, planted troubles
ADDRESS = re.compile(r"http://[\d.]+:\d+")
READY_SECONDS = 120.0
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
SERVED = "as served"  # The product's own way of waiting
WAITS = {
    SERVED: {"OMP_WAIT_POLICY": WORKER_VARIABLES["OMP_WAIT_POLICY"]},
    "default": {},
}
"""When a thread that waits for others falls asleep: at once, or after 300,000 turns of a loop (`default`)."""


class DidNotStart(Exception):
    """A server ended, or stayed silent, before it was ready. The message has the end of its output."""


# ---- the last line ---------------------------------------------------------------------------------------------------


def report(bench: str, figures: Mapping[str, Any], *tables: Table, width: int = 120, machine: bool = True) -> None:
    """Prints the tables, then the figures as one JSON object."""
    for table in tables:
        Console(width=width).print(table)
    name = {"machine": f"{platform.machine()}, {os.cpu_count()} cores"} if machine else {}
    print(json.dumps({"bench": bench, **figures, **name}))


def grid(rows: Mapping[str, Mapping[str, Any]], *columns: str, title: str = "") -> Table:
    """A table of figures: one row for each name, with these columns, or those of the first row."""
    names = columns or tuple(next(iter(rows.values()), {}))
    table = Table(title, *names)
    for name, row in rows.items():
        table.add_row(name, *(shown(row.get(column)) for column in names))
    return table


def with_text(page: str, mark: str, text: str) -> str:
    """The Markdown page with a text between its `mark` and the next `end`."""
    start, found, rest = page.partition(f"<!-- {mark} -->\n")
    assert found, f"the page has no mark {mark}"
    return f"{start}{found}{text}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


def markdown(rows: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]) -> str:
    """A Markdown table of figures: one row for each name, and the columns of `titles`."""
    lines = [f"| | {' | '.join(titles.values())} |", f"|---|{'---|' * len(titles)}"]
    lines += [f"| {name} | {' | '.join(shown(row.get(column)) for column in titles)} |" for name, row in rows.items()]
    return "\n".join(lines)


def bounded(figures: Mapping[str, Any], least: Mapping[str, float], most: Mapping[str, float]) -> Table:
    """A table of figures beside their bounds."""
    must = {name: f">= {least[name]:g}" if name in least else f"<= {most[name]:g}" for name in [*least, *most]}
    missed = missed_bounds(figures, least, most)
    rows = {n: {"is": value, "must": must.get(n, ""), "": "missed" * (n in missed)} for n, value in figures.items()}
    return grid(rows, "must", "is", "")


def missed_bounds(figures: Mapping[str, Any], least: Mapping[str, float], most: Mapping[str, float]) -> list[str]:
    """The figures beyond their bounds. None is a figure that was not measured."""
    known = {name: value for name, value in figures.items() if value is not None}
    below = [name for name, bound in least.items() if name in known and known[name] < bound]
    return below + [name for name, bound in most.items() if name in known and known[name] > bound]


def shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed; 0 without any."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)] if ranked else 0.0


def last_json(output: str) -> Any:
    return json.loads(output.strip().splitlines()[-1])


# ---- processes -------------------------------------------------------------------------------------------------------


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
    """Runs `python -m` of `module` with its arguments, and prints one line about it."""
    before = os.getloadavg()[0]
    print(f"{name}: load average {before:.2f} before", end="", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", *module], env=environment, capture_output=True, text=True)
    after = os.getloadavg()[0]
    print(f", {after:.2f} after", file=sys.stderr, flush=True)
    return Finished(done.returncode, done.stdout, done.stderr, (round(before, 2), round(after, 2)))


def ask_process(*module: str) -> Any:
    """The last line of `python -m` of a module with its arguments, as JSON. Raises `SystemExit` if it failed."""
    done = subprocess.run([sys.executable, "-m", *module], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{module[0]} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return last_json(done.stdout)


def tests_pass(*arguments: str) -> bool:
    """True if these tests of the product pass: some figures are their result."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode == 0


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path, *, ready: str = ADDRESS.pattern, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """While inside, the process runs; its log goes to a file. Yields the text that `ready` found there.

    Raises `DidNotStart`.
    """
    with log.open("wb") as output:
        variables = {**os.environ, **(environment or {})}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=variables
        )
    try:
        yield _until_ready(process, log, re.compile(ready))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until_ready(process: subprocess.Popen[bytes], log: Path, ready: re.Pattern[str]) -> str:
    for _ in range(int(READY_SECONDS / 0.1)):
        said = log.read_text(errors="replace")
        if found := ready.search(said):
            return found[0]
        if process.poll() is not None:
            raise DidNotStart(f"it ended with exit code {process.returncode}: {said[-1000:]}")
        time.sleep(0.1)
    raise DidNotStart(f"it was not ready after {READY_SECONDS:.0f} s: {log.read_text(errors='replace')[-1000:]}")


@contextlib.contextmanager
def busy_cores(count: int, *, nice: int = 0) -> Iterator[None]:
    """Other programs: so many processes that compute without a pause. They end with this process."""
    program = f"import os; os.nice({nice})\nwhile os.getppid() == {os.getpid()}: pass"
    others = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def free_port(wanted: int = 0, *, following: int = 0) -> int:
    """`wanted` if it is free, otherwise a port that the system chooses. So many ports that follow it are free, too."""
    # Linux takes those of connections from 32768 on.
    others = [random.randrange(20_000, 32_000) for _ in range(100)] if following else [0]
    for port in ([wanted] if wanted else []) + others:
        with contextlib.ExitStack() as probes:
            try:
                for _ in range(1 + following):
                    probe = probes.enter_context(socket.socket())
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
                    port = int(probe.getsockname()[1]) + 1
            except OSError:
                continue
            return port - 1 - following
    raise RuntimeError("no port is free on 127.0.0.1")


# ---- measures (Linux) ------------------------------------------------------------------------------------------------


def memory_mb(line: str = "VmRSS", pid: int | str = "self") -> float:
    """A line of the kernel's account of a process in MiB: `VmRSS` is resident memory, `VmHWM` its highest."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(one.split()[1]) / 1024 for one in lines if one.startswith(f"{line}:"))


def forget_peak() -> None:
    """`VmHWM` of this process is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")


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
    size = 2**30 if device.type == "cuda" else 2**26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / shortest_seconds(lambda: target.copy_(source))


def product_rate() -> float:
    """Operations a second of the GPU, or of this machine without one, in a product of large bfloat16 matrices."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 8192 if device.type == "cuda" else 512
    matrix = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    return 2.0 * size**3 / shortest_seconds(lambda: matrix @ matrix)


def shortest_seconds(compute: Callable[[], object]) -> float:
    """Returns the shortest time of 5 calls, which on CUDA are waited for."""
    import torch

    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        compute()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def synchronise() -> None:
    """Waits for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def require_fast_path(policy: Any, sampler: Any = None) -> None:
    """Ends the process with a sentence if figures would be those of a slow path, of which only a log has a line.

    A sampler must have sampled: on CUDA its steps must be graphs.
    """
    if not (policy.info.shares_prefixes and policy.learns_forests):
        raise SystemExit(f"{policy.info.name} does not share prefixes here: install the versions of constraints.txt")
    graphs = sampler._graphs._graphs.get(policy, {}).values() if sampler is not None and sampler._graphs else ()
    if sampler is not None and policy.device.type == "cuda" and not (graphs and all(graphs)):
        raise SystemExit(f"steps of {policy.info.name} are not CUDA graphs: the log has the reason")
