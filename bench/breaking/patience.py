"""A client that waits for room for minutes, then sees the server restart. It must go on waiting, and get its episode.

The server refuses it because it holds as many episodes as a client may. Its pauses between two requests are cut short,
and each makes its clock older by a minute, until it has waited for longer than it would wait for a server that is
silent. From then on its clock runs as others do, and the server is killed. The episodes are for evaluation, and end
without a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid

from agentjet import AsyncSwarm
from agentjet.client import AsyncEpisode, Retry
from agentjet.errors import AgentJetError, Unreachable
from agentjet.protocol import AbortRequest, BeginResponse
from agentjet.types import DEFAULT_RUN
from bench.breaking.records import Book
from bench.breaking.scene import Scene
from bench.breaking.victims import MOST_LIVE, PATIENCE

PAUSE_SECONDS = 0.05
"""A pause between two requests really lasts so long."""
PAUSE_AGES = 60.0
WAITED_SECONDS = 300.0
"""The server is killed when the client has waited for so long by its own clock."""
HELD_SECONDS = 0.2
"""The server is asked to hold the request for so long."""


class AgingClock:
    """A client's clock and its pauses."""

    def __init__(self) -> None:
        self.waited = asyncio.Event()
        """The client was answered after its last long pause."""
        self._ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead

    async def sleep(self, seconds: float) -> None:
        if self._ahead < WAITED_SECONDS:
            self._ahead += PAUSE_AGES
        else:
            self.waited.set()
        await asyncio.sleep(min(seconds, PAUSE_SECONDS))


async def kill_under_a_waiting_client(scene: Scene, within: float) -> bool:
    """Kill the gateway, and bring it back, while a client waits for room. True if it waited when the gateway was
    killed; a client that gave up is noted in the tally.
    """
    clock, name = AgingClock(), f"patient-{uuid.uuid4().hex[:6]}"
    url = f"http://127.0.0.1:{scene.wire.port}"
    book = Book(scene.books(DEFAULT_RUN) / f"{name}.jsonl")
    async with (
        AsyncSwarm(url, scene.server.token(), client_id=name) as holding,
        AsyncSwarm(url, scene.server.token(), client_id=name, retry=Retry(clock=clock, sleep=clock.sleep)) as waiting,
    ):
        held = [await holding.begin("held", mode="eval") for _ in range(MOST_LIVE)]
        heart = asyncio.create_task(_keep(held))
        asking = asyncio.create_task(_begin(waiting, book))
        try:
            waited = asyncio.create_task(clock.waited.wait())
            await asyncio.wait([waited, asking], timeout=within, return_when=asyncio.FIRST_COMPLETED)
            waited.cancel()
            if asking.done() or not clock.waited.is_set():
                return False
            await scene.server.kill()
            await scene.bring_back()
        finally:
            heart.cancel()
            for episode in held:
                with contextlib.suppress(AgentJetError):
                    await episode.abort("the bench needs it no more")
            await _ended(scene, asking)
    return True


async def _keep(held: list[AsyncEpisode]) -> None:
    while True:
        await asyncio.sleep(held[0].lease_seconds / 3)
        with contextlib.suppress(AgentJetError):
            await asyncio.gather(*(episode.heartbeat() for episode in held))


async def _begin(swarm: AsyncSwarm, book: Book) -> None:
    """As `swarm.begin` asks, whose requests the server holds for longer."""
    request = swarm.episode_request("waited for", mode="eval").model_copy(update={"wait": HELD_SECONDS})
    answer = await swarm.connection.request(
        "POST", "/episodes", body=request, key=uuid.uuid4().hex, patience=math.inf, server_wait=HELD_SECONDS
    )
    episode = BeginResponse.model_validate(answer).episode_id
    book.note("begun", episode)
    await swarm.connection.request("POST", f"/episodes/{episode}/abort", body=AbortRequest(reason="it had its place"))
    book.note("aborted", episode)


async def _ended(scene: Scene, asking: asyncio.Task[None]) -> None:
    """It has its episode now that there is room, or has given up."""
    await asyncio.wait([asking], timeout=PATIENCE)
    if not asking.done():
        asking.cancel()
        scene.tally.gave_up.append("a client that waited got no episode although there was room")
    elif isinstance(error := asking.exception(), Unreachable):
        scene.tally.gave_up.append(f"a client that had waited for minutes gave up at a restart: {error}")
    elif error is not None:
        raise error
