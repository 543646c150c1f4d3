"""Raw prompts (text completions) as timelines: a prompt that continues an earlier one keeps its tokens.

Pinned here:
1. a text that begins with an earlier prompt and its answer gets their exact tokens, even if the text lost something
   (half characters, control tokens that are not shown);
2. token ids are used as given; known tokens stay as they were;
3. control tokens come from ids only;
4. an answer that a request sends back counts as delivered.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.errors import InvalidRequest
from agentjet.front.prompts import prepare_prompt
from agentjet.timeline.tree import orphans
from agentjet.types import Call, Conversation
from tests.timeline.agents import Session
from tests.timeline.models import TEXTS, Model, completions


def ask(session: Session, prompt: str | tuple[int, ...], completion: Sequence[int], stop: Sequence[str] = ()) -> Call:
    """Records one raw call and checks its prompt."""
    renderer = session.model.renderer
    conversation = Conversation((), prompt=prompt)
    prepared = prepare_prompt(renderer, session.tree, conversation, "template")
    assert prepared.pieces == tuple(renderer.pieces(prepared.suffix))
    if prepared.parent is not None:
        assert prepared.tokens[: prepared.kept] == session.tree.tokens(prepared.parent)[: prepared.kept]
    assert prepared.tokens[prepared.kept :] == prepared.suffix
    if not isinstance(prompt, str):
        assert renderer.encode_tokens(prepared.tokens) == renderer.encode_tokens(prompt)
    return session.answer(conversation, prepared, completion, stop=stop)


def told(session: Session, call: Call) -> tuple[int, ...]:
    """Returns the tokens of a call that its agent received: all up to a stop string or the end token."""
    renderer, tokens = session.model.renderer, session.tree.tokens(call.id)
    if renderer.text(call.completion) == call.response.content:
        return tokens[:-1] if call.completion and tokens[-1] in session.model.card.end_tokens else tokens
    asked = tokens[: len(tokens) - len(call.completion)]
    read = renderer.encode_tokens(asked) + call.response.content.encode()
    while not read.startswith(renderer.encode_tokens(tokens)):
        tokens = tokens[:-1]
    return tokens if len(tokens) > len(asked) else ()  # Without a sampled token nothing must stay.


@given(data=st.data())
def test_what_was_said_stays_as_it_was_said(tiny_models: dict[str, Model], data: st.DataObject) -> None:
    model = tiny_models[data.draw(st.sampled_from(["chatml", "llama3"]), label="model")]
    session = Session(model)
    asked: dict[str, str] = {}
    for _ in range(data.draw(st.integers(1, 6), label="calls")):
        past = [call for call in session.tree.calls if call.id in asked]
        known = data.draw(st.none() | st.sampled_from(past), label="continues") if past else None
        more = data.draw(TEXTS, label="more")
        text = more or "x"
        before: tuple[int, ...] = ()
        if known is not None:
            text = asked[known.id] + known.response.content + more
            before = told(session, known)
        completion = data.draw(completions(model, tools=False), label="completion")
        form = data.draw(st.sampled_from(["text", "text", "ids", "other ids"]), label="form")
        if form == "text":
            call = ask(session, text, completion, data.draw(st.sampled_from([(), ("ll", "€")]), label="stop"))
            asked[call.id] = text
            same = {told(session, c) for c in past if asked[c.id] + c.response.content == text[: len(text) - len(more)]}
            prompt = session.prompts[-1].tokens
            said_something = known is not None and known.response.content
            assert not said_something or any(prompt[: len(one)] == one for one in same), "fed what was said"
            continue
        encoded = model.renderer.encode_tokens(before) + more.encode()
        ids = (*before, *model.ids(more)) if form == "ids" else model.renderer.tokenize(encoded)
        nameless = any(token_id >= model.tokenizer.get_vocab_size() for token_id in ids)
        if ids and not nameless:  # Padding of an embedding may be sampled, but nobody reads it.
            call = ask(session, ids, completion)
            fed = session.prompts[-1].tokens
            assert fed[: len(before)] == before or form == "other ids"
            assert fed[-1] == ids[-1] or form == "other ids" or not more


def test_ids_that_nobody_said_are_fed_as_they_are(tiny_models: dict[str, Model]) -> None:
    model = tiny_models["chatml"]
    session = Session(model)
    letters = tuple(model.ids(letter)[0] for letter in "hello")
    assert letters != model.ids("hello")
    ask(session, letters, [*model.ids(" the"), model.end])
    assert session.prompts[-1].tokens == letters
    ask(session, (*letters, *model.ids(" the"), *letters), [model.end])
    assert session.prompts[-1].tokens == (*letters, *model.ids(" the"), *letters)
    assert (session.prompts[-1].kept, session.prompts[-1].suffix) == (6, letters)


def test_other_ids_of_a_known_text_are_that_text(tiny_models: dict[str, Model]) -> None:
    """A client that tokenises an answer again continues it."""
    model = tiny_models["chatml"]
    session = Session(model)
    letters = tuple(model.ids(letter)[0] for letter in "hello")
    first = ask(session, model.ids("42"), [*letters, model.end])
    ask(session, model.ids("42hello 42"), [model.end])
    assert session.prompts[-1].tokens == (*model.ids("42"), *letters, *model.ids(" 42"))
    assert session.prompts[-1].ask.after == first.id


def test_an_answer_may_be_continued_from_where_it_was_cut(tiny_models: dict[str, Model]) -> None:
    model = tiny_models["chatml"]
    session = Session(model)
    first = ask(session, "hello", model.ids(" the hello"))
    second = ask(session, "hello the hello", [model.end])
    assert (second.parent, second.suffix, second.fork) == (first.id, (), "")
    assert session.tree.tokens(second.id) == (*session.tree.tokens(first.id), model.end)


def test_half_a_character_survives_its_text(tiny_models: dict[str, Model]) -> None:
    model = tiny_models["chatml"]
    session = Session(model)
    half = model.ids("🙂")[:2]
    first = ask(session, "hello", half)
    assert first.response.content == "�"
    second = ask(session, "hello� the", [model.end])
    assert session.prompts[-1].tokens[: len(session.tree.tokens(first.id))] == session.tree.tokens(first.id)
    assert (second.parent, second.fork, second.ask.after) == (first.id, "", first.id)
    assert [message.content for message in second.ask.messages] == [" the"]


def test_control_tokens_come_from_ids_only(tiny_models: dict[str, Model]) -> None:
    model = tiny_models["chatml"]
    session = Session(model)
    ask(session, "<|im_start|>user", [model.end])
    assert not set(session.prompts[-1].tokens) & set(model.ids("<|im_start|><|im_end|>"))
    ask(session, model.ids("<|im_start|>user"), [model.end])
    assert session.prompts[-1].tokens == model.ids("<|im_start|>user")
    assert session.prompts[-1].ask.messages[0].content == "<|im_start|>user"


def test_what_is_sent_back_was_heard(tiny_models: dict[str, Model]) -> None:
    model = tiny_models["chatml"]
    session = Session(model)
    first = ask(session, "hello", [*model.ids(" 42"), model.end])
    second = ask(session, "hello 42\nhello", [*model.ids(" the"), model.end])
    third = ask(session, "hello 42\nhello the", [model.end])
    assert (second.ask.after, third.ask.after) == (first.id, second.id)
    assert orphans(session.tree.calls, {first.id, second.id}) == {}
    asked, answer = session.tree.exchange(third.id)
    assert "".join(message.content for message in (*asked.messages, answer)) == "hello 42\nhello the"


@pytest.mark.parametrize(("prompt", "said"), [("", "empty"), ((10_000,), "not a token id"), ("\ud800", "surrogate")])
def test_what_is_no_prompt(tiny_models: dict[str, Model], prompt: str | tuple[int, ...], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refusal:
        ask(Session(tiny_models["chatml"]), prompt, [])
    assert refusal.value.param == "prompt"
