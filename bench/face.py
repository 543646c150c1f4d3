"""The page's bars: `python -m bench.face`. Takes a few minutes, and needs Chromium.

A real gateway process has 10,000 episodes and 500 steps; a browser and agents reach it on real sockets. The yes/no
checks are tests: `null` if they failed, as is a figure that was not measured. Prints a table, then one JSON object as
the last line. `--only KEY...` measures these keys, and those that are measured with them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from agentjet.server.app import Page
from bench import face_browser
from bench.machine import bounded, missed_bounds, report, started, tests_pass
from bench.scripted import Settings
from tests.locks.long_run import History, job, write

# ---- the yes/no checks are tests -------------------------------------------------------------------------------------

TESTS: Mapping[str, tuple[str, ...]] = {
    "foreign": ("tests/page/test_every_view.py", "tests/page/test_look.py"),
    "csp": ("tests/page/test_every_view.py", "tests/page/test_look.py"),
    "xss": ("tests/page/test_hostile.py",),
    "axe": ("tests/page/test_accessible.py",),
    "keys": ("tests/page/test_episodes.py", "-k", "five_keys"),
    "truth": ("tests/page/test_every_view.py", "tests/page/test_look.py"),
    "tracked_once": ("tests/trackers", "-k", "once_after_20_kills and not (mlflow or wandb)"),
}
"""The tests of a key, as arguments of pytest. `keys` presses five keys."""
PASSED = {"foreign": 0, "csp": 0, "xss": 0, "axe": 0, "keys": 5, "truth": 1, "tracked_once": 1}
"""The value of a key if its tests passed; otherwise it was not measured."""


def checked(wanted: Collection[str]) -> dict[str, int | None]:
    """The yes/no keys: each set of tests runs once."""
    passed: dict[tuple[str, ...], bool] = {}
    found: dict[str, int | None] = {}
    for key in [key for key in TESTS if key in wanted]:
        if TESTS[key] not in passed:
            passed[TESTS[key]] = tests_pass(*TESTS[key])
        found[key] = PASSED[key] if passed[TESTS[key]] else None
    return found


# ---- the figures -----------------------------------------------------------------------------------------------------

AT_MOST = {
    "overview_ms": 300, "rows_ms": 300, "episode_ms": 500, "overlay_ms": 100, "lag_ms": 1000,
    "page_kb": 350, "page_gz_kb": 115, "foreign": 0, "csp": 0, "xss": 0,
    "axe": 0, "keys": 12,
}  # fmt: skip
AT_LEAST = {"truth": 1.0, "tracked_once": 1.0}
KEYS = (*AT_MOST, *AT_LEAST)
BROWSER = ("overview_ms", "rows_ms", "episode_ms", "overlay_ms", "lag_ms")


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, History]]:
    """A new server process of a new long run."""
    folder.mkdir()
    written = write(folder / "data", now=time.time())
    settings = Settings(str(written.data_dir), job=job().model_dump(mode="json"))
    with started(settings.command(), folder / "serve.log") as url:
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
    wanted = set(given.only or KEYS)

    def in_browser(folder: Path) -> dict[str, Any]:
        with served(folder / "browser") as (url, written):
            return face_browser.measure(url, written, wanted)

    found = [
        Part(("page_kb", "page_gz_kb"), lambda folder: page_sizes()),
        Part(BROWSER, in_browser),
        Part((*TESTS,), lambda folder: checked(wanted)),
    ]
    return [part for part in found if wanted.intersection(part.keys)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KEYS, metavar="KEY", help=f"of {', '.join(KEYS)}")
    given = parser.parse_args()
    console = Console(stderr=True)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in parts(given):
            began = time.perf_counter()
            found |= part.measure(Path(folder))
            console.print(f"{', '.join(part.keys)}: measured in {time.perf_counter() - began:.0f} s", highlight=False)
    verdict = {key: found.pop(key, None) for key in KEYS}
    figures = {**verdict, **found, "load": os.getloadavg()}
    report("face", figures, bounded(verdict, AT_LEAST, AT_MOST))
    return 1 if missed_bounds(verdict, AT_LEAST, AT_MOST) else 0


if __name__ == "__main__":
    raise SystemExit(main())
