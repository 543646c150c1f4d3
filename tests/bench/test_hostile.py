"""`bench.hostile` measures what it says.

1. A stop of the event loop is seen, in CPU seconds; a wait is none.
2. Shapes are as large as they are meant to be, and JSON where they are not meant to be broken.
3. The verdict is the worst of each, and names it; a request that is let in without a key counts.
4. The whole bench, small: every request without a key is refused as such.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

import pytest

from bench.hostile import Attack, Damage, summarise
from bench.hostility.bodies import CONTROL, ITEMS, SHAPES, shapes_of
from bench.hostility.serve import Watch


def test_a_stop_of_the_loop_is_seen() -> None:
    async def watch() -> tuple[float, float]:
        found = Watch()
        await asyncio.sleep(0.2)
        waited = found.watched()["stall_s"]
        began = time.process_time()
        while time.process_time() < began + 0.2:
            pass
        await asyncio.sleep(0.01)
        return waited, found.watched()["stall_s"]

    waited, stopped = asyncio.run(watch())
    assert waited < 0.15 and stopped >= 0.2


@pytest.mark.parametrize("path", [*ITEMS, *(path for _, path, _ in CONTROL)])
def test_shapes(path: str) -> None:
    size = 2**18
    for name, build in shapes_of(path) if path in ITEMS else SHAPES.items():
        body = build(path, size)
        assert len(body) <= size, name
        if not name.startswith("most") and "kB" not in name:
            assert len(body) > size - 100, name
        if name not in ("levels", "not JSON"):
            assert json.loads(body)["model"] == "policy", name


def test_the_verdict_is_the_worst() -> None:
    def damage(status: int, stall: float, ratio: float, token: str) -> Damage:
        return Damage(Attack("POST", "/x", f"{ratio}", SHAPES["text"], token), status, stall, ratio)

    found = [damage(401, 0.01, 1, ""), damage(200, 0.02, 9, ""), damage(413, 0.3, 2, "k"), damage(413, 0.1, 3, "k")]
    verdict = summarise(found)
    assert (verdict["stall_no_key_s"], verdict["stall_key_s"], verdict["memory_ratio"]) == (0.02, 0.3, 9)
    assert (verdict["slowest"], verdict["largest"], verdict["let_in_without_key"]) == ("/x 2", "/x 9", 1)


@pytest.mark.e2e
@pytest.mark.thorough
def test_the_whole_bench_small() -> None:
    command = [sys.executable, "-m", "bench.hostile", "--megabytes", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout, done.stderr
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert verdict["let_in_without_key"] == 0 and verdict["requests"] > 150
    assert {"stall_no_key_s", "stall_key_s", "memory_ratio"} <= verdict.keys()
    assert verdict["stall_key_s"] > 0 and verdict["memory_ratio"] > 0
