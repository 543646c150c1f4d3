"""`examples/black_box_node` over a scripted model: the variant that needs nothing but node here, the one with npm's
`openai` where that is installed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentjet.cli.main import app
from agentjet.client.inputs import read_tasks
from examples.arithmetic.agent import held_out_tasks
from tests.fakes import recent_episodes, saying
from tests.server.serving import TOKEN, Served, in_thread, serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "black_box_node"
pytestmark = pytest.mark.needs("node")


def adds(prompt: str) -> str:
    """Even sums only."""
    a, b = map(int, re.findall(r"What is (\d+) \+ (\d+)\? Reply with only the equation\.", prompt)[-1])
    return f"{a} + {b} = {a + b}" if (a + b) % 2 == 0 else "odd"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with in_thread(serving(tmp_path / "data", saying(adds))) as (served, _):
        yield served


@pytest.mark.parametrize(
    "script", ["agent_fetch.mjs", pytest.param("agent.mjs", marks=pytest.mark.needs("npm-openai"))]
)
def test_a_program_in_another_language_is_trained(
    served: Served, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLE)
    options = ["--url", served.url, "--token", TOKEN, "--task-file", "tasks.jsonl", "--reward", "reward.py:score"]
    command = ["node", script, "{task.a}", "{task.b}"]
    arguments = ["run", *options, "--steps", "1", "--concurrency", "2", "--json", "--", *command]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert (report["steps"], report["aborted"]) == (1, 0), report
    trained = [e for e in recent_episodes(served.run.gateway.swarm, 100) if e.trained_in == 0]
    assert len(trained) == 4
    for episode in trained:
        a, b = map(int, episode.task_id.split("+"))
        assert (episode.reward, episode.num_calls) == (float((a + b) % 2 == 0), 1)


def test_its_tasks_are_sums_that_are_not_held_out() -> None:
    tasks = read_tasks(EXAMPLE / "tasks.jsonl")
    held_out = {frozenset(task.payload) for task in held_out_tasks()}
    assert len(tasks) == 400
    assert held_out.isdisjoint({frozenset((task.payload["a"], task.payload["b"])) for task in tasks})
    assert all(task.id == f"{task.payload['a']}+{task.payload['b']}" for task in tasks)
