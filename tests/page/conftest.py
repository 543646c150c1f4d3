"""A Chromium for the tests of the page, and a served run beside it.

`browser` and `tab` are shared by the tests of a module, `new_tab` is a test's own. `site` is an in-process server with
scripted compute. A tab fails its test if the browser reports a failed script, a violation of the Content Security
Policy, or a request to another origin. The tests need a Chromium (`tests.needs`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.page.chromium import ARGUMENTS, Site, Tab, chromium_path, opened_tab, served_site


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.needs("browser"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium, for one file: no test of another package could run beside Playwright's event loop."""
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium_path(), args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with one learned batch and an open one."""
    with served_site(tmp_path_factory.mktemp("page") / "data", open_batch=True) as served:
        yield served


@pytest.fixture(scope="module")
def viewer(browser: Browser, site: Site) -> Iterator[Tab]:
    """A tab with a viewer's session, shared by the tests of a module: the page loads once."""
    with opened_tab(browser, site) as tab:
        yield tab


@pytest.fixture
def tab(viewer: Tab) -> Iterator[Tab]:
    """The shared tab, with the answers of the server. `tab.open` opens a view anew."""
    viewer.page.unroute_all()
    yield viewer
    assert viewer.take_problems() == []


@pytest.fixture
def new_tab(browser: Browser, site: Site) -> Iterator[Tab]:
    """A tab without a session and a history, which `tab.open` opens with a viewer's session."""
    with opened_tab(browser, site) as tab:
        yield tab


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder for a server of a test."""
    return tmp_path_factory.mktemp("own") / "data"
