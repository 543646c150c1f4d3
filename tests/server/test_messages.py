"""Anthropic's Messages API, requested with Anthropic's SDK over a real socket.

Pinned here:
1. plain and streamed answers are the same message, with real usage;
2. sampled turns are recognised when they come back (text, thinking, tool uses, in parallel, with odd JSON): their exact
   tokens are kept, and the next call continues the timeline, in any dialect;
3. every parameter is honoured;
4. tokens are counted exactly, and counting leaves no trace.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest

from agentjet.server.dialects.messages import SIGNATURE
from agentjet.types import Call, ModelInfo
from tests.fakes import saying
from tests.server.asking import HELLO, SCHEMA, TOOLS, ask
from tests.server.serving import Served, serving
from tests.tiny import make_model_info, tokenizer

pytestmark = pytest.mark.anyio

TWO_CALLS = (
    "<think>\nhm\n</think>\n\nLet me see."
    '\n<tool_call>\n{"name": "add", "arguments": {"a":  1.0, "b": "é"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
)


@pytest.fixture
def tool_card(tmp_path: Path) -> ModelInfo:
    return make_model_info(tmp_path / "qwen", "qwen3", tool_format="hermes")


def _function(parameters: dict[str, Any], **more: Any) -> Any:
    """Returns the tool in the form of OpenAI's dialects."""
    return {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": parameters, **more}}


def calls_of(served: Served, episode: dict[str, Any]) -> tuple[Call, ...]:
    return served.run.gateway.swarm.tree(episode["episode_id"], "").calls


def assert_one_timeline(served: Served, episode: dict[str, Any]) -> None:
    """Checks that each call was sampled after all tokens of the previous call, and is recorded so."""
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
async def test_a_streamed_message_is_the_plain_one(tmp_path: Path, tool_card: ModelInfo, said: str) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: said), card=tool_card, job={"max_tokens": 300}) as served:
        client = served.anthropic(await served.begin())
        plain = await ask(client, tools=TOOLS)
        streamed = await ask(client, tools=TOOLS, stream=True)
    assert without_ids(plain) == without_ids(streamed)


def without_ids(answer: anthropic.types.Message) -> str:
    """Returns a message without ids, which differ in each call."""
    call_id = answer.id.removeprefix("msg_")
    fields = answer.model_dump(exclude_none=True, warnings=False)
    return json.dumps(fields, sort_keys=True).replace(call_id, "ID").replace(call_id[:12], "ID")


async def test_the_events_of_a_stream(tmp_path: Path, tool_card: ModelInfo) -> None:
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
async def test_what_was_sampled_is_recognised(tmp_path: Path, tool_card: ModelInfo, stream: bool) -> None:
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
    tmp_path: Path, tool_card: ModelInfo, arguments: str, stream: bool
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


@pytest.mark.parametrize("depth", [300, 400, 900])
async def test_a_history_may_be_nested_as_deep_as_the_context_is_long(
    tmp_path: Path, tool_card: ModelInfo, depth: int
) -> None:
    arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    chat: list[Any] = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    use = {"type": "tool_use", "id": "c", "name": "add", "input": {"INVALID_JSON": arguments}}
    messages: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result("c", "x")]},
    ]
    items: list[Any] = [
        *HELLO,
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ]
    async with serving(tmp_path / "d", saying(lambda prompt: "so"), card=tool_card, job={"max_tokens": 20}) as served:
        episode = await served.begin()
        openai = served.openai(episode)
        await openai.chat.completions.create(model="policy", messages=chat)
        await openai.responses.create(model="policy", input=items)
        await ask(served.anthropic(episode), messages=messages, max_tokens=20)
        first, *others = shown(served)
        assert arguments in first and others == [first, first]


async def test_another_dialect_continues_the_same_timeline(tmp_path: Path, tool_card: ModelInfo) -> None:
    said = '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>'
    async with serving(tmp_path / "d", saying(lambda prompt: said), card=tool_card) as served:
        episode = await served.begin()
        answer = await ask(served.anthropic(episode), tools=TOOLS, system="s")
        [use] = [block for block in answer.content if block.type == "tool_use"]
        await served.openai(episode).chat.completions.create(
            model="policy",
            tools=[_function(SCHEMA)],
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


async def test_results_of_tools_and_text_keep_their_order(tmp_path: Path, tool_card: ModelInfo) -> None:
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


async def test_the_same_prompt_as_chats(tmp_path: Path, tool_card: ModelInfo) -> None:
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


STRICT = {**SCHEMA, "additionalProperties": False, "required": ["a"]}
CONSTRAINED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "any tool": ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
    "one tool": (
        {"tool_choice": {"type": "tool", "name": "add"}},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
    ),
    "one call": (
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tool_choice": "required", "parallel_tool_calls": False},
    ),
    "at most one call": (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"parallel_tool_calls": False},
    ),
    "strict": (
        {"tools": [{"name": "add", "description": "Adds.", "input_schema": STRICT, "strict": True}]},
        {"tools": [_function(STRICT, strict=True)]},
    ),
    "schema": (
        {"output_config": {"format": {"type": "json_schema", "schema": STRICT}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": STRICT}}},
    ),
}
"""Requests for the same form of answer in Anthropic's and OpenAI's dialects."""


@pytest.mark.parametrize(("anthropics", "openais"), CONSTRAINED.values(), ids=CONSTRAINED)
async def test_the_same_form_of_answer_as_chats(
    tmp_path: Path, tool_card: ModelInfo, anthropics: dict[str, Any], openais: dict[str, Any]
) -> None:
    async with serving(tmp_path / "d", card=tool_card) as served:
        episode = await served.begin()
        await ask(served.anthropic(episode), extra_body={"tools": TOOLS, **anthropics})
        await served.openai(episode).chat.completions.create(
            model="policy", messages=HELLO, extra_body={"tools": [_function(SCHEMA)], **openais}
        )
    first, second = served.run.compute.asked
    assert first.params.grammar and first.params.grammar == second.params.grammar
    assert first.prompt == second.prompt


async def test_tokens_are_counted_exactly(tmp_path: Path, tool_card: ModelInfo) -> None:
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


async def test_arguments_that_an_agent_fills_in_with_defaults_continue_the_timeline(
    tmp_path: Path, tool_card: ModelInfo
) -> None:
    schema = {"type": "object", "properties": {"all": {"type": "boolean", "default": False}}}
    said = '<tool_call>\n{"name": "edit", "arguments": {"path":  "x"}}\n</tool_call>'
    tools: Any = [{"name": "edit", "input_schema": schema}]
    async with serving(tmp_path / "d", saying(lambda prompt: said), card=tool_card) as served:
        episode = await served.begin()
        client, messages = served.anthropic(episode), [*HELLO]
        for _ in range(3):
            answer = await ask(client, messages=messages, tools=tools)
            use: Any = answer.content[-1]
            filled = {"type": "tool_use", "id": use.id, "name": "edit", "input": {"all": False, **use.input}}
            result = {"type": "tool_result", "tool_use_id": use.id, "content": "done"}
            messages += [{"role": "assistant", "content": [filled]}, {"role": "user", "content": [result]}]
        assert_one_timeline(served, episode)


async def test_a_stream_that_breaks_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: "x" * 30)) as served:
        served.run.compute.stuck = lambda request, piece: piece == 10
        client = served.anthropic(await served.begin())
        stream = await client.messages.create(model="policy", messages=HELLO, max_tokens=30, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="worker died"):
            async for _ in stream:
                served.run.compute.die()
