"""A target for fuzzers: the real application over a scripted worker, called in its event loop without a network.

Unexpected exceptions are raised with their traceback."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import requests

from agentjet.client.threads import LoopThread
from tests.server.serving import ADMIN, TOKEN, VIEWER, Served, in_thread, serving

Role = Literal["nobody", "viewer", "client", "admin", "agent"]
TOKENS: dict[Role, str] = {"viewer": VIEWER, "client": TOKEN, "admin": ADMIN}


class Target:
    """An application, and an episode with its key."""

    def __init__(self, served: Served, loop: LoopThread) -> None:
        self.served = served
        self._loop = loop
        self.app = served.app
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app))
        self.episode: dict[str, Any] = {}
        self.seen: Counter[tuple[str, int]] = Counter()

    def refresh(self) -> None:
        """Restarts the engine if a request stopped it, and starts a new episode if the present one has ended."""
        gateway = self.served.run.gateway

        async def wake() -> None:
            gateway.engine.start()
            await gateway.engine.wait_until_up()
            known = self.episode.get("episode_id")
            if known is None or gateway.swarm.episode(known).status != "live":
                self.episode = await self.served.begin(mode="eval", client_id="refreshed")

        self._loop.run(wake())

    def send(self, prepared: requests.PreparedRequest, role: Role) -> httpx.Response:
        """Sends a request with the credentials of `role` and returns the response."""
        headers = {name: value for name, value in prepared.headers.items() if name.lower() != "authorization"}
        token = self.episode.get("api_key", "") if role == "agent" else TOKENS.get(role, "")
        if token:
            headers["Authorization"] = f"Bearer {token}"
        assert prepared.method is not None and prepared.url is not None
        content = prepared.body.encode() if isinstance(prepared.body, str) else prepared.body
        return self.post(prepared.url, headers, content, method=prepared.method)

    def post(self, url: str, headers: Any, content: bytes | None, *, method: str = "POST") -> httpx.Response:
        request = httpx.Request(method, url, headers=headers, content=content)
        return self._loop.run(self._http.send(request))

    def inference_routes(self) -> list[str]:
        """Returns the routes that take a conversation, with the key filled into paths."""
        paths = self.app.openapi()["paths"]
        found = [path for path, ways in paths.items() if "post" in ways and not path.startswith("/swarm/")]
        return [path.replace("{key}", self.episode["api_key"]) for path in found]


@contextmanager
def serving_target(data_dir: Path, **options: Any) -> Iterator[Target]:
    """See `tests.fakes.running` for the options."""
    with in_thread(serving(data_dir, **options)) as (served, loop):
        yield Target(served, loop)
