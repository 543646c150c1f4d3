"""Memory and import time of the parts without a model: `python -m bench.footprint`.

Measures the resident memory of the gateway process of a real, ready `agentjet serve`; the worker holds the model and
is counted apart. Measures the time of `import agentjet` with its client, beside that of its two dependencies alone.
Prints a table, then one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.machine import grid, memory_mb, report
from tests.e2e.server import Server

RUNS = 7
CLIENT = "import agentjet; agentjet.Swarm"
DEPENDENCIES = "import httpx, pydantic"


def import_seconds(statement: str) -> float:
    """Median over fresh interpreters, less what an empty one takes to time nothing."""
    program = f"import time; began = time.perf_counter(); {statement}; print(time.perf_counter() - began)"
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(RUNS)]
    return statistics.median(float(run.stdout) for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Server(given.model, Path(folder) / "data") as server:
        figures = {"gateway_mb": memory_mb(pid=server.process.pid)}
        figures["worker_mb"] = sum(memory_mb(pid=worker) for worker in server.workers())
    figures |= {"import_s": import_seconds(CLIENT), "dependencies_s": import_seconds(DEPENDENCIES)}
    rounded = {name: round(value, 3) for name, value in figures.items()}
    report("footprint", rounded, grid({name: {"": value} for name, value in rounded.items()}), machine=False)


if __name__ == "__main__":
    main()
