"""OpenAI's Responses API. A request may name an earlier answer of the episode: its conversation is in the journal."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import Field

from agentjet.errors import NotFound
from agentjet.gateway.calls import CallChunk, CallRequest
from agentjet.server.dialects.dialect import (
    AnswerHead,
    CallLookup,
    Chunks,
    Dialect,
    NamedSchema,
    OpenAIBody,
    call_of,
    check_choice,
    named_function,
    schema_of,
)
from agentjet.server.dialects.error_shapes import RESPONSES_ERRORS, sse
from agentjet.server.dialects.keys import RESPONSES_KEYS, Body, Count, Items, JsonObject, Text, refusal
from agentjet.server.dialects.responses_items import Item, encode_reasoning, item_id, to_messages
from agentjet.server.dialects.responses_tools import (
    OfferedTool,
    ResponsesTool,
    full_name,
    offered_tools,
    to_custom_input,
)
from agentjet.types import Constraint, Conversation, Message, ToolCall

# --- requests


class TextFormat(NamedSchema):
    """The form of the answer's text: any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]


class TextConfig(Body):
    """The form of the answer's text, and a hint about its length."""

    place = "text."
    format: TextFormat | None = None


class ReasoningConfig(Body):
    """Hints about reasoning. They have no effect."""

    place = "reasoning."


class ResponsesBody(OpenAIBody):
    """A request. Keys of OpenAI's API that cannot be honoured are refused, never ignored."""

    input: str | Annotated[Items[Item], Field(min_length=1)]
    """text, or items: messages, `function_call`, `custom_tool_call` and their outputs, `reasoning`, `item_reference`"""
    instructions: Text | None = None
    """for this request only"""
    previous_response_id: Text | None = None
    """an earlier answer of this episode and role"""
    tools: Items[ResponsesTool] | None = None
    """of type `function` (also `strict`), `custom` and `namespace`"""
    tool_choice: Literal["auto", "none", "required"] | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    """`format`: [constraints.md](constraints.md)"""
    reasoning: ReasoningConfig | None = None
    """hints are noted"""
    include: Items[Text] | None = None
    """`reasoning.encrypted_content`; `message.output_text.logprobs` is refused, others are noted"""
    max_output_tokens: Count | None = None
    store: bool | None = None
    """in both cases an episode keeps its answers until it ends"""
    user: Text | None = None
    metadata: dict[Text, Text] | None = None


def translate(body: ResponsesBody, lookup_call: CallLookup) -> CallRequest:
    """Returns the canonical request. Raises `RequestError` for the first thing that cannot be honoured."""
    instructions = (Message("system", body.instructions),) if body.instructions else ()
    given = body.input
    messages = [Message("user", given)] if isinstance(given, str) else to_messages(given, lookup_call)
    tools = [] if body.tool_choice == "none" else offered_tools(body.tools or ())
    conversation = Conversation(
        (*instructions, *_previous_messages(body.previous_response_id, lookup_call), *messages),
        tuple(tool.definition for tool in tools),
        instructed=bool(instructions),
    )
    if "message.output_text.logprobs" in (body.include or ()):
        raise refusal("include", " has message.output_text.logprobs: chat completions have log-probabilities.")
    notes = [f"include: {name}" for name in body.include or () if name != "reasoning.encrypted_content"]
    notes += [f"tool {tool.name}: Lark grammar shown, not enforced" for tool in tools if tool.grammar]
    return CallRequest(
        conversation,
        max_tokens=body.max_output_tokens,
        constraint=_constraint(body, tools),
        notes=tuple(notes),
    )


def _previous_messages(response_id: str | None, lookup_call: CallLookup) -> tuple[Message, ...]:
    """Returns the conversation of an earlier answer, including it, without the instructions of that request."""
    if response_id is None:
        return ()
    found = lookup_call(response_id.removeprefix("resp_"))
    if found is None:
        raise NotFound(
            f"Previous response {response_id!r} is not of this episode and role: send the conversation as input.",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    conversation, answer = found
    return (*conversation.messages[1 if conversation.instructed else 0 :], answer)


def _constraint(body: ResponsesBody, tools: Sequence[OfferedTool]) -> Constraint:
    choice = body.tool_choice
    shape = (body.text.format if body.text else None) or TextFormat(type="text")
    constraint = Constraint(
        schema=schema_of(shape.type, shape.schema_, "text.format.schema", "text.format.schema"),
        schema_param="text.format",
        calls="required" if choice == "required" or isinstance(choice, dict) else "auto",
        function=_required_function(choice) if isinstance(choice, dict) else "",
        strict=frozenset(tool.full_name for tool in tools if tool.strict),
        parallel=body.parallel_tool_calls is not False,
    )
    return check_choice(constraint, [tool.full_name for tool in tools])


def _required_function(choice: Mapping[str, Any]) -> str:
    if choice.get("type") == "custom":
        choice = {**choice, "type": "function"}
    name = named_function(choice, choice, "{'type': 'function' or 'custom', 'name': ...}")
    return full_name(choice.get("namespace"), name)


# --- answers

PART_TYPES = {"reasoning": "reasoning_text", "message": "output_text"}


def to_answer(choices: Sequence[CallChunk], body: ResponsesBody, head: AnswerHead) -> dict[str, Any]:
    """Returns the whole answer."""
    (last,) = choices
    return _ended(last, body, head)


async def to_events(chunks: Chunks, body: ResponsesBody, head: AnswerHead) -> AsyncGenerator[str]:
    """Yields the events of a streamed answer: one item after the other, tool calls whole."""
    numbers = count()

    def event(kind: str, content: dict[str, Any]) -> str:
        payload = {"type": f"response.{kind}", "sequence_number": next(numbers), **content}
        return sse(payload, name=payload["type"])

    started = {"response": _response(body, head, "in_progress", [])}
    yield event("created", started)
    yield event("in_progress", started)
    items = _Items(body, head)
    async for chunk in chunks:
        for item_type, text in (("reasoning", chunk.reasoning), ("message", chunk.text)):
            for kind, content in items.add(item_type, text) if text else ():
                yield event(kind, content)
        if chunk.call is not None:
            response = _ended(chunk, body, head)
            for kind, content in items.finish(response["output"]):
                yield event(kind, content)
            yield event(response["status"], {"response": response})


Payload = tuple[str, dict[str, Any]]
"""The type of an event without its prefix, and its content."""


class _Items:
    """The output items of a streamed answer. At most one, a message or reasoning, is open."""

    def __init__(self, body: ResponsesBody, head: AnswerHead) -> None:
        self._body = body
        self._head = head
        self._index = -1
        self._open = ""
        self._text = ""
        """The streamed text of the open item."""

    def add(self, kind: str, text: str) -> Iterator[Payload]:
        """Yields the events of text of the open item, or of a new one if that has another kind."""
        if self._open != kind:
            yield from self._close("completed")
            self._index += 1
            self._open, self._text = kind, ""
            item = _text_item(kind, self._body, self._head, "", "in_progress")
            yield "output_item.added", {"output_index": self._index, "item": {**item, "content": []}}
            yield "content_part.added", {**self._place, "part": item["content"][0]}
        if text:
            self._text += text
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield f"{PART_TYPES[kind]}.delta", {**self._place, "delta": text, **more}

    def finish(self, output: Sequence[dict[str, Any]]) -> Iterator[Payload]:
        """Yields the remaining events of an answer, whose text was streamed."""
        if output[-1]["type"] == "message":
            yield from self.add("message", "")
        yield from self._close(output[self._index]["status"])
        for item in output[self._index + 1 :]:
            yield from self._call(item)

    def _close(self, status: str) -> Iterator[Payload]:
        if self._open:
            item = _text_item(self._open, self._body, self._head, self._text, status)
            [part] = item["content"]
            shown = {key: part[key] for key in ("text", "logprobs") if key in part}
            yield f"{part['type']}.done", {**self._place, **shown}
            yield "content_part.done", {**self._place, "part": part}
            yield "output_item.done", {"output_index": self._index, "item": item}
            self._open = ""

    def _call(self, item: dict[str, Any]) -> Iterator[Payload]:
        self._index += 1
        at = {"item_id": item["id"], "output_index": self._index}
        is_function = item["type"] == "function_call"
        key, kind = ("arguments", "function_call_arguments") if is_function else ("input", "custom_tool_call_input")
        empty = {**item, key: "", "status": "in_progress"}
        yield "output_item.added", {"output_index": self._index, "item": empty}
        yield f"{kind}.delta", {**at, "delta": item[key]}
        yield f"{kind}.done", {**at, "name": item["name"], key: item[key]}
        yield "output_item.done", {"output_index": self._index, "item": item}

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": item_id(self._open, self._head.id), "output_index": self._index, "content_index": 0}


def _ended(last: CallChunk, body: ResponsesBody, head: AnswerHead) -> dict[str, Any]:
    call = call_of(last)
    message = call.response
    output = []
    if message.reasoning:
        output.append(_text_item("reasoning", body, head, message.reasoning, "completed"))
    if message.content or not message.tool_calls:  # Agents expect a message, so an empty answer has an empty one.
        output.append(_text_item("message", body, head, message.content, "completed"))
    tools = {tool.full_name: tool for tool in offered_tools(body.tools or ())}
    output += [
        _tool_call(f"{head.id}_{i}", tool_call, tools.get(tool_call.name))
        for i, tool_call in enumerate(message.tool_calls)
    ]
    is_cut = call.finish_reason == "length"
    output[-1]["status"] = status = "incomplete" if is_cut else "completed"
    num_prompt, num_sampled = last.num_prompt_tokens, len(call.completion)
    return {
        **_response(body, head, status, output),
        "temperature": call.temperature,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "usage": {  # SDKs require the details. Cached tokens and reasoning tokens are not counted.
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_sampled,
        },
    }


def _text_item(kind: str, body: ResponsesBody, head: AnswerHead, text: str, status: str) -> dict[str, Any]:
    """Returns the reasoning or the message of an answer."""
    item: dict[str, Any] = {"type": kind, "id": item_id(kind, head.id)}
    part: dict[str, Any] = {"type": PART_TYPES[kind], "text": text}
    if kind == "message":
        part |= {"annotations": [], "logprobs": []}
        return {**item, "role": "assistant", "status": status, "content": [part]}
    encrypted = encode_reasoning(text) if "reasoning.encrypted_content" in (body.include or ()) else None
    return {**item, "summary": [], "content": [part], "encrypted_content": encrypted, "status": status}


def _tool_call(number: str, call: ToolCall, tool: OfferedTool | None) -> dict[str, Any]:
    """Returns the item of a tool call. A call of a tool that was not offered is a function call."""
    name, namespace = (tool.name, tool.namespace or None) if tool is not None else (call.name, None)
    kind, key, text = "function_call", "arguments", call.arguments
    if tool is not None and tool.is_custom:
        kind, key, text = "custom_tool_call", "input", to_custom_input(call.arguments)
    return {
        "type": kind,
        "id": item_id(kind, number),
        "call_id": call.id,
        "name": name,
        key: text,
        "status": "completed",
        "namespace": namespace,
    }


def _response(body: ResponsesBody, head: AnswerHead, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a response. The fields from `instructions` on repeat the request."""
    shape = body.text.format if body.text else None
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "model": head.model,
        "output": output,
        "usage": None,
        "incomplete_details": None,
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "temperature": body.temperature,
        "text": {"format": shape.model_dump(by_alias=True, exclude_none=True) if shape else {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_tool(tool.model_dump(exclude_none=True)) for tool in body.tools or ()],
        "top_p": body.top_p,
        "user": body.user,
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Adds the keys that SDKs require."""
    return {"parameters": None, "strict": False, **tool} if tool["type"] == "function" else tool


RESPONSES = Dialect("/v1/responses", ResponsesBody, RESPONSES_KEYS, RESPONSES_ERRORS, translate, to_answer, to_events)
