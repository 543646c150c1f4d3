"""Grammars of constrained completions: JSON and tool calls. `parser` is the counterpart that parses completions.

A grammar is Lark text in `llguidance`'s dialect: `%json` is a JSON schema, `<[7]>` the token with that id, and a
`[lazy]` rule ends at its first match. It covers a completion without its end token: reasoning, if the template has it,
and then one of

* JSON;
* tool calls in the model's format;
* free text in which only tool calls are constrained.

JSON has its keys in the order of the schema. White space is one space, or one line break with indentation: a model
cannot fill a completion with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from agentjet.errors import InvalidRequest
from agentjet.rendering.parser import TOOL_FORMATS, ToolFormat
from agentjet.types import ANY_ANSWER, Constraint

WHITE_SPACE = r"(\n( {0,32}|\t{0,8})| )?"
MAX_GRAMMAR = 128 * 2**10
"""Maximum number of characters in a grammar with all its schemas. OpenAI allows 120,000 in names and values."""


@dataclass(frozen=True, slots=True)
class OutputStyle:
    """Properties of a model that its grammars depend on. `control` has the ids of the control tokens by literal."""

    tool_format: str
    reasons: bool
    in_reasoning: bool
    control: Mapping[str, int]


def write_grammar(constraint: Constraint, tools: Sequence[Mapping[str, Any]], style: OutputStyle) -> str:
    """Returns the grammar of a completion in a conversation with `tools`, or "" without constraints.

    Raises `InvalidRequest` with the parameter if a schema is not supported.
    """
    if constraint == ANY_ANSWER:
        return ""
    functions = [_Function(i, tool["function"], constraint) for i, tool in enumerate(tools)]
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


class _Function:
    """A function of the conversation, with the schema of its arguments.

    A strict function has its whole schema. Another function has its schema without unsupported keywords if a call is
    required, else any JSON object.
    """

    def __init__(self, index: int, function: Mapping[str, Any], constraint: Constraint) -> None:
        self.index, self.name = index, function["name"]
        strict = self.name in constraint.strict
        schema: dict[str, Any] = {"type": "object"}
        if strict or constraint.calls == "required":
            schema |= function.get("parameters") or {"additionalProperties": False}
        where = f"tools.{index}.function.parameters"
        if schema["type"] != "object":
            raise InvalidRequest(f"{where} of {self.name!r} must describe an object.", param=where)
        self.schema = _checked(schema, where, f"{where} of {self.name!r}", lenient=not strict)


class _Grammar:
    """The rules of a grammar by name, in the order in which they are needed."""

    def __init__(self, style: OutputStyle) -> None:
        self._style = style
        self._rules: dict[str, str] = {}

    @property
    def _format(self) -> ToolFormat:
        return TOOL_FORMATS[self._style.tool_format]

    def written(self, body: str) -> str:
        """Returns the grammar text: optional reasoning, then `body`."""
        start = "body"
        if self._style.reasons:
            closed = f"{self._up_to('</think>', 'thought')} BREAKS?"
            start = f"{closed} body" if self._style.in_reasoning else f"({self._literal('<think>')} {closed})? body"
            self._rules["BREAKS"] = r"/\n{1,2}/"
        rules = {"start": start, "body": body, **self._rules, "TEXT": r"/(.|\n)+/"}
        written = "".join(f"{name}: {rule}\n" for name, rule in rules.items())
        if len(written) > MAX_GRAMMAR:
            raise InvalidRequest(
                f"tools: the schemas have {len(written)} characters in all, above the limit of {MAX_GRAMMAR}: use "
                "fewer strict tools.",
                code="unsupported_schema",
                param="tools",
            )
        return written

    def json(self, name: str, schema: str) -> str:
        """Adds a rule for JSON and returns its name."""
        self._rules[name] = f"%json {schema}"
        return name

    def calls(self, functions: Sequence[_Function], parallel: bool) -> str:
        """Returns an expression for tool calls without other text."""
        block = self._block(functions, parallel)
        if not self._format.opening:
            return block
        call = f"{self._literal(self._format.opening)} {block}"
        return call if self._format.listed or not parallel else f'{call} ("\\n" {call})*'

    def text_with_calls(self, functions: Sequence[_Function], parallel: bool) -> str:
        """Returns an expression for free text in which every call is well-formed."""
        block = self._block(functions, parallel)
        if not self._format.opening:
            self._rules["PROSE"] = r"/\s*[^\s{\[](.|\n)*/"
            return f"({block} | PROSE)?"
        call = f"{self._up_to(self._format.opening, 'announced')} {block}"
        return f"(TEXT | {call})?" if self._format.listed or not parallel else f"({call})* TEXT?"

    def _block(self, functions: Sequence[_Function], parallel: bool) -> str:
        """Returns an expression for the text after the opening."""
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
        id = self._style.control.get(literal)
        return _quoted(literal) if id is None else f"<[{id}]>"

    def _up_to(self, literal: str, name: str) -> str:
        """Returns an expression for any text up to and including the first `literal`."""
        id = self._style.control.get(literal)
        if id is not None:
            return f"TEXT? <[{id}]>"
        escaped = re.escape(literal).replace("/", "\\/")
        self._rules[f"{name}[lazy]"] = rf"/(.|\n)*{escaped}/"
        return name


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _checked(schema: Mapping[str, Any], param: str, what: str, *, lenient: bool = False) -> str:
    """Returns a schema for use in a grammar; with `lenient`, without unsupported keywords. Raises `InvalidRequest`."""
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": lenient}
    text = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
    if len(text) > MAX_GRAMMAR:
        raise InvalidRequest(
            f"{what}: this JSON schema has {len(text)} characters, above the limit of {MAX_GRAMMAR}: simplify it.",
            code="unsupported_schema",
            param=param,
        )
    if error := _error(text):
        raise InvalidRequest(
            f"{what}: this JSON schema is not supported: {error}.", code="unsupported_schema", param=param
        )
    return text


@lru_cache(maxsize=64)  # Of at most `MAX_GRAMMAR` characters each.
def _error(schema: str) -> str:
    """Returns why a schema is not supported, or ""."""
    message: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    return " ".join(message.partition("<state>")[0].split()).rstrip(".")
