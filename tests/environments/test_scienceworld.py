"""ScienceWorld through the pool of processes, against a scripted model.

1. The library's variations are the tasks, and its split is the split. 2. Two episodes share one Java machine, which
ends with the process. 3. What is wrong is an error with the way out.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from agentjet import environments
from agentjet.environments.kinds.scienceworld import ScienceWorld
from agentjet.environments.registry import check_installed
from agentjet.errors import AgentJetError, ConfigError
from tests.environments.test_pool import below, is_running, wait_for
from tests.environments.test_training import client
from tests.fakes import saying
from tests.needs import need
from tests.server.serving import serving

need("scienceworld")
pytestmark = pytest.mark.anyio


async def test_episodes_share_a_java_machine_that_ends_with_them(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"simplifications": "easy", "processes": 1, "max_turns": 2, "num_tasks": 8}
    with environments.load("scienceworld:find-living-thing", **settings) as environment:
        assert (len(environment.tasks), len(environment.held_out)) == (4, 4)
        assert environment.tasks[0].id == "find-living-thing-0"
        before = java_machines()
        async with (
            serving(tmp_path / "data", saying(lambda prompt: '"look around"')) as served,
            client(served) as swarm,
        ):
            report = await swarm.evaluate(environment.agent, environment.tasks[:2], progress=False)
            grammars = {str(asked.params.grammar) for asked in served.run.compute.asked}
        assert report.num_aborted == 0, report.errors
        assert report.mean_metric("turns") == 2.0 and -1 <= report.mean_reward <= 1
        assert all('"teleport to kitchen"' in text and "reset task" not in text for text in grammars)
        assert len(before) == 1 and java_machines() == before, "the machine that listed the tasks plays, too"
    wait_for(lambda: not any(map(is_running, before)))


def java_machines() -> list[int]:
    return [pid for pid in below(os.getpid()) if is_running(pid) and "java" in name_of(pid)]


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("target", "settings", "error"),
    [
        ("boill", {}, "ScienceWorld has no task 'boill'; did you mean 'boil'?"),
        ("boil", {"simplifications": "simple"}, "simplifications = 'simple': Unknown simplification: 'simple'"),
        ("boil", {"max_actions": 1}, "max_actions = 1: Input should be greater than or equal to 2"),
    ],
)
def test_a_task_that_cannot_be_played(target: str, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        environments.load(f"scienceworld:{target}", **settings)


def test_without_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="need the program java: apt-get install default-jre-headless"):
        check_installed("scienceworld", ScienceWorld)


async def test_more_actions_than_allowed_are_a_failure(tmp_path: Path) -> None:
    reason = "valid actions, and max_actions is 50: increase it, or set simplifications = 'easy'"
    settings: dict[str, Any] = {"processes": 1, "num_tasks": 4, "max_actions": 50}
    with environments.load("scienceworld:1-1", **settings) as environment:
        assert environment.tasks[0].id == "boil-0", "a number names the task, too"
        async with serving(tmp_path / "data", saying(lambda prompt: '"wait"')) as served, client(served) as swarm:
            with pytest.raises(AgentJetError, match=reason):
                await swarm.evaluate(environment.agent, environment.tasks[:1], progress=False)
