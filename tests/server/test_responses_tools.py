"""Custom tools and namespaces of the Responses API, as Codex sends them.

Pinned here:
1. they are offered as functions, and answered as the items that the agent expects, plain and streamed;
2. their calls come back onto the same timeline, with any sampled arguments;
3. a regular expression constrains a forced call; a Lark grammar is shown and noted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher
from openai.types.responses import Response
from openai.types.responses.response_stream_event import ResponseStreamEvent
from pydantic import TypeAdapter

from agentjet.front.dialects.responses import from_custom_input, to_custom_input
from agentjet.timeline.tree import answer_key
from agentjet.types import Message, ModelInfo, ToolCall
from tests.fakes import saying
from tests.server.serving import Served, serving

PATCH = "*** Begin Patch\n+é \"x\" 'y' \\n\n*** End Patch"
LARK: Any = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /.*/'}
TOOLS: list[Any] = [
    {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": LARK},
    {
        "type": "namespace",
        "name": "mcp__files",
        "description": "Files.",
        "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}, "output_schema": {}}],
    },
    {"type": "web_search", "external_web_access": False},
]


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALLS = "\n".join(
    [
        called("apply_patch", json.dumps({"input": PATCH})),
        called("apply_patch", '{"patch":  "wrong"}'),
        called("mcp__files.read", "{}"),
        called("read", "{}"),
    ]
)


@pytest.mark.anyio
async def test_custom_tools_and_namespaces_are_called_and_come_back(tmp_path: Path, card: ModelInfo) -> None:
    job = {"max_tokens": 600}
    async with serving(tmp_path / "d", saying(lambda prompt: CALLS), card=card, job=job) as served:
        episode = await served.begin()
        client = served.openai(episode)
        asked: dict[str, Any] = {"model": "policy", "tools": TOOLS}
        history: list[Any] = [{"role": "user", "content": "hello"}]
        for turn in range(3):
            answer = await client.responses.create(input=history, **asked)
            Response.model_validate(answer.model_dump())
            items = [item.model_dump(exclude_none=True) for item in answer.output]
            assert [(item["type"], item["name"], item.get("namespace")) for item in items] == [
                ("custom_tool_call", "apply_patch", None),
                ("custom_tool_call", "apply_patch", None),
                ("function_call", "read", "mcp__files"),
                ("function_call", "read", None),
            ]
            assert [item["input"] for item in items[:2]] == [PATCH, '{"patch":  "wrong"}']
            for item in items:
                kind = f"{item['type'].removesuffix('_call')}_call_output"
                if turn == 1:  # Codex leaves out the ids of items.
                    del item["id"]
                history += [item, {"type": kind, "call_id": item["call_id"], "output": "done"}]
        _assert_continued(served, episode)
        tools = served.run.gateway.swarm.tree(episode["episode_id"], "").calls[0].ask.tools
        assert [tool["function"]["name"] for tool in tools] == ["apply_patch", "mcp__files.read"]
        assert LARK["definition"] in tools[0]["function"]["description"]
        assert served.run.gateway.swarm.episode(episode["episode_id"]).noted == {
            "tool web_search dropped": 3,
            "tool apply_patch: Lark grammar shown, not enforced": 3,
            "tools[].output_schema": 3,
        }


def _assert_continued(served: Served, episode: dict[str, Any]) -> None:
    calls = served.run.gateway.swarm.tree(episode["episode_id"], "").calls
    assert [call.fork for call in calls] == ["", "", ""]
    for before, call, asked in zip(calls, calls[1:], served.run.compute.asked[1:], strict=False):
        assert call.parent == before.id and call.kept == len(asked.prompt) - len(call.suffix)


@pytest.mark.anyio
async def test_a_streamed_custom_call(tmp_path: Path, card: ModelInfo) -> None:
    said = called("apply_patch", json.dumps({"input": PATCH}))
    async with serving(tmp_path / "d", saying(lambda p: said), card=card, job={"max_tokens": 600}) as served:
        client = served.openai(await served.begin())
        events: list[Any] = []
        async for event in await client.responses.create(model="policy", input="x", tools=TOOLS, stream=True):
            TypeAdapter(ResponseStreamEvent).validate_python(event.model_dump())
            events.append(event)
        kinds = [event.type for event in events]
        assert "response.custom_tool_call_input.delta" in kinds
        done = next(event for event in events if event.type == "response.custom_tool_call_input.done")
        assert done.input == PATCH and events[-1].response.output[-1].input == PATCH


@pytest.mark.anyio
@pytest.mark.parametrize("choice", [{"type": "custom", "name": "day"}, "required"])
async def test_a_regular_expression_binds_a_forced_call(tmp_path: Path, card: ModelInfo, choice: Any) -> None:
    day: Any = {"type": "custom", "name": "day", "format": {"type": "grammar", "syntax": "regex", "definition": "a|b"}}
    async with serving(tmp_path / "d", saying(lambda p: called("day", '{"input": "a"}')), card=card) as served:
        client = served.openai(await served.begin(mode="eval"))
        await client.responses.create(model="policy", input="x", tools=[day], tool_choice=choice)
        [asked] = served.run.compute.asked
        assert "^(?:a|b)$" in asked.params.grammar and not LLMatcher.validate_grammar(asked.params.grammar)


JSON_TEXT = st.recursive(st.none() | st.text() | st.integers(), lambda inner: st.dictionaries(st.text(), inner))


@given(st.one_of(st.text(), JSON_TEXT.map(json.dumps), st.text().map(lambda text: json.dumps({"input": text}))))
@example('{"input": "{}"}')
@example('{"input": "{\\"input\\": \\"x\\"}"}')
@example('{"input":  "x"}')
def test_arguments_come_back_with_their_meaning(arguments: str) -> None:
    """Holds for all arguments that a policy may sample, which are JSON objects."""
    try:
        if not isinstance(json.loads(arguments), dict):
            return
    except ValueError:
        return
    assert _key(from_custom_input(to_custom_input(arguments))) == _key(arguments)


def _key(arguments: str) -> str:
    return answer_key(Message("assistant", tool_calls=(ToolCall("c", "f", arguments),)))
