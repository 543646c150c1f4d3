"""`bench.lag` measures what it says.

1. A stop of the loop that uses no CPU time shows in the wall time only; one that computes shows in both.
2. The worst of all cases is reported, and a case above a limit is named.
3. The whole bench, small: each case does its work.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import pytest

from bench.hostility.serve import Watch
from bench.lag import CASES, exceeded, summarise


def test_a_stop_that_waits_and_one_that_computes() -> None:
    async def stopped(stop: Any) -> tuple[float, float]:
        watch = Watch(0.005)
        await asyncio.sleep(0.02)
        watch.watched()
        stop()
        await asyncio.sleep(0.02)
        found = watch.watched()
        return found["stall_s"], found["wall_s"]

    def compute() -> None:
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass

    cpu, wall = asyncio.run(stopped(lambda: time.sleep(0.2)))
    assert cpu < 0.1 and wall >= 0.2
    cpu, wall = asyncio.run(stopped(compute))
    assert cpu >= 0.2


def test_the_worst_case_is_reported_and_named() -> None:
    found = {
        "a": {"ms": 50.0, "wall_ms": 900.0},
        "b": {"ms": 50.1, "wall_ms": 60.0},
        "c": {"ms": 1.0, "wall_ms": 5001.0},
    }
    assert {"worst_ms": 50.1, "worst_wall_ms": 5001.0}.items() <= summarise(found).items()
    assert exceeded(found) == ["b", "c"]


@pytest.mark.e2e
@pytest.mark.thorough
def test_the_bench_in_small() -> None:
    done = subprocess.run([sys.executable, "-m", "bench.lag", "--quick"], capture_output=True, text=True)
    assert done.stdout, done.stderr
    cases = json.loads(done.stdout.splitlines()[-1])["cases"]
    assert cases.keys() == CASES.keys() and all(case["ms"] > 0 for case in cases.values())
    assert [name for name, case in cases.items() if case["ms"] > 50] == [], cases  # CPU time: other programs add none.
    work = {
        "checkpoint": ("deleted_calls", 200),
        "rotation": ("removed_gb", 0.05),
        "turns": ("turns", 5.0),
        "batch": ("steps", 8.0),
        "members": ("members", 1024.0),
        "events": ("streams", 5),
        "schema": ("refused", "unsupported_schema"),
        "resume": ("answered", True),
    }
    assert {name: cases[name][fact] for name, (fact, _) in work.items()} == {
        name: did for name, (_, did) in work.items()
    }
    assert all(cases[name]["seconds"] >= 2 for name in ("hook_columns", "hook_rollout"))
    assert cases["batch"]["tokens"] > 19_000 and cases["events"]["events"] >= 400
