"""Forced tool calls, strict tools and response formats, asked with OpenAI's own SDK; the worker walks its grammars.

Pinned here: what is asked for arrives as a grammar that the answer fits, streamed or not; the sets that tokens were
chosen among are kept for training episodes, and only there; what cannot be followed is refused before it is sampled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from agentjet.swarm.journal import unpack_sets
from agentjet.types import ModelInfo, SamplingParams
from tests.fakes import Script
from tests.server.serving import serving
from tests.walks import Walker

pytestmark = pytest.mark.anyio

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": ADD, **more}}


TOOLS: list[Any] = [tool("add"), tool("sub")]


class Point(BaseModel):
    x: Literal[1, 2]
    label: Literal["a", "b"]


def walking(card: ModelInfo) -> Script:
    walker = Walker(card)

    def script(prompt: Sequence[int], params: SamplingParams) -> Sequence[int]:
        assert params.grammar, "nothing was asked of the answer's form"
        return walker.walk(params.grammar, params.seed % 1000)

    return script


CHOICES = [("required", {"add", "sub"}), ({"type": "function", "function": {"name": "sub"}}, {"sub"})]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("choice", "names"), CHOICES)
async def test_a_forced_choice_is_called(
    tmp_path: Path, card: ModelInfo, choice: Any, names: set[str], stream: bool
) -> None:
    async with serving(tmp_path / "d", walking(card), card=card, job={"max_tokens": 1000}) as served:
        client = served.openai(await served.begin())
        asked: dict[str, Any] = {
            "model": "policy", "messages": HELLO, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False,
        }  # fmt: skip
        for _ in range(4):
            if stream:
                async with client.chat.completions.stream(**asked) as events:
                    answer: Any = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(**asked)
            [called] = answer.choices[0].message.tool_calls
            assert answer.choices[0].finish_reason == "tool_calls"
            assert called.function.name in names
            assert json.loads(called.function.arguments)["a"] in range(10)


async def test_structured_outputs(tmp_path: Path, card: ModelInfo) -> None:
    async with serving(tmp_path / "d", walking(card), card=card, job={"max_tokens": 1000}) as served:
        client = served.openai(await served.begin())
        for _ in range(4):
            answer = await client.chat.completions.parse(model="policy", messages=HELLO, response_format=Point)
            assert isinstance(answer.choices[0].message.parsed, Point)


async def test_json_mode_asks_for_an_object(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        client = served.openai(await served.begin())
        await client.chat.completions.create(model="policy", messages=HELLO, response_format={"type": "json_object"})
        [asked] = served.run.compute.asked
        walker = Walker(served.run.compute.card)
        assert walker.walk(asked.params.grammar, 0, hint='{"a": [1, null]}<|im_end|>')
        for other in ("[1]", '"a"', "hello", '{"a": 1,}'):
            with pytest.raises(AssertionError, match="is not allowed"):
                walker.walk(asked.params.grammar, 0, hint=other)


@pytest.mark.parametrize("mode", ["train", "eval"])
async def test_sets_are_kept_for_training_only(tmp_path: Path, mode: str) -> None:
    async with serving(tmp_path / "d") as served:
        episode = await served.begin(mode=mode)
        client = served.openai(episode)
        for more in ({}, {"top_p": 0.9}, {"extra_body": {"top_k": 4}}):
            await client.chat.completions.create(model="policy", messages=HELLO, **more)  # type: ignore[call-overload]
        plain, *truncated = served.run.gateway.swarm.tree(episode["episode_id"], "").calls
        assert plain.support == b""
        for call in truncated:
            assert bool(call.support) == (mode == "train")
            assert len(unpack_sets(call.support, len(call.completion))) == len(call.completion)


FORMAT = "response_format.json_schema"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, FORMAT, f"needs {FORMAT}.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        "response_format",
        'response_format: this JSON schema is not supported: Unimplemented keys: ["not"]',
    ),
    ({"tool_choice": "required"}, "tool_choice", "offers no tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "mul"}}, "tools": TOOLS}, "tool_choice", "'mul'"),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice", "is not supported: use 'auto'"),
    ({"tool_choice": {"type": "function", "function": "add"}, "tools": TOOLS}, "tool_choice", "is not supported"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "array"}}}]},
        "tools.0.function.parameters",
        "must describe an object",
    ),
]


async def test_what_cannot_be_followed_is_refused_before_it_is_sampled(tmp_path: Path, card: ModelInfo) -> None:
    async with serving(tmp_path / "d", card=card) as served:
        client = served.openai(await served.begin())
        for body, param, said in REFUSED:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="policy", messages=HELLO, extra_body=body)
            assert refused.value.param == param
            assert said in refused.value.message
        assert served.run.compute.asked == []


@pytest.mark.e2e
async def test_a_schema_that_takes_too_long_to_compile_is_refused_and_not_sampled(
    tmp_path: Path, card: ModelInfo
) -> None:
    large = {"type": "object", "properties": {"x": {"type": "integer", "multipleOf": 9_999_991}}}
    asked: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": large}}
    async with serving(tmp_path / "d", walking(card), card=card) as served:
        client = served.openai(await served.begin())
        limits = (
            r"more than (2 s of CPU time|256 MiB of memory) to compile"  # Which comes first depends on the machine.
        )
        with pytest.raises(openai.BadRequestError, match=limits) as refused:
            await client.chat.completions.create(model="policy", messages=HELLO, response_format=asked)
        assert refused.value.code == "unsupported_schema" and not served.run.compute.asked
