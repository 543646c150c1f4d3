"""Memory and import time of the parts without a model: `python -m bench.footprint`.

Measures the resident memory of the gateway process of a real, ready `agentjet serve`; the worker holds the model and
is counted apart. Measures the time of `import agentjet` with its client, beside that of its two dependencies alone.
Prints a table, then one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

RUNS = 7
CLIENT = "import agentjet; agentjet.Swarm"
DEPENDENCIES = "import httpx, pydantic"


def import_seconds(statement: str) -> float:
    """Median over fresh interpreters, less what an empty one takes to time nothing."""
    program = f"import time; began = time.perf_counter(); {statement}; print(time.perf_counter() - began)"
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(RUNS)]
    return statistics.median(float(run.stdout) for run in runs)


def resident_mb(pid: int) -> float:
    """Resident memory now, in MiB (Linux)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def server_mb(model: str) -> tuple[float, float]:
    """Resident memory of gateway and worker of a server that has just become ready."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "serve.log"
        command = [sys.executable, "-m", "agentjet.cli", "serve", "--model", model, "--data-dir", f"{folder}/data"]
        with log.open("wb") as output:
            server = subprocess.Popen([*command, "--port", "0"], stdout=output, stderr=subprocess.STDOUT)
        try:
            while "agentjet status" not in log.read_text():
                if server.poll() is not None:
                    raise SystemExit(f"the server ended:\n{log.read_text()}")
                time.sleep(0.1)
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            return resident_mb(server.pid), sum(resident_mb(int(child)) for child in children)
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    gateway, worker = server_mb(parser.parse_args().model)
    client, dependencies = import_seconds(CLIENT), import_seconds(DEPENDENCIES)
    grid = Table("what", "figure")
    grid.add_row("gateway, resident", f"{gateway:.0f} MB")
    grid.add_row("worker, resident", f"{worker:.0f} MB")
    grid.add_row("import agentjet, Swarm", f"{client:.3f} s")
    grid.add_row("import httpx, pydantic", f"{dependencies:.3f} s")
    Console(width=80).print(grid)
    figures = {"gateway_mb": gateway, "worker_mb": worker, "import_s": client, "dependencies_s": dependencies}
    print(json.dumps({"bench": "footprint", **{name: round(value, 3) for name, value in figures.items()}}))


if __name__ == "__main__":
    main()
