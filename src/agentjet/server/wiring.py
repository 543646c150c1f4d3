"""What every route has at hand: the gateway, the keys, the lease and the limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request

from agentjet.gateway import Gateway
from agentjet.server.auth import Keys
from agentjet.server.lease import Lease
from agentjet.server.limits import Limits
from agentjet.server.runs import Runs


@dataclass(frozen=True, slots=True)
class Wiring:
    """Put on the app by `create_app`."""

    runs: Runs
    keys: Keys
    lease: Lease
    limits: Limits

    @property
    def gateway(self) -> Gateway:
        return self.runs.gateway

    @property
    def max_age(self) -> float:
        """Seconds that a key is good from its episode's beginning: an episode lives no longer."""
        return self.gateway.swarm.job.max_episode_seconds


def wiring_of(request: Request) -> Wiring:
    wiring = request.app.state.wiring
    assert isinstance(wiring, Wiring)
    return wiring


async def _wiring(request: Request) -> Wiring:
    return wiring_of(request)


Wired = Annotated[Wiring, Depends(_wiring)]
IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=255)]
LeaseEpoch = Annotated[int | None, Header(alias="AgentJet-Lease", ge=0, le=2**53)]
"""The epoch of the lease that the caller believes to have."""


async def require_lease(wired: Wired, epoch: LeaseEpoch = None) -> None:
    """The present lease's epoch, while there is one. What a lease that ran out left being served is left."""
    wired.lease.check(epoch)
    if not wired.lease.seconds_left:
        await wired.runs.enter("", None)
