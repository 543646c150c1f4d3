"""Pins of what the benches share:

1. contenders get the served worker's environment, whatever the caller's says about waiting;
2. TRL gets the faster of two environments; the verdict beside a busy core is about its mode that was fastest alone;
3. a sampler to which requests come over time samples all of them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from agentjet.compute.backend import WORKER_VARIABLES
from agentjet.compute.embedded.sampler import ModelSampler
from bench import machine, sampler, step
from bench.machine import WAITS, environment, run_contender
from bench.workload import Workload
from tests.compute.conftest import make_policy
from tests.tiny import make_model


def test_contenders_get_the_served_workers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    served = environment(2)
    assert WORKER_VARIABLES.items() <= served.items()
    assert served["OMP_NUM_THREADS"] == served["MKL_NUM_THREADS"] == "2"
    assert "GOMP_SPINCOUNT" not in served
    assert {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}.isdisjoint(environment(1, "default"))
    assert environment(1, "active")["OMP_WAIT_POLICY"] == "ACTIVE"
    assert environment(1, MORE="x")["MORE"] == "x"


def test_the_load_is_printed_before_and_after(capsys: pytest.CaptureFixture[str]) -> None:
    good = run_contender("platform", ["platform"], dict(os.environ))
    assert good.output and not good.failed and len(good.load) == 2
    bad = run_contender("missing", ["no_such_module"], dict(os.environ))
    assert "no_such_module" in bad.failed
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["platform", "missing"]
    assert all(" before, " in line and line.endswith(" after") for line in lines)


def test_other_programs_end_with_the_measurement() -> None:
    with machine.busy_cores(1):
        pass  # ends at all


def test_each_mode_of_trl_gets_the_faster_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = []

    class Beside:
        def __enter__(self) -> None:
            busy.append(1)

        def __exit__(self, *_: object) -> None:
            busy.pop()

    def measured(contender: str, workload: Workload, waiting: str = "as served") -> dict[str, Any]:
        seconds = 2.0 if contender == step.OURS else 10.0 + list(step.CONTENDERS).index(contender)
        seconds *= 2 if busy else 1
        seconds += 5 if (waiting == "default") != bool(busy) else 0
        times = dict.fromkeys(("step_s", "sampling_s", "learning_s"), seconds)
        return {**times, "prompt_tokens": 1, "sampled_tokens": 1, "peak_mb": 1, "waiting": waiting, "load": (0.0, 0.0)}

    monkeypatch.setattr(step, "busy_cores", lambda count: Beside())
    monkeypatch.setattr(step, "measure", measured)
    verdict = step.compare(Workload(), "bf16", shared=True)
    best = verdict["best_trl"]
    assert best == "trl generate, bf16 weights" and len(verdict["contenders"]) == 3
    assert verdict["contenders"][best]["waiting"] == "as served"
    assert verdict["contenders_shared"][best]["waiting"] == "default"
    assert verdict["contenders"][best]["step_s_by_waiting"] == {"as served": 11.0, "default": 16.0}
    assert verdict["speedup"] == 5.5
    assert verdict["speedup_shared"] == round(22.0 / 9.0, 3)


def test_ways_of_waiting_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(step, "MATRIX_BUSY", (0,))
    monkeypatch.setattr(step, "measure", lambda name, workload, waiting: seen.append((workload.threads, waiting)) or {})
    assert len(step.measure_waits(["passive", "active"], Workload())) == 4
    assert seen == [(1, "passive"), (1, "active"), (2, "passive"), (2, "active")]
    assert {"passive", "active", "as served"} <= set(WAITS)


def test_requests_that_come_over_time_are_all_sampled(tmp_path: Path) -> None:
    policy = make_policy(make_model(tmp_path / "tiny"))
    policy.end_tokens = frozenset()
    lengths = sampler.lengths_in_order_of_arrival(32, 4, 60)
    assert lengths.count(60) == 2 and lengths[8] == lengths[25] == 60
    batch = [[5 + i % 200] * length for i, length in enumerate(lengths)]
    ours = ModelSampler(policy, max_concurrent=8, cache_tokens=1024)
    sampler.sample_arrivals(ours, batch, new_tokens=3, in_flight=8)
    assert ours.is_idle and not ours._waiting
