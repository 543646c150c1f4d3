"""Why a conversation tree branches, and which of its calls nobody heard.

A call either continues a timeline from its very end or begins one of its own; `fork_cause` says why. Most branches are
legitimate and train. The exception are *orphans*: answers that did not reach the agent. A later call that sends an
answer back proves that it arrived, whatever the transport believed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from agentjet.timeline.identity import Identity
from agentjet.timeline.tree import ConversationTree, Match
from agentjet.types import Call, Conversation, Fork, NewContext

OrphanReason = Literal["retry", "undelivered", "side"]


def new_context(conversation: Conversation, known: Mapping[int, Call], fingerprint: str = "") -> NewContext:
    """What is new in a request, given the calls that `ConversationTree.recognise` found in it."""
    if not known:
        return NewContext(conversation.messages, None, conversation.tools, fingerprint, conversation.instructed)
    newest = max(known)
    return NewContext(conversation.messages[newest + 1 :], known[newest].id, (), fingerprint)


def fork_cause(tree: ConversationTree, asked: Identity, known: Mapping[int, Call], match: Match) -> Fork:
    """Why a request that matches like this begins a timeline; empty when it continues one or is the tree's first.

    `retry` and `role` are the caller's to know.
    """
    if not tree.calls:
        return ""
    if match.parent is not None and match.kept == tree.num_tokens(match.parent) and not tree.is_continued(match.parent):
        return ""
    if not tree.has_seen_tools(asked):
        return "tools"
    if any(message.role == "assistant" and i not in known for i, message in enumerate(asked.messages)):
        return "edit"
    return "template" if known and not tree.keeps_all_of(known[max(known)].id, match) else "branch"


def orphans(calls: Sequence[Call], undelivered: Collection[str]) -> dict[str, OrphanReason]:
    """The calls that are counted and never trained: those that no agent heard, and side calls.

    Of a request and its retries the answers that were sent back are kept; when none was, the last that was delivered.
    """
    heard = {call.ask.after for call in calls}
    first: dict[str, str] = {}
    tries: dict[str, list[Call]] = {}
    for call in calls:
        first[call.id] = first.get(call.retry_of, call.retry_of) if call.retry_of is not None else call.id
        tries.setdefault(first[call.id], []).append(call)
    found: dict[str, OrphanReason] = {}
    found |= {call.id: "side" for call in calls if call.untrained}
    for same in tries.values():
        kept = {call.id for call in same if call.id in heard}
        if not kept:
            kept = {call.id for call in [call for call in same if call.id not in undelivered][-1:]}
        for call in same:
            if call.id not in kept and call.id not in found:
                found[call.id] = "undelivered" if call.id in undelivered else "retry"
    return found
