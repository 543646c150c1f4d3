"""The body of `POST /v1/responses`, every key of it.

`KEYS` has the treatment of each.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from agentjet.protocol import Temperature
from agentjet.server.dialects.dialect import (
    Body,
    Count,
    Finite,
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
    """A part of a message's content, or of a function's output, with what others than text have in it."""

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
    """A message, in the short form or as an answer has it."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ItemPart]
    id: str | None = None
    status: Status | None = None
    phase: Any = None
    metadata: Any = None


class FunctionCallItem(Body):
    """A function call of the model; `arguments` is JSON text."""

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
    """What a function or a custom tool returned."""

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
    """What the model thought before it answered, as the answers of this server have it."""

    type: Literal["reasoning"]
    content: list[ItemPart] | None = None
    encrypted_content: str | None = None
    """The same, for those who keep nothing else of it; read where there is no content."""
    summary: list[ItemPart] | None = None
    id: str | None = None
    status: Status | None = None


class ItemReference(Body):
    """An item of an earlier answer of the episode."""

    type: Literal["item_reference"] | None = None
    id: str


def _kind(item: Any) -> str | None:
    """The tag of an item, in brackets, which are left out where errors say what they are about."""
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
    """A tool definition: a function, whose `parameters` is a JSON schema, or one that is not offered."""

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
    """What the text of the answer is: any text, any JSON object, or JSON that follows a schema, which is followed
    whole, whether `strict` or not.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Body):
    """How the answer's text is to be."""

    format: TextFormat | None = None
    verbosity: Any = None


class ReasoningConfig(Body):
    """How the model is to reason. The policy alone decides that."""

    effort: Any = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None
    mode: Any = None


class ResponseStreamOptions(Body):
    """What a stream carries besides the answer."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(RequestBody):
    """A request. Everything of OpenAI's that is not honoured is refused, never ignored."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: Text | None = None
    """The system message of this request alone: one that continues it does not inherit it."""
    previous_response_id: Text | None = None
    """An earlier answer of this episode and role, whose conversation is continued."""
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Text] | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[Temperature, Field(le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    store: bool | None = None
    """Either way: an episode remembers its answers as long as it lives."""
    top_logprobs: int | None = None
    """0: log-probabilities of the sampled tokens only. Those of other tokens are not known."""
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


HINT = "the policy alone decides whether and how much it reasons"
INCLUDABLE = ("reasoning.encrypted_content", "message.output_text.logprobs")
"""What can be included in an answer. Anything else is of tools that a provider runs, and noted."""
KEYS: RequestKeys = {
    "model": honoured("and the role, after `@`"),
    "input": honoured(
        "text, or items: messages, `function_call`, `custom_tool_call` and their outputs, `reasoning`, `item_reference`"
    ),
    "instructions": honoured("of this request alone"),
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
    "store": honoured("either way, an episode remembers its answers as long as it lives"),
    "text.verbosity": noted("the prompt says how long the answer is to be"),
    "reasoning.effort": noted(HINT),
    "reasoning.summary": noted("answers have the reasoning itself"),
    "reasoning.generate_summary": noted("answers have the reasoning itself"),
    "reasoning.context": noted("[`job.history`](timelines.md#jobhistory) decides", "auto"),
    "reasoning.mode": noted(HINT),
    "user": noted(),
    "metadata": noted("the answer repeats it"),
    "client_metadata": noted(),
    "safety_identifier": noted(),
    "prompt_cache_key": noted("prefixes are kept anyway"),
    "prompt_cache_options": noted("prefixes are kept anyway"),
    "prompt_cache_retention": noted("prefixes are kept anyway"),
    "service_tier": noted("there is one tier"),
    "moderation": noted(),
    "access_programs": noted(),
    "tools[].defer_loading": noted("every tool is offered at once", False),
    "tools[].output_schema": noted("the chat template has no place for it"),
    "tools[].annotations": noted("the chat template has no place for it"),
    "tools[].async": noted("the agent decides when it runs a tool", False),
    "tools[].allowed_callers": refused("the policy calls tools itself", ["direct"]),
    "top_logprobs": refused("the sampler reports the token that it sampled, not the others", 0),
    "background": refused("ask with `stream`", False),
    "truncation": refused("the server edits no history", "disabled"),
    "context_management": refused("the server edits no history", []),
    "conversation": refused("use `previous_response_id`, or send the conversation"),
    "image": refused("the policy reads text only"),
    "max_tool_calls": refused("the agent runs the tools"),
    "prompt": refused("the server keeps no prompts"),
}
BODY = KeyRules(KEYS)

PROVIDER_TOOLS = (
    "web_search", "file_search", "code_interpreter", "computer", "mcp", "image_generation", "tool_search",
    "programmatic_tool_calling",
)  # fmt: skip
"""How the types of tools begin that run at the provider, or work on pictures: the policy is not offered them."""
