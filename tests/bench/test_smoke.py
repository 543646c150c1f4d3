"""Every command of `bench/` starts, and runs in small: its last line has figures that show that the work was done."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from bench.machine import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

Figures = Mapping[str, Any]
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT / "bench").with_suffix("").parts)
    for path in (ROOT / "bench").rglob("*.py")
    if "ArgumentParser" in path.read_text(encoding="utf-8")
    and (path.stem != "trl_peer" or importlib.util.find_spec("datasets"))  # `make bench` installs TRL.
)
IN_SMALL: dict[str, tuple[list[str], Callable[[Figures], bool]]] = {
    "alarms": (["--runs", "2", "--power-runs", "2"], lambda found: len(found["rules"]) > 5),
    "capacity": (["--quick"], lambda found: {row["fronts"] for row in found["grid"]} == {0, 1}),
    "error_rates": (["--studies", "2000", "--campaigns", "1"], lambda found: 0 < found["worst_in_alphas"]["equal"] < 3),
    "face": (["--only", "page_kb"], lambda found: found["page_kb"] > 50),
    "flaky": (["--quick"], lambda found: found["shares"]["0.3"]["failed"] > 0),
    "gateway": (["--quick"], lambda found: found["errors"] == 0 and found["outcomes"]["overhead"]["calls"] == 60),
    "hostile": (["--megabytes", "1"], lambda found: found["let_in_without_key"] == 0 and found["requests"] > 150),
    "lag": (
        ["--quick"],
        lambda found: found["cases"]["checkpoint"]["deleted_calls"] == 200,
    ),
    "merge": (
        ["--quick", "--threads", "1", "--vocabulary", "1000", "--workloads", "turns12", "subagents"],
        lambda found: all(one["vs_call"] > 0 and one["token_ratio"] > 1 for one in found["workloads"].values()),
    ),
    "models": (["--only", "families"], lambda found: found["families"] == 45 and found["tools_work"] >= 13),
    "policies": (["--quick"], lambda found: found["open_s"] > 0 and found["loop_stall_ms"] > 0),
    "recipes": (["--only", "grpo", "--steps", "20"], lambda found: found["learned"] == 1 and found["replay_equal"]),
    "sampler": (["--host", "--quick"], lambda found: 0 < found["host_us_row"] < found["host_us_row_worker"]),
    "research": (["--quick"], lambda found: found["correct"] > 0.5 and found["diagnosis_correct"] > 0.8),
}
"""By command: its arguments, and True for figures of a run that did its work. The others are run by tests of their own
(`chaos`, `gpu`, `readme`, `scaling.faults`) or need more than minutes."""


def run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    line = [sys.executable, "-m", f"bench.{command}", *arguments]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_bench_starts(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0 and "usage: " in done.stdout, done.stderr


@pytest.mark.parametrize("command", IN_SMALL)
def test_a_bench_in_small(command: str) -> None:
    arguments, did_its_work = IN_SMALL[command]
    done = run(command, *arguments)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert did_its_work(found), found
