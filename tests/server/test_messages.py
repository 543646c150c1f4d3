"""Anthropic's Messages API, asked with Anthropic's own SDK over a real socket.

Pinned here:
1. plain and streamed answers are the same message, with real usage;
2. what was sampled is recognised when it comes back (text, thinking, tool uses, in parallel, with odd JSON): its exact
   tokens are kept, and the next call continues its timeline, whichever dialect asks;
3. every parameter is honoured, or refused by name;
4. errors have Anthropic's shape, and a status that says whether to come again;
5. tokens are counted exactly, and counting leaves no trace.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import pytest

from agentjet.protocol import AbortRequest
from agentjet.server.dialects.messages import SIGNATURE
from agentjet.types import Call, ModelCard
from tests.fakes import saying
from tests.server.serving import TOKEN, Served, serving
from tests.tiny import make_card, tokenizer

pytestmark = pytest.mark.anyio

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: list[Any] = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
TWO_CALLS = (
    "<think>\nhm\n</think>\n\nLet me see."
    '\n<tool_call>\n{"name": "add", "arguments": {"a":  1.0, "b": "é"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
)


@pytest.fixture
def tool_card(tmp_path: Path) -> ModelCard:
    return make_card(tmp_path / "qwen", "qwen3", tool_format="hermes")


async def ask(client: anthropic.AsyncAnthropic, *, stream: bool = False, **body: Any) -> anthropic.types.Message:
    """One message, plain or put together from its events by the SDK."""
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 300, "messages": HELLO, **body}
    if not stream:
        answer: anthropic.types.Message = await client.messages.create(**asked)
        return answer
    async with client.messages.stream(**asked) as events:
        return await events.get_final_message()


def calls_of(served: Served, episode: dict[str, Any]) -> tuple[Call, ...]:
    return served.run.gateway.swarm.tree(episode["episode_id"], "").calls


def assert_one_timeline(served: Served, episode: dict[str, Any]) -> None:
    """Each call was sampled behind all of the one before, token for token, and is recorded so."""
    before: tuple[int, ...] = ()
    parent: Call | None = None
    calls = calls_of(served, episode)
    assert len(calls) == len(served.run.compute.asked)
    for call, asked in zip(calls, served.run.compute.asked, strict=True):
        assert asked.prompt[: len(before)] == before
        assert (call.parent, call.kept, call.fork) == (parent and parent.id, len(before), "")
        assert call.suffix == asked.prompt[len(before) :]
        before, parent = asked.prompt + call.completion, call


async def test_a_plain_answer(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: "hello äöü")) as served:
        episode = await served.begin()
        answer = await ask(served.anthropic(episode))
        [block] = answer.content
        assert (block.type, block.text) == ("text", "hello äöü")  # type: ignore[union-attr]
        assert (answer.role, answer.model, answer.stop_reason, answer.stop_sequence) == (
            *("assistant", "tiny", "end_turn", None),
        )
        [asked], [call] = served.run.compute.asked, calls_of(served, episode)
        assert answer.id == f"msg_{call.id}"
        assert answer.usage.input_tokens == len(asked.prompt)
        assert answer.usage.output_tokens == len(call.completion) == len(tokenizer().encode("hello äöü").ids) + 1


@pytest.mark.parametrize("said", ["grüße 🙂 to you", "", TWO_CALLS, "<think>\ncut off"])
async def test_a_streamed_message_is_the_plain_one(tmp_path: Path, tool_card: ModelCard, said: str) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: said), card=tool_card, job={"max_tokens": 300}) as served:
        client = served.anthropic(await served.begin())
        plain = await ask(client, tools=TOOLS)
        streamed = await ask(client, tools=TOOLS, stream=True)
    assert without_ids(plain) == without_ids(streamed)


def without_ids(answer: anthropic.types.Message) -> str:
    """Everything a message says; each call has ids of its own."""
    call_id = answer.id.removeprefix("msg_")
    fields = answer.model_dump(exclude_none=True, warnings=False)
    return json.dumps(fields, sort_keys=True).replace(call_id, "ID").replace(call_id[:12], "ID")


async def test_the_events_of_a_stream(tmp_path: Path, tool_card: ModelCard) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: TWO_CALLS), card=tool_card) as served:
        client = served.anthropic(await served.begin())
        stream = await client.messages.create(model="policy", messages=HELLO, tools=TOOLS, max_tokens=300, stream=True)
        events = [event.to_dict() async for event in stream]
        [asked] = served.run.compute.asked
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert events[0]["message"]["usage"]["input_tokens"] == len(asked.prompt)  # type: ignore[index]
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]  # type: ignore[index]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    opened = None
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert opened is None, "blocks do not overlap"
            opened = event["index"]
        assert event["index"] == opened
        if event["type"] == "content_block_stop":
            opened = None
    assert opened is None
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    texts = [delta["text"] for delta in deltas if delta["type"] == "text_delta"]  # type: ignore[index]
    assert "".join(texts) == "Let me see." and len(texts) > 3, "it really streams"  # type: ignore[arg-type]
    assert [d["signature"] for d in deltas if d["type"] == "signature_delta"] == [SIGNATURE]  # type: ignore[index]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_sampled_is_recognised(tmp_path: Path, tool_card: ModelCard, stream: bool) -> None:
    def reply(prompt: str) -> str:
        return TWO_CALLS if "<tool_response>" not in prompt else "<think>\nso\n</think>\n\nIt is 3."

    async with serving(tmp_path / "d", saying(reply), card=tool_card) as served:
        episode = await served.begin()
        client = served.anthropic(episode)
        answer = await ask(client, tools=TOOLS, stream=stream, system="Be brief.")
        assert answer.stop_reason == "tool_use"
        thinking, text, first, second = answer.content
        assert thinking.type == "thinking" and (thinking.thinking, thinking.signature) == ("hm", SIGNATURE)
        assert text.type == "text" and text.text == "Let me see."
        assert first.type == second.type == "tool_use" and first.id != second.id
        assert (first.name, first.input, second.input) == ("add", {"a": 1, "b": "é"}, {})
        history: list[Any] = [
            *HELLO,
            answer.to_param(),
            {"role": "user", "content": [result(first.id, "one"), result(second.id, "two")]},
        ]
        last = await ask(client, tools=TOOLS, stream=stream, system="Be brief.", messages=history)
        assert last.stop_reason == "end_turn"
        assert_one_timeline(served, episode)
        prompt = shown(served)[-1]
        assert prompt.index("one") < prompt.index("two") and prompt.count("<tool_response>") == 2


def result(call_id: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def shown(served: Served) -> list[str]:
    """The prompts the policy was asked with, as text."""
    return [
        tokenizer("qwen3").decode(list(asked.prompt), skip_special_tokens=False) for asked in served.run.compute.asked
    ]


ODD = {
    "plain": '{"a": {"b": [1, 2.5, null, "x"]}}',
    "nan": '{"a": NaN}',
    "infinite": '{"a": 1e400}',
    "half a pair": '{"a": "\\ud800"}',
    "deep": '{"a": ' + "[" * 300 + "]" * 300 + "}",
    "twice": '{"a": 1, "a": 2}',
    "the form for invalid JSON": '{"INVALID_JSON": "{"}',
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("arguments", ODD.values(), ids=ODD)
async def test_odd_arguments_come_back_as_they_were(
    tmp_path: Path, tool_card: ModelCard, arguments: str, stream: bool
) -> None:
    said = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    async with serving(tmp_path / "d", saying(lambda prompt: said), card=tool_card, job={"max_tokens": 1000}) as served:
        episode = await served.begin()
        client = served.anthropic(episode)
        answer = await ask(client, tools=TOOLS, stream=stream, max_tokens=1000)
        [use] = [block for block in answer.content if block.type == "tool_use"]
        history = [*HELLO, answer.to_param(), {"role": "user", "content": [result(use.id, "x")]}]
        await ask(client, tools=TOOLS, messages=history, max_tokens=20)
        assert_one_timeline(served, episode)


async def test_another_dialect_continues_the_same_timeline(tmp_path: Path, tool_card: ModelCard) -> None:
    said = '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>'
    async with serving(tmp_path / "d", saying(lambda prompt: said), card=tool_card) as served:
        episode = await served.begin()
        answer = await ask(served.anthropic(episode), tools=TOOLS, system="s")
        [use] = [block for block in answer.content if block.type == "tool_use"]
        function = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
        await served.openai(episode).chat.completions.create(
            model="policy",
            tools=[{"type": "function", "function": function}],  # type: ignore[typeddict-item]
            messages=[
                {"role": "system", "content": "s"},
                *HELLO,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": use.id, "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": use.id, "content": "2"},
            ],
        )
        assert_one_timeline(served, episode)


async def test_results_of_tools_and_text_keep_their_order(tmp_path: Path, tool_card: ModelCard) -> None:
    async with serving(tmp_path / "d", card=tool_card) as served:
        client = served.anthropic(await served.begin())
        use = {"type": "tool_use", "id": "t1", "name": "add", "input": {}}
        content = [
            result("t1", [{"type": "text", "text": "al"}, {"type": "text", "text": "pha"}]),
            result("t2", "beta", is_error=True),
            result("t3", "Error: gamma", is_error=True, cache_control={"type": "ephemeral"}),
            {"type": "text", "text": "del"},
            {"type": "text", "text": "ta"},
        ]
        messages = [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": content}]
        await ask(client, messages=messages, tools=TOOLS)
    [prompt] = shown(served)
    places = [prompt.index(text) for text in ("alpha", "\nError: beta", "\nError: gamma", "user\ndelta")]
    assert places == sorted(places)


async def test_the_same_prompt_as_chats(tmp_path: Path, tool_card: ModelCard) -> None:
    """System blocks are one system message; `tool_choice` none offers no tools."""
    async with serving(tmp_path / "d", card=tool_card) as served:
        episode = await served.begin()
        system = [
            {"type": "text", "text": "Be "},
            {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
        ]
        await ask(
            served.anthropic(episode),
            system=system,
            messages=[{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}],
            tools=TOOLS,
            tool_choice={"type": "none"},
        )
        await served.openai(episode).chat.completions.create(
            model="policy", messages=[{"role": "system", "content": "Be brief."}, *HELLO]
        )
    first, second = served.run.compute.asked
    assert first.prompt == second.prompt


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequences(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: "one; two END three")) as served:
        episode = await served.begin()
        answer = await ask(served.anthropic(episode), stream=stream, stop_sequences=["never", "END"])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
        assert answer.content[0].text == "one; two "  # type: ignore[union-attr]
        [call] = calls_of(served, episode)
        assert tokenizer().decode(list(call.completion)) == "one; two END"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_length_and_a_full_context(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: "x" * 3000)) as served:
        client = served.anthropic(await served.begin())
        short = await ask(client, stream=stream, max_tokens=1)
        assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 1)
        full = await ask(client, stream=stream, max_tokens=5000)
        assert full.stop_reason == "model_context_window_exceeded"
        assert full.usage.input_tokens + full.usage.output_tokens == 2048


async def test_what_is_asked_for_reaches_the_sampler(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", job={"temperature": 0.7}) as served:
        client = served.anthropic(await served.begin(mode="eval"))
        await ask(client, max_tokens=3, extra_body={"temperature": 0, "top_p": 0.5, "top_k": 5})
        await ask(client)
    explicit, default = (asked.params for asked in served.run.compute.asked)
    assert (explicit.temperature, explicit.top_p, explicit.top_k, explicit.max_tokens) == (0, 0.5, 5, 3)
    assert (default.temperature, default.top_p, default.top_k) == (0.7, 1.0, 0)


async def test_tokens_are_counted_exactly(tmp_path: Path, tool_card: ModelCard) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: TWO_CALLS), card=tool_card) as served:
        episode = await served.begin()
        client = served.anthropic(episode)
        asked: dict[str, Any] = {"model": "policy", "tools": TOOLS, "system": "s"}
        counted = [await client.messages.count_tokens(**asked, messages=HELLO)]
        answer = await ask(client, **asked)
        history: list[Any] = [*HELLO, answer.to_param(), {"role": "user", "content": "go on"}]
        by_url = served.anthropic({"api_key": "none"}, base_url=f"{served.url}/k/{episode['api_key']}")
        counted.append(await by_url.messages.count_tokens(**asked, messages=history))
        assert len(calls_of(served, episode)) == len(served.run.compute.asked) == 1, "counting leaves no trace"
        await ask(client, **asked, messages=history)
    assert [count.input_tokens for count in counted] == [len(call.prompt) for call in served.run.compute.asked]


async def test_a_model_that_reasons_cannot_be_told_not_to(tmp_path: Path, tool_card: ModelCard) -> None:
    for name, card, refused in (("qwen", tool_card, True), ("plain", None, False)):
        async with serving(tmp_path / name / "d", card=card) as served:
            client = served.anthropic(await served.begin())
            await ask(client, thinking={"type": "adaptive"})
            if refused:
                with pytest.raises(anthropic.BadRequestError, match="thinking"):
                    await ask(client, thinking={"type": "disabled"})
            else:
                await ask(client, thinking={"type": "disabled"})


def one(block: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}, *HELLO]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "messages.1"),
    ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages.0.name"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    (one({"type": "image", "source": {"type": "url", "url": "x"}}), "messages.0.content.0"),
    (one({"type": "document", "source": {}}), "messages.0.content.0"),
    (one({"type": "tool_use", "id": "x", "name": "f", "input": {}}), "messages.0.content.0"),
    (one({"type": "tool_result", "tool_use_id": "x"}, "assistant"), "messages.0.content.0"),
    (one({"type": "redacted_thinking", "data": "x"}, "assistant"), "messages.0.content.0"),
    (one({"type": "text"}), "messages.0.content.0.text"),
    (one({"type": "text", "text": 3}), "messages.0.content.0.text"),
    (one({"text": "x"}), "messages.0.content.0.type"),
    (one({"type": "text", "text": "x", "txt": "y"}), "messages.0.content.0.txt"),
    (one({"type": "text", "text": "x", "citations": [{}]}), "messages.0.content.0.citations"),
    (one({"type": "tool_result", "content": "x"}), "messages.0.content.0.tool_use_id"),
    (one(result("x", [{"type": "image"}])), "messages.0.content.0.content.0"),
    (one({"type": "tool_use", "id": "x", "name": "f"}, "assistant"), "messages.0.content.0.input"),
    (one({"type": "tool_use", "id": "x", "name": "f", "input": []}, "assistant"), "messages.0.content.0.input"),
    (
        one({"type": "tool_use", "id": "x", "name": "f", "input": {"a": float("nan")}}, "assistant"),
        "messages.0.content.0.input",
    ),
    ({"system": [{"type": "image"}]}, "system.0"),
    ({"system": 3}, "system"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ({"tools": [{"name": "f", "input_schema": {}, "strict": True}]}, "tools.0.strict"),
    ({"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "tools.0.defer_loading"),
    ({"tools": [{"name": "f", "input_schema": {}, "inputSchema": {}}]}, "tools.0.inputSchema"),
    ({"tools": TOOLS}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice.disable_parallel_tool_use"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
    ({"output_config": {"effort": "low"}}, "output_config"),
    ({"context_management": {"edits": [{}]}}, "context_management"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"container": "x"}, "container"),
    ({"speed": "fast"}, "speed"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"temperature": 1.5}, "temperature"),
    ({"temperature": 0}, "temperature"),
    ({"top_p": 0.9}, "top_p"),
    ({"top_k": 40}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences.0"),
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


async def test_what_asks_nothing_of_the_model_is_accepted(tmp_path: Path, tool_card: ModelCard) -> None:
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
    async with serving(tmp_path / "d", card=tool_card) as served:
        client = served.anthropic(await served.begin())
        beta = {"anthropic-beta": "fine-grained-tool-streaming-2025-05-14"}
        answer = await ask(client, extra_body=neutral, extra_headers=beta, extra_query={"beta": "true"})
        assert answer.content[0].text == "hi"  # type: ignore[union-attr]


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
        with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
            await ask(client, messages=[{"role": "user", "content": "x" * 5000}])
        served.run.compute.may_sample.clear()
        stream = await _busy(served, client)
        with pytest.raises(anthropic.RateLimitError) as busy:
            await ask(client)
        assert _kind(busy.value) == "rate_limit_error" and int(busy.value.response.headers["Retry-After"]) > 0
        served.run.compute.may_sample.set()
        await stream
        await served.run.gateway.stop_engine()
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


async def test_a_stream_that_breaks_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: "x" * 30)) as served:
        client = served.anthropic(await served.begin())
        stream = await client.messages.create(model="policy", messages=HELLO, max_tokens=30, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="worker died"):
            async for _ in stream:
                served.run.compute.may_sample.clear()
                served.run.compute.die()
