"""Give up work whose client has gone, and clients that are not waited for any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


def hang_up_of(request: Request) -> Callable[[], None]:
    """What closes the request's connection at once, where `listening` put it; in-process transports have nobody to wait
    for.
    """
    hang_up: Callable[[], None] = getattr(request.state, "hang_up", lambda: None)
    return hang_up


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled, and `ClientGone` raised, when the client disconnects first.

    The request's body must have been read: after it, the only message to receive is the disconnect.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
