"""The body of `POST /v1/chat/completions`, every key of it.

What cannot be honoured is listed here, to be refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from agentjet.server.dialects.bodies import Body, Count, Finite, JsonObject, Part, Text
from agentjet.server.dialects.gathering import UsageBody
from agentjet.server.dialects.refusals import Neutral
from agentjet.server.dialects.sampled import SampledBody


class ContentPart(Part):
    """A part of a message's content, with what others than text have in it."""

    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: str | None = None


class FunctionCall(Body):
    """The function of a tool call; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallBody(Body):
    """A tool call of an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionSentBack(FunctionCall):
    """The function of a tool call in a history."""

    parsed_arguments: Any = None
    """What OpenAI's SDK read in `arguments`, which its `stream` and `parse` send back; it says nothing else."""


class ToolCallSentBack(ToolCallBody):
    """A tool call in a history."""

    function: FunctionSentBack
    index: int | None = None
    """Left over by agents that send back what they joined from a stream; the order of the list says the same."""


class MessageBody(Body):
    """A message. The keys that SDKs write with null into an answer that is sent back are known, and must be empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    """Null or missing in an assistant message only."""
    reasoning_content: str | None = None
    """What an assistant thought before it answered, as the answers of this server have it."""
    tool_calls: list[ToolCallSentBack] | None = None
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


class ChatBody(SampledBody):
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

    # Names for the caller's own use, which ask nothing of the model.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Known, and honoured in their neutral form only: see `NEUTRAL`.
    frequency_penalty: Finite | None = None
    presence_penalty: Finite | None = None
    logit_bias: dict[str, float] | None = None
    modalities: list[str] | None = None
    service_tier: str | None = None
    store: bool | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


NEUTRAL: Neutral = {
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "audio": (),
    "function_call": (),
    "functions": (),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}


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


class AnswerBody(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    refusal: None = None


class ChoiceBody(BaseModel):
    """One completion."""

    index: int
    message: AnswerBody
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
