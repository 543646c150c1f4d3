"""Rules of a grammar for the arguments of a call, from their schema: JSON, tagged parameters, keywords, bare objects.

`Rules` has the rules of one grammar, over the control tokens of a model. A control token is named by its id, because
text never contains it. `ArgumentRules` writes the rules for one function. All arguments that the rules allow are valid
by the schema, as the parser of `formats` reads them:

* A value between tags is text if the schema allows a string, else JSON.
* A keyword has a value as Python or JSON writes it. A bare object has the marks of Gemma. Both have rules for each part
  of the schema.

The arguments have the order of the schema. A required one is always there. Further ones are there if the schema has
`additionalProperties`, or no properties.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from llguidance import LLMatcher

from agentjet.errors import InvalidRequest
from agentjet.rendering.formats import HOLE, QUOTE, ToolFormat, allows_null, bare, resolved, takes_text

WHITE_SPACE = r"(\n( {0,32}|\t{0,8})| )?"
MAX_GRAMMAR = 128 * 2**10
"""Maximum number of characters in a grammar with all its schemas. OpenAI allows 120,000 in names and values."""
ANYTHING, NONEMPTY, NOTHING = r"/(.|\n)*/", r"/(.|\n)+/", '""'
HERE = "\0"
"""Stands for a terminal in a literal."""
ANNOTATIONS = frozenset({
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated",
    "readOnly", "writeOnly", "strict", "discriminator",
})  # fmt: skip
"""Keywords that do not change which values are valid."""
OF_TEXT = frozenset({"minLength", "maxLength", "pattern", "format"})
OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
OF_LISTS = frozenset({"items", "minItems", "maxItems"})
OF_OBJECTS = frozenset({"properties", "required", "additionalProperties"})
CHOICES = ("anyOf", "oneOf")
_DATE = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_HOUR})"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": r"[A-Za-z0-9_+-]{1,64}@([A-Za-z0-9]{1,63}\.){1,4}[A-Za-z]{2,24}",
}
"""Formats of strings that are written without quotes."""


# ---- rules -----------------------------------------------------------------------------------------------------------


class Rules:
    """The rules of a grammar by name, in the order in which they are needed."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        literals = sorted(control, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, literals))})" if literals else r"((?!))").split
        self._rules: dict[str, str] = {}

    def __str__(self) -> str:
        return "".join(f"{name}: {rule}\n" for name, rule in self._rules.items())

    def __contains__(self, name: str) -> bool:
        return name in self._rules

    def add(self, name: str, rule: str) -> str:
        """Adds a rule and returns its name."""
        self._rules[name] = rule
        return name.partition("[")[0]

    def text(self, literal: str, name: str = "", terminal: str = "") -> str:
        """Returns an expression for a literal of the format. It is empty for an empty literal.

        If the literal has `HERE`, `terminal` stands there, in a terminal called `name` with the text beside it.
        """
        written = list[str]()
        for i, part in enumerate(self._split(literal)):
            if i % 2:
                written.append(f"<[{self._control[part]}]>")
            elif HERE in part:
                before, after = (quoted(text) if text else "" for text in part.split(HERE))
                written.append(self.add(name, f"{before} ({terminal}) {after}"))
            elif part:
                written.append(quoted(part))
        return " ".join(written)

    def has_control(self, text: str) -> bool:
        """True if a text contains the name of a control token."""
        return len(self._split(text)) > 1

    def up_to(self, literal: str, name: str, content: str = ANYTHING, *, may_be_empty: bool = True) -> str:
        """Returns an expression for `content`, a terminal, up to and including the first `literal`."""
        if content == NOTHING:
            return self.text(literal)
        head, *rest = self._split(literal)
        after = self.text("".join(rest))
        if not head:  # Text ends where a control token begins. Its name as text would end it for the parser, too.
            terminal = NONEMPTY if content == ANYTHING else f"({content})"
            terminal = rf"{terminal} & ~/(.|\n)*{escaped(rest[0])}(.|\n)*/"
            return f"{self.add(name.upper(), terminal)}{'?' if may_be_empty else ''} {after}"
        if content == ANYTHING and not rest:
            return self.add(f"{name}[lazy]", rf"/(.|\n)*{escaped(head)}/")
        contents = f'({content} | "")' if may_be_empty else f"({content})"
        if rest:
            return f"{self.add(name.upper(), f'{contents} {quoted(head)}')} {after}"
        tag = escaped(head.strip() or head)
        return self.add(name.upper(), rf"({contents} & ~/(.|\n)*{tag}(.|\n)*/) {quoted(head)}")


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Returns the regular expression of a text, for use between slashes."""
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


# ---- JSON ------------------------------------------------------------------------------------------------------------


def checked_schema(
    schema: Mapping[str, Any], param: str, what: str, *, lenient: bool = False, escapes: str = ""
) -> str:
    """Returns a schema for use in a grammar; with `lenient`, without unsupported keywords. Raises `InvalidRequest`.

    `escapes` are the characters that may follow a backslash in strings, if not all of JSON's.
    """
    options: dict[str, Any] = {"whitespace_pattern": WHITE_SPACE, "lenient": lenient}
    if escapes:
        options["json_allowed_escapes"] = escapes
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


# ---- arguments -------------------------------------------------------------------------------------------------------


class _Strings(NamedTuple):
    """Strings that a schema allows: a terminal."""

    terminal: str
    may_be_empty: bool


Schema = Mapping[str, Any]
Member = Callable[[str, Any], str]
Further = Callable[[Any, Sequence[str]], str]
SINGLE_QUOTED = r"""/'([^'\\\x00-\x1f\x7f]|\\[nrt\\'"])*'/"""
PYTHON_WORDS = {"boolean": ("True", "False"), "null": ("None",)}
PYTHON_ESCAPES = 'nrbtf\\"'
"""Escapes that have one meaning in JSON and in Python, where the second half of a pair of surrogates is a character."""


class ArgumentRules:
    """Writes the rules for the arguments of one function. `name` is the prefix of their names."""

    def __init__(
        self, rules: Rules, form: ToolFormat, schema: Schema, name: str, *, param: str, what: str, lenient: bool
    ) -> None:
        """With `lenient`, keywords that cannot be followed are ignored. Else they raise `InvalidRequest`."""
        self._rules, self._form, self._root, self._name = rules, form, schema, name
        self._param, self._what, self._lenient = param, what, lenient
        self._definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        self._is_bare = "{bare}" in form.call
        self._comma = '","' if self._is_bare else '"," " "?'
        self._count = 0

    def write(self, hole: str) -> str:
        """Returns an expression for the arguments in a hole of the format. It may be empty."""
        if hole == "arguments":
            return self._json(self._root)
        root = self._resolved(self._root)
        self._refuse_others(root, OF_OBJECTS | {"type"})
        if hole == "bare":
            return self._object(root)
        if hole == "keywords":
            return self._members(root, self._keyword, self._further_keyword, quoted(", "))
        return self._members(root, self._parameter, self._further_parameter, "")

    def _next(self) -> str:
        self._count += 1
        return f"{self._name}_{self._count}"

    def _json(self, schema: Schema, *, escapes: str = "") -> str:
        full = {**self._definitions, **schema}
        text = checked_schema(full, self._param, self._what, lenient=self._lenient, escapes=escapes)
        return self._rules.add(self._next(), f"%json {text}")

    def _refuse(self, why: str) -> NoReturn:
        raise InvalidRequest(f"{self._what}: {why}", code="unsupported_schema", param=self._param)

    def _refuse_others(self, schema: Schema, known: frozenset[str]) -> None:
        """Raises `InvalidRequest` for keywords other than these, unless they may be ignored."""
        others = sorted(key for key in schema if key not in known | ANNOTATIONS and not key.startswith("x-"))
        if others and not self._lenient:
            self._refuse(
                f"the model's format of calls does not support {', '.join(map(repr, others))} here: remove it, or do "
                "not use strict."
            )

    def _resolved(self, schema: Any) -> Schema:
        """Returns a schema as a mapping, without a reference."""
        found = resolved(schema, self._root)
        if isinstance(schema, Mapping) and "$ref" in schema:
            self._refuse_others(schema, frozenset({"$ref"}))
        if found is False or (found is None and isinstance(schema, Mapping) and "$ref" in schema):
            self._refuse(f"the schema {json.dumps(schema)} allows nothing, or its reference is unknown.")
        return found if isinstance(found, Mapping) else {}

    # -- members of an object

    def _members(self, schema: Schema, member: Member, further: Further, between: str) -> str:
        """Returns an expression for the members of an object, in the order of the schema. It may be empty."""
        properties = schema.get("properties")
        known: dict[str, Any] = dict(properties) if isinstance(properties, Mapping) else {}
        extra = schema.get("additionalProperties", not known)
        required = {name for name in schema.get("required") or () if isinstance(name, str)}
        known |= {name: {} if extra is True else extra for name in sorted(required - known.keys())}
        items = [(member(key, value), key in required) for key, value in known.items()]
        rest = ""
        if extra is not False:
            others = further(extra, list(known))
            rest = f"({between} {others})*"
            if not items:
                return f"({others} {rest})?"
        first = next((i for i, (_, is_required) in enumerate(items) if is_required), None)
        if not between or first is not None:
            first = first or 0
            parts = [f"({item} {between})?" for item, _ in items[:first]] if between else []
            for i, (item, is_required) in enumerate(items[first if between else 0 :]):
                item = f"{between} {item}" if i else item
                parts.append(item if is_required else f"({item})?")
            return " ".join((*parts, rest))
        tail, choices = rest, [f"{others} {rest}"] if rest else []
        for item, _ in reversed(items):  # The first member has no separator before it.
            tail = self._rules.add(self._next(), tail or '""')
            choices.append(f"{item} {tail}")
            tail = f"({between} {item})? {tail}"
        return f"({' | '.join(reversed(choices))})?"

    # -- tagged parameters

    def _parameter(self, key: str, schema: Any) -> str:
        return self._tagged(self._rules.text, key, schema)

    def _further_parameter(self, schema: Any, known: Sequence[str]) -> str:
        terminal = _without("/[A-Za-z_][A-Za-z0-9_.-]{0,63}/", known)
        return self._tagged(lambda literal: self._rules.text(literal, self._next().upper(), terminal), HERE, schema)

    def _tagged(self, text: Callable[[str], str], key: str, given: Any) -> str:
        schema = self._resolved(given)
        before, _, after = self._form.parameter.partition("{value}")

        def head(is_text: str) -> str:
            filled = {"key": key, "is_text": is_text}
            return text(HOLE.sub(lambda hole: filled[hole[1]], before))

        is_text = takes_text(schema, self._root)
        is_free = is_text is None and not schema.keys() - ANNOTATIONS
        after_value = self._rules.text(after)
        if not is_text and not is_free:
            value = self._python(schema) if self._form.python else self._json(schema)
            return f"{head('false')} {value} {after_value}"
        strings = _Strings(ANYTHING, True) if is_free else self._strings(schema, after.strip())
        value = self._rules.up_to(after, self._next(), strings.terminal, may_be_empty=strings.may_be_empty)
        written = [f"{head('true')} {value}"]
        if is_free and "{is_text}" in self._form.parameter:
            written.append(f"{head('false')} {self._json({})} {after_value}")
        elif is_text and allows_null(schema):
            written.append(f'{head("false")} "null" {after_value}')
        return f"({' | '.join(written)})"

    # -- keywords

    def _keyword(self, key: str, schema: Any) -> str:
        return f"{quoted(f'{key}=')} {self._python(schema)}"

    def _further_keyword(self, schema: Any, known: Sequence[str]) -> str:
        terminal = _without("/[A-Za-z_][A-Za-z0-9_]{0,63}/", [*known, *keyword.kwlist])
        return f'{self._rules.add(self._next().upper(), terminal)} "=" {self._python(schema)}'

    def _python(self, schema: Any) -> str:
        """Returns an expression for a value as Python or JSON writes it; JSON if the schema is not supported else."""
        trial = ArgumentRules(
            Rules({}), self._form, self._root, "", param=self._param, what=self._what, lenient=self._lenient
        )
        try:
            trial._part(schema)
        except InvalidRequest:
            return self._json(self._resolved(schema), escapes=PYTHON_ESCAPES)
        return self._part(schema)

    # -- values in rules of their own

    def _value(self, schema: Schema) -> str:
        """Returns an expression for a value in a bare object, or in Python."""
        if "enum" in schema or "const" in schema:
            return self._choice(map(self._constant, schema.get("enum") or [schema["const"]]))
        for word in CHOICES:
            if word in schema:
                self._refuse_others(schema, frozenset({word, "type"}))
                return self._choice(self._part(choice) for choice in schema[word])
        kinds = _kinds(schema)
        if not kinds:
            return self._value_of_no_type(schema)
        return self._choice(self._value_of_type(kind, schema) for kind in kinds)

    def _choice(self, expressions: Iterable[str]) -> str:
        return f"({' | '.join(dict.fromkeys(expressions))})"

    def _refuse_closed(self, words: Iterable[str], closing: str) -> None:
        """Raises `InvalidRequest` for a word that contains the text behind it."""
        if word := next((word for word in words if closing in word), None):
            self._refuse(
                f"the value {word!r} contains {closing!r}, which ends a value in calls of this model: leave it out."
            )

    def _constant(self, value: Any) -> str:
        if not self._is_bare:
            return self._choice(map(quoted, (repr(value), json.dumps(value, ensure_ascii=False))))
        self._refuse_closed(_texts(value), QUOTE)
        parts = bare(value).split(QUOTE)  # The text between is a client's, so it has no control token.
        return f" {self._rules.text(QUOTE)} ".join(map(quoted, parts))

    def _part(self, schema: Any) -> str:
        """Returns the rule of a part of the schema. A part that refers to itself has one rule."""
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return self._value(self._resolved(schema))
        name = f"{self._name}_of_{re.sub(r'[^a-z0-9]', lambda c: f'_{ord(c[0])}_', reference.lower())}"
        if name not in self._rules:
            self._rules.add(name, NOTHING)
            self._rules.add(name, self._value(self._resolved(schema)))
        return name

    def _value_of_no_type(self, schema: Schema) -> str:
        kinds: list[str] = []
        for kind, words in (("string", OF_TEXT), ("number", OF_NUMBERS), ("array", OF_LISTS), ("object", OF_OBJECTS)):
            kinds += [kind] if words & schema.keys() else []
        if kinds:
            return self._value({"type": kinds, **schema})
        self._refuse_others(schema, frozenset())
        name = f"{self._name}_any"
        if name not in self._rules:
            self._rules.add(name, NOTHING)
            every = ["string", "number", "boolean", "null", "array", "object"]
            self._rules.add(name, self._value({"type": every}))
        return name

    def _value_of_type(self, kind: str, schema: Schema) -> str:
        own = {"string": OF_TEXT, "array": OF_LISTS, "object": OF_OBJECTS}.get(kind, OF_NUMBERS)
        self._refuse_others(schema, OF_TEXT | OF_NUMBERS | OF_LISTS | OF_OBJECTS | {"type"})
        part = {key: value for key, value in schema.items() if key in own}
        if kind == "string" and self._is_bare:
            strings = self._strings({**part, "type": "string"}, QUOTE)
            text = self._rules.up_to(QUOTE, self._next(), strings.terminal, may_be_empty=strings.may_be_empty)
            return f"{self._rules.text(QUOTE)} {text}"
        if kind == "array":
            return self._list(part)
        if kind == "object":
            return self._object(part)
        values = [self._json({**part, "type": kind}, escapes=PYTHON_ESCAPES)]
        if kind == "string" and not part:
            values.append(self._rules.add(self._next().upper(), SINGLE_QUOTED))
        if not self._is_bare:
            values += map(quoted, PYTHON_WORDS.get(kind, ()))
        return self._choice(values)

    def _list(self, schema: Schema) -> str:
        item = self._part(schema.get("items", {}))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = f"{item} ({self._comma} {item}){more}"
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _object(self, schema: Schema) -> str:
        def member(key: str, value: Any) -> str:
            if not self._is_bare:
                return f'{self._constant(key)} ":" " "? {self._part(value)}'
            if not re.fullmatch(r"[^{}\[\],:<\s]+", key):
                self._refuse(f"the property {key!r} cannot be written in the model's format of calls: rename it.")
            return f"{quoted(f'{key}:')} {self._part(value)}"

        def further(value: Any, known: Sequence[str]) -> str:
            key = f"({_without('/[A-Za-z0-9_.-]{1,64}/', known)})"
            if not self._is_bare:
                key = " | ".join(f"{mark} {key} {mark}" for mark in (quoted("'"), quoted('"')))
            space = "" if self._is_bare else '" "?'
            return f'{self._rules.add(self._next().upper(), key)} ":" {space} {self._part(value)}'

        return f'"{{" {self._members(schema, member, further, self._comma)} "}}"'

    # -- strings

    def _parts(self, schema: Schema) -> Iterator[Schema]:
        """Yields the alternatives of a schema."""
        choices = next((schema[word] for word in CHOICES if isinstance(schema.get(word), list)), None)
        if choices is None:
            yield schema
        for choice in choices or ():
            yield from self._parts(self._resolved(choice))

    def _strings(self, schema: Schema, closing: str) -> _Strings:
        """Returns the strings that a schema allows. Raises `InvalidRequest` for none, or one with `closing`."""
        terminals, may_be_empty = list[str](), False
        for part in self._parts(schema):
            if "enum" in part or "const" in part:
                words = [v for v in part.get("enum") or [part.get("const")] if isinstance(v, str)]
                self._refuse_closed(words, closing)
                terminals += [quoted(word) for word in words if word]
                may_be_empty = may_be_empty or "" in words
            elif takes_text(part, self._root) is not False:
                others = OF_NUMBERS | OF_LISTS | OF_OBJECTS
                self._refuse_others(part, OF_TEXT | others | {"type", *CHOICES})
                strings = self._text(part)
                terminals.append(strings.terminal)
                may_be_empty = may_be_empty or strings.may_be_empty
        if not terminals and not may_be_empty:
            self._refuse("a property allows no string.")
        return _Strings(" | ".join(terminals) or NOTHING, may_be_empty)

    def _text(self, schema: Schema) -> _Strings:
        """Returns the strings of a type."""
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if most is not None and most < least:
            self._refuse("minLength is above maxLength.")
        terminals = [rf"/(.|\n){{{least},{'' if most is None else most}}}/"] if least or most is not None else []
        shapes = list[str]()
        if isinstance(schema.get("pattern"), str):
            shapes.append(_anchored(schema["pattern"]) or "")
        if "format" in schema:
            shapes.append(f"/{FORMATS[schema['format']]}/" if schema["format"] in FORMATS else "")
        for shape in shapes:
            if shape and not LLMatcher.validate_grammar(f"start: X\nX: {shape}\n"):
                terminals.append(shape)
            elif not self._lenient:
                self._refuse(f"the pattern or format of {json.dumps(schema)} is not supported here: simplify it.")
        if not terminals:
            return _Strings(ANYTHING, True)
        return _Strings(f"({' & '.join([*terminals, NONEMPTY])})", not least and not shapes)


def _texts(value: Any) -> Iterator[str]:
    """Yields the strings in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.items():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _without(terminal: str, words: Sequence[str]) -> str:
    return f"{terminal} & ~({' | '.join(map(quoted, words))})" if words else terminal


def _kinds(schema: Schema) -> list[str]:
    kinds = schema.get("type") or []
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _anchored(pattern: str) -> str | None:
    """Returns the terminal of the texts in which a pattern is found, or None if it has other anchors."""
    inner = pattern.removeprefix("^")
    is_closed = inner.endswith("$") and not inner.endswith("\\$")
    inner = inner[:-1] if is_closed else inner
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", inner, flags=re.DOTALL)
    if any(anchor in plain for anchor in "^$") or r"\b" in inner.lower():
        return None
    before = "" if pattern.startswith("^") else r"(.|\n)*"
    after = "" if is_closed else r"(.|\n)*"
    depth = 0
    for char in plain:
        depth += (char == "(") - (char == ")")
        if char == "|" and not depth and (pattern.startswith("^") or is_closed):
            return None
    slashed = re.sub(r"(?<!\\)/", r"\/", inner).replace("\n", r"\n")
    return f"/{before}({slashed}){after}/"
