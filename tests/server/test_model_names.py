"""Agents contain names of models: the policy answers to the names that the server's settings accept."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest

from tests.server.serving import serving

HELLO = [{"role": "user", "content": "hello"}]
HEADER = "X-AgentJet-Role"


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("tiny", ""),
        ("policy@critic", "critic"),
        ("gpt-4o-mini", ""),
        ("gpt-4o@planner", "planner"),
        ("openai/gpt-4.1", ""),
        ("gpt-4", None),
        ("GPT-4o", None),
        ("@planner", None),
    ],
)
def test_which_names_the_policy_answers_to(name: str, role: str | None, tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"model_aliases": "gpt-4o*, openai/*"}
        async with serving(tmp_path / "data", server=settings) as served:
            episode = await served.begin()
            asked = served.openai(episode).chat.completions.create(model=name, messages=HELLO)
            if role is None:
                with pytest.raises(openai.NotFoundError, match=r"is not served here.* server\.model_aliases"):
                    await asked
                return
            assert (await asked).choices[0].message.content == "hi"
            [call] = (await served.run.gateway.episode_tree(episode["episode_id"])).calls
            assert call.role == role

    asyncio.run(scenario())


def test_a_role_is_as_long_in_the_models_name_as_in_its_header(tmp_path: Path) -> None:
    """A longer role could not be rewarded: `by_role` would refuse it."""

    async def scenario() -> None:
        async with serving(tmp_path / "data") as served:
            client = served.openai(await served.begin())
            for ask in ({"model": "policy@" + "x" * 129}, {"model": "policy", "extra_headers": {HEADER: "x" * 129}}):
                with pytest.raises(openai.BadRequestError, match="128"):
                    await client.chat.completions.create(messages=HELLO, **ask)
            await client.chat.completions.create(messages=HELLO, model="policy@" + "x" * 128)

    asyncio.run(scenario())
