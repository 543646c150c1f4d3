"""The chat completions of OpenAI's API.

Messages are compared by meaning, so forms with one meaning become one form here. An assistant's null content is the
empty string. The text parts of a content list are joined. `developer` is `system`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from agentjet.errors import InvalidRequest
from agentjet.gateway.requests import CallChunk, CallRequest
from agentjet.server.dialects.completions import DONE, SamplingBody, fingerprint_of, sampling_request, usage_of
from agentjet.server.dialects.dialect import (
    AnswerHead,
    Chunks,
    TextPart,
    call_of,
    check_choice,
    function_tool,
    named_function,
    schema_of,
    shown_logprobs,
    text_of,
)
from agentjet.server.dialects.error_shapes import sse
from agentjet.server.dialects.keys import CHAT_KEYS, Body, Count, JsonObject, Text, with_keys
from agentjet.types import Constraint, Conversation, Message, ToolCall

# --- requests


@with_keys(CHAT_KEYS, "messages[].content[].")
class ContentPart(TextPart):
    """A part of a message's content, with the keys of all types of part."""

    image_url: Any = None
    input_audio: Any = None
    video_url: Any = None
    file: Any = None
    refusal: str | None = None
    citations: Any = None


class HistoryFunction(Body):
    """The function of a tool call; `arguments` is JSON text."""

    name: str
    arguments: str
    parsed_arguments: Any = None
    """The parsed `arguments`, which `stream` and `parse` of OpenAI's SDK add. Ignored: it repeats `arguments`."""


class HistoryToolCall(Body):
    """A tool call of an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: HistoryFunction
    index: int | None = None
    """Kept by agents that join the chunks of a stream. Ignored: it repeats the order of the list."""


@with_keys(CHAT_KEYS, "messages[].")
class MessageBody(Body):
    """A message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    """Null or missing in an assistant message only."""
    reasoning_content: str | None = None
    """The reasoning of an assistant, as the answers of this server have it."""
    tool_calls: list[HistoryToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    parsed: Any = None
    """The parsed `content`, which `stream` and `parse` of OpenAI's SDK add. Ignored: it repeats `content`."""


class FunctionBody(Body):
    """A function that the policy may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


@with_keys(CHAT_KEYS, "tools[].")
class ToolBody(Body):
    """A tool definition."""

    type: Literal["function"]
    function: FunctionBody


class NamedSchema(Body):
    """A JSON schema. The answer follows all of it, whether `strict` or not. The name has no effect."""

    name: str
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer's content: any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


@with_keys(CHAT_KEYS)
class ChatBody(SamplingBody):
    """A chat completion request. Keys of OpenAI's API that cannot be honoured are refused, never ignored."""

    messages: Annotated[list[MessageBody], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: JsonObject | None = None


def to_request(body: ChatBody) -> CallRequest:
    """Returns the canonical request. Raises `InvalidRequest` for the first thing that cannot be honoured."""
    notes = body.noted_keys()
    for i, tool in enumerate(body.tools or ()):
        notes += tool.noted_keys(f"tools.{i}.")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise InvalidRequest(
            f"max_tokens = {body.max_tokens} and max_completion_tokens = {body.max_completion_tokens} differ.",
            param="max_completion_tokens",
        )
    functions = [] if body.tool_choice == "none" else [tool.function for tool in body.tools or ()]
    conversation = Conversation(
        tuple(_message(message, f"messages.{i}", notes) for i, message in enumerate(body.messages)),
        tuple(function_tool(function.name, function.description, function.parameters) for function in functions),
    )
    request = sampling_request(body, conversation, body.max_completion_tokens or body.max_tokens, notes)
    return replace(request, constraint=_constraint(body, functions), template_kwargs=body.chat_template_kwargs or {})


def _message(body: MessageBody, where: str, notes: list[str]) -> Message:
    notes += body.noted_keys(f"{where}.")
    if body.role != "assistant" and (body.tool_calls or body.reasoning_content):
        key = "tool_calls" if body.tool_calls else "reasoning_content"
        raise InvalidRequest(
            f"{where} is a {body.role} message: only assistant messages may have {key}.", param=f"{where}.{key}"
        )
    if (body.role == "tool") != bool(body.tool_call_id):
        raise InvalidRequest(
            f"{where}: tool messages, and no others, must have the tool_call_id that they answer.",
            param=f"{where}.tool_call_id",
        )
    if body.content is None and body.role != "assistant":
        raise InvalidRequest(
            f"{where}.content is null or missing: only an assistant message may have no content.",
            param=f"{where}.content",
        )
    return Message(
        role="system" if body.role == "developer" else body.role,
        content=text_of(body.content or "", ("text",), f"{where}.content", notes),
        reasoning=body.reasoning_content or "",
        tool_calls=tuple(
            ToolCall(call.id, call.function.name, call.function.arguments) for call in body.tool_calls or ()
        ),
        tool_call_id=body.tool_call_id or "",
        name=body.name or "",
    )


def _constraint(body: ChatBody, functions: list[FunctionBody]) -> Constraint:
    """Returns the constraint of `response_format`, `tool_choice`, `parallel_tool_calls` and strict tools."""
    choice, required, where = body.tool_choice, "", "response_format.json_schema"
    if isinstance(choice, dict):
        form = "{'type': 'function', 'function': {'name': ...}}"
        required = named_function(choice, choice.get("function"), form)
    shape = body.response_format or ResponseFormat(type="text")
    schema = shape.json_schema.schema_ if shape.json_schema else None
    constraint = Constraint(
        schema=schema_of(shape.type, schema, f"{where}.schema", where),
        calls="required" if choice == "required" or required else "auto",
        function=required,
        strict=frozenset(function.name for function in functions if function.strict),
        parallel=body.parallel_tool_calls is not False,
    )
    return check_choice(constraint, [function.name for function in functions])


# --- answers


def to_answer(choices: Sequence[CallChunk], body: ChatBody, head: AnswerHead) -> dict[str, Any]:
    """Returns the whole answer."""
    return {
        "id": f"chatcmpl-{head.id}",
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": [_choice(body, last) for last in choices],
        "usage": usage_of(choices),
        "system_fingerprint": fingerprint_of(call_of(choices[0]), head),
    }


async def to_events(chunks: Chunks, body: ChatBody, head: AnswerHead) -> AsyncGenerator[str]:
    """Yields the events of a streamed answer."""
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    common: dict[str, Any] = {
        "id": f"chatcmpl-{head.id}",
        "object": "chat.completion.chunk",
        "created": head.created,
        "model": head.model,
    }
    if with_usage:
        common["usage"] = None
    started: set[int] = set()
    choices: list[CallChunk] = []
    async for chunk in chunks:
        delta: dict[str, Any] = {}
        choice: dict[str, Any] = {"index": chunk.index, "delta": delta, "finish_reason": None, "logprobs": None}
        if chunk.index not in started:
            started.add(chunk.index)
            delta |= {"role": "assistant", "content": ""}
        if chunk.reasoning:
            delta["reasoning_content"] = chunk.reasoning
        if chunk.text:
            delta["content"] = chunk.text
        if chunk.tokens:
            choice["logprobs"] = _logprobs(body, chunk)
        if chunk.call is not None:
            choices.append(chunk)
            common["system_fingerprint"] = fingerprint_of(chunk.call, head)
            choice["finish_reason"] = chunk.call.finish_reason
            if tool_calls := _tool_calls(chunk.call.response):
                delta["tool_calls"] = [{**call, "index": i} for i, call in enumerate(tool_calls)]
        yield sse({**common, "choices": [choice]})
    if with_usage:
        yield sse({**common, "choices": [], "usage": usage_of(choices)})
    yield DONE


def _choice(body: ChatBody, last: CallChunk) -> dict[str, Any]:
    call = call_of(last)
    message = call.response
    shown = {
        "role": "assistant",
        "content": message.content or (None if message.tool_calls else ""),
        "reasoning_content": message.reasoning or None,
        "tool_calls": _tool_calls(message) or None,
        "refusal": None,
    }
    logprobs = _logprobs(body, last)
    return {"index": last.index, "message": shown, "logprobs": logprobs, "finish_reason": call.finish_reason}


def _tool_calls(message: Message) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]


def _logprobs(body: ChatBody, chunk: CallChunk) -> dict[str, Any] | None:
    return {"content": shown_logprobs(chunk.tokens), "refusal": None} if body.logprobs else None
