"""Rendering of conversations.

1. Prompts equal those of `transformers.apply_chat_template`, token for token, if no text looks like a control token.
2. Control tokens in client text stay text everywhere, even if text and template together would form one.
3. Sampled bodies are written as sampled. A template that does not accept slots gets the plain messages.
4. Anything that a template ignores or refuses is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjet.errors import ConfigError, InvalidRequest
from agentjet.rendering import Renderer, template_for
from agentjet.rendering.vocabulary import escape
from agentjet.types import Conversation, Message, ModelInfo, ToolCall
from tests import tiny

FULL = tiny.tokenizer()
START, END = (FULL.token_to_id(literal) for literal in ("<|im_start|>", "<|im_end|>"))
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}

Build = Callable[..., Renderer]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def build(folder: Path) -> Build:
    """Returns a renderer for one of `tests/templates`, or for Jinja source."""

    @cache
    def build(template: str, **changes: Any) -> Renderer:
        source = template if "{" in template else tiny.template(template)
        tool_format = template_for("m", source)[1]
        model_info = ModelInfo(
            "tiny", str(folder), source, 2048, (END, 0), "<|endoftext|>", "<|im_end|>", tool_format=tool_format
        )
        return Renderer(replace(model_info, **changes))

    return build


def conversation(*messages: tuple[str, str], tools: tuple[dict[str, Any], ...] = ()) -> Conversation:
    return Conversation(tuple(Message(role, content) for role, content in messages), tools)


CALLING = Message("assistant", "so", reasoning="hm", tool_calls=(ToolCall("c1", "add", '{"a": 1}'),))
CONVERSATIONS = [
    conversation(("user", " hello\n")),
    conversation(("system", "the é"), ("user", "hello"), ("assistant", " 42 "), ("user", "€\n\n")),
    Conversation((Message("user", "q"), CALLING, Message("tool", "2", tool_call_id="c1")), (TOOL,)),
    Conversation(
        (Message("user", "q"), CALLING, Message("tool", "2"), Message("assistant", "x"), Message("user", "r"))
    ),
]


def plain(message: Message) -> dict[str, Any]:
    """A message as transformers take it."""
    functions = [(call.id, {"name": call.name, "arguments": call.value()}) for call in message.tool_calls]
    calls = [{"id": id, "type": "function", "function": function} for id, function in functions]
    more = {"reasoning_content": message.reasoning, "tool_calls": calls, "tool_call_id": message.tool_call_id}
    return {"role": message.role, "content": message.content} | {name: value for name, value in more.items() if value}


@pytest.mark.parametrize("name", ["chatml", "trim", "qwen3", "smollm2_own"])
def test_prompts_are_those_of_transformers(name: str, build: Build, folder: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder)
    renderer = build(name)
    for asked in CONVERSATIONS if name == "qwen3" else CONVERSATIONS[:2]:
        messages = [plain(message) for message in asked.messages]
        expected = reference.apply_chat_template(
            messages, tools=list(asked.tools) or None, add_generation_prompt=True, chat_template=tiny.template(name)
        )["input_ids"]
        assert list(renderer.tokenize(renderer.render(asked))) == expected


def test_the_bundled_template_writes_what_smollm2s_own_does(build: Build) -> None:
    own = build("smollm2_own")
    source, tool_format = template_for("anything", tiny.template("smollm2_own"))
    ours = build(source, tool_format=tool_format)
    for asked in CONVERSATIONS[:2]:
        assert ours.render(asked) == own.render(asked)
    with_tools = ours.render(CONVERSATIONS[2]).decode(errors="replace")
    assert '{"type": "function"' in with_tools and "<tool_response>\n2\n</tool_response>" in with_tools
    assert with_tools.count("You are a helpful AI assistant named SmolLM") == 1


LOOKALIKES = st.sampled_from([*tiny.SPECIAL, *tiny.MARKERS, "<", "|", "im_end|>", "<|im_", "think>", "a", " "])


def anywhere(text: str) -> Conversation:
    """A conversation with `text` in every place that a client can write, except where it would break JSON."""
    calls = (ToolCall(text, text or "f", '{"a": 1}'),)
    tool = {"type": "function", "function": {"name": text, "description": text, "parameters": {text: [text]}}}
    return Conversation(
        (
            Message("system", text),
            Message("user", text, name=text),
            Message("assistant", text, reasoning=text, tool_calls=calls),
            Message("tool", text, tool_call_id=text),
        ),
        (tool,),
    )


@pytest.mark.parametrize("source", [tiny.template("qwen3"), template_for("smollm2-135m", "")[0]], ids=["qwen3", "ours"])
@settings(max_examples=60, deadline=None)
@given(text=st.lists(LOOKALIKES, min_size=1).map("".join))
def test_client_text_adds_no_control_token(build: Build, source: str, text: str) -> None:
    renderer = build(source)
    encoded = renderer.render(anywhere(text))
    assert escapes(encoded) == escapes(renderer.render(anywhere("x")))
    assert renderer.encode_tokens(renderer.tokenize(encoded)) == encoded


def escapes(encoded: bytes) -> list[bytes]:
    return re.findall(rb"\xff...", encoded, re.DOTALL)


def test_text_and_template_together_make_no_control_token(build: Build) -> None:
    renderer = build("{{ '<' + messages[0].content + '>' + messages[0].content + '|im_end|>' }}")
    assert renderer.render(conversation(("user", "|im_end|"))) == b"<|im_end|>|im_end||im_end|>"
    assert renderer.render(conversation(("user", "a<"))) == b"<a<>a<|im_end|>"


def test_text_with_private_use_characters_is_left_alone(build: Build) -> None:
    text = "\U000f0000<|im_end|>\U000f00012\U000f0001"
    assert text.encode() in build("chatml").render(conversation(("user", text)))


def test_sampled_bodies_are_written_as_sampled(build: Build) -> None:
    renderer = build("chatml")
    asked = conversation(("user", "q"), ("assistant", "ignored"), ("user", "r"))
    body = renderer.encode_tokens([FULL.token_to_id("âĤ"), 283, START])
    for sampled in (body, body + escape(END), body + escape(0)):
        encoded = renderer.render(asked, sampled={1: sampled})
        assert b"assistant\n" + body + escape(END) + b"\n" in encoded
        assert b"ignored" not in encoded


def test_a_body_replaces_tool_calls_and_reasoning_too(build: Build) -> None:
    encoded = build("qwen3").render(CONVERSATIONS[2], sampled={1: b"BODY"})
    assert b"assistant\nBODY" + escape(END) in encoded


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}{{ raise_exception('no calls') }}"
        "{% endif %}{{ m.content }}{% endfor %}",
        "{# tool_calls #}{% for m in messages %}{{ m.content[:2] }}{% endfor %}",
    ],
    ids=["raises", "cuts"],
)
def test_a_template_that_cannot_do_with_slots_gets_the_plain_messages(build: Build, template: str) -> None:
    asked = Conversation((Message("user", "q"), CALLING, Message("user", "r")))
    assert build(template).render(asked, sampled={1: b"BODY"}) == b"qsor"


def test_white_space_that_a_control_token_eats_is_gone(build: Build, tmp_path: Path) -> None:
    from tokenizers import AddedToken

    made = tiny.tokenizer()
    made.add_special_tokens([AddedToken("<|user|>", rstrip=True), AddedToken("<|end|>", lstrip=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    source = "{% for m in messages %}{{ '<|user|>\n' + m.content + ' \n<|end|>\n' }}{% endfor %}"
    renderer = build(source, tokenizer_path=str(tmp_path))
    tokens = renderer.tokenize(renderer.render(conversation(("user", "hello"))))
    assert list(tokens) == made.encode("<|user|>\nhello \n<|end|>\n").ids


def test_developer_messages_are_system_messages(build: Build) -> None:
    renderer = build("chatml")
    assert renderer.render(conversation(("developer", "d"))) == renderer.render(conversation(("system", "d")))


def refusal(renderer: Renderer, asked: Conversation) -> tuple[str, str | None]:
    with pytest.raises(InvalidRequest) as caught:
        renderer.render(asked)
    return caught.value.code, caught.value.param


def test_what_cannot_be_rendered_is_refused_by_name(build: Build) -> None:
    user = ("user", "q")
    assert refusal(build("strict"), conversation(user, user)) == ("template_error", "messages")
    assert refusal(build("{{ messages[0].content + 1 }}"), conversation(user)) == ("template_error", "messages")
    assert refusal(build("chatml"), conversation(user, tools=(TOOL,))) == ("tools_not_supported", "tools")
    calling = Conversation((Message("user", "q"), CALLING))
    assert refusal(build("chatml"), calling) == ("tools_not_supported", "messages")
    assert refusal(build("{{ tools }}"), conversation(user, tools=(TOOL,))) == ("tools_not_supported", "tools")
    untyped = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"enum": [1]}}}}}
    assert refusal(build("gpt_oss"), conversation(user, tools=(untyped,))) == ("template_error", "tools")
    assert refusal(build("chatml"), Conversation(())) == ("invalid_request", "messages")
    assert refusal(build("chatml"), conversation(("user", "\ud83d"))) == ("invalid_text", "messages")


def test_a_template_runs_in_a_sandbox(build: Build) -> None:
    for source in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"):
        assert refusal(build(source), conversation(("user", "q"))) == ("template_error", "messages")


def test_a_broken_card_is_refused(build: Build) -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        build("{% for %}")
    with pytest.raises(ConfigError, match="tool_format = 'xml'"):
        build("chatml", tool_format="xml")


def test_generation_blocks_are_transparent(build: Build) -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert build(source).render(conversation(("user", "q"))) == b"q"


def test_the_generation_prompts_tail_is_found(build: Build) -> None:
    for name in ("chatml", "qwen3", "trim", "strict", "smollm2_own"):
        assert build(name).generation_tail == b""
    thinking = tiny.template("qwen3").replace(
        "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    )
    renderer = build(thinking)
    assert renderer.generation_tail == escape(280) + b"\n"
    answer = renderer.parse(FULL.encode("hm\n</think>\n\nhello").ids, conversation(("user", "q")))
    assert (answer.reasoning, answer.content) == ("hm", "hello")


def test_text_hides_special_tokens_only(build: Build) -> None:
    renderer = build("chatml")
    tokens = [*FULL.encode("<think>hello").ids, END]
    assert renderer.text(tokens) == "<think>hello"
    assert [renderer.token_bytes(t) for t in (tokens[0], END, 9999)] == [b"<think>", b"<|im_end|>", b""]
    stream = renderer.stream()
    assert stream.push(tokens) + stream.flush() == "<think>hello"


def test_what_parsers_look_for_is_shown_though_it_is_special(build: Build, tmp_path: Path) -> None:
    from tokenizers import AddedToken

    made = tiny.tokenizer()
    made.add_special_tokens([AddedToken("[TOOL_CALLS]", normalized=False)])
    made.save(str(tmp_path / "tokenizer.json"))
    renderer = build("{{ tools }}[TOOL_CALLS]{{ messages[0].content }}", tokenizer_path=str(tmp_path))
    tokens = [*made.encode('[TOOL_CALLS][{"name": "add"}]').ids, END]
    assert renderer.text(tokens) == renderer.stream().push(tokens) == '[TOOL_CALLS][{"name": "add"}]'
    (tool_call,) = renderer.parse(tokens, conversation(("user", "q"), tools=(TOOL,))).tool_calls
    assert tool_call == ToolCall("call_0", "add", "{}")
