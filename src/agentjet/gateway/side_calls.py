"""The rules of `job.side_calls`: calls beside the agent's work get a role of their own, or are not trained.

A product asks its model for titles, summaries and sub-agents beside the work that the reward is about. The rule that a
call followed is written down with the call, so that later settings change nothing about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import takewhile

from agentjet.config import SideCallRule
from agentjet.gateway.requests import CallRequest
from agentjet.types import Conversation


def directed(rules: Sequence[SideCallRule], role: str, request: CallRequest) -> tuple[str, CallRequest]:
    """The role that a request speaks as, and the request with what its rule says."""
    rule = rule_of(rules, request.conversation, request.model)
    if rule is None:
        return role, request
    notes = (*request.notes, f"side call {rule.name}")
    return role or rule.role, replace(request, notes=notes, untrained="" if rule.train else rule.name)


def rule_of(rules: Sequence[SideCallRule], conversation: Conversation, model: str) -> SideCallRule | None:
    """The first rule that a call meets all conditions of."""
    system = "\n".join(m.content for m in takewhile(lambda m: m.role == "system", conversation.messages))
    tools = "some" if conversation.tools else "none"
    for rule in rules:
        if (
            rule.tools in ("any", tools)
            and (not rule.model or fnmatchcase(model, rule.model))
            and (not rule.system or fnmatchcase(system, rule.system))
        ):
            return rule
    return None
