"""The real application on a loopback port, in the test's event loop or in a thread."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
from anthropic import AsyncAnthropic
from anthropic import DefaultAsyncHttpxClient as AnthropicHttpxClient
from fastapi import FastAPI
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from agentjet.client.threads import LoopThread
from agentjet.front.http import listen, uvicorn_config
from agentjet.front.keys import Keys
from agentjet.protocol import EpisodeTree
from agentjet.server.app import create_app
from tests.fakes import Running, running

T = TypeVar("T")

TOKEN = "client-token-client-token"
ADMIN = "admin-token-admin-token-admin"
VIEWER = "viewer-token-viewer-token"
SECRET = "secret-of-keys-secret-of-keys"


def bearer(token: str) -> dict[str, str]:
    """Returns the header of a token, or of none."""
    return {"Authorization": f"Bearer {token}"} if token else {}


@dataclass
class Served:
    """A running gateway with HTTP around it."""

    run: Running
    url: str
    keys: Keys
    app: FastAPI
    http: httpx.AsyncClient
    """Control routes, with the client token."""
    agents: AsyncExitStack
    listener: socket.socket

    async def begin(self, **body: Any) -> dict[str, Any]:
        """Starts an episode and returns the server's answer."""
        response = await self.http.post("/swarm/v1/episodes", json={"task_id": "t", **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def view(self, episode: dict[str, Any]) -> EpisodeTree:
        """Returns an episode with its calls, as the page shows it."""
        response = await self.http.get(f"/swarm/v1/episodes/{episode['episode_id']}")
        assert response.status_code == 200, response.text
        return EpisodeTree.model_validate(response.json())

    async def orphans(self, episode: dict[str, Any]) -> list[str]:
        """Returns for each call the reason that it is not trained for, or nothing."""
        return [call.orphan for call in (await self.view(episode)).calls]

    def openai(self, episode: dict[str, Any], **uvicorn_config: Any) -> AsyncOpenAI:
        """Returns OpenAI's SDK with the key of an episode."""
        arguments = {"base_url": episode["base_url"], "api_key": episode["api_key"], "max_retries": 0, **uvicorn_config}
        # Reading the system's certificates, which plain http needs not, would be the slowest part of a test.
        client = AsyncOpenAI(**arguments, http_client=DefaultAsyncHttpxClient(verify=False))
        self.agents.push_async_callback(client.close)
        return client

    def anthropic(self, episode: dict[str, Any], **uvicorn_config: Any) -> AsyncAnthropic:
        """Returns Anthropic's SDK with the key of an episode."""
        url = episode.get("base_url", self.url).removesuffix("/v1")
        arguments = {"base_url": url, "api_key": episode["api_key"], "max_retries": 0, **uvicorn_config}
        client = AsyncAnthropic(**arguments, http_client=AnthropicHttpxClient(verify=False))
        self.agents.push_async_callback(client.close)
        return client


@asynccontextmanager
async def serving(data_dir: Path, *args: Any, port: int = 0, **kwargs: Any) -> AsyncIterator[Served]:
    """See `tests.fakes.running`. A server on the `data_dir` and `port` of an earlier one has the same keys."""
    async with running(data_dir, *args, **kwargs) as run:
        keys = Keys({"client": TOKEN, "admin": ADMIN, "viewer": VIEWER, "keys": SECRET}, clock=run.clock)
        server_config = run.gateway.config.server
        listener = listen("127.0.0.1", port)
        app = create_app(run.runs, keys)
        server = uvicorn.Server(uvicorn_config(app, server_config))
        task = asyncio.create_task(server.serve([listener]))
        url = f"{'https' if server_config.tls_cert else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with (
                httpx.AsyncClient(
                    base_url=url,
                    headers={"Authorization": f"Bearer {TOKEN}"},
                    timeout=10,
                    verify=False,
                    trust_env=False,
                ) as http,
                AsyncExitStack() as agents,
            ):
                yield Served(run, url, keys, app, http, agents, listener)
        finally:
            await run.runs.drain()
            server.should_exit = True
            await task


@contextmanager
def in_thread(context: AbstractAsyncContextManager[T]) -> Iterator[tuple[T, LoopThread]]:
    """Runs an asynchronous context in a thread, for synchronous tests. Yields its value and the event loop."""
    loop = LoopThread()
    try:
        entered = loop.run(context.__aenter__())
        try:
            yield entered, loop
        finally:
            loop.run(context.__aexit__(None, None, None))
    finally:
        loop.stop()
