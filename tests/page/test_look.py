"""`agentjet look` in a browser. Pins:

1. a data dir whose server was killed by SIGKILL shows the same text as the live page did, but for the server itself;
2. Runs, Compare and Studies: every number is the one of the API, nothing is made from hostile names, axe finds nothing
   serious, and no view is wider than the window;
3. a study shows each claim with its intervals look by look, each seed, and a verdict;
4. runs are chosen, compared and opened; an unreadable one shows why;
5. a wrong code and a place without runs are explained;
6. a journal that a server is writing is read again when it has grown;
7. what a stored run cannot have is not shown: lines that start it, silences, the time since it began.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from agentjet.client.threads import LoopThread
from agentjet.protocol import BeginRequest, EvaluationRequest
from agentjet.research.journal import StudyLog
from tests.fakes import running
from tests.page.checks import DEFINE_PWNED, hidden_width, overflow, unexpected_elements, violations, wrong_facts
from tests.page.chromium import arrive, loaded, served_site
from tests.page.looking import LookSite, look_site
from tests.research.reported import VERDICTS, rich_book

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "docs" / "studies"
HOSTILE = "<img src=x onerror=pwned()>\u202eevil"
DARK, LIGHT = {"color_scheme": "dark"}, {"color_scheme": "light"}
WIDE, NARROW = {"viewport": {"width": 1280, "height": 900}}, {"viewport": {"width": 320, "height": 800}}


async def trained(data_dir: Path, lr: float, batches: int) -> None:
    async with running(data_dir, job={"optimizer": {"lr": lr}}) as up:
        for number in range(1, batches + 1):
            await up.batch()
            for held_out in (True, False):
                score = EvaluationRequest(
                    policy_version=number, score=number / 8, num_tasks=1, num_episodes=1, name="sums", held_out=held_out
                )
                await up.gateway.versions.record_evaluation(score)


def hostile_study(folder: Path) -> None:
    """The study with every verdict, under names that are markup."""
    folder.mkdir()
    with StudyLog(folder / "study.sqlite") as journal:
        book = rich_book()
        text = json.dumps(book.study.to_json() if book.study else {})
        assert "<help>" in text and "d|<i>" in text
        journal.entry("study", json.loads(text))
        for trial in book.trials.values():
            journal.entry("intent", {"key": trial.id, "trial": trial.to_json()})
            for outcome in book.outcomes.get(trial.id, ()):
                journal.entry("outcome", outcome.to_json())
        for name, content in book.decisions.items():
            journal.decide(name, content)
        for diagnoses in book.diagnoses.values():
            for diagnosis in diagnoses:
                journal.entry("diagnosis", {**diagnosis.to_json(), "seen": HOSTILE})


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs that can be read and one that cannot, and studies."""
    root = tmp_path_factory.mktemp("look")
    loop = LoopThread()  # Playwright has a loop in this thread.
    for name, lr, batches in (("first", 1e-5, 3), ("second", 2e-5, 2), ("third", 2e-5, 1)):
        loop.run(trained(root / name, lr, batches))
    loop.stop()
    with closing(sqlite3.connect(root / "third" / "runs" / "default" / "journal.sqlite")) as db, db:
        db.execute("UPDATE meta SET value = 999 WHERE key = 'schema_version'")
    hostile_study(root / "hostile")
    return [root, STUDIES]


@pytest.fixture
def look(browser: Browser, places: list[Path]) -> Iterator[LookSite]:
    with look_site(browser, *places) as site:
        yield site


TEXT = "document.querySelector('main').innerText.replace(/live(, lease until .*|…)/g, 'live')"
"""The text of a view without leases, which only the server of a run knows."""


def text_of(page: Page) -> str:
    if "/episodes/" in page.url:  # The links to the group come last.
        expect(page.get_by_text("group of")).to_be_visible()
    text: str = page.evaluate(TEXT)
    return text


VIEWS = ("/batches", "/batches/2", "/episodes", "/groups/1", "/episodes/{id}")


@pytest.mark.thorough
def test_a_killed_run_shows_the_same_text(browser: Browser, tmp_path: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.page.killed", str(tmp_path / "data")],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    try:
        assert server.stdout is not None
        told = json.loads(server.stdout.readline())
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{told['url']}/#code={told['code']}")
        expect(page.locator(".connection")).to_have_text("● Live")
        listed = page.evaluate(
            "fetch('/swarm/v1/episodes', {headers: {Authorization: 'Bearer ' + JSON.parse("
            "sessionStorage['agentjet.session']).key}}).then((one) => one.json())"
        )
        episode = next(one["episode_id"] for one in listed["episodes"] if one["trained_in"] == 2)
        views = [view.format(id=episode) for view in VIEWS]
        live = {view: text_of(loaded(arrive(page, f"{told['url']}/#{view}"))) for view in views}
        learning = loaded(arrive(page, f"{told['url']}/#/")).locator("main section").first.inner_text()
        context.close()
    finally:
        os.kill(server.pid, signal.SIGKILL)
        server.communicate()
    with look_site(browser, tmp_path / "data") as site:
        for view in views:
            assert text_of(site.open(f"/runs/data{view}")) == live[view], view
            assert len(live[view]) > 100
        page = site.open("/runs/data/")
        assert page.locator("main section").first.inner_text() == learning
        expect(page.locator("main")).to_contain_text("read from its folder")


@pytest.mark.thorough
def test_a_journal_that_grows_is_read_again(browser: Browser, tmp_path: Path) -> None:
    with served_site(tmp_path / "data") as live, look_site(browser, tmp_path / "data") as site:
        page = site.open("/runs/data/batches")
        version = page.locator('header [data-fact="/status#policy_version"]')
        expect(version).to_have_text("1")
        expect(page.locator("header .run")).to_have_text("run data")
        live.do(live.run.batch())
        expect(version).to_have_text("2")
        expect(page.get_by_role("region", name="Newest batches").locator("tbody tr")).to_have_count(2)


@pytest.mark.thorough
@pytest.mark.parametrize("colours", [DARK, LIGHT], ids=["dark", "light"])
@pytest.mark.parametrize("window", [NARROW, WIDE], ids=["narrow", "wide"])
def test_every_view(browser: Browser, places: list[Path], colours: Any, window: Any) -> None:
    with look_site(browser, *places, **colours, **window) as site:
        site.page.add_init_script(DEFINE_PWNED)
        for view in ("/runs", "/compare", "/studies", "/studies/hostile", "/studies/digits"):
            page = site.open(view)
            number, wrong = wrong_facts(page, site.get)
            assert wrong == [] and number > 0, view
            assert unexpected_elements(page) == [], view
            assert violations(page) == [], view
            assert overflow(page) <= 0, view


def test_a_study(look: LookSite) -> None:
    page = look.open("/studies/hostile")
    expect(page.locator("h1")).to_have_text("Which of b, c and d <help>, against a | alone?")
    badges = page.locator(".claim .badge:first-of-type").all_inner_texts()
    assert badges == [verdict.replace("_", " ") for verdict in VERDICTS]
    assert page.locator(".claim").first.locator("tbody tr").count() >= 1
    expect(page.locator(".seeds .diverged").first).to_contain_text("✗")
    expect(page.locator("main")).to_contain_text("<img src=x onerror=pwned()>⟨U+202E⟩evil")
    page.locator("summary").first.click()
    expect(page.get_by_role("region", name="Trials").locator("tbody tr").first).to_contain_text("T1")
    page = look.open("/studies/none")
    expect(page.locator("main")).to_contain_text("No such study")


def test_runs_are_chosen_compared_and_opened(look: LookSite) -> None:
    page = look.open("/runs")
    expect(page.locator("tbody tr").nth(2)).to_contain_text("journal schema 999")
    assert hidden_width(page, "Runs") == 0
    for box in page.get_by_role("checkbox").all():
        box.check()
    page.get_by_role("link", name="Compare the 2 chosen runs").click()
    expect(page.locator("main h1")).to_have_text("Compare")
    expect(page.locator("main")).to_contain_text("These runs differ in one setting")
    table = page.get_by_role("region", name="Settings that differ")
    assert table.locator("tbody tr").all_inner_texts() == ["job.optimizer.lr\t0.00001\t0.00002"]
    page.get_by_label("Metric").select_option("batch/episodes")
    expect(page.locator("figure h3").first).to_have_text("batch/episodes")
    assert "metric=batch%2Fepisodes" in page.url
    page.get_by_role("checkbox").nth(1).uncheck()
    expect(page.get_by_role("region", name="Figures").locator("thead th")).to_have_count(1)
    page.get_by_role("link", name="second").or_(page.get_by_role("link", name="first")).first.click()
    expect(page.locator("main h1")).to_have_text("Overview")
    assert "#/runs/first" in page.url
    page = look.open("/runs/third/")
    expect(page.locator(".banner")).to_contain_text("Run third: ")
    expect(page.get_by_role("link", name="All runs")).to_be_visible()


def test_scores_of_other_tasks_are_other_curves(browser: Browser, tmp_path: Path) -> None:
    async def evaluated(data_dir: Path, *lists: str) -> None:
        async with running(data_dir) as up:
            await up.batch()
            for task_list in lists:
                fields: dict[str, Any] = {"name": "evaluation", "task_list": task_list, "held_out": False}
                score = EvaluationRequest(policy_version=1, score=0.5, num_tasks=4, num_episodes=4, **fields)
                await up.gateway.versions.record_evaluation(score)

    loop = LoopThread()
    loop.run(evaluated(tmp_path / "both", "4 tasks, aa", "4 tasks, bb"))
    loop.run(evaluated(tmp_path / "one", "4 tasks, aa"))
    loop.stop()
    with look_site(browser, tmp_path) as site:
        titles = site.open("/compare").locator("figure h3")
        expect(titles).to_have_text(["reward/mean", "evaluation (4 tasks, aa)", "evaluation (4 tasks, bb)"])
        expect(site.page.locator("main")).to_contain_text("Not compared, because the tasks differ: scores of")
        overview = site.open("/runs/both/").locator("main")
        for tasks in ("aa", "bb"):
            expect(overview).to_contain_text(f"evaluation (4 tasks, {tasks})")


def test_a_phone_shows_why_a_run_cannot_be_read(browser: Browser, places: list[Path]) -> None:
    with look_site(browser, *places, viewport={"width": 390, "height": 844}) as site:
        page = site.open("/runs")
        shown = page.locator("div.prose").bounding_box()
        assert shown is not None and shown["x"] + shown["width"] <= 390
        expect(page.get_by_role("columnheader", name="model")).to_be_hidden()
        for view, tables in (("/runs", ["Runs"]), ("/studies", ["Studies"]), ("/studies/hostile", ["Arms", "Trials"])):
            page = site.open(view)
            for details in page.locator("main > details, main .panel > details").all():
                details.evaluate("(one) => { one.open = true; }")
            for name in tables:
                assert hidden_width(page, name) == 0, name
        box = site.open("/studies/digits").get_by_role("columnheader", name="verdict").first.bounding_box()
        assert box is not None and box["x"] + box["width"] <= 390


def test_what_a_stored_run_cannot_have(browser: Browser, tmp_path: Path) -> None:
    async def left(data_dir: Path, tasks: int) -> None:
        async with running(data_dir) as up:
            for number in range(tasks):
                await up.gateway.begin(BeginRequest(task_id=f"t{number}", client_id="c", wait=5))

    loop = LoopThread()
    for name, tasks in (("empty", 0), ("begun", 1)):
        loop.run(left(tmp_path / name, tasks))
    loop.stop()
    with look_site(browser, tmp_path) as site:
        page = site.open("/runs/empty/")
        expect(page.locator(".first-run")).to_contain_text("No episode of this stored run has begun.")
        expect(page.locator(".first-run pre")).to_have_count(0)
        page = site.open("/runs/begun/")
        expect(page.locator(".cell.live").first).to_be_visible()
        for text in ("Longest without a call", "up for"):
            expect(page.locator("main")).not_to_contain_text(text)
        expect(site.open("/runs/empty/swarm").locator("main")).to_contain_text("Stored runs do not have their clients")


def test_a_wrong_code_and_studies_alone(browser: Browser) -> None:
    with look_site(browser, STUDIES) as site:
        site.page.goto(f"{site.url}/#code=wrong")
        expect(site.page.locator("main")).to_contain_text("open the one it printed")
        site.page.goto("about:blank")
        expect(site.open("/runs").locator("main")).to_contain_text("No run was given")
        expect(site.open("/compare").locator("main")).to_contain_text("fewer than two runs")
