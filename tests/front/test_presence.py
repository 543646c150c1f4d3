"""Work for a client that may leave: the result, the end at its disconnect, and no cancellation that arrives late."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request

from agentjet.front.http import ClientGone, Presence

pytestmark = pytest.mark.anyio


class Client:
    """A request whose body has been read. Its next message is the disconnect, after `leave`."""

    def __init__(self) -> None:
        self._left = asyncio.Event()
        self.leave = self._left.set
        self.request = Request({"type": "http"}, self._receive)

    async def _receive(self) -> dict[str, str]:
        await self._left.wait()
        return {"type": "http.disconnect"}


async def test_work_ends_at_the_disconnect_and_cleans_up() -> None:
    client, ends = Client(), list[str]()

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            ends.append("cleaned up")

    presence = Presence(client.request)
    asyncio.get_running_loop().call_later(0.01, client.leave)
    with pytest.raises(ClientGone):
        await presence.during(work())
    task = asyncio.current_task()
    assert ends == ["cleaned up"] and task and not task.cancelling()
    assert await presence.has_ended()


@pytest.mark.parametrize("turns", range(5))
async def test_a_disconnect_near_the_end_cancels_nothing_later(turns: int) -> None:
    client = Client()
    presence = Presence(client.request)
    await asyncio.sleep(0)

    async def work() -> str:
        client.leave()
        for _ in range(turns):
            await asyncio.sleep(0)
        return "done"

    try:
        assert await presence.during(work()) == "done"
    except ClientGone:
        assert turns > 1
    for _ in range(5):
        await asyncio.sleep(0)  # A cancellation would be raised here.
    assert await presence.has_ended()


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    client = Client()
    presence = Presence(client.request)

    async def answer() -> None:
        await presence.during(asyncio.sleep(3600))

    task = asyncio.create_task(answer())
    await asyncio.sleep(0.01)
    client.leave()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await Presence(Client().request).has_ended()


async def test_the_error_of_work_is_raised() -> None:
    async def work() -> None:
        raise LookupError("no such row")

    with pytest.raises(LookupError, match="no such row"):
        await Presence(Client().request).during(work())
