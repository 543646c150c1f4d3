"""Side calls of agents, by the rules of `job.side_calls`.

1. A rule gives calls a role or excludes them from training. The first matching rule applies. A role in the
   request stays.
2. Side calls are counted and shown, and continue their own conversation, also by the id of an answer.
3. A batch has none of their tokens. An episode of side calls alone has nothing to train.
4. Rules without a condition or an effect are refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentjet.config import load_config
from agentjet.errors import ConfigError
from agentjet.types import ModelInfo
from tests.server.serving import Served, serving

RULES: list[dict[str, Any]] = [
    {"name": "title", "system": "You are a title generator*", "tools": "none", "train": False},
    {"name": "small", "model": "*haiku*", "role": "small"},
    {"name": "sub-agent", "system": "*agent for*", "role": "sub"},
]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


async def say(served: Served, episode: dict[str, Any], system: str, model: str = "policy", **options: Any) -> None:
    messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": "hello"}]
    await served.openai(episode).chat.completions.create(model=model, messages=messages, **options)


@pytest.mark.anyio
async def test_rules_direct_calls(tmp_path: Path, card: ModelInfo) -> None:
    job, server = {"side_calls": RULES}, {"model_aliases": "claude-*"}
    async with serving(tmp_path / "d", card=card, job=job, server=server) as served:
        episode = await served.begin()
        await say(served, episode, "Help.")
        await say(served, episode, "You are a title generator.\nBe brief.")
        await say(served, episode, "You are a title generator.", tools=[TOOL])
        await say(served, episode, "You are an agent for code.", "claude-haiku-4")
        await say(served, episode, "You are an agent for code.")
        await say(served, episode, "You are an agent for code.", "policy@critic")
        shown = await served.view(episode)
        assert [(call.role, call.orphan) for call in shown.calls] == [
            ("", ""), ("", "side"), ("", ""), ("small", ""), ("sub", ""), ("critic", ""),
        ]  # fmt: skip
        assert shown.noted == {"side call title": 1, "side call small": 1, "side call sub-agent": 2}
        assert set(shown.calls[1].mask) == {0} and set(shown.calls[0].mask) == {0, 1}


@pytest.mark.anyio
async def test_a_side_conversation_goes_on_by_the_id_of_its_answer(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", job={"side_calls": RULES}) as served:
        episode = await served.begin()
        client = served.openai(episode)
        asked: Any = {"model": "policy", "instructions": "You are an agent for code."}
        first = await client.responses.create(input="hello", **asked)
        await client.responses.create(input="more", previous_response_id=first.id, **asked)
        calls = (await served.view(episode)).calls
        assert [call.role for call in calls] == ["sub", "sub"] and calls[1].after == calls[0].call_id


@pytest.mark.anyio
async def test_side_calls_are_not_trained(tmp_path: Path) -> None:
    job = {"side_calls": RULES, "batch_size": 1}
    async with serving(tmp_path / "d", job=job) as served:
        for task, systems in (("side", ["You are a title generator"]), ("both", ["You are a title generator", "Help"])):
            for member in range(2):
                episode = await served.begin(task_id=task)
                for system in systems:
                    await say(served, episode, system)
                path = f"/swarm/v1/episodes/{episode['episode_id']}/finish"
                assert (await served.http.post(path, json={"reward": member})).status_code == 200
        await served.run.until(lambda: served.run.gateway.swarm.policy_version == 1)
        step = served.run.gateway.swarm.last_step
        assert (step["forest/side_calls"], step["groups/dropped_no_tokens"], step["batch/episodes"]) == (2, 1, 2)
        assert step["batch/sampled_tokens"] == 2 * 3, "hi and the end, of each episode's own call"


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ('{name = "x", train = false}', "a rule without a condition applies to every call"),
        ('{name = "x", tools = "none"}', "the rule has no effect: set role, or train = false"),
        ('{name = "x", tools = "none", trian = false}', "trian"),
        ('{tools = "none", train = false}', "name"),
        ('{name = "x", system = "****************a*", train = false}', "more than 16"),
    ],
)
def test_rules_without_sense_are_refused(rule: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"[job]\nside_calls = [{rule}]\n")
    with pytest.raises(ConfigError, match=sentence) as refusal:
        load_config(path)
    assert "job.side_calls" in str(refusal.value)
