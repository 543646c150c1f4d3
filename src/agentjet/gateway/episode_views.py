"""Views of episodes with their calls and tokens, in both forms, from a journal alone. Needs no tokenizer.

Texts of tokens come from the encoded bytes in the journal (see `types.ESCAPE`). A character can span tokens: an emoji
is often two tokens of two bytes each. It is shown once, at its first token.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, TypeVar

from agentjet.gateway.views import facts
from agentjet.protocol import CallRuns, CallView, EpisodeForm, EpisodeRuns, EpisodeTree, Kept
from agentjet.swarm import Episode, Journal
from agentjet.timeline.support import num_members, unpack_sets
from agentjet.timeline.tree import orphans
from agentjet.types import ESCAPE, ESCAPED_BYTE, SOLE_POLICY, Call, Message

Value = TypeVar("Value")
_UTF8 = codecs.getincrementaldecoder("utf-8")


def tree(
    journal: Journal, episode_id: str, form: EpisodeForm, leases: Mapping[str, float]
) -> EpisodeTree | EpisodeRuns:
    """Returns an episode with its calls, by role, in recorded order. `leases` are the ends of leases.

    Raises `NotFound`. Slow for long episodes: run it in a thread.
    """
    episode = journal.known_episode(episode_id)
    kept, shown = _shown_calls(journal, episode)
    common = {**facts(episode), "expires_at": leases.get(episode_id), "kept": kept}
    if form == "runs":
        return EpisodeRuns(**common, calls=list(map(_call_runs, shown)))
    return EpisodeTree(**common, calls=list(map(_call_view, shown)))


@dataclass(frozen=True, slots=True)
class _ShownCall:
    """A call, why it is not trained, and the texts of its tokens."""

    call: Call
    orphan: str
    texts: Sequence[str]


def _shown_calls(journal: Journal, episode: Episode) -> tuple[Kept, list[_ShownCall]]:
    calls, names = journal.calls(episode.id), journal.control_tokens()
    orphaned = orphans([call for call, *_ in calls], journal.undelivered(episode.id))
    shown = [
        _ShownCall(
            call, orphaned.get(call.id, ""), token_texts([*suffix, *completion], control_names(names, call.role))
        )
        for call, suffix, completion in calls
    ]
    roles = list(dict.fromkeys(one.call.role for one in shown))
    is_gone = episode.is_settled and episode.num_calls and not calls
    return "gone" if is_gone else "journal", sorted(shown, key=lambda one: roles.index(one.call.role))


def _call_view(shown: _ShownCall) -> CallView:
    call = shown.call
    context = [None] * len(call.suffix)
    return CallView(
        **_facts_of_call(shown),
        tokens=[*call.suffix, *call.completion],
        texts=list(shown.texts),
        mask=[0] * len(call.suffix) + [0 if shown.orphan else 1] * len(call.completion),
        logprobs=[*context, *_logprobs(call)],
        versions=[*context, *call.versions],
    )


def _call_runs(shown: _ShownCall) -> CallRuns:
    call, sampled = shown.call, len(shown.call.completion)
    return CallRuns(
        **_facts_of_call(shown),
        text="".join(shown.texts),
        lengths=[utf16_length(text) for text in shown.texts],
        num_context=len(call.suffix),
        logprobs=[None if value is None else round(value, 3) for value in _logprobs(call)],
        mask=[(0 if shown.orphan else 1, sampled)] if sampled else [],
        versions=runs(call.versions),
        allowed=runs(map(num_members, unpack_sets(call.support, sampled))),
    )


def _logprobs(call: Call) -> Sequence[float | None]:
    return call.logprobs or [None] * len(call.completion)


def _facts_of_call(shown: _ShownCall) -> dict[str, Any]:
    """Returns the fields of `CallFacts`."""
    call = shown.call
    return {
        "call_id": call.id,
        "role": call.role,
        "parent": call.parent,
        "kept": call.kept,
        "fork": call.fork,
        "retry_of": call.retry_of,
        "orphan": shown.orphan,
        "after": call.ask.after,
        "messages": [_message(message) for message in call.ask.messages],
        "tools": [json.loads(json.dumps(tool, default=dict)) for tool in call.ask.tools],
        "response": _message(call.response),
        "temperature": call.temperature,
        "finish_reason": call.finish_reason,
        "created": call.created,
        "seconds": call.seconds,
    }


def _message(message: Message) -> dict[str, object]:
    """Returns the non-empty fields of a message."""
    return {name: value for name, value in asdict(message).items() if value or name in ("role", "content")}


# ---- texts of tokens -------------------------------------------------------------------------------------------------


def token_texts(pieces: Sequence[bytes], control: Mapping[int, str]) -> list[str]:
    """Returns the text of each token. The tokens that only continue a character of an earlier one have none.

    `pieces` is the encoded text of each token. `control` has the names of control tokens; others are shown as `<id>`.
    Bytes that are not UTF-8 become U+FFFD.
    """
    decoder = _UTF8("replace")
    texts: list[str] = []
    start = 0  # The token that began the incomplete character.
    for token, piece in enumerate(pieces):
        was_incomplete = bool(decoder.getstate()[0])
        text = decoder.decode(_displayed(piece, control))
        began = token if decoder.getstate()[0] and (text or not was_incomplete) else start
        if was_incomplete and text:
            texts[start] += text[0]
            text = text[1:]
        start = began
        texts.append(text)
    if texts:
        texts[start] += decoder.decode(b"", final=True)
    return texts


def control_names(names: Mapping[str, Mapping[int, str]], role: str) -> Mapping[int, str]:
    """Returns the control tokens of the policy of a role. `names` are those of the run, by policy."""
    return names.get(role.partition("/")[0]) or names.get(SOLE_POLICY, {})


def utf16_length(text: str) -> int:
    """Returns the number of UTF-16 code units, by which JavaScript counts."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def runs(values: Iterable[Value]) -> list[tuple[Value, int]]:
    """Returns equal neighbours as one value with their number."""
    return [(value, sum(1 for _ in same)) for value, same in groupby(values)]


def _displayed(piece: bytes, control: Mapping[int, str]) -> bytes:
    if not piece.startswith(ESCAPE) or len(piece) != len(ESCAPED_BYTE) or piece == ESCAPED_BYTE:
        return piece.replace(ESCAPED_BYTE, ESCAPE)
    token_id = int.from_bytes(piece[1:], "big")
    return control.get(token_id, f"<{token_id}>").encode()
