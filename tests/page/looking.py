"""`agentjet look` under test: its application on a loopback port, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from playwright.sync_api import Browser, Page

from agentjet.cli.look import RunsAndStudies
from agentjet.config import ServerConfig
from agentjet.front.http import listen, uvicorn_config
from agentjet.server.app import OfflineViewer, create_look_app
from agentjet.server.collection import Collection
from tests.page.chromium import arrive, loaded, watched_page
from tests.server.serving import in_thread


@dataclass
class LookSite:
    """A served `agentjet look`, and the tab that shows it."""

    url: str
    code: str
    page: Page
    problems: list[str] = field(default_factory=list)

    def open(self, path: str) -> Page:
        """Opens a view. Returns when it has loaded."""
        if self.page.url == "about:blank":
            self.page.goto(f"{self.url}/#code={self.code}")
            self.page.wait_for_selector("main h1")
        return loaded(arrive(self.page, f"{self.url}/#{path}"))

    def get(self, path: str) -> Any:
        """Returns the JSON of a route: the page must show the same."""
        opened = httpx.post(f"{self.url}/swarm/v1/sessions/exchange", json={"code": self.code}, trust_env=False)
        headers = {"Authorization": f"Bearer {opened.json()['key']}"}
        response = httpx.get(f"{self.url}/swarm/v1{path}", headers=headers, trust_env=False, timeout=30)
        assert response.status_code == 200, response.text
        return response.json()


@asynccontextmanager
async def served_look(*places: object) -> AsyncIterator[tuple[str, str]]:
    """Yields the URL and the code."""
    found, server = RunsAndStudies(""), ServerConfig()
    for place in places:
        found.add(str(place))
    collection = Collection(found.runs, found.studies)
    look = OfflineViewer(collection, found.forwards, server)
    listener = listen("127.0.0.1", 0)
    http = uvicorn.Server(uvicorn_config(create_look_app(look, server), server))
    task = asyncio.create_task(http.serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", look.code
    finally:
        http.should_exit = True
        await task
        await collection.close()


@contextmanager
def look_site(browser: Browser, *places: object, **options: Any) -> Iterator[LookSite]:
    """Serves the places and opens a tab, which fails its test as `tab` does. `options` are those of its context."""
    with (
        in_thread(served_look(*places)) as ((url, code), _),
        watched_page(browser, url, **options) as (page, problems),
    ):
        yield LookSite(url, code, page, problems)
