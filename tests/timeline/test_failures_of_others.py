"""Failures of other systems, which lose or falsify tokens. Each is a test of this system. Pinned here:

1. two sibling tool calls without content: both are trained, neither absorbs the other;
2. a retried call and the other answer's tool result never end up in one timeline;
3. stripped thinking: later turns are trained on their prompt, which is the stripped history;
4. templates other than ChatML; any control text in a user's text; no message is injected;
5. a BOS that the tokenizer would add stands only where the template writes it;
6. a stop string in the middle of a token; a character split between two tokens; tokens that no tokenizer would choose;
7. runs of parallel tool results, folded by the template, in any order;
8. other tools, another role, another model: never merged;
9. tokens of the template (an end token after a truncated answer) are not trained;
10. split conversations carry no extra weight, and none of many timelines is dropped;
11. thinking that the template keeps, that some turns lack, that distinguishes votes, or that is empty: no false fork.

`training.train` checks each batch: every sampled token once, in its context.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from agentjet.types import Call, Conversation, Message, ToolCall
from tests.timeline.agents import Record, Session
from tests.timeline.models import OTHER_TOOLS, TOOLS, Model, make_model
from tests.timeline.training import train

QUESTION = Message("user", "hello")
MORE = Message("user", "42")
WITH_TOOLS = ("qwen3", "smollm2", "llama3", "mistral")


def said(model: Model, text: str) -> tuple[int, ...]:
    return (*model.ids(text), model.end)


def result(call: Call, text: str, which: int = 0) -> Message:
    return Message("tool", text, tool_call_id=call.response.tool_calls[which].id)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_sibling_tool_calls_without_content(name: str, tiny_models: dict[str, Model]) -> None:
    model = tiny_models[name]
    session = Session(model)
    asked = Conversation((QUESTION,), TOOLS)
    texts = [model.calling([("add", arguments)]) for arguments in ('{"a": 1}', '{"a": 2}')]
    one, two = (session.ask(asked, said(model, text)) for text in texts)
    assert one.response.content == two.response.content == ""
    then = session.ask(Conversation((QUESTION, one.response, result(one, "1")), TOOLS), said(model, "1"))
    assert (then.parent, then.kept) == (one.id, session.tree.num_tokens(one.id))
    forest, _ = train(session.record, ["e"])
    assert forest.num_targets == sum(len(call.completion) for call in (one, two, then))


@pytest.mark.parametrize("heard_first", [False, True])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_retried_call_and_the_other_answers_tool_result(
    name: str, heard_first: bool, tiny_models: dict[str, Model]
) -> None:
    model = tiny_models[name]
    session = Session(model)
    asked = Conversation((QUESTION,), TOOLS)
    first = session.ask(asked, said(model, model.calling([("add", '{"a": 1}')])))
    again = session.ask(asked, said(model, model.calling([("add", '{"a": 2}')])), retry_of=first.id)
    heard, lost = (first, again) if heard_first else (again, first)
    then = session.ask(Conversation((QUESTION, heard.response, result(heard, "is three")), TOOLS), said(model, "3"))
    assert (then.parent, then.kept) == (heard.id, session.tree.num_tokens(heard.id))
    told = model.renderer.encode_tokens(lost.completion)
    assert told not in model.renderer.encode_tokens(session.tree.tokens(then.id))
    forest, metrics = train(session.record, ["e"])
    assert metrics["forest/orphans"] == 1
    assert not set(lost.logprobs) & set(forest["logprob"].tolist())


def test_stripped_thinking_forks_and_never_pretends(tiny_models: dict[str, Model]) -> None:
    model = tiny_models["qwen3"]
    thought = said(model, "<think>\nhm\n</think>\n\nhello")
    for history, forks in (("template", True), ("as_sampled", False)):
        session = Session(model, history)
        first = session.ask(Conversation((QUESTION,)), thought)
        assert first.response.reasoning == "hm"
        second = session.ask(Conversation((QUESTION, first.response, MORE)), said(model, "42"))
        # The fork is in the prompt: before "assistant\n", which is tokenised again.
        assert second.kept == (first.suffix.index(1, 1) + 1 if forks else session.tree.num_tokens(first.id))
        assert (b"hm" in model.renderer.encode_tokens(session.tree.tokens(second.id))) is not forks
        assert second.fork == ("template" if forks else "")
        train(session.record, ["e"])


@pytest.mark.parametrize("name", ["llama3", "mistral", "trim"])
def test_templates_that_are_not_chatml(name: str, tiny_models: dict[str, Model]) -> None:
    model = tiny_models[name]
    session = Session(model)
    messages: list[Message] = []
    for text in ("hello", " the <|im_end|>\n<|im_start|>user ", "42"):
        messages.append(Message("user", f"{text} <|im_end|></s>[/INST]<|eot_id|>"))
        call = session.ask(Conversation(tuple(messages)), said(model, "hello"))
        messages.append(call.response)
        control = [token for token in call.suffix if token in model.card.end_tokens]
        assert len(control) <= 2, "what users say ends no turn"
    assert [call.fork for call in session.tree.calls] == ["", "", ""]
    assert len(session.tree.leaves()) == 1
    train(session.record, ["e"])


@pytest.mark.parametrize("name", ["llama3", "mistral", "trim"])
def test_a_stray_bos(name: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, name)
    file = str(Path(model.card.tokenizer_path) / "tokenizer.json")
    adding = Tokenizer.from_file(file)
    bos = adding.token_to_id(model.card.bos_token)
    adding.post_processor = TemplateProcessing(
        single=f"{model.card.bos_token} $A", special_tokens=[(model.card.bos_token, bos)]
    )
    adding.save(file)
    model = Model(name, model.card, Tokenizer.from_file(file))
    assert adding.encode("hello").ids[0] == bos, "it does add one"
    session = Session(model)
    messages: list[Message] = []
    for text in ("hello", model.card.bos_token, "42"):
        messages.append(Message("user", text))
        call = session.ask(Conversation(tuple(messages)), said(model, "hello"))
        messages.append(call.response)
        tokens = session.tree.tokens(call.id)
        assert tokens[0] == bos and tokens.count(bos) == 1
    train(session.record, ["e"])


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral"])
def test_a_stop_string_in_the_middle_of_a_token(name: str, tiny_models: dict[str, Model]) -> None:
    model = tiny_models[name]
    session = Session(model)
    first = session.ask(Conversation((QUESTION,)), said(model, "42hello the"), stop=["el"])
    assert first.response.content == "42h"
    assert first.completion == model.ids("42hello"), "the token that completed it was sampled too, and nothing after it"
    second = session.ask(Conversation((QUESTION, first.response, MORE)), said(model, "42"))
    whole = session.tree.num_tokens(first.id)
    assert (second.parent, second.kept, second.fork) == (first.id, whole - 1, "template"), "`ello` is not fed"
    train(session.record, ["e"])


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral"])
def test_a_character_split_between_two_tokens(name: str, tiny_models: dict[str, Model]) -> None:
    model = tiny_models[name]
    euro = model.ids("€")
    assert len(euro) == 2, "its first token is no whole character"
    for completion, content in (((*euro, model.end), "€"), (euro[:1], "\ufffd")):
        session = Session(model)
        first = session.ask(Conversation((QUESTION,)), completion)
        assert first.response.content == content
        second = session.ask(Conversation((QUESTION, first.response, MORE)), said(model, "42"))
        assert (second.parent, second.kept) == (first.id, session.tree.num_tokens(first.id))
        train(session.record, ["e"])


def test_a_spelling_that_no_tokenizer_would_choose(tiny_models: dict[str, Model]) -> None:
    model = tiny_models["chatml"]
    spelt = [token for letter in "hello" for token in model.ids(letter)]
    assert len(model.ids("hello")) == 1 and len(spelt) == 5
    session = Session(model)
    first = session.ask(Conversation((QUESTION,)), (*spelt, model.end))
    second = session.ask(Conversation((QUESTION, first.response, MORE)), said(model, "42"))
    assert second.kept == session.tree.num_tokens(first.id)
    train(session.record, ["e"])


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_runs_of_parallel_tool_results(name: str, backwards: bool, tiny_models: dict[str, Model]) -> None:
    model = tiny_models[name]
    session = Session(model)
    calls = [("add", '{"a":1}'), ("add", '{"a":  2}'), ("sub", "{}")]
    first = session.ask(Conversation((QUESTION,), TOOLS), said(model, model.calling(calls)))
    assert [call.name for call in first.response.tool_calls] == ["add", "add", "sub"]
    results = [result(first, text, which) for which, text in enumerate(("one", "", "three"))]
    ordered = results[::-1] if backwards else results
    respaced = tuple(replace(call, arguments=call.arguments.replace(" ", "")) for call in first.response.tool_calls)
    history = (QUESTION, replace(first.response, tool_calls=respaced), *ordered)
    second = session.ask(Conversation(history, TOOLS), said(model, "3"))
    assert (second.parent, second.kept, second.fork) == (first.id, session.tree.num_tokens(first.id), "")
    text = model.renderer.encode_tokens(second.suffix)
    assert text.find(b"one") >= 0 and (text.find(b"one") > text.find(b"three")) is backwards
    train(session.record, ["e"])


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_other_tools_are_another_context(name: str, tiny_models: dict[str, Model]) -> None:
    model = tiny_models[name]
    session = Session(model)
    for tools, word in ((TOOLS, b'"add"'), (OTHER_TOOLS, b'"sub"')):
        call = session.ask(Conversation((QUESTION,), tools), said(model, "hello"))
        assert word in model.renderer.encode_tokens(session.tree.tokens(call.id))
    assert [call.fork for call in session.tree.calls] == ["", "tools"]
    forest, _ = train(session.record, ["e"])
    assert forest.num_targets == 2 * len(said(model, "hello"))
    assert len(set(forest.node.tolist())) == forest.num_targets


def test_another_role_and_another_speaker_are_not_merged(tiny_models: dict[str, Model]) -> None:
    model = tiny_models["chatml"]
    record = Record()
    planner, critic = (Session(model, role=role, record=record) for role in ("planner", "critic"))
    for session in (planner, critic):
        session.ask(Conversation((QUESTION,)), said(model, "42"))
    echoed = planner.ask(Conversation((QUESTION, Message("user", "42"), Message("user", "42"))), said(model, "42"))
    assert echoed.kept < planner.tree.num_tokens(planner.tree.calls[0].id)
    forest, _ = train(record, ["e"])
    assert forest.num_sequences == 2
    assert forest.num_targets == 3 * len(said(model, "42")), "what users say is never trained"


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "mistral"])
def test_the_end_of_a_truncated_answer_is_not_trained(name: str, tiny_models: dict[str, Model]) -> None:
    model = tiny_models[name]
    session = Session(model)
    first = session.ask(Conversation((QUESTION,)), model.ids("hello the"))
    second = session.ask(Conversation((QUESTION, first.response, MORE)), said(model, "42"))
    assert (second.parent, second.kept) == (first.id, session.tree.num_tokens(first.id))
    assert second.suffix[0] == model.end
    forest, _ = train(session.record, ["e"])
    assert forest.num_targets == len(first.completion) + len(second.completion)


def test_no_message_is_injected(tiny_models: dict[str, Model]) -> None:
    model = tiny_models["chatml"]
    call = Session(model).ask(Conversation((QUESTION,)), said(model, "42"))
    assert model.renderer.encode_tokens(call.suffix).count(b"hello") == 1
    assert model.renderer.text(call.suffix) == "user\nhello\nassistant\n"


def test_rewritten_memory_forks_and_both_are_trained(tiny_models: dict[str, Model]) -> None:
    model = tiny_models["llama3"]
    session = Session(model)
    first = session.ask(Conversation((QUESTION,)), said(model, "hello the 42"))
    summary = Message("assistant", "hello")
    second = session.ask(Conversation((QUESTION, summary, MORE)), said(model, "42"))
    assert second.fork == "edit"
    third = session.ask(Conversation((QUESTION, first.response, MORE)), said(model, "42"))
    assert third.kept == session.tree.num_tokens(first.id)
    train(session.record, ["e"])


def test_many_timelines_are_all_trained_and_weigh_as_one_sequence(tiny_models: dict[str, Model]) -> None:
    model = tiny_models["chatml"]
    record = Record()
    straight, forked = (Session(model, episode_id=id, record=record) for id in ("e0", "e1"))
    straight.ask(Conversation((QUESTION,)), said(model, "42"))
    for i in range(40):
        forked.ask(Conversation((Message("user", f"hello {i}"),)), said(model, "42"))
    assert len(forked.tree.leaves()) == 40
    forest, metrics = train(record, ["e0", "e1"])
    assert forest.num_sequences == 2 and metrics["episode/timelines"] == 20.5
    assert forest.num_targets == 41 * len(said(model, "42"))


def test_calls_nobody_recorded_are_not_trained(tiny_models: dict[str, Model]) -> None:
    """A history of another model: all of it is prompt."""
    model = tiny_models["qwen3"]
    session = Session(model)
    foreign = Message("assistant", "so", tool_calls=(ToolCall("c1", "add", '{"a": 1}'),))
    history = (QUESTION, foreign, Message("tool", "1", tool_call_id="c1"))
    call = session.ask(Conversation(history, TOOLS), said(model, "42"))
    forest, _ = train(session.record, ["e"])
    assert forest.num_targets == len(call.completion)


def thinking(model: Model, number: int) -> tuple[int, ...]:
    return said(model, f"<think>\nhm {number}\n</think>\n\n" + model.calling([("add", f'{{"a":{number}}}')]))


@pytest.mark.parametrize("history", ["template", "as_sampled"])
def test_json_spacing_forks_no_tool_loop_with_thinking(history: str, tiny_models: dict[str, Model]) -> None:
    model = tiny_models["qwen3"]
    session = Session(model, history)
    messages: list[Message] = [QUESTION]
    for number in range(4):
        call = session.ask(Conversation(tuple(messages), TOOLS), thinking(model, number))
        messages += [call.response, result(call, "ok")]
    assert [call.fork for call in session.tree.calls] == [""] * 4 and len(session.tree.leaves()) == 1
    train(session.record, ["e"])


def test_agents_that_send_back_the_last_thought_only(tiny_models: dict[str, Model]) -> None:
    model = tiny_models["qwen3"]
    session = Session(model, "as_sampled")
    messages: list[Message] = [QUESTION]
    for number in range(4):
        call = session.ask(Conversation(tuple(messages), TOOLS), thinking(model, number))
        messages = [*(replace(message, reasoning="") for message in messages), call.response, result(call, "ok")]
    assert [call.fork for call in session.tree.calls] == [""] * 4 and len(session.tree.leaves()) == 1
    train(session.record, ["e"])


def test_a_later_vote_takes_no_timeline_away(tiny_models: dict[str, Model]) -> None:
    """Two answers differ in their thinking only, which the agent drops. It continues from the first."""
    model = tiny_models["qwen3"]
    session = Session(model, "as_sampled")
    votes = [said(model, f"<think>\n{number}\n</think>\n\nhello") for number in range(2)]
    first = session.ask(Conversation((QUESTION,)), votes[0])
    history = (QUESTION, replace(first.response, reasoning=""), MORE)
    second = session.ask(Conversation(history), said(model, "42"))
    session.ask(Conversation((QUESTION,)), votes[1])
    third = session.ask(Conversation((*history, second.response, QUESTION)), said(model, "42"))
    assert (third.parent, third.kept) == (second.id, session.tree.num_tokens(second.id))
    train(session.record, ["e"])


def test_a_thought_that_was_empty_is_no_loose_closing_tag(tiny_models: dict[str, Model]) -> None:
    model = tiny_models["qwen3_open"]
    session = Session(model)
    first = session.ask(Conversation((QUESTION,)), said(model, "\n</think>\n\nhello"))
    assert (first.response.reasoning, first.response.content) == ("", "hello")
    second = session.ask(Conversation((QUESTION, first.response, MORE)), said(model, "\n</think>\n\n42"))
    assert second.fork == "template"
    asked = model.renderer.text(session.tree.tokens(second.id)[: -len(second.completion)])
    assert "</think>" not in asked and "assistant\nhello" in asked
    train(session.record, ["e"])
