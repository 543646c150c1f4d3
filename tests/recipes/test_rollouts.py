"""The recipes that choose rollouts, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from agentjet.errors import InvalidRequest
from agentjet.recipes.registry import make_recipe
from agentjet.recipes.rollout import Rollout, TaskStats

DEFAULT = Rollout(8, 1.0)


def task(rate: float, *, turns: int = 1, version: int = 0, episodes: int = 10, task_set: str = "") -> TaskStats:
    """A task of whose episodes the part `rate` passed, each in `turns` calls."""
    passed = round(rate * episodes)
    rewards = [1.0] * passed + [0.0] * (episodes - passed)
    return TaskStats(task_set, "t").with_group(rewards, [turns] * passed + [50] * (episodes - passed), version)


def chosen(name: str, stats: TaskStats, version: int = 0, **parameters: object) -> Rollout:
    return make_recipe({"name": name, **parameters}).rollout(stats, DEFAULT, version)


def test_dart_samples_easy_tasks_less() -> None:
    rates = [0, 0.5, 0.6, 0.7, 0.8, 0.9, 1]
    assert [chosen("dart", task(rate)).episodes for rate in rates] == [8, 8, 8, 6, 4, 2, 2]
    assert chosen("dart", TaskStats("", "t")).episodes == 8
    small = make_recipe({"name": "dart", "min_episodes": 6}).rollout(task(1), Rollout(4, 1.0), 0)
    assert small.episodes == 4, "never above the group size of the job"


def test_dart_limits_turns_by_earlier_successes() -> None:
    assert chosen("dart", TaskStats("", "t")).max_turns == chosen("dart", task(0)).max_turns == 30
    assert [chosen("dart", task(0.5, turns=turns)).max_turns for turns in (1, 5, 11, 29)] == [2, 6, 14, 30]


def test_scaling_inter_raises_the_limit_in_stages() -> None:
    steps = [1, 100, 101, 200, 201, 999]
    found = [chosen("scaling_inter", task(0), step - 1).max_turns for step in steps]
    assert found == [10, 10, 20, 20, 30, 30]
    assert chosen("scaling_inter", task(0), 80, turns=[8, 12, 15], every=80).max_turns == 12
    for wrong in ([], [0], [2.5]):
        with pytest.raises(ValueError, match="turns"):
            make_recipe({"name": "scaling_inter", "turns": wrong})


def test_task_temperature_rises_where_episodes_agree() -> None:
    found = [chosen("task_temperature", task(rate)).temperature for rate in (0, 0.3, 0.5, 1)]
    assert found == pytest.approx([1.3, 1.12, 1.0, 1.3])
    assert chosen("task_temperature", TaskStats("", "t")) == DEFAULT
    assert chosen("task_temperature", task(1), spread=99.0).temperature == 10.0


def test_pass_rate_skips_until_the_next_test() -> None:
    assert [bool(chosen("pass_rate", task(rate)).skip) for rate in (0, 0.1, 0.9, 1)] == [True, False, False, True]
    assert chosen("pass_rate", task(1)).skip == "100% of its recent episodes passed"
    assert not chosen("pass_rate", task(1, episodes=4)).skip, "too few episodes"
    assert [bool(chosen("pass_rate", task(1, version=5), at).skip) for at in (24, 25)] == [True, False]
    assert not chosen("pass_rate", task(0), low=-1.0).skip and not chosen("pass_rate", task(1), high=2.0).skip
    with pytest.raises(ValueError, match="every task would be skipped"):
        make_recipe({"name": "pass_rate", "low": 0.5, "high": 0.5})


def test_rapo_prunes_solved_tasks() -> None:
    assert [bool(chosen("rapo_pruning", task(rate)).skip) for rate in (0, 0.8, 0.9, 1)] == [False, False, True, True]
    assert not chosen("rapo_pruning", TaskStats("", "t")).skip
    assert [bool(chosen("rapo_pruning", task(1), at, retest=7).skip) for at in (6, 7)] == [True, False]


def test_staged_opens_one_task_set_after_the_other() -> None:
    def begun(step: int, **parameters: object) -> str:
        stats = [task(0, task_set=name) for name in ("easy", "medium", "hard")]
        open_sets = [s.task_set for s in stats if not chosen("staged", s, step - 1, **parameters).skip]
        return " ".join(open_sets)

    assert [begun(step, replay=0.0) for step in (1, 100, 101, 250, 251)] == ["easy", "easy", "medium", "medium", "hard"]
    assert begun(300, replay=1.0) == "easy medium hard" and begun(1, replay=1.0) == "easy"
    share = np.mean([begun(step) == "easy medium" for step in range(101, 251)])
    assert 0.1 < share < 0.3
    with pytest.raises(InvalidRequest, match="task_set = 'x' is not one of the stages easy, medium, hard"):
        chosen("staged", task(0, task_set="x"))
    for wrong in ([100], [250, 100], [0, 5], [5, 5]):
        with pytest.raises(ValueError, match="give rising steps from 1, one for each of the 3 stages"):
            make_recipe({"name": "staged", "ends": wrong})
