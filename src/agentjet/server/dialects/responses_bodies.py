"""The body of `POST /v1/responses`, every key of it.

What cannot be honoured is listed here, to be refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from agentjet.protocol import Temperature
from agentjet.server.dialects.bodies import Body, Count, Finite, JsonObject, Part, RequestBody, Text
from agentjet.server.dialects.refusals import Neutral

Status = Literal["in_progress", "completed", "incomplete"]


class ItemPart(Part):
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
    phase: str | None = None


class FunctionCallItem(Body):
    """A function call of the model; `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    namespace: None = None
    caller: Any = None


class FunctionOutputItem(Body):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: str | list[ItemPart]
    id: str | None = None
    name: str | None = None
    status: Status | None = None
    namespace: None = None
    caller: Any = None


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
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(
        _kind,
        custom_error_type="unsupported_item",
        custom_error_message="Input should be an item of type message, function_call, function_call_output, reasoning "
        "or item_reference",
    ),
]


class FunctionTool(Body):
    """A tool definition; `parameters` is a JSON schema. Tools that a provider runs are not known here."""

    type: Text
    name: Annotated[Text, Field(min_length=1, max_length=256)] | None = None
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None


class Format(Body):
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

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Body):
    """How the model is to reason. The policy alone decides that; `none` is what a model without reasoning does."""

    effort: Literal["none"] | None = None
    summary: None = None
    generate_summary: None = None
    context: Literal["auto"] | None = None
    mode: None = None


class StreamShape(Body):
    """What a stream carries besides the answer."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(RequestBody):
    """A request. Everything of OpenAI's that is not honoured is refused, never ignored."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: Text | None = None
    """The system message of this request alone: one that continues it does not inherit it."""
    previous_response_id: Text | None = None
    """An earlier answer of this episode and role, whose conversation is continued."""
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[Temperature, Field(le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    store: bool | None = None
    """Either way: an episode remembers its answers as long as it lives."""
    top_logprobs: int | None = None
    """0: log-probabilities of the sampled tokens only. Those of other tokens are not known."""
    stream_options: StreamShape | None = None

    # Names for the caller's own use, which ask nothing of the model.
    user: Text | None = None
    metadata: dict[Text, Text] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Known, and honoured in their neutral form only: see `NEUTRAL`.
    background: bool | None = None
    truncation: str | None = None
    service_tier: str | None = None
    access_programs: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    max_tool_calls: int | None = None
    moderation: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None


NEUTRAL: Neutral = {
    "background": (False,),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "access_programs": (),
    "context_management": (),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
}
