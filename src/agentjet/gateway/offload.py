"""Work that grows with the size of a request, off the event loop where it is large.

Python runs one thread at a time, so a thread helps only as far as its work is many short steps. The sizes of requests
are limited for the rest: see `server.limits`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")

LARGE = 64 * 2**10
"""Bytes from which on a thread is worth the two switches that it costs."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="large-request")
"""Apart from asyncio's own threads, because the journal waits for the disk in those."""


async def offload(
    num_bytes: int, work: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """The result of `work`, which must touch nothing that belongs to the event loop: in a thread from `LARGE` on."""
    if num_bytes < LARGE:
        return work(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, lambda: work(*args, **kwargs))


def from_thread(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """`function` for use inside offloaded work: it is called in the present event loop, to which it belongs."""
    loop = asyncio.get_running_loop()

    async def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return function(*args, **kwargs)

    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return asyncio.run_coroutine_threadsafe(run(*args, **kwargs), loop).result()

    return call
