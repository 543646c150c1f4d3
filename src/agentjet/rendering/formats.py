"""The syntax of tool calls and of reasoning, as data, and the reader of one call.

A tool format has the name of its first users. It is the text of a call with holes (see `ToolFormat`), so that the
reader, the grammar and `write_calls` read the same lines. `TOOL_FORMATS` has all formats, `REASONING_FORMATS` the
blocks of reasoning.

The reader accepts other white space than the format writes. A call without its closing is a call if its arguments are
complete: the completion may have been cut, or its closing is the end token, which is not displayed. `parser` finds the
calls of a completion.

Values between tags are text. The schema of the tool gives the type: a string stays a string, anything else is JSON, or
a Python literal (Seed-OSS), or else a string.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import regex

from agentjet.types import Message

# ---- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The text of tool calls: `opening`, calls with `separator` between them, `closing`.

    `call` has holes:

    * `{name}`: the function;
    * `{id}`, `{index}`: an id, and the number of the call in the conversation;
    * `{arguments}`: a JSON object. In quotes, `{name}` is a JSON string, and the whole call is a JSON object;
    * `{parameters}`: the text `parameter` for each argument, with the holes `{key}`, `{value}`, and `{is_text}`: `true`
      if the value is a string;
    * `{keywords}`: keyword arguments of Python;
    * `{bare}`: an object with bare keys, and strings in Gemma's quotes.
    """

    call: str
    separator: str = ""
    opening: str = ""
    closing: str = ""
    parameter: str = ""
    prefix: str = ""
    """A control token that may stand before a call without an opening."""
    ends: tuple[str, ...] = ()
    """Control tokens that end a turn with calls, besides the end tokens of the model."""
    python: bool = False
    """True if values that are not text are written as by Python's `str`."""

    @property
    def is_json(self) -> bool:
        """True if a call is a JSON object that has the name, too."""
        return '"{name}"' in self.call and "{arguments}" in self.call

    @property
    def id(self) -> str:
        """The text of an id in the place of the name, with holes. Empty if the format has none."""
        found = re.search(r"[\w.]*\{name\}\W\{index\}", self.call)
        return found[0] if found else ""

    @property
    def marker(self) -> str:
        """The text that announces calls. Empty if a call has none."""
        head = self.opening or HOLE.split(self.call)[0].partition('{"')[0]
        return head.partition("\n")[0].rstrip("[")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The text around a block of reasoning. With an empty `opening`, every completion begins inside the block."""

    opening: str
    closing: str
    answer: tuple[str, str] = ("", "")
    """Text around the answer, which is not content."""
    channels: bool = False
    """True if a completion is a sequence of messages in channels, as in harmony."""

    @property
    def name(self) -> str:
        return (self.opening or self.closing).strip()


HARMONY = "harmony"
QUOTE = '<|"|>'
"""Gemma's quotation mark."""

TOOL_FORMATS = {
    "hermes": ToolFormat('<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>', "\n"),
    "mistral": ToolFormat(
        '{"name": "{name}", "arguments": {arguments}, "id": "{id}"}', ", ", opening="[TOOL_CALLS][", closing="]"
    ),
    "llama3": ToolFormat(
        '{"name": "{name}", "parameters": {arguments}}', "; ", prefix="<|python_tag|>", ends=("<|eom_id|>",)
    ),
    "qwen3-coder": ToolFormat(
        "<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
        "\n",
        parameter="<parameter={key}>\n{value}\n</parameter>\n",
    ),
    "seed-oss": ToolFormat(
        "<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>",
        "\n",
        parameter="<parameter={key}>{value}</parameter>\n",
        python=True,
    ),
    "minimax-m2": ToolFormat(
        '<invoke name="{name}">\n{parameters}</invoke>',
        "\n",
        opening="<minimax:tool_call>\n",
        closing="\n</minimax:tool_call>",
        parameter='<parameter name="{key}">{value}</parameter>\n',
    ),
    "glm-4.5": ToolFormat(
        "<tool_call>{name}\n{parameters}</tool_call>",
        "\n",
        parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        ends=("<|observation|>",),
    ),
    "glm-4.7": ToolFormat(
        "<tool_call>{name}{parameters}</tool_call>",
        parameter="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
        ends=("<|observation|>",),
    ),
    "deepseek-v3.1": ToolFormat(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        opening="<｜tool▁calls▁begin｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
    "deepseek-r1": ToolFormat(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        "\n",
        opening="<｜tool▁calls▁begin｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.2": ToolFormat(
        '<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>',
        "\n",
        opening="<｜DSML｜function_calls>\n",
        closing="\n</｜DSML｜function_calls>",
        parameter='<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>\n',
    ),
    "kimi-k2": ToolFormat(
        "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        opening="<|tool_calls_section_begin|>",
        closing="<|tool_calls_section_end|>",
    ),
    "mistral-v11": ToolFormat("[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{arguments}"),
    "mistral-v13": ToolFormat("[TOOL_CALLS]{name}[ARGS]{arguments}"),
    "gemma4": ToolFormat("<|tool_call>call:{name}{bare}<tool_call|>", ends=("<|tool_response>",)),
    "granite3": ToolFormat('{"name": "{name}", "arguments": {arguments}}', ", ", opening="<|tool_call|>[", closing="]"),
    "nemotron-nano2": ToolFormat(
        '{"name": "{name}", "arguments": {arguments}}', ", ", opening="<TOOLCALL>[", closing="]</TOOLCALL>"
    ),
    "apriel": ToolFormat(
        '{"name": "{name}", "arguments": {arguments}}', ", ", opening="<tool_calls>[", closing="]</tool_calls>"
    ),
    "apertus": ToolFormat(
        '{"{name}": {arguments}}',
        ", ",
        opening="<|tools_prefix|>[",
        closing="]<|tools_suffix|>",
        ends=("<|tools_suffix|>",),
    ),
    "command-r7b": ToolFormat(
        '{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {arguments}}',
        ",\n    ",
        opening="<|START_ACTION|>[\n    ",
        closing="\n]<|END_ACTION|>",
    ),
    "command-r-plus": ToolFormat(
        '{\n        "tool_name": "{name}",\n        "parameters": {arguments}\n    }',
        ",\n    ",
        opening="Action:\n```json\n[\n    ",
        closing="\n]```",
    ),
    "lfm2": ToolFormat(
        "{name}({keywords})", ", ", opening="<|tool_call_start|>[", closing="]<|tool_call_end|>", python=True
    ),
    "pythonic": ToolFormat("{name}({keywords})", ", ", opening="[", closing="]", python=True),
    HARMONY: ToolFormat(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
        "<|start|>assistant",
        ends=("<|call|>",),
    ),
}

THINK = ReasoningFormat("<think>", "</think>")
REASONING_FORMATS = (
    THINK,
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        answer=("<|start|>assistant<|channel|>final<|message|>", "<|return|>"),
        channels=True,
    ),
    ReasoningFormat("<|channel>thought\n", "<channel|>"),
    ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>", answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningFormat("", "[BEGIN FINAL RESPONSE]", answer=("", "[END FINAL RESPONSE]")),
)


MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""Literals that are displayed for every model, also where they are special tokens."""


@dataclass(frozen=True, slots=True)
class OutputStyle:
    """Properties of a model that its grammars depend on. `control` has the ids of the control tokens by literal."""

    tool_format: str
    reasoning: ReasoningFormat | None
    in_reasoning: bool
    """True if the generation prompt ends inside a block of reasoning."""
    control: Mapping[str, int]

    def __str__(self) -> str:
        return f"tools: {self.tool_format or 'none'}, reasoning: {self.reasoning.name if self.reasoning else 'none'}"


def literals_of(tool_format: str, reasoning: ReasoningFormat | None) -> str:
    """Returns all text that is not a value, joined. The parser needs the control tokens in it."""
    texts = [reasoning.opening, reasoning.closing, *reasoning.answer] if reasoning else []
    if tool_format:
        form = TOOL_FORMATS[tool_format]
        texts += [form.opening, form.call, form.parameter, form.separator, form.closing, form.prefix]
        texts += [QUOTE] if "{bare}" in form.call else []
    return "\0".join(texts)


def tags_of(tool_format: str) -> frozenset[str]:
    """Returns the tags of a format: text that prose does not have."""
    form = TOOL_FORMATS[tool_format]
    text = "\0".join((form.opening, form.call, form.parameter, form.closing))
    return frozenset(re.findall(r"<[^<>{}\s]+[>=]|\[[A-Z_]+\]", text))


class ParsedCall(NamedTuple):
    """A tool call in a completion. `arguments` is JSON text. `id` is what the model wrote as its id, or empty."""

    name: str
    arguments: str
    id: str = ""


Tools = Sequence[Mapping[str, Any]]
HOLE = re.compile(r"\{(name|id|index|arguments|parameters|keywords|bare|key|value|is_text)\}")


def write_calls(form: ToolFormat, calls: Sequence[ParsedCall]) -> str:
    """Returns the text of calls as the format writes it. `arguments` are JSON text."""
    return form.opening + form.separator.join(_written(form, i, call) for i, call in enumerate(calls)) + form.closing


def write_completion(answer: Message, reasoning: ReasoningFormat | None, in_reasoning: bool, tool_format: str) -> str:
    """Returns the text that a `MessageReader` reads as `answer`. Harmony has one message in a completion.

    Raises `ValueError` if the arguments of a call are not JSON.
    """
    calls = [ParsedCall(call.name, call.arguments) for call in answer.tool_calls]
    called = write_calls(TOOL_FORMATS[tool_format], calls) if calls else ""
    content, thought = answer.content, ""
    if reasoning is not None:
        before, after = reasoning.answer
        line = "\n" if reasoning is THINK or not reasoning.opening else ""
        if answer.reasoning or in_reasoning:
            opening = "" if in_reasoning else reasoning.opening.rstrip("\n") + line
            is_open = not reasoning.opening and called and not content
            thought = opening + answer.reasoning + line + ("" if is_open else reasoning.closing + line)
        content = before + content + after if content else ""
    return thought + content + ("\n" if content and called else "") + called


def _written(form: ToolFormat, index: int, call: ParsedCall) -> str:
    def fill(hole: re.Match[str]) -> str:
        match hole[1]:
            case "name":
                return json.dumps(call.name, ensure_ascii=False)[1:-1] if form.is_json else call.name
            case "id":
                return call.id or f"call{index:05d}"
            case "index":
                return str(index)
            case "arguments":
                return call.arguments
            case "parameters":
                return "".join(_written_parameter(form, *item) for item in json.loads(call.arguments).items())
            case "keywords":
                return ", ".join(f"{key}={value!r}" for key, value in json.loads(call.arguments).items())
            case _:
                return bare(json.loads(call.arguments))

    return HOLE.sub(fill, form.call)


def _written_parameter(form: ToolFormat, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    text = value if is_text else str(value) if form.python else json.dumps(value, ensure_ascii=False)
    filled = {"key": key, "value": text, "is_text": str(is_text).lower()}
    return HOLE.sub(lambda hole: str(filled[hole[1]]), form.parameter)


def bare(value: Any) -> str:
    """Returns a value with bare keys, and strings in Gemma's quotes."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{bare(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(bare, value)) + "]"
    return f"{QUOTE}{value}{QUOTE}" if isinstance(value, str) else json.dumps(value)


# ---- one call --------------------------------------------------------------------------------------------------------

_JSON = json.JSONDecoder()
CallItem = tuple[int, list[ParsedCall]]
"""The end of an item in the text, and its calls."""
RegexPattern: TypeAlias = Any
RegexMatch: TypeAlias = Any
"""A type of the package `regex`, which also finds the beginning of a match at the end of a text."""
LONGEST_WORD = 16
"""Characters of a JSON text that are read together, at most: an escape or `-Infinity`."""


class IncompleteCall(Exception):
    """The text ends before the item does."""


Schemas = Mapping[str, Mapping[str, Any]]
_NAME = r"(?P<name>[^\s<>{}()\[\]\"'｜|]+?)"


class Syntax:
    """The patterns of a format. White space in it is any white space."""

    def __init__(self, form: ToolFormat) -> None:
        self.form = form
        self.is_unmarked = not form.marker
        literals = HOLE.split(form.call)
        hole = literals[-2]  # the last one: the arguments
        self.closing = _pattern(form.closing.lstrip("\n ]")) if form.opening and form.closing.strip("\n ]") else None
        tail = literals[-1].partition("}")[2] if form.is_json else literals[-1]
        self._tail = regex.compile(rf"\s*{_spaced(tail.strip())}" if tail.strip() else "")
        self._needs_next = hole in ("parameters", "bare")
        """True if only the next call shows that a call is broken."""
        if self.is_unmarked:
            start = r"\A\s*(?:{})?\s*(?=[\[{{])" if form.is_json else r"\[\s*(?=[A-Za-z_][\w.-]*\(){}"
            self.opening: RegexPattern = regex.compile(start.format(re.escape(form.prefix)))
        else:
            self.opening = _pattern(form.opening.rstrip("[\n ")) if form.opening else None
        if form.is_json:
            before = _spaced(re.split(r'\{\s*"', form.call)[0])
            self.head = regex.compile(rf"{before}(?=[\[{{])" if before else r"(?=\{)")
            self._read: Callable[[str, RegexMatch, int, Schemas, bool], CallItem | None] = self._json_call
            keys = re.search(r'"(\w+)": "\{name\}"', form.call), re.search(r'"(\w+)": \{arguments\}', form.call)
            self._name_key, self._arguments_key = (key[1] if key else "" for key in keys)
        elif hole == "keywords":
            self.head = regex.compile(r"(?<![\w.-])(?P<name>[A-Za-z_][\w.-]*)\(")
            self._read = self._keywords
        else:
            holes = {"name": _NAME, "id": r"(?P<id>[^\s<>\[\]{}]*?)", "index": r"(?P<index>\d+)"}
            parts = [holes[part] if i % 2 else _spaced(part) for i, part in enumerate(literals[:-2])]
            after = {"arguments": r"\s*(?=\{)", "bare": r"\s*(?=\{)", "parameters": r"\s*(?=<)"}[hole]
            self.head = regex.compile("".join(parts) + after)
            self._read = {"arguments": self._named, "bare": self._bare_keys, "parameters": self._parameters}[hole]
        if form.parameter:
            before, _, rest = form.parameter.partition("{value}")
            parts = HOLE.split(before)
            named = {"key": r"(?P<key>[^\n]+?)", "is_text": r"(?P<is_text>\w*)"}
            self._key = regex.compile("".join(named[p] if i % 2 else _edged(p) for i, p in enumerate(parts)))
            self._first = literals[-1].strip().partition("\n")[0]
            next_ = _spaced(parts[0])
            self._value_end = regex.compile(rf"{_edged(rest)}\s*(?={next_}|{re.escape(self._first)}|\Z)")

    def is_meant(self, text: str) -> bool:
        """True if an object in prose is a call of any name: it has the key of the arguments."""
        return self.form.is_json and f'"{self._arguments_key}"' in text

    def is_junk(self, text: str) -> bool:
        """True if text in a section has no meaning between calls."""
        return self.opening is not None and not text.strip("[](),; \n\t" if "[" in self.form.opening else "; \n\t[],")

    def read(self, text: str, head: RegexMatch, schemas: Schemas, *, is_whole: bool = True) -> CallItem | None:
        """Returns the item with this head, or None if it is broken.

        Raises `IncompleteCall` if the text is not whole, and the rest of it decides.
        """
        following = self.head.search(text, head.end())
        try:
            item = self._read(text, head, following.start() if following else len(text), schemas, is_whole)
            if item is None and following is None and self._needs_next:
                raise IncompleteCall
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
        except IncompleteCall:
            if is_whole:
                return None
            raise
        return item

    def _ended(self, text: str, at: int, is_whole: bool) -> int | None:
        """Returns the end of an item whose arguments end at `at`."""
        tail = self._tail.match(text, at, partial=not is_whole)
        if tail is None:
            return len(text) if is_whole and not text[at:].strip() else None
        if tail.partial:
            raise IncompleteCall
        return int(tail.end())

    def _json_call(self, text: str, head: RegexMatch, bound: int, schemas: Schemas, is_whole: bool) -> CallItem | None:
        value, end = _decoded(text, head.end())
        source = text[head.end() : end]
        calls = [self._of_object(v, "") for v in value] if isinstance(value, list) else [self._of_object(value, source)]
        if (after := self._ended(text, end, is_whole)) is None or not calls:
            return None
        return after, calls

    def _of_object(self, value: Any, source: str) -> ParsedCall:
        """Raises `ValueError` for a malformed call."""
        if not isinstance(value, dict):
            raise ValueError("a call is an object")
        if not self._name_key:  # the name is the only key
            ((name, arguments),) = value.items()
            key = name
        else:
            name, key = value.get(self._name_key), self._arguments_key
            arguments = value.get(key, {})
        if not isinstance(name, str) or not name:
            raise ValueError("a call has a name")
        written = arguments if isinstance(arguments, str) else _as_written(source, key, arguments)
        id = value.get("id", "")
        return checked_call(name, written, id if isinstance(id, str) else "")

    def _named(self, text: str, head: RegexMatch, bound: int, schemas: Schemas, is_whole: bool) -> CallItem | None:
        _, end = _decoded(text, head.end())
        after = self._ended(text, end, is_whole)
        return None if after is None else (after, [self._call(head, text[head.end() : end])])

    def _call(self, head: RegexMatch, arguments: str) -> ParsedCall:
        groups = head.groupdict()
        id = groups.get("id", "")
        if "index" in groups:
            id = HOLE.sub(lambda hole: groups[hole[1]], self.form.id)
        return checked_call(groups["name"], arguments, id)

    def _parameters(self, text: str, head: RegexMatch, bound: int, schemas: Schemas, is_whole: bool) -> CallItem | None:
        known, written, at = schemas.get(head["name"], {}), list[str](), head.end()
        while key := self._key.match(text, at, bound):
            end = self._value_end.search(text, key.end(), bound)
            if end is None:
                return None
            value, is_text = text[key.end() : end.start()], key.groupdict().get("is_text")
            typed = _typed(value, {"type": "string"} if is_text == "true" else _schema_of(known, key["key"]), known)
            written.append(f"{json.dumps(key['key'], ensure_ascii=False)}: {typed}")
            at = end.end()
        if not text.startswith(self._first, at):
            return None
        after = self._ended(text, at, is_whole)
        after = at + len(self._first) if after is None and is_whole and bound == len(text) else after
        return None if after is None else (after, [self._call(head, "{" + ", ".join(written) + "}")])

    def _bare_keys(self, text: str, head: RegexMatch, bound: int, schemas: Schemas, is_whole: bool) -> CallItem | None:
        pieces, depth, at = list[str](), 0, head.end()
        for token in _BARE.finditer(text, head.end(), bound):
            if token.start() != at:
                return None
            at, key = token.end(), token["colon"] is not None
            if token["mark"]:
                depth += (token["mark"] in "[{") - (token["mark"] in "]}")
                pieces.append(token["mark"])
            else:
                word = token["string"] if token["string"] is not None else token["word"].strip()
                plain = token["string"] is None and not key and _is_json(word)
                pieces.append((word if plain else json.dumps(word, ensure_ascii=False)) + (":" if key else ""))
            if depth == 0:
                break
        after = self._ended(text, at, is_whole)
        return None if after is None or depth else (after, [self._call(head, "".join(pieces))])

    def _keywords(self, text: str, head: RegexMatch, bound: int, schemas: Schemas, is_whole: bool) -> CallItem | None:
        end = _end_of_bracket(text, head.end() - 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as "\\d"
            node = ast.parse(f"f({text[head.end() : end - 1].strip()})", mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            return None
        known, arguments = schemas.get(head["name"], {}), dict[str, Any]()
        for keyword in node.keywords:
            if keyword.arg is None:
                return None
            value = _literal(keyword.value)
            if isinstance(value, str) and takes_text(_schema_of(known, keyword.arg), known) is False:
                value = json.loads(_typed(value, _schema_of(known, keyword.arg), known))
            arguments[keyword.arg] = value
        return end, [self._call(head, json.dumps(arguments, ensure_ascii=False, allow_nan=False))]


@lru_cache(maxsize=64)
def syntax_of(form: ToolFormat) -> Syntax:
    return Syntax(form)


def _spaced(literal: str) -> str:
    """Returns the pattern of a literal with any white space where it has some."""
    return r"\s*".join(map(re.escape, re.split(r"\s+", literal)))


def _edged(literal: str) -> str:
    """Returns the pattern of a literal beside a value. The value keeps its white space, except one line break."""
    left, right = ("\n?" if edge == "\n" else "" for edge in (literal[:1], literal[-1:]))
    return left + _spaced(literal.strip()) + right


def _pattern(literal: str) -> RegexPattern:
    return regex.compile(_spaced(literal))


_BARE = re.compile(
    rf"\s*(?:(?P<mark>[{{}}\[\],])|(?:{re.escape(QUOTE)}(?P<string>.*?){re.escape(QUOTE)}|(?P<word>[^{{}}\[\],:<]+))"
    r"(?P<colon>\s*:)?)",
    re.DOTALL,
)


def checked_call(name: str, arguments: str, id: str = "") -> ParsedCall:
    """Returns a call. Raises `ValueError` if its arguments are not the text of a JSON object."""
    if not isinstance(json.loads(arguments), dict):
        raise ValueError("arguments are an object")
    (name + arguments).encode()  # Raises for an unpaired surrogate, which escapes can write.
    return ParsedCall(name, arguments, id)


def _as_written(source: str, key: str, arguments: Any) -> str:
    """Returns the text of the arguments in `source`. If it cannot be found, returns them as new JSON."""
    for at in re.finditer(rf'"{re.escape(key)}"\s*:\s*', source):
        try:
            value, end = _JSON.raw_decode(source, at.end())
        except ValueError:
            continue
        if value == arguments:
            return source[at.end() : end]
    return json.dumps(arguments, ensure_ascii=False)


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """Returns the JSON value at an offset, and its end. Raises `ValueError`, or `IncompleteCall` if it may continue."""
    try:
        return _JSON.raw_decode(text, at)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated") or error.pos > len(text) - LONGEST_WORD:
            raise IncompleteCall from None
        raise


def _is_json(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[()\[\]{}'"]""", re.DOTALL)


def _end_of_bracket(text: str, at: int) -> int:
    """Returns the end of the bracket at an offset. Raises `ValueError`, or `IncompleteCall` if it is not closed."""
    expected = []
    for token in _QUOTED.finditer(text, at):
        if token[0] in _BRACKETS:
            expected.append(_BRACKETS[token[0]])
        elif token[0] in ("'", '"'):
            break
        elif len(token[0]) == 1:
            if expected.pop() != token[0]:
                raise ValueError("another bracket is closed")
            if not expected:
                return token.end()
    raise IncompleteCall


def _literal(node: ast.expr) -> Any:
    """Returns the value of a literal of Python or JSON. Raises `ValueError`."""
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            return value
        case ast.Name(id="true" | "false" | "null" as name):
            return {"true": True, "false": False, "null": None}[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = [
                (_literal(key), _literal(value)) for key, value in zip(keys, values, strict=True) if key is not None
            ]
            if len(pairs) == len(keys) and all(isinstance(key, str) for key, _ in pairs):
                return dict(pairs)
    raise ValueError("a value is a literal")


# ---- types of arguments ----------------------------------------------------------------------------------------------


def schemas_of(tools: Tools) -> Schemas:
    """Returns the schema of the arguments of each function. It is empty for a tool without one."""
    functions = [tool.get("function") for tool in tools]
    known = [f for f in functions if isinstance(f, Mapping) and isinstance(f.get("name"), str)]
    schemas = {f["name"]: f.get("parameters") for f in known}
    return {name: schema if isinstance(schema, Mapping) else {} for name, schema in schemas.items()}


def _schema_of(schema: Mapping[str, Any], key: str) -> Any:
    properties = schema.get("properties")
    return resolved(properties.get(key), schema) if isinstance(properties, Mapping) else None


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns a schema without its reference to another part of `root`."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for key in reference[2:].split("/"):
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def takes_text(schema: Any, root: Mapping[str, Any]) -> bool | None:
    """True if a schema allows a string, False if it does not, None if it has no types."""
    if not isinstance(schema, Mapping):
        return None
    if kinds := schema.get("type"):
        return "string" in (kinds if isinstance(kinds, list) else [kinds])
    if "enum" in schema or "const" in schema:
        return any(isinstance(value, str) for value in schema.get("enum") or [schema.get("const")])
    for word in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(word), list):
            allowed = [takes_text(resolved(choice, root), root) for choice in choices]
            return True if True in allowed else None if None in allowed else False
    return None


def allows_null(schema: Mapping[str, Any]) -> bool:
    """True if a schema that allows a string allows null, too."""
    kinds = schema.get("type")
    choices = schema.get("anyOf") or schema.get("oneOf") or ()
    return "null" in (kinds if isinstance(kinds, list) else ()) or {"type": "null"} in choices


def _typed(text: str, schema: Any, root: Mapping[str, Any] | None = None) -> str:
    """Returns the JSON of a value that was written as text."""
    if takes_text(schema, root or {}):
        return "null" if text == "null" and allows_null(schema) else json.dumps(text, ensure_ascii=False)
    if _is_json(text):
        return text.strip()
    if text.strip()[:1] in ("[", "{", "(") or text.strip() in ("True", "False", "None"):
        try:
            value = _literal(ast.parse(text.strip(), mode="eval").body)
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            pass
    return json.dumps(text, ensure_ascii=False)
