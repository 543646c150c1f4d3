"""The Overview and an episode, over a run with hostile names. `test_every_view.py` has every view and all names.

1. Hostile strings are shown as they are: only invisible characters are written by their code.
2. On the Overview nothing is executed, no element is made from data, the numbers are those of the API, and nothing is
   wider than the window.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.page.chromium import Site, Tab
from tests.page.hostile import STRINGS, few, hostile_site
from tests.page.test_every_view import UNFOLD, check_view, long_episode, viewer  # noqa: F401  # a fixture


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A small run with some hostile names, and an episode with all strings."""
    with hostile_site(tmp_path_factory.mktemp("hostile") / "data", few()) as served:
        yield served


def test_the_overview(tab: Tab, site: Site) -> None:
    check_view(tab.settled(role="admin"), site)


def test_hostile_strings_are_shown_as_they_are(tab: Tab, site: Site) -> None:
    assert len(STRINGS) >= 300
    page = tab.settled(f"/episodes/{long_episode(site)}", role="admin")
    page.evaluate(UNFOLD)
    expect(page.get_by_text("Show all: ")).to_have_count(0)
    shown = page.locator("main").text_content() or ""
    visible = [one for one in STRINGS if one.isprintable()]
    assert [one for one in visible if one not in shown] == [] and len(visible) > 280
    assert "⟨U+202E⟩evil" in shown
