"""Beginning an episode, so that none is left behind when whoever asked for it is cancelled."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

from agentjet.client.connection import Connection
from agentjet.client.ending import Ending
from agentjet.client.episode import UNPLAYED, AsyncEpisode
from agentjet.protocol import BeginRequest, BeginResponse

SERVER_WAIT = 20.0
"""Longest the server is asked to hold a `begin`: short enough for every proxy."""


async def begin(
    connection: Connection,
    request: BeginRequest,
    *,
    wait: float,
    given_back: Callable[[AsyncEpisode], None] = lambda episode: None,
    ending: Ending | None = None,
) -> AsyncEpisode:
    """Begin an episode, waiting up to `wait` seconds for room, then raise `Later`.

    When this is cancelled, an episode that the server began all the same is aborted and passed to `given_back`; one
    that could not be aborted is counted in `ending`.
    """
    request = request.model_copy(update={"wait": min(wait, SERVER_WAIT)})
    key = uuid.uuid4().hex
    try:
        return await _asked(connection, request, key, patience=wait)
    except asyncio.CancelledError:
        # The server may have begun it just now. To ask for the same again, without waiting, tells; then it is given
        # back.
        async def give_back() -> None:
            episode = await _asked(connection, request.model_copy(update={"wait": 0.0}), key, patience=0.0)
            await episode.abort(UNPLAYED, patience=0.0)
            given_back(episode)

        await (ending or Ending()).give_back(give_back())
        raise


async def _asked(connection: Connection, request: BeginRequest, key: str, *, patience: float) -> AsyncEpisode:
    answer = await connection.request(
        "POST", "/episodes", body=request, key=key, patience=patience, server_wait=request.wait
    )
    return AsyncEpisode(connection, BeginResponse.model_validate(answer), request)
