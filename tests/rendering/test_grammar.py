"""For every tool format, with markers as control tokens and as plain text:

1. The result of every walk through a grammar is parsed as requested: JSON, or calls with arguments by their schema.
2. Free text stays free, except for the calls in it.
3. A schema that is not supported is refused by name.
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
from agentjet.rendering.grammar import write_grammar
from agentjet.types import Constraint, Conversation, Message, ModelInfo
from tests.tiny import MARKERS, make_model_info
from tests.walks import Walker

POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": -5, "maximum": 99},
        "tag": {"enum": ["a", 'q"\\', "é"]},
        "more": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["x", "tag"],
    "additionalProperties": False,
}
FLAG = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
ODD_NAME = 'ro"ll\n/é'
SEEDS = range(12)


def function(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = (function("move", POINT), function(ODD_NAME, FLAG))
ASKED = Conversation((Message("user", "x"),), TOOLS)
SCHEMAS = {"move": POINT, ODD_NAME: FLAG}
MODELS = {
    "hermes": ("chatml", "hermes", True),
    "hermes in words": ("chatml", "hermes", False),
    "reasoning": ("qwen3", "hermes", True),
    "reasoning in words": ("qwen3", "hermes", False),
    "mistral": ("mistral", "mistral", True),
    "mistral in words": ("chatml", "mistral", True),
    "llama3": ("llama3", "llama3", True),
}
"""Template, tool format, and whether the markers of reasoning and Hermes calls are tokens, or text like any other."""


def make_model(folder: Path, template: str, tool_format: str, has_markers: bool) -> Model:
    model_info = make_model_info(folder, template, tool_format=tool_format)
    if not has_markers:
        path = folder / "tokenizer.json"
        settings = json.loads(path.read_text())
        settings["added_tokens"] = [token for token in settings["added_tokens"] if token["content"] not in MARKERS]
        path.write_text(json.dumps(settings))
    # A random walk would not find the end of a thought that is spelled out.
    return Model(model_info, "<think>so</think>" if template == "qwen3" and not has_markers else "")


def grammar_of(renderer: Renderer, conversation: Conversation, constraint: Constraint) -> str:
    return write_grammar(constraint, conversation.tools, renderer.style)


class Model:
    """A renderer, and walks through its grammars."""

    def __init__(self, model_info: ModelInfo, head: str = "") -> None:
        """Every walk starts with `head`."""
        self.renderer = Renderer(model_info)
        self._head = head
        self._walker = Walker(model_info)

    def answers(self, constraint: Constraint, conversation: Conversation = ASKED, hint: str = "") -> Iterator[Message]:
        grammar = grammar_of(self.renderer, conversation, constraint)
        for seed in SEEDS:
            walked = self._walker.walk(grammar, seed, hint=self._head + hint)
            yield self.renderer.parse(walked, conversation)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("card"), *MODELS[request.param])


def check_calls(answer: Message) -> None:
    assert answer.tool_calls
    for call in answer.tool_calls:
        assert jsonschema_rs.is_valid(SCHEMAS[call.name], json.loads(call.arguments)), call


def test_required_calls_are_calls_and_nothing_else(model: Model) -> None:
    seen = set()
    for answer in model.answers(Constraint(calls="required")):
        check_calls(answer)
        assert answer.content == ""
        seen |= {call.name for call in answer.tool_calls}
    assert seen == set(SCHEMAS)


def test_a_named_function_is_the_only_one_and_not_parallel_is_one(model: Model) -> None:
    for answer in model.answers(Constraint(calls="required", function=ODD_NAME, parallel=False)):
        check_calls(answer)
        assert [call.name for call in answer.tool_calls] == [ODD_NAME]


def test_json_follows_its_schema(model: Model) -> None:
    plain = Conversation((Message("user", "x"),))
    for answer in model.answers(Constraint(schema=POINT), plain):
        assert jsonschema_rs.is_valid(POINT, json.loads(answer.content)), answer
        assert not answer.tool_calls


def test_with_tools_on_offer_json_or_calls(model: Model) -> None:
    kinds = set()
    for answer in model.answers(Constraint(schema=POINT, strict=frozenset(SCHEMAS))):
        kinds.add(bool(answer.tool_calls))
        if answer.tool_calls:
            check_calls(answer)
        else:
            assert jsonschema_rs.is_valid(POINT, json.loads(answer.content))
    assert kinds == {True, False}


OPENINGS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": "{"}


@pytest.mark.parametrize("parallel", [True, False])
def test_free_text_may_announce_a_call_which_is_then_bound(model: Model, parallel: bool) -> None:
    strict = Constraint(strict=frozenset(SCHEMAS), parallel=parallel)
    opening = OPENINGS[model.renderer.model.tool_format]
    hint = opening if opening == "{" else f"so, {opening}"
    most = 0
    for answer in model.answers(strict, hint=hint):
        check_calls(answer)
        most = max(most, len(answer.tool_calls))
        if parallel is False:
            assert len(answer.tool_calls) == 1
    for answer in model.answers(strict, hint="no calls here: 3 < 4 & [1], {}"):
        assert answer.content.startswith("no calls here: 3 < 4 & [1], {}")
    if parallel and opening == "[TOOL_CALLS]":
        assert most > 1


def test_a_function_that_is_not_strict_is_called_with_any_object(model: Model) -> None:
    opening = OPENINGS[model.renderer.model.tool_format]
    key = "parameters" if opening == "{" else "arguments"
    head = {"<tool_call>": "<tool_call>\n{", "[TOOL_CALLS]": "[TOOL_CALLS][{", "{": "{"}[opening]
    hint = f'{head}"name": "move", "{key}": {{"x": 1.5}}'
    for answer in model.answers(Constraint(strict=frozenset({ODD_NAME}), parallel=False), hint=hint):
        assert json.loads(answer.tool_calls[0].arguments) == {"x": 1.5}


def test_no_constraint_is_no_grammar(model: Model) -> None:
    assert grammar_of(model.renderer, ASKED, Constraint()) == ""
    assert grammar_of(model.renderer, Conversation(ASKED.messages), Constraint(parallel=False)) == ""
    assert grammar_of(model.renderer, ASKED, Constraint(schema_param="text.format")) == ""


def test_reasoning_comes_first_where_the_template_knows_it(tmp_path: Path) -> None:
    model = Model(make_model_info(tmp_path, "qwen3", tool_format="hermes"))
    for answer in model.answers(Constraint(calls="required"), hint="<think>so</think>\n\n"):
        assert answer.reasoning == "so"
        check_calls(answer)


IMPOSSIBLE = [
    ({"type": "object", "properties": {"x": {"not": {}}}}, r'\["not"\]'),
    ({"$ref": "#/$defs/missing"}, "missing"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
    ({"type": "sting"}, "sting"),
    ({"enum": [f"value {i}" for i in range(20_000)]}, "above the limit"),
]


@pytest.mark.parametrize(("schema", "why"), IMPOSSIBLE)
def test_a_schema_that_cannot_be_followed_is_refused_by_name(tmp_path: Path, schema: dict[str, Any], why: str) -> None:
    renderer = Renderer(make_model_info(tmp_path, tool_format="hermes"))
    plain = Conversation((Message("user", "x"),))
    with pytest.raises(InvalidRequest, match=f"^text.format: .*{why}") as refused:
        grammar_of(renderer, plain, Constraint(schema=schema, schema_param="text.format"))
    assert refused.value.param == "text.format" and "\n" not in refused.value.message
    bad = Conversation(plain.messages, (TOOLS[0], function("f", schema)))
    with pytest.raises(InvalidRequest) as refused:
        grammar_of(renderer, bad, Constraint(strict=frozenset({"f"})))
    assert refused.value.param == "tools.1.function.parameters" and "'f'" in refused.value.message


def test_a_forced_call_that_is_not_strict_follows_what_is_known(tmp_path: Path) -> None:
    renderer = Renderer(make_model_info(tmp_path, tool_format="hermes"))
    loose = Conversation((Message("user", "x"),), (function("f", {**FLAG, "not": {"const": 1}}),))
    assert '"on"' in grammar_of(renderer, loose, Constraint(calls="required"))
    with pytest.raises(InvalidRequest, match=r'\["not"\]'):
        grammar_of(renderer, loose, Constraint(calls="required", strict=frozenset({"f"})))


def test_all_schemas_together_are_bounded(tmp_path: Path) -> None:
    renderer = Renderer(make_model_info(tmp_path, tool_format="hermes"))
    long = {"type": "object", "properties": {"x": {"type": "string", "description": "d" * 100_000}}}
    tools = tuple(function(f"f{i}", long) for i in range(6))
    strict = Constraint(strict=frozenset(f"f{i}" for i in range(6)))
    with pytest.raises(InvalidRequest, match="above the limit of 131072"):
        grammar_of(renderer, Conversation((Message("user", "x"),), tools), strict)
