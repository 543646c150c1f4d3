"""Pinned here:

1. orphans: among a request and its retries, the answers that were sent back are trained, else the last delivered one;
2. the cause of a fork, for each way in which agents and templates leave a timeline.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.rendering import Renderer
from agentjet.timeline import ConversationTree
from agentjet.timeline.tree import new_context, orphans
from agentjet.types import Call, Conversation, Fork, Message, NewContext
from tests import tiny

END = tiny.SPECIAL.index("<|im_end|>")
TEXT = tiny.tokenizer()


def made(id: str, *, retry_of: str | None = None, after: str | None = None) -> Call:
    call = Call(id, "e", "", None, 0, (1,), (2,), (0.0,), (0,), 1.0, "stop", Message("assistant"), "", 0.0)
    return replace(call, retry_of=retry_of, ask=NewContext(after=after))


@pytest.mark.parametrize(
    ("calls", "undelivered", "expected"),
    [
        ([made("a"), made("b")], (), {}),
        ([made("a"), made("b", retry_of="a")], (), {"a": "retry"}),
        ([made("a"), made("b", retry_of="a"), made("c", retry_of="b")], (), {"a": "retry", "b": "retry"}),
        ([made("a"), made("b", retry_of="a"), made("c", after="b")], (), {"a": "retry"}),
        ([made("a"), made("b", retry_of="a"), made("c", after="a")], (), {"b": "retry"}),
        ([made("a"), made("b", retry_of="a"), made("c", after="a"), made("d", after="b")], (), {}),
        ([made("a"), made("b")], ("b",), {"b": "undelivered"}),
        ([made("a"), made("b", after="a")], ("a",), {}),
        ([made("a"), made("b", retry_of="a")], ("b",), {"b": "undelivered"}),
        ([made("a"), made("b", retry_of="a")], ("a", "b"), {"a": "undelivered", "b": "undelivered"}),
    ],
)
def test_orphans(calls: list[Call], undelivered: tuple[str, ...], expected: dict[str, str]) -> None:
    assert orphans(calls, undelivered) == expected


class Talk:
    """The calls of one role, recorded as the gateway does it. `forks` has the cause of each call."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.tree = ConversationTree()
        self.forks: list[Fork] = []

    def ask(self, answer: str, *messages: Message, tools: tuple[dict[str, object], ...] = ()) -> Message:
        conversation = Conversation(messages, tools)
        asked = self.tree.identify(conversation)
        known = self.tree.recognise(asked)
        bodies = {i: self.tree.encoded_completion(c.id) for i, c in known.items() if not c.response.reasoning}
        match = self.tree.match(self.renderer.render(conversation, sampled=bodies))
        self.forks.append(self.tree.fork_cause(asked, known, match))
        suffix, completion = self.renderer.tokenize(match.suffix), (*TEXT.encode(answer).ids, END)
        call = Call(
            id=str(len(self.forks)),
            episode_id="e",
            role="",
            parent=match.parent,
            kept=match.kept,
            suffix=suffix,
            completion=completion,
            logprobs=(0.0,) * len(completion),
            versions=(0,) * len(completion),
            temperature=1.0,
            finish_reason="stop",
            response=self.renderer.parse(completion, conversation),
            prompt_key=asked.key,
            created=0.0,
            ask=new_context(conversation, known),
        )
        self.tree.add(call, self.renderer.pieces(suffix), self.renderer.pieces(completion))
        return call.response


@pytest.fixture
def talk(tmp_path: Path) -> Talk:
    return Talk(Renderer(replace(tiny.make_model_info(tmp_path, "qwen3"), tool_format="hermes")))


USER, MORE = Message("user", "hello"), Message("user", "42")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def test_a_linear_conversation_has_no_forks(talk: Talk) -> None:
    first = talk.ask("one", USER)
    second = talk.ask("two", USER, first, MORE)
    talk.ask("three", USER, first, MORE, second, MORE)
    assert talk.forks == ["", "", ""]
    assert [call.ask.after for call in talk.tree.calls] == [None, "1", "2"]
    assert [call.ask.messages for call in talk.tree.calls] == [(USER,), (MORE,), (MORE,)]


def test_votes_and_sub_agents_are_branches(talk: Talk) -> None:
    first = talk.ask("one", USER)
    talk.ask("two", USER)
    talk.ask("three", USER, first, MORE)
    talk.ask("four", USER, first, Message("user", "the"))
    talk.ask("five", MORE)
    assert talk.forks == ["", "branch", "", "branch", "branch"]


def test_a_template_that_strips_thinking(talk: Talk) -> None:
    first = talk.ask("<think>\nhm\n</think>\n\none", USER)
    talk.ask("two", USER, replace(first, reasoning=""), MORE)
    assert talk.forks == ["", "template"]


def test_an_edited_history(talk: Talk) -> None:
    talk.ask("one", USER)
    talk.ask("two", USER, Message("assistant", "another"), MORE)
    assert talk.forks == ["", "edit"]


def test_another_tool_list(talk: Talk) -> None:
    first = talk.ask("one", USER)
    second = talk.ask("two", USER, first, MORE, tools=(TOOL,))
    talk.ask("three", USER, first, MORE, second, MORE, tools=(TOOL,))
    assert talk.forks[:2] == ["", "tools"]
