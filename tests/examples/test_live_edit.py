"""`examples/live_edit` over a scripted model that follows the prompt, on the real server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agentjet import Swarm
from examples.arithmetic.agent import training_tasks
from examples.live_edit.run import AGENT, BROKEN, CORRECTED, draw, edit_live
from tests.fakes import recent_episodes, saying
from tests.server.serving import TOKEN, Served, in_thread, serving


def obeys(prompt: str) -> str:
    """A sum where sums were shown, else a poem."""
    asked = re.findall(r"user\n(\d+) \+ (\d+)<", prompt)
    if not asked:
        return "Roses are red"
    a, b = map(int, asked[-1])
    return f"{a} + {b} = {a + b}"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with in_thread(serving(tmp_path / "data", saying(obeys), job={"batch_size": 3, "group_size": 2})) as (served, _):
        yield served


@pytest.fixture(autouse=True)
def clients_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each version of the agent has one HTTP client, as long as its process lives: here, as long as the test."""
    made: list[httpx.Client] = []

    class Client(openai.DefaultHttpxClient):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr(openai, "DefaultHttpxClient", Client)
    yield
    for client in made:
        client.close()


def test_the_prompt_is_corrected_without_a_restart_or_a_lost_episode(served: Served, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with Swarm(served.url, TOKEN) as swarm:
        result = edit_live(swarm, training_tasks()[:40], out, steps=14, edit_after=2, concurrency=6)
    broken, corrected = result["versions"]
    assert (broken["reward"], corrected["reward"]) == (0.0, 1.0)
    assert broken["episodes"] + corrected["episodes"] >= 14 * 6
    assert broken["episodes"] >= 2 * 6 and broken["episodes"] % 2 == 0, "whole groups"
    assert (result["edit"], result["failed_episodes"]) == ("loaded", 0)
    assert (result["server_restarts"], result["lost_finished_episodes"]) == (0, 0)
    assert result["rewards"][:2] == [0.0, 0.0] and result["rewards"][-1] == 1.0
    assert BROKEN in AGENT.read_text() and CORRECTED in (out / AGENT.name).read_text()
    codes = {episode.code_version for episode in recent_episodes(served.run.gateway.swarm, 1000)}
    assert codes == {broken["code_version"], corrected["code_version"]}
    draw(out / "reward.png", result)
    assert (out / "reward.png").stat().st_size > 5000
