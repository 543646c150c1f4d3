"""1. Held-out tasks are about objects that are in no other task. 2. The world: actions, turn rewards, the end."""

from __future__ import annotations

import pytest

from examples.household_game.house import EXAMPLE, HELD_OUT_OBJECTS, MILESTONES, OBJECTS, Household

GAME = Household(target="")
TASKS = GAME.listed()


def test_held_out_objects_are_in_no_other_task() -> None:
    named = {
        split: {name for task in TASKS if task.split == split for name in task.payload["places"]} for split in SPLITS
    }
    assert named == {"train": set(OBJECTS), "held_out": set(HELD_OUT_OBJECTS)}
    assert named["train"].isdisjoint(named["held_out"]) and "sock" in EXAMPLE and "sock" not in named["train"]
    assert [sum(task.split == split for task in TASKS) for split in SPLITS] == [800, 200]
    assert Household(target="").listed() == TASKS


SPLITS = ("train", "held_out")


@pytest.mark.parametrize("task", TASKS[::50], ids=lambda task: task.id)
def test_three_actions_solve_a_task(task: object) -> None:
    payload = task.payload  # type: ignore[attr-defined]
    target, to = payload["object"], payload["to"]
    world = GAME.world(task)  # type: ignore[arg-type]
    seen = world.reset()
    actions = (f"go {payload['places'][target]}", f"take {target}", f"go {to}")
    for action, milestone in zip(actions, MILESTONES, strict=True):
        assert action in seen.actions and not seen.done
        seen = world.step(action)
        assert seen.reward == milestone
    assert (seen.done, seen.metrics, seen.why) == (True, {"success": 1.0}, f"the {target} is in the {to}")


def test_a_milestone_is_paid_once() -> None:
    world = GAME.world(TASKS[0])
    world.reset()
    target, where = TASKS[0].payload["object"], TASKS[0].payload["places"][TASKS[0].payload["object"]]
    actions = [f"go {where}", f"take {target}", f"put {target}", f"take {target}"]
    assert [world.step(action).reward for action in actions] == [*MILESTONES[:2], 0.0, 0.0]
