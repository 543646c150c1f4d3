"""The verdict of `bench.step` is about TRL's fastest mode, and says when it compares unequal things."""

from __future__ import annotations

from typing import Any

import pytest

from bench.step import CONTENDERS, OURS, summarise
from bench.workload import StepTime, Workload, report, reward


def timed(step: float, sampled: int = 768) -> dict[str, Any]:
    return {
        "step_s": step,
        "sampling_s": step / 4,
        "learning_s": step * 3 / 4,
        "prompt_tokens": 3008,
        "sampled_tokens": sampled,
    }


def test_speedup_is_against_the_fastest_mode() -> None:
    modes = [name for name in CONTENDERS if name != OURS]
    results = {OURS: timed(4.0), **{name: timed(10.0 + i) for i, name in enumerate(reversed(modes))}}
    verdict = summarise(results)
    assert (verdict["speedup"], verdict["best_trl"]) == (2.5, modes[-1])
    assert verdict["equal_sampled_tokens"]


def test_a_mode_that_failed_is_no_baseline() -> None:
    assert summarise({OURS: timed(4.0), "a": {"failed": "no"}, "b": timed(8.0)})["best_trl"] == "b"
    assert summarise({OURS: timed(4.0), "a": {"failed": "no"}}) == {"speedup": None}
    assert summarise({OURS: {"failed": "no"}, "a": timed(8.0)}) == {"speedup": None}


def test_unequal_work_is_told() -> None:
    assert not summarise({OURS: timed(4.0), "a": timed(8.0, sampled=700)})["equal_sampled_tokens"]


def test_warm_up_steps_do_not_count() -> None:
    workload = Workload(warmup=1, steps=3)
    steps = [StepTime(sampling=s, learning=10.0, prompt_tokens=1, sampled_tokens=2) for s in (100.0, 1.0, 3.0, 2.0)]
    assert report(workload, steps, "cpu")["step_s"] == 12.0


def test_every_contender_gets_the_same_questions() -> None:
    workload = Workload(num_prompts=3, warmup=1, steps=2)
    assert Workload.from_json(workload.to_json()).questions() == workload.questions()
    assert len(workload.questions()) == 9


@pytest.mark.parametrize(("text", "value"), [("42", 1.0), ("a1", 0.5), ("", 0.0)])
def test_reward_is_the_share_of_digits(text: str, value: float) -> None:
    assert reward(text) == value
