"""A gateway whose event loop is watched, as a process: `python -m bench.hostility.serve --data-dir ...`.

The product's application over a scripted model, as in `bench.gatewaying.serve`. A callback that asks to be called every
two milliseconds notes how much CPU time the whole process spent between two of its calls. Time in which another thread
holds Python's lock counts, as the loop stands still then, too; time in which the machine did something else does not.

Beside the product's routes it has `GET /watched`: the longest stop since that was last asked, and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import replace
from pathlib import Path

import uvicorn

from agentjet.config import ServeConfig
from agentjet.gateway.runs import Runs
from agentjet.server import Keys, create_app
from agentjet.server.http import listen, tune_python, uvicorn_config
from bench.gatewaying.scripted import MODEL, ScriptedCompute, make_model_info

EVERY = 0.002
"""Seconds between two looks."""
CONTEXT_LENGTH = 131_072
"""Context length of the served model, large enough for long texts."""


class Watch:
    """The longest stop of an event loop, in CPU seconds of its process and in seconds of the wall clock."""

    def __init__(self, every: float = EVERY) -> None:
        self._loop = asyncio.get_running_loop()
        self._every = every
        self._last = self._now()
        self._longest = (0.0, 0.0)
        self._loop.call_later(every, self._look)

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.process_time(), time.monotonic()

    def _look(self) -> None:
        (cpu, wall), now = self._last, self._now()
        self._longest = max(self._longest[0], now[0] - cpu), max(self._longest[1], now[1] - wall)
        self._last = now
        self._loop.call_later(self._every, self._look)

    def watched(self) -> dict[str, float]:
        """Since the last time; memory in MiB, now and at its highest (Linux)."""
        (stall, wall), self._longest = self._longest, (0.0, 0.0)
        lines = Path("/proc/self/status").read_text().splitlines()
        sizes = {
            line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith(("VmHWM", "VmRSS"))
        }
        Path("/proc/self/clear_refs").write_text("5")  # The highest is counted anew.
        return {"stall_s": stall, "wall_s": wall, "rss_mb": sizes["VmRSS"], "highest_mb": sizes["VmHWM"]}


def config(data_dir: Path, megabytes: int) -> ServeConfig:
    server = {"data_dir": data_dir, "max_body_mb": megabytes}
    return ServeConfig.model_validate(
        {"model": {"name": MODEL}, "server": server, "job": {"max_episode_seconds": 7200}}
    )


async def serve(data_dir: Path, megabytes: int) -> None:
    card = replace(make_model_info(data_dir / "tokenizer"), context_length=CONTEXT_LENGTH)
    runs = Runs(config(data_dir, megabytes), ScriptedCompute(card, 0.0))
    app = create_app(runs, Keys.open(data_dir))
    watch: list[Watch] = []

    async def watched() -> dict[str, float]:
        return watch[0].watched()

    app.add_api_route("/watched", watched)
    with listen("127.0.0.1", 0) as listener:
        await runs.start()
        await runs.default.engine.wait_until_up()
        tune_python()
        watch.append(Watch())
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        await uvicorn.Server(uvicorn_config(app, runs.default.config.server)).serve([listener])
    await runs.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, required=True, help="server.max_body_mb")
    given = parser.parse_args()
    asyncio.run(serve(given.data_dir, given.megabytes))


if __name__ == "__main__":
    main()
