"""Anthropic's Messages API, requested with Anthropic's SDK over a real socket: facts of this dialect alone.

1. The events of a stream are blocks, one after the other.
2. Tool uses come back with their meaning, also with odd JSON, in the order of their results.
3. Tokens are counted exactly, and counting leaves no trace.
4. A thread is refused with the error that makes the SDK continue without one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from agentjet.front.dialects.messages import SIGNATURE, from_tool_input, is_wrapped, to_tool_input
from agentjet.timeline.tree import answer_key
from agentjet.types import Message, ModelInfo, ToolCall
from tests.fakes import saying
from tests.server.serving import Served, serving
from tests.server.speaking import HELLO, MESSAGES, ask, assert_one_timeline, calls_of
from tests.tiny import tokenizer

pytestmark = pytest.mark.anyio
TOOLS = list(MESSAGES.tools)

TWO_CALLS = (
    "<think>\nhm\n</think>\n\nLet me see."
    '\n<tool_call>\n{"name": "add", "arguments": {"a":  1.0, "b": "é"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
)


async def test_the_events_of_a_stream(tmp_path: Path, card: ModelInfo) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: TWO_CALLS), card=card) as served:
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


def result(call_id: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def shown(served: Served) -> list[str]:
    """Returns the prompts of the policy as text."""
    return [
        tokenizer("qwen3").decode(list(asked.prompt), skip_special_tokens=False) for asked in served.run.compute.asked
    ]


ODD = {
    "plain": '{"a": {"b": [1, 2.5, null, "x"]}}',
    "nan": '{"a": NaN}',
    "infinite": '{"a": 1e400}',
    "half a pair": '{"a": "\\ud800"}',
    "deep": '{"a": ' + "[" * 300 + "]" * 300 + "}",
    "deeper": '{"a": ' + "[" * 400 + "]" * 400 + "}",
    "twice": '{"a": 1, "a": 2}',
    "the form for invalid JSON": '{"INVALID_JSON": "{"}',
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("arguments", ODD.values(), ids=ODD)
async def test_odd_arguments_come_back_as_they_were(
    tmp_path: Path, card: ModelInfo, arguments: str, stream: bool
) -> None:
    said = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    async with serving(tmp_path / "d", saying(lambda prompt: said), card=card, job={"max_tokens": 1000}) as served:
        episode = await served.begin()
        client = served.anthropic(episode)
        answer = await ask(client, tools=TOOLS, stream=stream, max_tokens=1000)
        [use] = [block for block in answer.content if block.type == "tool_use"]
        history = [*HELLO, answer.to_param(), {"role": "user", "content": [result(use.id, "x")]}]
        await ask(client, tools=TOOLS, messages=history, max_tokens=20)
        assert_one_timeline(served, episode)


async def test_results_of_tools_and_text_keep_their_order(tmp_path: Path, card: ModelInfo) -> None:
    async with serving(tmp_path / "d", card=card) as served:
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


async def test_the_same_prompt_as_chats(tmp_path: Path, card: ModelInfo) -> None:
    """System blocks are one system message; `tool_choice` none offers no tools."""
    async with serving(tmp_path / "d", card=card) as served:
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


async def test_tokens_are_counted_exactly(tmp_path: Path, card: ModelInfo) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: TWO_CALLS), card=card) as served:
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


async def test_arguments_that_an_agent_fills_in_with_defaults_continue_the_timeline(
    tmp_path: Path, card: ModelInfo
) -> None:
    schema = {"type": "object", "properties": {"all": {"type": "boolean", "default": False}}}
    said = '<tool_call>\n{"name": "edit", "arguments": {"path":  "x"}}\n</tool_call>'
    tools: Any = [{"name": "edit", "input_schema": schema}]
    async with serving(tmp_path / "d", saying(lambda prompt: said), card=card) as served:
        episode = await served.begin()
        client, messages = served.anthropic(episode), [*HELLO]
        for _ in range(3):
            answer = await ask(client, messages=messages, tools=tools)
            use: Any = answer.content[-1]
            filled = {"type": "tool_use", "id": use.id, "name": "edit", "input": {"all": False, **use.input}}
            result = {"type": "tool_result", "tool_use_id": use.id, "content": "done"}
            messages += [{"role": "assistant", "content": [filled]}, {"role": "user", "content": [result]}]
        assert_one_timeline(served, episode)


async def test_a_schema_that_cannot_be_followed_goes_by_its_own_name(tmp_path: Path, card: ModelInfo) -> None:
    tool = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "x"}}}, "strict": True}
    async with serving(tmp_path / "d", card=card) as served:
        client = served.anthropic(await served.begin())
        with pytest.raises(anthropic.BadRequestError, match=r"tools\.0\.input_schema of 'f'"):
            await ask(client, tools=[tool])


# --- threads


@anthropic.beta_async_tool
async def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


def reply(prompt: str) -> str:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
    return "It is 3." if "<tool_response>\n3\n</tool_response>" in prompt else call


async def test_the_tool_runner_sends_its_history_itself(tmp_path: Path, card: ModelInfo) -> None:
    async with serving(tmp_path / "d", saying(reply), card=card, job={"max_tokens": 300}) as served:
        episode = await served.begin()
        client = served.anthropic(episode)
        runner = client.beta.messages.tool_runner(model="policy", max_tokens=300, messages=HELLO, tools=[add])
        answer = await runner.until_done()
        assert answer.content[0].text == "It is 3."
        assert len(calls_of(served, episode)) == 2
        assert_one_timeline(served, episode)
        thread: Any = {"type": "create"}
        with pytest.raises(anthropic.BadRequestError, match="thread is not supported") as refused:
            await client.beta.messages.create(model="policy", max_tokens=9, messages=HELLO, thread=thread)
        body: Any = refused.value.body
        assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}


# --- inputs of tool uses

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


KEYS = st.text(max_size=5) | st.just("INVALID_JSON")


def meaning(arguments: str) -> str:
    return answer_key(Message("assistant", tool_calls=(ToolCall("id", "name", arguments),)))


@given(value=st.dictionaries(KEYS, VALUES, max_size=3), indent=st.none() | st.just(2))
def test_there_and_back(value: dict[str, Any], indent: int | None) -> None:
    arguments = json.dumps(value, indent=indent)
    carried = json.loads(to_json({"input": to_tool_input(arguments)}))["input"]
    assert meaning(from_tool_input(carried)) == meaning(arguments)


def test_what_any_reader_takes_is_not_wrapped() -> None:
    assert to_tool_input('{"a": {"b": [1, 2.5, null, "é"]}}') == {"a": {"b": [1, 2.5, None, "é"]}}
    for odd in ('{"a": NaN}', '{"a": 1e400}', '{"a": "\\ud800"}', '{"a": ' + "[" * 300 + "]" * 300 + "}"):
        assert to_tool_input(odd) == {"INVALID_JSON": odd} and is_wrapped(to_tool_input(odd))
