"""What viewers cost: CPU of the gateway, and the 99th percentile of the calls' times. See `measure`.

Agents make 100 calls a second from the beginning to the end. Windows without, with one and with five viewers take
turns, so that slow changes of the machine are in all of them.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from bench.gatewaying.report import percentile

RATE = 100.0
VIEWERS = (0, 1, 5)
SETTLE_SECONDS = 2.0
"""From a change of viewers until the window: they load the page's first data, which is no part of watching."""
LOAD = (sys.executable, "-m", "bench.face.load")


@dataclass(frozen=True, slots=True)
class Window:
    """A time with a number of viewers."""

    viewers: int
    begun: float
    ended: float
    cpu: float
    """CPU seconds of the gateway."""


def cpu_seconds(url: str) -> float:
    with urlopen(f"{url}/cpu", timeout=30) as answer:
        return float(answer.read())


@contextmanager
def load(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process of `bench.face.load`."""
    process = subprocess.Popen([*LOAD, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def watched(url: str, viewers: subprocess.Popen[str], rounds: int, seconds: float) -> list[Window]:
    """The windows, in the order 0 1 5, 5 1 0, ..."""
    found = []
    for number in range(rounds):
        for count in VIEWERS[:: 1 if number % 2 == 0 else -1]:
            assert viewers.stdin is not None
            print(count, file=viewers.stdin, flush=True)
            time.sleep(SETTLE_SECONDS)
            begun, cpu = time.time(), cpu_seconds(url)
            time.sleep(seconds)
            found.append(Window(count, begun, time.time(), cpu_seconds(url) - cpu))
            if viewers.poll() is not None:
                raise SystemExit("the viewers failed")
    return found


def measure(url: str, data_dir: Path, rounds: int, seconds: float) -> dict[str, float]:
    """Returns CPU in percent of a core and the ratio of p99s: medians over the rounds, of differences within a round.

    A `_noise` is the standard error of a median. CPU is that of exactly `RATE` calls a second.
    """
    token, viewer = ((data_dir / name).read_text().strip() for name in ("token", "viewer-token"))
    length = rounds * len(VIEWERS) * (seconds + SETTLE_SECONDS) + 8.0
    with load("agents", url, token, RATE, length) as agents, load("viewers", url, viewer) as viewers:
        time.sleep(5.0)  # The first calls open connections, and the gateway compiles its first templates.
        windows = watched(url, viewers, rounds, seconds)
        out, _ = agents.communicate(timeout=60 + length)
    calls = json.loads(out)["calls"]
    cpu: dict[int, list[float]] = {count: [] for count in VIEWERS}
    p99: dict[int, list[float]] = {count: [] for count in VIEWERS}
    rates = []
    for window in windows:
        times = [took for begun, took in calls if window.begun <= begun < window.ended]
        rates.append(len(times) / (window.ended - window.begun))
        cpu[window.viewers].append(100 * window.cpu * RATE / len(times))
        p99[window.viewers].append(1000 * percentile(times, 99))
    ratios = [with_viewers / without for with_viewers, without in zip(p99[5], p99[0], strict=True)]
    one, five = ([a - b for a, b in zip(cpu[count], cpu[0], strict=True)] for count in (1, 5))
    found = {
        "calls_s": statistics.mean(rates),
        "gateway_cpu": statistics.median(cpu[0]),
        "viewer_cpu": statistics.median(one),
        "viewer_cpu_noise": noise(one),
        "viewers5_cpu": statistics.median(five),
        "viewers5_cpu_noise": noise(five),
        "p99_ms": statistics.median(p99[0]),
        "p99_ratio": statistics.median(ratios),
        "p99_ratio_noise": noise(ratios),
    }
    return {name: round(value, 3) for name, value in found.items()}


def noise(values: Sequence[float]) -> float:
    """The standard error of the median, from the median absolute deviation."""
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return math.sqrt(math.pi / 2 / len(values)) * deviation
