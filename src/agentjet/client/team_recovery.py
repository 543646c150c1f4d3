"""Recovery: parts of team episodes that promised a reward and heard no more, settled as their anchors decided."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from urllib.parse import quote

from agentjet.client.connection import Connection
from agentjet.errors import Conflict, NotFound
from agentjet.protocol import AbortRequest, EpisodeList, EpisodeView, FinishRequest

PREPARED_LISTED = 500


async def recover(connections: Mapping[str, Connection], deciding: Collection[str]) -> int:
    """Settle what is in doubt on the servers of these members, but for the teams in `deciding`. Returns how many."""
    found = await asyncio.gather(
        *[_episodes(connection, f"status=prepared&limit={PREPARED_LISTED}") for connection in connections.values()]
    )
    settled = 0
    for (member, connection), parts in zip(connections.items(), found, strict=True):
        for part in parts:
            anchor = part.team.partition("/")[0]
            if anchor in connections and anchor != member and part.team not in deciding:
                settled += await _settle(connection, part, connections[anchor])
    return settled


async def _settle(connection: Connection, part: EpisodeView, anchor: Connection) -> bool:
    anchored = await _episodes(anchor, f"team={quote(part.team, safe='')}")
    decisions = {episode.status for episode in anchored}
    body: FinishRequest | AbortRequest
    if "finished" in decisions:
        assert part.reward is not None, "a prepared episode has promised a reward"
        verb, body = "finish", FinishRequest(reward=part.reward, by_role=part.by_role, metrics=part.metrics)
    elif decisions and decisions <= {"aborted", "expired"}:
        verb, body = "abort", AbortRequest(reason="the team's anchor was not finished")
    else:
        return False
    try:
        await connection.request("POST", f"/episodes/{quote(part.episode_id, safe='')}/{verb}", body=body)
    except (Conflict, NotFound):  # Somebody else settled it meanwhile.
        return False
    return True


async def _episodes(connection: Connection, query: str) -> tuple[EpisodeView, ...]:
    found = EpisodeList.model_validate(await connection.request("GET", f"/episodes?{query}"))
    return tuple(found.episodes)
