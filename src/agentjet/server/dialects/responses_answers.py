"""What `POST /v1/responses` answers: the response, its output items and their parts.

What comes back from the Responses API: the whole response, or the events that build it up.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from itertools import count
from typing import Any, Literal

from pydantic import BaseModel

from agentjet.gateway.requests import CallChunk, TokenLogprob
from agentjet.server.dialects.dialect import AnswerHead, Chunks, CollectedChoices, StreamEvent, collect, sse
from agentjet.server.dialects.responses_bodies import ResponsesBody, Status
from agentjet.server.dialects.responses_requests import OfferedTool, item_id, offered_tools, seal, to_custom_input
from agentjet.types import ToolCall


class LogprobShape(BaseModel):
    """A sampled token with the logarithm of its probability under the distribution it was sampled from."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Any] = []


class OutputText(BaseModel):
    """What the model said. Its log-probabilities are those of every sampled token, control tokens included."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[LogprobShape] = []


class ReasoningText(BaseModel):
    """What the model thought."""

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
    """Nothing is told apart here."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(BaseModel):
    """Nothing is told apart here."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Tokens as the policy saw and sampled them."""

    input_tokens: int
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why an answer ended early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseAnswer(BaseModel):
    """The answer to a request; a stream begins with one that is in progress. The rest repeats the request."""

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
    """The whole answer, once it has ended."""
    return _ended(await collect(chunks), body, head)


async def to_events(chunks: Chunks, body: ResponsesBody, head: AnswerHead) -> AsyncGenerator[StreamEvent]:
    """The events of a streamed answer: items come one after the other, function calls whole."""
    numbers = count()

    def event(kind: str, content: dict[str, Any]) -> StreamEvent:
        payload = {"type": f"response.{kind}", "sequence_number": next(numbers), **content}
        return StreamEvent(sse(payload, name=payload["type"]))

    begun = {"response": _response(body, head, "in_progress", []).model_dump()}
    yield event("created", begun)
    yield event("in_progress", begun)
    gathered = CollectedChoices()
    items = _Items(body, head)
    async for chunk in chunks:
        gathered.take(chunk)
        for kind, content in items.more(chunk):
            yield event(kind, content)
    response = _ended(gathered, body, head)
    for kind, content in items.end(response.output):
        yield event(kind, content)
    yield event(response.status, {"response": response.model_dump()})


Payload = tuple[str, dict[str, Any]]
"""What kind of event, and what it says."""


class _Items:
    """The output items of a streamed answer; at most one, a message or reasoning, is open."""

    def __init__(self, body: ResponsesBody, head: AnswerHead) -> None:
        self._body = body
        self._head = head
        self._index = -1
        self._open = ""
        self._text = ""
        """Of the open item, as far as it was given out."""
        self._tokens: list[TokenLogprob] = []
        """Those that no delta has carried."""

    def more(self, chunk: CallChunk) -> Iterator[Payload]:
        """The text of a chunk, for the open item or for a new one."""
        self._tokens += chunk.tokens
        if chunk.reasoning:
            yield from self._to("reasoning")
            yield "reasoning_text.delta", {**self._within, "delta": chunk.reasoning}
            self._text += chunk.reasoning
        if chunk.text:
            yield from self._to("message")
            yield "output_text.delta", {**self._within, "delta": chunk.text, "logprobs": self._logprobs()}
            self._text += chunk.text

    def end(self, output: Sequence[OutputItem]) -> Iterator[Payload]:
        """What is left of an answer whose text was given out."""
        for index, item in enumerate(output):
            if index < self._index:
                continue
            if isinstance(item, OutputCall | OutputCustomCall):
                yield from self._call(item)
            else:
                yield from self._to(item.type)
                yield from self._close(item)

    def _to(self, kind: str) -> Iterator[Payload]:
        """Have an item of a kind open."""
        if self._open == kind:
            return
        if self._open == "reasoning":
            yield from self._close(_reasoning(self._body, self._head, self._text, "completed"))
        self._index += 1
        self._open, self._text = kind, ""
        item: OutputItem
        if kind == "reasoning":
            item = _reasoning(self._body, self._head, "", "in_progress").model_copy(update={"content": []})
            part = ReasoningText(text="").model_dump()
        else:
            item = _message(self._head, "", "in_progress").model_copy(update={"content": []})
            part = OutputText(text="").model_dump()
        yield "output_item.added", {"output_index": self._index, "item": item.model_dump()}
        yield "content_part.added", {**self._within, "part": part}

    def _close(self, item: OutputReasoning | OutputMessage) -> Iterator[Payload]:
        part = item.content[0]
        if isinstance(part, OutputText):
            yield "output_text.done", {**self._within, "text": part.text, "logprobs": part.model_dump()["logprobs"]}
        else:
            yield "reasoning_text.done", {**self._within, "text": part.text}
        yield "content_part.done", {**self._within, "part": part.model_dump()}
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
    def _within(self) -> dict[str, Any]:
        """What events within the open item say of their place."""
        prefix = "rs" if self._open == "reasoning" else "msg"
        return {"item_id": item_id(prefix, self._head.id), "output_index": self._index, "content_index": 0}

    def _logprobs(self) -> list[dict[str, Any]]:
        tokens, self._tokens = self._tokens, []
        return [shape.model_dump() for shape in _logprobs(self._body, tokens)]


def _ended(gathered: CollectedChoices, body: ResponsesBody, head: AnswerHead) -> ResponseAnswer:
    """The response that the only choice is."""
    call, usage = gathered.calls[0], gathered.usage
    status: Status = "incomplete" if call.finish_reason == "length" else "completed"
    said = call.response
    output: list[OutputItem] = []
    if said.reasoning:
        output.append(_reasoning(body, head, said.reasoning, "completed"))
    if said.content or not said.tool_calls:  # An answer that says nothing is an empty message: agents look for one.
        output.append(_message(head, said.content, "completed", _logprobs(body, gathered.tokens[0])))
    tools = {tool.full_name: tool for tool in offered_tools(body.tools or (), [])}
    output += [
        _tool_call(f"{head.id}_{i}", tool_call, tools.get(tool_call.name))
        for i, tool_call in enumerate(said.tool_calls)
    ]
    output[-1].status = status
    response = _response(body, head, status, output)
    return response.model_copy(
        update={
            "temperature": call.temperature,
            "incomplete_details": IncompleteDetails() if status == "incomplete" else None,
            "usage": ResponseUsage(
                input_tokens=usage.prompt_tokens,
                output_tokens=usage.completion_tokens,
                total_tokens=usage.total_tokens,
            ),
        }
    )


def _tool_call(number: str, call: ToolCall, tool: OfferedTool | None) -> OutputCall | OutputCustomCall:
    """A call as an item. One of a tool that was not offered_tools is a function call."""
    name, namespace = (tool.name, tool.namespace or None) if tool is not None else (call.name, None)
    common: dict[str, Any] = {"call_id": call.id, "name": name, "namespace": namespace, "status": "completed"}
    if tool is not None and tool.is_custom:
        return OutputCustomCall(id=item_id("ctc", number), input=to_custom_input(call.arguments), **common)
    return OutputCall(id=item_id("fc", number), arguments=call.arguments, **common)


def _reasoning(body: ResponsesBody, head: AnswerHead, text: str, status: Status) -> OutputReasoning:
    sealed = seal(text) if "reasoning.encrypted_content" in (body.include or ()) else None
    return OutputReasoning(
        id=item_id("rs", head.id), content=[ReasoningText(text=text)], encrypted_content=sealed, status=status
    )


def _message(head: AnswerHead, text: str, status: Status, logprobs: Sequence[LogprobShape] = ()) -> OutputMessage:
    return OutputMessage(
        id=item_id("msg", head.id), content=[OutputText(text=text, logprobs=list(logprobs))], status=status
    )


def _logprobs(body: ResponsesBody, tokens: Sequence[TokenLogprob]) -> list[LogprobShape]:
    if "message.output_text.logprobs" not in (body.include or ()):
        return []
    return [LogprobShape(token=t.text, logprob=t.logprob, bytes=list(t.utf8)) for t in tokens]


def _response(body: ResponsesBody, head: AnswerHead, status: Status, output: list[OutputItem]) -> ResponseAnswer:
    """A response with what it repeats of the request."""
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
    """With the keys that SDKs count on."""
    return {"parameters": None, "strict": False, **tool} if tool["type"] == "function" else tool
