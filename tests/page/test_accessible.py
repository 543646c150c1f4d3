"""axe-core finds nothing serious or critical: every view, light and dark, 1280 and 320 px wide.

1. The eight views, then what a click adds to them: dialogs, unfolded parts, tokens.
2. The states of a view: nothing has run, nothing is kept, no such thing, no session.

All of it is thorough: axe takes a second a view.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.page.checks import LOOKS, give_look, overflow, violations
from tests.page.chromium import Site, Tab, opened_tab, served_site
from tests.page.hostile import few, hostile_site
from tests.page.test_every_view import UNFOLD, VIEWS, long_episode

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A small run with some hostile names."""
    with hostile_site(tmp_path_factory.mktemp("hostile") / "data", few()) as served:
        yield served


USUAL = ("light", "dark narrow")
"""Both colours and both widths."""


def findings(page: Page, looks: Iterable[str] = USUAL) -> list[str]:
    """Returns findings, and views that are wider than the window, each with the look that has it."""
    found = []
    for look in looks:
        give_look(page, look)
        found += [f"{look}: {one}" for one in violations(page)]
        if overflow(page) > 0:
            found.append(f"{look}: wider than the window by {overflow(page)} px")
    return found


@pytest.mark.parametrize("view", VIEWS)
def test_a_view(tab: Tab, site: Site, view: str) -> None:
    assert findings(tab.settled(VIEWS[view](site), role="admin"), LOOKS) == []


@pytest.mark.parametrize("view", [view for view in VIEWS if view != "failed episode"])
def test_an_unfolded_view(tab: Tab, site: Site, view: str) -> None:
    page = tab.settled(VIEWS[view](site), role="admin")
    page.evaluate(UNFOLD)
    give_look(page, "dark narrow")
    assert violations(page) == []


def test_tokens(tab: Tab, site: Site) -> None:
    page = tab.settled(f"/episodes/{long_episode(site)}?overlay=probability", role="admin")
    page.keyboard.press("l")
    expect(page.locator("dl[data-token]")).to_be_visible()
    assert findings(page) == []


def test_dialogs(tab: Tab) -> None:
    page = tab.settled("/swarm", role="admin")
    for button in ("Save a checkpoint", "Export a policy", "Change weights", "Keyboard shortcuts", "Abort"):
        page.get_by_role("button", name=button).first.click()
        expect(page.get_by_role("dialog").locator(".state.loading")).to_have_count(0)
        give_look(page, "dark narrow")
        assert violations(page) == [], button
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)


def test_views_without_data(browser: Browser, tmp_path: Path) -> None:
    with served_site(tmp_path / "data", batches=0) as site, opened_tab(browser, site) as tab:
        tab.page.goto(site.url)
        expect(tab.page.locator("main h1")).to_have_text("AgentJet")
        assert findings(tab.page) == []
        tab.page.goto("about:blank")
        for path in ("/", "/episodes", "/batches", "/swarm", "/episodes/none", "/groups/7", "/batches/7", "/nowhere"):
            page = tab.settled(path)
            give_look(page, "narrow")
            assert violations(page) == [] and overflow(page) <= 0, path
