"""The view Overview, over answers that the test changes.

1. Batches that could teach nothing: an example with its answers, and what to look at.
2. A health rule that is not ok shows its remedy. After a fall of the rewards the rule has the example, too.
3. Episodes that were no longer needed are not drawn as failures. Evaluations are marked.
4. The counts have every end of an episode.
5. The live episode that is longest without a call has its countdowns; one in a call is not named.
6. `w` and a button open the worst episode of the newest batch.
7. Scores are curves by name beside the reward, also that of the version before the first step.
8. A name shows tabs and newlines as their names.
9. Fronts have their calls, load, lag and restarts.
"""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from agentjet.protocol import ScoredAnswer, ZeroVariance
from tests.page.checks import unexpected_elements, wrong_facts
from tests.page.chromium import Site, Tab
from tests.page.transcripts import Json, answering, view


def overview(tab: Tab, **answers: Json | list[Json]) -> Page:
    """The Overview, loaded anew with these answers of control routes."""
    answering(tab.page, {f"/{name}": lambda query, answer=answer: answer for name, answer in answers.items()})
    tab.open("/episodes").reload()
    return tab.open()


def test_batches_that_teach_nothing_are_shown_with_advice(tab: Tab, site: Site) -> None:
    answers = [ScoredAnswer(answer="<b>17</b>", reward=0.0, count=3), ScoredAnswer(answer="18", reward=0.0, count=1)]
    found = ZeroVariance(batches=4, truncated=0.25, task_id="sum-1", prompt="8 + 9", answers=answers)
    status = {**site.get("/status"), "zero_variance": found.model_dump()}
    page = overview(tab, status=status)
    panel = page.get_by_role("status").filter(has_text="Nothing to learn from")
    expect(panel).to_contain_text("4 batches in a row could teach nothing")
    expect(panel).to_contain_text("For example task sum-1: 8 + 9")
    expect(panel.get_by_role("listitem").first).to_have_text("reward 0, 3 times: <b>17</b>")
    expect(panel).to_contain_text("the limit of answers: 25% of them were cut at job.max_tokens")
    expect(panel).to_contain_text("the reward: the answers differ")
    assert wrong_facts(page, lambda route: status if route == "/status" else site.get(route))[1] == []
    assert unexpected_elements(page) == []


def test_a_rule_has_its_remedy_and_after_a_fall_of_the_rewards_the_example(tab: Tab, site: Site) -> None:
    answers = [ScoredAnswer(answer="aaa", reward=0.0, count=4)]
    found = ZeroVariance(batches=4, truncated=0, task_id="sum-1", prompt="8 + 9", answers=answers, rewards_fell=True)
    status = {**site.get("/status"), "zero_variance": found.model_dump()}
    status["episodes"] = {**status["episodes"], "aborted": 5, "expired": 0, "not_needed": 16}
    text = "Take `job.group_size` up: see `docs/recipes.md`. <i>"
    rule = {"name": "reward", "level": "bad", "text": "rewards fell", "docs": "docs/health.md#reward", "remedy": text}
    health = {**site.get("/health"), "rules": [rule]}
    page = overview(tab, status=status, health=health)
    rules = page.locator(".rules").first
    expect(rules).to_contain_text("rewards fell")
    expect(rules).to_contain_text("For example task sum-1: 8 + 9")
    expect(rules).to_contain_text("reward 0, 4 times: aaa")
    expect(page.get_by_text("Nothing to learn from")).to_have_count(0)
    page.get_by_text("What to do: reward").click()
    expect(rules.locator("details")).to_contain_text("Take job.group_size up: see docs/recipes.md. <i>")
    assert rules.locator("code").all_inner_texts() == ["job.group_size", "docs/recipes.md"]
    counts = page.locator(".counts-line")
    expect(counts).to_contain_text("5 aborted")
    expect(counts).to_contain_text("16 not needed")
    expect(counts).not_to_contain_text("expired")


def test_the_longest_without_a_call_has_its_countdowns(tab: Tab, site: Site) -> None:
    waiting = site.get("/waiting")
    cells = [
        {"episode_id": "one-in-a-call", "state": "live", "reward": None, "silent_seconds": 0.0, "expires_in": 999.0},
        {"episode_id": "of-a-stored-run", "state": "live", "reward": None, "silent_seconds": None, "expires_in": None},
    ]
    hung = {"episode_id": "hung", "state": "live", "reward": None, "silent_seconds": 7200.0, "expires_in": 3600.0}
    waiting["groups"] = [{**waiting["groups"][0], "cells": cells}]
    page = overview(tab, waiting=waiting)
    expect(page.locator(".waiting .groups .cell.live")).to_have_count(2)
    expect(page.locator(".waiting")).not_to_contain_text("Longest without a call")
    cells.append({**hung, "ends_in": 7199.0})
    page.reload()
    task = waiting["groups"][0]["task_id"]
    expect(page.locator(".waiting")).to_contain_text(
        re.compile(
            f"Longest without a call: hung of task {task}, 2 h.*; its lease ends in 59 min.*, the episode in 1 h 59 min"
        )
    )


def test_a_key_and_a_button_open_the_worst_episode_of_the_newest_batch(tab: Tab, site: Site) -> None:
    worst = site.get("/episodes?batch=0&sort=reward&limit=1")["episodes"][0]["episode_id"]
    page = tab.settled()
    page.keyboard.press("w")
    expect(page.locator("main h1")).to_have_text(f"Episode {worst}")
    tab.open().get_by_role("button", name="Worst episode of step 1").click()
    expect(page.locator("main h1")).to_have_text(f"Episode {worst}")


def test_rewards_differ_by_colour_and_groups_have_their_tasks_as_names(tab: Tab, site: Site) -> None:
    waiting = site.get("/waiting")
    cells = [{"episode_id": f"e{n}", "state": "finished", "reward": reward} for n, reward in enumerate((0.0, 0.5, 1.0))]
    group = {**waiting["groups"][0], "name": "3+4/1b2c3d4e/1", "cells": cells}
    page = overview(tab, waiting={**waiting, "groups": [group]})
    drawn = page.locator(".groups .cell.finished")
    expect(drawn).to_have_count(3)
    colours = [one.evaluate("cell => getComputedStyle(cell).backgroundColor") for one in drawn.all()]
    assert len(set(colours)) == 3
    expect(page.locator(".groups .name")).to_have_text("3+4, visit 2")
    group |= {"state": "closing", "size": 4}
    page.reload()
    expect(page.locator(".groups .counts")).to_have_text("3 finished, closing: `accept` of the recipe decides")
    expect(page.locator(".groups .cell.empty")).to_have_count(0)


def test_the_facts_have_the_time_left_and_the_machine(tab: Tab, site: Site) -> None:
    status = {**site.get("/status"), "ends_at_version": 11, "policy_version": 1}
    times = {"versions": [0, 1], "times": [1000.0, 1060.0], "metrics": {"batch/sampled_tokens": [30, 12]}}
    gpu = {"name": "H", "load": 0.5, "memory_used": 4e9, "memory_total": 8e9}
    machine = {"cores": 2, "cpu": 0.25, "memory_used": 6e9, "memory_total": 24e9, "gpus": [gpu]}
    facts = overview(tab, status=status, steps=times, machine=machine).locator(".counts-line")
    expect(facts).to_contain_text("about 10 min left")
    expect(facts).to_contain_text("42 tokens sampled and trained")
    expect(facts).to_contain_text("CPU 25 % of 2")
    expect(facts).to_contain_text("memory 6 GB of 24 GB")
    expect(facts).to_contain_text("GPU 0 50 %, 4 GB of 8 GB")


def test_scores_are_curves_by_name(tab: Tab, site: Site) -> None:
    steps = {"versions": [1, 2], "times": [0.0, 1.0], "metrics": {"reward/mean": [0.25, 0.5]}}
    given = [(0, "<b>sums</b>", False, 0.125), (0, "sums", True, 0.375), (2, "<b>sums</b>", False, 0.625)]
    facts = {"num_tasks": 1, "num_episodes": 1, "client_id": "c", "time": 0.0, "best": False, "undone": False}
    scores = [{"policy_version": v, "name": n, "held_out": h, "score": s, **facts} for v, n, h, s in given]
    page = overview(tab, steps=steps, evaluations=scores)
    panel = page.locator(".learning")
    expect(panel.locator(".chart-legend")).to_contain_text("held-out score 0.375")
    panel.get_by_text("as table").click()
    expect(panel.locator("tr")).to_have_count(4)
    rows = [row.inner_text().split("\t") for row in panel.locator("tr").all()]
    assert rows == [
        ["step", "training reward", "<b>sums</b>", "held-out score"],
        ["2", "0.5", "0.625", "–"],
        ["1", "0.25", "–", "–"],
        ["0", "–", "0.125", "0.375"],
    ]
    wanted = lambda route: steps if route == "/steps" else site.get(route)  # noqa: E731
    assert wrong_facts(page, wanted)[1] == [] == unexpected_elements(page)


def test_scores_are_shown_before_the_first_step(tab: Tab) -> None:
    score = {"policy_version": 0, "name": "sums", "held_out": False, "score": 0.125, "undone": False}
    steps = {"versions": [], "times": [], "metrics": {}}
    page = overview(tab, steps=steps, evaluations=[score])
    expect(page.locator(".learning .chart-legend")).to_contain_text("sums 0.125")


def test_a_name_shows_its_tabs_and_newlines(tab: Tab) -> None:
    rows = [view(1, task_id="two\nlines\tlong", mode="eval", status="live")]
    answering(tab.page, {"/episodes": lambda query: {"episodes": rows, "next": None, "total": 1}})
    newest = tab.open().locator(".newest li")
    expect(newest).to_contain_text("two⟨U+000A⟩lines⟨U+0009⟩long")
    expect(newest.locator(".badge")).to_have_text("eval")


def test_what_was_not_needed_is_not_drawn_as_a_failure(tab: Tab) -> None:
    rows = [view(4), view(9, reason="not needed: the client's run has its steps")]
    answering(tab.page, {"/episodes": lambda query: {"episodes": rows, "next": None, "total": 2}})
    newest = tab.open().locator(".newest li")
    expect(newest.nth(0).get_by_text("aborted")).to_have_class("bad")
    expect(newest.nth(1).get_by_text("aborted")).to_have_class("muted")
    table = tab.open("/episodes").get_by_role("grid", name="Episodes")
    expect(table.locator(".mark").nth(0)).to_have_class(re.compile("bad"))
    expect(table.locator(".mark").nth(1)).to_have_class(re.compile("muted"))


def test_fronts_are_counts_of_the_run(tab: Tab, site: Site) -> None:
    front = {"front": 0, "ready": True, "calls": 12, "load": 0.434, "lag": 0.0123, "starts": 2}
    fronts = [
        front,
        {**front, "front": 1, "ready": False, "starts": 1, "problem": "starts"},
        {**front, "front": 2, "starts": 1, "problem": "silent for 12 s"},
    ]
    status = {**site.get("/status"), "fronts": fronts}
    page = overview(tab, status=status)
    facts = page.locator(".counts-line")
    expect(facts).to_contain_text("front 0: 12 calls, 43.4 % of a core, lag 0.0123 s, 1 restart")
    expect(facts).to_contain_text("front 1: starts")
    expect(facts).to_contain_text("front 2: silent for 12 s")
    assert wrong_facts(page, lambda route: status if route == "/status" else site.get(route))[1] == []
    assert unexpected_elements(page) == []
