"""The view Episodes, over a list of 600 that the test answers.

1. Hundreds of rows scroll, and few are elements.
2. Filters are the query of the URL: a form, a cell and a chip change it, and the list asks the API for them.
3. j, k, Enter and "w" reach the worst episode; back shows the same row again.
4. Five keys lead from the Overview to the least likely token of the worst episode.
5. A list that one left before it came is asked for again.
6. No match, a refused filter and no episode at all are said in words.
7. A long id is shown by its end, and columns without a value are left out.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

from playwright.sync_api import Page, expect

from tests.page.chromium import Tab, arrive
from tests.page.transcripts import Json, answering, call, tree, view

ROWS = [view(number) for number in range(599, -1, -1)]
FIELDS = {"client": "client_id", "task": "task_id", "batch": "trained_in"}


def listed(query: dict[str, str]) -> Json:
    """Answers `GET /episodes` as the server does."""
    equal = {FIELDS.get(name, name): value for name, value in query.items() if name in ("status", "task_set", "task")}
    found = [row for row in ROWS if all(str(row[name]) == value for name, value in equal.items())]
    if "text" in query:
        found = found[:7]
    if query.get("sort") == "reward":
        found = sorted((row for row in found if row["reward"] is not None), key=lambda row: row["reward"])
    first = (
        1 + next(i for i, row in enumerate(found) if row["episode_id"] == query["before"]) if "before" in query else 0
    )
    page = found[first : first + int(query["limit"])]
    more = first + len(page) < len(found)
    total = len(found) if "count" in query else None
    return {"episodes": page, "next": page[-1]["episode_id"] if more else None, "total": total}


def opened(tab: Tab, path: str = "/episodes", **answers: Any) -> tuple[Page, list[str]]:
    """Opens the list; returns the page and the requests it makes."""
    asked = answering(tab.page, {"/episodes": listed, **answers})
    page = tab.open(path)
    return page, asked


def test_many_rows_are_scrolled_by_few_elements(tab: Tab) -> None:
    page, _ = opened(tab)
    table = page.get_by_role("grid", name="Episodes")
    for shown in (200, 400, 600):
        expect(page.locator(".view-head")).to_contain_text(f"{shown:,} of 600")
        table.evaluate("table => { table.scrollTop = table.scrollHeight; }")
    table.evaluate("table => { table.scrollTop = table.scrollHeight; }")
    expect(page.locator("text=ep00000")).to_be_visible()
    assert page.locator(".table-row").count() < 80
    expect(table).to_have_attribute("aria-rowcount", "601")


def test_filters_are_the_query_of_the_url(tab: Tab) -> None:
    page, asked = opened(tab, "/episodes?status=aborted")
    expect(page.locator(".view-head")).to_contain_text("of 120")
    assert any("status=aborted" in request for request in asked)
    page.locator(".table-row").first.get_by_text("math", exact=True).click()
    expect(page.locator(".chips")).to_contain_text("Task set: math")
    assert page.url.endswith("#/episodes?status=aborted&task_set=math")
    page.get_by_label("Remove the filter status").click()
    expect(page.locator(".view-head")).to_contain_text("of 300")
    page.keyboard.press("f")
    page.get_by_label("Task", exact=True).fill("q3")
    page.get_by_role("button", name="Apply").click()
    expect(page.locator(".chips")).to_contain_text("Task: q3")
    page.go_back()
    expect(page.locator(".chips")).not_to_contain_text("Task: q3")


def test_episodes_are_found_by_the_text_of_their_messages(tab: Tab) -> None:
    page, asked = opened(tab)
    page.wait_for_selector(".table-row")
    page.keyboard.press("f")
    page.get_by_label("Text of messages and rewards").fill('say "2 & 3"')
    page.get_by_role("button", name="Apply").click()
    expect(page.locator(".chips")).to_contain_text('Text of messages and rewards: say "2 & 3"')
    expect(page.locator(".view-head")).to_contain_text("7 of 7")  # The list is asked for after the chips are drawn.
    assert any(parse_qs(urlsplit(request).query).get("text") == ['say "2 & 3"'] for request in asked)


def test_keys_reach_the_worst_episode_and_back_shows_the_same_row(tab: Tab) -> None:
    one = tree(596, [call("c1", ["hi"], [" yes"])])
    worst = sorted((row for row in ROWS if row["reward"] is not None), key=lambda row: row["reward"])
    path = f"/episodes/{worst[2]['episode_id']}"
    page, _ = opened(tab, **{path: lambda query: {**one, "episode_id": worst[2]["episode_id"]}})
    page.wait_for_selector(".table-row")
    page.keyboard.press("w")
    expect(page.locator(".table-row").first).to_contain_text(worst[0]["episode_id"])
    for key in ("j", "j", "j", "k"):
        page.keyboard.press(key)
    expect(page.locator("[aria-selected=true]")).to_contain_text(worst[2]["episode_id"])
    page.keyboard.press("Enter")
    expect(page.locator("main h1")).to_have_text(f"Episode {worst[2]['episode_id']}")
    page.go_back()
    expect(page.locator("[aria-selected=true]")).to_contain_text(worst[2]["episode_id"])


def test_five_keys_lead_to_the_least_likely_token_of_the_worst_episode(tab: Tab) -> None:
    worst = next(row["episode_id"] for row in ROWS if row["reward"] == 0.0)
    one = tree(1, [call("c1", ["hi"], [" yes", " no"], logprobs=[-0.5, -3.5])], episode_id=worst, group_id=None)
    page, _ = opened(tab, "/", **{f"/episodes/{worst}": lambda query: one})
    page.keyboard.press("g")
    page.keyboard.press("e")
    expect(page.locator(".table-row").first).to_contain_text(ROWS[0]["episode_id"])
    page.keyboard.press("w")
    expect(page.locator(".table-row").first).to_contain_text(worst)
    page.keyboard.press("Enter")
    expect(page.locator("main h1")).to_have_text(f"Episode {worst}")
    page.wait_for_selector(".call")
    page.keyboard.press("l")
    expect(page.locator("dl[data-token='2']")).to_contain_text("-3.5")


def test_ids_differ_and_empty_columns_are_left_out(tab: Tab) -> None:
    ids = [f"ep_01a2096a180{number:016x}" for number in (1, 2)]
    rows = [view(number, episode_id=name, task_set="", mode="eval", trained_in=None) for number, name in enumerate(ids)]
    page, _ = opened(tab, **{"/episodes": lambda query: {"episodes": rows, "next": None, "total": 2}})
    shown = page.locator(".table-row [role=gridcell]:first-child a")
    expect(shown).to_have_text(["…00000001", "…00000002"])
    assert [one.get_attribute("title") for one in shown.all()] == ids
    expect(page.get_by_role("columnheader", name="Set")).to_have_count(0)
    expect(page.get_by_role("columnheader", name="Code")).to_have_count(1)
    expect(page.locator(".table-row").first).to_contain_text("evaluation")


def test_an_empty_list_and_a_refused_filter_are_said_in_words(tab: Tab) -> None:
    page, _ = opened(tab, "/episodes?task=none")
    expect(page.locator("main")).to_contain_text("No episode has all of these filters.")
    page, _ = opened(tab, "/episodes", **{"/episodes": lambda query: None})
    expect(page.get_by_role("alert")).to_contain_text("There is no such episode.")
    answering(page, {"/episodes": lambda query: {"episodes": [], "next": None, "total": 0}})
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("main")).to_contain_text("No episode has begun.")


def test_a_list_that_one_left_before_it_came_is_asked_for_again(tab: Tab) -> None:
    page = tab.open("/swarm")
    held = re.compile("/swarm/v1/episodes")
    page.route(held, lambda route: None)
    with page.expect_request(held):
        page.evaluate("location.hash = '#/episodes?mode=train'")
    arrive(page, f"{tab.site.url}/#/swarm")
    page.unroute(held)
    opened(tab, "/episodes?mode=train")
    expect(page.get_by_role("grid", name="Episodes")).to_be_visible()
