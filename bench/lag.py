"""The longest gap of a server's event loop under heavy work: `python -m bench.lag`.

Each case is one `agentjet serve` with a tiny model, over a journal that was prepared. A timer of its loop runs every
5 ms. Two figures are of the longest time between two of its runs:

* **ms**: CPU time of the whole server process, of all threads, so that other programs do not count. Children do not
  count either.
* **wall_ms**: time on the clock. It shows a hook that sleeps, and it grows on a busy machine.

| case | work |
|---|---|
| checkpoint | the journal deletes 20,000 calls of 55 kB that a checkpoint covers |
| rotation | a checkpoint of 6 GB is removed |
| turns | 8 episodes of 50 turns finish with rewards of turns, and are learned |
| batch | a batch of 100 MB is built from the journal, sent and learned in 8 steps |
| members | a batch of 128 groups of 8 episodes is learned |
| events | 200 streams read 7,000 events from the first on |
| hook_columns, hook_rollout | a hook next to the weights, and one of the gateway, sleep 40 s |
| schema | an agent asks for an answer by a schema with `multipleOf = 9999991` |
| resume | after a restart an episode with 50 long calls makes its next call |

Prints a table, then one JSON object as the last line. The exit code is 1 if a case exceeds 50 ms of CPU time, or 5 s
on the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from rich.console import Console
from rich.table import Table

from agentjet.cli import server_process
from agentjet.config import ServeConfig
from bench.gatewaying.processes import started
from bench.hostility.heavy import CASES, QUICK, Case, Live, Sizes
from bench.hostility.serve import Watch
from tests.tiny import make_model

EVERY = 0.005
"""Seconds between two runs of the timer."""
LIMITS = {"ms": 50.0, "wall_ms": 5000.0}
ROOT = Path(__file__).parents[1]
TOKEN = re.compile(r"Token of clients")
ADDRESS = re.compile(r"listens on (http://[\d.:]+)")


# ---- the server ------------------------------------------------------------------------------------------------------


def serve(settings: Path) -> None:
    """`agentjet serve` with a timer of its loop, and the route `GET /watched` for it. The first request starts it."""
    make, watches = server_process.create_app, list[Watch]()

    async def watched() -> dict[str, float]:
        if not watches:
            watches.append(Watch(EVERY))
        return watches[0].watched()

    def create_app(*given: Any) -> FastAPI:
        app = make(*given)
        app.add_api_route("/watched", watched)
        return app

    server_process.create_app = create_app
    server_process.run(ServeConfig.model_validate_json(settings.read_text()))


@contextmanager
def server(case: Case, sizes: Sizes, folder: Path, model: Path) -> Iterator[Live]:
    job = {"max_tokens": 8, "lease_seconds": 3600, "max_episode_seconds": 7200, "checkpoint_every": 0, **case.job}
    if case.recipe:
        job["recipe"] = {"name": case.recipe, "seconds": sizes.seconds}
    settings = {
        "model": {"name": str(model), "device": "cpu", "dtype": "float32", "threads": 1},
        "sampler": {"cache_tokens": 16384},
        "server": {"data_dir": str(folder / "data"), "port": 0, "keep_transcripts": 0},
        "job": job,
    }
    file, log = folder / "settings.json", folder / "serve.log"
    file.write_text(ServeConfig.model_validate(settings).model_dump_json())
    command = [sys.executable, "-m", "bench.lag", "--serve", str(file)]
    with started(command, log, ready=TOKEN.pattern, environment={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}):
        (url,) = ADDRESS.findall(log.read_text())
        yield Live(url, folder / "data" / "runs" / "default")


def measure(case: Case, sizes: Sizes, folder: Path, model: Path) -> dict[str, Any]:
    """The figures of a case, and what it did."""
    run = folder / "data" / "runs" / "default"
    case.prepare(run, sizes)
    if case.first is not None:
        with server(case, sizes, folder, model) as live:
            case.first(live, sizes)
        case.between(run, sizes)
    with server(case, sizes, folder, model) as live:
        live.ask("GET", "/watched")
        time.sleep(1.0)
        live.ask("GET", "/watched")
        facts = case.act(live, sizes)
        time.sleep(0.1)  # The gap may last.
        watched = live.ask("GET", "/watched")
        loop = live.status()["loop"] or {}
    figures = {"ms": round(1000 * watched["stall_s"], 1), "wall_ms": round(1000 * watched["wall_s"], 1)}
    return {**figures, **({"held_by": loop.get("held_by", "")} if exceeded({"": figures}) else {}), **facts}


def run(names: Sequence[str], sizes: Sizes, folder: Path, console: Console) -> dict[str, Any]:
    model = make_model(folder / "model")
    found: dict[str, Any] = {}
    for name in names:
        began = time.monotonic()
        own = folder / name
        own.mkdir()
        found[name] = measure(CASES[name], sizes, own, model)
        shutil.rmtree(own)
        console.print(f"{name}: {found[name]} in {time.monotonic() - began:.0f} s")
    return found


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    worst = {f"worst_{figure}": max(case[figure] for case in found.values()) for figure in LIMITS}
    return {**worst, "cases": found}


def exceeded(found: dict[str, Any]) -> list[str]:
    """The cases above a limit."""
    return [name for name, case in found.items() if any(case[figure] > most for figure, most in LIMITS.items())]


def table(found: dict[str, Any]) -> Table:
    grid = Table("case", "CPU ms", "wall ms", "what it did")
    for name, case in found.items():
        facts = ", ".join(f"{key} {value}" for key, value in case.items() if key not in LIMITS)
        grid.add_row(name, f"{case['ms']:g}", f"{case['wall_ms']:g}", facts)
    return grid


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES], help="some of the cases")
    parser.add_argument("--quick", action="store_true", help="small sizes, which show that the bench works")
    parser.add_argument("--folder", type=Path, help="where the journals are written; the largest case needs 7 GB")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        serve(given.serve)
        return 0
    with tempfile.TemporaryDirectory(prefix="lag-", dir=given.folder) as made:
        sizes = QUICK if given.quick else Sizes()
        found = run(given.only, sizes, Path(made), Console(stderr=True, soft_wrap=True))
    Console(width=120).print(table(found))
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps({"bench": "lag", **summarise(found), "machine": machine}))
    return 1 if exceeded(found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
