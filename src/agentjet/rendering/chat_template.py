"""The chat template of a model: `ChatTemplate`, the sandbox in which it runs, and the trial that finds its tool format.

The template is Jinja source from the folder of the model. It runs in a sandbox with the filters and globals of
`transformers.apply_chat_template`. Before rendering, every string from a client is guarded: the noncharacter `GUARD` is
inserted into each control-token literal, and at ends that could complete one. A literal that is whole after rendering
is a control token; the guard is removed from the rest.

The trial (`try_tools`): the template renders known calls, and the format that reads these calls from the text is taken.
A template that writes no calls has the format whose tags its prompt shows.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentjet.errors import ConfigError, InvalidRequest, did_you_mean
from agentjet.rendering.formats import (
    REASONING_FORMATS,
    THINK,
    TOOL_FORMATS,
    ParsedCall,
    ReasoningFormat,
    tags_of,
    write_calls,
)
from agentjet.rendering.parser import split_calls
from agentjet.types import Conversation, Message, ToolCall

log = logging.getLogger(__name__)

TEMPLATES = Path(__file__).parent / "templates"
SMOLLM2 = "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788"
"""SHA-256 of the chat template that all SmolLM2-Instruct models have."""


def check_tool_format(name: str) -> None:
    """Raises `ConfigError` for a name that is neither a tool format nor `auto`."""
    if name not in ("auto", *TOOL_FORMATS):
        known = ", ".join(("auto", *TOOL_FORMATS))
        hint = did_you_mean(name, TOOL_FORMATS, "choose one of these")
        raise ConfigError(f"model.tool_format = {name!r} is unknown: {hint} Known: {known}")


def template_for(model_name: str, own_template: str | Mapping[str, str], tool_format: str = "auto") -> tuple[str, str]:
    """Returns the chat template (Jinja source) and the tool format of a model. `own_template` is that of its folder.

    A model may have named templates. Then `tool_use` renders conversations with tools, and `default` the others: the
    rule of `transformers`. SmolLM2's exact template ignores tools, so one of this package replaces it. The rest is
    identical. `tool_format` names a format, or `auto`. Raises `ConfigError` for a model without a template.
    """
    own = own_template if isinstance(own_template, str) else _of_names(model_name, own_template)
    is_bundled = not own.strip() and Path(model_name).name.lower() == "smollm2-135m"
    if is_bundled or hashlib.sha256(own.strip().encode()).hexdigest() == SMOLLM2:
        own = (TEMPLATES / "smollm2.jinja").read_text(encoding="utf-8")
    if not own.strip():
        raise ConfigError(
            f"model {model_name!r} has no chat template: train a chat model, or add chat_template.jinja to it"
        )
    trial = try_tools(own, tool_format)
    if trial.remark:
        log.warning("%s: %s", model_name, trial.remark)
    return own, trial.tool_format


def _of_names(model_name: str, templates: Mapping[str, str]) -> str:
    """Returns one template that renders as a model's named templates. Raises `ConfigError` without a default."""
    if "default" not in templates:
        names = ", ".join(map(repr, sorted(templates)))
        raise ConfigError(
            f"model {model_name!r} has chat templates named {names} and none named 'default': add the one to use as "
            "chat_template.jinja to its folder"
        )
    if "tool_use" not in templates:
        return templates["default"]
    # Jinja drops the last newline of a source. The plus signs keep the other white space at the ends of the two.
    with_tools, without = (templates[name].removesuffix("\n") for name in ("tool_use", "default"))
    return f"{{% if tools +%}}{with_tools}{{%+ else +%}}{without}{{%+ endif %}}"


_DICT_NAMES = frozenset(dir(dict))
"""Attributes of a dict. For these names, Jinja decides between key and method, and if the method may be called."""
_LOOP_NAMES = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length", "previtem", "nextitem"})


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a fast path for plain dicts and loop variables. Build with `make_sandbox`.

    Templates read these thousands of times in a call. Jinja's safety check of each access raises and catches
    exceptions; for plain dicts and loops its result is known.
    """

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is dict and type(argument) is str and argument not in _DICT_NAMES:
            return obj[argument] if argument in obj else self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _LOOP_NAMES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def make_sandbox() -> TemplateSandbox:
    """Returns a sandbox with the filters and globals of `transformers.apply_chat_template`."""
    environment = TemplateSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class _Generation(jinja2.ext.Extension):
    """Ignores the tag `{% generation %}`, which marks assistant text for training on transcripts."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


GUARD, SLOT, MARK = "\ufdd0", "\ufdd1", "\ufdd2"
"""Unicode reserves these noncharacters for internal use. `MARK` is for callers of `ChatTemplate.render`."""
_RESERVED = re.compile(f"[{GUARD}{SLOT}]")
_TEMPLATE_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})
"""Template variables that only this module sets."""


@dataclass(frozen=True, slots=True)
class BodySlot:
    """The place of the body of assistant message `index`.

    If `in_call` is true, the slot replaces only the name of the first tool call. The body then reaches from the start
    of the turn to the control token that ends it.
    """

    index: int
    in_call: bool = False


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation: n + 1 plain `texts`, separated by n `marks`.

    A mark is the literal of a control token that the template wrote, or a slot.
    """

    texts: list[str]
    marks: list[str | BodySlot]


class ChatTemplate:
    """Renders conversations to text, control tokens and slots."""

    def __init__(
        self,
        source: str,
        *,
        control: Collection[str],
        bos_token: str = "",
        eos_token: str = "",
        tool_format: str = "",
        trial: ToolTrial | None = None,
    ) -> None:
        """`control` contains the literals of the control tokens. Raises `ConfigError` if the source is invalid."""
        environment = make_sandbox()
        try:
            self._template = environment.from_string(source)
            variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error
        self._supports_tools = "tools" in variables
        self._supports_tool_calls = "tool_calls" in source
        self._supports_developer = "developer" in source
        self._splits_reasoning = re.search(r"""['"]</think>['"]\s+in\b""", source) is not None
        """True if the template searches for `</think>` in assistant messages. It would not find the guarded literal."""
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tool_format = TOOL_FORMATS[tool_format] if tool_format else None
        has_ids = self._tool_format is not None and "{id}" in self._tool_format.call
        self._short_ids = has_ids or re.search(r"length\s*!=\s*9\b", source) is not None
        self._arguments_as_text = trial is not None and trial.arguments_as_text
        self._omits_calls = trial is not None and not trial.writes_calls
        self._literals = _Literals(control)
        self.split, self.guarded = self._literals.split, self._literals.guarded

    def render(
        self,
        conversation: Conversation,
        *,
        slots: Collection[int] = (),
        call_slots: Collection[int] = (),
        generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        own_ids: Mapping[str, str] | None = None,
    ) -> Rendered:
        """Returns the rendered conversation.

        The assistant messages in `slots` become slots, including their tool calls. In the messages in
        `call_slots`, the name of the first tool call becomes a slot, and only the calls stay: some templates need them.
        `variables` are additional template variables, none of `OWN_VARIABLES`. `own_ids` has the ids of calls as the
        model wrote them.

        Raises `InvalidRequest` if the template refuses the conversation or ignores its tools.
        """
        self._refuse_unknown(conversation, slots)
        if call_slots and self._omits_calls:
            raise InvalidRequest("the model's chat template leaves tool calls out", code="template_error")
        messages: list[dict[str, Any]] = []
        ids, num_calls = dict(own_ids or {}), 0
        for i, message in enumerate(conversation.messages):
            for call in message.tool_calls:
                if self._tool_format and self._tool_format.id and call.id not in (own_ids or {}):
                    ids[call.id] = self._tool_format.id.format(name=call.name, index=num_calls)
                num_calls += 1
            if i in slots:
                messages.append({"role": "assistant", "content": f"{SLOT}{i}{SLOT}"})
                continue
            if i in call_slots:
                message = replace(message, content="", reasoning="")
            messages.append(self._plain(message, ids))
            if i in call_slots:
                messages[i]["tool_calls"][0]["function"]["name"] = f"{SLOT}{i}{SLOT}"
        tools = [self._literals.guarded(dict(tool), "tools") for tool in conversation.tools] or None
        given = {**(variables or {}), "messages": messages, "add_generation_prompt": generation_prompt}
        try:
            output = self._output(given, tools)
        except _TEMPLATE_FAULTS as error:
            is_of_tools = tools is not None and self._renders(given)
            what, param = ("these tools", "tools") if is_of_tools else ("this conversation", "messages")
            raise InvalidRequest(
                f"the model's chat template refuses {what}: {error}", code="template_error", param=param
            ) from error
        pieces = self._literals.split(output)
        slot_of = {f"{SLOT}{i}{SLOT}": BodySlot(i, i in call_slots) for i in (*slots, *call_slots)}
        texts, marks = pieces[::2], [slot_of.get(mark, mark) for mark in pieces[1::2]]
        for at in range(len(marks) - 1, -1, -1) if call_slots else ():
            # Some templates write the name of a called function again before its result: only the first is a slot.
            slot = marks[at]
            if isinstance(slot, BodySlot) and slot.in_call and slot in marks[:at]:
                name = conversation.messages[slot.index].tool_calls[0].name
                texts[at : at + 2] = [texts[at] + name + texts[at + 1]]
                del marks[at]
        if any(SLOT in text for text in texts):
            raise InvalidRequest("the model's chat template changes the text of a slot", code="template_error")
        return Rendered([text.replace(GUARD, "") for text in texts], marks)

    def _output(self, given: Mapping[str, Any], tools: Sequence[Any] | None) -> str:
        return self._template.render(**given, tools=tools, documents=None, **self._tokens)

    def _renders(self, given: Mapping[str, Any]) -> bool:
        """True if the template takes a conversation without its tools."""
        try:
            self._output(given, None)
        except _TEMPLATE_FAULTS:
            return False
        return True

    def _plain(self, message: Message, ids: Mapping[str, str]) -> dict[str, Any]:
        """Returns a message as templates expect it: without empty fields, and with JSON arguments as values."""
        role = "system" if message.role == "developer" and not self._supports_developer else message.role
        if self._splits_reasoning and role == "assistant" and not message.reasoning and "</think>" in message.content:
            reasoning, _, _ = message.content.partition("</think>")
            content = message.content.rpartition("</think>")[2].lstrip("\n")
            message = replace(message, content=content, reasoning=reasoning.rpartition("<think>")[2].strip("\n"))
        guarded = self._literals.guarded
        plain: dict[str, Any] = {"role": role, "content": guarded(message.content)}
        if message.reasoning:
            plain["reasoning_content"] = plain["thinking"] = guarded(message.reasoning)
        if message.tool_calls and self._omits_calls and self._tool_format:
            calls = [ParsedCall(guarded(call.name), guarded(call.arguments)) for call in message.tool_calls]
            between = "\n" if message.content else ""
            plain["content"] += between + write_calls(self._tool_format, calls)
        elif message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": guarded(self._call_id(ids.get(call.id, call.id))),
                    "type": "function",
                    "function": {
                        "name": guarded(call.name),
                        "arguments": guarded(call.arguments if self._arguments_as_text else _json_object(call)),
                    },
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id:
            plain["tool_call_id"] = guarded(self._call_id(ids.get(message.tool_call_id, message.tool_call_id)))
        if message.name:
            plain["name"] = guarded(message.name)
        return plain

    def _call_id(self, id_: str) -> str:
        """Returns a valid id for Mistral's models, whose ids are nine letters or digits."""
        if not self._short_ids or (len(id_) == 9 and id_.isalnum()):
            return id_
        return hashlib.blake2b(id_.encode(errors="surrogatepass")).hexdigest()[:9]

    def _refuse_unknown(self, conversation: Conversation, slots: Collection[int]) -> None:
        if not conversation.messages:
            raise InvalidRequest("messages is empty", param="messages")
        if conversation.tools and not self._supports_tools:
            raise InvalidRequest("this model's chat template ignores tools", code="tools_not_supported", param="tools")
        rendered = (message for i, message in enumerate(conversation.messages) if i not in slots)
        writes_calls = self._supports_tool_calls or (self._omits_calls and self._tool_format)
        if not writes_calls and any(message.tool_calls for message in rendered):
            raise InvalidRequest(
                "this model's chat template ignores tool_calls of earlier messages",
                code="tools_not_supported",
                param="messages",
            )


class _Literals:
    """The control-token literals, prepared for searches. Longer literals come first and take precedence."""

    def __init__(self, literals: Collection[str]) -> None:
        ordered = sorted(literals, key=lambda literal: (-len(literal), literal))
        self.split = re.compile(rf"({'|'.join([*map(re.escape, ordered), rf'{SLOT}[0-9]+{SLOT}'])})").split
        """Splits rendered text into n + 1 texts and, between them, n literals or slots."""
        # The look-ahead finds overlapping literals. Grouping by the first character makes the scan of plain text fast.
        firsts = {literal[0]: [other[1:] for other in ordered if other[0] == literal[0]] for literal in ordered}
        self._first_of_literal = re.compile(
            "|".join(f"{re.escape(c)}(?={'|'.join(map(re.escape, rests))})" for c, rests in firsts.items()) or r"(?!)"
        )
        self._ordered = ordered
        self._longest = max(map(len, ordered), default=0)
        heads = {literal[:n] for literal in ordered for n in range(1, len(literal))}
        tails = {literal[n:] for literal in ordered for n in range(1, len(literal))}
        self._heads_by_end = {c: tuple(head for head in heads if head[-1] == c) for c in {head[-1] for head in heads}}
        self._tails_by_start = {c: tuple(tail for tail in tails if tail[0] == c) for c in {tail[0] for tail in tails}}

    def _may_begin_at_end_of(self, text: str) -> bool:
        return text.endswith(self._heads_by_end.get(text[-1:], ()))

    def _may_end_at_start_of(self, text: str) -> bool:
        """True also if `text` is inside a literal. Words such as "object" in a JSON schema must stay unchanged."""
        if text.isalnum():
            return False
        if text.startswith(self._tails_by_start.get(text[:1], ())):
            return True
        return 0 < len(text) < self._longest and any(text in literal for literal in self._ordered)

    def guarded(self, value: Any, param: str = "messages") -> Any:
        """Returns a copy of a value with the guard in every string of it.

        Raises `InvalidRequest` for the request parameter `param` if a string contains a reserved noncharacter.
        """
        if isinstance(value, str):
            if not value.isascii() and (found := _RESERVED.search(value)):
                name = f"U+{ord(found[0]):04X}"
                message = f"{param}: the text contains {name}, which Unicode reserves for internal use: remove it."
                raise InvalidRequest(message, code="invalid_text", param=param)
            marked = self._first_of_literal.sub(lambda found: found[0] + GUARD, value)
            before = GUARD if self._may_end_at_start_of(value) else ""
            return before + marked + (GUARD if self._may_begin_at_end_of(value) else "")
        if isinstance(value, Mapping):
            return {self.guarded(key, param): self.guarded(item, param) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guarded(item, param) for item in value]
        return value


def _json_object(call: ToolCall) -> Any:
    """Returns the arguments as a value if they are a JSON object, else as text."""
    try:
        value = call.value()
    except ValueError:
        return call.arguments
    return value if isinstance(value, dict) else call.arguments


# ---- the trial of a template -----------------------------------------------------------------------------------------

QUESTION, RESULT = "Where is it?", "12 degrees"
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "find_city",
        "description": "Finds a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name"},
                "code": {"type": "string", "description": "Its code"},
                "options": {"type": "object", "description": "More"},
            },
            "required": ["city"],
        },
    },
}
PROBE_ARGUMENTS = (
    {"city": "Zürich", "code": "007", "options": {"days": [1, 2.5], "deep": {"on": True, "none": None}}},
    {"city": "Rome"},
)


@dataclass(frozen=True, slots=True)
class ToolTrial:
    """The result of rendering known calls with a template."""

    tool_format: str
    remark: str = ""
    """A sentence for the log, or empty."""
    writes_calls: bool = True
    """False if the template leaves the calls of a turn out. They are then written into its text."""
    arguments_as_text: bool = False
    """True if the template needs arguments as JSON text."""


@lru_cache(maxsize=32)
def try_tools(source: str, tool_format: str = "auto") -> ToolTrial:
    """Returns the tool format that reads the calls that a template writes; with another `tool_format`, that format.

    Raises `ConfigError` if the template is invalid.
    """
    names = tuple(TOOL_FORMATS) if tool_format == "auto" else (tool_format,)
    forced = "" if tool_format == "auto" else tool_format
    refused = "calls with tools are refused. model.tool_format forces a format"
    written = False
    for as_text in (False, True):
        template = ChatTemplate(source, control=(), trial=ToolTrial("", arguments_as_text=as_text))
        for num_calls in (2, 1):
            for is_followed in (False, True):
                texts = _rendered_calls(template, num_calls, is_followed)
                written = written or bool(texts)
                fitting = [name for name in names if any(_reads(text, name, num_calls) for text in texts)]
                if fitting:
                    return _chosen(fitting, texts, num_calls, arguments_as_text=as_text)
    if written:
        remark = (
            f"model.tool_format = {forced!r} does not read the calls that the chat template writes"
            if forced
            else f"no tool format reads the calls that the chat template writes: {refused}"
        )
        return ToolTrial(forced, remark)
    prompt, error = _prompt_with_tools(source)
    if error:
        return ToolTrial(forced, f"one message of a user: {error}", writes_calls=False)
    if forced or not prompt:
        return ToolTrial(forced, "" if forced else f"the chat template has no tools: {refused}", writes_calls=False)
    shown = [name for name in names if tags_of(name) and all(tag in prompt for tag in tags_of(name))]
    if not shown:
        return ToolTrial("", f"the chat template writes no calls and shows no known syntax of calls: {refused}")
    return ToolTrial(max(shown, key=lambda name: len(tags_of(name))), writes_calls=False)


def _rendered_calls(template: ChatTemplate, num_calls: int, is_followed: bool) -> list[str]:
    """Returns the texts in which the calls may stand: after the question, and after the generation prompt.

    Empty if the template refuses the conversation, or writes no calls.
    """
    name = PROBE_TOOL["function"]["name"]  # type: ignore[index]
    calls = tuple(
        ToolCall(f"functions.{name}:{i}", name, json.dumps(arguments, ensure_ascii=False))
        for i, arguments in enumerate(PROBE_ARGUMENTS[:num_calls])
    )
    asked = Conversation((Message("user", QUESTION),), (PROBE_TOOL,))
    results = [Message("tool", RESULT, tool_call_id=call.id, name=name) for call in calls if is_followed]
    called = replace(asked, messages=(*asked.messages, Message("assistant", tool_calls=calls), *results))
    try:
        prompt = "".join(template.render(asked).texts)
        text = "".join(template.render(called, generation_prompt=False).texts)
    except InvalidRequest:
        return []
    texts = [text.rpartition(QUESTION)[2], text.removeprefix(_common(prompt, text))]
    texts = [text.partition(RESULT)[0] for text in texts]
    return texts if any(name in text for text in texts) else []


def _common(one: str, other: str) -> str:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(char for char, _ in same)


def _reads(text: str, tool_format: str, num_calls: int) -> bool:
    name = PROBE_TOOL["function"]["name"]  # type: ignore[index]
    found = split_calls(text, tool_format, (PROBE_TOOL,))[1]
    expected = [(name, arguments) for arguments in PROBE_ARGUMENTS[:num_calls]]
    return [(call.name, json.loads(call.arguments)) for call in found] == expected


def _chosen(fitting: Sequence[str], texts: Sequence[str], num_calls: int, *, arguments_as_text: bool) -> ToolTrial:
    """Returns the format that writes exactly the text of the template, then the one with the longest marker."""
    name = PROBE_TOOL["function"]["name"]  # type: ignore[index]
    calls = [ParsedCall(name, json.dumps(a, ensure_ascii=False)) for a in PROBE_ARGUMENTS[:num_calls]]
    exact = [name for name in fitting if any(write_calls(TOOL_FORMATS[name], calls) in text for text in texts)]
    marked = [name for name in exact or fitting if TOOL_FORMATS[name].marker] or [*fitting]
    best = max(marked, key=lambda name: len(TOOL_FORMATS[name].marker))
    others = ", ".join(name for name in marked if name != best)
    remark = f"tools: {best} is used, and {others} reads its calls, too. model.tool_format chooses" if others else ""
    return ToolTrial(best, remark, arguments_as_text=arguments_as_text)


def _prompt_with_tools(source: str) -> tuple[str, str]:
    """Returns the prompt of a question with a tool, "" if the template ignores tools; and why it refuses a question."""
    asked = Conversation((Message("user", QUESTION),), (PROBE_TOOL,))
    template = ChatTemplate(source, control=())
    try:
        prompt = "".join(template.render(asked).texts)
    except InvalidRequest:
        try:
            template.render(replace(asked, tools=()))
        except InvalidRequest as error:
            return "", str(error)
        return "", ""
    return prompt if str(PROBE_TOOL["function"]["name"]) in prompt else "", ""  # type: ignore[index]


def find_reasoning(source: str, control: Collection[str]) -> ReasoningFormat | None:
    """Returns the block of reasoning that a template writes, or whose own control tokens the vocabulary has."""
    for reasoning in REASONING_FORMATS:
        if reasoning is THINK:  # Models without reasoning may have its tokens, and templates may write its end only.
            if reasoning.closing in source:
                return reasoning
            continue
        is_written = reasoning.closing in source and reasoning.opening.rstrip("\n") in source
        if is_written or {reasoning.opening, reasoning.closing} <= set(control):
            return reasoning
    return None
