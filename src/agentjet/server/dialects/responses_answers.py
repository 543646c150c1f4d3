"""The answers, events and errors of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Literal

from pydantic import BaseModel

from agentjet.errors import RequestError
from agentjet.gateway.requests import CallChunk, TokenLogprob
from agentjet.server.dialects.dialect import (
    AnswerHead,
    Chunks,
    ErrorShape,
    OpenAIError,
    TokenLogprobBody,
    call_of,
    collect,
    logprob_bodies,
    merge_chunks,
    openai_error,
    sse,
)
from agentjet.server.dialects.responses_bodies import ResponsesBody, Status
from agentjet.server.dialects.responses_requests import (
    OfferedTool,
    encode_reasoning,
    item_id,
    offered_tools,
    to_custom_input,
)
from agentjet.types import ToolCall


class OutputText(BaseModel):
    """The text of an answer. `logprobs` has every sampled token of the answer, control tokens included."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprobBody] = []


class ReasoningText(BaseModel):
    """The text of reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(BaseModel):
    """The message of an answer."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class OutputReasoning(BaseModel):
    """The reasoning of an answer."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: str | None = None
    status: Status


class OutputCall(BaseModel):
    """A function call of an answer."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status
    namespace: str | None = None


class OutputCustomCall(BaseModel):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"] = "custom_tool_call"
    id: str
    call_id: str
    name: str
    input: str
    status: Status
    namespace: str | None = None


OutputItem = OutputReasoning | OutputMessage | OutputCall | OutputCustomCall


class InputDetails(BaseModel):
    """Required by SDKs. Cached tokens are not counted."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(BaseModel):
    """Required by SDKs. Reasoning tokens are not counted."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Numbers of tokens as the policy saw and sampled them."""

    input_tokens: int
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class IncompleteDetails(BaseModel):
    """The reason why an answer ended early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseAnswer(BaseModel):
    """The answer to a request. A stream begins with one that is in progress.

    The fields from `instructions` on repeat the request.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    error: None = None
    background: Literal[False] = False
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int = 0
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    user: str | None


async def to_answer(chunks: Chunks, body: ResponsesBody, head: AnswerHead) -> ResponseAnswer:
    """Returns the whole answer, after it has ended."""
    (last,) = await collect(chunks)
    return _ended(last, body, head)


async def to_events(chunks: Chunks, body: ResponsesBody, head: AnswerHead) -> AsyncGenerator[str]:
    """Yields the events of a streamed answer: one item after the other, tool calls whole."""
    numbers = count()

    def event(kind: str, content: dict[str, Any]) -> str:
        payload = {"type": f"response.{kind}", "sequence_number": next(numbers), **content}
        return sse(payload, name=payload["type"])

    started = {"response": _response(body, head, "in_progress", []).model_dump()}
    yield event("created", started)
    yield event("in_progress", started)
    seen: list[CallChunk] = []
    items = _Items(body, head)
    async for chunk in chunks:
        seen.append(chunk)
        for kind, content in items.add(chunk):
            yield event(kind, content)
    (last,) = merge_chunks(seen)
    response = _ended(last, body, head)
    for kind, content in items.finish(response.output):
        yield event(kind, content)
    yield event(response.status, {"response": response.model_dump()})


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
        self._tokens: list[TokenLogprob] = []
        """Tokens that no delta has carried."""

    def add(self, chunk: CallChunk) -> Iterator[Payload]:
        """Yields the events of a chunk's text, which belongs to the open item or to a new one."""
        self._tokens += chunk.tokens
        if chunk.reasoning:
            yield from self._open_item("reasoning")
            yield "reasoning_text.delta", {**self._place, "delta": chunk.reasoning}
            self._text += chunk.reasoning
        if chunk.text:
            yield from self._open_item("message")
            logprobs = [one.model_dump() for one in _logprobs(self._body, self._tokens)]
            self._tokens = []
            yield "output_text.delta", {**self._place, "delta": chunk.text, "logprobs": logprobs}
            self._text += chunk.text

    def finish(self, output: Sequence[OutputItem]) -> Iterator[Payload]:
        """Yields the remaining events of an answer, whose text was streamed."""
        for index, item in enumerate(output):
            if index < self._index:
                continue
            if isinstance(item, OutputCall | OutputCustomCall):
                yield from self._call(item)
            else:
                yield from self._open_item(item.type)
                yield from self._close(item)

    def _open_item(self, kind: str) -> Iterator[Payload]:
        """Opens an item of a kind, unless it is open. Closes open reasoning."""
        if self._open == kind:
            return
        if self._open == "reasoning":
            yield from self._close(_reasoning(self._body, self._head, self._text, "completed"))
        self._index += 1
        self._open, self._text = kind, ""
        item: OutputReasoning | OutputMessage
        if kind == "reasoning":
            item = _reasoning(self._body, self._head, "", "in_progress")
        else:
            item = _message(self._head, "", "in_progress")
        added = item.model_copy(update={"content": []})
        yield "output_item.added", {"output_index": self._index, "item": added.model_dump()}
        yield "content_part.added", {**self._place, "part": item.content[0].model_dump()}

    def _close(self, item: OutputReasoning | OutputMessage) -> Iterator[Payload]:
        part = item.content[0]
        if isinstance(part, OutputText):
            yield "output_text.done", {**self._place, "text": part.text, "logprobs": part.model_dump()["logprobs"]}
        else:
            yield "reasoning_text.done", {**self._place, "text": part.text}
        yield "content_part.done", {**self._place, "part": part.model_dump()}
        yield "output_item.done", {"output_index": self._index, "item": item.model_dump()}
        self._open = ""

    def _call(self, item: OutputCall | OutputCustomCall) -> Iterator[Payload]:
        self._index += 1
        at = {"item_id": item.id, "output_index": self._index}
        key = "arguments" if isinstance(item, OutputCall) else "input"
        kind = "function_call_arguments" if isinstance(item, OutputCall) else "custom_tool_call_input"
        text = getattr(item, key)
        empty = item.model_copy(update={key: "", "status": "in_progress"})
        yield "output_item.added", {"output_index": self._index, "item": empty.model_dump()}
        yield f"{kind}.delta", {**at, "delta": text}
        yield f"{kind}.done", {**at, "name": item.name, key: text}
        yield "output_item.done", {"output_index": self._index, "item": item.model_dump()}

    @property
    def _place(self) -> dict[str, Any]:
        """The place of events in the open item."""
        prefix = "rs" if self._open == "reasoning" else "msg"
        return {"item_id": item_id(prefix, self._head.id), "output_index": self._index, "content_index": 0}


def _ended(last: CallChunk, body: ResponsesBody, head: AnswerHead) -> ResponseAnswer:
    """Returns the response of a choice that has ended."""
    call = call_of(last)
    message = call.response
    status: Status = "incomplete" if call.finish_reason == "length" else "completed"
    output: list[OutputItem] = []
    if message.reasoning:
        output.append(_reasoning(body, head, message.reasoning, "completed"))
    if message.content or not message.tool_calls:  # Agents expect a message, so an empty answer has an empty one.
        output.append(_message(head, message.content, "completed", _logprobs(body, last.tokens)))
    tools = {tool.full_name: tool for tool in offered_tools(body.tools or (), [])}
    output += [
        _tool_call(f"{head.id}_{i}", tool_call, tools.get(tool_call.name))
        for i, tool_call in enumerate(message.tool_calls)
    ]
    output[-1].status = status
    num_prompt, num_sampled = last.num_prompt_tokens, len(call.completion)
    return _response(body, head, status, output).model_copy(
        update={
            "temperature": call.temperature,
            "incomplete_details": IncompleteDetails() if status == "incomplete" else None,
            "usage": ResponseUsage(
                input_tokens=num_prompt, output_tokens=num_sampled, total_tokens=num_prompt + num_sampled
            ),
        }
    )


def _tool_call(number: str, call: ToolCall, tool: OfferedTool | None) -> OutputCall | OutputCustomCall:
    """Returns the item of a tool call. A call of a tool that was not offered is a function call."""
    name, namespace = (tool.name, tool.namespace or None) if tool is not None else (call.name, None)
    common: dict[str, Any] = {"call_id": call.id, "name": name, "namespace": namespace, "status": "completed"}
    if tool is not None and tool.is_custom:
        return OutputCustomCall(id=item_id("ctc", number), input=to_custom_input(call.arguments), **common)
    return OutputCall(id=item_id("fc", number), arguments=call.arguments, **common)


def _reasoning(body: ResponsesBody, head: AnswerHead, text: str, status: Status) -> OutputReasoning:
    encrypted = encode_reasoning(text) if "reasoning.encrypted_content" in (body.include or ()) else None
    return OutputReasoning(
        id=item_id("rs", head.id), content=[ReasoningText(text=text)], encrypted_content=encrypted, status=status
    )


def _message(head: AnswerHead, text: str, status: Status, logprobs: Sequence[TokenLogprobBody] = ()) -> OutputMessage:
    return OutputMessage(
        id=item_id("msg", head.id), content=[OutputText(text=text, logprobs=list(logprobs))], status=status
    )


def _logprobs(body: ResponsesBody, tokens: Iterable[TokenLogprob]) -> list[TokenLogprobBody]:
    return logprob_bodies(tokens) if "message.output_text.logprobs" in (body.include or ()) else []


def _response(body: ResponsesBody, head: AnswerHead, status: Status, output: list[OutputItem]) -> ResponseAnswer:
    """Returns a response with the fields that repeat the request."""
    shape = body.text.format if body.text else None
    return ResponseAnswer(
        id=f"resp_{head.id}",
        created_at=head.created,
        status=status,
        model=head.model,
        output=output,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": None, "summary": None},
        store=body.store is not False,
        temperature=body.temperature,
        text={"format": shape.model_dump(by_alias=True, exclude_none=True) if shape else {"type": "text"}},
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=[_tool(tool.model_dump(exclude_none=True)) for tool in body.tools or ()],
        top_p=body.top_p,
        user=body.user if isinstance(body.user, str) else None,
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Adds the keys that SDKs require."""
    return {"parameters": None, "strict": False, **tool} if tool["type"] == "function" else tool


# --- errors

_PARAMS = {"messages": "input"}
"""This dialect's names of parameters that other dialects name differently."""


def responses_error(error: RequestError) -> dict[str, Any]:
    """Returns the body of an error."""
    body = openai_error(error)
    if error.code != "unknown_parameter":  # That error has the body's own name of the parameter.
        body["error"]["param"] = _PARAMS.get(error.param or "", error.param)
    return body


def _error_event(error: RequestError, num_sent: int) -> str:
    """Returns the event of OpenAI's reference, with the object that OpenAI's SDKs raise from."""
    body = responses_error(error)
    described = {name: body["error"][name] for name in ("code", "message", "param")}
    return sse({"type": "error", **described, "sequence_number": num_sent, **body}, name="error")


RESPONSES_ERRORS = ErrorShape(model=OpenAIError, body=responses_error, event=_error_event)
