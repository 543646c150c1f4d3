"""The trend of the training reward.

1. Fewer than eight steps with rewards are too early.
2. Of whole flat runs, also with correlated rewards, at most 2 % show a rise or a fall at any look.
3. A steep rise and a steep fall are found.
4. A rise that has ended is called learned, and a flat run is not.
5. Each policy's own rewards are judged.
6. A rise is not called learning if the held-out score fell clearly; of whole flat series of scores at most 2 % fall.
7. Rewards of other code of the agent are not compared; clients with their own code each are one trend.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agentjet.protocol import EvaluationView
from agentjet.server.learning import held_out_fall, learning

NUM_RUNS = 600


def steps(rewards: Any) -> list[dict[str, float]]:
    return [{"reward/mean": float(reward)} for reward in rewards]


def evaluation(version: int, score: float, num_tasks: int = 200) -> EvaluationView:
    return EvaluationView(
        policy_version=version,
        score=score,
        num_tasks=num_tasks,
        num_episodes=num_tasks,
        time=0.0,
        best=False,
        undone=False,
    )


def noise(num_steps: int, correlation: float) -> NDArray[np.float64]:
    """Normal noise (NUM_RUNS, num_steps) whose neighbours correlate."""
    made = np.random.default_rng(num_steps).normal(size=(NUM_RUNS, num_steps + 20))
    for step in range(1, num_steps + 20):
        made[:, step] += correlation * made[:, step - 1]
    return np.asarray(made[:, 20:])


def test_too_few_steps() -> None:
    found = learning(steps([0.1] * 7))
    assert (found.answer, found.slope, found.num_steps) == ("too_early", None, 7) and "7 of the 8" in found.text
    assert learning([{"policy/cross_entropy": 1.0}] * 30).num_steps == 0
    assert learning(steps([0.1] * 8)).answer == "no"


def answers_of(rewards: Any) -> set[str]:
    """The answers at all looks at a run."""
    made = steps(rewards)
    return {learning(made[max(0, end - 50) : end], first=made[:10]).answer for end in range(1, len(made) + 1)}


@pytest.mark.parametrize(("num_steps", "correlation"), [(20, 0.0), (60, 0.0), (60, 0.3)])
def test_whole_flat_runs_rarely_show_a_rise_or_a_fall(num_steps: int, correlation: float) -> None:
    found = [answers_of(0.5 + 0.1 * run) for run in noise(num_steps, correlation)[:300]]
    for answer in ("yes", "learned", "falls"):
        assert sum(answer in one for one in found) <= 0.02 * 300, answer


def test_rises_and_falls_are_found() -> None:
    ramp = np.arange(30) * 0.02
    rising = [learning(steps(0.2 + ramp + 0.1 * run)).answer for run in noise(30, 0.0)]
    falling = [learning(steps(0.8 - ramp + 0.1 * run)).answer for run in noise(30, 0.0)]
    assert rising.count("yes") > 0.9 * NUM_RUNS and falling.count("falls") > 0.9 * NUM_RUNS


def test_only_the_newest_steps_count_and_the_answer_is_repeatable() -> None:
    rewards = [*np.linspace(0, 0.9, 30), *[0.9, 0.91] * 15]
    found = learning(steps(rewards[10:]))
    assert found.answer == "learned" and found.num_steps == 30 and found == learning(steps(rewards[10:]))
    assert found.low is not None and found.high is not None and found.slope is not None
    assert found.low <= found.slope <= found.high


def test_a_plateau_after_a_rise_is_called_learned() -> None:
    plateau = steps([45.0, 44.0, 45.5] * 10)
    assert learning(plateau).answer == "no", "the first steps are not known"
    found = learning(plateau, first=steps([-3.5, -3.0, -2.0] * 3))
    assert found.answer == "learned"
    assert found.text == "It has learned: reward -2.8 at first, 45 now. The newest 30 steps do not show a further rise"
    fallen = [evaluation(5, 0.6), evaluation(20, 0.3)]
    assert learning(plateau, fallen, first=steps([-3.5, -3.0, -2.0] * 3)).answer == "no"


def coded(*runs: tuple[str, int, float]) -> list[dict[str, float]]:
    """Steps of code versions, separated by commas: their number and their nearly constant reward."""
    return [
        {"reward/mean": reward + 0.001 * (n % 3)}
        | {f"code/{one}/reward_mean": reward for one in versions.split(",") if one}
        for versions, num, reward in runs
        for n in range(num)
    ]


@pytest.mark.parametrize(
    ("played", "answer", "counted"),
    [
        ((("a", 10, 0.04), ("b", 10, 15.0)), "no", "changed to b: 10 steps"),
        ((("a", 10, 0.04), ("a,b", 1, 7.0), ("b", 29, 15.0)), "no", "changed to b: 30 steps"),
        ((("a", 20, 15.0), ("b", 12, 0.04)), "no", "changed to b: 12 steps"),
        ((("a", 20, 15.0), ("b", 5, 0.04)), "too_early", "changed to b: 5 steps"),
        ((("a", 10, 15.0), ("b", 10, 0.04), ("a", 10, 15.0)), "no", "changed to a: 10 steps"),
        ((("a", 10, 0.04), ("b", 70, 15.0)), "no", "changed: 50 steps or more"),
        ((("a", 10, 0.04), ("", 10, 15.0)), "no", "changed to one without a name: 10 steps"),
        ((("", 10, 0.04), ("a", 70, 15.0)), "no", "changed: 50 steps or more"),
        ((("a", 4, 0.04), ("b", 70, 15.0)), "no", ""),
        ((("a,b", 10, 0.04), ("a", 2, 0.04), ("b", 2, 0.04), ("a,b", 60, 15.0)), "learned", ""),
    ],
)
def test_rewards_of_other_code_are_not_compared(
    played: tuple[tuple[str, int, float], ...], answer: str, counted: str
) -> None:
    made = coded(*played)
    found = learning(made[-50:], first=made[:10])
    assert found.answer == answer and counted in found.text, found.text
    assert ("the agent's code" in found.text) == bool(counted), found.text


def test_each_policy_has_its_own_rewards() -> None:
    """The planner rises, and the reward of the episodes does not show it."""
    made = [
        {"reward/mean": 0.5, "planner/reward/mean": 0.04 + 0.03 * n, "coder/reward/mean": 0.5 + 0.01 * (n % 2)}
        for n in range(30)
    ]
    found = learning(made, policies=("planner", "coder"))
    assert found.answer == "yes" and found.text.startswith("planner: Yes: +0.03") and "coder: Not certain" in found.text
    same = [{"reward/mean": 0.1 * n, "a/reward/mean": 0.1 * n, "b/reward/mean": 0.1 * n} for n in range(9)]
    assert learning(same, policies=("a", "b")).text.startswith("Yes: +0.1")


def test_flat_held_out_scores_rarely_fall_over_a_whole_run() -> None:
    scores = np.random.default_rng(0).binomial(50, 0.5, (NUM_RUNS, 50)) / 50
    alarms = [
        any(held_out_fall([evaluation(v, s, 50) for v, s in enumerate(run[:end])]) for end in range(2, 51, 4))
        for run in scores
    ]
    assert sum(alarms) <= 0.02 * NUM_RUNS


def test_only_held_out_scores_of_as_many_tasks_are_compared() -> None:
    assert held_out_fall([evaluation(5, 0.9), evaluation(9, 0.4)])
    assert not held_out_fall([evaluation(5, 0.9, 100), evaluation(9, 0.4)])
    undone = evaluation(5, 0.9).model_copy(update={"undone": True})
    assert not held_out_fall([undone, evaluation(9, 0.4)])
    other = evaluation(9, 0.4).model_copy(update={"held_out": False})
    assert not held_out_fall([evaluation(5, 0.9), other])
    assert held_out_fall([evaluation(5, 0.9), other, evaluation(9, 0.4), other])
    assert held_out_fall([evaluation(v, s, 100) for v, s in enumerate([0.7, 0.7, 0.7, 0.45, 0.45, 0.45])])


def test_a_fallen_held_out_score_forbids_a_yes() -> None:
    rewards = steps(np.linspace(0.1, 0.9, 20))
    assert learning(rewards).answer == "yes"
    fallen = learning(rewards, [evaluation(5, 0.6), evaluation(20, 0.3)])
    assert fallen.answer == "no" and "from 0.6 at version 5 to 0.3 at version 20" in fallen.text
    assert learning(rewards, [evaluation(5, 0.6, 10), evaluation(20, 0.5, 10)]).answer == "yes"
    assert learning(rewards, [evaluation(5, 60.0), evaluation(20, 30.0)]).answer == "yes"  # Its error is unknown.
