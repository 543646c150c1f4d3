"""Forced and strict calls in the own syntax of every family of `tests/templates/families.json`:

1. The grammar of a forced call accepts the text that the family writes, and refuses another name and another type. The
   turn ends with the token that ends calls.
2. The result of every walk through a grammar is parsed as calls that are valid by the schema.
3. What a format cannot write is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from agentjet.errors import InvalidRequest
from agentjet.rendering import Renderer
from agentjet.rendering.chat_template import try_tools
from agentjet.rendering.formats import HARMONY, TOOL_FORMATS, ParsedCall, write_calls
from agentjet.rendering.grammar import write_grammar
from agentjet.types import Constraint, Conversation, Message
from tests import tiny
from tests.walks import Walker

TEMPLATES = tiny.families()["templates"]
WITH_TOOLS = [name for name, entry in TEMPLATES.items() if entry["syntax"]]
SEEDS = range(4)


def function(name: str, properties: dict[str, Any], required: list[str], **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEATHER = function(
    "weather",
    {
        "city": {"type": "string"},
        "code": {"type": "string"},
        "options": {"type": "object"},
        "count": {"type": "integer"},
    },
    ["city"],
)
MOVE = function(
    "move",
    {
        "word": {"type": "string", "maxLength": 4},
        "mode": {"enum": ["fast", "a b", "é\"'"]},
        "size": {"type": "integer", "minimum": -5, "maximum": 99},
        "flag": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 2}, {"type": "null"}]},
        "code": {"type": "string", "pattern": "^[0-9]{3}$"},
        "day": {"type": "string", "format": "date"},
        "more": {
            "type": "object",
            "properties": {
                "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
                "tag": {"$ref": "#/$defs/tag"},
                "or": {"type": ["boolean", "null"]},
            },
            "required": ["tag"],
            "additionalProperties": False,
        },
    },
    ["mode", "size", "more"],
    **{"$defs": {"tag": {"enum": ["a", "007", 7, None]}}},
)
STOP = function("stop", {}, [])
WAIT = function("wait", {"a": {"const": "b"}, "c": {"type": "null"}}, [])
TOOLS = (MOVE, STOP, WAIT)
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (*TOOLS, WEATHER)}


class Family:
    """A renderer of a family, and walks through its grammars."""

    def __init__(self, template: str, folder: Path) -> None:
        self.entry = TEMPLATES[template]
        self.name = try_tools(tiny.template(template)).tool_format
        model_info = tiny.make_model_info(folder, template, tool_format=self.name)
        self.renderer, self._walker = Renderer(model_info), Walker(model_info)
        self.form, style = TOOL_FORMATS[self.name], self.renderer.style
        self.thought = f"so{style.reasoning.closing}" if style.in_reasoning and style.reasoning else ""

    def written(self, case: str) -> str | None:
        """Returns the calls of a case as the family writes them, or None if it does not."""
        text = self.entry.get("writes", {}).get(case) or self.entry["renders"][case] or ""
        _, marker, rest = text.partition(self.form.marker or self.form.opening or '{"name"')
        if not marker:
            return None
        ends = (self.entry["end"], self.entry["eos"], "<|tool_response>", "<|START_OF_TURN", "<|end|>")
        for end in ends if self.name not in (HARMONY, "apertus") else ():
            rest = rest.partition(end)[0]
        return marker + rest.replace("begin|>c0aaaaaaa", "begin|>functions.weather:0").rstrip()

    def walk(self, constraint: Constraint, tools: tuple[Any, ...], seed: int = 0, hint: str = "") -> Message:
        """Raises `AssertionError` if the grammar does not allow the text of `hint`."""
        grammar = write_grammar(constraint, tools, self.renderer.style)
        walked = self._walker.walk(grammar, seed, hint=self.thought + hint)
        self.end = self.renderer.token_bytes(walked[-1]).decode()
        return self.renderer.parse(walked, Conversation((Message("user", "x"),), tools))

    def walks(self, constraint: Constraint, tools: tuple[Any, ...], hint: str = "") -> Iterator[Message]:
        return (self.walk(constraint, tools, seed, hint) for seed in SEEDS)


@pytest.fixture(scope="module", params=WITH_TOOLS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp("model"))


def check_calls(answer: Message) -> None:
    assert answer.tool_calls
    for call in answer.tool_calls:
        assert jsonschema_rs.is_valid(SCHEMAS[call.name], json.loads(call.arguments)), call


@pytest.mark.parametrize("case", ["one_call", "two_calls", "typed_arguments"])
def test_a_forced_call_is_written_as_the_family_writes_it(family: Family, case: str) -> None:
    text = family.written(case)
    if text is None or (case == "typed_arguments" and family.name == "pythonic"):
        pytest.skip("its template does not write this, or writes values as text")
    properties = WEATHER["function"]["parameters"]["properties"]
    order = sorted(properties) if family.name == "gemma4" else properties
    tool = function("weather", {key: properties[key] for key in order}, ["city"])
    forced = Constraint(calls="required")
    answer = family.walk(forced, (tool,), hint=text)
    check_calls(answer)
    assert answer.content == "" and answer.tool_calls[0].name == "weather"
    with pytest.raises(AssertionError, match="is not allowed"):
        family.walk(forced, (tool,), hint=text.replace("weather", "weathes"))
    number = function("weather", {**properties, "city": {"type": "integer"}}, ["city"])
    with pytest.raises(AssertionError, match="is not allowed"):
        family.walk(forced, (number,), hint=text)


def test_forced_calls_are_calls_and_nothing_else(family: Family) -> None:
    for answer in family.walks(Constraint(calls="required"), TOOLS):
        check_calls(answer)
        assert answer.content == "" and (not family.form.marker or family.end in (family.form.ends or (family.end,)))
    for name in SCHEMAS.keys() - {"weather"}:
        answer = family.walk(Constraint(calls="required", function=name, parallel=False), TOOLS)
        check_calls(answer)
        assert [call.name for call in answer.tool_calls] == [name]


def announced(family: Family) -> str:
    """Returns text that announces a call: all that is free before it."""
    if family.name == HARMONY:
        return family.form.call.partition("{name}")[0]
    return {"llama3": "{", "pythonic": "so, [move("}.get(family.name, f"so, {family.form.marker}")


@pytest.mark.parametrize("parallel", [True, False])
def test_free_text_may_announce_a_call_which_is_then_bound(family: Family, parallel: bool) -> None:
    strict = Constraint(strict=frozenset(SCHEMAS), parallel=parallel)
    for answer in family.walks(strict, TOOLS, announced(family)):
        check_calls(answer)
        assert parallel or len(answer.tool_calls) == 1
    style = family.renderer.style
    before = style.reasoning.answer[0].removeprefix("<|start|>assistant") if style.reasoning else ""
    answer = family.walk(strict, TOOLS, hint=f"{before}no calls here: 3 < 4 & [1], {{}}")
    assert answer.content.startswith("no calls here: 3 < 4 & [1], {}"), answer


def test_a_function_that_is_not_strict_is_called_with_any_object(family: Family) -> None:
    text = write_calls(family.form, [ParsedCall("move", '{"x": 1.5}')]) if family.name != "apertus" else ""
    text = text or '<|tools_prefix|>[{"move": {"x": 1.5}}]'
    answer = family.walk(Constraint(strict=frozenset({"stop"}), parallel=False), TOOLS, hint=text)
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == [("move", {"x": 1.5})]


def test_an_answer_in_json_stands_where_the_family_has_its_answer(family: Family) -> None:
    schema = SCHEMAS["wait"]
    for answer in family.walks(Constraint(schema=schema), ()):
        assert jsonschema_rs.is_valid(schema, json.loads(answer.content)), answer
    for answer in family.walks(Constraint(schema=schema, strict=frozenset(SCHEMAS)), TOOLS):
        if answer.tool_calls:
            check_calls(answer)
        else:
            assert jsonschema_rs.is_valid(schema, json.loads(answer.content)), answer


def test_a_call_may_end_reasoning_that_nothing_opens(tmp_path: Path) -> None:
    family = Family("apriel1_5", tmp_path)
    family.thought = "so, a call: "
    answer = family.walk(Constraint(calls="required", function="stop"), TOOLS, hint="<tool_calls>")
    assert answer.reasoning == "so, a call: " and answer.tool_calls[0].name == "stop"


NAME, PARAMETERS = "tools.0.function.name", "tools.0.function.parameters"
UNWRITTEN = [
    ("glm4_7", function("find it", {}, []), NAME, "'find it' cannot be written .* glm-4.7: use letters"),
    ("qwen3_coder", function("f", {"a\nb": {}}, []), PARAMETERS, "cannot be written .* qwen3-coder"),
    ("qwen3_coder", function("f", {"<|im_end|>": {}}, []), PARAMETERS, "cannot be written"),
    ("qwen3_coder", function("f", {"a": {"enum": ["x</parameter>"]}}, []), PARAMETERS, "'x</parameter>' contains"),
    ("gemma4", function("f", {"a": {"const": ['<|"|>']}}, []), PARAMETERS, "ends a value in calls"),
    ("lfm2", function("f", {"class": {"type": "string"}}, []), PARAMETERS, "'class' cannot be written"),
    ("gemma4", function("f", {"a": {"type": "object", "properties": {"b:c": {}}}}, []), PARAMETERS, "'b:c' .*: rename"),
    (
        "gemma4",
        function("f", {"a": {"type": "array", "prefixItems": [{}]}}, []),
        PARAMETERS,
        "'prefixItems' .*: remove",
    ),
    ("seed_oss", function("f", {"a": {"type": "string", "pattern": "^a|b$"}}, []), PARAMETERS, "pattern .* simplify"),
    ("minimax_m2", function("f", {"a": {"type": "string", "format": "ipv4"}}, []), PARAMETERS, "format .* simplify"),
    ("glm4_5", function("f", {"a": {"type": "string"}}, [], allOf=[{}]), PARAMETERS, "'allOf' here: remove it"),
    ("step3_5", function("f", {"a": {"$ref": "#/$defs/b"}}, []), PARAMETERS, "b"),
]


@pytest.mark.parametrize(("template", "tool", "param", "why"), UNWRITTEN)
def test_what_a_format_cannot_write_is_refused_by_name(
    template: str, tool: dict[str, Any], param: str, why: str, tmp_path: Path
) -> None:
    style = Family(template, tmp_path).renderer.style
    with pytest.raises(InvalidRequest, match=why) as refused:
        write_grammar(Constraint(calls="required", strict=frozenset({tool["function"]["name"]})), [tool], style)
    assert (refused.value.code, refused.value.param) == ("unsupported_schema", param)


@pytest.mark.parametrize("template", ["gemma4", "lfm2", "qwen3_coder", "qwen2_5"])
def test_a_schema_may_refer_to_itself(template: str, tmp_path: Path) -> None:
    node = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "integer"}},
        "required": ["v"],
        "additionalProperties": False,
    }
    tool = function("f", {"first": {"$ref": "#/$defs/node"}}, ["first"], **{"$defs": {"node": node}})
    family = Family(template, tmp_path)
    text = write_calls(family.form, [ParsedCall("f", '{"first": {"next": {"v": 1}, "v": 2}}')])
    [call] = family.walk(Constraint(calls="required", parallel=False), (tool,), hint=text).tool_calls
    assert json.loads(call.arguments) == {"first": {"next": {"v": 1}, "v": 2}}


def test_a_forced_call_that_is_not_strict_ignores_what_its_format_cannot_follow(tmp_path: Path) -> None:
    family = Family("glm4_5", tmp_path)
    tool = function("f", {"a": {"type": "string", "pattern": "^a|b$", "maxLength": 3}}, ["a"], allOf=[{}])
    [call] = family.walk(Constraint(calls="required", parallel=False), (tool,)).tool_calls
    assert len(json.loads(call.arguments)["a"]) <= 3
