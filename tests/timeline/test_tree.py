"""Pinned here, on a toy encoding in which a letter is a token (capitals are sampled, `|` is a control token):

1. a prompt keeps the longest known path: all sampled tokens on it, but only whole stretches of prompt text;
2. a suffix is never empty, and a match never ends within a sampled character;
3. forks, duplicates, roots and calls in parallel; `tokens` and `prompt_tokens` are exact; `leaves`;
4. sampled answers are recognised by meaning, after the same messages only;
5. orphans: among a request and its retries, the answers that were sent back are trained, else the last delivered one;
6. prompts of tokens keep the longest path of equal tokens, also among calls of text, and stay exact;
7. a linear conversation has no forks; votes and sub-agents are branches. `test_failures_of_others` has other causes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.timeline import ConversationTree, Match
from agentjet.timeline.tree import Identities, orphans
from agentjet.types import Call, Conversation, Message, NewContext, ToolCall
from tests.timeline.agents import Session
from tests.timeline.models import Model

CONTROL = ord("|")


def piece(token: int) -> bytes:
    return b"\xff\x00\x00\x01" if token == CONTROL else bytes([token])


def encoded(text: str) -> bytes:
    return b"".join(map(piece, text.encode()))


def call(id: str, parent: str | None, kept: int, suffix: str, completion: str, **changes: object) -> Call:
    made = Call(
        id=id,
        episode_id="e",
        role="",
        parent=parent,
        kept=kept,
        suffix=tuple(suffix.encode()),
        completion=tuple(completion.encode()),
        logprobs=(0.0,) * len(completion),
        versions=(0,) * len(completion),
        temperature=1.0,
        finish_reason="stop",
        response=Message("assistant", completion),
        prompt_key="",
        created=0.0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def grow(tree: ConversationTree, made: Call) -> None:
    tree.add(made, [piece(t) for t in made.suffix], [piece(t) for t in made.completion])


def recognised(tree: ConversationTree, conversation: Conversation) -> dict[int, Call]:
    return tree.recognise(tree.identify(conversation))


def ask(tree: ConversationTree, id: str, prompt: str, completion: str) -> Match:
    """Matches a prompt and records its call, as the gateway does."""
    match = tree.match(encoded(prompt))
    suffix = match.suffix.replace(b"\xff\x00\x00\x01", b"|").decode()
    assert tree.prompt_tokens(match, tuple(suffix.encode())) == tuple(prompt.encode())
    grow(tree, call(id, match.parent, match.kept, suffix, completion))
    assert tree.tokens(id) == tuple((prompt + completion).encode())
    return match


@pytest.fixture
def tree() -> ConversationTree:
    return ConversationTree()


def test_the_first_prompt_keeps_nothing(tree: ConversationTree) -> None:
    assert ask(tree, "1", "|ab|c", "XY|") == Match(None, 0, encoded("|ab|c"))


def test_a_linear_conversation_keeps_everything(tree: ConversationTree) -> None:
    ask(tree, "1", "|ab|c", "XY|")
    assert ask(tree, "2", "|ab|cXY|de|f", "Z") == Match("1", 8, encoded("de|f"))
    assert ask(tree, "3", "|ab|cXY|de|fZ|g", "W") == Match("2", 13, encoded("|g"))
    assert [leaf.id for leaf in tree.leaves()] == ["3"]


def test_prompt_text_is_kept_up_to_a_control_token(tree: ConversationTree) -> None:
    ask(tree, "1", "|abc|def", "X|")
    assert tree.match(encoded("|abc|dez")) == Match("1", 5, encoded("dez"))
    assert tree.match(encoded("|abz|def")) == Match("1", 1, encoded("abz|def"))
    assert tree.match(encoded("zabc|def")) == Match(None, 0, encoded("zabc|def"))


def test_the_same_prompt_again_leaves_a_suffix(tree: ConversationTree) -> None:
    ask(tree, "1", "|ab|c", "X|")
    assert ask(tree, "2", "|ab|c", "Y|") == Match("1", 4, encoded("c"))
    assert tree.match(encoded("|ab|")) == Match("1", 1, encoded("ab|"))
    assert {leaf.id for leaf in tree.leaves()} == {"1", "2"}


def test_a_prompt_that_ends_in_what_was_sampled_leaves_its_last_token(tree: ConversationTree) -> None:
    ask(tree, "1", "|ab|", "XYZ")
    assert tree.match(encoded("|ab|XYZ")) == Match("1", 6, encoded("Z"))
    assert tree.match(encoded("|ab|XY")) == Match("1", 5, encoded("Y"))


def test_an_edited_answer_keeps_its_sampled_beginning(tree: ConversationTree) -> None:
    ask(tree, "1", "|ab|c", "XYZ|")
    assert tree.match(encoded("|ab|cXYw|")) == Match("1", 7, encoded("w|"))
    assert tree.match(encoded("|ab|cw|")) == Match("1", 4, encoded("cw|"))


def test_a_fork_below_a_fork_finds_its_way_back(tree: ConversationTree) -> None:
    ask(tree, "1", "|a|", "X|")
    ask(tree, "2", "|a|X|b|", "Y|")
    ask(tree, "3", "|a|X|c|", "Z|")
    assert tree.match(encoded("|a|X|b|Y|d")) == Match("2", 9, encoded("d"))
    assert tree.match(encoded("|a|X|c|Z|d")) == Match("3", 9, encoded("d"))
    assert tree.match(encoded("|a|X|d")) == Match("1", 5, encoded("d"))
    assert {leaf.id for leaf in tree.leaves()} == {"2", "3"}


def test_the_longest_path_wins_and_of_equals_the_newest(tree: ConversationTree) -> None:
    grow(tree, call("1", None, 0, "|a|", "X|"))
    grow(tree, call("2", None, 0, "|a|", "X|"))
    assert tree.match(encoded("|a|X|b")).parent == "2"
    grow(tree, call("3", "1", 5, "b|", "Y|"))
    assert tree.match(encoded("|a|X|b|Y|c")) == Match("3", 9, encoded("c"))


def test_a_call_may_hang_from_an_ancestor_of_its_parent(tree: ConversationTree) -> None:
    ask(tree, "1", "|a|", "X|")
    ask(tree, "2", "|a|X|b|", "Y|")
    grow(tree, call("3", "2", 4, "|z|", "Z"))
    assert tree.tokens("3") == tuple(b"|a|X|z|Z")
    assert tree.match(encoded("|a|X|z|Zq")) == Match("3", 8, encoded("q"))


def test_a_match_never_ends_within_a_sampled_character(tree: ConversationTree) -> None:
    euro, kip = "€".encode(), "₭".encode()  # they differ in their last byte
    first = call("1", None, 0, "|", "")
    first = replace(first, completion=tuple(euro), logprobs=(0.0,) * 3, versions=(0,) * 3)
    grow(tree, first)
    assert tree.match(piece(CONTROL) + kip + b"!") == Match("1", 1, kip + b"!")
    assert tree.match(piece(CONTROL) + euro + b"!") == Match("1", 4, b"!")


STRETCH = st.text("ab|A", min_size=1, max_size=4)


@given(st.data())
def test_a_prompt_of_tokens_keeps_the_longest_path_of_equal_tokens(data: st.DataObject) -> None:
    """Compared with a search of all paths, in trees that calls of text have grown, too."""
    tree = ConversationTree()
    for number in range(data.draw(st.integers(1, 6))):
        id, paths = f"c{number}", {one.id: tree.tokens(one.id) for one in tree.calls}
        known = data.draw(st.sampled_from(["", *("".join(map(chr, path)) for path in paths.values())]))
        prompt = known[: data.draw(st.integers(0, len(known)))] + data.draw(STRETCH)
        completion = data.draw(STRETCH)
        if data.draw(st.booleans()):
            ask(tree, id, prompt, completion)
            continue
        tokens = tuple(prompt.encode())
        match, after = tree.match_tokens(tokens)
        common = {id: next((i for i, (a, b) in enumerate(zip(path, tokens, strict=False)) if a != b),
                           min(len(path), len(tokens))) for id, path in paths.items()}  # fmt: skip
        answered = {id: len(path) for id, path in paths.items() if common[id] == len(path)}
        assert match.kept == max(common.values(), default=0) and match.suffix == b""
        assert (match.parent is None) == (match.kept == 0)
        assert (after and len(paths[after])) == max(answered.values(), default=None)
        assert tree.prompt_tokens(match, tokens[match.kept :]) == tokens
        grow(tree, call(id, match.parent, match.kept, prompt[match.kept :], completion))
        assert tree.tokens(id) == tuple((prompt + completion).encode())


def test_calls_in_parallel_do_not_disturb_each_other(tree: ConversationTree) -> None:
    prompts = [f"|a|{letter}" for letter in "bcd"]
    matches = [tree.match(encoded(prompt)) for prompt in prompts]
    assert all(match == Match(None, 0, encoded(prompt)) for match, prompt in zip(matches, prompts, strict=True))
    for i, prompt in enumerate(prompts):
        grow(tree, call(str(i), None, 0, prompt, "X|"))
    assert [c.id for c in tree.calls] == ["0", "1", "2"]
    assert tree.match(encoded("|a|cX|q")) == Match("1", 6, encoded("q"))


class TestRecognise:
    ASKED = Conversation((Message("user", "q"),))

    def answered(self, tree: ConversationTree, id: str, response: Message) -> Call:
        made = call(id, None, 0, "|q|", id, response=response, prompt_key=Identities().of(self.ASKED).key)
        grow(tree, made)
        return made

    def with_answer(self, *messages: Message) -> Conversation:
        return Conversation((*self.ASKED.messages, *messages))

    def test_by_meaning(self, tree: ConversationTree) -> None:
        said = Message("assistant", tool_calls=(ToolCall("c1", "add", '{"a": 1,  "b": 2}'),))
        made = self.answered(tree, "1", said)
        sent_back = replace(said, tool_calls=(ToolCall("c1", "add", '{"b":2,"a":1}'),))
        assert recognised(tree, self.with_answer(sent_back, Message("tool", "3", tool_call_id="c1"))) == {1: made}
        assert recognised(tree, self.with_answer(replace(said, tool_calls=()))) == {}

    def test_only_behind_the_same_messages_and_tools(self, tree: ConversationTree) -> None:
        said = Message("assistant", "a")
        self.answered(tree, "1", said)
        assert recognised(tree, Conversation((Message("user", "other"), said))) == {}
        assert recognised(tree, Conversation((*self.ASKED.messages, said), ({"type": "function"},))) == {}
        assert recognised(tree, Conversation((*self.ASKED.messages, replace(said, role="user")))) == {}

    def test_later_turns_need_the_earlier_ones(self, tree: ConversationTree) -> None:
        first = self.answered(tree, "1", Message("assistant", "a"))
        longer = self.with_answer(Message("assistant", "a"), Message("user", "r"))
        second = call(
            "2", None, 0, "|r|", "B", response=Message("assistant", "b"), prompt_key=Identities().of(longer).key
        )
        grow(tree, second)
        whole = Conversation((*longer.messages, Message("assistant", "b"), Message("user", "s")))
        assert recognised(tree, whole) == {1: first, 3: second}
        edited = Conversation((Message("user", "q!"), *whole.messages[1:]))
        assert recognised(tree, edited) == {}

    def test_without_its_reasoning_and_the_newest_of_several(self, tree: ConversationTree) -> None:
        first = self.answered(tree, "1", Message("assistant", "a", reasoning="x"))
        second = self.answered(tree, "2", Message("assistant", "a", reasoning="y"))
        assert recognised(tree, self.with_answer(Message("assistant", "a"))) == {1: second}
        assert recognised(tree, self.with_answer(Message("assistant", "a", reasoning="x"))) == {1: first}
        assert recognised(tree, self.with_answer(Message("assistant", "a", reasoning="z"))) == {}


# ---- orphans and forks -----------------------------------------------------------------------------------------------


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


USER, MORE = Message("user", "hello"), Message("user", "42")


@pytest.fixture
def session(tiny_models: dict[str, Model]) -> Session:
    return Session(tiny_models["qwen3"])


def answered(session: Session, answer: str, *messages: Message) -> Message:
    model = session.model
    return session.ask(Conversation(messages), (*model.ids(answer), model.end)).response


def test_a_linear_conversation_has_no_forks(session: Session) -> None:
    first = answered(session, "one", USER)
    second = answered(session, "two", USER, first, MORE)
    answered(session, "three", USER, first, MORE, second, MORE)
    calls = session.tree.calls
    assert [call.fork for call in calls] == ["", "", ""]
    assert [call.ask.after for call in calls] == [None, calls[0].id, calls[1].id]
    assert [call.ask.messages for call in calls] == [(USER,), (MORE,), (MORE,)]


def test_votes_and_sub_agents_are_branches(session: Session) -> None:
    first = answered(session, "one", USER)
    answered(session, "two", USER)
    answered(session, "three", USER, first, MORE)
    answered(session, "four", USER, first, Message("user", "the"))
    answered(session, "five", MORE)
    assert [call.fork for call in session.tree.calls] == ["", "branch", "", "branch", "branch"]
