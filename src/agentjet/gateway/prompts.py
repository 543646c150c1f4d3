"""From a conversation to the tokens the policy is fed: what it saw and said before stays as it was, only the rest
is tokenised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from agentjet.errors import ContextOverflow
from agentjet.rendering import Renderer
from agentjet.timeline import ConversationTree, Match, forks
from agentjet.timeline.identity import raw_key
from agentjet.types import Call, Conversation, Fork, Message, NewContext

UNLIKELY = 8
"""Bytes a token above which a text is counted before it is tokenised."""
FORM_FACTOR = 2
"""Largest ratio of a text's length to its shortest Unicode form."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`tokens` are what is sampled from: the first `kept` of the parent call's, then `suffix`, whose encoded text
    `pieces` is, token by token.
    """

    tokens: tuple[int, ...]
    parent: str | None
    kept: int
    suffix: tuple[int, ...]
    pieces: tuple[bytes, ...]
    key: str
    """Identity by meaning of the conversation."""
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
    """Render `conversation` and find its longest known beginning in `tree`.

    Assistant turns that the policy sampled here are written with their own bytes, so that other JSON spacing never
    forks the tree. Under `history = "template"` the prompt is the one that a deployment would feed: see `_body`. The
    tree forks where that differs from the sampled tokens.

    Raises `InvalidRequest` when the template refuses the conversation, or it is so long that it cannot fit, whatever
    its tokens are.
    """
    _refuse_far_too_long(renderer, conversation)
    if conversation.prompt is not None:
        return _prepare_raw(renderer, tree, conversation, conversation.prompt, fingerprint)
    asked = tree.identify(conversation)
    known = tree.recognise(asked)
    found: dict[int, bytes | None]
    if history == "as_sampled":
        found = {i: tree.encoded_completion(call.id) for i, call in known.items()}
    else:
        written = renderer.keeps_reasoning(conversation)
        found = {
            i: _body(renderer, tree, call, conversation, keeps_reasoning=i in written) for i, call in known.items()
        }
    bodies = {i: renderer.generation_tail + body for i, body in found.items() if body is not None}
    match = tree.match(renderer.render(conversation, sampled=bodies))
    suffix = _tokenized(renderer, match, "messages")
    return Prompt(
        tokens=tree.prompt_tokens(match, suffix),
        parent=match.parent,
        kept=match.kept,
        suffix=suffix,
        pieces=tuple(renderer.pieces(suffix)),
        key=asked.key,
        ask=forks.new_context(conversation, known, fingerprint),
        fork=forks.fork_cause(tree, asked, known, match),
    )


def _body(
    renderer: Renderer, tree: ConversationTree, call: Call, conversation: Conversation, *, keeps_reasoning: bool
) -> bytes | None:
    """The sampled bytes of a turn as a deployment would feed them back; None if the template writes the turn.

    The template writes turns whose reasoning it strips, or whose generation prompt it does not repeat. Text from a stop
    string on is not part of a turn.
    """
    said = tree.encoded_completion(call.id)
    if not keeps_reasoning:
        thinks = renderer.reasons and renderer.closes_reasoning(said)
        if call.response.reasoning or thinks or renderer.generation_tail:
            return None
    if call.finish_reason == "length" or renderer.strip_end_token(said) != said:
        return said
    whole = renderer.parse(call.completion, conversation)
    if (whole.content, whole.reasoning, len(whole.tool_calls)) == (
        call.response.content,
        call.response.reasoning,
        len(call.response.tool_calls),
    ):
        return said
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
    """A raw prompt is known as far as its text is: what begins with an earlier prompt and its answer continues those
    tokens, however they may be tokenised in `prompt`. Token ids beyond that are fed as given.
    """
    encoded = renderer.encode_raw_prompt(prompt)
    if isinstance(prompt, str):
        encoded = _as_said(renderer, tree, encoded)
    match = tree.match(encoded, to_the_end=True)
    if isinstance(prompt, str):
        suffix = _tokenized(renderer, match, "prompt")
    else:
        suffix = _given_beyond(renderer, prompt, len(encoded) - len(match.suffix), encoded)
    heard, end = _heard(renderer, tree, encoded, match.parent)
    new = Message("prompt", renderer.show(encoded[end:]))
    return Prompt(
        tokens=tree.prompt_tokens(match, suffix),
        parent=match.parent,
        kept=match.kept,
        suffix=suffix,
        pieces=tuple(renderer.pieces(suffix)),
        key=raw_key(prompt),
        ask=NewContext((new,), heard, fingerprint=fingerprint),
        fork=forks.fork_cause(tree, tree.identify(conversation), {}, match),
    )


def _tokenized(renderer: Renderer, match: Match, asked: str) -> tuple[int, ...]:
    """The tokens of what is new. Text that is far too long is refused first: nothing else goes on meanwhile."""
    least = match.kept + renderer.tokens_lower_bound(len(match.suffix))
    if least <= renderer.context_length and len(match.suffix) > UNLIKELY * renderer.context_length:
        least = match.kept + renderer.counted_lower_bound(match.suffix, renderer.context_length)
    if least > renderer.context_length:
        raise ContextOverflow(asked, least, renderer.context_length, or_more=True)
    return renderer.tokenize(match.suffix)


def num_characters(conversation: Conversation) -> int:
    """Of the texts in it, tools not counted: how much work its prompt is."""
    return sum(len(message.content) for message in conversation.messages) + len(conversation.prompt or ())


def _refuse_far_too_long(renderer: Renderer, conversation: Conversation) -> None:
    """Raises `InvalidRequest` for texts that cannot fit, before they are rendered. A template may leave out white space
    and earlier answers, and Unicode forms differ in length by less than the factor here.
    """
    texts = [message.content for message in conversation.messages if message.role != "assistant"]
    if isinstance(conversation.prompt, str):
        texts.append(conversation.prompt)
    if sum(map(len, texts)) <= FORM_FACTOR * renderer.context_length:  # Nearly always, and without a copy.
        return
    least = renderer.tokens_lower_bound(sum(len(text.strip()) for text in texts) // FORM_FACTOR)
    if least > renderer.context_length:
        asked = "messages" if conversation.prompt is None else "prompt"
        raise ContextOverflow(asked, least, renderer.context_length, or_more=True)


def _as_said(renderer: Renderer, tree: ConversationTree, encoded: bytes) -> bytes:
    """A prompt in which answers are written as they were sampled, where their text lost something: half a character,
    a control token that is not shown, another Unicode form.
    """
    for call in tree.calls:
        told, shown = _told(renderer, tree, call)
        if shown and told != shown:
            asked = tree.encoded_prompt(call.id)
            if encoded.startswith(asked + shown):
                encoded = asked + told + encoded[len(asked) + len(shown) :]
    return encoded


def _told(renderer: Renderer, tree: ConversationTree, call: Call) -> tuple[bytes, bytes]:
    """What an agent was told, as it was sampled (but for its end token) and as its text says it. A stop string, and
    what follows, is not told.
    """
    said, shown = (
        renderer.strip_end_token(tree.encoded_completion(call.id)),
        renderer.encode_prompt_text(call.response.content),
    )
    is_whole = said == shown or renderer.text(call.completion) == call.response.content
    return (said if is_whole else shown), shown


def _given_beyond(renderer: Renderer, ids: Sequence[int], known: int, encoded: bytes) -> tuple[int, ...]:
    """The tokens of `ids` behind the first `known` bytes of their text; one that these cut is tokenised anew."""
    starts = accumulate(map(len, renderer.pieces(ids)), initial=0)
    first, start = next((i, start) for i, start in enumerate(starts) if start >= known)
    return renderer.tokenize(encoded[known:start]) + tuple(ids[first:])


def _heard(renderer: Renderer, tree: ConversationTree, encoded: bytes, parent: str | None) -> tuple[str | None, int]:
    """The newest call whose prompt and answer `encoded` begins with, and the length of these in bytes. An empty answer
    proves nothing: the same prompt again may be a vote.
    """
    call: Call | None = tree.call(parent) if parent is not None else None
    while call is not None:
        told, shown = _told(renderer, tree, call)
        told = tree.encoded_prompt(call.id) + told
        if shown and encoded.startswith(told):
            return call.id, len(told)
        call = tree.call(call.ask.after) if call.ask.after is not None else None
    return None, 0
