"""Refusals of Anthropic's Messages API.

Pinned here:
1. keys that cannot be honoured are refused by name, values without an effect are accepted;
2. errors have Anthropic's shape, and a status that shows whether a retry can succeed;
3. a key is accepted at each place of Anthropic's SDKs, and opens its own episode.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import pytest

from agentjet.protocol import AbortRequest
from tests.server.asking import HELLO, TOOLS, ask
from tests.server.serving import TOKEN, Served, serving
from tests.tiny import make_model_info

pytestmark = pytest.mark.anyio


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}


def one(block: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}, *HELLO]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "messages.1"),
    ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages.0.name"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
    (one({"type": "text", "text": "\ud800"}), "messages.0.content.0.text"),
    ({"tools": [{"name": "f", "input_schema": {"\ud800": 1}}]}, "tools.0.input_schema"),
    ({"system": "\ud800"}, "system"),
    ({"tools": [{"name": "f", "description": "\ud800", "input_schema": {}}]}, "tools.0.description"),
    (one({"type": "tool_use", "id": "x", "name": "f", "input": {}}), "messages.0.content.0"),
    (one({"type": "tool_result", "tool_use_id": "x"}, "assistant"), "messages.0.content.0"),
    (one({"type": "redacted_thinking", "data": "x"}, "assistant"), "messages.0.content.0"),
    (one({"type": "text"}), "messages.0.content.0.text"),
    (one({"type": "text", "text": 3}), "messages.0.content.0.text"),
    (one({"text": "x"}), "messages.0.content.0.type"),
    (one({"type": "text", "text": "x", "txt": "y"}), "messages.0.content.0.txt"),
    (one({"type": "text", "text": "x", "citations": [{}]}), "messages.0.content.0.citations"),
    (one({"type": "tool_result", "content": "x"}), "messages.0.content.0.tool_use_id"),
    (one({"type": "tool_use", "id": "x", "name": "f"}, "assistant"), "messages.0.content.0.input"),
    (one({"type": "tool_use", "id": "x", "name": "f", "input": []}, "assistant"), "messages.0.content.0.input"),
    (
        one({"type": "tool_use", "id": "x", "name": "f", "input": {"a": float("nan")}}, "assistant"),
        "messages.0.content.0.input",
    ),
    ({"system": 3}, "system"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ({"tools": [{"name": "f", "input_schema": {}, "strict": 3}]}, "tools.0.strict"),
    ({"tools": [{"name": "f", "input_schema": {}, "inputSchema": {}}]}, "tools.0.inputSchema"),
    ({"tools": TOOLS}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "sub"}, "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice.name"),
    ({"tool_choice": {"type": "any", "name": "add"}, "tools": TOOLS}, "tool_choice.name"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits.0"),
    ({"container": "x"}, "container"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"temperature": 1.5}, "temperature"),
    ({"temperature": 0}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences.0"),
    ({"stop_sequences": ["x" * 1001]}, "stop_sequences.0"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"max_token": 1}, "max_token"),
]  # fmt: skip


async def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        headers = {"x-api-key": (await served.begin())["api_key"], "Content-Type": "application/json"}
        del served.http.headers["Authorization"]
        for body, param in REFUSED:
            content = json.dumps({"model": "policy", "messages": HELLO, "max_tokens": 9, **body})
            response = await served.http.post("/v1/messages", content=content, headers=headers)
            assert response.status_code == 400, (body, response.text)
            answer = response.json()
            assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error"), answer
            assert param in answer["error"]["message"], (body, answer)
            assert response.headers["x-should-retry"] == "false"
        assert served.run.compute.asked == []


async def test_a_schema_that_cannot_be_followed_goes_by_its_own_name(tmp_path: Path) -> None:
    card = make_model_info(tmp_path / "qwen", "qwen3", tool_format="hermes")
    tool = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "x"}}}, "strict": True}
    async with serving(tmp_path / "d", card=card) as served:
        client = served.anthropic(await served.begin())
        with pytest.raises(anthropic.BadRequestError, match=r"tools\.0\.input_schema of 'f'"):
            await ask(client, tools=[tool])


async def test_what_asks_nothing_of_the_model_is_accepted(tmp_path: Path) -> None:
    text = {"type": "text", "text": "hello", "citations": None, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}, "caller": {"type": "direct"}, "toolset_name": None}
    neutral = {
        "messages": [{"role": "user", "content": [text]}, {"role": "assistant", "content": [use]}, *HELLO],
        "tools": [{**TOOLS[0], "type": "custom", "strict": False, "cache_control": None, "defer_loading": False}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "metadata": {"user_id": "me"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"},
        "top_k": 0, "top_p": 1, "temperature": 1, "stop_sequences": [], "system": None, "output_config": {},
        "context_management": None, "speed": "standard",
    }  # fmt: skip
    card = make_model_info(tmp_path / "qwen", "qwen3", tool_format="hermes")
    async with serving(tmp_path / "d", card=card) as served:
        client = served.anthropic(await served.begin())
        beta = {"anthropic-beta": "fine-grained-tool-streaming-2025-05-14"}
        answer = await ask(client, extra_body=neutral, extra_headers=beta, extra_query={"beta": "true"})
        assert answer.content[0].text == "hi"  # type: ignore[union-attr]
        episode = await served.begin()
        tools = [{"type": "bash_20250124", "name": "bash"}]
        await ask(served.anthropic(episode), tools=tools, tool_choice={"type": "none"})
        assert served.run.gateway.swarm.episode(episode["episode_id"]).noted == {"tool bash_20250124 dropped": 1}


async def test_keys(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        mine, other = await served.begin(), await served.begin(mode="eval")
        del served.http.headers["Authorization"]

        async def status(headers: dict[str, str], path: str = "") -> tuple[int, str]:
            body = {"model": "policy", "messages": HELLO, "max_tokens": 9}
            response = await served.http.post(f"{path}/v1/messages", json=body, headers=headers)
            answer = response.json()
            assert answer["type"] == ("message" if response.status_code == 200 else "error")
            return response.status_code, answer.get("error", {}).get("type", "")

        key = mine["api_key"]
        assert await status({"x-api-key": key}) == (200, "")
        assert await status({"Authorization": f"Bearer {key}"}) == (200, "")
        assert await status({}, f"/k/{key}") == (200, "")
        assert await status({}) == (401, "authentication_error")
        assert await status({"x-api-key": "sk-ant-something"}) == (401, "authentication_error")
        assert await status({"x-api-key": TOKEN}) == (403, "permission_error")
        await served.run.gateway.abort(other["episode_id"], AbortRequest())
        assert await status({"x-api-key": other["api_key"]}) == (409, "invalid_request_error")
        served.run.clock.advance(1800)
        assert await status({"x-api-key": key}) == (401, "authentication_error")


async def test_errors_are_anthropics(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", server={"max_calls_per_episode": 1, "max_body_mb": 1}) as served:
        client = served.anthropic(await served.begin())
        with pytest.raises(anthropic.NotFoundError, match="'tiny'") as missing:
            await ask(client, model="claude-opus")
        assert _kind(missing.value) == "not_found_error"
        with pytest.raises(anthropic.NotFoundError) as no_route:
            await client.messages.batches.list()
        assert _kind(no_route.value) == "not_found_error"
        with pytest.raises(anthropic.APIStatusError) as large:
            await ask(client, system="x" * 2**21)
        assert (large.value.status_code, _kind(large.value)) == (413, "request_too_large")
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2047 maximum"):
            await ask(client, messages=[{"role": "user", "content": "x" * 5000}])
        served.run.compute.may_sample.clear()
        stream = await _busy(served, client)
        with pytest.raises(anthropic.RateLimitError) as busy:
            await ask(client)
        assert _kind(busy.value) == "rate_limit_error" and int(busy.value.response.headers["Retry-After"]) > 0
        served.run.compute.may_sample.set()
        await stream
        await served.run.gateway.engine.stop()
        with pytest.raises(anthropic.APIStatusError) as stopped:
            await ask(client)
        assert (stopped.value.status_code, _kind(stopped.value)) == (503, "overloaded_error")
        assert int(stopped.value.response.headers["Retry-After"]) > 0


async def _busy(served: Served, client: anthropic.AsyncAnthropic) -> Any:
    """A call that is being sampled."""
    task = asyncio.create_task(ask(client))
    await served.run.until(lambda: len(served.run.compute.asked) == 1)
    return task


def _kind(error: anthropic.APIStatusError) -> str:
    body: Any = error.body
    assert body["type"] == "error" and body["error"]["message"]
    return str(body["error"]["type"])
