"""Every family of the table (`tests/templates/families.json`), with its own tiny tokenizer:

1. The trial finds the format of its calls and the block of its reasoning.
2. The calls of the conversation are read from its own text: typed, in parallel, beside text, beside a broken one.
3. History with sampled turns begins with the prompt and exactly the sampled tokens, two tool turns long.
4. What a template, a tool or a setting can get wrong.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from agentjet.errors import ConfigError
from agentjet.front.prompts import prepare_prompt
from agentjet.rendering import Renderer, template_for
from agentjet.rendering.chat_template import check_tool_format, try_tools
from agentjet.rendering.formats import TOOL_FORMATS, ParsedCall, write_calls
from agentjet.rendering.parser import split_calls
from agentjet.timeline import ConversationTree
from agentjet.types import Call, Conversation, Message, ToolCall
from tests import tiny

TABLE = tiny.families()
ENTRIES: dict[str, dict[str, Any]] = TABLE["templates"]
FORMATS = {
    "apertus": "apertus", "apriel1_5": "apriel", "bielik3": "hermes", "command_r7b": "command-r7b",
    "command_r_plus": "command-r-plus", "deepseek_r1": "deepseek-r1", "deepseek_v3_1": "deepseek-v3.1",
    "deepseek_v3_2": "deepseek-v3.2", "gemma4": "gemma4", "glm4_5": "glm-4.5", "glm4_7": "glm-4.7",
    "gpt_oss": "harmony", "granite3_3": "granite3", "granite4": "hermes", "hermes3": "hermes", "kimi_k2": "kimi-k2",
    "lfm2": "lfm2", "lfm2_5": "lfm2", "llama3": "llama3", "llama4_pythonic": "pythonic", "minimax_m2": "minimax-m2",
    "mistral": "mistral", "mistral_nemo": "mistral", "mistral_v11": "mistral-v11", "mistral_v13": "mistral-v13",
    "nemotron3": "qwen3-coder", "nemotron_nano2": "nemotron-nano2", "qwen2_5": "hermes", "qwen3_5": "qwen3-coder",
    "qwen3_coder": "qwen3-coder", "qwen3_own": "hermes", "qwq": "hermes", "seed_oss": "seed-oss", "smollm3": "hermes",
    "step3_5": "qwen3-coder",
}  # fmt: skip
"""By template."""
FAMILIES = [(name, family["template"]) for name, family in TABLE["families"].items() if family["template"] in FORMATS]
OTHERS = sorted(ENTRIES.keys() - FORMATS.keys())


@cache
def renderer(name: str) -> Renderer:
    with TemporaryDirectory() as folder:
        info = tiny.make_model_info(folder, name)
        template, tool_format = template_for("m", info.chat_template)
        return Renderer(replace(info, chat_template=template, tool_format=tool_format))


def conversation(case: str) -> Conversation:
    return Conversation(tuple(map(message, TABLE["conversations"][case])), tuple(TABLE["tools"]))


def message(given: dict[str, Any]) -> Message:
    calls = tuple(
        ToolCall(call["id"], call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False))
        for call in given.get("tool_calls", ())
    )
    reasoning = given.get("reasoning_content", "")
    return Message(given["role"], given["content"], reasoning, calls, given.get("tool_call_id", ""))


def sampled(name: str, case: str) -> str | None:
    """Returns the text that the family's model samples for a case, or None if there is none."""
    entry = ENTRIES[name]
    text = entry.get("writes", {}).get(case)
    if text is None:
        text = (
            entry["broken_call"]
            if case == "broken_call"
            else entry["renders"][case]
            if entry["renders_calls"]
            else None
        )
        if text is None:
            return None
        head = os.path.commonprefix([entry["renders"]["prompt"], text])  # noqa: RUF071  these are not paths
        if head and head[-1] not in ">\n]":  # Prompt and text go on with different tags.
            head = head[: head.rfind("<")]
        text = text[len(head) :]
    ends = [(text.find(end), end) for end in tiny.dialect(name).ends if text.find(end) > 0]
    at, end = min(ends, default=(len(text), entry["end"]))
    text, style = text[:at] + end, renderer(name).style
    if name == "kimi_k2":  # Its template writes the ids of the table in the place of the names.
        text = text.replace("c0aaaaaaa", "functions.weather:0").replace("c1aaaaaaa", "functions.weather:1")
    if style.reasoning and style.reasoning.opening:  # An empty block gets a thought.
        opening, closing = style.reasoning.opening.rstrip("\n"), style.reasoning.closing
        if style.in_reasoning:
            return re.sub(rf"\A(?:\s*{re.escape(closing)})?", f"Hm.\n{closing}", text, count=1)
        return re.sub(rf"{re.escape(opening)}\s*{re.escape(closing)}", f"{opening}\nHm.\n{closing}", text, count=1)
    return text


def tokens(name: str, text: str) -> list[int]:
    ids: list[int] = tiny.tokenizer(name).encode(text, add_special_tokens=False).ids
    return ids


def meaning(answer: Message) -> list[tuple[str, Any]]:
    return [(call.name, call.value()) for call in answer.tool_calls]


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_the_trial_finds_tools_and_reasoning(name: str) -> None:
    style, reasoning = renderer(name).style, ENTRIES[name]["reasoning"]
    assert style.tool_format == FORMATS.get(name, "")
    found = style.reasoning
    assert (
        (found.opening, found.closing) == (reasoning["open"], reasoning["close"]) if reasoning and found else not found
    )
    assert style.in_reasoning == bool(reasoning and reasoning["opened_by_prompt"])
    if name in FORMATS:
        assert not try_tools(tiny.template(name)).remark


@pytest.mark.parametrize("case", ["one_call", "two_calls", "call_beside_text", "typed_arguments", "broken_call"])
@pytest.mark.parametrize(("family", "name"), FAMILIES)
def test_calls_are_read(family: str, name: str, case: str) -> None:
    text = sampled(name, case)
    if text is None or (name, case) == ("gpt_oss", "two_calls"):  # Harmony has one call in a turn.
        return
    read = renderer(name).parse(tokens(name, text), conversation("prompt"))
    wanted = meaning(conversation("two_calls" if case == "broken_call" else case).messages[1])
    if case == "broken_call":
        assert meaning(read) == wanted[1:]
        assert "Paris" in read.content and "Rome" not in read.content
        return
    if (name, case) == ("llama4_pythonic", "typed_arguments"):  # It writes all as strings. The schema has no `count`.
        wanted[0][1]["count"] = "3"
    assert meaning(read) == wanted
    assert read.content.strip() in ("", "I look.")
    if case == "call_beside_text" and "I look." in text:
        # Harmony has it in the analysis. Nothing tells Apriel's text from its reasoning.
        said = read.reasoning if name in ("gpt_oss", "apriel1_5") else read.content
        assert said.strip() == "I look."


@pytest.mark.parametrize(("family", "name"), FAMILIES)
def test_a_cut_completion_is_text_or_the_calls_before_the_cut(family: str, name: str) -> None:
    whole = sampled(name, "two_calls") or sampled(name, "one_call")
    assert whole is not None
    ids, wanted = tokens(name, whole), meaning(conversation("two_calls").messages[1])
    for end in range(len(ids)):
        read = renderer(name).parse(ids[:end], conversation("prompt"))
        assert meaning(read) == wanted[: len(read.tool_calls)]


@pytest.mark.parametrize("case", ["one_call", "two_calls"])
@pytest.mark.parametrize(("family", "name"), FAMILIES)
def test_history_has_exactly_the_sampled_tokens(family: str, name: str, case: str) -> None:
    text, ours = sampled(name, case), renderer(name)
    if text is None:
        return
    asked, known = conversation("prompt"), dict[int, bytes]()
    # Hermes 3 writes the result of a tool differently once a turn follows.
    for turn in range(1 if name == "hermes3" else 2):
        prompt, ids = ours.render(asked, sampled=known), tokens(name, text)
        assert ids[-1] in ours.model.end_tokens
        read = ours.parse(ids, asked)
        calls = tuple(replace(call, id=f"call_{turn}_{i}") for i, call in enumerate(read.tool_calls))
        assert calls
        known[len(asked.messages)] = ours.generation_tail + ours.encode_tokens(ids)
        results = [Message("tool", f"{turn}-{i}", tool_call_id=call.id) for i, call in enumerate(calls)]
        asked = replace(asked, messages=(*asked.messages, replace(read, tool_calls=calls), *results))
        told = ours.render(asked, sampled=known)
        assert told.startswith(prompt + ours.encode_tokens(ids)), ours.show(told)
        rest = ours.show(told[len(prompt + ours.encode_tokens(ids)) :])
        assert all(f"{turn}-{i}" in rest for i in range(len(calls))) and "Paris" not in rest


DROPS_REASONING = {"deepseek_r1", "nemotron_nano2", "qwq"}
"""Templates that drop the reasoning of a turn with a call as soon as its result follows."""


@pytest.mark.parametrize("is_empty", [False, True], ids=["reasoning", "empty block"])
@pytest.mark.parametrize(("family", "name"), FAMILIES)
def test_the_result_of_a_call_does_not_fork(family: str, name: str, is_empty: bool) -> None:
    text, ours = sampled(name, "one_call"), renderer(name)
    assert text is not None
    if is_empty:
        text = text.replace("Hm.\n", "\n").replace("Hm.", "")
    tree, asked, ids = ConversationTree(), conversation("prompt"), tokens(name, text)
    prompt, answer = prepare_prompt(ours, tree, asked, "template"), ours.parse(ids, asked)
    call = Call(
        id="c", episode_id="e", role="", parent=None, kept=0, suffix=prompt.suffix, completion=tuple(ids), logprobs=(),
        versions=(), temperature=1.0, finish_reason="tool_calls", response=answer, prompt_key=prompt.key, created=0.0,
        ask=prompt.ask, fork=prompt.fork,
    )  # fmt: skip
    tree.add(call, prompt.pieces, tuple(ours.pieces(ids)))
    results = [Message("tool", "12", tool_call_id=call.id) for call in answer.tool_calls]
    after = prepare_prompt(ours, tree, replace(asked, messages=(*asked.messages, answer, *results)), "template")
    assert (after.kept == len(prompt.tokens) + len(ids)) == (name not in DROPS_REASONING)


@pytest.mark.parametrize(("family", "name"), FAMILIES)
def test_an_answer_keeps_its_tokens_before_the_end(family: str, name: str) -> None:
    ours, style = renderer(name), renderer(name).style
    asked = replace(conversation("prompt"), tools=())  # Mistral's templates move the tools to the last user.
    answer = "Hello."
    if style.reasoning:
        before, after = style.reasoning.answer
        thought = f"{'' if style.in_reasoning else style.reasoning.opening}Hm.\n{style.reasoning.closing}"
        answer = f"{thought}{before}Hello.{'' if style.reasoning.channels else after}"
    ids = [*tokens(name, answer), ours.model.end_tokens[0]]
    read = ours.parse(ids, asked)
    assert (read.content, read.reasoning) == ("Hello.", "Hm." if style.reasoning else "")
    said = ours.generation_tail + ours.encode_tokens(ids)
    after_it = replace(asked, messages=(*asked.messages, read, Message("user", "Go")))
    told = ours.render(after_it, sampled={1: said})
    assert told.startswith(ours.render(asked) + ours.encode_tokens(ids[:-1])), ours.show(told)
    assert ours.show(told).count("Hello.") == 1


def test_the_end_token_of_harmony_stays_in_history() -> None:
    ours, asked = renderer("gpt_oss"), replace(conversation("prompt"), tools=())
    ids = tokens("gpt_oss", "<|channel|>final<|message|>Hello.<|return|>")  # The template writes <|end|> in history.
    said, after_it = ours.encode_tokens(ids), (*asked.messages, ours.parse(ids, asked), Message("user", "Go"))
    told = ours.render(replace(asked, messages=after_it), sampled={1: said})
    assert told.startswith(ours.render(asked) + said + ours.encode_tokens(tokens("gpt_oss", "<|start|>user")))


@pytest.mark.parametrize("thought", ["", "Hm."])
@pytest.mark.parametrize("num_calls", [0, 1, 2])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_given_answer_is_read_as_given(name: str, num_calls: int, thought: str) -> None:
    ours, asked = renderer(name), conversation("prompt")
    if not ours.style.reasoning and thought:
        return
    calls = conversation("two_calls").messages[1].tool_calls[:num_calls]
    answer = Message("assistant", "" if calls else "Hello.", thought, calls)
    ids = ours.tokenize_answer(asked, answer)
    read = ours.parse(ids, asked)
    assert sum(id_ in ours.model.end_tokens for id_ in ids) == 1 and ids[-1] in ours.model.end_tokens
    if name == "gpt_oss" and num_calls == 2:  # The token after its first call ends the turn.
        assert meaning(read) == meaning(answer)[:1]
        return
    is_closed = name == "deepseek_v3_1"  # Its prompt has closed the block.
    assert read.reasoning == ("" if is_closed else thought)
    assert (read.content.strip(), meaning(read)) == (answer.content, meaning(answer))


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_a_format_writes_is_read(name: str) -> None:
    form = TOOL_FORMATS[name]
    arguments = {"city": 'Zürich\n"so" </b>', "code": "007", "options": {"deep": [1, 2.5, {"on": True, "none": None}]}}
    calls = [ParsedCall("weather", json.dumps(arguments)), ParsedCall("weather", "{}")]
    content, read = split_calls("so\n" * bool(form.marker) + write_calls(form, calls), name, TABLE["tools"])
    assert [(call.name, json.loads(call.arguments)) for call in read] == [("weather", arguments), ("weather", {})]
    assert content.strip() == ("so" if form.marker else "")


# ---- what a template, a tool or a setting can get wrong --------------------------------------------------------------

TURN = (
    "{% if tools %}{{ tools | tojson }}{% endif %}SHOWN{% for m in messages %}{{ m.role + ':' + m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
)
NAME, ARGUMENTS, TEXT = (
    f"' + {value} + '" for value in ("c.function.name", "c.function.arguments | tojson", "c.function.arguments")
)
JSON = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'


def writing(*texts: str, shown: str = "") -> str:
    return TURN.replace("SHOWN", shown).replace("CALL", "".join("{{ '" + text + "' }}" for text in texts))


@pytest.mark.parametrize(
    ("source", "tool_format", "remark"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "", "has no tools"),
        ("{{ raise_exception('never') }}", "", "one message of a user: the model's chat template refuses"),
        (writing(), "", "writes no calls and shows no known syntax"),
        (writing(shown="<tool_call>...</tool_call>"), "hermes", ""),
        (writing(shown="<tool_call>"), "", "shows no known syntax"),
        (writing(f"<call>{JSON}</call>"), "", "no tool format reads the calls"),
        (writing(f"<tool_call>{JSON}</tool_call>"), "hermes", ""),
        (
            writing(f"<tool_call>{JSON}</tool_call>", f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}"),
            "mistral-v13",
            "mistral-v13 is used, and hermes reads its calls, too",
        ),
        (writing(f'<tool_call>{{"name": "{NAME}", "arguments": {TEXT}}}</tool_call>'), "hermes", ""),
    ],
    ids=[
        "no tools",
        "refuses",
        "no calls",
        "shown",
        "half shown",
        "unknown",
        "other spaces",
        "two formats",
        "arguments as text",
    ],
)
def test_the_trial_of_other_templates(source: str, tool_format: str, remark: str) -> None:
    trial = try_tools(source)
    assert trial.tool_format == tool_format
    assert remark in trial.remark and bool(remark) == bool(trial.remark)


def test_a_forced_format_is_taken_and_an_unknown_one_is_refused() -> None:
    source = writing(f"<call>{JSON}</call>")
    assert template_for("m", source, "llama3") == (source, "llama3")
    assert "model.tool_format = 'llama3' does not read the calls" in try_tools(source, "llama3").remark
    with pytest.raises(ConfigError, match=r"model.tool_format = 'qwen3-codr' .* did you mean 'qwen3-coder'\? .*hermes"):
        check_tool_format("qwen3-codr")


SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "other": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "kind": {"enum": ["1", "2"]},
        "number": {"type": "integer"},
        "point": {"$ref": "#/$defs/point"},
    },
    "$defs": {"point": {"type": "object"}},
}
TYPED = [
    ("text", "7", "7"), ("text", "null", "null"), ("text", " a\n", " a\n"), ("text", '{"a": 1}', '{"a": 1}'),
    ("maybe", "null", None), ("maybe", "7", "7"), ("other", "null", None), ("other", "true", "true"),
    ("kind", "1", "1"), ("number", "7", 7), ("number", "seven", "seven"), ("number", "007", "007"),
    ("point", "{'a': True, 'b': (1, -2)}", {"a": True, "b": [1, -2]}), ("point", '{"a": null}', {"a": None}),
    ("point", "NaN", "NaN"), ("unknown", "7", 7), ("unknown", "a < b", "a < b"), ("unknown", "None", None),
]  # fmt: skip


@pytest.mark.parametrize(("key", "written", "value"), TYPED)
@pytest.mark.parametrize("tool_format", ["qwen3-coder", "seed-oss", "minimax-m2", "glm-4.5", "glm-4.7"])
def test_values_have_the_types_of_the_schema(tool_format: str, key: str, written: str, value: Any) -> None:
    tools = ({"type": "function", "function": {"name": "f", "parameters": SCHEMA}},)
    text = write_calls(TOOL_FORMATS[tool_format], [ParsedCall("f", json.dumps({key: written}))])
    [call] = split_calls(text, tool_format, tools)[1]
    assert json.loads(call.arguments) == {key: value}


@pytest.mark.parametrize("parameters", [None, {}, {"properties": 3}, {"properties": {"a": True}}, "text"])
def test_a_tool_without_a_schema_has_json_or_text(parameters: Any) -> None:
    tools = ({"type": "function", "function": {"name": "f", "parameters": parameters}}, {"type": "other"})
    text = write_calls(TOOL_FORMATS["glm-4.7"], [ParsedCall("f", '{"a": "7", "b": "x"}')])
    assert json.loads(split_calls(text, "glm-4.7", tools)[1][0].arguments) == {"a": 7, "b": "x"}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_hostile_text_is_read_in_time(name: str) -> None:
    form = TOOL_FORMATS[name]
    for piece in (form.marker or "[", "{", "[", '{"name": ', "f(", "'", '<|"|>', "<tool_call>f<arg_key>", form.call):
        text = (form.marker + piece * 5_000) if piece != form.call else piece * 500
        assert split_calls(text, name) == (text, [])


def test_objects_in_prose_are_no_calls() -> None:
    for text in ('See [1] and [f(2)], or {"name": "weather"}.', '{"name": "Bob", "age": 3}', "[note(1), x]"):
        for name in ("llama3", "pythonic"):
            assert split_calls(text, name, TABLE["tools"]) == (text, [])
    unknown = '{"name": "other", "parameters": {}}'
    assert split_calls(unknown, "llama3", TABLE["tools"]) == ("", [ParsedCall("other", "{}")])


def test_the_ids_of_a_model_come_back_with_the_results() -> None:
    for name, given, shown in (
        ("kimi_k2", "functions.weather:4", "## Return of functions.weather:4"),
        ("mistral_v11", "abcDEF123", "[TOOL_RESULTS]abcDEF123"),
        ("mistral", "abcDEF123", '"call_id": "abcDEF123"'),
    ):
        text, ours = sampled(name, "one_call"), renderer(name)
        assert text is not None
        text = text.replace("c0aaaaaaa", given).replace("functions.weather:0", given)
        asked, ids = conversation("prompt"), tokens(name, text)
        read = ours.parse(ids, asked)
        calls = tuple(replace(call, id="call_xyz_0") for call in read.tool_calls)
        asked = replace(
            asked,
            messages=(
                *asked.messages,
                replace(read, tool_calls=calls),
                Message("tool", "12", tool_call_id="call_xyz_0"),
            ),
        )
        assert shown in ours.show(ours.render(asked, sampled={1: ours.encode_tokens(ids)}))
    unsampled = renderer("kimi_k2").show(renderer("kimi_k2").render(asked))
    assert (
        "functions.weather:0<|tool_call_argument_begin|>" in unsampled
        and "## Return of functions.weather:0" in unsampled
    )
