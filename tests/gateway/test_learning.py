"""The trend of the training reward.

1. Fewer than eight steps with rewards are too early.
2. On flat noisy rewards, also correlated ones, at most 5 % of the looks find a rise, and at most 5 % a fall.
3. A steep rise and a steep fall are found.
4. A rise is not called learning if the held-out score fell clearly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agentjet.gateway.learning import learning
from agentjet.protocol import EvaluationView

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


@pytest.mark.parametrize(("num_steps", "correlation"), [(8, 0.0), (8, 0.3), (12, 0.3), (20, 0.0), (20, 0.5)])
def test_flat_rewards_are_rarely_called_rising(num_steps: int, correlation: float) -> None:
    answers = [learning(steps(0.5 + 0.1 * run)).answer for run in noise(num_steps, correlation)]
    assert answers.count("yes") <= 0.05 * NUM_RUNS and answers.count("falls") <= 0.05 * NUM_RUNS


def test_flat_shares_of_successes_are_rarely_called_rising() -> None:
    runs = np.random.default_rng(0).binomial(32, 0.1, (NUM_RUNS, 20)) / 32
    assert [learning(steps(run)).answer for run in runs].count("yes") <= 0.05 * NUM_RUNS


def test_rises_and_falls_are_found() -> None:
    ramp = np.arange(20) * 0.02
    rising = [learning(steps(0.2 + ramp + 0.1 * run)).answer for run in noise(20, 0.0)]
    falling = [learning(steps(0.8 - ramp + 0.1 * run)).answer for run in noise(20, 0.0)]
    assert rising.count("yes") > 0.9 * NUM_RUNS and falling.count("falls") > 0.9 * NUM_RUNS


def test_only_the_newest_steps_count_and_the_answer_is_repeatable() -> None:
    rewards = [*np.linspace(0, 0.9, 30), *[0.9, 0.91] * 10]
    found = learning(steps(rewards))
    assert found.answer == "no" and found.num_steps == 20 and found == learning(steps(rewards))
    assert found.low is not None and found.high is not None and found.slope is not None
    assert found.low <= found.slope <= found.high and "reward 0.062 to 0.9" in found.text


def test_a_fallen_held_out_score_forbids_a_yes() -> None:
    rewards = steps(np.linspace(0.1, 0.9, 20))
    assert learning(rewards).answer == "yes"
    fallen = learning(rewards, [evaluation(5, 0.6), evaluation(20, 0.3)])
    assert fallen.answer == "no" and "from 0.6 at version 5 to 0.3 at version 20" in fallen.text
    assert learning(rewards, [evaluation(5, 0.6, 10), evaluation(20, 0.5, 10)]).answer == "yes"
    assert learning(rewards, [evaluation(5, 60.0), evaluation(20, 30.0)]).answer == "yes"  # Its error is unknown.
