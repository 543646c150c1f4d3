"""1. Held-out tasks are about objects that are in no other task. 2. The world: actions, turn rewards, the end. 3. The
whole run, shortened, on a tiny model.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.household_game.house import EXAMPLE, HELD_OUT_OBJECTS, OBJECTS, Household
from examples.household_game.train import main
from tests.tiny import make_model, set_options

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
def test_four_actions_solve_a_task(task: object) -> None:
    payload = task.payload  # type: ignore[attr-defined]
    target, to = payload["object"], payload["to"]
    world = GAME.world(task)  # type: ignore[arg-type]
    seen = world.reset()
    for action in (f"go {payload['places'][target]}", f"take {target}", f"go {to}", f"put {target}"):
        assert action in seen.actions and not seen.done
        seen = world.step(action)
        assert seen.reward == 0.25
    assert (seen.done, seen.metrics, seen.why) == (True, {"success": 1.0}, f"the {target} is in the {to}")


def test_a_milestone_is_paid_once() -> None:
    world = GAME.world(TASKS[0])
    world.reset()
    target, where = TASKS[0].payload["object"], TASKS[0].payload["places"][TASKS[0].payload["object"]]
    actions = [f"go {where}", f"take {target}", f"put {target}", f"take {target}"]
    assert [world.step(action).reward for action in actions] == [0.25, 0.25, 0.0, 0.0]


@pytest.mark.e2e
@pytest.mark.thorough
def test_the_run_shortened(tmp_path: Path) -> None:
    sets = set_options(make_model(tmp_path / "model"), max_steps=2, batch_size=2, group_size=2, max_tokens=32)
    out = tmp_path / "out"
    result = main(["--out", str(out), "--tasks", "4", "--processes", "2", *sets])
    assert json.loads((out / "result.json").read_text()) == result
    assert (result["batches"], result["aborted"], result["held_out"]["after"]["tasks"]) == (2, 0, 4)
    assert 0 <= result["before"] <= 1 and result["episodes"] >= 8 and result["seconds"] > 0
