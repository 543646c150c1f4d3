"""Random agents over real templates and a real (tiny) tokenizer. Pinned here, for every call:

1. its prompt is what the tree keeps, to the token, and then the suffix; together they encode to the rendered bytes;
2. no known path would have kept more (a plain loop over tokens says what could be kept);
3. a linear conversation keeps every token that was sampled, whatever it was;
4. what was not sampled is tokenised the same whatever came before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjet.rendering import Renderer, template_for
from agentjet.timeline import ConversationTree, Match, conversation_key
from agentjet.types import ESCAPE, ESCAPED_BYTE, Call, Conversation, Message, ModelCard
from tests import tiny

TEMPLATES = ("chatml", "qwen3", "trim", "strict", "smollm2")
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}},)
END = tiny.SPECIAL.index("<|im_end|>")


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    made = {}
    for name in TEMPLATES:
        card: ModelCard = tiny.make_card(folder / name, "smollm2_own" if name == "smollm2" else name)
        template, tool_format = template_for(name, card.chat_template)
        made[name] = Renderer(replace(card, chat_template=template, tool_format=tool_format))
    return made


@dataclass
class Session:
    """One episode's conversations, glued together as the gateway does it, with every claim checked on the way."""

    renderer: Renderer
    history: str = "template"
    tree: ConversationTree = field(default_factory=ConversationTree)
    matches: list[Match] = field(default_factory=list)

    def prompt(self, conversation: Conversation) -> tuple[bytes, Match, tuple[int, ...]]:
        known = self.tree.recognise(conversation)
        bodies = {
            i: self.renderer.generation_tail + self.tree.encoded_completion(call.id)
            for i, call in known.items()
            if self.history == "as_sampled" or not call.response.reasoning
        }
        encoded = self.renderer.render(conversation, sampled=bodies)
        match = self.tree.match(encoded)
        return encoded, match, self.renderer.tokenize(match.suffix)

    def ask(self, conversation: Conversation, completion: Sequence[int]) -> Call:
        encoded, match, suffix = self.prompt(conversation)
        prompt = self.tree.prompt_tokens(match, suffix)
        self.check(encoded, match, suffix, prompt)
        id = f"call_{len(self.tree.calls)}"
        call = Call(
            id=id,
            episode_id="e",
            role="",
            parent=match.parent,
            kept=match.kept,
            suffix=suffix,
            completion=tuple(completion),
            logprobs=(0.0,) * len(completion),
            versions=(0,) * len(completion),
            temperature=1.0,
            finish_reason="stop",
            response=self.renderer.parse(completion, conversation, id_prefix=id),
            prompt_key=conversation_key(conversation),
            created=0.0,
        )
        self.tree.add(call, self.renderer.pieces(suffix), self.renderer.pieces(completion))
        assert self.tree.tokens(id) == prompt + tuple(completion)
        assert self.tree.encoded_completion(id) == self.renderer.encode_tokens(completion)
        self.matches.append(match)
        return call

    def check(self, encoded: bytes, match: Match, suffix: tuple[int, ...], prompt: tuple[int, ...]) -> None:
        assert suffix, "a suffix is never empty"
        assert self.renderer.encode_tokens(prompt) == encoded
        if match.parent is None:
            assert match.kept == 0
        else:
            assert prompt[: match.kept] == self.tree.tokens(match.parent)[: match.kept]
        assert prompt[match.kept :] == suffix
        kept_bytes = len(encoded) - len(match.suffix)
        assert kept_bytes == max((keepable(self, call, encoded) for call in self.tree.calls), default=0)


def keepable(session: Session, call: Call, encoded: bytes) -> int:
    """Bytes of `encoded` that the path to the end of `call` could keep, by a plain loop over its tokens."""
    pieces = session.renderer.pieces(session.tree.tokens(call.id))
    sampled = sampled_positions(session.tree, call)
    best = offset = 0
    for position, piece in enumerate(pieces):
        if not encoded.startswith(piece, offset) or offset + len(piece) >= len(encoded):
            break
        offset += len(piece)
        control = piece.startswith(ESCAPE) and piece != ESCAPED_BYTE and len(piece) == 4
        breaks_character = position in sampled and encoded[offset] & 0xC0 == 0x80
        if (control or position in sampled) and not breaks_character:
            best = offset
    return best


def sampled_positions(tree: ConversationTree, call: Call) -> set[int]:
    """Which tokens of the path to `call` were sampled."""
    calls = {known.id: known for known in tree.calls}
    positions: set[int] = set()
    length = call.kept + len(call.suffix) + len(call.completion)
    at: Call | None = call
    while at is not None:
        first = at.kept + len(at.suffix)
        positions |= set(range(first, min(first + len(at.completion), length)))
        length = at.kept
        at = calls[at.parent] if at.parent else None
    return positions


FULL = tiny.tokenizer()
WORDS = st.sampled_from(
    [
        "hello",
        " the",
        "\n",
        "\n\n",
        "  ",
        "€",
        "<|im_end|>",
        "<|im_",
        "end|>",
        "<think>",
        "é́",
        "42",
        "<|im_start|>user\n",
        "🙂",
    ]
)
TEXTS = st.lists(WORDS, max_size=5).map("".join)
ANSWERS = st.sampled_from(
    [
        "hello",
        " hello the 42 \n",
        "<think>\nhm\n</think>\n\nhello",
        "<think>hm 42",
        'so <tool_call>\n{"name": "add", "arguments": {"a":1,  "b": "€"}}\n</tool_call>',
        '<tool_call>{"arguments": {}, "name": "add"}</tool_call>\n<tool_call>broken</tool_call>',
        '<think>\n2\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
    ]
).map(lambda text: FULL.encode(text).ids)
ANYTHING = st.lists(st.integers(0, FULL.get_vocab_size() + 3), max_size=6)


@st.composite
def completions(draw: st.DrawFn) -> tuple[int, ...]:
    """Answers, and around some of them what a policy might sample: half characters, control tokens, unknown ids."""
    body = draw(ANYTHING) + draw(ANSWERS) + draw(ANYTHING) if draw(st.booleans()) else draw(ANSWERS)
    return (*body, *draw(st.sampled_from([(END,), (END,), (), (tiny.SPECIAL.index("<|endoftext|>"),)])))


@dataclass
class Agent:
    """Does to its conversations what agents do."""

    draw: st.DrawFn
    session: Session
    tools: tuple[dict[str, object], ...]
    past: list[tuple[Conversation, Call]] = field(default_factory=list)

    def step(self) -> None:
        conversation = self.next_conversation()
        call = self.session.ask(conversation, self.draw(completions()))
        self.past.append((conversation, call))

    def next_conversation(self) -> Conversation:
        if not self.past or self.draw(st.integers(0, 5)) == 0:
            return self.fresh()
        asked, call = self.past[self.draw(st.integers(0, len(self.past) - 1))]
        if self.draw(st.integers(0, 4)) == 0:
            return asked  # the same question again, as for n > 1
        answered = (*asked.messages, self.sent_back(call.response), *self.replies(call.response))
        if self.draw(st.integers(0, 4)) == 0:
            answered = tuple(self.edited(answered))
        return Conversation(answered, asked.tools)

    def fresh(self) -> Conversation:
        return Conversation((Message("user", self.draw(TEXTS)),), self.tools)

    def sent_back(self, response: Message) -> Message:
        change = self.draw(st.sampled_from(["none", "none", "none", "no reasoning", "stripped", "respaced"]))
        if change == "no reasoning":
            return replace(response, reasoning="")
        if change == "stripped":
            return replace(response, content=response.content.strip())
        if change == "respaced":
            calls = tuple(
                replace(c, arguments=c.arguments.replace(" ", "").replace(":", " : ")) for c in response.tool_calls
            )
            return replace(response, tool_calls=calls)
        return response

    def replies(self, response: Message) -> Iterator[Message]:
        for tool_call in response.tool_calls:
            yield Message("tool", self.draw(TEXTS), tool_call_id=tool_call.id)
        if not response.tool_calls:
            yield Message("user", self.draw(TEXTS))

    def edited(self, messages: Sequence[Message]) -> list[Message]:
        i = self.draw(st.integers(0, len(messages) - 1))
        return [replace(m, content=self.draw(TEXTS)) if i == j else m for j, m in enumerate(messages)]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_call_of_a_random_agent_is_exact(name: str, renderers: dict[str, Renderer], data: st.DataObject) -> None:
    knows_tools = name in ("qwen3", "smollm2")
    history = data.draw(st.sampled_from(["template", "as_sampled"]))
    tools = TOOLS if knows_tools and data.draw(st.booleans()) else ()
    agent = Agent(data.draw, Session(renderers[name], history), tools)
    for _ in range(data.draw(st.integers(1, 7))):
        agent.step()


@pytest.mark.parametrize(
    ("name", "history"),
    [(name, "as_sampled") for name in TEMPLATES] + [(name, "template") for name in TEMPLATES if name != "qwen3"],
)
@settings(max_examples=25, deadline=None)
@given(turns=st.lists(st.tuples(TEXTS, completions()), min_size=2, max_size=5))
def test_a_linear_conversation_keeps_all_that_was_sampled(
    name: str, history: str, renderers: dict[str, Renderer], turns: list[tuple[str, tuple[int, ...]]]
) -> None:
    session = Session(renderers[name], history)
    messages: list[Message] = []
    last: Call | None = None
    for text, completion in turns:
        messages.append(Message("user", text))
        call = session.ask(Conversation(tuple(messages)), completion)
        if last is not None:
            ends_otherwise = last.completion[-1:] == (
                tiny.SPECIAL.index("<|endoftext|>"),
            )  # templates write <|im_end|>
            whole = last.kept + len(last.suffix) + len(last.completion) - ends_otherwise
            assert (session.matches[-1].parent, session.matches[-1].kept) == (last.id, whole)
        messages.append(replace(call.response, reasoning=""))
        last = call


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(texts=st.lists(TEXTS, min_size=2, max_size=6))
def test_what_was_not_sampled_is_tokenised_as_if_alone(
    name: str, renderers: dict[str, Renderer], texts: list[str]
) -> None:
    session = Session(renderers[name])
    for i, text in enumerate(texts):
        messages = (Message("user", texts[0]), Message("assistant", text), Message("user", text))[: 1 + 2 * (i % 2)]
        encoded, match, suffix = session.prompt(Conversation(messages))
        assert session.tree.prompt_tokens(match, suffix) == renderers[name].tokenize(encoded)
        session.ask(Conversation(messages), FULL.encode("42").ids if i % 2 else [END])


def test_stripped_thinking_forks_and_never_pretends(renderers: dict[str, Renderer]) -> None:
    question, more = Message("user", "hello"), Message("user", "42")
    thought = (*FULL.encode("<think>\nhm\n</think>\n\nhello").ids, END)
    for history, forks in (("template", True), ("as_sampled", False)):
        session = Session(renderers["qwen3"], history)
        first = session.ask(Conversation((question,)), thought)
        assert first.response.reasoning == "hm"
        second = session.ask(Conversation((question, first.response, more)), [END])
        whole = len(first.suffix) + len(first.completion)
        # The fork is in the prompt: before "assistant\n", which is tokenised again.
        assert second.kept == (first.suffix.index(1, 1) + 1 if forks else whole)
        assert (b"hm" in session.renderer.encode_tokens(session.tree.tokens(second.id))) is not forks


def test_reasoning_that_the_template_keeps_is_kept_to_the_token(renderers: dict[str, Renderer]) -> None:
    session = Session(renderers["qwen3"])
    question = Message("user", "hello")
    text = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    first = session.ask(Conversation((question,), TOOLS), (*FULL.encode(text).ids, END))
    answer = Message("tool", "2", tool_call_id=first.response.tool_calls[0].id)
    second = session.ask(Conversation((question, first.response, answer), TOOLS), [END])
    assert second.kept == len(first.suffix) + len(first.completion)
