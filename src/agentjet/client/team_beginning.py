"""Beginning an episode on every server of a team, or on none.

Servers are asked one after the other, in the order of their addresses: of teams that hold places on one server and wait
for another, none then waits for what a second one holds while that waits for it. Asking them side by side would save a
round trip and lose that.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping

from agentjet.client.asynchronous import AsyncSwarm
from agentjet.client.beginning import SERVER_WAIT, begin
from agentjet.client.ending import Ending
from agentjet.client.endpoint import Endpoint
from agentjet.client.episode import GOODBYE_SECONDS, UNPLAYED, AsyncEpisode
from agentjet.client.team_episode import AsyncTeamEpisode
from agentjet.errors import Conflict, Later
from agentjet.protocol import BeginRequest

INCOMPLETE = "not needed: another server of the team had no room"
Asking = Callable[[str], BeginRequest]
"""A member's request, made anew each time its server is asked."""


async def begin_on_all(
    swarms: Mapping[str, AsyncSwarm],
    asking: Asking,
    *,
    wait: float,
    outside: Mapping[str, Endpoint] | None = None,
    deciding: set[str] | None = None,
    refused: Callable[[str], Awaitable[None]] | None = None,
    ending: Ending | None = None,
) -> AsyncTeamEpisode:
    """An episode of the members of `swarms`, the anchor first; those in `outside` talk to other models.

    Waits up to `wait` seconds for room everywhere, then raises `Later`; of every member whose server had none for a
    while `refused` hears. A place is not held for long while another server has no room.
    """
    outside, ending = outside or {}, ending or Ending()
    anchor = next(iter(swarms))
    retry = swarms[anchor].connection.retry
    deadline, attempt = retry.clock() + wait, 0
    while True:
        team = f"{anchor}/{uuid.uuid4().hex}"
        parts: dict[str, AsyncEpisode] = {}
        try:
            for member, swarm in swarms.items():
                request = asking(member).model_copy(update={"team": team})
                if member in outside:
                    parts[member] = outside[member].begin(request)
                    continue
                held = [part.lease_seconds for name, part in parts.items() if name not in outside]
                patience = min(deadline - retry.clock(), min(held) / 2 if held else SERVER_WAIT)
                parts[member] = await begin(swarm.connection, request, wait=max(0.0, patience), ending=ending)
            return AsyncTeamEpisode(team, parts, deciding)
        except BaseException as error:
            without_room = isinstance(error, Later) or (isinstance(error, Conflict) and error.code == "task_set_full")
            await _give_back(parts, INCOMPLETE if without_room else UNPLAYED, ending)
            left = deadline - retry.clock()
            if not isinstance(error, Later) or left <= 0:
                raise
        if refused is not None:
            await refused(member)
        await retry.sleep(min(left, retry.delay(attempt)))
        attempt = attempt + 1 if parts else 0  # Who held no place has waited with the server.


async def _give_back(parts: Mapping[str, AsyncEpisode], reason: str, ending: Ending) -> None:
    """Abort what was begun in vain. A server that is away is not waited for: the lease ends its part."""
    await asyncio.gather(*[ending.give_back(part.abort(reason), at_least=GOODBYE_SECONDS) for part in parts.values()])
