"""Views of episodes with their calls and tokens, in both forms, from a journal alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentjet.errors import NotFound
from agentjet.gateway.token_texts import control_names, runs, token_texts, utf16_length
from agentjet.gateway.views import facts
from agentjet.protocol import CallRuns, CallView, EpisodeRuns, EpisodeTree, Kept
from agentjet.swarm import Episode, Journal
from agentjet.timeline.support import num_members, unpack_sets
from agentjet.timeline.tree import orphans
from agentjet.types import Call, Message


def known_episode(journal: Journal, episode_id: str) -> Episode:
    """Returns an episode of the journal. Raises `NotFound`."""
    episode = journal.episode(episode_id)
    if episode is None:
        raise NotFound(f"There is no episode {episode_id!r} in this run.", code="episode_not_found")
    return episode


def tree(journal: Journal, episode_id: str, leases: Mapping[str, float]) -> EpisodeTree:
    """Returns an episode with its calls, by role, in recorded order. `leases` are the ends of leases.

    Raises `NotFound`. Slow for long episodes: run it in a thread.
    """
    episode = known_episode(journal, episode_id)
    kept, shown = _shown_calls(journal, episode)
    calls = list(map(_call_view, shown))
    return EpisodeTree(**facts(episode), expires_at=leases.get(episode_id), kept=kept, calls=calls)


def tree_of_runs(journal: Journal, episode_id: str, leases: Mapping[str, float]) -> EpisodeRuns:
    """As `tree`, in short form."""
    episode = known_episode(journal, episode_id)
    kept, shown = _shown_calls(journal, episode)
    calls = list(map(_call_runs, shown))
    return EpisodeRuns(**facts(episode), expires_at=leases.get(episode_id), kept=kept, calls=calls)


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
    }


def _message(message: Message) -> dict[str, object]:
    """Returns the non-empty fields of a message."""
    return {name: value for name, value in asdict(message).items() if value or name in ("role", "content")}
