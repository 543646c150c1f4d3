"""Every view, over a run whose names, messages, tokens, metrics, roles and reasons are more than 300 hostile strings.

1. Nothing is executed, no element is made from data, nothing is requested elsewhere, the policy reports nothing.
2. Every number that names its place in the API is the number there.
3. No view is wider than the window.
4. The checks can fail: each reports what it is for.

All of it is thorough: `test_hostile.py` has the Overview and all strings over a smaller run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.page.checks import DEFINE_PWNED, give_look, overflow, unexpected_elements, violations, wrong_facts
from tests.page.chromium import Site, Tab, is_foreign, opened_tab, served_site
from tests.page.hostile import hostile_site, packed

pytestmark = pytest.mark.thorough

VIEWS: dict[str, Callable[[Site], str]] = {
    "overview": lambda site: "/",
    "episodes": lambda site: "/episodes",
    "episode": lambda site: f"/episodes/{long_episode(site)}",
    "failed episode": lambda site: f"/episodes/{site.get('/episodes?status=aborted')['episodes'][0]['episode_id']}",
    "group": lambda site: "/groups/0",
    "batches": lambda site: "/batches",
    "batch": lambda site: f"/batches/{site.get('/batches')['batches'][0]['id'] + 1}",
    "swarm": lambda site: "/swarm",
}
UNFOLD = """for (const one of document.querySelectorAll("button[aria-expanded=false], main summary")) one.click()"""

SCROLL = """async () => {
  const table = document.querySelector(".table");
  for (table.scrollTop = 0; table.scrollTop + table.clientHeight < table.scrollHeight; table.scrollTop += 400) {
    await new Promise((done) => requestAnimationFrame(done));
  }
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The run of `tests.page.hostile`."""
    with hostile_site(tmp_path_factory.mktemp("hostile") / "data", packed()) as served:
        yield served


@pytest.fixture(scope="module")
def viewer(browser: Browser, site: Site) -> Iterator[Tab]:
    """The tab that shows every view, in the session of an admin."""
    with opened_tab(browser, site) as tab:
        tab.context.add_init_script(DEFINE_PWNED)
        yield tab


def long_episode(site: Site) -> str:
    """The id of the episode with all strings."""
    found = site.get("/episodes?sort=-num_tokens&limit=1")["episodes"][0]
    return str(found["episode_id"])


def check_view(page: Page, site: Site) -> None:
    """Checks 1 to 3, on a page that shows a view."""
    for look in ("dark narrow", "light"):
        give_look(page, look)
        assert overflow(page) <= 0
    facts, wrong = wrong_facts(page, site.get)
    assert wrong == [] and facts > 0
    if page.locator(".table").count():  # Its rows are drawn when they come into view.
        page.evaluate(SCROLL)
    page.evaluate(UNFOLD)
    assert unexpected_elements(page) == []


@pytest.mark.parametrize("view", VIEWS)
def test_a_view(tab: Tab, site: Site, view: str) -> None:
    check_view(tab.settled(VIEWS[view](site), role="admin"), site)


FAULTS = {
    "an element": "document.querySelector('main').append(document.createElement('img'))",
    "a link": "document.querySelector('main a').setAttribute('href', 'javascript:x')",
    "a string that ran": "window.pwned()",
}


def test_each_check_can_fail(browser: Browser, tmp_path: Path) -> None:
    with served_site(tmp_path / "data", open_batch=True) as site, opened_tab(browser, site) as tab:
        tab.context.add_init_script(DEFINE_PWNED)
        page = tab.settled()
        for name, script in FAULTS.items():
            assert unexpected_elements(page) == [], name
            page.evaluate(script)
            assert len(unexpected_elements(page)) == 1, name
            page.reload()
            page = tab.settled()
        fact = "document.querySelector('[data-fact=\"/status#episodes.live\"]')"
        for script in (f"{fact}.firstChild.data = '17'", f"{fact}.setAttribute('value', '17')"):
            assert wrong_facts(page, site.get)[1] == []
            page.evaluate(script)
            assert len(wrong_facts(page, site.get)[1]) == 1
            page.reload()
            page = tab.settled()
        assert violations(page) == [] and overflow(page) == 0
        page.evaluate("document.querySelector('main h1').style.cssText = 'width: 3000px; color: #eee'")
        assert [one.split()[0] for one in violations(page)] == ["color-contrast"] and overflow(page) > 1000
        assert tab.problems == [] and is_foreign("http://evil.invalid/", "127.0.0.1:80")
        page.evaluate("fetch('http://evil.invalid/').catch(() => {})")
        page.evaluate("document.querySelector('main').setAttribute('style', 'color: red')")
        for script in ("innerHTML = '<b>'", "setAttribute('onclick', 'x')"):
            page.evaluate(f"() => {{ try {{ document.querySelector('main').{script}; }} catch {{}} }}")
        page.goto("about:blank")  # What the page reports arrives before this.
        found = " ".join(tab.take_problems())
        assert "CSP connect-src http://evil.invalid" in found and "CSP style-src" in found
        assert all(part in found for part in ("CSP require-trusted-types-for", "'TrustedHTML'", "'TrustedScript'"))
