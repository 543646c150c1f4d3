"""OpenAI's Responses API: bodies to canonical requests. `responses_items` reads the input, `responses_answers` writes
what comes back.

Equality of messages is by meaning, as in chat completions. An earlier answer of the episode may be named instead of
sent back: its conversation is taken from what was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentjet.errors import InvalidRequest, NotFound, RequestError
from agentjet.gateway.requests import CallRequest
from agentjet.server.dialects.dialect import (
    ANY_OBJECT,
    CallLookup,
    Dialect,
    ErrorShape,
    OpenAIError,
    check_choice,
    named_function,
    openai_error,
    refuse_top_logprobs,
    refuse_unused_stream_options,
    sse,
)
from agentjet.server.dialects.responses_answers import ResponseAnswer, to_answer, to_events
from agentjet.server.dialects.responses_bodies import BODY, INCLUDABLE, KEYS, ResponsesBody, TextFormat
from agentjet.server.dialects.responses_requests import OfferedTool, full_name, offered_tools, to_messages
from agentjet.types import Constraint, Conversation, Message

PARAMS = {"messages": "input"}
"""What this dialect calls what others gave its name to."""


def to_request(body: ResponsesBody, past: CallLookup) -> CallRequest:
    """The canonical request. Raises `RequestError` naming the first thing that cannot be honoured."""
    refuse_top_logprobs(body.top_logprobs, "top_logprobs")
    refuse_unused_stream_options(body, body.stream_options)
    notes = BODY.judge(body)
    notes += [f"include: {name}" for name in body.include or () if name not in INCLUDABLE]
    instructions = (Message("system", body.instructions),) if body.instructions else ()
    said = [Message("user", body.input)] if isinstance(body.input, str) else to_messages(body.input, past, notes)
    tools = [] if body.tool_choice == "none" else offered_tools(body.tools or (), notes)
    return CallRequest(
        conversation=Conversation(
            (*instructions, *_continued(body.previous_response_id, past), *said),
            tuple(tool.definition for tool in tools),
            instructed=bool(instructions),
        ),
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        constraint=_constraint(body, tools),
        stream=bool(body.stream),
        model=body.model,
        notes=tuple(dict.fromkeys(notes)),
    )


def _continued(response_id: str | None, past: CallLookup) -> tuple[Message, ...]:
    """The conversation behind an earlier answer, with it, but without the instructions of that request."""
    if response_id is None:
        return ()
    exchange = past(response_id.removeprefix("resp_"))
    if exchange is None:
        raise NotFound(
            f"Previous response {response_id!r} is not of this episode and role: send the conversation as input.",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    asked, answer = exchange
    return (*asked.messages[1 if asked.instructed else 0 :], answer)


def _constraint(body: ResponsesBody, tools: Sequence[OfferedTool]) -> Constraint:
    """What `text.format`, `tool_choice`, `parallel_tool_calls` and strict tools ask of the answer."""
    choice = body.tool_choice
    constraint = Constraint(
        schema=_schema(body.text.format if body.text else None),
        schema_param="text.format",
        calls="required" if choice == "required" or isinstance(choice, dict) else "auto",
        function=_named(choice) if isinstance(choice, dict) else "",
        strict=frozenset(tool.full_name for tool in tools if tool.strict),
        parallel=body.parallel_tool_calls is not False,
    )
    return check_choice(constraint, [tool.full_name for tool in tools])


def _schema(given: TextFormat | None) -> Mapping[str, Any] | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return ANY_OBJECT
    if given.schema_ is None:
        raise InvalidRequest("text.format of type 'json_schema' needs a schema.", param="text.format.schema")
    return given.schema_


def _named(choice: Mapping[str, Any]) -> str:
    if choice.get("type") == "custom":
        choice = {**choice, "type": "function"}
    name = named_function(choice, choice, "{'type': 'function' or 'custom', 'name': ...}")
    return full_name(choice.get("namespace"), name)


def _error(error: RequestError) -> dict[str, Any]:
    body = openai_error(error)
    if error.code != "unknown_parameter":  # That one says what the body full_name it.
        body["error"]["param"] = PARAMS.get(error.param or "", error.param)
    return body


def _error_event(error: RequestError, num_sent: int) -> str:
    """As the reference has it, and with the object that OpenAI's SDKs raise from."""
    body = _error(error)
    described = {name: body["error"][name] for name in ("code", "message", "param")}
    return sse({"type": "error", **described, "sequence_number": num_sent, **body}, name="error")


DIALECT = Dialect(
    path="/v1/responses",
    keys=KEYS,
    answer=ResponseAnswer,
    errors=ErrorShape(model=OpenAIError, body=_error, event=_error_event),
    to_request=to_request,
    to_answer=to_answer,
    to_events=to_events,
)
