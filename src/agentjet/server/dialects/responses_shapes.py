"""What `POST /v1/responses` answers: the response, its output items and their parts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from agentjet.server.dialects.responses_bodies import Status


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


class Incomplete(BaseModel):
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
    incomplete_details: Incomplete | None = None
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
