"""The maximum of turns that a recipe chose holds for calls side by side, and counts no answer that did not arrive."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.errors import InvalidRequest
from agentjet.protocol import BeginRequest
from agentjet.recipes.baselines import Grpo
from agentjet.recipes.rollout import Rollout, TaskStats
from tests.fakes import Running, running

pytestmark = pytest.mark.anyio


class OneTurn(Grpo):
    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        return replace(default, max_turns=1)


async def refused(run: Running, episode_id: str, **request: object) -> str:
    with pytest.raises(InvalidRequest) as refusal:
        await run.say(episode_id, **request)
    return refusal.value.code


async def test_calls_side_by_side_are_turns_and_lost_answers_are_none(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"recipe": f"{__name__}:OneTurn"}) as run:
        episode = await run.gateway.begin(BeginRequest(task_id="t"))
        lost = run.stream(episode.id, fingerprint="lost")
        async for chunk in lost:
            if chunk.call is not None:
                break
        await lost.aclose()
        run.compute.may_sample.clear()
        num_asked = len(run.compute.asked)
        first = asyncio.create_task(run.say(episode.id, fingerprint="first"))
        await run.until(lambda: len(run.compute.asked) > num_asked)
        assert await refused(run, episode.id, text="side by side", fingerprint="second") == "turn_limit"
        run.compute.may_sample.set()
        await first
        assert await refused(run, episode.id, text="later", fingerprint="third") == "turn_limit"
        await run.say(episode.id, fingerprint="first", retry=True)
        turns = run.gateway.swarm.queries.calls(episode.id)
        assert len(turns) == 3 and len(run.gateway.swarm.queries.orphans(episode.id)) == 2
