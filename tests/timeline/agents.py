"""Random agents, and the episodes they leave behind.

A `Session` is one agent role of one episode, put together as the gateway does it (`gateway.prompts`,
`gateway.completion_parser`), with every claim about its tree checked on the way. An `Agent` does to its conversations
what agents do. A `Swarm` holds the episodes of a batch and remembers of every sampled token what it was sampled behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from hypothesis import strategies as st

from agentjet.errors import InvalidRequest
from agentjet.front.prompts import CompletionParser, Prompt, prepare_prompt
from agentjet.timeline import ConversationTree
from agentjet.timeline.tree import answer_key, context_hash
from agentjet.types import ESCAPE, ESCAPED_BYTE, Call, Conversation, Message, Sampled
from tests.timeline.models import OTHER_TOOLS, TEXTS, TOOLS, Model, completions


@dataclass(frozen=True)
class Token:
    """A sampled token with the values of the sampler."""

    context: tuple[int, ...]
    """The prompt and the completion up to this token, inclusive."""
    call: Call
    position: int


Meaning = tuple[str, str, str, str]


def meaning(call: Call) -> Meaning:
    """The session, the conversation and the answer, by meaning."""
    return call.episode_id, call.role, call.prompt_key, answer_key(call.response)


@dataclass
class Record:
    """The record of a batch's episodes. Each sampled token has a number, which is its log-probability."""

    calls: list[tuple[Call, tuple[bytes, ...], tuple[bytes, ...]]] = field(default_factory=list)
    tokens: dict[float, Token] = field(default_factory=dict)
    undelivered: set[str] = field(default_factory=set)
    sent_back: set[Meaning] = field(default_factory=set)
    """Calls that agents have continued."""
    refused: int = 0
    """Number of requests that a template refused. They are not recorded."""
    numbers: Iterator[int] = field(default_factory=lambda: count(1))


@dataclass
class Session:
    """One episode's conversations as one agent role."""

    model: Model
    history: str = "template"
    episode_id: str = "e"
    role: str = ""
    record: Record = field(default_factory=Record)
    tree: ConversationTree = field(default_factory=ConversationTree)
    prompts: list[Prompt] = field(default_factory=list)

    def prepare(self, conversation: Conversation) -> Prompt:
        """Returns the checked prompt of a request."""
        prompt = prepare_prompt(self.model.renderer, self.tree, conversation, self.history)  # type: ignore[arg-type]
        self._check(prompt)
        return prompt

    def answer(
        self,
        conversation: Conversation,
        prompt: Prompt,
        completion: Sequence[int],
        *,
        stop: Sequence[str] = (),
        retry_of: str | None = None,
    ) -> Call:
        """Samples `completion` after a prompt and records the call."""
        id = f"{self.episode_id}_{self.role}_{len(self.tree.calls)}"
        answer = CompletionParser(self.model.renderer, conversation, stop=stop, id_prefix=f"call_{id}")
        logprobs = tuple(-float(next(self.record.numbers)) for _ in completion)
        answer.push(Sampled(tuple(completion), logprobs, len(self.prompts), "stop"))
        message, _ = answer.message()
        sampled = tuple(answer.tokens)
        call = Call(
            id=id,
            episode_id=self.episode_id,
            role=self.role,
            parent=prompt.parent,
            kept=prompt.kept,
            suffix=prompt.suffix,
            completion=sampled,
            logprobs=tuple(answer.logprobs),
            versions=tuple(answer.versions),
            temperature=1.0,
            finish_reason=answer.finish_reason(message),
            response=message,
            prompt_key=prompt.key,
            created=0.0,
            ask=prompt.ask,
            fork="retry" if retry_of is not None else prompt.fork,
            retry_of=retry_of,
            context=context_hash(prompt.tokens, sampled).digest(),
        )
        pieces = tuple(self.model.renderer.pieces(sampled))
        self.tree.add(call, prompt.pieces, pieces)
        assert self.tree.tokens(id) == prompt.tokens + sampled
        assert self.tree.encoded_completion(id) == self.model.renderer.encode_tokens(sampled)
        self.prompts.append(prompt)
        self.record.calls.append((call, prompt.pieces, pieces))
        for position, logprob in enumerate(call.logprobs):
            context = prompt.tokens + sampled[: position + 1]
            self.record.tokens[logprob] = Token(context, call, position)
        return call

    def ask(self, conversation: Conversation, completion: Sequence[int], **how: object) -> Call:
        """A request and its answer."""
        return self.answer(conversation, self.prepare(conversation), completion, **how)  # type: ignore[arg-type]

    def _check(self, prompt: Prompt) -> None:
        assert prompt.suffix, "a suffix is never empty"
        encoded = self.model.renderer.encode_tokens(prompt.tokens)
        assert prompt.pieces == tuple(self.model.renderer.pieces(prompt.suffix))
        if prompt.parent is None:
            assert prompt.kept == 0
        else:
            assert prompt.tokens[: prompt.kept] == self.tree.tokens(prompt.parent)[: prompt.kept]
        assert prompt.tokens[prompt.kept :] == prompt.suffix
        kept_bytes = len(encoded) - sum(map(len, prompt.pieces))
        assert kept_bytes == max((self._keepable(call, encoded) for call in self.tree.calls), default=0)

    def _keepable(self, call: Call, encoded: bytes) -> int:
        """Bytes of `encoded` that the path to the end of `call` could keep, by a plain loop over its tokens."""
        pieces = self.model.renderer.pieces(self.tree.tokens(call.id))
        sampled = self._sampled_positions(call)
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

    def _sampled_positions(self, call: Call) -> set[int]:
        """Returns a mask of the sampled tokens of the path to `call`."""
        calls = {known.id: known for known in self.tree.calls}
        positions: set[int] = set()
        length = call.kept + len(call.suffix) + len(call.completion)
        at: Call | None = call
        while at is not None:
            first = at.kept + len(at.suffix)
            positions |= set(range(first, min(first + len(at.completion), length)))
            length = at.kept
            at = calls[at.parent] if at.parent else None
        return positions


@dataclass
class Agent:
    """Does to its conversations what agents do; `draw` decides."""

    draw: st.DrawFn
    session: Session
    tools: tuple[dict[str, object], ...] = ()
    opening: tuple[Message, ...] = ()
    past: list[tuple[Conversation, Call]] = field(default_factory=list)

    def step(self) -> None:
        """One request, or two at a time."""
        requests = [self._next_request() for _ in range(1 + self._one_in(6))]
        asked: list[tuple[Conversation, Prompt]] = []
        for conversation, continued in requests:
            try:
                asked.append((conversation, self.session.prepare(conversation)))
            except InvalidRequest:
                self.session.record.refused += 1
            else:
                self.session.record.sent_back |= continued
        for conversation, prompt in asked:
            self._hear(conversation, self._sampled(conversation, prompt))

    def _sampled(self, conversation: Conversation, prompt: Prompt, retry_of: str | None = None) -> Call:
        completion = self.draw(completions(self.session.model, tools=bool(conversation.tools)))
        stop = ("ll", "€") if self._one_in(6) else ()
        return self.session.answer(conversation, prompt, completion, stop=stop, retry_of=retry_of)

    def _hear(self, conversation: Conversation, call: Call) -> None:
        """Loses the answer. The request is sent again, or abandoned."""
        if not self._one_in(8):
            self.past.append((conversation, call))
            return
        if self.draw(st.booleans()):
            self.session.record.undelivered.add(call.id)
        if self.draw(st.booleans()):
            again = self._sampled(conversation, self.session.prepare(conversation), retry_of=call.id)
            late = self._one_in(3)  # the first answer came after all
            self.past.append((conversation, call if late else again))

    def _next_request(self) -> tuple[Conversation, set[Meaning]]:
        """A conversation, and which answer it continues from, by meaning."""
        if not self.past or self._one_in(6):
            return self._fresh(), set()
        asked, call = self.past[self.draw(st.integers(0, len(self.past) - 1))]
        if self._one_in(5):
            return asked, set()  # the same question again, as for votes
        answered = (*asked.messages, self._sent_back(call.response), *self._replies(call.response))
        if self._one_in(5):
            return Conversation(self._edited(answered), asked.tools), set()
        if self._one_in(10) and asked.tools:
            return Conversation(answered, OTHER_TOOLS), set()
        return Conversation(answered, asked.tools), {meaning(call)}

    def _fresh(self) -> Conversation:
        return Conversation((*self.opening, Message("user", self.draw(TEXTS))), self.tools)

    def _sent_back(self, response: Message) -> Message:
        change = self.draw(st.sampled_from(["none", "none", "none", "no reasoning", "respaced"]))
        if change == "no reasoning":
            return replace(response, reasoning="")
        if change == "respaced":
            calls = tuple(replace(c, arguments=respaced(c.arguments)) for c in response.tool_calls)
            return replace(response, tool_calls=calls)
        return response

    def _replies(self, response: Message) -> Iterator[Message]:
        results = [Message("tool", self.draw(TEXTS), tool_call_id=call.id) for call in response.tool_calls]
        if results and self._one_in(4):
            results.reverse()
        yield from results
        if not results or self._one_in(6):
            yield Message("user", self.draw(TEXTS))

    def _edited(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        i = self.draw(st.integers(0, len(messages) - 1))
        edit = self.draw(st.sampled_from(["content", "strip", "forget", "summary", "foreign"]))
        if edit == "forget":
            return messages[min(i, len(messages) - 1) :]
        if edit == "summary":
            return (*self.opening, Message("user", self.draw(TEXTS)), *messages[-2:])
        if edit == "foreign":
            return (*messages, Message("assistant", self.draw(TEXTS)), Message("user", "hello"))
        content = messages[i].content.strip() if edit == "strip" else self.draw(TEXTS)
        return (*messages[:i], replace(messages[i], content=content), *messages[i + 1 :])

    def _one_in(self, n: int) -> bool:
        return self.draw(st.integers(0, n - 1)) == n - 1


def respaced(arguments: str) -> str:
    """Returns JSON as another serialiser would write it. The strings of the tests have neither spaces nor colons."""
    return arguments.replace(" ", "").replace(":", " : ")


def takes_system(model: Model) -> bool:
    """True if the template has a place for a system message."""
    return model.name != "strict"


@st.composite
def swarms(draw: st.DrawFn, model: Model) -> tuple[Record, dict[str, list[Session]]]:
    """Returns the record of a batch and its sessions: the same agents on the same tasks took other paths."""
    history = draw(st.sampled_from(["template", "as_sampled"]))
    tools = TOOLS if model.card.tool_format and draw(st.booleans()) else ()
    roles = draw(st.sampled_from([("",), ("planner", "critic"), ("a", "b", "c")]))
    record = Record()
    episodes: dict[str, list[Session]] = {}
    agents: list[Agent] = []
    for e in range(draw(st.integers(1, 3))):
        episodes[f"e{e}"] = [Session(model, history, f"e{e}", role, record) for role in roles]
        for session in episodes[f"e{e}"]:
            opening = (Message("system", f"hello {session.role}"),) if takes_system(model) and len(roles) > 1 else ()
            agents.append(Agent(draw, session, tools, opening))
    for _ in range(draw(st.integers(1, 9))):
        agents[draw(st.integers(0, len(agents) - 1))].step()
    return record, episodes
