"""From a conversation to the tokens the policy is fed: what it saw and said before stays as it was, only the rest
is tokenised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentjet.rendering import Renderer
from agentjet.timeline import ConversationTree, forks
from agentjet.types import Ask, Conversation, Fork


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
    ask: Ask
    fork: Fork


def prepare(
    renderer: Renderer,
    tree: ConversationTree,
    conversation: Conversation,
    history: Literal["template", "as_sampled"],
    *,
    fingerprint: str = "",
) -> Prompt:
    """Render `conversation` and find its longest known beginning in `tree`.

    Assistant turns the policy said here are written with their own bytes, so that other JSON spacing never forks
    the tree. Under `history = "template"` those are left to the template whose reasoning it strips (or the agent did
    not send back), and those whose generation prompt it does not repeat; the tree forks there.

    Raises `InvalidRequest` when the template refuses the conversation.
    """
    asked = tree.identify(conversation)
    known = tree.recognise(asked)
    as_sampled = history == "as_sampled"
    written = frozenset[int]() if as_sampled else renderer.keeps_reasoning(conversation)
    bodies = {
        i: renderer.generation_tail + tree.encoded_completion(call.id)
        for i, call in known.items()
        if as_sampled or i in written or not (call.response.reasoning or renderer.generation_tail)
    }
    match = tree.match(renderer.render(conversation, sampled=bodies))
    suffix = renderer.tokenize(match.suffix)
    return Prompt(
        tokens=tree.prompt_tokens(match, suffix),
        parent=match.parent,
        kept=match.kept,
        suffix=suffix,
        pieces=tuple(renderer.pieces(suffix)),
        key=asked.key,
        ask=forks.ask(conversation, known, fingerprint),
        fork=forks.cause(tree, asked, known, match),
    )
