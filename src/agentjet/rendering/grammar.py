"""`TextCache`: what was made of texts, as long as the texts together are not too long.

A count of entries would not bound memory: clients choose how long their schemas are.

What an answer may look like, as a grammar: the counterpart of `parsing`, which takes such answers apart.

Grammars are Lark text in `llguidance`'s dialect: `%json` is a JSON schema, `<[7]>` the token with that id, and a
`[lazy]` rule ends at its first match. They hold a whole completion but for its end token: the reasoning of templates
that know one, then JSON, or tool calls in the model's own format, or free text in which only tool calls are bound.

JSON comes with its keys in the schema's order and no white space but a space, or a line break with indentation: a
model that has lost its way cannot fill an answer with blanks.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, TypeVar

from llguidance import LLMatcher

from agentjet.errors import InvalidRequest
from agentjet.types import ANY_ANSWER, Constraint

Made = TypeVar("Made")


class TextCache(Generic[Made]):
    """Calls `make` once for each text while the text is in use; the one not used for longest goes first.

    Threads may share it; two that miss the same text at the same time both make it.
    """

    def __init__(self, make: Callable[[str], Made], *, most: int, characters: int) -> None:
        """Keeps at most `most` texts with so many characters in all."""
        self._make = make
        self._most = most
        self._room = characters
        self._made: OrderedDict[str, Made] = OrderedDict()
        self._lock = Lock()

    def __call__(self, text: str) -> Made:
        with self._lock:
            if text in self._made:
                self._made.move_to_end(text)
                return self._made[text]
        made = self._make(text)
        with self._lock:
            if text not in self._made:
                self._made[text] = made
                self._room -= len(text)
            while self._made and (self._room < 0 or len(self._made) > self._most):
                oldest, _ = self._made.popitem(last=False)
                self._room += len(oldest)
        return made


WHITE_SPACE = r"(\n( {0,32}|\t{0,8})| )?"
LONGEST_SCHEMA = 128 * 2**10
"""Characters of one JSON schema. OpenAI allows 120,000 in all names and values."""
LONGEST_GRAMMAR = 4 * LONGEST_SCHEMA
"""Of all schemas of a request with what is around them."""


@dataclass(frozen=True, slots=True)
class Format:
    """How a tool format (see `parsing`) writes calls."""

    opening: str
    """What announces calls; empty where a call is the whole answer."""
    closing: str
    arguments: str
    """The key of the arguments."""
    listed: bool
    """Whether several calls are one JSON list."""


FORMATS = {
    "hermes": Format("<tool_call>", "</tool_call>", "arguments", listed=False),
    "mistral": Format("[TOOL_CALLS]", "", "arguments", listed=True),
    "llama3": Format("", "", "parameters", listed=False),
}


@dataclass(frozen=True, slots=True)
class Style:
    """What a grammar must know of a model. `control` gives the id of a literal that is one of its control tokens."""

    tool_format: str
    reasons: bool
    in_reasoning: bool
    control: Callable[[str], int | None]


def write_grammar(constraint: Constraint, tools: Sequence[Mapping[str, Any]], style: Style) -> str:
    """The grammar of an answer to a conversation that offers `tools`; empty when it may be anything.

    Raises `InvalidRequest`, naming the parameter, for a schema that cannot be followed.
    """
    if constraint == ANY_ANSWER:
        return ""
    functions = [_Function.of(i, tool["function"], constraint) for i, tool in enumerate(tools)]
    grammar = _Grammar(style)
    if functions and constraint.calls == "required":
        chosen = [function for function in functions if constraint.function in ("", function.name)]
        body = grammar.calls(chosen, constraint.parallel)
    elif constraint.schema is not None:
        body = grammar.json("answer", _checked(constraint.schema, constraint.schema_param, constraint.schema_param))
        if functions:
            body += " | " + grammar.calls(functions, constraint.parallel)
    elif functions and (constraint.strict or not constraint.parallel):
        body = grammar.text_with_calls(functions, constraint.parallel)
    else:
        return ""
    return grammar.written(body)


@dataclass(frozen=True, slots=True)
class _Function:
    """A function of the conversation, with the schema that its arguments follow."""

    index: int
    name: str
    schema: str

    @classmethod
    def of(cls, index: int, function: Mapping[str, Any], constraint: Constraint) -> _Function:
        """Strict functions bind their calls to their whole schema, others a forced call as far as it can be followed,
        and any other call to be a JSON object.
        """
        name, strict = function["name"], function["name"] in constraint.strict
        schema: dict[str, Any] = {"type": "object"}
        if strict or constraint.calls == "required":
            schema |= function.get("parameters") or {"additionalProperties": False}
        where = f"tools.{index}.function.parameters"
        if schema["type"] != "object":
            raise InvalidRequest(f"{where} of {name!r} must describe an object.", param=where)
        return cls(index, name, _checked(schema, where, f"{where} of {name!r}", lenient=not strict))


class _Grammar:
    """Rules as they are needed, by name."""

    def __init__(self, style: Style) -> None:
        self._style = style
        self._rules: dict[str, str] = {}

    @property
    def _format(self) -> Format:
        return FORMATS[self._style.tool_format]

    def written(self, body: str) -> str:
        """The whole, with a place for reasoning before `body`."""
        start = "body"
        if self._style.reasons:
            closed = f"{self._up_to('</think>', 'thought')} BREAKS?"
            start = f"{closed} body" if self._style.in_reasoning else f"({self._literal('<think>')} {closed})? body"
            self._rules["BREAKS"] = r"/\n{1,2}/"
        rules = {"start": start, "body": body, **self._rules, "TEXT": r"/(.|\n)+/"}
        written = "".join(f"{name}: {rule}\n" for name, rule in rules.items())
        if len(written) > LONGEST_GRAMMAR:
            raise InvalidRequest(
                f"tools: the schemas that bind the answer are {len(written)} characters long; together they may be "
                f"{LONGEST_GRAMMAR}: offer fewer strict tools.",
                code="unsupported_schema",
                param="tools",
            )
        return written

    def json(self, name: str, schema: str) -> str:
        """A rule for JSON."""
        self._rules[name] = f"%json {schema}"
        return name

    def calls(self, functions: Sequence[_Function], parallel: bool) -> str:
        """Tool calls and nothing else."""
        block = self._block(functions, parallel)
        if not self._format.opening:
            return block
        call = f"{self._literal(self._format.opening)} {block}"
        return call if self._format.listed or not parallel else f'{call} ("\\n" {call})*'

    def text_with_calls(self, functions: Sequence[_Function], parallel: bool) -> str:
        """Free text in which nothing but such calls follows what announces a call."""
        block = self._block(functions, parallel)
        if not self._format.opening:
            self._rules["PROSE"] = r"/\s*[^\s{\[](.|\n)*/"
            return f"({block} | PROSE)?"
        call = f"{self._up_to(self._format.opening, 'announced')} {block}"
        return f"(TEXT | {call})?" if self._format.listed or not parallel else f"({call})* TEXT?"

    def _block(self, functions: Sequence[_Function], parallel: bool) -> str:
        """What follows the announcement."""
        for function in functions:
            head = json.dumps({"name": function.name}, ensure_ascii=False)[:-1] + f', "{self._format.arguments}": '
            arguments = self.json(f"arguments_{function.index}", function.schema)
            self._rules[f"call_{function.index}"] = f'{_quoted(head)} {arguments} "}}"'
        self._rules["call"] = " | ".join(f"call_{function.index}" for function in functions)
        if self._format.listed:
            more = ' (", " call)*' if parallel else ""
            return f'"[" call{more} "]"'
        if self._format.closing:
            return f'"\\n" call "\\n" {self._literal(self._format.closing)}'
        return "call"

    def _literal(self, literal: str) -> str:
        id = self._style.control(literal)
        return _quoted(literal) if id is None else f"<[{id}]>"

    def _up_to(self, literal: str, name: str) -> str:
        """Any text, then the first `literal`."""
        id = self._style.control(literal)
        if id is not None:
            return f"TEXT? <[{id}]>"
        escaped = re.escape(literal).replace("/", "\\/")
        self._rules[f"{name}[lazy]"] = rf"/(.|\n)*{escaped}/"
        return name


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _checked(schema: Mapping[str, Any], param: str, what: str, *, lenient: bool = False) -> str:
    """A schema as a grammar takes it; `lenient` leaves out the keywords that are not known."""
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": lenient}
    text = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
    if len(text) > LONGEST_SCHEMA:
        raise InvalidRequest(
            f"{what}: this JSON schema is {len(text)} characters long; it may be {LONGEST_SCHEMA}: simplify it.",
            code="unsupported_schema",
            param=param,
        )
    if error := _error(text):
        raise InvalidRequest(
            f"{what}: this JSON schema cannot be followed: {error}.", code="unsupported_schema", param=param
        )
    return text


def _find_error(schema: str) -> str:
    """Why a schema makes no grammar; empty when it makes one."""
    message: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    return " ".join(message.partition("<state>")[0].split()).rstrip(".")


_error = TextCache(_find_error, most=256, characters=8 * LONGEST_SCHEMA)
