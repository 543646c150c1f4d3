"""The tiny models of the exactness tests, one for each chat template, and possible answers of such a policy.

`qwen3_open` is `qwen3` with a generation prompt that opens the thinking, as in its thinking-only successors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hypothesis import strategies as st
from tokenizers import Tokenizer

from agentjet.rendering import Renderer, template_for
from agentjet.types import ModelInfo
from tests import tiny

TEMPLATES = ("chatml", "qwen3", "qwen3_open", "trim", "strict", "smollm2", "llama3", "mistral")
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}},)
OTHER_TOOLS = ({"type": "function", "function": {"name": "sub", "parameters": {"type": "object"}}},)


class Model:
    """A renderer with facts about its model. Not a dataclass, because hypothesis would print all of it."""

    def __init__(self, name: str, card: ModelInfo, tokenizer: Tokenizer) -> None:
        self.name = name
        self.card = card
        self.renderer = Renderer(card)
        self.tokenizer = tokenizer

    def __repr__(self) -> str:
        return f"<model {self.name}>"

    @property
    def end(self) -> int:
        """The end token that the template writes."""
        return self.card.end_tokens[0]

    def ids(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of an answer's text, including control tokens."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def calling(self, calls: Sequence[tuple[str, str]], content: str = "") -> str:
        """The text in which this model calls tools: names, and arguments as JSON text."""
        if self.card.tool_format == "hermes":
            blocks = [
                f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
                for name, arguments in calls
            ]
            return "\n".join([*([content] if content else []), *blocks])
        key = "parameters" if self.card.tool_format == "llama3" else "arguments"
        listed = ", ".join(f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls)
        if self.card.tool_format == "llama3":
            return listed if len(calls) == 1 else f"[{listed}]"
        return f"{content}[TOOL_CALLS] [{listed}]"


def make_model(folder: Path, name: str) -> Model:
    """A template of `TEMPLATES` with its own tiny tokenizer, in `folder`."""
    files = {"smollm2": "smollm2_own", "qwen3_open": "qwen3"}
    card = tiny.make_model_info(folder / name, files.get(name, name))
    template, tool_format = template_for(name, card.chat_template)
    if name == "qwen3_open":
        template = template.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}")
        assert template != card.chat_template
    card = replace(card, chat_template=template, tool_format=tool_format, context_length=400_000)
    return Model(name, card, tiny.tokenizer(files.get(name, name)))


WORDS = st.sampled_from(
    [
        *("hello", " the", "\n", "\n\n", "  ", "€", "é́", "42", "🙂", '"', "<think>"),
        *("<|im_end|>", "<|im_", "end|>", "<|im_start|>user\n", "<|eot_id|>", "</s>", "[INST]", "[TOOL_CALLS]"),
    ]
)
TEXTS = st.lists(WORDS, max_size=5).map("".join)

ANSWERS = (
    "",
    "hello",
    " hello the 42 \n",
    "€ 🙂 hello",
    "<think>\nhm\n</think>\n\nhello",
    "hm\n</think>\n\nhello",
    "<think>hm 42",
    '<tool_call>{"arguments": {}, "name": "add"}</tool_call>\n<tool_call>broken</tool_call>',
    "<think>\n2\n</think>\n\n{calls}",
)
CALLS = (
    [("add", '{"a":1,  "b": "€"}')],
    [("add", "{}")],
    [("add", '{"a": 1.0}'), ("add", '{"a":2}')],
    [("add", "{}"), ("add", "{}"), ("sub", '{"x": ["<|im_end|>"]}')],
)


@st.composite
def completions(draw: st.DrawFn, model: Model, *, tools: bool) -> tuple[int, ...]:
    """Answers, some with other tokens that a policy may sample: half characters, control tokens, unknown ids.

    Most end in the end token; some in another one; some were cut off.
    """
    texts = st.sampled_from(ANSWERS)
    if tools and model.card.tool_format:
        calls = st.builds(model.calling, st.sampled_from(CALLS), st.sampled_from(["", "", "so"]))
        texts = st.one_of(texts, calls)
    text = draw(texts)
    if "{calls}" in text:
        text = text.replace("{calls}", model.calling(CALLS[0]) if tools and model.card.tool_format else "hello")
    if model.renderer.generation_tail:
        text = draw(st.sampled_from(["", "hm\n</think>\n\n", "\n</think>\n\n"])) + text
    body = model.ids(text)
    if draw(st.integers(0, 3)) == 0:
        anything = st.lists(st.integers(0, model.tokenizer.get_vocab_size() + 3), max_size=6)
        body = (*draw(anything), *body, *draw(anything))
    end = draw(st.sampled_from([(model.end,), (model.end,), (), (model.card.end_tokens[-1],)]))
    return (*body, *end)
