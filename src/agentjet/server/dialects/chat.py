"""The chat completions of OpenAI's API.

Messages are compared by meaning, so forms with one meaning become one form here. An assistant's null content is the
empty string. The text parts of a content list are joined. `developer` is `system`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from agentjet.errors import InvalidRequest
from agentjet.gateway.requests import CallChunk, CallRequest, TokenLogprob
from agentjet.server.dialects.completions import (
    DONE,
    SAMPLING_KEYS,
    SamplingBody,
    UsageBody,
    fingerprint_of,
    sampling_request,
    usage_of,
)
from agentjet.server.dialects.dialect import (
    ANY_OBJECT,
    CACHE_HINT,
    REASONING_HINT,
    AnswerHead,
    Body,
    Chunks,
    Count,
    JsonObject,
    KeyRules,
    RequestKeys,
    Text,
    TextPart,
    TokenLogprobBody,
    call_of,
    check_choice,
    collect,
    function_tool,
    honoured,
    logprob_bodies,
    named_function,
    noted,
    refuse_top_logprobs,
    refused,
    sse,
    text_of,
)
from agentjet.types import Call, Constraint, Conversation, Message, ToolCall

# --- requests


class ContentPart(TextPart):
    """A part of a message's content, with the keys of all types of part."""

    image_url: Any = None
    input_audio: Any = None
    video_url: Any = None
    file: Any = None
    refusal: str | None = None
    cache_control: Any = None
    citations: Any = None


class FunctionCall(Body):
    """The function of a tool call; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallBody(Body):
    """A tool call of an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class HistoryFunction(FunctionCall):
    """The function of a tool call in a history."""

    parsed_arguments: Any = None
    """The parsed `arguments`, which `stream` and `parse` of OpenAI's SDK add. Ignored: it repeats `arguments`."""


class HistoryToolCall(ToolCallBody):
    """A tool call in a history."""

    function: HistoryFunction
    index: int | None = None
    """Kept by agents that join the chunks of a stream. Ignored: it repeats the order of the list."""


class MessageBody(Body):
    """A message. Keys that SDKs copy from an answer with null are known, and must be empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    """Null or missing in an assistant message only."""
    reasoning_content: str | None = None
    """The reasoning of an assistant, as the answers of this server have it."""
    tool_calls: list[HistoryToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None
    parsed: Any = None
    """The parsed `content`, which `stream` and `parse` of OpenAI's SDK add. Ignored: it repeats `content`."""
    provider_specific_fields: Any = None
    """Notes of LiteLLM about the answer. The policy never read them."""
    reasoning: Any = None
    reasoning_details: Any = None
    reasoning_text: Any = None
    reasoning_opaque: Any = None
    reasoning_items: Any = None
    thinking_blocks: Any = None
    cache_control: Any = None


class FunctionBody(Body):
    """A function that the policy may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolBody(Body):
    """A tool definition."""

    type: Literal["function"]
    function: FunctionBody
    cache_control: Any = None


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


class ChatBody(SamplingBody):
    """A chat completion request. Keys of OpenAI's API that cannot be honoured are refused, never ignored."""

    messages: Annotated[list[MessageBody], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    """Only 0, which means the sampled tokens: the sampler does not report other tokens."""
    tools: list[ToolBody] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None

    # Known, and not honoured: see `KEYS`.
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    store: Any = None
    prediction: Any = None
    moderation: Any = None
    reasoning_effort: Any = None
    reasoning: Any = None
    thinking: Any = None
    enable_thinking: Any = None
    thinking_budget: Any = None
    include_reasoning: Any = None
    verbosity: Any = None
    cache_control: Any = None
    usage: Any = None
    web_search_options: Any = None
    chat_template_kwargs: JsonObject | None = None
    modalities: list[str] | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None


REASONING_TEXT_HINT = "`reasoning_content` has the text"
KEYS: RequestKeys = {
    **SAMPLING_KEYS,
    "messages": honoured("text, also in parts; tool calls and their results; `reasoning_content`"),
    "max_tokens": honoured(),
    "max_completion_tokens": honoured("the same as `max_tokens`"),
    "logprobs": honoured("every sampled token, control tokens included"),
    "top_logprobs": refused("the sampler reports the sampled token only", 0),
    "tools": honoured("of type `function`, also `strict`"),
    "tool_choice": honoured(),
    "parallel_tool_calls": honoured(),
    "response_format": honoured("[constraints.md](constraints.md)"),
    "chat_template_kwargs": noted("refused if this model's template would write another prompt with it", {}),
    "metadata": noted(),
    "safety_identifier": noted(),
    "prompt_cache_key": noted(CACHE_HINT),
    "prompt_cache_options": noted(CACHE_HINT),
    "prompt_cache_retention": noted(CACHE_HINT),
    "cache_control": noted(CACHE_HINT),
    "service_tier": noted("there is one tier"),
    "store": noted("answers cannot be fetched again", False),
    "prediction": noted("a hint for speed"),
    "moderation": noted(),
    "usage": noted("answers always have it"),
    "reasoning_effort": noted(REASONING_HINT),
    "reasoning": noted(REASONING_HINT),
    "thinking": noted(REASONING_HINT),
    "enable_thinking": noted(REASONING_HINT),
    "thinking_budget": noted(REASONING_HINT),
    "include_reasoning": noted("answers have `reasoning_content`", True),
    "verbosity": noted("state the wanted length in the prompt"),
    "web_search_options": noted("no provider runs the search; the policy is not offered it"),
    "modalities": refused("the policy writes text only", ["text"]),
    "audio": refused("the policy writes text only"),
    "function_call": refused("use `tool_choice`", "auto"),
    "functions": refused("use `tools`", []),
    "messages[].refusal": refused("the policy refuses in plain text"),
    "messages[].annotations": refused("", []),
    "messages[].audio": refused("the policy reads text only"),
    "messages[].function_call": refused("use `tool_calls`"),
    "messages[].parsed": honoured("repeats `content`"),
    "messages[].provider_specific_fields": noted("the policy never read it", {}),
    "messages[].reasoning": noted(REASONING_TEXT_HINT, ""),
    "messages[].reasoning_details": noted(REASONING_TEXT_HINT, []),
    "messages[].reasoning_text": noted(REASONING_TEXT_HINT, ""),
    "messages[].reasoning_opaque": noted(REASONING_TEXT_HINT, ""),
    "messages[].reasoning_items": noted(REASONING_TEXT_HINT, []),
    "messages[].thinking_blocks": noted(REASONING_TEXT_HINT, []),
    "messages[].cache_control": noted(CACHE_HINT),
    "messages[].content[].cache_control": noted(CACHE_HINT),
    "tools[].cache_control": noted(CACHE_HINT),
}
_RULES, _MESSAGE_RULES = KeyRules(KEYS), KeyRules(KEYS, "messages[].")


def to_request(body: ChatBody) -> CallRequest:
    """Returns the canonical request. Raises `InvalidRequest` for the first thing that cannot be honoured."""
    refuse_top_logprobs(body.top_logprobs)
    notes = _RULES.check(body)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise InvalidRequest(
            f"max_tokens = {body.max_tokens} and max_completion_tokens = {body.max_completion_tokens} differ.",
            param="max_completion_tokens",
        )
    if any(tool.cache_control is not None for tool in body.tools or ()):
        notes.append("tools[].cache_control")
    functions = [] if body.tool_choice == "none" else [tool.function for tool in body.tools or ()]
    conversation = Conversation(
        tuple(_message(message, i, notes) for i, message in enumerate(body.messages)),
        tuple(function_tool(function.name, function.description, function.parameters) for function in functions),
    )
    max_tokens = body.max_completion_tokens or body.max_tokens
    request = sampling_request(body, conversation, max_tokens, notes, _constraint(body, functions))
    return replace(request, template_kwargs=body.chat_template_kwargs or {})


def _message(body: MessageBody, index: int, notes: list[str]) -> Message:
    where = f"messages.{index}"
    notes += _MESSAGE_RULES.check(body, f"{where}.")
    if isinstance(body.content, list) and any(part.cache_control is not None for part in body.content):
        notes.append("messages[].content[].cache_control")
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
    choice, required = body.tool_choice, ""
    if isinstance(choice, dict):
        form = "{'type': 'function', 'function': {'name': ...}}"
        required = named_function(choice, choice.get("function"), form)
    constraint = Constraint(
        schema=_schema(body.response_format),
        calls="required" if choice == "required" or required else "auto",
        function=required,
        strict=frozenset(function.name for function in functions if function.strict),
        parallel=body.parallel_tool_calls is not False,
    )
    return check_choice(constraint, [function.name for function in functions])


def _schema(response_format: ResponseFormat | None) -> Mapping[str, Any] | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return ANY_OBJECT
    if response_format.json_schema is None or response_format.json_schema.schema_ is None:
        where = "response_format.json_schema"
        raise InvalidRequest(f"response_format of type 'json_schema' needs {where}.schema.", param=where)
    return response_format.json_schema.schema_


# --- answers


class LogprobsBody(BaseModel):
    """Log-probabilities of every sampled token of a choice, control tokens included."""

    content: list[TokenLogprobBody]
    refusal: None = None


class AnswerMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    refusal: None = None


class ChoiceBody(BaseModel):
    """One completion."""

    index: int
    message: AnswerMessage
    logprobs: LogprobsBody | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    """The answer to a chat completion request that does not stream."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChoiceBody]
    usage: UsageBody
    system_fingerprint: str
    """`policy-N`: the policy version that sampled the last token."""


async def to_answer(chunks: Chunks, body: ChatBody, head: AnswerHead) -> ChatCompletion:
    """Returns the whole answer, after every choice has ended."""
    choices = await collect(chunks)
    return ChatCompletion(
        id=f"chatcmpl-{head.id}",
        created=head.created,
        model=head.model,
        choices=[_choice(body, last) for last in choices],
        usage=usage_of(choices),
        system_fingerprint=fingerprint_of(call_of(choices[0]), head),
    )


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
        if body.logprobs and chunk.tokens:
            choice["logprobs"] = _logprobs(chunk.tokens).model_dump()
        if chunk.call is not None:
            choices.append(chunk)
            common["system_fingerprint"] = fingerprint_of(chunk.call, head)
            choice["finish_reason"] = _finish_reason(chunk.call)
            if tool_calls := _tool_calls(chunk.call.response):
                delta["tool_calls"] = [{**call.model_dump(), "index": i} for i, call in enumerate(tool_calls)]
        yield sse({**common, "choices": [choice]})
    if with_usage:
        yield sse({**common, "choices": [], "usage": usage_of(choices).model_dump()})
    yield DONE


def _choice(body: ChatBody, last: CallChunk) -> ChoiceBody:
    call = call_of(last)
    message = call.response
    return ChoiceBody(
        index=last.index,
        message=AnswerMessage(
            content=message.content or (None if message.tool_calls else ""),
            reasoning_content=message.reasoning or None,
            tool_calls=_tool_calls(message) or None,
        ),
        logprobs=_logprobs(last.tokens) if body.logprobs else None,
        finish_reason=_finish_reason(call),
    )


def _tool_calls(message: Message) -> list[ToolCallBody]:
    return [
        ToolCallBody(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
        for call in message.tool_calls
    ]


def _logprobs(tokens: Iterable[TokenLogprob]) -> LogprobsBody:
    return LogprobsBody(content=logprob_bodies(tokens))


def _finish_reason(call: Call) -> Literal["stop", "length", "tool_calls"]:
    assert call.finish_reason != "cancelled", "a cancelled call is never answered"
    return call.finish_reason
