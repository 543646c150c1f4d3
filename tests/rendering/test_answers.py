"""Given answers as tokens, in every template of `tests/templates`.

1. Prompt, answer and the rest are those of `transformers.apply_chat_template`, token for token.
2. The tokens end with the end token and read back as the given message.
3. A template that writes the answer elsewhere, or without an end, is refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentjet.errors import InvalidRequest
from agentjet.rendering import Renderer, template_for
from agentjet.types import Conversation, Message, ToolCall
from tests import tiny

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
USER = Message("user", "the 42")
CALL = Message("assistant", tool_calls=(ToolCall("abc123XYZ", "add", '{"a": 1}'),))
NAMES = ["chatml", "llama3", "mistral", "qwen3", "trim"]


def renderer_of(folder: Path, name: str, source: str = "") -> Renderer:
    info = tiny.make_model_info(folder, name)
    template, tool_format = template_for("m", source or info.chat_template)
    return Renderer(replace(info, chat_template=template, tool_format=tool_format))


def plain(message: Message) -> dict[str, Any]:
    function = [{"name": call.name, "arguments": call.value()} for call in message.tool_calls]
    calls = [{"id": "abc123XYZ", "type": "function", "function": one} for one in function]
    return {"role": message.role, "content": message.content, **({"tool_calls": calls} if calls else {})}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("answer", [Message("assistant", "hello 12"), CALL])
def test_the_tokens_are_those_of_the_template(name: str, answer: Message, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    renderer = renderer_of(tmp_path / "own", name)
    if answer.tool_calls and not renderer_has_tools(renderer):
        pytest.skip("the template has no tools")
    tools = (TOOL,) if answer.tool_calls else ()
    asked = Conversation((USER,), tools)
    prompt, completion = renderer.tokenize(renderer.render(asked)), renderer.tokenize_answer(asked, answer)
    reference = AutoTokenizer.from_pretrained(tiny.make_tokenizer(tmp_path / "reference", name))
    messages = [plain(USER), plain(answer)]
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
        renderer.render(Conversation((USER,), (TOOL,)))
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
        renderer.tokenize_answer(Conversation((USER,)), Message("assistant", "hello"))
