"""`examples/live_edit` over a scripted model that does what the prompt says, on the real server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentjet import Swarm
from agentjet.cli.arithmetic import training_tasks
from agentjet.client.threads import LoopThread
from examples.live_edit.run import AGENT, BROKEN, MENDED, draw, edit_live
from tests.fakes import saying
from tests.server.serving import TOKEN, Served, serving


def obeys(prompt: str) -> str:
    """A sum where sums were shown, else a poem."""
    asked = re.findall(r"user\n(\d+) \+ (\d+)<", prompt)
    if not asked:
        return "Roses are red"
    a, b = map(int, asked[-1])
    return f"{a} + {b} = {a + b}"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    loop = LoopThread()
    context = serving(tmp_path / "data", saying(obeys), job={"batch_size": 3, "group_size": 2})
    yield loop.run(context.__aenter__())
    loop.run(context.__aexit__(None, None, None))
    loop.stop()


def test_the_prompt_is_mended_without_a_restart_or_a_lost_episode(served: Served, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with Swarm(served.url, TOKEN) as swarm:
        result = edit_live(swarm, training_tasks()[:40], out, steps=14, edit_after=2, concurrency=6)
    broken, mended = result["versions"]
    assert (broken["reward"], mended["reward"]) == (0.0, 1.0)
    assert broken["episodes"] + mended["episodes"] >= 14 * 6
    assert broken["episodes"] % 6 == 0, "whole groups, and whole batches of them"
    assert (result["edit"], result["failed_episodes"]) == ("loaded", 0)
    assert (result["server_restarts"], result["lost_finished_episodes"]) == (0, 0)
    assert result["rewards"][:2] == [0.0, 0.0] and result["rewards"][-1] == 1.0
    assert BROKEN in AGENT.read_text() and MENDED in (out / AGENT.name).read_text()
    codes = {episode.code_version for episode in served.run.gateway.swarm.recent_episodes(1000)}
    assert codes == {broken["code_version"], mended["code_version"]}
    draw(out / "reward.png", result)
    assert (out / "reward.png").stat().st_size > 5000
