"""One way to ask in every dialect, with the provider's SDK, and one form for its answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai

from agentjet.types import Call, ModelInfo
from tests.server.serving import Served
from tests.tiny import make_model_info, tokenizer

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
SAMPLING = frozenset({"max_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop", "stop_token_ids", "logprobs"})
"""The sampling parameters of vLLM."""


@dataclass(frozen=True)
class Answer:
    """An answer in words that all dialects share."""

    text: str
    end: str
    """`stop`, `length` or `calls`."""
    usage: tuple[int, int]
    """Tokens of prompt and completion."""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    """Names, and parsed arguments."""
    turn: list[Any] = field(default_factory=list, compare=False)
    """What an agent sends back, with a result of each call."""
    raw: Any = field(default=None, compare=False)


@dataclass(frozen=True, eq=False)
class Speech:
    """A dialect."""

    path: str
    ask: Callable[..., Coroutine[Any, Any, Answer]]
    """Takes the server, an episode, `stream`, and keys of the request's body."""
    asked: dict[str, Any]
    """The keys that every request needs, with `hello`."""
    length: str
    """The key of the maximum length."""
    stop: str = ""
    history: str = "messages"
    tools: tuple[dict[str, Any], ...] = ()
    nested: str = ""
    """The key of the sampling parameters, if they do not stand beside the other keys."""

    def __str__(self) -> str:
        return self.path.split("/v1/")[1].split("/")[0]

    def body(self, **keys: Any) -> dict[str, Any]:
        """Returns a request with `hello` and these keys."""
        inner = {name: keys.pop(name) for name in list(keys) if self.nested and name in SAMPLING}
        return {"model": "policy", **self.asked, **({self.nested: inner} if inner else {}), **keys}


async def _chat(served: Served, episode: dict[str, Any], *, stream: bool = False, **body: Any) -> Answer:
    client = served.openai(episode).chat.completions
    asked: dict[str, Any] = {"model": "policy", "messages": HELLO, "extra_body": body}
    if stream:
        asked["extra_body"] = {**body, "stream_options": {"include_usage": True}}
        async with client.stream(**asked) as events:
            try:
                answer: Any = await events.get_final_completion()
            except openai.LengthFinishReasonError as error:
                answer = error.completion
    else:
        answer = await client.create(**asked)
    [choice], used = answer.choices, answer.usage
    message, calls = choice.message.model_dump(exclude_none=True), choice.message.tool_calls or []
    results = [{"role": "tool", "tool_call_id": call.id, "content": str(i)} for i, call in enumerate(calls)]
    return Answer(
        choice.message.content or "",
        "calls" if choice.finish_reason == "tool_calls" else choice.finish_reason,
        (used.prompt_tokens, used.completion_tokens),
        message.get("reasoning_content", ""),
        tuple((call.function.name, json.loads(call.function.arguments)) for call in calls),
        [message, *results],
        answer,
    )


async def _completion(served: Served, episode: dict[str, Any], *, stream: bool = False, **body: Any) -> Answer:
    client = served.openai(episode).completions
    asked: dict[str, Any] = {"model": "policy", "prompt": "hello", "extra_body": body}
    if not stream:
        answer = await client.create(**asked)
        [choice], used = answer.choices, answer.usage
        assert used is not None
        return Answer(choice.text, choice.finish_reason, (used.prompt_tokens, used.completion_tokens), raw=answer)
    options = {"include_usage": True}
    chunks: list[Any] = [chunk async for chunk in await client.create(stream=True, stream_options=options, **asked)]
    used, pieces = chunks.pop().usage, [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert used is not None
    text, end = "".join(piece.text for piece in pieces), pieces[-1].finish_reason
    return Answer(text, end, (used.prompt_tokens, used.completion_tokens), raw=pieces)


async def _message(served: Served, episode: dict[str, Any], *, stream: bool = False, **body: Any) -> Answer:
    answer = await ask(served.anthropic(episode), stream=stream, extra_body=body)
    uses = [block for block in answer.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": str(i)} for i, use in enumerate(uses)]
    end = {"tool_use": "calls", "max_tokens": "length", "model_context_window_exceeded": "length"}
    return Answer(
        "".join(block.text for block in answer.content if block.type == "text"),
        end.get(str(answer.stop_reason), "stop"),
        (answer.usage.input_tokens, answer.usage.output_tokens),
        "".join(block.thinking for block in answer.content if block.type == "thinking"),
        tuple((use.name, use.input) for use in uses),
        [answer.to_param(), *([{"role": "user", "content": results}] if results else [])],
        answer,
    )


async def _response(served: Served, episode: dict[str, Any], *, stream: bool = False, **body: Any) -> Answer:
    client = served.openai(episode).responses
    asked: dict[str, Any] = {"model": "policy", "input": "hello", "extra_body": body}
    if stream:
        async with client.stream(**asked) as events:
            answer: Any = [event async for event in events][-1].response
    else:
        answer = await client.create(**asked)
    calls = [item for item in answer.output if item.type == "function_call"]
    reasoning = [item for item in answer.output if item.type == "reasoning"]
    outputs = [{"type": "function_call_output", "call_id": c.call_id, "output": str(i)} for i, c in enumerate(calls)]
    return Answer(
        answer.output_text,
        "length" if answer.status == "incomplete" else "calls" if calls else "stop",
        (answer.usage.input_tokens, answer.usage.output_tokens),
        "".join(item.content[0].text for item in reasoning),
        tuple((call.name, json.loads(call.arguments)) for call in calls),
        [*(item.model_dump(exclude_unset=True, warnings=False) for item in answer.output), *outputs],
        answer,
    )


async def _generate(served: Served, episode: dict[str, Any], *, stream: bool = False, **body: Any) -> Answer:
    """As `renderers.client` of verifiers asks: OpenAI's SDK with an absolute URL, and an answer of plain JSON."""
    client = served.openai(episode)
    url = str(client.base_url).rstrip("/").removesuffix("/v1") + GENERATE.path
    asked = GENERATE.body(**body)
    [renderer, *_] = served.run.gateway.calls.policies.renderers.values()
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        events: Any = await client.post(
            url, cast_to=object, body=asked, stream=True, stream_cls=openai.AsyncStream[Any]
        )
        pieces: list[Any] = [piece async for piece in events]
        choices, used, last = [piece["choices"][0] for piece in pieces[:-1]], pieces[-1]["usage"], pieces[-1]
    else:
        last = json.loads((await client.post(url, cast_to=httpx.Response, body=asked)).content)
        choices, used = last["choices"], last["usage"]
    ids = [one for choice in choices for one in choice["token_ids"]]
    entries = [one for choice in choices for one in (choice["logprobs"] or {"content": []})["content"]]
    raw = SimpleNamespace(id=last["request_id"], model=last["model"], ids=ids, logprobs=entries, body=last)
    usage = used["prompt_tokens"], used["completion_tokens"]
    return Answer(renderer.text(ids), choices[-1]["finish_reason"], usage, turn=ids, raw=raw)


FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
CHAT = Speech(
    "/v1/chat/completions",
    _chat,
    {"messages": HELLO},
    "max_tokens",
    "stop",
    tools=({"type": "function", "function": FUNCTION},),
)
COMPLETIONS = Speech("/v1/completions", _completion, {"prompt": "hello"}, "max_tokens", "stop")
MESSAGES = Speech(
    "/v1/messages",
    _message,
    {"messages": HELLO, "max_tokens": 9},
    "max_tokens",
    "stop_sequences",
    tools=({"name": "add", "description": "Adds.", "input_schema": SCHEMA},),
)
RESPONSES = Speech(
    "/v1/responses",
    _response,
    {"input": "hello"},
    "max_output_tokens",
    history="input",
    tools=({"type": "function", **FUNCTION, "strict": None},),
)
GENERATE = Speech(
    "/inference/v1/generate",
    _generate,
    {"token_ids": tokenizer().encode("hello", add_special_tokens=False).ids},
    "max_tokens",
    "stop",
    history="token_ids",
    nested="sampling_params",
)
SPEECHES = (CHAT, COMPLETIONS, MESSAGES, RESPONSES, GENERATE)
WITH_TOOLS = (CHAT, MESSAGES, RESPONSES)


def tool_card(folder: Path) -> ModelInfo:
    """Returns a model that reasons and calls tools."""
    return make_model_info(folder / "qwen", "qwen3", tool_format="hermes")


def calls_of(served: Served, episode: dict[str, Any], role: str = "") -> tuple[Call, ...]:
    return served.run.gateway.swarm.tree(episode["episode_id"], role).calls


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


async def ask(client: anthropic.AsyncAnthropic, *, stream: bool = False, **body: Any) -> anthropic.types.Message:
    """One message of Anthropic's SDK, plain or put together from its events."""
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 300, "messages": HELLO, **body}
    if not stream:
        answer: anthropic.types.Message = await client.messages.create(**asked)
        return answer
    async with client.messages.stream(**asked) as events:
        return await events.get_final_message()
