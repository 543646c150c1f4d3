"""An evaluation against somebody else's model: episodes that point at any OpenAI-compatible endpoint.

Nothing is recorded and nobody but this client knows of them: they begin at once, and end as they are told to.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from agentjet.client.episode import AsyncEpisode
from agentjet.protocol import AbortRequest, BeginRequest, BeginResponse, EpisodeView, FinishRequest
from agentjet.types import EpisodeStatus

NO_LEASE = 1e9
"""Seconds: nobody reclaims it."""
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model behind an OpenAI-compatible API; `base_url` usually ends in `/v1`."""

    base_url: str
    model: str
    api_key: str = field(default="none", repr=False)
    """Endpoints that want none still need the SDK to send one."""

    def begin(self, request: BeginRequest) -> AsyncEpisode:
        """An episode whose agent talks to this endpoint. Its policy version is 0."""
        begun = BeginResponse(
            episode_id=f"outside{next(_numbers):06d}",
            base_url=self.base_url,
            api_key=self.api_key,
            model=self.model,
            policy_version=0,
            lease_seconds=NO_LEASE,
            expires_at=NO_LEASE,
        )
        return AsyncEpisode(_Nobody(begun.episode_id, request), begun, request)


@dataclass
class _Nobody:
    """Answers an episode's requests in a server's place."""

    episode_id: str
    asked: BeginRequest
    status: EpisodeStatus = "live"

    async def request(
        self, method: str, path: str, *, body: BaseModel | None = None, patience: float | None = None
    ) -> Any:
        """See `Connection.request`."""
        if isinstance(body, FinishRequest):
            self.status = "finished"
        elif isinstance(body, AbortRequest):
            self.status = "aborted"
        asked = self.asked
        return EpisodeView(
            episode_id=self.episode_id,
            status=self.status,
            mode=asked.mode,
            task_id=asked.task_id,
            task_set=asked.task_set,
            group=asked.group,
            client_id=asked.client_id,
            policy_version=0,
            reason=body.reason if isinstance(body, AbortRequest) else "",
        ).model_dump()
