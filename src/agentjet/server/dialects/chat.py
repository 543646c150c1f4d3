"""The body of `POST /v1/chat/completions`, every key of it.

`KEYS` has the treatment of each.

OpenAI's chat completions: bodies to canonical requests, chunks to answers.

Equality of messages is by meaning, so what differs only in form becomes the same here: an assistant's null content is
the empty string, the text parts of a content list are joined, `developer` is `system`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from agentjet.errors import InvalidRequest
from agentjet.gateway.requests import CallRequest, TokenLogprob
from agentjet.server.dialects.dialect import (
    ANY_OBJECT,
    DONE,
    OPENAI_ERRORS,
    SAMPLING_KEYS,
    AnswerHead,
    Body,
    Chunks,
    CollectedChoices,
    Count,
    Dialect,
    Finite,
    JsonObject,
    KeyRules,
    RequestKeys,
    SamplingBody,
    StreamEvent,
    Text,
    TextPart,
    UsageBody,
    check_choice,
    collect,
    completion_request,
    fingerprint_of,
    function_tool,
    honoured,
    named_function,
    noted,
    refuse_top_logprobs,
    refuse_unused_stream_options,
    refused,
    sse,
    text_of,
)
from agentjet.types import Call, Constraint, Conversation, Message, ToolCall


class ContentPart(TextPart):
    """A part of a message's content, with what others than text have in it."""

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
    """What OpenAI's SDK read in `arguments`, which its `stream` and `parse` send back; it says nothing else."""


class HistoryToolCall(ToolCallBody):
    """A tool call in a history."""

    function: HistoryFunction
    index: int | None = None
    """Left over by agents that send back what they joined from a stream; the order of the list says the same."""


class MessageBody(Body):
    """A message. The keys that SDKs write with null into an answer that is sent back are known, and must be empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    """Null or missing in an assistant message only."""
    reasoning_content: str | None = None
    """What an assistant thought before it answered, as the answers of this server have it."""
    tool_calls: list[HistoryToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None
    parsed: Any = None
    """What OpenAI's SDK read in `content`, which its `stream` and `parse` send back; it says nothing else."""
    provider_specific_fields: Any = None
    """What LiteLLM notes of the answer it was given; the policy never saw it."""
    reasoning: Any = None
    reasoning_details: Any = None
    reasoning_text: Any = None
    reasoning_opaque: Any = None
    reasoning_items: Any = None
    thinking_blocks: Any = None
    cache_control: Any = None


class FunctionBody(Body):
    """A function the model may call; `parameters` is a JSON schema."""

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
    """A JSON schema. It is followed whole, whether `strict` or not; what it is called changes nothing."""

    name: str
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """What the answer's content is: any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class ChatBody(SamplingBody):
    """A chat completion request. Everything of OpenAI's that is not honoured is refused, never ignored."""

    messages: Annotated[list[MessageBody], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    """0: log-probabilities of the sampled tokens only. Those of other tokens are not known."""
    tools: list[ToolBody] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None

    # Known, and not honoured: see `KEYS`.
    user: Any = None
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
    min_p: Finite | None = None
    repetition_penalty: Finite | None = None
    frequency_penalty: Finite | None = None
    presence_penalty: Finite | None = None
    logit_bias: dict[str, float] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None


HINT = "the policy alone decides whether and how much it reasons"
KEYS: RequestKeys = {
    **SAMPLING_KEYS,
    "messages": honoured("text, also in parts; tool calls and their results; `reasoning_content`"),
    "max_tokens": honoured(),
    "max_completion_tokens": honoured("the same as `max_tokens`"),
    "logprobs": honoured("every sampled token, control tokens included"),
    "top_logprobs": refused("the sampler reports the token that it sampled, not the others", 0),
    "tools": honoured("of type `function`, also `strict`"),
    "tool_choice": honoured(),
    "parallel_tool_calls": honoured(),
    "response_format": honoured("[constraints.md](constraints.md)"),
    "chat_template_kwargs": noted("refused where this model's template would write another prompt with it", {}),
    "user": noted(),
    "metadata": noted(),
    "safety_identifier": noted(),
    "prompt_cache_key": noted("prefixes are kept anyway"),
    "prompt_cache_options": noted("prefixes are kept anyway"),
    "prompt_cache_retention": noted("prefixes are kept anyway"),
    "cache_control": noted("prefixes are kept anyway"),
    "service_tier": noted("there is one tier"),
    "store": noted("answers cannot be fetched again", False),
    "prediction": noted("a hint for speed"),
    "moderation": noted(),
    "usage": noted("answers always have it"),
    "reasoning_effort": noted(HINT),
    "reasoning": noted(HINT),
    "thinking": noted(HINT),
    "enable_thinking": noted(HINT),
    "thinking_budget": noted(HINT),
    "include_reasoning": noted("answers have `reasoning_content`", True),
    "verbosity": noted("the prompt says how long the answer is to be"),
    "web_search_options": noted("a provider would run the search; the policy is not offered it"),
    "frequency_penalty": refused("it would change the distribution", 0.0),
    "presence_penalty": refused("it would change the distribution", 0.0),
    "repetition_penalty": refused("it would change the distribution", 1.0),
    "logit_bias": refused("it would change the distribution", {}),
    "min_p": refused("it would change the distribution", 0.0),
    "modalities": refused("the policy writes text only", ["text"]),
    "audio": refused("the policy writes text only"),
    "function_call": refused("use `tool_choice`", "auto"),
    "functions": refused("use `tools`", []),
    "messages[].refusal": refused("the policy refuses in plain text"),
    "messages[].annotations": refused("", []),
    "messages[].audio": refused("the policy reads text only"),
    "messages[].function_call": refused("use `tool_calls`"),
    "messages[].parsed": honoured("repeats `content`"),
    "messages[].provider_specific_fields": noted("the policy never saw it", {}),
    "messages[].reasoning": noted("`reasoning_content` has the text", ""),
    "messages[].reasoning_details": noted("`reasoning_content` has the text", []),
    "messages[].reasoning_text": noted("`reasoning_content` has the text", ""),
    "messages[].reasoning_opaque": noted("`reasoning_content` has the text", ""),
    "messages[].reasoning_items": noted("`reasoning_content` has the text", []),
    "messages[].thinking_blocks": noted("`reasoning_content` has the text", []),
    "messages[].cache_control": noted("prefixes are kept anyway"),
    "messages[].content[].cache_control": noted("prefixes are kept anyway"),
    "tools[].cache_control": noted("prefixes are kept anyway"),
}
BODY, MESSAGE = KeyRules(KEYS), KeyRules(KEYS, "messages[].")


class TokenLogprobBody(BaseModel):
    """A sampled token with the logarithm of its probability under the distribution it was sampled from."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Any] = []


class LogprobsBody(BaseModel):
    """Log-probabilities of a choice: every sampled token, control tokens included."""

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


def to_request(body: ChatBody) -> CallRequest:
    """The canonical request. Raises `InvalidRequest` naming the first thing that cannot be honoured."""
    refuse_top_logprobs(body.top_logprobs, "top_logprobs")
    notes = BODY.judge(body)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise InvalidRequest(
            f"max_tokens = {body.max_tokens} and max_completion_tokens = {body.max_completion_tokens} differ.",
            param="max_completion_tokens",
        )
    refuse_unused_stream_options(body, body.stream_options)
    tools = () if body.tool_choice == "none" else tuple(map(_tool, body.tools or ()))
    if any(tool.cache_control is not None for tool in body.tools or ()):
        notes.append("tools[].cache_control")
    conversation = Conversation(tuple(_message(m, i, notes) for i, m in enumerate(body.messages)), tools)
    max_tokens = body.max_completion_tokens or body.max_tokens
    request = completion_request(body, conversation, max_tokens, _constraint(body), notes)
    return replace(request, template_kwargs=body.chat_template_kwargs or {})


async def to_answer(chunks: Chunks, body: ChatBody, head: AnswerHead) -> ChatCompletion:
    """The whole answer, once every choice has ended."""
    gathered = await collect(chunks)
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


async def to_events(chunks: Chunks, body: ChatBody, head: AnswerHead) -> AsyncGenerator[StreamEvent]:
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
    gathered = CollectedChoices()
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
        yield StreamEvent(sse({**common, "choices": [choice]}))
    if with_usage:
        yield StreamEvent(sse({**common, "choices": [], "usage": gathered.usage.model_dump()}))
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
    return check_choice(constraint, [tool.name for tool in tools])


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


def _answer(message: Message) -> AnswerMessage:
    return AnswerMessage(
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
    errors=OPENAI_ERRORS,
    to_request=lambda body, past: to_request(body),
    to_answer=to_answer,
    to_events=to_events,
)
