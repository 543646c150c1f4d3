"""Sampled turns in templates with other layouts (Llama 3, Mistral, Llama 2), and given answers in all templates.

1. Prompts equal those of `transformers.apply_chat_template`, token for token.
2. A sampled turn follows the generation prompt directly and ends as it was sampled, with any white space that the
   template adds, and with or without special treatment of tool calls.
3. If the layout of the template is unknown, the plain messages are written: nothing is lost or doubled.
4. The renderer finds the messages whose reasoning the template keeps.
5. Call ids that Mistral's templates refuse are replaced, equally in call and result.
6. Given answers: prompt, answer and the rest are those of transformers, too. The tokens end with the end token and read
   back as the given message. A template that writes the answer elsewhere, or without an end, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from agentjet.errors import InvalidRequest
from agentjet.rendering import Renderer, template_for
from agentjet.rendering.vocabulary import escape
from agentjet.types import Conversation, Message, ToolCall
from tests import tiny
from tests.rendering.test_renderer import plain

TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}},)
CALL = Message("assistant", tool_calls=(ToolCall("abc123XYZ", "add", '{"a": 1}'),))
RESULT = Message("tool", "2", tool_call_id="abc123XYZ")
TWO_CALLS = replace(CALL, tool_calls=(*CALL.tool_calls, ToolCall("defdefdef", "sub", "{}")))
USER, MORE = Message("user", "hello"), Message("user", "the 42")

Build = Callable[..., Renderer]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Returns a renderer with the tokenizer of one of `tests/templates`, and its source or another one."""

    @cache
    def build(name: str, source: str = "") -> Renderer:
        model_info = tiny.make_model_info(tmp_path_factory.mktemp(name), name)
        template, tool_format = template_for("m", source or model_info.chat_template)
        return Renderer(replace(model_info, chat_template=template, tool_format=tool_format))

    return build


def control(name: str, literal: str) -> bytes:
    return escape(tiny.tokenizer(name).token_to_id(literal))


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_prompts_are_those_of_transformers(name: str, build: Build, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tiny.make_tokenizer(tmp_path / name, name))
    system, answer = Message("system", "s"), Message("assistant", "so\n")
    for asked in (
        Conversation((USER,)),
        Conversation((system, USER, answer, MORE)),
        Conversation((system, USER, CALL, RESULT, answer, MORE), TOOLS),
    ):
        messages = [plain(message) for message in asked.messages]
        expected = reference.apply_chat_template(messages, tools=list(asked.tools) or None, add_generation_prompt=True)
        renderer = build(name)
        assert list(renderer.tokenize(renderer.render(asked))) == expected["input_ids"]


ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


@pytest.mark.parametrize("prefix", ["prepend", "always", "first", "none"])
@pytest.mark.parametrize("template", ["llama2", "zephyr"])
def test_prompts_with_a_dummy_prefix_are_those_of_transformers(template: str, prefix: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    source = {"llama2": LLAMA2, "zephyr": ZEPHYR}[template]
    tiny.sentencepiece(prefix).save(str(tmp_path / "tokenizer.json"))
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    model_info = replace(tiny.make_model_info(tmp_path / "other"), tokenizer_path=str(tmp_path), chat_template=source)
    renderer = Renderer(replace(model_info, bos_token="<s>", eos_token="</s>", end_tokens=(2,)))
    for messages in ((USER,), (USER, Message("assistant", "hello [x]"), MORE), (Message("user", " hello ▁\n"),)):
        given = [plain(message) for message in messages]
        expected = reference.apply_chat_template(given, chat_template=source, add_generation_prompt=True)["input_ids"]
        assert list(renderer.tokenize(renderer.render(Conversation(messages)))) == expected


@pytest.mark.parametrize("end", [True, False], ids=["ended", "cut off"])
@pytest.mark.parametrize("name", ["chatml", "qwen3", "trim", "llama3", "mistral"])
def test_a_sampled_turn_stands_right_behind_the_generation_prompt(name: str, end: bool, build: Build) -> None:
    renderer = build(name)
    asked = renderer.render(Conversation((USER,)))
    ending = control(name, tiny.dialect(name).ends[0])
    said = b" any  {body}\n" + (ending if end else b"")
    told = renderer.render(Conversation((USER, Message("assistant", "x"), MORE)), sampled={1: said})
    assert told.startswith(asked + b" any  {body}\n" + ending)
    assert told.count(b"the 42") == 1 and b"x" not in told[len(asked) :]


@pytest.mark.parametrize("calling", [CALL, TWO_CALLS], ids=["one", "two"])
@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral"])
def test_a_sampled_call_does_too(name: str, calling: Message, build: Build) -> None:
    renderer = build(name)
    asked = renderer.render(Conversation((USER,), TOOLS))
    ending = control(name, tiny.dialect(name).ends[0])
    after = (RESULT, Message("assistant", "so"), CALL, RESULT)
    told = renderer.render(Conversation((USER, calling, *after), TOOLS), sampled={1: b"BODY" + ending, 3: b"THEN"})
    assert told.startswith(asked + b"BODY" + ending)
    assert told.count(b"BODY") == told.count(b"THEN") == 1
    assert told.endswith(renderer.render(Conversation((USER, *after), TOOLS))[-20:])
    assert b"sub" not in told[len(asked) :] and told.count(b'"a": 1') == 1, (
        "only the call that was not sampled is written"
    )


LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def test_white_space_around_answers_is_what_was_sampled(build: Build) -> None:
    renderer, ending = build("mistral", LLAMA2), control("mistral", "</s>")
    history = Conversation((USER, Message("assistant", "x"), MORE))
    asked = renderer.render(Conversation((USER,)))
    assert renderer.render(history).startswith(asked + b" x " + ending)
    assert renderer.render(history, sampled={1: b"BODY" + ending}).startswith(asked + b"BODY" + ending)
    assert renderer.render(history, sampled={1: b"BODY"}).startswith(asked + b"BODY " + ending), (
        "as the template ends it"
    )


REFUSING = (  # takes tool calls in messages of their own only
    "{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}{{ raise_exception('no') }}"
    "{% elif m.tool_calls %}{{ WRITTEN }}{% else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}{% endfor %}"
    "{# tools #}"
)
NAME = "m.tool_calls[0].function.name"


@pytest.mark.parametrize(
    "written",
    [f"'call ' + {NAME}", f"'call ' + {NAME} + '!'", f"{NAME} + '[INST]</s>'", f"loop.index ~ {NAME}", "'call</s>'"],
    ids=["no end", "no end either", "a control token inside", "a changing head", "no name"],
)
def test_where_the_way_cannot_be_told_the_plain_messages_are_written(written: str, build: Build) -> None:
    renderer = build("mistral", REFUSING.replace("WRITTEN", written))
    history = Conversation((USER, MORE, CALL, RESULT))
    assert renderer.render(history, sampled={2: b"BODY"}) == renderer.render(history)
    assert b"BODY" not in renderer.render(history, sampled={2: b"BODY"})


def test_ids_that_mistral_refuses_are_replaced(build: Build) -> None:
    renderer = build("mistral")
    ours = "call_0123456789ab_0"
    call = replace(CALL, tool_calls=(replace(CALL.tool_calls[0], id=ours),))
    written = renderer.render(Conversation((USER, call, replace(RESULT, tool_call_id=ours)), TOOLS))
    one, two = (part.split(b'"')[2] for part in written.split(b"id")[1:])
    assert one == two and len(one) == 9 and one.isalnum()
    kept = renderer.render(Conversation((USER, CALL, RESULT), TOOLS))
    assert kept.count(b"abc123XYZ") == 2
    assert ours.encode() in build("qwen3", "{{ messages[1].tool_calls }}").render(Conversation((USER, call)))


def test_a_result_without_an_id_is_still_refused(build: Build) -> None:
    with pytest.raises(InvalidRequest, match="length 9"):
        build("mistral").render(Conversation((USER, CALL, replace(RESULT, tool_call_id="")), TOOLS))


def test_whose_reasoning_is_kept_is_told(build: Build) -> None:
    thought = Message("assistant", "so", reasoning="hm")
    calling = replace(CALL, reasoning="hm")
    loop = (USER, calling, RESULT, calling, RESULT)
    qwen3 = build("qwen3")
    assert qwen3.keeps_reasoning(Conversation(loop, TOOLS)) == {1, 3}
    assert qwen3.keeps_reasoning(Conversation((*loop, thought, MORE), TOOLS)) == set()
    assert qwen3.keeps_reasoning(Conversation((USER, thought, MORE, calling, RESULT), TOOLS)) == {3}
    assert qwen3.keeps_reasoning(Conversation((USER, CALL, RESULT), TOOLS)) == set()
    assert build("chatml").keeps_reasoning(Conversation((USER, thought, MORE))) == set()
    assert build("strict").keeps_reasoning(Conversation((USER, USER, thought))) == set(), (
        "it takes no such conversation"
    )


# ---- given answers ---------------------------------------------------------------------------------------------------


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
NAMES = ["chatml", "llama3", "mistral", "qwen3", "trim"]


def renderer_of(folder: Path, name: str, source: str = "") -> Renderer:
    info = tiny.make_model_info(folder, name)
    template, tool_format = template_for("m", source or info.chat_template)
    return Renderer(replace(info, chat_template=template, tool_format=tool_format))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("answer", [Message("assistant", "hello 12"), CALL])
def test_the_tokens_are_those_of_the_template(name: str, answer: Message, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    renderer = renderer_of(tmp_path / "own", name)
    if answer.tool_calls and not renderer_has_tools(renderer):
        pytest.skip("the template has no tools")
    tools = (TOOL,) if answer.tool_calls else ()
    asked = Conversation((MORE,), tools)
    prompt, completion = renderer.tokenize(renderer.render(asked)), renderer.tokenize_answer(asked, answer)
    reference = AutoTokenizer.from_pretrained(tiny.make_tokenizer(tmp_path / "reference", name))
    messages = [plain(MORE), plain(answer)]
    whole = reference.apply_chat_template(messages, tools=list(tools) or None, tokenize=True, return_dict=False)
    assert renderer.encode_tokens(whole).startswith(renderer.encode_tokens([*prompt, *completion]))
    read = renderer.parse(completion, asked)
    assert read.content.strip() == answer.content
    assert [(call.name, call.value()) for call in read.tool_calls] == [
        (call.name, call.value()) for call in answer.tool_calls
    ]
    assert completion[-1] in tiny.make_model_info(tmp_path / "again", name).end_tokens


def renderer_has_tools(renderer: Renderer) -> bool:
    try:
        renderer.render(Conversation((MORE,), (TOOL,)))
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}", "after its"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "without an end token"),
    ],
)
def test_an_answer_that_the_policy_could_not_sample_is_refused(template: str, why: str, tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, "chatml", template)
    with pytest.raises(InvalidRequest, match=why):
        renderer.tokenize_answer(Conversation((MORE,)), Message("assistant", "hello"))
