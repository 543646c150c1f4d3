"""Which chat template and tool format a model is used with. Torch-free; the worker asks it when it loads a model.

The sandbox that chat templates run in: the one of `transformers.apply_chat_template`, same filters, same globals.

Templates look into messages and at their loop's variables thousands of times a call, and Jinja's sandbox asks each time
whether that is safe, along a way that raises and catches exceptions. Plain dicts of ours and loops are known to be, so
they have a short way, with the same result.

A model's chat template, run so that control tokens in *user* text stay text.

The template is Jinja source from a model's folder, compiled in the sandbox `transformers` uses, with the same filters
and globals. Before rendering, every string that came from a client is guarded: a private-use character that occurs
nowhere else is put into each control-token literal, and at ends that could complete one. What the template then writes
whole is a control token; the guard is taken out of the rest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, filterfalse
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentjet.errors import ConfigError, InvalidRequest
from agentjet.types import Conversation, Message, ToolCall

TEMPLATES = Path(__file__).parent / "templates"


def template_for(model_name: str, own_template: str) -> tuple[str, str]:
    """The chat template (Jinja source) and the tool format of a model, from the template in its folder.

    SmolLM2's own template ignores tools; ours writes the same and knows them. Every other model keeps its own.
    Raises `ConfigError` for a model without a template.
    """
    if _is_smollm2(model_name, own_template):
        return (TEMPLATES / "smollm2.jinja").read_text(encoding="utf-8"), "hermes"
    if not own_template.strip():
        raise ConfigError(
            f"model {model_name!r} has no chat template: train a chat model, or add chat_template.jinja to it"
        )
    return own_template, _tool_format(own_template)


def _is_smollm2(model_name: str, own_template: str) -> bool:
    if not own_template.strip():
        return Path(model_name).name.lower() == "smollm2-135m"
    return "AI assistant named SmolLM, trained by Hugging Face" in own_template and "tools" not in own_template


def _tool_format(template: str) -> str:
    """How a template writes tool calls; empty when it takes no tools or writes them in a way we do not know."""
    if "tools" not in template:
        return ""
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return "mistral"
    return "llama3" if '"parameters": ' in template else ""


_OF_DICTS = frozenset(dir(dict))
"""Names that a dict has as attributes: which of key and method is meant, and whether it may be called, is Jinja's to
decide.
"""
_OF_LOOPS = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length", "previtem", "nextitem"})


class Sandbox(ImmutableSandboxedEnvironment):
    """Build with `sandbox()`."""

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is dict and type(argument) is str and argument not in _OF_DICTS:
            return obj[argument] if argument in obj else self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def sandbox() -> Sandbox:
    """A sandbox as `transformers.apply_chat_template` has it."""
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for training on transcripts; here it is transparent."""

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


_PRIVATE_USE = range(0xF0000, 0xF1000)
_TEMPLATE_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip


OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})
"""Variables of a template that nobody else sets."""


@dataclass(frozen=True, slots=True)
class BodySlot:
    """The place of assistant message `index`'s body. `in_call` says it stands for the name of its first tool call only:
    the body reaches back to where the turn began, and on to the control token that ends it.
    """

    index: int
    in_call: bool = False


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation: plain `texts`, and between each two of them what `marks` it: a control token that the
    template wrote, by its literal, or a slot.
    """

    texts: list[str]
    marks: list[str | BodySlot]


class ChatTemplate:
    """Turns a conversation into text, control tokens and slots."""

    def __init__(self, source: str, *, control: Collection[str], bos_token: str = "", eos_token: str = "") -> None:
        """`control` holds the literals of the control tokens. Raises `ConfigError` when the source is no template."""
        environment = sandbox()
        try:
            self._template = environment.from_string(source)
            variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error
        self._knows_tools = "tools" in variables
        self._knows_tool_calls = "tool_calls" in source
        self._knows_developer = "developer" in source
        self._splits_reasoning = re.search(r"""['"]</think>['"]\s+in\b""", source) is not None
        """The template looks for `</think>` in the content of assistant messages; guarded, it would not find it."""
        self._short_ids = re.search(r"length\s*!=\s*9\b", source) is not None
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._literals = _Literals(control)

    def render(
        self,
        conversation: Conversation,
        *,
        slots: Collection[int] = (),
        call_slots: Collection[int] = (),
        generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The rendered conversation; the bodies of the assistant messages in `slots` are left open, tool calls and all.

        `variables` are further ones for the template, none of `OWN_VARIABLES`. Messages in `call_slots` stay messages
        with tool calls, which is what some templates insist on: only the first call's name is open.
        Raises `InvalidRequest` when the template refuses the conversation, or ignores the tools it brings.
        """
        self._refuse_unknown(conversation, slots)
        guard, slot_mark = _unused_characters(conversation)
        guarded = _Guard(self._literals, guard)
        messages: list[dict[str, Any]] = []
        for i, message in enumerate(conversation.messages):
            open_slot = f"{slot_mark}{i}{slot_mark}"
            if i in slots:
                messages.append({"role": "assistant", "content": open_slot})
                continue
            messages.append(self._plain(message, guarded))
            if i in call_slots:
                messages[i]["tool_calls"][0]["function"]["name"] = open_slot
        tools = [guarded(dict(tool)) for tool in conversation.tools] or None
        try:
            output = self._template.render(
                **(variables or {}),
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._tokens,
            )
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequest(
                f"the model's chat template refuses this conversation: {error}", code="template_error", param="messages"
            ) from error
        pieces = re.split(rf"({self._literals.pattern}|{slot_mark}\d+{slot_mark})", output)
        texts = pieces[::2]
        slot_of = {f"{slot_mark}{i}{slot_mark}": BodySlot(i, i in call_slots) for i in (*slots, *call_slots)}
        marks = [slot_of.get(mark, mark) for mark in pieces[1::2]]
        if any(slot_mark in text for text in texts):
            raise InvalidRequest("the model's chat template rewrites what fills a slot", code="template_error")
        return Rendered([text.replace(guard, "") for text in texts] if guard in output else texts, marks)

    def _plain(self, message: Message, guarded: _Guard) -> dict[str, Any]:
        """A message as templates expect it: absent things are absent, arguments are values where they are JSON."""
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        if self._splits_reasoning and role == "assistant" and not message.reasoning and "</think>" in message.content:
            reasoning, _, _ = message.content.partition("</think>")
            content = message.content.rpartition("</think>")[2].lstrip("\n")
            message = replace(message, content=content, reasoning=reasoning.rpartition("<think>")[2].strip("\n"))
        plain: dict[str, Any] = {"role": role, "content": guarded(message.content)}
        if message.reasoning:
            plain["reasoning_content"] = plain["thinking"] = guarded(message.reasoning)
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": guarded(self._call_id(call.id)),
                    "type": "function",
                    "function": {"name": guarded(call.name), "arguments": guarded(_json_object(call))},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id:
            plain["tool_call_id"] = guarded(self._call_id(message.tool_call_id))
        if message.name:
            plain["name"] = guarded(message.name)
        return plain

    def _call_id(self, id_: str) -> str:
        """Mistral's templates refuse ids that are not nine letters or digits; nobody else's are, so they get such."""
        if not self._short_ids or (len(id_) == 9 and id_.isalnum()):
            return id_
        return hashlib.blake2b(id_.encode(errors="surrogatepass")).hexdigest()[:9]

    def _refuse_unknown(self, conversation: Conversation, slots: Collection[int]) -> None:
        if not conversation.messages:
            raise InvalidRequest("messages is empty: there is nothing to answer", param="messages")
        if conversation.tools and not self._knows_tools:
            raise InvalidRequest("this model's chat template ignores tools", code="tools_not_supported", param="tools")
        unseen = (message for i, message in enumerate(conversation.messages) if i not in slots)
        if not self._knows_tool_calls and any(message.tool_calls for message in unseen):
            raise InvalidRequest(
                "this model's chat template ignores tool_calls of earlier messages",
                code="tools_not_supported",
                param="messages",
            )


class _Literals:
    """The control-token literals, prepared for searching. Longer ones come first, so that none hides inside another."""

    def __init__(self, literals: Collection[str]) -> None:
        ordered = sorted(literals, key=lambda literal: (-len(literal), literal))
        self.pattern = "|".join(map(re.escape, ordered)) or r"(?!)"
        # A look-ahead finds overlapping literals too; grouping by first character keeps the scan of plain text fast.
        firsts = {literal[0]: [other[1:] for other in ordered if other[0] == literal[0]] for literal in ordered}
        self.first_of_literal = re.compile(
            "|".join(f"{re.escape(c)}(?={'|'.join(map(re.escape, rests))})" for c, rests in firsts.items()) or r"(?!)"
        )
        self._ordered = ordered
        self._longest = max(map(len, ordered), default=0)
        heads = {literal[:n] for literal in ordered for n in range(1, len(literal))}
        tails = {literal[n:] for literal in ordered for n in range(1, len(literal))}
        self._heads_by_end = {c: tuple(head for head in heads if head[-1] == c) for c in {head[-1] for head in heads}}
        self._tails_by_start = {c: tuple(tail for tail in tails if tail[0] == c) for c in {tail[0] for tail in tails}}

    def may_begin_at_end_of(self, text: str) -> bool:
        return text.endswith(self._heads_by_end.get(text[-1:], ()))

    def may_end_at_start_of(self, text: str) -> bool:
        """True too when `text` lies within a literal. Bare words (a JSON schema's "object") must compare equal."""
        if text.isalnum():
            return False
        if text.startswith(self._tails_by_start.get(text[:1], ())):
            return True
        return 0 < len(text) < self._longest and any(text in literal for literal in self._ordered)


class _Guard:
    """Copies values, guarding every string in them."""

    def __init__(self, literals: _Literals, guard: str) -> None:
        self._literals = literals
        self._mark = guard
        self._marked: Callable[[re.Match[str]], str] = lambda found: found[0] + guard

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._guard(value)
        if isinstance(value, Mapping):
            return {self(key): self(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self(item) for item in value]
        return value

    def _guard(self, text: str) -> str:
        marked = self._literals.first_of_literal.sub(self._marked, text)
        if self._literals.may_end_at_start_of(text):
            marked = self._mark + marked
        if self._literals.may_begin_at_end_of(text):
            marked += self._mark
        return marked


def _json_object(call: ToolCall) -> Any:
    """Arguments as a value when they are a JSON object, else as the text they are."""
    try:
        value = call.value()
    except ValueError:
        return call.arguments
    return value if isinstance(value, dict) else call.arguments


def _unused_characters(conversation: Conversation) -> tuple[str, str]:
    """Two private-use characters that occur nowhere in the conversation."""
    text = "".join(filterfalse(str.isascii, chain.from_iterable(map(_texts_of, conversation.messages))))
    text += "".join(_strings(conversation.tools))
    free = (chr(code) for code in _PRIVATE_USE if chr(code) not in text)
    try:
        return next(free), next(free)
    except StopIteration:
        raise InvalidRequest("the messages use thousands of different private-use characters") from None


def _texts_of(message: Message) -> Sequence[str]:
    texts = (message.content, message.reasoning, message.tool_call_id, message.name)
    if not message.tool_calls:
        return texts
    calls = [text for call in message.tool_calls for text in (call.id, call.name, call.arguments)]
    escaped = (call for call in message.tool_calls if "\\" in call.arguments)
    # Escapes in JSON arguments become characters.
    return [*texts, *calls, *(text for call in escaped for text in _strings(_json_object(call)))]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(list(value.keys()))
        yield from _strings(list(value.values()))
    elif isinstance(value, Iterable):
        for item in value:
            yield from _strings(item)
