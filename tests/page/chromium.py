"""Chromium under test: how it is found and started, a served run, and a tab that reports every problem."""

from __future__ import annotations

import shutil
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect

from agentjet.client.threads import LoopThread
from agentjet.protocol import AbortRequest, BeginRequest
from tests.fakes import Running
from tests.needs import BROWSERS, need
from tests.server.serving import ADMIN, TOKEN, VIEWER, Served, in_thread, serving

T = TypeVar("T")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
]
TOKENS = {"viewer": VIEWER, "client": TOKEN, "admin": ADMIN}
REPORT_VIOLATIONS = """
addEventListener("securitypolicyviolation", (event) => {
  console.error(`CSP ${event.effectiveDirective} ${event.blockedURI} ${event.sample}`);
});
"""


def chromium_path() -> str:
    """Returns the path of Chromium; skips the test if there is none."""
    need("browser")
    return next(filter(None, map(shutil.which, BROWSERS)))


@dataclass
class Site:
    """A served run, from the thread of a test."""

    served: Served
    loop: LoopThread

    @property
    def url(self) -> str:
        return self.served.url

    @property
    def run(self) -> Running:
        return self.served.run

    def do(self, work: Awaitable[T]) -> T:
        """Runs a coroutine in the event loop of the server."""

        async def doing() -> T:
            return await work

        return self.loop.run(doing())

    def get(self, path: str, token: str = VIEWER) -> Any:
        """Returns the JSON of a control route: the page must show the same."""
        response = httpx.get(
            f"{self.url}/swarm/v1{path}", headers={"Authorization": f"Bearer {token}"}, trust_env=False, timeout=30
        )
        assert response.status_code == 200, response.text
        return response.json()

    def code(self, role: str = "viewer", token: str = "") -> str:
        """Returns a one-time code, as `agentjet open` gets it."""
        response = httpx.post(
            f"{self.url}/swarm/v1/sessions",
            json={"role": role},
            headers={"Authorization": f"Bearer {token or TOKENS[role]}"},
            trust_env=False,
            timeout=30,
        )
        assert response.status_code == 200, response.text
        code: str = response.json()["code"]
        return code


@contextmanager
def served_site(
    data_dir: Path, *args: Any, batches: int = 1, open_batch: bool = False, **kwargs: Any
) -> Iterator[Site]:
    """Serves a run with `batches` learned batches, and perhaps one that was begun. See `tests.fakes.running`."""
    with in_thread(serving(data_dir, *args, **kwargs)) as (served, loop):
        site = Site(served, loop)
        for _ in range(batches):
            site.do(served.run.batch())
        if open_batch:
            site.do(begin_a_batch(served.run))
        yield site


async def begin_a_batch(run: Running) -> None:
    """Leaves a finished, a live and an aborted episode in two groups."""
    await run.episode(1.0, task="t0")
    live = await run.gateway.begin(BeginRequest(task_id="t0", client_id="c", wait=5))
    await run.say(live.id)
    lost = await run.gateway.begin(BeginRequest(task_id="t1", client_id="c", wait=5))
    await run.gateway.abort(lost.id, AbortRequest(reason="Timeout: the tool did not answer"))


@dataclass
class Tab:
    """A tab of the page."""

    page: Page
    site: Site
    context: BrowserContext
    problems: list[str] = field(default_factory=list)
    """What the browser reported: errors of scripts, violations of the policy, requests to other origins."""

    def open(self, path: str = "/", role: str = "viewer") -> Page:
        """Opens a view anew, in a new session if the tab has none. Returns when it has drawn."""
        if self.page.url == "about:blank":
            self.page.goto(f"{self.site.url}/#code={self.site.code(role)}")
            self.page.wait_for_selector("main h1")
        else:
            arrive(self.page, f"{self.site.url}/#/nowhere")
        return arrive(self.page, f"{self.site.url}/#{path}")

    def settled(self, path: str = "/", role: str = "viewer") -> Page:
        """As `open`; returns when the view has its data."""
        return loaded(self.open(path, role))

    def take_problems(self) -> list[str]:
        """Returns the reported problems and forgets them."""
        found, self.problems[:] = list(self.problems), []
        return found


HERE = "document.querySelector('main[data-hash]')?.dataset.hash === location.hash"


def arrive(page: Page, address: str) -> Page:
    """Opens a view. Returns when the page has drawn it, perhaps without its data."""
    page.goto(address)
    until(page, HERE)
    return page


def until(page: Page, expression: str, arg: object = None) -> None:
    """Waits until an expression holds. (Playwright's own wait evaluates a string, which the page's policy forbids.)"""
    deadline = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(expression, arg):
        assert time.monotonic() < deadline, f"{expression} did not come true in {PATIENCE} ms"
        page.wait_for_timeout(20)


def loaded(page: Page) -> Page:
    """Waits until the view has its data."""
    expect(page.locator("main [aria-busy=true]")).to_have_count(0)
    expect(page.locator("main .state.loading")).to_have_count(0)
    return page


PATIENCE = 60_000
"""Milliseconds that a test waits for the page: machines that run tests are busy."""
expect.set_options(timeout=PATIENCE)


@contextmanager
def watched_page(browser: Browser, origin: str, **options: Any) -> Iterator[tuple[Page, list[str]]]:
    """A page in a context of its own, and its problems, of which none must be left. `options` are those of the context,
    such as `viewport` and `color_scheme`."""
    context = browser.new_context(**options)
    context.add_init_script(REPORT_VIOLATIONS)
    page, problems = context.new_page(), list[str]()
    page.set_default_timeout(PATIENCE)
    watch(page, problems, origin)
    yield page, problems
    context.close()
    assert problems == []


@contextmanager
def opened_tab(browser: Browser, site: Site, **options: Any) -> Iterator[Tab]:
    with watched_page(browser, site.url, **options) as (page, problems):
        yield Tab(page, site, page.context, problems)


def watch(page: Page, problems: list[str], origin: str) -> None:
    """Appends to `problems` what the page must not cause."""
    own = urlsplit(origin).netloc
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("console", lambda line: problems.append(f"console: {line.text}") if is_problem(line) else None)
    page.on("request", lambda sent: problems.append(f"foreign: {sent.url}") if is_foreign(sent.url, own) else None)


def is_problem(line: ConsoleMessage) -> bool:
    """True for an error in the console, but for answers of control routes: a view shows those."""
    return line.type == "error" and "/swarm/v1/" not in line.location["url"]


def is_foreign(url: str, own: str) -> bool:
    """True for a request that leaves the page's origin."""
    parts = urlsplit(url)
    return parts.scheme not in ("data", "blob", "about") and parts.netloc != own
