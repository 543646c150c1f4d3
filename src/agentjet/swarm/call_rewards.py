"""Rewards of single calls: from call ids and turn numbers of a finish request to the calls of the journal."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

from agentjet.errors import InvalidRequest, Unprocessable, did_you_mean
from agentjet.protocol import FinishRequest
from agentjet.swarm.batch_forest import turns_of
from agentjet.swarm.journal import Journal


def call_rewards(journal: Journal, episode_id: str, request: FinishRequest) -> dict[str, float]:
    """Returns the reward of each call that the request names, by call id, in the order of the calls.

    A turn is the number of a call among the calls of its role that train. `by_call` wins over `by_turn`. Raises
    `InvalidRequest` (`invalid_reward`) for an unknown call or role, and for more turns than the role has.
    """
    if not (request.by_call or request.by_turn):
        return {}
    turns = turns_of(journal, episode_id)
    given: dict[str, float] = {}
    for role, rewards in request.by_turn.items():
        if role not in turns:
            raise _refused(f"by_turn[{role!r}]: {_unknown(role, list(turns), 'role')}", "by_turn")
        if len(rewards) > len(turns[role]):
            raise _refused(
                f"by_turn[{role!r}] has {len(rewards)} rewards, and the role has {len(turns[role])} calls that train: "
                "give one for each of them at most",
                "by_turn",
            )
        given |= dict(zip(turns[role], rewards, strict=False))
    calls = dict.fromkeys(call.id for call in journal.call_facts(episode_id))
    for name, reward in _without_prefixes(request.by_call).items():
        if name not in calls:
            raise _refused(f"by_call[{name!r}]: the episode has no such call; give the `id` of an answer", "by_call")
        given[name] = reward
    return {call: given[call] for call in calls if call in given}


def digest(request: FinishRequest) -> str:
    """Digest of the rewards of calls as they were sent; empty without any."""
    if not (request.by_call or request.by_turn):
        return ""
    sent = json.dumps([request.model_dump()[name] for name in ("by_call", "by_turn")], sort_keys=True)
    return hashlib.sha256(sent.encode()).hexdigest()[:16]


def _without_prefixes(by_call: Mapping[str, float]) -> dict[str, float]:
    """The ids of calls; those of answers have the prefix of their dialect, such as `chatcmpl-`."""
    return {re.sub(r"^(chatcmpl|cmpl)-|^(resp|msg)_", "", name): reward for name, reward in by_call.items()}


def _unknown(name: str, known: list[str], kind: str) -> str:
    way_out = did_you_mean(name, known, f"it has {', '.join(map(repr, known)) or 'none'}")
    return f"the episode has no {kind} {name!r}; {way_out}"


def _refused(message: str, param: str) -> InvalidRequest:
    return Unprocessable(message, code="invalid_reward", param=param)
