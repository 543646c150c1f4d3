"""The body of `POST /v1/chat/completions`, every key of it.

`KEYS` has the treatment of each.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from agentjet.server.dialects.bodies import Body, Count, Finite, JsonObject, Part, Text
from agentjet.server.dialects.gathering import UsageBody
from agentjet.server.dialects.request_keys import KeyRules, RequestKeys, honoured, noted, refused
from agentjet.server.dialects.sampled import SAMPLED_KEYS, SampledBody


class ContentPart(Part):
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
    **SAMPLED_KEYS,
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
