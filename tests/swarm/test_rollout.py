"""Pins the hook `rollout`:

1. it is asked once for each group, and its answer holds for all episodes of the group, also after a restart;
2. it gets the statistics of the task: all groups that ended, also dropped ones, also after a restart;
3. it may ask for fewer episodes, skip a task, set temperature and turn limit;
4. a wrong answer is refused by name and opens nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import Field

from agentjet.config import JobConfig
from agentjet.errors import Conflict, Later, RecipeError
from agentjet.recipes.baselines import Grpo
from agentjet.recipes.registry import make_recipe
from agentjet.recipes.rollout import RECENT_EPISODES, Rollout, TaskStats
from tests.swarm.world import LEASE, World

Make = Callable[..., World]
NAME = f"{__name__}:Chosen"


class Chosen(Grpo):
    """A recipe whose answer stands in its parameters. It records the questions."""

    name: str = NAME
    answer: dict[str, Any] = Field({})
    skip_from: float = 2.0
    """Mean reward of a task from which it is skipped."""

    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        ASKED.append((task, default, version))
        if (task.mean_reward or 0.0) >= self.skip_from:
            return replace(default, skip="solved")
        return replace(default, **self.answer)


ASKED: list[tuple[TaskStats, Rollout, int]] = []


@pytest.fixture(autouse=True)
def forget() -> None:
    ASKED.clear()


def chosen(skip_from: float = 2.0, **answer: object) -> dict[str, object]:
    return {"name": NAME, "answer": answer, "skip_from": skip_from}


def refusal(world: World, group: str, **request: object) -> str:
    with pytest.raises((Conflict, Later)) as refused:
        world.begin(group, **request)
    return refused.value.code


def test_the_answer_holds_for_the_whole_group_and_survives_a_restart(make_world: Make) -> None:
    world = make_world(group_size=4, recipe=chosen(episodes=3, temperature=0.5, max_turns=7))
    first = world.begin("a")
    world.reopen()
    second, third = world.begin("a"), world.begin("a")
    assert len(ASKED) == 1 and ASKED[0] == (TaskStats("", "t"), Rollout(4, 1.0), 0)
    assert {(e.temperature, e.max_turns, e.task_mean) for e in (first, second, third)} == {(0.5, 7, None)}
    assert refusal(world, "a") == "group_full" and world.swarm.queries.group_size(third) == 3
    for episode in (first, second, third):
        world.call(episode, 5)
        world.finish(episode, float(episode is first))
    assert [(group.state, group.reason) for group in world.swarm.queries.groups] == [("complete", "")]


def test_a_recipe_without_the_hook_changes_nothing(world: World) -> None:
    episode = world.begin("a")
    assert (episode.temperature, episode.max_turns, world.swarm.queries.group_size(episode)) == (None, 0, 2)
    assert world.swarm.queries.groups[0].size == 0, "job.group_size may still change"


def test_places_that_the_recipe_does_not_want_are_refused_at_once(make_world: Make) -> None:
    world = make_world(group_size=4, spare_episodes=1, recipe=chosen(episodes=2))
    assert refusal(world, "a", place=3) == "group_closed", "it would have opened the group"
    assert world.swarm.queries.groups == ()
    assert [world.begin("a", place=place).status for place in (1, 0)] == ["live"] * 2
    assert refusal(world, "a", place=2) == "group_closed"
    assert world.begin("a", place=4, join_only=True).status == "live", "a spare one"
    assert refusal(world, "a", place=1) == "group_full"


def test_a_small_group_is_not_too_few(make_world: Make) -> None:
    world = make_world(group_size=4, min_group_size=4, batch_size=1, recipe=chosen(episodes=2))
    world.play("a", 0, 1)
    assert world.swarm.batches.ready()


def test_statistics_are_of_all_ended_groups_and_survive_a_restart(make_world: Make) -> None:
    world = make_world(batch_size=1, group_size=2, recipe={**chosen(), "drop_zero_variance": True})
    world.play("a", 1, 0)
    world.swarm.batches.learned(world.swarm.batches.compose(), {})
    members = [world.begin("b"), world.begin("b")]
    for episode, calls in zip(members, (1, 3), strict=True):
        for _ in range(calls):
            world.call(episode, 5)
        world.finish(episode, 1.0)  # Dropped: zero variance.
    alone = world.begin("c", task_id="other")
    world.call(alone, 5)
    world.finish(alone, 1.0)
    world.reopen()
    world.now += 3 * LEASE
    world.swarm.reap()
    assert world.swarm.episode(alone.id).dropped == "too_few"
    world.abort(world.begin("d"))  # Without an episode that finished it does not count.
    world.begin("d")
    stats, before = (replace(task, last_step={}) for task, _, _ in (ASKED[-1], ASKED[-2]))
    assert stats == before == TaskStats("", "t", 2, 4, 1, (1.0, 0.0, 1.0, 1.0), (1, 1, 1, 3))
    assert (stats.mean_reward, stats.pass_rate(0.5), stats.pass_rate(2.0)) == (0.75, 0.75, 0.0)
    assert world.journal.task("", "other") == TaskStats("", "other", 1, 1, 1, (1.0,), (1,))
    assert world.journal.task("else", "t") == TaskStats("else", "t"), "task sets are apart"


def test_statistics_keep_the_newest_episodes() -> None:
    stats = TaskStats("", "t")
    assert (stats.mean_reward, stats.pass_rate(0.5)) == (None, None)
    for version in range(12):
        stats = stats.with_group([float(version)] * 8, [version] * 8, version)
    assert (stats.num_groups, stats.num_episodes, stats.last_version) == (12, 96, 11)
    assert len(stats.recent_rewards) == len(stats.recent_turns) == RECENT_EPISODES
    assert stats.recent_turns == tuple(np.repeat([8, 9, 10, 11], 8).tolist())


def test_a_skipped_task_is_refused_to_those_who_ask_for_it(make_world: Make) -> None:
    world = make_world(batch_size=2, group_size=2, recipe=chosen(skip_from=0.9))
    world.play("a", 1, 1)
    with pytest.raises(Conflict, match="skips task 't' at policy version 0: solved") as refused:
        world.begin("b", unless_skipped=True)
    assert refused.value.code == "task_skipped" and len(world.swarm.queries.groups) == 1
    first = world.begin("b")
    assert world.begin("b", unless_skipped=True).group_id == first.group_id, "its group is open"
    assert first.task_mean == 1.0


def test_the_batch_has_the_mean_of_earlier_episodes(make_world: Make) -> None:
    world = make_world(batch_size=2, group_size=2, recipe=chosen(temperature=0.7, max_turns=3))
    world.play("a", 1, 0)
    world.play("b", 1, 1)
    batch = world.swarm.batches.compose()
    facts = world.training(batch).facts
    assert facts is not None and facts.task_means is not None
    np.testing.assert_equal(facts.task_means, [np.nan, np.nan, 0.5, 0.5])
    metrics = world.swarm.batches.learned(batch, {})
    assert (metrics["rollout/temperature"], metrics["rollout/max_turns"]) == (pytest.approx(0.7), 3)


def test_the_hook_gets_the_metrics_of_the_newest_batch(make_world: Make) -> None:
    world = make_world(batch_size=1, group_size=2, recipe=chosen(temperature=0.7))
    world.play("a", 1, 0)
    world.swarm.batches.learned(world.swarm.batches.compose(), {"policy/entropy": 0.25, "state/heat": 2.0})
    world.reopen()
    world.begin("b")
    assert [dict(task.last_step).get("policy/entropy") for task, _, _ in ASKED] == [None, 0.25]
    assert ASKED[-1][0].last_step["state/heat"] == 2.0, "the state of the recipe"
    stored = world.journal.task("", "t")
    assert stored.num_groups == 1 and stored.last_step == {}, "the metrics are those of the run, not of the task"


def test_the_temperature_of_the_documentation() -> None:
    page = Path(__file__).parents[2] / "docs" / "recipes.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    module: dict[str, Any] = {}
    exec(next(block for block in blocks if "class Heated" in block), module)
    recipe = module["Heated"]()
    assert recipe.next_state({"entropy": 1.0}, {"policy/entropy": 0.0}) == {"entropy": 0.9}
    default = Rollout(8, 1.0)
    for entropy, temperature in ((0.9, 1.0), (0.2, 1.2)):
        task = TaskStats("", "t", last_step={"state/entropy": entropy})
        assert recipe.rollout(task, default, 3) == Rollout(8, temperature)
        assert recipe.rollout(replace(task, recent_rewards=(1.0,)), default, 3).episodes == 4


def test_evaluation_episodes_are_not_asked_about(make_world: Make) -> None:
    world = make_world(recipe=chosen(max_turns=1))
    episode = world.begin("", mode="eval", temperature=0.3)
    assert (episode.temperature, episode.max_turns, ASKED) == (0.3, 0, [])
    assert world.swarm.queries.group_size(episode) == 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"episodes": 9}, "episodes = 9: give a whole number from 2 to 4"),
        ({"episodes": 1}, "episodes = 1: give a whole number from 2 to 4"),
        ({"episodes": 2.5}, "episodes = 2.5"),
        ({"temperature": float("nan")}, "temperature = nan: give a number from 0.01 to 10"),
        ({"temperature": 0}, "temperature = 0"),
        ({"max_turns": -1}, "max_turns = -1"),
        ({"max_turns": True}, "max_turns = True"),
        ({"skip": 3}, "skip = 3: give a reason as text"),
        ({"turns": 3}, "TypeError"),
        ({"episodes": None}, "episodes = None"),
    ],
)
def test_a_wrong_answer_is_refused_by_name(make_world: Make, answer: dict[str, object], message: str) -> None:
    world = make_world(group_size=4, recipe=chosen(**answer))
    with pytest.raises(RecipeError, match=f"the recipe '{NAME}': `rollout`") as refused:
        world.begin("a")
    assert message in str(refused.value)
    assert world.swarm.queries.groups == () and world.journal.outcomes()["live"] == 0


def test_numbers_of_numpy_are_numbers() -> None:
    rollout = Rollout(np.int64(2), np.float32(0.5), np.int32(3)).checked(Rollout(4, 1.0), 2)  # type: ignore[arg-type]
    assert [type(value) for value in (rollout.episodes, rollout.temperature, rollout.max_turns)] == [int, float, int]


def test_stages_of_task_sets_and_weights_of_task_sets_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="recipe staged decides which task set is sampled"):
        JobConfig(recipe=make_recipe("staged"), task_weights={"easy": 1.0})
