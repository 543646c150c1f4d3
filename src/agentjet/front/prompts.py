"""Conversations to tokens and back: `Prompt`, `CompletionParser`, demonstrations.

Known tokens of a prompt are kept; only new text is tokenised.

A parser turns the sampled tokens of one choice into text, reasoning and tool calls while they arrive. Invariant: the
final message is the sum of all that was returned. So an answer does not depend on streaming, and a streamed turn is
recognised when the agent sends it back.

`answer_all` turns demonstrations into calls: the tokens that the policy would see and sample, from conversations with
given answers. The answer is the text that the chat template writes after the prompt, with the end token. An answer
that would be read back differently is refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from agentjet.errors import ContextOverflow, InvalidRequest
from agentjet.rendering import Renderer
from agentjet.rendering.formats import ParsedCall
from agentjet.rendering.parser import Thought, partial_length
from agentjet.swarm.batches import Answered
from agentjet.swarm.journal import RecordedCall
from agentjet.timeline import ConversationTree, Match
from agentjet.timeline.forest import EVERYTHING
from agentjet.timeline.tree import context_hash, new_context, raw_key
from agentjet.types import Call, Conversation, FinishReason, Fork, Message, NewContext, Sampled, ToolCall

MAX_BYTES_PER_TOKEN = 8
"""Text with more bytes per context token than this is counted before it is tokenised."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`tokens` is the model input: the first `kept` tokens of the `parent` call, then `suffix`."""

    tokens: tuple[int, ...]
    parent: str | None
    kept: int
    suffix: tuple[int, ...]
    pieces: tuple[bytes, ...]
    """Encoded text of each token of `suffix`."""
    key: str
    """Identity of the conversation by meaning."""
    ask: NewContext
    fork: Fork


def prepare_prompt(
    renderer: Renderer,
    tree: ConversationTree,
    conversation: Conversation,
    history: Literal["template", "as_sampled"],
    *,
    fingerprint: str = "",
) -> Prompt:
    """Renders `conversation` and finds its longest known prefix in `tree`.

    Assistant turns that were sampled in this tree keep their sampled bytes, so that JSON spacing never forks the tree.
    With `history = "template"` the prompt is the one that a deployment would feed: see `_sampled_body`. The tree forks
    where that differs from the sampled tokens.

    Raises `InvalidRequest` if the template refuses the conversation, or if no tokenisation of it can fit the context.
    """
    if isinstance(conversation.prompt, tuple) and conversation.is_exact:
        return _prepare_ids(renderer, tree, conversation, conversation.prompt, fingerprint)
    if conversation.prompt is not None:
        return _prepare_raw(renderer, tree, conversation, conversation.prompt, fingerprint)
    asked = tree.identify(conversation)
    known = tree.recognise(asked)
    found: dict[int, bytes | None]
    if history == "as_sampled":
        found = {i: tree.encoded_completion(call.id) for i, call in known.items()}
    else:
        thoughtless = {i for i, call in known.items() if _has_empty_block(renderer, tree, call)}
        with_reasoning = renderer.keeps_reasoning(conversation, thoughtless)
        found = {
            i: _sampled_body(renderer, tree, call, conversation, i, keeps_reasoning=i in with_reasoning)
            for i, call in known.items()
        }
    bodies = {i: renderer.generation_tail + body for i, body in found.items() if body is not None}
    match = tree.match(renderer.render(conversation, sampled=bodies))
    suffix = _tokenize_rest(renderer, match, "messages")
    tree.keep(asked)  # not of a prompt that is refused: it may have megabytes, and the episode lives on
    ask, fork = new_context(conversation, known, fingerprint), tree.fork_cause(asked, known, match)
    return _prompt(renderer, tree, match, suffix, key=asked.key, ask=ask, fork=fork)


def _prompt(
    renderer: Renderer,
    tree: ConversationTree,
    match: Match,
    suffix: tuple[int, ...],
    *,
    key: str,
    ask: NewContext,
    fork: Fork,
) -> Prompt:
    tokens, pieces = tree.prompt_tokens(match, suffix), tuple(renderer.pieces(suffix))
    return Prompt(tokens, match.parent, match.kept, suffix, pieces, key, ask, fork)


def _has_empty_block(renderer: Renderer, tree: ConversationTree, call: Call) -> bool:
    """True if a turn has a block of reasoning without text."""
    if call.response.reasoning:
        return False
    return bool(renderer.generation_tail) or renderer.closes_reasoning(tree.encoded_completion(call.id))


def _sampled_body(
    renderer: Renderer,
    tree: ConversationTree,
    call: Call,
    conversation: Conversation,
    at: int,
    *,
    keeps_reasoning: bool,
) -> bytes | None:
    """Returns the sampled bytes of a turn as a deployment would feed them, or None if the template does.

    The template writes turns whose reasoning it strips, or whose generation prompt it does not repeat. A stop string
    and the text after it are not part of a turn.
    """
    sampled = tree.encoded_completion(call.id)
    if not keeps_reasoning and (
        call.response.reasoning
        or (
            _has_empty_block(renderer, tree, call)
            and not renderer.writes_start(conversation, at, renderer.generation_tail + sampled)
        )
    ):
        return None
    if call.finish_reason == "length" or renderer.strip_end_token(sampled) != sampled:
        return sampled
    whole = renderer.parse(call.completion, conversation)
    if (whole.content, whole.reasoning, len(whole.tool_calls)) == (
        call.response.content,
        call.response.reasoning,
        len(call.response.tool_calls),
    ):
        return sampled
    if call.response.reasoning or call.response.tool_calls:
        return None
    return renderer.encoded_prefix(call.completion, call.response.content)


def _prepare_raw(
    renderer: Renderer,
    tree: ConversationTree,
    conversation: Conversation,
    prompt: str | tuple[int, ...],
    fingerprint: str,
) -> Prompt:
    """Prepares a raw prompt. A prefix with the text of an earlier prompt and its answer keeps the tokens of that call.

    Token ids after that prefix are used unchanged.
    """
    encoded = renderer.encode_raw_prompt(prompt)
    if isinstance(prompt, str):
        encoded = _with_sampled_answers(renderer, tree, encoded)
    match = tree.match(encoded, to_the_end=True)
    if isinstance(prompt, str):
        suffix = _tokenize_rest(renderer, match, "prompt")
    else:
        suffix = _ids_after(renderer, prompt, len(encoded) - len(match.suffix), encoded)
    after, end = _answered_prefix(renderer, tree, encoded, match.parent)
    ask = NewContext((Message("prompt", renderer.show(encoded[end:])),), after, fingerprint=fingerprint)
    fork = tree.fork_cause(tree.identify(conversation), {}, match)
    return _prompt(renderer, tree, match, suffix, key=raw_key(prompt), ask=ask, fork=fork)


def _prepare_ids(
    renderer: Renderer, tree: ConversationTree, conversation: Conversation, ids: tuple[int, ...], fingerprint: str
) -> Prompt:
    """Prepares a prompt that is used token by token. It continues the longest known path of the same tokens."""
    renderer.check_ids(ids, "token_ids")
    match, after = tree.match_tokens(ids)
    new = ids[tree.num_tokens(after) :] if after is not None else ids
    shown = Message("prompt", renderer.show(renderer.encode_tokens(new)))
    ask = NewContext((shown,), after, fingerprint=fingerprint)
    fork = tree.fork_cause(tree.identify(conversation), {}, match)
    return _prompt(renderer, tree, match, ids[match.kept :], key=raw_key(ids), ask=ask, fork=fork)


def _tokenize_rest(renderer: Renderer, match: Match, asked: str) -> tuple[int, ...]:
    """Tokenises the new text. Raises `ContextOverflow` before that if the text is far too long."""
    limit = renderer.context_length
    if len(match.suffix) > MAX_BYTES_PER_TOKEN * limit:
        least = match.kept + renderer.counted_lower_bound(match.suffix, limit)
        if least > limit:
            raise ContextOverflow(asked, least, limit, or_more=True)
    return renderer.tokenize(match.suffix)


def num_characters(conversation: Conversation) -> int:
    """Returns the characters of all texts but the tools: a measure of the work of a prompt."""
    return sum(len(message.content) for message in conversation.messages) + len(conversation.prompt or ())


def _with_sampled_answers(renderer: Renderer, tree: ConversationTree, encoded: bytes) -> bytes:
    """Returns the prompt with its known answers as they were sampled.

    Their text can differ from the sampled bytes: half a character, a hidden control token, another Unicode form.
    """
    for call in tree.calls:
        answer, shown = _answer_bytes(renderer, tree, call)
        if shown and answer != shown:
            asked = tree.encoded_prompt(call.id)
            if encoded.startswith(asked + shown):
                encoded = asked + answer + encoded[len(asked) + len(shown) :]
    return encoded


def _answer_bytes(renderer: Renderer, tree: ConversationTree, call: Call) -> tuple[bytes, bytes]:
    """Returns a call's answer as sampled, without its end token, and as its text encodes.

    Both exclude a stop string and what follows it.
    """
    sampled = renderer.strip_end_token(tree.encoded_completion(call.id))
    shown = renderer.encode_prompt_text(call.response.content)
    is_whole = sampled == shown or renderer.text(call.completion) == call.response.content
    return (sampled if is_whole else shown), shown


def _ids_after(renderer: Renderer, ids: Sequence[int], known: int, encoded: bytes) -> tuple[int, ...]:
    """Returns the tokens of `ids` after the first `known` bytes of their text.

    If that offset is inside a token, the rest of the token is tokenised again.
    """
    starts = accumulate(map(len, renderer.pieces(ids)), initial=0)
    first, start = next((i, start) for i, start in enumerate(starts) if start >= known)
    return renderer.tokenize(encoded[known:start]) + tuple(ids[first:])


def _answered_prefix(
    renderer: Renderer, tree: ConversationTree, encoded: bytes, parent: str | None
) -> tuple[str | None, int]:
    """Returns the newest call whose prompt and answer are a prefix of `encoded`, and the bytes of that prefix.

    Calls with an empty answer do not count: the same prompt sent again may be a vote.
    """
    call: Call | None = tree.call(parent) if parent is not None else None
    while call is not None:
        answer, shown = _answer_bytes(renderer, tree, call)
        prefix = tree.encoded_prompt(call.id) + answer
        if shown and encoded.startswith(prefix):
            return call.id, len(prefix)
        call = tree.call(call.ask.after) if call.ask.after is not None else None
    return None, 0


# ---- completions -----------------------------------------------------------------------------------------------------


class TokenLogprob(NamedTuple):
    """A sampled token for display. `utf8` is exact; `text` may hold a replacement character."""

    id: int
    text: str
    utf8: bytes
    logprob: float


class AnswerDelta(NamedTuple):
    """New parts of an answer, in their order."""

    parts: tuple[str | Thought | ToolCall, ...] = ()

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCall))


class CompletionParser:
    """Parses one choice. Call `push` until the completion ends or `stopped` is True, then `message`."""

    def __init__(
        self,
        renderer: Renderer,
        conversation: Conversation,
        *,
        stop: Sequence[str],
        stop_ids: Sequence[int] = (),
        id_prefix: str,
    ) -> None:
        """`stop` are strings, before which the text ends. `stop_ids` are tokens, with which the completion ends."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.support: list[bytes] = []
        """The support set of each token (see `timeline.forest`)."""
        self.routes: list[bytes] = []
        """Routes of prompt and completion as they came (see `timeline.routes`)."""
        self.stopped_by = ""
        """The stop string that ended the completion. Later tokens are ignored."""
        self._renderer = renderer
        self._stop = tuple(stop)
        self._stop_ids = frozenset(stop_ids)
        self._id_prefix = id_prefix
        self._stream = renderer.stream()
        self._reader = renderer.reader(conversation)
        self._text = ""
        """Text that the reader has not taken."""
        self._parts: list[str | Thought | ToolCall] = []
        self._num_calls = 0
        self._shown_tokens = 0
        self._worker_reason: FinishReason | None = None

    @property
    def stopped(self) -> bool:
        return bool(self.stopped_by) or (bool(self.tokens) and self.tokens[-1] in self._stop_ids)

    def push(self, sampled: Sampled) -> None:
        """Adds sampled tokens, up to the one that completes a stop string or is a stop token."""
        self._worker_reason = sampled.finish_reason
        if sampled.routes:
            self.routes.append(sampled.routes)
        count = len(sampled.tokens)
        assert len(sampled.logprobs) == count and len(sampled.support) in (0, count), "each token has its facts"
        step = 1 if self._stop or self._stop_ids else max(1, count)
        for start in range(0, count, step):
            part = slice(start, start + step)
            tokens = sampled.tokens[part]
            self.tokens += tokens
            self.logprobs += sampled.logprobs[part]
            self.support += sampled.support[part] or (EVERYTHING,) * len(tokens)
            self.versions += (sampled.policy_version,) * len(tokens)
            if self._grow(self._stream.push(tokens)) or self.stopped:
                return

    def delta(self) -> AnswerDelta:
        """Returns what is new since the last call, and what no later token can change. The work is linear."""
        end = len(self._text) - max((partial_length(self._text, literal) for literal in self._stop), default=0)
        return self._read(end, is_whole=False)

    def message(self) -> tuple[Message, AnswerDelta]:
        """Returns the final assistant message, and its part that `delta` did not return."""
        if not self.stopped_by:
            self._grow(self._stream.flush())
        rest = self._read(len(self._text), is_whole=True)
        whole = AnswerDelta(tuple(self._parts))
        return Message("assistant", whole.text, whole.reasoning, whole.calls), rest

    def _read(self, end: int, *, is_whole: bool) -> AnswerDelta:
        start = len(self._parts)
        for part in self._reader.read(self._text[:end], is_whole=is_whole):
            if isinstance(part, ParsedCall):
                self._parts.append(ToolCall(f"{self._id_prefix}_{self._num_calls}", part.name, part.arguments))
                self._num_calls += 1
            else:
                self._parts.append(part)
        self._text = self._text[end:]
        return AnswerDelta(tuple(self._parts[start:]))

    def finish_reason(self, message: Message) -> FinishReason:
        reason = "stop" if self.stopped else self._worker_reason or "length"
        return "tool_calls" if message.tool_calls and reason == "stop" else reason

    def new_tokens(self) -> tuple[TokenLogprob, ...]:
        """Returns the tokens since the last call of this method, for display."""
        start, self._shown_tokens = self._shown_tokens, len(self.tokens)
        shown = []
        for token, logprob in zip(self.tokens[start:], self.logprobs[start:], strict=True):
            raw = self._renderer.token_bytes(token)
            shown.append(TokenLogprob(token, raw.decode(errors="replace"), raw, logprob))
        return tuple(shown)

    def _grow(self, text: str) -> bool:
        """Appends text and cuts it before the first stop string. Returns True if there is one."""
        if not text:
            return False
        if not self._stop:
            self._text += text
            return self.stopped
        start = max(0, len(self._text) - max(map(len, self._stop)) + 1)
        self._text += text
        found = [(at, stop) for stop in self._stop if (at := self._text.find(stop, start)) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda place: place[0])
            self._text = self._text[:at]
        return self.stopped


# ---- demonstrations --------------------------------------------------------------------------------------------------

CONTEXT_ONLY = "weight"
"""The call's reason not to train for an answer with weight 0."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation with given answers. `learned` are the indices of the assistant messages that are learned."""

    task_id: str
    conversation: Conversation
    learned: frozenset[int]
    reward: float | None = None
    group: str = ""


def answer_all(
    renderer: Renderer,
    demonstrations: Sequence[Demonstration],
    role: str,
    history: Literal["template", "as_sampled"],
    now: float,
) -> list[Answered]:
    """Returns the calls of each demonstration. Raises `InvalidRequest` that names the first wrong one."""
    return [_answer(renderer, one, role, history, now) for one in demonstrations]


def _answer(
    renderer: Renderer, given: Demonstration, role: str, history: Literal["template", "as_sampled"], now: float
) -> Answered:
    if not given.learned:
        raise InvalidRequest(
            f"{given.task_id}: no answer to learn: a demonstration needs an assistant message without weight 0.",
            code="no_answer",
            param="messages",
        )
    tree, calls = ConversationTree(), list[RecordedCall]()
    for i, message in enumerate(given.conversation.messages):
        if message.role != "assistant":
            continue
        where = f"{given.task_id}: messages.{i}"
        try:
            call, suffix, completion = _call(renderer, tree, given.conversation, i, role, history, now)
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error}", code=error.code, param=error.param) from None
        call = call if i in given.learned else replace(call, untrained=CONTEXT_ONLY)
        tree.add(call, suffix, completion)
        calls.append((call, suffix, completion))
    return Answered(given.task_id, tuple(calls), given.reward, given.group)


def _call(
    renderer: Renderer,
    tree: ConversationTree,
    conversation: Conversation,
    at: int,
    role: str,
    history: Literal["template", "as_sampled"],
    now: float,
) -> RecordedCall:
    asked, answer = replace(conversation, messages=conversation.messages[:at]), conversation.messages[at]
    if not asked.messages:
        raise InvalidRequest("an answer without a question: begin with a user or system message", param="messages")
    if answer.tool_calls and not conversation.tools:
        raise InvalidRequest("the answer calls tools, and the demonstration offers none: add tools", param="tools")
    offered = [tool["function"]["name"] for tool in conversation.tools]
    for called in answer.tool_calls:
        if called.name not in offered:
            raise InvalidRequest(
                f"the answer calls {called.name!r}, and the demonstration offers {', '.join(offered)}", param="tools"
            )
    prompt = prepare_prompt(renderer, tree, asked, history)
    completion = renderer.tokenize_answer(asked, answer)
    if len(prompt.tokens) + len(completion) > renderer.context_length:
        raise ContextOverflow("messages", len(prompt.tokens) + len(completion), renderer.context_length)
    _check_reading(renderer.parse(completion, asked), answer)
    call = Call(
        id=uuid.uuid4().hex,
        episode_id="",
        role=role,
        parent=prompt.parent,
        kept=prompt.kept,
        suffix=prompt.suffix,
        completion=completion,
        logprobs=(),
        versions=(),
        temperature=1.0,
        finish_reason="tool_calls" if answer.tool_calls else "stop",
        response=answer,
        prompt_key=prompt.key,
        created=now,
        ask=prompt.ask,
        fork=prompt.fork,
        context=context_hash(prompt.tokens, completion).digest(),
    )
    return call, prompt.pieces, tuple(renderer.pieces(completion))


def _check_reading(read: Message, given: Message) -> None:
    """Raises `InvalidRequest` if the tokens of an answer mean another message to agents."""
    for part, ours, theirs in (
        ("content", read.content.strip(), given.content.strip()),
        ("reasoning_content", read.reasoning.strip(), given.reasoning.strip()),
        ("tool_calls", _meaning(read), _meaning(given)),
    ):
        if ours != theirs:
            raise InvalidRequest(
                f"the chat template of this model writes the answer so that its {part} would be read as {ours!r:.200}, "
                f"not as {theirs!r:.200}",
                code="template_error",
                param=f"messages.{part}",
            )


def _meaning(message: Message) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for call in message.tool_calls:
        try:
            arguments = call.value()
        except ValueError as error:
            raise InvalidRequest(
                f"the arguments of the tool call {call.name!r} are not JSON ({error})", param="messages.tool_calls"
            ) from None
        if not isinstance(arguments, Mapping):
            raise InvalidRequest(
                f"the arguments of the tool call {call.name!r} are not an object", param="messages.tool_calls"
            )
        found.append((call.name, arguments))
    return found
