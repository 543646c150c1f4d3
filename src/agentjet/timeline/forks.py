"""Causes of branches in a conversation tree, and orphans, which are calls that are not trained.

A call either continues a timeline at its end or begins a new one; `fork_cause` returns the reason. Most branches are
legitimate and are trained. *Orphans* are the exception: answers that did not reach the agent, and side calls. A later
call that sends an answer back proves that the answer arrived, even if the transport reported a failure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from agentjet.timeline.identity import Identity
from agentjet.timeline.tree import ConversationTree, Match
from agentjet.types import Call, Conversation, Fork, NewContext

OrphanReason = Literal["retry", "undelivered", "side"]


def new_context(conversation: Conversation, known: Mapping[int, Call], fingerprint: str = "") -> NewContext:
    """Returns the new part of a request, given the calls that `ConversationTree.recognise` found in it."""
    if not known:
        return NewContext(conversation.messages, None, conversation.tools, fingerprint, conversation.instructed)
    newest = max(known)
    return NewContext(conversation.messages[newest + 1 :], known[newest].id, (), fingerprint)


def fork_cause(tree: ConversationTree, asked: Identity, known: Mapping[int, Call], match: Match) -> Fork:
    """Returns why a request with this match begins a timeline. Empty if it continues one or is the tree's first.

    The caller detects the causes `retry` and `role`.
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
    """Returns the calls that are counted but not trained: answers that did not arrive, and side calls.

    Among a request and its retries, the answers that the agent sent back are trained. If it sent none back, the last
    delivered answer is trained.
    """
    sent_back = {call.ask.after for call in calls}
    first: dict[str, str] = {}
    tries: dict[str, list[Call]] = {}
    for call in calls:
        first[call.id] = first.get(call.retry_of, call.retry_of) if call.retry_of is not None else call.id
        tries.setdefault(first[call.id], []).append(call)
    found: dict[str, OrphanReason] = {}
    found |= {call.id: "side" for call in calls if call.untrained}
    for same in tries.values():
        kept = {call.id for call in same if call.id in sent_back}
        if not kept:
            kept = {call.id for call in [call for call in same if call.id not in undelivered][-1:]}
        for call in same:
            if call.id not in kept and call.id not in found:
                found[call.id] = "undelivered" if call.id in undelivered else "retry"
    return found
