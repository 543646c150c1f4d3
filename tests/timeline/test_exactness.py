"""Random agents over real templates and a real (tiny) tokenizer, from their requests to the forest that is trained.

Pinned here, for every batch of random episodes:
1. a prompt is exactly the tokens that the tree keeps, then the suffix; no known path would have kept more
   (`agents.Session` checks each call);
2. every target of the forest stands in the context it was sampled in: by the attention mask it sees the recorded prompt
   and the completion up to it. The same holds in every piece of `split`, and after `select`;
3. every sampled token is a target once, under the sequence of its episode and role. Tokens of orphans are counted
   instead; an orphan is a lost answer, never one that the agent continued from;
4. a forest holds every distinct token-in-context once.

For single conversations: a linear one keeps every sampled token; the tokens of other text do not depend on earlier
prompts.

`--hypothesis-profile=thorough` tries many more agents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjet.timeline.forest import select, split
from agentjet.types import Call, Conversation, Message
from tests.timeline.agents import Session, swarms
from tests.timeline.models import TEMPLATES, TEXTS, TOOLS, Model, completions
from tests.timeline.training import check_contexts, check_orphans, train

USER, MORE = Message("user", "hello"), Message("user", "12")


@pytest.mark.parametrize("name", TEMPLATES)
@settings(deadline=None)
@given(data=st.data())
def test_every_sampled_token_is_trained_once_and_in_its_context(
    name: str, tiny_models: dict[str, Model], data: st.DataObject
) -> None:
    record, episodes = data.draw(swarms(tiny_models[name]))
    unheard = check_orphans(record)
    if all(call.id in unheard or not call.completion for call, _, _ in record.calls):
        return  # nothing to train: the swarm drops such a group, and counts it
    forest, _ = train(record, episodes)
    numbers = check_contexts(forest, record)
    pieces = split(forest, data.draw(st.integers(1, forest.num_nodes)))
    assert sorted(i for _, targets in pieces for i in targets.tolist()) == list(range(forest.num_targets))
    for piece, targets in pieces:
        assert check_contexts(piece, record) == [numbers[i] for i in targets]
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(numbers), max_size=len(numbers))))
    if keep.any():
        assert check_contexts(select(forest, keep), record) == [
            n for n, kept in zip(numbers, keep, strict=True) if kept
        ]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("history", ["template", "as_sampled"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_linear_conversation_keeps_all_that_was_sampled(
    name: str, history: str, tiny_models: dict[str, Model], data: st.DataObject
) -> None:
    model = tiny_models[name]
    session = Session(model, history)
    tools = TOOLS if model.card.tool_format and data.draw(st.booleans()) else ()
    messages: list[Message] = []
    said: list[Call] = []
    for _ in range(data.draw(st.integers(2, 5))):
        last = said[-1] if said else None
        messages.append(Message("user", data.draw(TEXTS)))
        if last is not None and last.response.tool_calls:
            messages[-1:] = [Message("tool", data.draw(TEXTS), tool_call_id=c.id) for c in last.response.tool_calls]
        conversation = Conversation(tuple(messages), tools)
        call = session.ask(conversation, data.draw(completions(model, tools=bool(tools))))
        if last is not None and not rewritten(model, history, messages, said):
            num_kept = len(last.completion) - (last.completion[-1:] in [(end,) for end in model.card.end_tokens[1:]])
            whole = last.kept + len(last.suffix) + num_kept  # the template ends turns with its own token
            assert not num_kept or (call.parent, call.kept) == (last.id, whole)
        messages.append(replace(call.response, reasoning=""))
        said.append(call)


def rewritten(model: Model, history: str, messages: Sequence[Message], said: Sequence[Call]) -> bool:
    """True if the template writes the history differently now: it strips thinking, or moves the tools."""
    thought = bool(model.renderer.generation_tail) or any(
        call.response.reasoning
        or (model.renderer.style.reasoning and "</think>" in model.renderer.text(call.completion))
        for call in said
    )
    return (thought and history == "template") or (
        model.name == "mistral" and len(messages) > 1 and messages[-1].role == "user"
    )


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=15, deadline=None)
@given(texts=st.lists(TEXTS, min_size=2, max_size=6))
def test_what_was_not_sampled_is_tokenised_as_if_alone(
    name: str, tiny_models: dict[str, Model], texts: list[str]
) -> None:
    model = tiny_models[name]
    session = Session(model)
    for i, text in enumerate(texts):
        messages = (Message("user", texts[0]), Message("assistant", text), Message("user", text))[: 1 + 2 * (i % 2)]
        prompt = session.prepare(Conversation(messages))
        assert prompt.tokens == model.renderer.tokenize(model.renderer.encode_tokens(prompt.tokens))
        session.ask(Conversation(messages), model.ids("42") if i % 2 else (model.end,))


def test_reasoning_that_the_template_keeps_is_kept_to_the_token(tiny_models: dict[str, Model]) -> None:
    model = tiny_models["qwen3"]
    session = Session(model)
    question = Message("user", "hello")
    text = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    first = session.ask(Conversation((question,), TOOLS), (*model.ids(text), model.end))
    answer = Message("tool", "2", tool_call_id=first.response.tool_calls[0].id)
    second = session.ask(Conversation((question, first.response, answer), TOOLS), [model.end])
    assert second.kept == len(first.suffix) + len(first.completion)
    assert second.fork == ""


@pytest.mark.parametrize("text", ["<think>\n\n</think>\n\nhello", "hm</think>hello"], ids=["empty", "unopened"])
def test_a_think_block_that_the_template_drops_is_not_fed(text: str, tiny_models: dict[str, Model]) -> None:
    """The template writes `hello` for both turns, as in the prompt of a deployment."""
    model = tiny_models["qwen3"]
    session = Session(model)
    first = session.ask(Conversation((USER,)), (*model.ids(text), model.end))
    second = session.prepare(Conversation((USER, first.response, MORE)))
    history = Conversation((USER, Message("assistant", "hello"), MORE))
    assert model.renderer.encode_tokens(second.tokens) == model.renderer.render(history)
    assert second.fork == "template" and second.kept < len(first.suffix) + len(first.completion)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "qwen3_open"])
@pytest.mark.parametrize("history", ["template", "as_sampled"])
def test_text_from_a_stop_string_on_is_fed_as_sampled_only(
    name: str, history: str, tiny_models: dict[str, Model]
) -> None:
    """A ReAct agent: the answer ends before its stop string, which the policy has sampled."""
    model = tiny_models[name]
    session = Session(model, history)
    asked = Conversation((USER,))
    prompt = session.prepare(asked)
    call = session.answer(asked, prompt, model.ids("the 42 user: 12"), stop=[" user:"])
    assert call.response.content == "the 42" and len(call.completion) > len(model.ids("the 42"))
    second = session.prepare(Conversation((USER, call.response, MORE)))
    if history == "as_sampled":
        assert second.kept == len(prompt.tokens) + len(call.completion) and second.fork == ""
    else:
        assert second.kept == len(prompt.tokens) + len(model.ids("the 42")) and second.fork == "template"
        shown = model.renderer.show(model.renderer.encode_tokens(second.tokens))
        assert "the 42" in shown and "user:" not in shown
