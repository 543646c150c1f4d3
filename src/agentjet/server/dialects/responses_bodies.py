"""The request body of OpenAI's Responses API; `KEYS` has the treatment of every key."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from agentjet.server.dialects.dialect import (
    CACHE_HINT,
    REASONING_HINT,
    Body,
    Count,
    JsonObject,
    KeyRules,
    RequestBody,
    RequestKeys,
    Text,
    TextPart,
    check_portable_json,
    honoured,
    noted,
    refused,
)

Status = Literal["in_progress", "completed", "incomplete"]


class ItemPart(TextPart):
    """A part of a message's content or of a function's output, with the keys of all types of part."""

    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    refusal: str | None = None
    image_url: Any = None
    detail: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    input_audio: Any = None
    prompt_cache_breakpoint: Any = None


class MessageItem(Body):
    """A message, in the short form or in the form of an answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ItemPart]
    id: str | None = None
    status: Status | None = None
    phase: Any = None
    metadata: Any = None


class FunctionCallItem(Body):
    """A function call of the policy; `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    namespace: Text | None = None
    caller: Any = None
    metadata: Any = None


class CustomCallItem(Body):
    """A call of a custom tool; `input` is text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: Text
    id: str | None = None
    status: Status | None = None
    namespace: Text | None = None
    caller: Any = None
    metadata: Any = None


class FunctionOutputItem(Body):
    """The result of a function or a custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: str | list[ItemPart]
    id: str | None = None
    name: str | None = None
    status: Status | None = None
    namespace: Text | None = None
    caller: Any = None
    metadata: Any = None


class ReasoningItem(Body):
    """The reasoning of an answer, as the answers of this server have it."""

    type: Literal["reasoning"]
    content: list[ItemPart] | None = None
    encrypted_content: str | None = None
    """The same text, for agents that keep only this key. Read if `content` is empty."""
    summary: list[ItemPart] | None = None
    id: str | None = None
    status: Status | None = None


class ItemReference(Body):
    """An item of an earlier answer of the episode."""

    type: Literal["item_reference"] | None = None
    id: str


def _kind(item: Any) -> str | None:
    """Returns the tag of an item. It is in brackets, and errors omit parts of a path in brackets."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind is None and isinstance(item, dict):
        kind = "message" if "role" in item else "item_reference"
    return f"<{kind}>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[FunctionOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(
        _kind,
        custom_error_type="unsupported_item",
        custom_error_message="Input should be an item of type message, function_call, function_call_output, "
        "custom_tool_call, custom_tool_call_output, reasoning or item_reference",
    ),
]


class ResponsesTool(BaseModel):
    """A tool definition. The `parameters` of a function are a JSON schema."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: Text
    name: Annotated[Text, Field(min_length=1, max_length=256)] | None = None
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_json(cls, given: Any) -> Any:
        return check_portable_json(given) if isinstance(given, dict) else given  # The answer repeats it.


class TextFormat(Body):
    """The form of the answer's text: any text, any JSON object, or JSON that follows a schema.

    The answer follows all of the schema, whether `strict` or not.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Body):
    """The form of the answer's text, and a hint about its length."""

    format: TextFormat | None = None
    verbosity: Any = None


class ReasoningConfig(Body):
    """Hints about reasoning. They have no effect."""

    effort: Any = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None
    mode: Any = None


class ResponseStreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(RequestBody):
    """A request. Keys of OpenAI's API that cannot be honoured are refused, never ignored."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: Text | None = None
    """The system message of this request. A request that continues this one does not inherit it."""
    previous_response_id: Text | None = None
    """An earlier answer of this episode and role. The request continues its conversation."""
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Text] | None = None
    max_output_tokens: Count | None = None
    store: bool | None = None
    """No effect: an episode keeps its answers until it ends."""
    top_logprobs: int | None = None
    """Only 0, which means the sampled tokens: the sampler does not report other tokens."""
    stream_options: ResponseStreamOptions | None = None

    # Known, and not honoured: see `KEYS`.
    user: Text | None = None
    metadata: dict[Text, Text] | None = None
    client_metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    moderation: Any = None
    access_programs: Any = None
    background: bool | None = None
    truncation: str | None = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    max_tool_calls: int | None = None
    prompt: Any = None


INCLUDABLE = ("reasoning.encrypted_content", "message.output_text.logprobs")
"""The values of `include` that have an effect. Other values concern tools of a provider, and are noted."""
KEYS: RequestKeys = {
    "model": honoured("and the role, after `@`"),
    "input": honoured(
        "text, or items: messages, `function_call`, `custom_tool_call` and their outputs, `reasoning`, `item_reference`"
    ),
    "instructions": honoured("for this request only"),
    "previous_response_id": honoured("an earlier answer of this episode and role"),
    "tools": honoured("of type `function` (also `strict`), `custom` and `namespace`"),
    "tool_choice": honoured(),
    "parallel_tool_calls": honoured(),
    "text.format": honoured("[constraints.md](constraints.md)"),
    "include": honoured("`reasoning.encrypted_content`, `message.output_text.logprobs`; others are noted"),
    "max_output_tokens": honoured(),
    "temperature": honoured("0, or from 0.01 to 2; 0 is refused in training"),
    "top_p": honoured(),
    "stream": honoured(),
    "stream_options": honoured("`include_obfuscation: false`"),
    "store": honoured("in both cases an episode keeps its answers until it ends"),
    "text.verbosity": noted("state the wanted length in the prompt"),
    "reasoning.effort": noted(REASONING_HINT),
    "reasoning.summary": noted("answers have the reasoning itself"),
    "reasoning.generate_summary": noted("answers have the reasoning itself"),
    "reasoning.context": noted("[`job.history`](timelines.md#jobhistory) decides", "auto"),
    "reasoning.mode": noted(REASONING_HINT),
    "user": noted(),
    "metadata": noted("the answer repeats it"),
    "client_metadata": noted(),
    "safety_identifier": noted(),
    "prompt_cache_key": noted(CACHE_HINT),
    "prompt_cache_options": noted(CACHE_HINT),
    "prompt_cache_retention": noted(CACHE_HINT),
    "service_tier": noted("there is one tier"),
    "moderation": noted(),
    "access_programs": noted(),
    "tools[].defer_loading": noted("every tool is offered at once", False),
    "tools[].output_schema": noted("the chat template has no place for it"),
    "tools[].annotations": noted("the chat template has no place for it"),
    "tools[].async": noted("the agent decides when it runs a tool", False),
    "tools[].allowed_callers": refused("the policy calls tools itself", ["direct"]),
    "top_logprobs": refused("the sampler reports the sampled token only", 0),
    "background": refused("use `stream`", False),
    "truncation": refused("the server edits no history", "disabled"),
    "context_management": refused("the server edits no history", []),
    "conversation": refused("use `previous_response_id`, or send the conversation"),
    "image": refused("the policy reads text only"),
    "max_tool_calls": refused("the agent runs the tools"),
    "prompt": refused("the server stores no prompts"),
}
RULES = KeyRules(KEYS)

PROVIDER_TOOLS = (
    "web_search", "file_search", "code_interpreter", "computer", "mcp", "image_generation", "tool_search",
    "programmatic_tool_calling",
)  # fmt: skip
"""Prefixes of the types of tools that the provider runs, or that work on images. The policy is not offered them."""
