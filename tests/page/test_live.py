"""The page follows its run.

1. An event changes the page without a reload. One tab reads the stream, because browsers allow six
   connections to a server, and all of them follow.
2. A server that stops and comes back: the page says that it waits, and is right again.
3. A session that has ended, a token of another run and a run that does not exist are explained. An answer about the
   run that was left changes nothing.
4. A run without episodes shows the lines that start one. A metric that is NaN is a gap.
5. While nothing happens, what changes with time is read again.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, Error, Route, expect

from agentjet.front.keys import SESSION_SECONDS
from tests.fakes import ScriptedCompute
from tests.page.chromium import Site, Tab, arrive, opened_tab, served_site
from tests.server.serving import ADMIN, in_thread, serving


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with one learned batch."""
    with served_site(tmp_path_factory.mktemp("live") / "data") as served:
        yield served


VERSION = '[data-fact="/status#policy_version"]'


def version_of(site: Site) -> str:
    return str(site.get("/status")["policy_version"])


@pytest.mark.thorough
def test_tabs_follow_one_stream(new_tab: Tab, site: Site) -> None:
    streams: list[str] = []
    new_tab.context.on("request", lambda request: streams.append(request.url) if "/events" in request.url else None)
    pages = [new_tab.open(), *(new_tab.context.new_page() for _ in range(2))]
    for page in pages[1:]:
        page.goto(site.url)  # No code: the session comes from the first new_tab.
        expect(page.locator(".connection")).to_have_text("● Live")
    site.do(site.run.batch())
    for page in pages:
        expect(page.locator(VERSION)).to_have_text(version_of(site))
    assert len(streams) == 1
    pages[0].close()  # The next tab takes over.
    site.do(site.run.batch())
    for page in pages[1:]:
        expect(page.locator(VERSION)).to_have_text(version_of(site))


def test_paused_and_resumed(new_tab: Tab, site: Site) -> None:
    page, before = new_tab.open(), version_of(site)
    expect(page.locator(VERSION)).to_have_text(before)  # A paused page loads nothing.
    page.keyboard.press(".")
    expect(page.locator(".connection")).to_have_text("‖ Paused")
    site.do(site.run.batch())
    expect(page.locator(VERSION)).to_have_text(before)
    page.get_by_role("button", name="Resume live updates").click()
    expect(page.locator(VERSION)).to_have_text(version_of(site))


@pytest.mark.thorough
def test_a_server_that_stops_and_comes_back(browser: Browser, tmp_path: Path) -> None:
    context = browser.new_context()  # Outlives the first server.
    with served_site(tmp_path / "data") as site:
        port = site.served.listener.getsockname()[1]
        page = context.new_page()
        page.goto(f"{site.url}/#code={site.code()}")
        expect(page.locator(VERSION)).to_have_text("1")
    expect(page.locator(".connection")).to_contain_text("Reconnecting")
    expect(page.locator(".banner")).to_contain_text("does not answer")
    with in_thread(serving(tmp_path / "data", port=port)) as (served, loop):
        Site(served, loop).do(served.run.batch())
        expect(page.locator(VERSION)).to_have_text("2")
        expect(page.locator(".connection")).to_have_text("● Live")
        expect(page.locator(".banner")).to_have_count(0)
        context.close()


def test_a_session_that_has_ended(browser: Browser, tmp_path: Path) -> None:
    with served_site(tmp_path / "data", batches=0) as site, opened_tab(browser, site) as tab:
        page = tab.open()
        site.run.clock.advance(SESSION_SECONDS)
        page.goto(f"{site.url}/#/batches")
        page.reload()
        expect(page.get_by_role("alert")).to_contain_text("This session has ended: run `agentjet open` again.")


@pytest.mark.parametrize("name", ["other", "nothing"])
def test_another_run_and_one_that_does_not_exist(new_tab: Tab, site: Site, name: str) -> None:
    if name == "other":
        created = httpx.put(
            f"{site.url}/swarm/v1/runs/other", json={"job": {}}, headers={"Authorization": f"Bearer {ADMIN}"}
        )
        assert created.status_code == 200
    page = new_tab.open()
    page.goto(f"{site.url}/#/runs/{name}/")
    expect(page.locator(".banner")).to_contain_text(
        f"Run {name}: This token or key does not belong to the run of this URL"
    )
    expect(page.locator(".connection")).to_have_text("✕ Not shown")
    expect(page.locator(".loading")).to_have_count(0)
    page.get_by_role("link", name="Run default").click()
    expect(page.locator(VERSION)).to_have_text(version_of(site))
    if name == "other":
        page = new_tab.context.new_page()
        page.goto(f"{site.url}/#code={site.code('admin')}")
        page.wait_for_selector("main h1")
        page.goto(f"{site.url}/#/runs/other/")
        expect(page.locator(".first-run pre")).to_contain_text(f'Swarm("{site.url}/runs/other")')
        expect(page.locator(".first-run pre")).to_contain_text("token of this run")


@pytest.mark.parametrize("begun_by", ["first.js", "stream.js"])
def test_an_answer_about_the_run_that_was_left(new_tab: Tab, site: Site, begun_by: str) -> None:
    """The first requests of a page cannot be aborted; of later ones, some are answered when they are aborted."""
    page, held, nothing = new_tab.page, list[Route](), f"{site.url}/#/runs/nothing/"
    if begun_by == "stream.js":
        new_tab.open()
        arrive(page, nothing)
        expect(page.locator(".connection")).to_have_text("✕ Not shown")
    page.route(re.compile(r"^http://[^/]+/swarm/v1/waiting"), lambda route: held.append(route))
    with page.expect_response("**/swarm/v1/status*"), page.expect_response("**/swarm/v1/steps*"):
        if begun_by == "stream.js":
            arrive(page, f"{site.url}/#/")
        else:
            new_tab.open()
    arrive(page, nothing)
    expect(page.locator(".connection")).to_have_text("✕ Not shown")
    for route in held:
        with contextlib.suppress(Error):  # Aborted by now.
            route.continue_()
    page.wait_for_timeout(300)
    expect(page.get_by_role("link", name="Run default")).to_be_visible(timeout=1)
    expect(page.locator(VERSION)).to_have_count(0)


def test_what_changes_with_time_is_read_again(new_tab: Tab) -> None:
    page, asked = new_tab.page, list[str]()
    page.on("request", lambda sent: asked.append(urlsplit(sent.url).path.rpartition("/")[2]))

    def quiet(route: Route) -> None:  # The second stream is not answered.
        if asked.count("events") == 1:
            route.fulfill(content_type="text/event-stream", body=": connected\n\n: nothing new\n\n")

    page.route("**/events?*", quiet)
    new_tab.open()
    expect(page.locator(".connection")).to_contain_text("Reconnecting")
    while asked.count("events") < 2:
        page.wait_for_event("request")
    for name in ("status", "health", "waiting"):
        assert asked.count(name) == asked.count("steps") + 1


def test_an_empty_run_shows_the_lines_that_start_one(browser: Browser, tmp_path: Path) -> None:
    with served_site(tmp_path / "data", batches=0) as site, opened_tab(browser, site) as tab:
        page = tab.open()
        lines = page.locator(".first-run pre").inner_text()
        assert f'Swarm("{site.url}")' in lines
        compile(lines, "shown", "exec")
        site.do(site.run.batch())
        expect(page.locator(".first-run")).to_have_count(0)


@pytest.mark.thorough
def test_a_metric_that_is_nan_is_a_gap(browser: Browser, tmp_path: Path) -> None:
    def prepare(compute: ScriptedCompute) -> None:
        compute.metrics = {"policy/kl": 0.125}

    with served_site(tmp_path / "data", prepare=prepare) as site, opened_tab(browser, site) as tab:
        site.run.compute.metrics = {"policy/kl": float("nan")}
        site.do(site.run.batch())
        assert site.get("/steps")["metrics"]["policy/kl"] == [0.125, None]
        page = tab.open("/batches?metrics=policy")
        chart = page.get_by_role("slider", name="policy/kl, by step", exact=True)
        expect(chart).to_have_attribute("aria-valuetext", "step 2: policy/kl –")
        expect(page.locator("main")).not_to_contain_text("NaN")
