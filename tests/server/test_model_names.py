"""Names of models in requests.

1. Agents contain names: the one model of a run answers to those that the server's settings accept.
2. In a run with named policies, the name chooses the policy, and the role behind `@` belongs to it. No alias does.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.serving import serving
from tests.server.speaking import HELLO, SPEECHES

pytestmark = pytest.mark.anyio


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
async def test_which_names_the_policy_answers_to(name: str, role: str | None, tmp_path: Path) -> None:
    settings = {"model_aliases": "gpt-4o*, openai/*"}
    async with serving(tmp_path / "data", server=settings) as served:
        episode = await served.begin()
        asked = served.openai(episode).chat.completions.create(model=name, messages=HELLO)
        if role is None:
            with pytest.raises(openai.NotFoundError, match=r"is not served here.* server\.model_aliases"):
                await asked
            return
        assert (await asked).choices[0].message.content == "hi"
        [call] = (await served.view(episode)).calls
        assert call.role == role


async def test_a_role_has_128_characters_at_most(tmp_path: Path) -> None:
    """A longer role could not be rewarded: `by_role` would refuse it."""
    async with serving(tmp_path / "data") as served:
        client = served.openai(await served.begin())
        with pytest.raises(openai.BadRequestError, match="128"):
            await client.chat.completions.create(messages=HELLO, model="policy@" + "x" * 129)
        await client.chat.completions.create(messages=HELLO, model="policy@" + "x" * 128)


TEAM = {"planner": {}, "coder": {}}
COUNT_TOKENS = "/v1/messages/count_tokens"
PATHS = (*(dialect.path for dialect in SPEECHES), COUNT_TOKENS)


def body_of(path: str, model: str) -> dict[str, Any]:
    if path == COUNT_TOKENS:
        return {"model": model, "messages": HELLO}
    [body] = [dialect.body() for dialect in SPEECHES if dialect.path == path]
    return {**body, "model": model}


async def test_a_name_chooses_the_policy(tmp_path: Path) -> None:
    """In every dialect: the answer has the policy's name, and the call its role."""
    async with serving(tmp_path / "data", policies=TEAM, server={"model_aliases": "gpt*"}) as served:
        episode = await served.begin()
        assert (episode["model"], episode["policies"]) == ("", ["planner", "coder"])
        headers = {"Authorization": f"Bearer {episode['api_key']}"}
        listed = (await served.http.get("/v1/models", headers=headers)).json()
        assert [model["id"] for model in listed["data"]] == ["planner", "coder"]
        for name, found in (("coder", "coder"), ("coder@critic", "coder")):
            assert (await served.http.get(f"/v1/models/{name}", headers=headers)).json()["id"] == found
        for path in PATHS:
            for model in ("planner", "coder@critic", "coder@judge"):
                answer = await served.http.post(path, json=body_of(path, model), headers=headers)
                assert answer.status_code == 200, answer.text
                assert answer.json().get("model", model.partition("@")[0]) == model.partition("@")[0]
        calls = (await served.view(episode)).calls
        assert Counter(call.role for call in calls) == {"planner": 5, "coder/critic": 5, "coder/judge": 5}
        stream = await served.openai(episode).chat.completions.create(model="coder", messages=HELLO, stream=True)
        chunks = [chunk async for chunk in stream]
        assert {chunk.model for chunk in chunks} == {"coder"} and chunks[-1].system_fingerprint == "coder-0"


async def test_names_that_no_policy_has(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", policies=TEAM, server={"model_aliases": "gpt*"}) as served:
        episode = await served.begin()
        headers = {"Authorization": f"Bearer {episode['api_key']}"}

        async def refused(path: str, model: str, status: int) -> str:
            answer = await served.http.post(path, json=body_of(path, model), headers=headers)
            assert answer.status_code == status, answer.text
            error = answer.json()["error"]
            assert path.startswith("/v1/messages") or error["param"] == "model"
            return str(error["message"])

        for path in PATHS:
            for model in ("planer", "planer@critic"):
                said = await refused(path, model, 404)
                assert "no policy 'planer'; did you mean 'planner'? Its policies are planner, coder" in said
            for model in ("", "policy", "gpt-4o", "tiny", "@planner", "planner/critic", "Planner", "x" * 10_000):
                assert "Its policies are planner, coder." in await refused(path, model, 404)
            assert "names no role after '@': use 'coder'" in await refused(path, "coder@", 400)
            assert "has a '/'" in await refused(path, "planner@a/b", 400)
        assert (await served.http.get("/v1/models/planer", headers=headers)).status_code == 404
        assert (await served.http.get(f"/swarm/v1/episodes/{episode['episode_id']}")).json()["num_calls"] == 0


async def test_rewards_that_do_not_fit_the_policies(tmp_path: Path) -> None:
    """Each way to be wrong: `tests/swarm/test_policies.py`."""
    async with serving(tmp_path / "data", policies=TEAM) as served:
        path = f"/swarm/v1/episodes/{(await served.begin())['episode_id']}/finish"
        refused = await served.http.post(path, json={"reward": 1.0, "by_role": {"planner": 1.0, "coders": 0.5}})
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_reward")
        assert "coder" in refused.json()["detail"]
        refused = await served.http.post(path, json={"reward": {"planner": 1.0, "coder": 0.5}})
        assert refused.status_code == 422 and "rewards of policies and roles in by_role" in refused.text
        body = {"reward": 0.75, "by_role": {"planner": 1.0, "coder": 0.5, "coder/critic": 0.0}}
        assert (await served.http.post(path, json=body)).json()["by_role"] == body["by_role"]
