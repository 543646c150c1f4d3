"""The frame of the page: it loads, signs in with a code, shows the run, and navigates.

1. A one-time code opens the page, leaves the URL, and is used up. What the Overview shows is requested once.
2. Every view of the navigation opens. The table of the policies fits on a phone.
3. Without a session, the page says how to get one. A token opens one, and a wrong token is refused in words.
4. A view that was not loaded is loaded at the next try, and does not disturb the others. Views of stored runs name
   the command that shows them.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from playwright.sync_api import Request, expect

from tests.page.checks import hidden_width
from tests.page.chromium import Site, Tab
from tests.server.serving import VIEWER


def test_a_code_opens_the_page_and_is_used_up(new_tab: Tab, site: Site) -> None:
    code, asked = site.code(), list[str]()

    def note(sent: Request) -> None:
        parts = urlsplit(sent.url)
        if "at=" not in parts.query:  # Reads after an event name it.
            asked.append(parts.path.rpartition("/")[2])

    new_tab.page.on("request", note)
    new_tab.page.goto(f"{site.url}/#code={code}")
    expect(new_tab.page.locator("main h1")).to_have_text("Overview")
    expect(new_tab.page.locator("header.top .engine")).to_have_text("sampling")
    expect(new_tab.page.locator(".connection")).to_have_text("● Live")
    expect(new_tab.page.locator(".newest li").first).to_be_visible()
    for name in ("exchange", "status", "waiting", "health", "steps", "evaluations", "episodes"):
        assert asked.count(name) == 1, f"{name}: first.js begins it, and its response is taken"
    assert asked.index("exchange") < asked.index("status")
    assert "code" not in new_tab.page.url and code not in new_tab.page.content()


def test_a_used_code_keeps_the_session_of_the_tab_and_opens_no_other(new_tab: Tab, site: Site) -> None:
    code = site.code()
    for _ in range(2):
        new_tab.page.goto("about:blank")
        new_tab.page.goto(f"{site.url}/#code={code}")
        expect(new_tab.page.locator("main h1")).to_have_text("Overview")
    with new_tab.context.browser.new_context() as other:  # type: ignore[union-attr]
        page = other.new_page()
        page.goto(f"{site.url}/#code={code}")
        expect(page.get_by_role("alert")).to_contain_text("run `agentjet open` again")


def test_the_views_of_the_navigation_open(new_tab: Tab) -> None:
    page = new_tab.open()
    for name in ("Episodes", "Batches", "Swarm", "Overview"):
        page.click(f"nav >> text={name}")
        expect(page.locator("nav [aria-current]")).to_have_text(name)
        expect(page.locator("main h1")).to_be_visible()
        if name == "Swarm":
            page.set_viewport_size({"width": 390, "height": 844})
            assert hidden_width(page, "Policies") == 0


def test_a_view_that_was_not_loaded_is_tried_again(new_tab: Tab) -> None:
    page = new_tab.open()
    addresses = list[str]()  # Of scripts, from now on.
    page.on("request", lambda sent: addresses.append(sent.url) if ".js" in sent.url else None)
    expect(page.locator(".connection")).to_have_text("● Live")  # A change to live would load the view, too.
    scripts = "**/*.js*"
    page.route(scripts, lambda route: route.abort())
    page.click("nav >> text=Swarm")
    expect(page.get_by_role("alert")).to_contain_text("The view was not loaded")
    page.click("nav >> text=Overview")
    expect(page.locator("main h1")).to_have_text("Overview")
    expect(page.get_by_role("alert")).to_have_count(0)
    tried = set(addresses)  # A question that Overview had still open ends as a failed request, too.
    with page.expect_event("requestfailed", lambda sent: ".js" in sent.url and sent.url not in tried):
        page.click("nav >> text=Swarm")
    page.unroute(scripts)
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("main h1")).to_have_text("Swarm")
    assert len(addresses) == len(set(addresses)), "Chromium 150 never requests an address again that failed"
    assert all("ERR_FAILED" in problem for problem in new_tab.take_problems())


def test_a_view_of_stored_runs_names_its_command(new_tab: Tab) -> None:
    page = new_tab.open("/compare")
    expect(page.locator("main")).to_contain_text("agentjet look DATA_DIR shows it")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_token_opens_a_session(new_tab: Tab, site: Site) -> None:
    page = new_tab.page
    page.goto(site.url)
    expect(page.locator("pre")).to_have_text("agentjet open")
    page.click("summary")
    page.fill("[name=token]", "not-a-token-of-this-server")
    page.click("text=Open a session")
    expect(page.get_by_role("alert")).to_contain_text("is not a token of this server")
    expect(page.get_by_role("alert")).not_to_contain_text("Authorization")
    page.fill("[name=token]", VIEWER)
    page.click("text=Open a session")
    expect(page.locator("main h1")).to_have_text("Overview")
    assert VIEWER not in page.evaluate("JSON.stringify([sessionStorage, localStorage])")
