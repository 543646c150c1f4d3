"""The page's bars: `python -m bench.face`. Takes about ten minutes, and needs Chromium.

Prints a table, then one JSON object as the last line. A real gateway process has 10,000 episodes and 500 steps; a
browser, agents and viewers reach it on real sockets. The yes/no checks are the tests of tests/page. A figure that was
not measured is null. `--only KEY...` measures these keys, and those that are measured with them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentjet.server.page import Page
from bench.face import browser, history, page_tests, trackers, viewers
from bench.gatewaying.processes import started

BARS = {
    "overview_ms": 300, "rows_ms": 300, "episode_ms": 500, "overlay_ms": 100, "lag_ms": 1000, "viewer_cpu": 2.0,
    "viewers5_cpu": 5.0, "p99_ratio": 1.1, "page_kb": 300, "page_gz_kb": 90, "foreign": 0, "csp": 0, "xss": 0,
    "axe": 0, "keys": 12, "truth": 1.0, "tracked_once": 1.0, "browser_s": 60,
}  # fmt: skip
SHARES = ("truth", "tracked_once")
"""Figures that must reach their bar. The others must not exceed theirs."""
BROWSER = ("overview_ms", "rows_ms", "episode_ms", "overlay_ms", "lag_ms")


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, history.History]]:
    """A new server process of a new long run."""
    folder.mkdir()
    written = history.write(folder / "data", now=time.time())
    with started([sys.executable, "-m", "bench.face.serve", str(written.data_dir)], folder / "serve.log") as url:
        yield url, written


def page_sizes() -> dict[str, float]:
    """All files of the page as the server sends them, plain and compressed."""
    page = Page()
    files = [*page.files.values(), page.index]
    sizes = {
        "page_kb": sum(len(file.content) for file in files),
        "page_gz_kb": sum(len(file.compressed) for file in files),
    }
    return {name: round(size / 1000, 1) for name, size in sizes.items()}


@dataclass(frozen=True, slots=True)
class Part:
    """Figures that are measured together."""

    keys: tuple[str, ...]
    measure: Callable[[Path], dict[str, Any]]


def parts(given: argparse.Namespace) -> list[Part]:
    wanted = set(given.only or BARS)

    def in_browser(folder: Path) -> dict[str, Any]:
        with served(folder / "browser") as (url, written):
            return browser.measure(url, written, wanted)

    def with_viewers(folder: Path) -> dict[str, Any]:
        with served(folder / "viewers") as (url, written):
            return viewers.measure(url, written.data_dir, given.rounds, given.seconds)

    found = [
        Part(("page_kb", "page_gz_kb"), lambda folder: page_sizes()),
        Part(BROWSER, in_browser),
        Part(("viewer_cpu", "viewers5_cpu", "p99_ratio"), with_viewers),
        Part(("tracked_once",), lambda folder: trackers.tracked_once()),
        Part((*page_tests.TESTS, "browser_s"), page_tests.measure),
    ]
    return [part for part in found if wanted.intersection(part.keys)]


def holds(key: str, value: float) -> bool:
    return value >= BARS[key] if key in SHARES else value <= BARS[key]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(BARS), metavar="KEY", help=f"of {', '.join(BARS)}")
    parser.add_argument("--rounds", type=int, default=5, help="windows with each number of viewers")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a window")
    given = parser.parse_args()
    console = Console(stderr=True)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in parts(given):
            began = time.perf_counter()
            found |= part.measure(Path(folder))
            console.print(f"{', '.join(part.keys)}: measured in {time.perf_counter() - began:.0f} s", highlight=False)
    verdict = {key: found.pop(key, None) for key in BARS}
    table = Table("key", "must", "is", "")
    for key, value in verdict.items():
        must = f"{'at least' if key in SHARES else 'at most'} {BARS[key]:g}"
        shown = "not measured" if value is None else f"{value:g}"
        table.add_row(key, must, shown, "" if value is None or holds(key, value) else "missed")
    console.print(table)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps({"bench": "face", **verdict, **found, "machine": machine, "load": os.getloadavg()}))
    return 0 if all(value is None or holds(key, value) for key, value in verdict.items()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
