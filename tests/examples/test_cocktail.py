"""1. The two environments cannot be one; every task set has one, a weight and tasks of that set. 2. The rules of right
answers. 3. Shortened, without environments: two client processes and one server; every batch is mixed by weight.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentjet.cli.serve import ChildServer
from agentjet.client.threads import raise_on_signals
from agentjet.config import load_config
from examples.cocktail.client import TASK_SETS, ends_with, is_same
from examples.cocktail.train import ENVIRONMENTS, HERE, SETTINGS, run_clients, summary
from tests.tiny import make_model, overrides


def test_every_task_set_has_a_weight_and_an_environment() -> None:
    weights = load_config(SETTINGS).job.task_weights
    assert weights.keys() == TASK_SETS.keys() == ENVIRONMENTS.keys()
    assert {f"{name}.txt" for name in ENVIRONMENTS.values()} == {path.name for path in HERE.glob("environments/*.txt")}


def test_the_environments_exclude_each_other() -> None:
    wanted = {path.stem: path.read_text().splitlines() for path in HERE.glob("environments/*.txt")}
    assert "openai<2" in wanted["sums"] and "openai>=3" in wanted["reasoning"]


@pytest.mark.parametrize("name", ["addition", "subtraction"])
def test_tasks_are_of_their_set_and_have_right_answers(name: str) -> None:
    tasks = TASK_SETS[name].tasks()
    assert {task.task_set for task in tasks} == {name}
    assert len({task.id for task in tasks}) == len(tasks)
    for task in tasks:
        question, answer = task.payload
        asked, _, result = answer.partition(" = ")
        assert asked in question and eval(asked) == int(result) >= 0
        assert TASK_SETS[name].is_right(f" {answer}\n", answer)


def test_what_counts_as_right() -> None:
    assert not is_same("3 + 4 = 8", "3 + 4 = 7")
    assert ends_with("The answer is -3.", "-3") and not ends_with("-3 or 4", "-3") and not ends_with("", "0")


@pytest.mark.e2e
@pytest.mark.thorough
def test_batches_are_mixed_by_weight(tmp_path: Path) -> None:
    settings = overrides(
        make_model(tmp_path / "model"),
        max_steps=3,
        batch_size=4,
        group_size=2,
        task_weights="{addition = 3, subtraction = 1}",
    )
    folder = tmp_path / "server"
    with raise_on_signals(), ChildServer(SETTINGS, settings, folder) as server, server.connect():
        clients = run_clients(server.url, folder, dict.fromkeys(("addition", "subtraction"), Path(sys.executable)))
    assert [client["task_set"] for client in clients] == ["addition", "subtraction"]
    for client, weight in zip(clients, (0.75, 0.25), strict=True):  # 12 groups in all: never more than one astray
        assert abs(sum(client["shares"]) * 4 - weight * 12) <= 1, client["shares"]
    assert all(client["failed"] == 0 for client in clients)
    assert summary({"addition": 3, "subtraction": 1}, clients)["task_sets"]["addition"]["weight"] == 0.75
