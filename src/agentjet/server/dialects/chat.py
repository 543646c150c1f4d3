"""OpenAI's chat completions: bodies to canonical requests, chunks to answers.

Equality of messages is by meaning, so what differs only in form becomes the same here: an assistant's null content is
the empty string, the text parts of a content list are joined, `developer` is `system`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentjet.errors import InvalidRequest
from agentjet.gateway.requests import CallRequest, TokenLogprob
from agentjet.server.dialects.bodies import text_of
from agentjet.server.dialects.chat_bodies import (
    BODY,
    KEYS,
    MESSAGE,
    AnswerBody,
    ChatBody,
    ChatCompletion,
    ChoiceBody,
    FunctionCall,
    LogprobsBody,
    MessageBody,
    ResponseFormat,
    TokenLogprobBody,
    ToolBody,
    ToolCallBody,
)
from agentjet.server.dialects.constraints import ANY_OBJECT, checked, function_tool, named_function
from agentjet.server.dialects.dialect import DONE, Chunks, Dialect, Event, Head, sse
from agentjet.server.dialects.errors import OPENAI
from agentjet.server.dialects.gathering import Gathered, fingerprint_of, gather
from agentjet.server.dialects.refusals import refuse_idle_stream_options, refuse_other_tokens
from agentjet.server.dialects.sampled import sampled_request
from agentjet.types import Call, Constraint, Conversation, Message, ToolCall


def to_request(body: ChatBody) -> CallRequest:
    """The canonical request. Raises `InvalidRequest` naming the first thing that cannot be honoured."""
    refuse_other_tokens(body.top_logprobs, "top_logprobs")
    notes = BODY.judge(body)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise InvalidRequest(
            f"max_tokens = {body.max_tokens} and max_completion_tokens = {body.max_completion_tokens} differ.",
            param="max_completion_tokens",
        )
    refuse_idle_stream_options(body, body.stream_options)
    tools = () if body.tool_choice == "none" else tuple(map(_tool, body.tools or ()))
    if any(tool.cache_control is not None for tool in body.tools or ()):
        notes.append("tools[].cache_control")
    conversation = Conversation(tuple(_message(m, i, notes) for i, m in enumerate(body.messages)), tools)
    max_tokens = body.max_completion_tokens or body.max_tokens
    request = sampled_request(body, conversation, max_tokens, _constraint(body), notes)
    return replace(request, template_kwargs=body.chat_template_kwargs or {})


async def to_answer(chunks: Chunks, body: ChatBody, head: Head) -> ChatCompletion:
    """The whole answer, once every choice has ended."""
    gathered = await gather(chunks)
    choices = [
        ChoiceBody(
            index=index,
            message=_answer(call.response),
            logprobs=_logprobs(gathered.tokens[index]) if body.logprobs else None,
            finish_reason=_finish_reason(call),
        )
        for index, call in sorted(gathered.calls.items())
    ]
    return ChatCompletion(
        id=f"chatcmpl-{head.id}",
        created=head.created,
        model=head.model,
        choices=choices,
        usage=gathered.usage,
        system_fingerprint=fingerprint_of(gathered.calls[0]),
    )


async def to_events(chunks: Chunks, body: ChatBody, head: Head) -> AsyncGenerator[Event]:
    """The chunks of a streamed answer."""
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
    gathered = Gathered()
    async for chunk in chunks:
        gathered.take(chunk)
        delta: dict[str, Any] = {}
        if chunk.index not in started:
            started.add(chunk.index)
            delta = {"role": "assistant", "content": ""}
        if chunk.reasoning:
            delta["reasoning_content"] = chunk.reasoning
        if chunk.text:
            delta["content"] = chunk.text
        if chunk.call is not None:
            common["system_fingerprint"] = fingerprint_of(chunk.call)
            if chunk.call.response.tool_calls:
                delta["tool_calls"] = [
                    {**call.model_dump(), "index": i} for i, call in enumerate(_tool_calls(chunk.call.response))
                ]
        choice: dict[str, Any] = {"index": chunk.index, "delta": delta, "finish_reason": None, "logprobs": None}
        if body.logprobs and chunk.tokens:
            choice["logprobs"] = _logprobs(chunk.tokens).model_dump()
        if chunk.call is not None:
            choice["finish_reason"] = _finish_reason(chunk.call)
        yield Event(sse({**common, "choices": [choice]}))
    if with_usage:
        yield Event(sse({**common, "choices": [], "usage": gathered.usage.model_dump()}))
    yield DONE


def _message(body: MessageBody, index: int, notes: list[str]) -> Message:
    where = f"messages.{index}"
    notes += MESSAGE.judge(body, f"{where}.")
    if isinstance(body.content, list) and any(part.cache_control is not None for part in body.content):
        notes.append("messages[].content[].cache_control")
    if body.role != "assistant" and (body.tool_calls or body.reasoning_content):
        what = "tool_calls" if body.tool_calls else "reasoning_content"
        raise InvalidRequest(
            f"{what} belong to assistant messages, {where} is a {body.role} message.", param=f"{where}.{what}"
        )
    if (body.role == "tool") != bool(body.tool_call_id):
        raise InvalidRequest(
            f"{where}: a tool message, and only a tool message, names the tool_call_id it answers.",
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


def _tool(tool: ToolBody) -> dict[str, Any]:
    return function_tool(tool.function.name, tool.function.description, tool.function.parameters)


def _constraint(body: ChatBody) -> Constraint:
    """What `response_format`, `tool_choice`, `parallel_tool_calls` and strict tools ask of the answer."""
    tools = [] if body.tool_choice == "none" else [tool.function for tool in body.tools or ()]
    forced = body.tool_choice == "required" or isinstance(body.tool_choice, dict)
    constraint = Constraint(
        schema=_schema(body.response_format),
        calls="required" if forced else "auto",
        function=_named(body.tool_choice) if isinstance(body.tool_choice, dict) else "",
        strict=frozenset(tool.name for tool in tools if tool.strict),
        parallel=body.parallel_tool_calls is not False,
    )
    return checked(constraint, [tool.name for tool in tools])


def _schema(response_format: ResponseFormat | None) -> Mapping[str, Any] | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return ANY_OBJECT
    if response_format.json_schema is None or response_format.json_schema.schema_ is None:
        where = "response_format.json_schema"
        raise InvalidRequest(f"response_format of type 'json_schema' needs {where}.schema.", param=where)
    return response_format.json_schema.schema_


def _named(choice: Mapping[str, Any]) -> str:
    return named_function(choice, choice.get("function"), "{'type': 'function', 'function': {'name': ...}}")


def _answer(message: Message) -> AnswerBody:
    return AnswerBody(
        content=message.content or (None if message.tool_calls else ""),
        reasoning_content=message.reasoning or None,
        tool_calls=_tool_calls(message) or None,
    )


def _tool_calls(message: Message) -> list[ToolCallBody]:
    return [
        ToolCallBody(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
        for call in message.tool_calls
    ]


def _logprobs(tokens: Sequence[TokenLogprob]) -> LogprobsBody:
    return LogprobsBody(
        content=[TokenLogprobBody(token=t.text, logprob=t.logprob, bytes=list(t.utf8)) for t in tokens],
    )


def _finish_reason(call: Call) -> Any:
    assert call.finish_reason != "cancelled", "a cancelled call is never answered"
    return call.finish_reason


DIALECT = Dialect(
    path="/v1/chat/completions",
    keys=KEYS,
    answer=ChatCompletion,
    errors=OPENAI,
    to_request=lambda body, past: to_request(body),
    to_answer=to_answer,
    to_events=to_events,
)
