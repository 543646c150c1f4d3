"""1. The tasks: two splits with other names, commands that hold the right ones. 2. The shipped tasks are those of the
generator; their solutions get 1, and nothing gets 0, in real sandboxes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentjet.environments import EnvironmentTask
from agentjet.environments.kinds.harbor import Harbor
from agentjet.environments.model import ModelAnswer
from examples.terminal_tasks.make_tasks import (
    HELD_OUT_NAMES,
    OURS,
    TRAINING_NAMES,
    VERBS,
    Example,
    examples,
    make_ours,
    write,
)
from tests.needs import need


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def some_examples() -> list[Example]:
    """Tasks with each verb at each place."""
    return list(examples(HELD_OUT_NAMES, 25, 7))


def test_the_splits_have_other_names() -> None:
    assert set(TRAINING_NAMES).isdisjoint(HELD_OUT_NAMES)
    assert len({example.id for example in examples(TRAINING_NAMES, 400, 1)}) == 400
    assert list(examples(TRAINING_NAMES, 5, 1)) == list(examples(TRAINING_NAMES, 5, 1))
    assert {(place, verb) for example in some_examples() for place, verb in enumerate(example.verbs)} == {
        (place, verb) for place in range(3) for verb in VERBS
    }


def test_right_commands_are_among_wrong_ones() -> None:
    places = set()
    for example in some_examples():
        commands, right = example.commands(), [step.command for step in example.steps()]
        assert len(set(commands)) == len(commands) == 8 and set(right) < set(commands)
        places |= {commands.index(command) for command in right}
    assert places == set(range(8))


def test_the_shipped_tasks_are_those_of_the_generator(tmp_path: Path) -> None:
    make_ours(tmp_path)
    assert contents(tmp_path) == contents(OURS) and len(list(OURS.iterdir())) == 3


class Commands:
    max_turns = 0

    def __init__(self, commands: list[str]) -> None:
        self.commands = list(commands)

    def act(self, messages: Any, actions: Any) -> ModelAnswer:
        command = self.commands.pop(0) if self.commands else "exit"
        return ModelAnswer({"role": "assistant", "content": command}, command)


def play(folder: Path, commands: list[str]) -> tuple[float, float]:
    task = EnvironmentTask(folder.name, {"folder": str(folder)})
    reward = Harbor(target=str(folder)).play(task, Commands(commands))  # type: ignore[arg-type]
    return reward.value, reward.metrics["solved"]


@pytest.mark.parametrize("folder", sorted(OURS.iterdir()), ids=lambda folder: folder.name)
def test_solutions_are_rewarded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("bubblewrap")
    monkeypatch.chdir(tmp_path)
    solution = (folder / "solution" / "solve.sh").read_text().splitlines()[2:]
    assert play(folder, solution) == (1.0, 1.0)
    assert play(folder, []) == (0.0, 0.0)
    assert play(folder, solution[:2]) == (0.66, 0.0)
    assert play(folder, [*solution, "touch more.txt"]) == (0.66, 0.0)


def test_every_step_can_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("bubblewrap")
    monkeypatch.chdir(tmp_path)
    for example in some_examples()[:5]:
        write(example, tmp_path / "tasks")
        folder = tmp_path / "tasks" / example.id
        assert play(folder, ["\n".join(step.command for step in example.steps())]) == (1.0, 1.0)
        assert play(folder, ["true"]) == (0.0, 0.0)
