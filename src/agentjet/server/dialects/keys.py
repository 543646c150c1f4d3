"""The bodies of requests, and the treatment of every request key.

Every request key has one treatment:

* honoured: the key has its effect. It is a field of a body, and the field's docstring documents it;
* noted: the key is accepted, counted, and shown on its episode. It changes neither the prompt nor the distribution;
* refused: a value with an effect is answered with status 400 and the name of the key.

The tables have the noted and the refused keys. Their `neutral` values have no effect and are accepted, as is null for
any key. Other keys are unknown, and refused. Sections: bodies; the check of a request; the documentation; the table of
each dialect.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import from_json, to_json

from agentjet.errors import InvalidRequest, nearest_name
from agentjet.protocol import Int64, Temperature
from agentjet.types import beginning

# --- bodies


def _check_whole_characters(text: str) -> str:
    """Raises `ValueError` for half a surrogate pair, which JSON escapes can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("half a surrogate pair is not text") from error
    return text


def check_portable_json(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the value. Raises `ValueError` for values that other JSON parsers reject: NaN, too deep nesting."""
    from_json(to_json(value), allow_inf_nan=False)
    return value


ItemT = TypeVar("ItemT")
Items = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list that is checked up to its first invalid item: one error for each item would take gigabytes."""
Text = Annotated[str, AfterValidator(_check_whole_characters)]
"""Text in whole characters."""
JsonObject = Annotated[dict[str, Any], AfterValidator(check_portable_json)]
"""An object that any JSON parser reads: no NaN, no half characters, at most about 200 levels."""
ToolName = Annotated[Text, Field(min_length=1, max_length=256)]
Count = Annotated[Int64, Field(ge=1)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
"""An answer ends before this text. The bound keeps the search in every piece of the answer cheap."""
StopStrings = Annotated[Items[StopString], Field(max_length=16)]
"""OpenAI allows 4."""


class Body(BaseModel):
    """Part of a request. pydantic checks the declared keys, `request_notes` the others."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)
    place: ClassVar[str] = "nowhere."
    """Start of the names of this part's keys in the tables: `tools[].`; empty for a whole request."""
    keys_of_kind: ClassVar[Mapping[str, str] | None] = None
    """The keys that each `kind` of this part has, if the kind decides, apart from `type` and `role`.

    Those with a `?` may be missing, and need no field.
    """
    unknown_kind: ClassVar[str] = "the policy reads text only."
    """The reason for refusing other kinds."""

    @property
    def kind(self) -> str:
        """The type or the role of this part."""
        return str(getattr(self, "type", ""))

    @property
    def omission(self) -> str:
        """The note about a part that the policy does not read, whose keys do not matter; else empty."""
        return ""

    @property
    def is_unreadable(self) -> bool:
        """True if the part has content that the policy cannot read, such as an image."""
        return False

    def omission_of(self, part: Body) -> str:
        """The `omission` of a part of this part."""
        return part.omission


class RequestBody(Body):
    """A request for an answer of the policy."""

    place = ""
    model: str
    """and the role, after `@`"""
    stream: bool | None = None
    temperature: Annotated[Temperature, Field(le=2)] | None = None
    """0, or from 0.01 to 2; 0 is refused in training"""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None


# --- the check of a request


@dataclass(frozen=True, slots=True)
class KeyRule:
    """The treatment of one key. `meaning` is printed in the documentation."""

    treatment: Literal["noted", "refused"]
    meaning: str = ""
    neutral: tuple[Any, ...] = ()
    code: str = "unsupported_parameter"


Images = Literal["refuse", "omit"]
"""`job.images`."""
UNREADABLE = (
    "this model reads text only. Send its content as text, or set job.images = 'omit' on the server: then a text "
    "replaces each image, document, audio and video."
)
"""The reason for refusing an unreadable part, with the way out."""
RequestKeys = Mapping[str, KeyRule]
"""Rules by dotted key, such as `output_config.effort`. `[]` stands for every item of a list."""


def request_notes(part: Body, keys: RequestKeys, images: Images, where: str = "") -> Iterator[str]:
    """Yields the noted keys of a part at `where` in the request, and notes about omitted parts.

    Raises `InvalidRequest` for the first key that is unknown, missing or refused, and for an unreadable part unless
    `images` is `omit`.
    """
    if part.keys_of_kind is not None and part.kind not in part.keys_of_kind:
        raise refusal(where[:-1], f" is of type {part.kind!r}: {part.unknown_kind}", "unsupported_content")
    declared = part.__dict__
    accepted, required = _split(part.keys_of_kind[part.kind]) if part.keys_of_kind is not None else (declared, ())
    for key, value in chain(declared.items(), (part.model_extra or {}).items()):
        if value is None:
            continue
        rule = keys.get(part.place + key)
        if rule is None and key not in accepted and (value not in ("", []) or key not in declared):
            beside = [known.removeprefix(part.place) for known in keys if known.startswith(part.place)]
            near = nearest_name(key, [*accepted, *beside])
            hint = f"; did you mean {near!r}?" if near else "."
            message = f"{where + key!r} is not a known key{hint}"
            raise InvalidRequest(message, code="unknown_parameter", param=where + key)
        if rule is not None and value not in rule.neutral:
            if rule.treatment == "refused":
                raise refused_value(value, where + key, rule)
            yield part.place + key
        if isinstance(value, list):
            for i, item in enumerate(value if value and isinstance(value[0], Body) else ()):
                if images == "refuse" and item.is_unreadable:
                    raise refusal(
                        f"{where}{key}.{i}", f" is of type {item.kind!r}: {UNREADABLE}", "unsupported_content"
                    )
                if note := part.omission_of(item):
                    yield note
                else:
                    yield from request_notes(item, keys, images, f"{where}{key}.{i}.")
        elif not isinstance(value, str) and isinstance(value, Body):  # The second check is slow.
            yield from request_notes(value, keys, images, f"{where}{key}.")
    for key in required:
        if declared[key] is None:
            raise refusal(where + key, " is missing.", "invalid_value")


@cache
def _split(keys: str) -> tuple[Collection[str], Collection[str]]:
    """Returns the keys that a part may have and those that it must have."""
    accepted = frozenset({"type", "role", *(key.rstrip("?") for key in keys.split())})
    return accepted, [key for key in keys.split() if key[-1] != "?"]


def refusal(where: str, why: str, code: str = "unsupported_parameter") -> InvalidRequest:
    """Returns the error for the part at `where`. The message is its place and `why`."""
    return InvalidRequest(where + why, code=code, param=where)


def refused_value(value: Any, where: str, rule: KeyRule) -> InvalidRequest:
    """Returns the error for a value with an effect."""
    given = beginning(repr(value), 80)
    way_out = " or ".join(["leave it out", *(f"use {neutral!r}" for neutral in rule.neutral)])
    return refusal(where, f" is not supported: {way_out} (given: {given}).", rule.code)


# --- the documentation


def treatment_table(path: str, body: type[Body], keys: RequestKeys) -> str:
    """Returns the keys of one dialect as a Markdown table, grouped by treatment."""
    lines = [f"### `{path}`", "", "| key | treatment | meaning |", "|---|---|---|"]
    fields = {name: field.description or "" for name, field in body.model_fields.items() if name not in keys}
    lines += [f"| `{name}` | honoured | {meaning} |" for name, meaning in sorted(fields.items())]
    for treatment, effect in (("noted", "not counted"), ("refused", "accepted")):
        for name, rule in sorted((name, rule) for name, rule in keys.items() if rule.treatment == treatment):
            neutral = ", ".join(f"`{json.dumps(value)}`" for value in rule.neutral)
            meaning = "; ".join(filter(None, [rule.meaning, neutral and f"{effect}: {neutral}"]))
            lines.append(f"| `{name}` | {treatment} | {meaning} |")
    return "\n".join(lines)


# --- the table of each dialect


def _noted(names: str, meaning: str = "", *neutral: Any) -> RequestKeys:
    return dict.fromkeys(names.split(), KeyRule("noted", meaning, neutral))


def _refused(names: str, meaning: str = "", *neutral: Any) -> RequestKeys:
    return dict.fromkeys(names.split(), KeyRule("refused", meaning, neutral))


_REASONING = "the policy alone decides whether and how much it reasons"
_CACHE = "prefixes are always cached"
_REASONING_TEXT = "`reasoning_content` has the text"
_DISTRIBUTION = "it would change the distribution"
_NO_PLACE = "the chat template has no place for "

_OPENAI_KEYS: RequestKeys = {
    **_noted("metadata safety_identifier moderation"),
    **_noted("prompt_cache_key prompt_cache_options prompt_cache_retention", _CACHE),
    **_noted("service_tier", "there is one tier"),
    **_refused("top_logprobs", "the sampler reports the sampled token only", 0),
    **_refused("stream_options.include_obfuscation", "", False),
}
"""The keys that chat completions and responses share."""
COMPLETIONS_KEYS: RequestKeys = {
    **_noted("user"),
    **_refused("frequency_penalty presence_penalty min_p", _DISTRIBUTION, 0.0),
    **_refused("repetition_penalty", _DISTRIBUTION, 1.0),
    **_refused("logit_bias", _DISTRIBUTION, {}),
    **_refused("stream_options.include_obfuscation", "", False),
    **_refused("suffix", "the policy continues a text", ""),
}
CHAT_KEYS: RequestKeys = {
    **{name: rule for name, rule in COMPLETIONS_KEYS.items() if name != "suffix"},
    **_OPENAI_KEYS,
    **_noted("chat_template_kwargs", "refused if this model's template would write another prompt with it", {}),
    **_noted("cache_control messages[].cache_control messages[].content[].cache_control tools[].cache_control", _CACHE),
    **_noted("store", "answers cannot be fetched again", False),
    **_noted("prediction", "a hint for speed"),
    **_noted("usage", "answers always have it"),
    **_noted("reasoning_effort reasoning thinking enable_thinking thinking_budget", _REASONING),
    **_noted("include_reasoning", "answers have `reasoning_content`", True),
    **_noted("verbosity", "state the wanted length in the prompt"),
    **_noted("web_search_options", "no provider runs the search; the policy is not offered it"),
    **_noted("messages[].provider_specific_fields", "the policy never read it", {}),
    **_noted("messages[].reasoning messages[].reasoning_text messages[].reasoning_opaque", _REASONING_TEXT, ""),
    **_noted("messages[].reasoning_details messages[].reasoning_items messages[].thinking_blocks", _REASONING_TEXT, []),
    **_refused("modalities", "the policy writes text only", ["text"]),
    **_refused("audio", "the policy writes text only"),
    **_refused("function_call", "use `tool_choice`", "auto"),
    **_refused("functions", "use `tools`", []),
    **_refused("messages[].refusal", "the policy refuses in plain text"),
    **_refused("messages[].annotations", "", []),
    **_refused("messages[].audio", "the policy reads text only"),
    **_refused("messages[].function_call", "use `tool_calls`"),
}
MESSAGES_KEYS: RequestKeys = {
    **_noted("thinking output_config.effort output_config.task_budget", _REASONING),
    **_noted(
        "context_management", "edits of thinking; other edits are refused: the agent must edit its history itself"
    ),
    **_noted("cache_control tools[].cache_control messages[].content[].cache_control", _CACHE),
    **_noted("speed", "there is one speed", "standard"),
    **_noted("mcp_servers", "no provider runs their tools; the policy is not offered them", []),
    **_noted("metadata inference_geo diagnostics"),
    **_noted("betas", "the header `anthropic-beta` is noted as well"),
    **_noted("service_tier", "there is one tier"),
    **_noted("tools[].eager_input_streaming", "tool uses are streamed whole"),
    **_noted("tools[].input_examples", f"{_NO_PLACE}them", []),
    **_noted("tools[].defer_loading", "every tool is offered at once"),
    **_refused("tools[].allowed_callers", "the policy calls tools itself", ["direct"]),
    **_refused("messages[].content[].citations", "the policy cites nothing", []),
    **_refused("messages[].content[].caller", "the policy calls tools itself", {"type": "direct"}),
    **_refused("messages[].content[].toolset_name", "the policy calls tools itself"),
    **_refused("messages[].content[].parsed_output", "the policy parses nothing"),
    **_refused("container", "the server executes no code"),
    "thread": KeyRule("refused", "the server stores no history", code="thread_unsupported_request"),
}
RESPONSES_KEYS: RequestKeys = {
    **_OPENAI_KEYS,
    **_noted("text.verbosity", "state the wanted length in the prompt"),
    **_noted("reasoning.effort reasoning.mode", _REASONING),
    **_noted("reasoning.summary reasoning.generate_summary", "answers have the reasoning itself"),
    **_noted("reasoning.context", "[`job.history`](timelines.md#jobhistory) decides", "auto"),
    **_noted("metadata", "the answer repeats it", {}),
    **_noted("user client_metadata access_programs"),
    **_noted("tools[].defer_loading", "every tool is offered at once", False),
    **_noted("tools[].output_schema tools[].annotations", f"{_NO_PLACE}it"),
    **_noted("tools[].async", "the agent decides when it runs a tool", False),
    **_refused("tools[].allowed_callers", "the policy calls tools itself", ["direct"]),
    **_refused("background", "use `stream`", False),
    **_refused("truncation", "the server edits no history", "disabled"),
    **_refused("context_management", "the server edits no history", []),
    **_refused("conversation", "use `previous_response_id`, or send the conversation"),
    **_refused("image", "the policy reads text only"),
    **_refused("max_tool_calls", "the agent runs the tools"),
    **_refused("prompt", "the server stores no prompts"),
}
