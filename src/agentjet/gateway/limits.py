"""How much of the server one client and one episode may use at a time.

A client is who calls itself so (`client_id`): these limits keep honest programs out of each other's way and a runaway
one from filling the server. They are no defence against a holder of the client token, who may take other names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from agentjet.config import ServerConfig
from agentjet.errors import Later
from agentjet.swarm import Episode

RETRY_AFTER_CALLS = 1.0
TOO_MANY_EPISODES = "too_many_episodes"
RETRY_AFTER_EPISODES = 5.0


class CallLimits:
    """Counts calls, held ones included, by episode and by client."""

    def __init__(self, server: ServerConfig) -> None:
        self._server = server
        self._by_episode: Counter[str] = Counter()
        self._by_client: Counter[str] = Counter()

    @contextmanager
    def calling(self, episode: Episode) -> Iterator[None]:
        """One call of `episode`. Raises `Later` (429) when there are too many already."""
        server = self._server
        self._check(self._by_episode[episode.id], server.max_calls_per_episode, "episode", episode.id)
        self._check(self._by_client[episode.client_id], server.max_calls_per_client, "client", episode.client_id)
        places = ((self._by_episode, episode.id), (self._by_client, episode.client_id))
        for counts, name in places:
            counts[name] += 1
        try:
            yield
        finally:
            for counts, name in places:
                counts[name] -= 1
                if not counts[name]:
                    del counts[name]

    @staticmethod
    def _check(count: int, most: int, kind: str, name: str) -> None:
        if count >= most:
            raise Later(
                f"{count} calls of {kind} {name} are under way, which is the most that "
                f"server.max_calls_per_{kind} allows: wait for one to end.",
                retry_after=RETRY_AFTER_CALLS,
                code="too_many_calls",
            )


def too_many_episodes(client_id: str, most: int) -> Later:
    """The answer to a begin of a client that holds `most` live episodes."""
    return Later(
        f"Client {client_id!r} holds {most} live episodes, which is the most that server.max_episodes_per_client "
        "allows: finish or abort one.",
        retry_after=RETRY_AFTER_EPISODES,
        code=TOO_MANY_EPISODES,
    )
