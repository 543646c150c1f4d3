"""The bodies of requests, and the treatment of every request key.

Every request key has one treatment:

* honoured: the key has its effect. Bodies declare these keys as fields;
* noted: the key is accepted, counted, and shown on its episode. It changes neither the prompt nor the distribution;
* refused: a value with an effect is answered with status 400 and the name of the key. The `neutral` values and null
  have no effect and are accepted.

Other keys are unknown, and refused. Sections: bodies; rules; the table of each dialect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, from_json, to_json

from agentjet.errors import InvalidRequest
from agentjet.gateway.requests import MAX_CHOICES
from agentjet.protocol import Int64, Temperature

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


Text = Annotated[str, AfterValidator(_check_whole_characters)]
"""Text in whole characters."""
JsonObject = Annotated[dict[str, Any], AfterValidator(check_portable_json)]
"""An object that any JSON parser reads: no NaN, no half characters, at most about 200 levels."""
ToolName = Annotated[Text, Field(min_length=1, max_length=256)]
Count = Annotated[Int64, Field(ge=1)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
"""An answer ends before this text. The bound keeps the search in every piece of the answer cheap."""
StopStrings = Annotated[list[StopString], Field(max_length=16)]
"""OpenAI allows 4."""


def _stop_lists_at_first_error(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "list" and "items_schema" in schema:
            schema["fail_fast"] = True
        schema = list(schema.values())
    if isinstance(schema, list | tuple):
        for part in schema:
            _stop_lists_at_first_error(part)


@dataclass(frozen=True, slots=True)
class KeyRule:
    """The treatment of one key. `meaning` is printed in the documentation."""

    treatment: Literal["honoured", "noted", "refused"]
    meaning: str = ""
    neutral: tuple[Any, ...] = ()


RequestKeys = Mapping[str, KeyRule]
"""Rules by dotted key, such as `output_config.effort`. `[]` stands for every item of a list."""


class Body(BaseModel):
    """Part of a request. Unknown keys are refused; `with_keys` adds the noted and refused keys of a table.

    Lists stop at their first invalid item: one error for each item would take gigabytes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    key_rules: ClassVar[Sequence[tuple[str, list[str], KeyRule]]] = ()
    """Name in the table, path in this part, and rule of the noted and refused keys."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_lists_at_first_error(schema)
        return schema

    def noted_keys(self, where: str = "") -> list[str]:
        """Returns the noted keys of this part, which stands at `where` in the request.

        Raises `InvalidRequest` for the first refused key.
        """
        noted = []
        for name, path, rule in self.key_rules:
            if path[0] not in self.model_fields_set:
                continue
            value: Any = self
            for step in path:
                value = value.get(step) if isinstance(value, Mapping) else getattr(value, step, None)
            if rule.treatment == "refused":
                refuse_value(value, rule.neutral, where + ".".join(path))
            elif value is not None and value not in rule.neutral:
                noted.append(name)
        return noted


BodyT = TypeVar("BodyT", bound=Body)


def with_keys(keys: RequestKeys, prefix: str = "") -> Callable[[type[BodyT]], type[BodyT]]:
    """Adds the noted and refused keys of a table to a part of a body. The names of its keys begin with `prefix`.

    A key that the part does not declare becomes a field of any type, unless the part allows all keys.
    """

    def add(part: type[BodyT]) -> type[BodyT]:
        rules = [(name, name.removeprefix(prefix), rule) for name, rule in keys.items() if name.startswith(prefix)]
        rules = [row for row in rules if "[]" not in row[1] and row[2].treatment != "honoured"]
        tops = dict.fromkeys(path.partition(".")[0] for _, path, _ in rules)
        fields: Any = {name: (Any, None) for name in tops if name not in part.model_fields}
        if part.model_config["extra"] == "forbid":
            part = create_model(
                part.__name__, __base__=part, __module__=part.__module__, __doc__=part.__doc__, **fields
            )
        part.key_rules = [(name, path.split("."), rule) for name, path, rule in rules]
        return part

    return add


class TypedPart(Body):
    """Part of a request whose `type` decides which keys it must and may have, besides those of its table."""

    model_config = ConfigDict(extra="allow")

    def check_keys(self, where: str, required: Sequence[str], optional: Sequence[str] = ()) -> list[str]:
        """Returns the noted keys. Raises `InvalidRequest` for the first missing, unknown or refused key."""
        given = {name for name in self.model_fields_set if getattr(self, name) is not None}
        known = {"type", *required, *optional, *(path[0] for _, path, _ in self.key_rules)}
        if missing := [name for name in required if name not in given]:
            raise refusal(f"{where}.{missing[0]}", " is missing.", "invalid_value")
        if unknown := sorted(given - known):
            place, near = f"{where}.{unknown[0]}", get_close_matches(unknown[0], known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            message = f"{place!r} is not a key this server knows{hint}"
            raise InvalidRequest(message, code="unknown_parameter", param=place)
        return self.noted_keys(f"{where}.")


class RequestBody(Body):
    """A request for an answer of the policy."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None
    temperature: Annotated[Temperature, Field(le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None


# --- rules


def refusal(where: str, why: str, code: str = "unsupported_parameter") -> InvalidRequest:
    """Returns the error for the part at `where`. The message is its place and `why`."""
    return InvalidRequest(where + why, code=code, param=where)


def refuse_value(value: Any, neutral: tuple[Any, ...], where: str) -> None:
    """Raises `InvalidRequest` for the value at `where`, unless it is null or neutral."""
    if value is None or value in neutral:
        return
    either = " or ".join(map(_shown, neutral))
    way_out = f"leave it out or use {either}" if neutral else "leave it out"
    raise refusal(where, f" = {_shown(value)} is not supported: {way_out}.")


def _shown(value: Any) -> str:
    shown = repr(value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


NEUTRAL_EFFECT = {"honoured": "as if absent", "noted": "not counted", "refused": "accepted"}
"""The treatment of neutral values, as the documentation prints it. The order is that of its tables."""


def treatment_table(title: str, keys: RequestKeys) -> str:
    """Returns the keys of one dialect as a Markdown table, grouped by treatment."""
    lines = [f"### {title}", "", "| key | treatment | meaning |", "|---|---|---|"]
    for treatment in NEUTRAL_EFFECT:
        for name, rule in sorted((name, rule) for name, rule in keys.items() if rule.treatment == treatment):
            neutral = ", ".join(f"`{json.dumps(value)}`" for value in rule.neutral)
            effect = f"{NEUTRAL_EFFECT[treatment]}: {neutral}" if neutral else ""
            lines.append(f"| `{name}` | {treatment} | {'; '.join(filter(None, [rule.meaning, effect]))} |")
    return "\n".join(lines)


# --- the table of each dialect


def _honoured(names: str, meaning: str = "") -> RequestKeys:
    return dict.fromkeys(names.split(), KeyRule("honoured", meaning))


def _noted(names: str, meaning: str = "", *neutral: Any) -> RequestKeys:
    return dict.fromkeys(names.split(), KeyRule("noted", meaning, neutral))


def _refused(names: str, meaning: str = "", *neutral: Any) -> RequestKeys:
    return dict.fromkeys(names.split(), KeyRule("refused", meaning, neutral))


_REASONING = "the policy alone decides whether and how much it reasons"
_CACHE = "prefixes are always cached"
_REASONING_TEXT = "`reasoning_content` has the text"
_DISTRIBUTION = "it would change the distribution"
_NO_PLACE = "the chat template has no place for "
_SAMPLED_ONLY = "the sampler reports the sampled token only"

_SAMPLING_KEYS: RequestKeys = {
    **_honoured("model", "and the role, after `@`"),
    **_honoured("temperature", "0, or from 0.01 to 2; 0 is refused in training"),
    **_honoured("top_p stream"),
}
_OPENAI_KEYS: RequestKeys = {
    **_honoured("tool_choice parallel_tool_calls"),
    **_noted("metadata safety_identifier moderation"),
    **_noted("prompt_cache_key prompt_cache_options prompt_cache_retention", _CACHE),
    **_noted("service_tier", "there is one tier"),
    **_refused("top_logprobs", _SAMPLED_ONLY, 0),
}
"""The keys that chat completions and responses share."""
_COMPLETION_KEYS: RequestKeys = {
    **_SAMPLING_KEYS,
    **_honoured("top_k", "an extension; 0 and -1 truncate nothing"),
    **_honoured("seed", "a whole number of 64 bits"),
    **_honoured("stop", "up to 16 of up to 1,000 characters"),
    **_honoured("n", f"up to {MAX_CHOICES}"),
    **_honoured("stream_options", "`include_usage`"),
    **_noted("user"),
    **_refused("frequency_penalty presence_penalty min_p", _DISTRIBUTION, 0.0),
    **_refused("repetition_penalty", _DISTRIBUTION, 1.0),
    **_refused("logit_bias", _DISTRIBUTION, {}),
}
"""The keys that chat completions and text completions share."""
CHAT_KEYS: RequestKeys = {
    **_COMPLETION_KEYS,
    **_OPENAI_KEYS,
    **_honoured("messages", "text, also in parts; tool calls and their results; `reasoning_content`"),
    **_honoured("max_tokens"),
    **_honoured("max_completion_tokens", "the same as `max_tokens`"),
    **_honoured("logprobs", "every sampled token, control tokens included"),
    **_honoured("tools", "of type `function`, also `strict`"),
    **_honoured("response_format", "[constraints.md](constraints.md)"),
    **_honoured("messages[].parsed", "repeats `content`"),
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
COMPLETIONS_KEYS: RequestKeys = {
    **_COMPLETION_KEYS,
    **_honoured("prompt", "a text or a list of token ids; in evaluation episodes a list of up to 64 of either"),
    **_honoured("max_tokens", "the default is the job's limit, not OpenAI's 16"),
    **_honoured("logprobs", "0: the sampled tokens; up to 20 in evaluation episodes: the likeliest tokens as well"),
    **_honoured("echo", "in evaluation episodes, without `stream`"),
    **_honoured("best_of", "1, or equal to `n`"),
    **_refused("suffix", "the policy continues a text", ""),
}
PROMPT_KEYS: RequestKeys = {
    **_honoured("model", "and the role, after `@`"),
    **_honoured("messages", "text, `tool_use`, `tool_result`, `thinking`; the last message is the user's"),
    **_honoured("system", "text or text blocks"),
    **_honoured("tools", "with an `input_schema`, also `strict`"),
    **_honoured("tool_choice", "also `disable_parallel_tool_use`"),
    **_honoured("output_config.format", "[constraints.md](constraints.md)"),
    **_noted("thinking output_config.effort output_config.task_budget", _REASONING),
    **_noted(
        "context_management", "edits of thinking; other edits are refused: the agent must edit its history itself"
    ),
    **_noted("cache_control tools[].cache_control messages[].content[].cache_control", _CACHE),
    **_noted("speed", "there is one speed", "standard"),
    **_noted("mcp_servers", "no provider runs their tools; the policy is not offered them", []),
    **_noted("tools[].eager_input_streaming", "tool uses are streamed whole"),
    **_noted("tools[].input_examples", f"{_NO_PLACE}them", []),
    **_noted("tools[].defer_loading", "every tool is offered at once"),
    **_refused("tools[].allowed_callers", "the policy calls tools itself", ["direct"]),
    **_refused("messages[].content[].citations", "the policy cites nothing", []),
    **_refused("messages[].content[].caller", "the policy calls tools itself", {"type": "direct"}),
    **_refused("messages[].content[].toolset_name", "the policy calls tools itself"),
    **_refused("messages[].content[].parsed_output", "the policy parses nothing"),
}
"""The keys of Anthropic's API that make a prompt."""
MESSAGES_KEYS: RequestKeys = {
    **_SAMPLING_KEYS,
    **PROMPT_KEYS,
    **_honoured("max_tokens top_k"),
    **_honoured("stop_sequences", "up to 16 of up to 1,000 characters"),
    **_honoured("temperature", "0, or from 0.01 to 1; 0 is refused in training"),
    **_noted("metadata inference_geo diagnostics"),
    **_noted("betas", "the header `anthropic-beta` is noted as well"),
    **_noted("service_tier", "there is one tier"),
    **_refused("container", "the server executes no code"),
    **_refused("thread", "the server stores no history"),
}
RESPONSES_KEYS: RequestKeys = {
    **_SAMPLING_KEYS,
    **_OPENAI_KEYS,
    **_honoured(
        "input",
        "text, or items: messages, `function_call`, `custom_tool_call` and their outputs, `reasoning`, "
        "`item_reference`",
    ),
    **_honoured("instructions", "for this request only"),
    **_honoured("previous_response_id", "an earlier answer of this episode and role"),
    **_honoured("tools", "of type `function` (also `strict`), `custom` and `namespace`"),
    **_honoured("text.format", "[constraints.md](constraints.md)"),
    **_honoured("include", "`reasoning.encrypted_content`, `message.output_text.logprobs`; others are noted"),
    **_honoured("max_output_tokens"),
    **_honoured("stream_options", "`include_obfuscation: false`"),
    **_honoured("store", "in both cases an episode keeps its answers until it ends"),
    **_noted("text.verbosity", "state the wanted length in the prompt"),
    **_noted("reasoning.effort reasoning.mode", _REASONING),
    **_noted("reasoning.summary reasoning.generate_summary", "answers have the reasoning itself"),
    **_noted("reasoning.context", "[`job.history`](timelines.md#jobhistory) decides", "auto"),
    **_noted("metadata", "the answer repeats it"),
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
