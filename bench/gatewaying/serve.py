"""The gateway under load, as a process: `python -m bench.gatewaying.serve --data-dir ...`.

Everything of `agentjet serve` except the worker: uvicorn on loopback, keys, renderer, trees, and a journal on disk.
Prints its address on standard output when it is ready and ends on SIGTERM. Adds the route `GET /counters`: resident
memory, CPU seconds, and the waits for the disk since the last request.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path

import uvicorn

from agentjet.config import ServeConfig
from agentjet.gateway.runs import Runs
from agentjet.server import Keys, create_app
from agentjet.server.http import listen, tune_python, uvicorn_config
from agentjet.swarm import Journal
from bench.gatewaying.report import Counters, percentile
from bench.gatewaying.scripted import MODEL, ScriptedCompute, make_model_info

ROOM = 1000
"""Groups of a batch, and episodes of a group: far more than any run begins, so that nothing is ever learned."""


class TimedSync:
    """A journal's wait for the disk, and how long each took; or none at all."""

    def __init__(self, journal: Journal, *, wait: bool) -> None:
        self._sync = journal.file.sync if wait else lambda: None
        self.waits: list[float] = []
        journal.file.sync = self  # type: ignore[method-assign]

    def __call__(self) -> None:
        began = time.perf_counter()
        self._sync()
        self.waits.append(time.perf_counter() - began)


def config(data_dir: Path) -> ServeConfig:
    job = {"batch_size": ROOM, "group_size": ROOM, "lease_seconds": 3600.0, "max_episode_seconds": 3600.0}
    return ServeConfig.model_validate({"model": {"name": MODEL}, "server": {"data_dir": data_dir}, "job": job})


def counters(timed: TimedSync) -> Counters:
    """Since the last time; memory in MiB (Linux)."""
    waits, timed.waits = timed.waits, []
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Counters(
        rss_mb=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        cpu_s=time.process_time(),
        commits=len(waits),
        commit_s=sum(waits),
        commit_p50_ms=1000 * percentile(waits, 50),
        commit_p99_ms=1000 * percentile(waits, 99),
    )


async def serve(data_dir: Path, seconds: float, *, wait: bool) -> None:
    runs = Runs(config(data_dir), ScriptedCompute(make_model_info(data_dir / "tokenizer"), seconds))
    if not wait:
        runs.default._journal.file.db.execute("PRAGMA synchronous = OFF")
    timed = TimedSync(runs.default._journal, wait=wait)
    app = create_app(runs, Keys.open(data_dir))
    app.add_api_route("/counters", lambda: counters(timed))
    with listen("127.0.0.1", 0, backlog=4096) as listener:
        await runs.start()
        await runs.default.engine.wait_until_up()
        tune_python()
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        await uvicorn.Server(uvicorn_config(app, runs.default.config.server)).serve([listener])
    await runs.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=0.0, help="what a completion takes")
    parser.add_argument("--without-fsync", action="store_true", help="tell before the disk has it, unlike the product")
    given = parser.parse_args()
    asyncio.run(serve(given.data_dir, given.seconds, wait=not given.without_fsync))


if __name__ == "__main__":
    main()
