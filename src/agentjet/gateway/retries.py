"""Which recorded call a repeated request supersedes: an answer that did not arrive must not train beside its retry.

An SDK sends a request again when no answer came. Mostly none was recorded either: the call failed, or was cancelled
when its client left. Those are counted here, so that a retry of one of several equal requests (votes) is not taken for
the retry of another that was answered. The counts are lost with the process; what was recorded is not.
"""

from __future__ import annotations

from collections import Counter

from agentjet.gateway.requests import CallRequest
from agentjet.timeline import ConversationTree


class Retries:
    """Requests that ended without a recorded answer, by episode, role and fingerprint."""

    def __init__(self) -> None:
        self._unanswered: dict[str, Counter[tuple[str, str]]] = {}

    def unanswered(self, episode_id: str, role: str, fingerprint: str) -> None:
        """A request ended, and nothing was recorded."""
        self._unanswered.setdefault(episode_id, Counter())[role, fingerprint] += 1

    def forget(self, episode_id: str) -> None:
        """The episode ended."""
        self._unanswered.pop(episode_id, None)

    def earlier(self, episode_id: str, role: str, request: CallRequest, tree: ConversationTree) -> list[str]:
        """The calls of `tree` that `request` repeats, one for each of its choices at most; oldest first."""
        if not request.retry:
            return []
        unanswered = self._unanswered.get(episode_id, Counter())
        if unanswered[role, request.fingerprint]:
            unanswered[role, request.fingerprint] -= 1
            return []
        repeated = {call.retry_of for call in tree.calls}
        same = [c.id for c in tree.calls if c.ask.fingerprint == request.fingerprint and c.id not in repeated]
        return same[-request.choices :]
