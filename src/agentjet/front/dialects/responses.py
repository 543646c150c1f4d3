"""OpenAI's Responses API. A request may name an earlier answer of the episode: its conversation is in the journal.

Sections: tools; items; requests; the conversation of the items; answers; errors.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from agentjet.errors import InvalidRequest, NotFound, RequestError
from agentjet.front.calls import CallChunk, CallRequest
from agentjet.front.dialects.dialect import (
    NO_PLACE,
    OPENAI_KEYS,
    REASONING_MEANING,
    AnswerHead,
    BlockEvent,
    Blocks,
    Body,
    CallLookup,
    ContentPart,
    Count,
    Dialect,
    Distribution,
    Encoder,
    ErrorShape,
    Items,
    JsonObject,
    NamedSchema,
    OpenAIBody,
    OpenAIError,
    Payload,
    RequestKeys,
    Text,
    ToolName,
    call_of,
    check_choice,
    check_portable_json,
    function_tool,
    named_function,
    noted,
    openai_error,
    refusal,
    refused,
    schema_of,
    text_of,
)
from agentjet.types import Constraint, Conversation, Message, ToolCall

# --- tools
#
# Functions, custom tools and namespaces become functions that the policy is offered.
#
# * A tool in a namespace is the function `namespace.name`.
# * A custom tool takes text. The policy calls it as a function with one argument, `input`. A regular expression
#   constrains the text of a forced call. A Lark grammar is shown to the policy, and noted.
# * Tools that a provider would run are not offered, and noted.
#
# Invariant: `from_custom_input(to_custom_input(a))` has the meaning of `a`, for all arguments that a policy may sample.
# So a call comes back as the same turn.

PROVIDER_TOOLS = (
    "web_search", "file_search", "code_interpreter", "computer", "mcp", "image_generation", "tool_search",
    "programmatic_tool_calling",
)  # fmt: skip
"""Prefixes of the types of tools that the provider runs, or that work on images. The policy is not offered them."""


class ResponsesTool(Body):
    """A tool definition. The `parameters` of a function are a JSON schema."""

    place = "tools[]."
    keys_of_kind: ClassVar = {
        "function": "name description? parameters? strict?",
        "custom": "name description? format?",
        "namespace": "name description? tools",
    }
    unknown_kind = "the server runs no tools, define a function and run it yourself."
    type: Text
    name: ToolName | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: Any = None
    """The format of a custom tool's input."""
    tools: Items[ResponsesTool] | None = None
    """The tools of a namespace."""

    @model_validator(mode="before")
    @classmethod
    def _is_json(cls, given: Any) -> Any:
        return check_portable_json(given) if isinstance(given, dict) else given  # The answer repeats it.

    @property
    def omission(self) -> str:
        return f"tool {self.type} dropped" if self.type.startswith(PROVIDER_TOOLS) else ""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the policy is offered. The policy calls it by `full_name`."""

    full_name: str
    name: str
    namespace: str
    is_custom: bool
    strict: bool
    definition: Mapping[str, Any]
    grammar: str
    """The Lark grammar of a custom tool's input. It is shown, not enforced."""


def offered_tools(tools: Iterable[ResponsesTool]) -> list[OfferedTool]:
    """Returns the tools that the policy is offered. Raises `InvalidRequest` with the tool's place."""
    found: dict[str, OfferedTool] = {}
    for tool, where in _each(tools):
        if tool.full_name in found:
            raise InvalidRequest(f"{where}.name: two tools are called {tool.full_name!r}.", param=f"{where}.name")
        found[tool.full_name] = tool
    return list(found.values())


def full_name(namespace: str | None, name: str) -> str:
    """Returns the name by which the policy calls a tool."""
    return f"{namespace}.{name}" if namespace else name


def _each(tools: Iterable[ResponsesTool]) -> Iterator[tuple[OfferedTool, str]]:
    for i, tool in enumerate(tools):
        where = f"tools.{i}"
        if tool.type in ("function", "custom"):
            yield _offered_tool(tool, None, where), where
        for k, inner in enumerate(tool.tools or ()):
            place = f"{where}.tools.{k}"
            if inner.type not in ("function", "custom"):
                raise refusal(place, f" is of type {inner.type!r}, which a namespace cannot have.")
            yield _offered_tool(inner, tool, place), place


def _offered_tool(tool: ResponsesTool, space: ResponsesTool | None, where: str) -> OfferedTool:
    name, namespace = tool.name or "", (space.name or "") if space is not None else ""
    described = [space.description if space is not None else None, tool.description]
    parameters, grammar = tool.parameters, ""
    if tool.type == "custom":
        grammar, text = _custom_format(tool.format, f"{where}.format")
        parameters = {
            "type": "object",
            "properties": {"input": {"type": "string", **text}},
            "required": ["input"],
            "additionalProperties": False,
        }
        if grammar:
            described.append(f"The input follows this grammar:\n{grammar}")
    full = full_name(namespace, name)
    definition = function_tool(full, "\n\n".join(filter(None, described)) or None, parameters)
    return OfferedTool(full, name, namespace, tool.type == "custom", bool(tool.strict), definition, grammar)


def _custom_format(given: Any, where: str) -> tuple[str, dict[str, str]]:
    """Returns the Lark grammar of a custom tool's input, and the keywords of the text's JSON schema."""
    if given is None or (isinstance(given, dict) and given.get("type", "text") == "text"):
        return "", {}
    if isinstance(given, dict) and given["type"] == "grammar" and isinstance(given.get("definition"), str):
        if given.get("syntax") == "lark":
            return given["definition"], {}
        if given.get("syntax") == "regex":
            return "", {"pattern": f"^(?:{given['definition']})$"}
    grammar = "{'type': 'grammar', 'syntax': 'lark' or 'regex', 'definition': ...}"
    raise refusal(where, f": use {{'type': 'text'}}, or {grammar}.", "invalid_value")


def to_custom_input(arguments: str) -> str:
    """Returns the input of a custom tool from sampled arguments.

    Arguments of another form are returned unchanged, so that the tool can report the error. So are arguments whose
    input is itself a JSON object.
    """
    value = _object(arguments)
    text = value.get("input") if value is not None and value.keys() == {"input"} else None
    return text if isinstance(text, str) and _object(text) is None else arguments


def from_custom_input(text: str) -> str:
    return json.dumps({"input": text}, ensure_ascii=False) if _object(text) is None else text


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# --- items and their conversation
#
# Messages are compared by meaning, as in chat completions. One answer comes back as several items. They become one
# assistant message again if they have the id of one call, or if reasoning, text and tool calls are in this order. The
# id of an item contains the id of its call: `rs_<call>`, `msg_<call>`, `fc_<call>_<number>`, `ctc_<call>_<number>`. A
# second `rs` or `msg` of an answer has a number, too. So two answers in a row stay two messages, and references can be
# resolved.


class ItemPart(ContentPart):
    """A part of a message, of reasoning or of a function's output. All keys but the text are ignored."""

    place = "input[].content[]."
    keys_of_kind: ClassVar = dict.fromkeys(
        ("input_text", "output_text", "reasoning_text"), "text annotations? logprobs? prompt_cache_breakpoint?"
    )


_IGNORED = "id? status? metadata?"
_CALL = f"call_id name namespace? caller? {_IGNORED}"
_OUTPUT = f"call_id output name? namespace? caller? {_IGNORED}"


class Item(Body):
    """An item. A message may have no type, and neither may a reference."""

    place = "input[]."
    keys_of_kind: ClassVar = {
        "message": f"role content phase? {_IGNORED}",
        "function_call": f"arguments {_CALL}",
        "custom_tool_call": f"input {_CALL}",
        "function_call_output": _OUTPUT,
        "custom_tool_call_output": _OUTPUT,
        "reasoning": f"content? encrypted_content? summary? {_IGNORED}",
        "item_reference": "id",
    }
    unknown_kind = "the server runs no tools, leave out their items."
    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Items[ItemPart] | None = None
    id: str | None = None
    call_id: Annotated[str, Field(min_length=1)] | None = None
    name: str | None = None
    namespace: Text | None = None
    arguments: str | None = None
    """JSON text."""
    input: Text | None = None
    """The text of a call of a custom tool."""
    output: str | Items[ItemPart] | None = None
    encrypted_content: str | None = None
    """The text of reasoning, for agents that keep only this key. Read if `content` is empty."""

    @property
    def kind(self) -> str:
        return self.type or ("message" if self.role else "item_reference")


_ID = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]{32})(?:_([0-9]{1,4}))?")
_CALL_ID = re.compile(r"call_([0-9a-f]{12})_[0-9]+")


def to_messages(items: Sequence[Item], lookup_call: CallLookup) -> list[Message]:
    """Returns the messages of the items. Raises `InvalidRequest` or `NotFound` with the place of the item."""
    messages: list[Message] = []
    last, last_call = Message("assistant"), ""
    for i, item in enumerate(items):
        if item.kind.endswith("_output"):
            messages.append(Message("tool", text_of(item.output), tool_call_id=item.call_id or ""))
        elif item.kind == "message" and item.role != "assistant":
            role = "user" if item.role == "user" else "system"  # `developer` is `system`.
            messages.append(Message(role, text_of(item.content)))
        else:
            part, call = _assistant(item, f"input.{i}", lookup_call), _call_prefix(item)
            at = _turn_of(messages, (last, last_call), (part, call))
            if at is None:
                messages.append(part)
            else:
                messages[at] = _joined(messages[at], part)
            last, last_call = part, call
    return messages


def _assistant(item: Item, where: str, lookup_call: CallLookup) -> Message:
    """Returns the message of an item of the assistant, with this item only."""
    if item.kind == "item_reference":
        return _referenced(item.id or "", where, lookup_call)
    if item.kind == "reasoning":
        return Message("assistant", reasoning=text_of(item.content) or _decode_reasoning(item, where))
    if item.kind == "message":
        return Message("assistant", text_of(item.content))
    arguments = from_custom_input(item.input or "") if item.kind == "custom_tool_call" else item.arguments or ""
    return Message(
        "assistant", tool_calls=(ToolCall(item.call_id or "", full_name(item.namespace, item.name or ""), arguments),)
    )


def _call_prefix(item: Item) -> str:
    """Returns the first digits of the id of the call that an item is of; empty if the item does not have them."""
    found = _ID.fullmatch(item.id or "") or _CALL_ID.fullmatch(item.call_id or "")
    return found[1][:12] if found else ""


def _turn_of(messages: Sequence[Message], last: tuple[Message, str], part: tuple[Message, str]) -> int | None:
    """Returns the index of the assistant message that a part belongs to; None if it begins a new message.

    A part is a message with one item, and the `_call_prefix` of that item; `last` is the part before it. Some agents
    put each function's output directly behind its call, although one answer had all calls.
    """
    results = next((i for i, message in enumerate(reversed(messages)) if message.role != "tool"), len(messages))
    at = len(messages) - 1 - results
    if at < 0 or messages[at].role != "assistant":
        return None
    same_call = last[1] == part[1] != ""
    unknown = not (last[1] and part[1])
    stage, last_stage = _stage(part[0]), _stage(last[0])
    in_order = stage > last_stage or stage == last_stage == 2
    return at if same_call or (in_order and unknown and not results) else None


def _stage(part: Message) -> int:
    """Returns the position of an item in its answer: reasoning, text, tool calls."""
    return 2 if part.tool_calls else 0 if part.reasoning else 1


def _joined(turn: Message, part: Message) -> Message:
    return replace(
        turn,
        content=turn.content + part.content,
        reasoning=turn.reasoning + part.reasoning,
        tool_calls=turn.tool_calls + part.tool_calls,
    )


def _decode_reasoning(item: Item, where: str) -> str:
    try:
        return base64.b64decode(item.encrypted_content or "", validate=True).decode(errors="surrogatepass")
    except ValueError:  # Not ASCII, not base64, or not UTF-8.
        raise refusal(f"{where}.encrypted_content", " was not made by this server.", "invalid_value") from None


def _referenced(id_: str, where: str, lookup_call: CallLookup) -> Message:
    """Returns the item of an earlier answer that a reference names."""
    found = _ID.fullmatch(id_)
    exchange = lookup_call(found[1]) if found else None
    if found is not None and exchange is not None:
        _, answer = exchange
        if id_.startswith("rs_") and answer.reasoning:  # The first one stands for all of an answer.
            return Message("assistant", reasoning="" if found[2] else answer.reasoning)
        if id_.startswith("msg_"):
            return Message("assistant", "" if found[2] else answer.content)
        calls = answer.tool_calls[int(found[2]) : int(found[2]) + 1] if found[2] else ()
        if id_.startswith(("fc_", "ctc_")) and calls:
            return Message("assistant", tool_calls=calls)
    raise NotFound(
        f"Item {id_!r} is not of this episode and role: send the item itself.",
        code="item_not_found",
        param=f"{where}.id",
    )


# --- requests

RESPONSES_KEYS: RequestKeys = {
    **OPENAI_KEYS,
    **noted("text.verbosity", "state the wanted length in the prompt"),
    **noted("reasoning.effort reasoning.mode", REASONING_MEANING),
    **noted("reasoning.summary reasoning.generate_summary", "answers have the reasoning itself"),
    **noted("reasoning.context", "[`job.history`](timelines.md#jobhistory) decides", "auto"),
    **noted("metadata", "the answer repeats it", {}),
    **noted("user client_metadata access_programs"),
    **noted("tools[].defer_loading", "every tool is offered at once", False),
    **noted("tools[].output_schema tools[].annotations", f"{NO_PLACE}it"),
    **noted("tools[].async", "the agent decides when it runs a tool", False),
    **refused("tools[].allowed_callers", "the policy calls tools itself", ["direct"]),
    **refused("background", "use `stream`", False),
    **refused("truncation", "the server edits no history", "disabled"),
    **refused("context_management", "the server edits no history", []),
    **refused("conversation", "use `previous_response_id`, or send the conversation"),
    **refused("image", "the policy reads text only"),
    **refused("max_tool_calls", "the agent runs the tools"),
    **refused("prompt", "the server stores no prompts"),
}


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


class ResponsesBody(Distribution, OpenAIBody):
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

PART_TYPES = {"reasoning": "reasoning_text", "text": "output_text"}


class ResponseEncoder(Encoder[ResponsesBody]):
    """Encodes a response: one output item after the other, tool calls whole. Its last event has the whole answer."""

    def __init__(self, body: ResponsesBody, head: AnswerHead) -> None:
        super().__init__(body, head)
        self._numbers = count()
        self._blocks = Blocks()
        self._tools = {tool.full_name: tool for tool in offered_tools(body.tools or ())}
        self._output: list[Payload] = []
        self._call_numbers = count()
        self._answer: Payload = {}

    def encode(self, chunk: CallChunk) -> Iterator[Payload]:
        if not self._answer:
            self._answer = self._response("in_progress", [])
            yield self._event("created", response=self._answer)
            yield self._event("in_progress", response=self._answer)
        status = "incomplete" if chunk.call is not None and chunk.call.finish_reason == "length" else "completed"
        for event in self._blocks.push(chunk):
            yield from self._block(event, status if event.is_last else "completed")
        if chunk.call is not None:
            self._answer = self._ended(chunk, status)
            yield self._event(status, response=self._answer)

    def answer(self) -> Payload:
        return self._answer

    def _event(self, kind: str, **content: Any) -> Payload:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **content}

    def _block(self, event: BlockEvent, status: str) -> Iterator[Payload]:
        index = event.index
        if event.call is not None:
            yield from self._call(index, event.call)
            return
        if event.kind == "add":
            if event.text:
                yield self._delta(event)
            return
        item = self._text_item(event, "in_progress" if event.kind == "open" else status)
        [part] = item["content"]
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        if event.kind == "open":
            yield self._event("output_item.added", output_index=index, item={**item, "content": []})
            yield self._event("content_part.added", **place, part=part)
        else:
            self._output.append(item)
            shown = {key: part[key] for key in ("text", "logprobs") if key in part}
            yield self._event(f"{part['type']}.done", **place, **shown)
            yield self._event("content_part.done", **place, part=part)
            yield self._event("output_item.done", output_index=index, item=item)

    def _delta(self, event: BlockEvent) -> Payload:
        kind, is_text = PART_TYPES[event.block], event.block == "text"
        id_ = self._id("msg", "message") if is_text else self._id("rs", "reasoning")
        more: Payload = {"logprobs": []} if is_text else {}
        place = {"item_id": id_, "output_index": event.index, "content_index": 0}
        return self._event(f"{kind}.delta", **place, delta=event.text, **more)

    def _call(self, index: int, call: ToolCall) -> Iterator[Payload]:
        """Yields the events of a tool call. A call of a tool that was not offered is a function call."""
        tool = self._tools.get(call.name)
        kind, prefix, key, text = "function_call", "fc", "arguments", call.arguments
        if tool is not None and tool.is_custom:
            kind, prefix, key, text = "custom_tool_call", "ctc", "input", to_custom_input(call.arguments)
        item = {
            "type": kind,
            "id": f"{prefix}_{self.head.id}_{next(self._call_numbers)}",
            "call_id": call.id,
            "name": call.name if tool is None else tool.name,
            key: text,
            "status": "completed",
            "namespace": None if tool is None else tool.namespace or None,
        }
        self._output.append(item)
        at = {"item_id": item["id"], "output_index": index}
        added = {**item, key: "", "status": "in_progress"}
        yield self._event("output_item.added", output_index=index, item=added)
        yield self._event(f"{kind}_{key}.delta", **at, delta=text)
        yield self._event(f"{kind}_{key}.done", **at, name=item["name"], **{key: text})
        yield self._event("output_item.done", output_index=index, item=item)

    def _text_item(self, event: BlockEvent, status: str) -> Payload:
        part: Payload = {"type": PART_TYPES[event.block], "text": event.text}
        if event.block == "text":
            part |= {"annotations": [], "logprobs": []}
            item: Payload = {"type": "message", "id": self._id("msg", "message"), "role": "assistant"}
            return {**item, "status": status, "content": [part]}
        encrypted = None
        if "reasoning.encrypted_content" in (self.body.include or ()):  # Not secret: for agents that keep only this.
            encrypted = base64.b64encode(event.text.encode(errors="surrogatepass")).decode()
        item = {"type": "reasoning", "id": self._id("rs", "reasoning"), "summary": []}
        return {**item, "content": [part], "encrypted_content": encrypted, "status": status}

    def _id(self, prefix: str, kind: str) -> str:
        """Returns the id of the present item of a kind. All but the first have a number."""
        num = sum(item["type"] == kind for item in self._output)
        return f"{prefix}_{self.head.id}" + (f"_{num}" if num else "")

    def _ended(self, last: CallChunk, status: str) -> Payload:
        call = call_of(last)
        num_prompt, num_sampled = last.num_prompt_tokens, len(call.completion)
        return {
            **self._response(status, self._output),
            "temperature": call.temperature,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {  # SDKs require the details. Cached tokens and reasoning tokens are not counted.
                "input_tokens": num_prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": num_sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_prompt + num_sampled,
            },
        }

    def _response(self, status: str, output: list[Payload]) -> Payload:
        """Returns a response. The fields from `instructions` on repeat the request."""
        body, head = self.body, self.head
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


# --- errors


def responses_error(error: RequestError) -> Payload:
    body = openai_error(error)
    if error.param == "messages" and error.code != "unknown_parameter":  # That error has the body's own name.
        body["error"]["param"] = "input"
    return body


def _error_event(body: Payload, num_sent: int) -> Payload:
    """Returns the event of OpenAI's reference, with the object that OpenAI's SDKs raise from."""
    described = {name: body["error"][name] for name in ("code", "message", "param")}
    return {"type": "error", **described, "sequence_number": num_sent, **body}


RESPONSES_ERRORS = ErrorShape(OpenAIError, responses_error, _error_event)
RESPONSES = Dialect("/v1/responses", ResponsesBody, RESPONSES_KEYS, RESPONSES_ERRORS, translate, ResponseEncoder)
