"""Request keys: honoured, noted, refused.

Pinned here:
1. the table of each dialect names every key of its bodies, and `docs/dialects.md` ends with these tables;
2. noted keys are accepted, counted on the episode, and shown; neutral values are not counted;
3. tools of a provider are dropped, and a part that the policy cannot read is replaced by a text;
4. `job.sampling.override` replaces settings of a request in training episodes only;
5. variables of the chat template are noted if they change nothing, else refused;
6. refusals are counted on the episode, and survive a restart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from agentjet.cli.episodes import episode_lines
from agentjet.front.dialects import DIALECTS, keys_table
from agentjet.front.dialects.dialect import Body, request_notes
from agentjet.types import ModelInfo
from tests.server.serving import serving
from tests.server.speaking import CHAT, HELLO, MESSAGES, RESPONSES, Speech

pytestmark = pytest.mark.anyio


def test_every_key_has_a_treatment() -> None:
    for dialect in DIALECTS:
        module = dialect.request.__module__
        parts = [part for part in _parts(Body) if part.__module__.startswith(module) or "[]" not in part.place]
        for name in dialect.keys:
            place = name[: name.rfind(".") + 1]
            assert any(part.place == place for part in parts), (dialect.path, name)
        table = keys_table().partition(f"### `{dialect.path}`\n")[2].partition("###")[0]
        assert all(f"\n| `{name}` | " in table for name in (*dialect.request.model_fields, *dialect.keys))


def _parts(part: type[Body]) -> list[type[Body]]:
    return [part, *(inner for below in part.__subclasses__() for inner in _parts(below))]


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "dialects.md").read_text(encoding="utf-8")
    assert page.endswith(keys_table()), "run `make docs`"


def test_what_is_empty_needs_no_rule() -> None:
    """Clients write out the keys of their own classes, with null or empty values."""
    block = {"type": "text", "text": "hi", "parsed": None}
    turn = {"role": "user", "content": [block], "reasoning_content": "", "tool_calls": []}
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {"messages": [turn], "tools": None, "shown": None},
        "/v1/messages": {"messages": [{"role": "user", "content": [block]}], "max_tokens": 1},
        "/v1/responses": {"input": [{"role": "user", "content": [block | {"type": "input_text"}], "parsed": None}]},
    }
    for dialect in DIALECTS:
        if dialect.path in bodies:
            body = dialect.request.model_validate({"model": "policy"} | bodies[dialect.path])
            assert list(request_notes(body, dialect.keys, "refuse")) == []


UNREADABLE: list[tuple[str, dict[str, Any], str]] = [
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": kind, kind: {}}]}]},
        f"messages.0.content.0 is of type '{kind}'",
    )
    for kind in ("image_url", "input_audio", "video_url", "file")
] + [
    (
        "/v1/messages",
        {"max_tokens": 8, "messages": [*HELLO, {"role": "user", "content": [{"type": "text", "text": "?"}, block]}]},
        f"messages.1.content.1{place} is of type 'image'",
    )
    for block, place in (
        ({"type": "image", "source": {"type": "url", "url": "u"}}, ""),
        ({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {}}]}, ".content.0"),
    )
] + [
    (
        "/v1/responses",
        {"input": [*HELLO, item]},
        f"input.1.{key}.0 is of type 'input_image'",
    )
    for key, item in (
        ("content", {"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}),
        ("output", {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]}),
    )
]  # fmt: skip


async def test_unreadable_parts_are_refused_by_name_in_every_dialect(tmp_path: Path) -> None:
    """Two images would become one context, and a 200 would not show that."""
    async with serving(tmp_path / "d") as served:
        episode = await served.begin()
        headers = {"Authorization": f"Bearer {episode['api_key']}"}
        paths = [*UNREADABLE, ("/v1/messages/count_tokens", *UNREADABLE[4][1:])]
        for path, body, words in paths:
            body = {name: value for name, value in body.items() if "count" not in path or name != "max_tokens"}
            response = await served.http.post(path, json={"model": "policy", **body}, headers=headers)
            assert response.status_code == 400, (path, response.text)
            assert words in response.text and "job.images = 'omit'" in response.text, (path, response.text)
        demonstration = {
            "task_id": "t",
            "messages": [*UNREADABLE[0][1]["messages"], {"role": "assistant", "content": "x"}],
        }
        response = await served.http.post("/swarm/v1/sft", json={"demonstrations": [demonstration]})
        assert response.status_code == 400 and "t: messages.0.content.0 is of type 'image_url'" in response.text
        shown = await served.view(episode)
        assert not shown.calls and shown.refused["unsupported_content: messages[].content[]"] == 5
        assert shown.unscorable


MARKED = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
OMITTED = "[image omitted: this model reads text only]"
NOTED: dict[Speech, tuple[dict[str, Any], str]] = {
    CHAT: (
        {
            "messages": [
                {"role": "user", "content": [MARKED, {"type": "image_url", "image_url": {"url": "data:,"}}]},
                {"role": "assistant", "content": "x", "reasoning": "y", "reasoning_details": [{}],
                 "thinking_blocks": []},
                *HELLO,
            ],
            "reasoning_effort": "none", "thinking": {"type": "enabled"}, "verbosity": "low", "min_p": 0,
            "metadata": {"a": "b"}, "service_tier": "priority", "chat_template_kwargs": {"enable_thinking": True},
            "prediction": None, "usage": {"include": True}, "store": False,
        },
        "reasoning_effort thinking verbosity metadata service_tier chat_template_kwargs usage "
        "messages[].content[].cache_control messages[].reasoning messages[].reasoning_details",
    ),
    MESSAGES: (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hello"}, PICTURE]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "add", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [PICTURE]}]},
            ],
            "tools": [
                {**MESSAGES.tools[0], "defer_loading": True},
                {"type": "web_search_20250305", "name": "w", "max_uses": 3},
            ],
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"}, "thinking": {"type": "disabled"}, "betas": ["x"], "speed": "standard",
            "mcp_servers": [{"type": "url"}],
        },
        "context_management output_config.effort thinking betas mcp_servers tools[].defer_loading "
        "tool\xa0web_search_20250305\xa0dropped",
    ),
    RESPONSES: (
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hello"}, {"type": "input_image"}]},
            ],
            "tools": [{"type": "web_search", "external_web_access": True}],
            "reasoning": {"effort": "high", "summary": "auto"}, "text": {"verbosity": "low"},
            "include": ["web_search_call.results"], "client_metadata": {"a": "b"},
        },
        "reasoning.effort reasoning.summary text.verbosity client_metadata tool\xa0web_search\xa0dropped "
        "include:\xa0web_search_call.results",
    ),
}  # fmt: skip
"""Requests, and the notes that each leaves beside that of its image."""


@pytest.mark.parametrize("dialect", NOTED, ids=str)
async def test_noted_keys_are_counted_and_shown(tmp_path: Path, card: ModelInfo, dialect: Speech) -> None:
    body, notes = NOTED[dialect]
    async with serving(tmp_path / "d", card=card, job={"images": "omit"}) as served:
        episode = await served.begin()
        for _ in range(2):
            await dialect.ask(served, episode, **body)
        shown = await served.view(episode)
        names = [name.replace("\xa0", " ") for name in notes.split(" ")]
        assert shown.noted == dict.fromkeys([*names, "image omitted"], 2)
        assert shown.calls[0].messages[0]["content"] == f"hello{OMITTED}"
        assert not shown.refused and not shown.unscorable
        assert f"{names[0]} (2)" in str(episode_lines(shown)[1])
        offered = [tool["function"]["name"] for tool in shown.calls[0].tools]
        assert offered == (["add"] if dialect is MESSAGES else []), "tools of a provider are dropped"


async def test_the_job_overrides_what_agents_ask_for_in_training(tmp_path: Path) -> None:
    asked: Any = {"temperature": 0, "top_p": 0.5, "seed": 7, "max_tokens": 3}
    job = {"temperature": 0.7, "sampling": {"override": ["temperature", "top_p", "seed"]}}
    async with serving(tmp_path / "d", job=job) as served:
        trained, evaluated = await served.begin(), await served.begin(mode="eval")
        for episode in (trained, evaluated):
            await served.openai(episode).chat.completions.create(model="policy", messages=HELLO, **asked)
        first, second = (one.params for one in served.run.compute.asked)
        assert (first.temperature, first.top_p, first.max_tokens) == (0.7, 1.0, 3) and first.seed != 7
        assert (second.temperature, second.top_p, second.max_tokens, second.seed) == (0, 0.5, 3, 7)
        noted = (await served.view(trained)).noted
        assert noted == {f"{name} overridden by job.sampling.override": 1 for name in ("temperature", "top_p", "seed")}
        assert (await served.view(evaluated)).noted == {}


async def test_without_the_override_a_refusal_names_it(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        client = served.openai(await served.begin())
        with pytest.raises(openai.BadRequestError, match=r'job\.sampling\.override = \["temperature"\]'):
            await client.chat.completions.create(model="policy", messages=HELLO, temperature=0)


async def test_template_variables_that_change_the_prompt_are_refused(tmp_path: Path, card: ModelInfo) -> None:
    async with serving(tmp_path / "d", card=card) as served:
        client = served.openai(await served.begin())
        for variables, honest in (({"enable_thinking": True}, True), ({"enable_thinking": False}, False)):
            request = client.chat.completions.create(
                model="policy", messages=HELLO, extra_body={"chat_template_kwargs": variables}
            )
            if honest:
                await request
                continue
            with pytest.raises(openai.BadRequestError, match="would change the prompt") as refusal:
                await request
            assert refusal.value.param == "chat_template_kwargs"


async def test_refusals_are_counted_on_the_episode(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        refused, sound = await served.begin(), await served.begin()
        client = served.openai(refused)
        bodies: list[Any] = [{"temperature": 0}, {"temprature": 1}, {"messages": [{"role": "x"}]}, {"model": "gpt-4"}]
        for body in [*bodies, *bodies[:1]]:
            with pytest.raises(openai.APIStatusError):
                await client.chat.completions.create(model="policy", messages=HELLO, extra_body=body)
        path = f"/k/{refused['api_key']}/v1/messages"
        assert (await served.http.post(path, content="{")).status_code == 400
        # These end no call: an overflow, which agents compact; a probe; another's key; a later try.
        with pytest.raises(openai.BadRequestError):
            await served.openai(sound).chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "x" * 5000}]
            )
        assert (await served.http.get(f"/k/{sound['api_key']}/v1/telemetry")).status_code == 404
        shown = await served.view(refused)
        assert shown.refused == {
            "unsupported_in_training: temperature": 2,
            "unknown_parameter: temprature": 1,
            "invalid_value: messages[].role": 1,
            "model_not_found: model": 1,
            "not_json": 1,
        }
        assert shown.unscorable and "unscorable" in str(episode_lines(shown)[0])
        overflowed = await served.view(sound)
        assert overflowed.refused == {"context_length_exceeded: messages": 1} and not overflowed.unscorable
        await served.http.post(f"/swarm/v1/episodes/{refused['episode_id']}/finish", json={"reward": 0})
    async with serving(tmp_path / "d") as served:
        again = await served.view(refused)
        assert (again.status, again.refused, again.unscorable) == ("finished", shown.refused, True)
