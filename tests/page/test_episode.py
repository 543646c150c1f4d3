"""The views Episode and Group, over transcripts that the test answers.

1. An episode shows its conversation, its facts, the causes of its forks, the duration of each call, and why calls
   are not trained.
2. Overlays colour the right tokens. Keys choose them, the URL keeps them.
3. "l" finds the least likely tokens in rising order; arrows, a click and the panel name each token.
4. A character of several tokens, controls and bidi characters are shown, and positions stay right.
5. 10,000 tokens: few ranges are made, and those near the window only.
6. A group shows one forest, where siblings differ, and up to four side by side.
7. Calls that are not kept, an unknown episode and a live one are said in words.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.page.chromium import Tab, until
from tests.page.transcripts import Answer, Json, answering, call, long_tree, some_words, tree, view

PROMPT = ["<|im_start|>", "user", "\n", "What is", " 17", "?", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]
GROUP = "/groups/0"


def forked() -> Json:
    """An episode whose first call is continued, rewritten by the template, and retried."""
    size = len(PROMPT) + 6
    calls = [
        call(
            "a", PROMPT, ["<think>", "391", "</think>", " 3", "9", "1"], logprobs=[-0.1, -4.0, -0.2, -2.5, -0.01, -3.0]
        ),
        call(
            "b",
            ["\n", "ok", "\n"],
            [" done"],
            parent="a",
            kept=size,
            logprobs=[-0.5],
            allowed=[[1, 1]],
            versions=[[9, 1]],
        ),
        call("c", [" 391"], [" sure"], parent="a", kept=len(PROMPT), fork="template", logprobs=[None]),
        call(
            "d",
            [],
            [" lost"],
            parent="a",
            kept=len(PROMPT),
            fork="retry",
            orphan="undelivered",
            mask=[[0, 1]],
            logprobs=[-9.0],
        ),
    ]
    return tree(1, calls, metrics={"seconds": 2.5})


def members() -> list[Json]:
    """Four attempts: the first two share ten tokens of the answer, the third four, the fourth none."""
    shared = some_words(10, 1)
    answers = [[*shared, " A"], [*shared, " B", " C"], [*shared[:4], " D"], [" E"]]
    return [tree(number, [call("a", PROMPT, answer, seed=number)]) for number, answer in enumerate(answers)]


def group(trees: list[Json]) -> Json:
    """The group of these episodes, with advantages."""
    episodes = [{**view(number), "advantage": 0.5 - number % 2} for number in range(len(trees))]
    facts = {"id": 0, "name": "q0", "task_set": "math", "task_id": "q0", "state": "batched", "reason": "", "batch": 0}
    return {**facts, "code_version": "c3", "episodes": episodes}


def opened(tab: Tab, path: str, trees: list[Json], **answers: Answer) -> Page:
    """Opens a view over these episodes, which are group 0."""
    known: dict[str, Answer] = {f"/episodes/{one['episode_id']}": lambda query, one=one: one for one in trees}  # type: ignore[misc]
    answering(tab.page, {GROUP: lambda query: group(members()), **known, **answers})
    return tab.open(path)


def painted(page: Page, tone: str) -> list[str]:
    """Returns the texts that have a tone, sorted."""
    found: list[str] = page.evaluate(
        """tone => [...(CSS.highlights.get(tone) ?? [])].map((range) => (
             range.startContainer.data.slice(range.startOffset, range.endOffset)))""",
        tone,
    )
    return sorted(found)


def wait_painted(page: Page, tone: str) -> None:
    until(page, "tone => CSS.highlights.get(tone)?.size", tone)


def test_an_episode_shows_its_conversation_and_the_causes_of_its_forks(tab: Tab) -> None:
    page = opened(tab, "/episodes/ep00001", [forked()])
    expect(page.locator(".call")).to_have_count(4)
    expect(page.locator("#call-0")).to_contain_text("What is 17?")
    expect(page.locator("#call-1")).to_contain_text("Continues call 1.")
    expect(page.locator("#call-2")).to_contain_text("Forks from call 1 after 11 tokens: the chat template writes")
    expect(page.locator("#call-2")).to_contain_text("Before: <think>391</think>")
    expect(page.locator("#call-3")).to_contain_text("Not trained: its answer did not reach the agent.")
    expect(page.locator("[data-fact='/groups/0#episodes[1].advantage']")).to_have_text("-0.5")
    expect(page.locator("[data-fact='/episodes/ep00001#metrics[\"seconds\"]']")).to_have_text("2.5")
    expect(page.get_by_role("list", name="Calls").get_by_role("button")).to_have_count(4)


def test_the_text_of_a_reward_is_shown_as_it_is(tab: Tab) -> None:
    text = "expected <b>30</b>\nby the judge"
    page = opened(tab, "/episodes/ep00001", [{**forked(), "reward_text": text}])
    expect(page.locator("p", has_text="Reward text:").locator("bdi")).to_have_text(text)


def test_each_call_shows_its_duration(tab: Tab) -> None:
    calls = [call("a", ["hi"], [" yes"], seconds=75.0), call("b", [], [" no"], parent="a", kept=3)]
    details = opened(tab, "/episodes/ep00001", [tree(1, calls)]).locator(".call header .muted")
    expect(details.first).to_have_text(re.compile(r", took 1 min 15 s$"))
    expect(details.last).not_to_contain_text("took")  # A call of an older journal has no duration.


def test_overlays_colour_tokens(tab: Tab) -> None:
    page = opened(tab, "/episodes/ep00001?overlay=author", [forked()])
    wait_painted(page, "kind-0")
    assert painted(page, "kind-0") == [" done", " sure", "<think>391</think> 391"]
    assert painted(page, "kind-1") == [" lost"]
    page.keyboard.press("3")
    wait_painted(page, "heat-6")
    assert painted(page, "heat-6") == [" 3", " lost", "1", "391"]
    assert painted(page, "heat-0") == ["9"]
    assert page.url.endswith("?overlay=probability")
    page.keyboard.press("4")
    wait_painted(page, "pull-1")
    assert painted(page, "pull-1") == [" done", " sure", "<think>391</think> 391"]
    assert painted(page, "heat-6") == []
    page.keyboard.press("5")
    expect(page.get_by_role("list", name="Legend")).to_contain_text("version 9")
    page.keyboard.press("6")
    expect(page.get_by_role("list", name="Legend: Forced")).to_be_visible()
    assert painted(page, "kind-0") == [" done"]
    page.keyboard.press("7")
    expect(page.get_by_role("list", name="Legend")).to_contain_text("the answer did not reach the agent")
    assert painted(page, "kind-1") == [" lost"]
    page.keyboard.press("1")
    expect(page.locator(".tokens")).to_have_count(0)


def test_the_least_likely_tokens_come_in_order_and_arrows_move(tab: Tab) -> None:
    page = opened(tab, "/episodes/ep00001", [forked()])
    page.wait_for_selector(".call")
    panel = page.locator("#token-panel")
    for logprob in ("-9", "-4", "-3", "-2.5"):
        page.keyboard.press("l")
        expect(panel.locator("[data-fact*='logprobs']")).to_have_text(logprob)
    expect(panel).to_contain_text("Call 1, token 15 of 17")
    page.keyboard.press("ArrowRight")
    expect(panel).to_contain_text("Call 1, token 16 of 17")
    page.keyboard.press("Home")
    expect(panel).to_contain_text("no: context")
    page.keyboard.press("ArrowDown")
    expect(panel).to_contain_text("What is")
    assert page.evaluate("document.activeElement.className") == "tokens"


def test_a_click_chooses_the_token_under_the_mouse(tab: Tab) -> None:
    page = opened(tab, "/episodes/ep00001?overlay=tokens", [forked()])
    page.wait_for_selector(".tokens")
    where: dict[str, Any] = page.evaluate(
        """() => { const node = document.querySelector("#call-0 .tokens span").firstChild;
             const range = new Range(); const at = node.data.indexOf("What is");
             range.setStart(node, at); range.setEnd(node, at + 7);
             const { x, y, width, height } = range.getBoundingClientRect();
             return { x: x + width / 2, y: y + height / 2 }; }"""
    )
    page.mouse.click(where["x"], where["y"])
    expect(page.locator("#token-panel")).to_contain_text("Call 1, token 4 of 17")
    assert painted(page, "token-here") == ["What is"]


def test_split_and_hidden_characters_keep_their_places(tab: Tab) -> None:
    sampled = ["🙂", "", "a\u202eb", "\x1b[31m", "<b>", "\ud83d"]
    one = tree(1, [call("a", ["x"], sampled, logprobs=[-1.0, -7.0, -2.0, -3.0, -4.0, -5.0])])
    page = opened(tab, "/episodes/ep00001?overlay=probability", [one])
    wait_painted(page, "heat-6")
    expect(page.locator(".tokens")).to_have_text("x🙂a⟨U+202E⟩b⟨U+001B⟩[31m<b>⟨U+D83D⟩")
    page.keyboard.press("l")
    expect(page.locator("#token-panel")).to_contain_text("(a part of the character before)")
    page.keyboard.press("l")
    assert painted(page, "token-here") == ["⟨U+D83D⟩"]
    page.keyboard.press("l")
    assert painted(page, "token-here") == ["<b>"]


@pytest.mark.parametrize("calls", [1, 40])
def test_ten_thousand_tokens_are_coloured_near_the_window(tab: Tab, calls: int) -> None:
    page = opened(tab, "/episodes/ep00001?overlay=probability", [long_tree(1, calls=calls)])
    page.wait_for_selector(".tokens")
    page.keyboard.press("l")
    wait_painted(page, "heat-0")
    shown = page.evaluate("[...document.querySelectorAll('.tokens')].map((one) => one.textContent.length)")
    assert len(shown) == calls and sum(shown) > 30_000
    ranges = page.evaluate("[...CSS.highlights.values()].reduce((sum, one) => sum + one.size, 0)")
    assert 0 < ranges < 5_000
    page.keyboard.press("8")
    page.keyboard.press("l")
    expect(page.locator("#token-panel [data-fact]")).to_be_visible()
    assert len(painted(page, "token-here")) == 1


def test_a_group_is_one_forest_and_shows_siblings_side_by_side(tab: Tab) -> None:
    trees = members()
    page = opened(tab, GROUP, trees)
    rows = page.get_by_role("list", name="Timelines of the group").get_by_role("button")
    expect(rows).to_have_count(4)
    shared = len(PROMPT) + 10 + 2 + 1 + 1 + 1
    expect(page.locator("main")).to_contain_text(
        f"73 tokens in 4 timelines. Computed once where they are shared: {shared} tokens"
    )
    expect(rows.nth(3)).to_contain_text("ep00003")
    expect(page.get_by_role("list", name="Timelines of the group")).to_contain_text("differs at token 12: “ E”")
    expect(page.locator(".siblings section")).to_have_count(2)
    rows.nth(2).click()
    expect(page.locator(".siblings section")).to_have_count(1)
    rows.nth(2).click()
    rows.nth(3).click()
    expect(page.locator(".siblings section")).to_have_count(3)
    page.keyboard.press("3")
    expect(page.get_by_role("list", name="Legend")).to_contain_text("p below 0.1")
    page.locator(".siblings .tokens").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".siblings .facts")).to_contain_text("of the timeline")


def test_siblings_are_reached_by_brackets(tab: Tab) -> None:
    page = opened(tab, "/episodes/ep00001?overlay=version", members())
    expect(page.get_by_role("link", name="group of 4")).to_be_visible()
    page.keyboard.press("]")
    expect(page.locator("main h1")).to_have_text("Episode ep00002")
    assert page.url.endswith("?overlay=version")
    expect(page.get_by_role("link", name="group of 4")).to_be_visible()
    page.keyboard.press("u")
    expect(page.locator("main h1")).to_have_text("Group q0")


def test_what_is_not_kept_and_what_does_not_exist_is_said(tab: Tab) -> None:
    gone, live = tree(1, [], kept="gone"), tree(2, [], status="live", reward=None, trained_in=None, ended=None)
    page = opened(tab, "/episodes/ep00001", [gone, live])
    expect(page.locator(".state.gone")).to_contain_text("server.keep_transcripts")
    page.goto(f"{tab.site.url}/#/episodes/ep00002")
    expect(page.locator("main")).to_contain_text("The agent has made no call yet.")
    page.goto(f"{tab.site.url}/#/episodes/ep77777")
    expect(page.get_by_role("alert")).to_be_visible()
    page.goto(f"{tab.site.url}/#/groups/77777")
    expect(page.get_by_role("alert")).to_be_visible()
