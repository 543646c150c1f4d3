"""Charts, batches and the swarm: the numbers are those of the API, and a change asks first.

1. Pure functions: a moving average without bias, bins that hold each value once, shares and diffs of weights.
2. Metrics are found by a regular expression, which is also the URL; an invalid one is named.
3. A chart is read by keyboard: arrows choose a step, Enter opens its batch. So does a click; a drag chooses a range.
4. A bar of the histogram opens the episodes that it counts. Groups without variance come first.
5. A batch shows what was not trained and why, and the settings that changed.
6. The swarm shows clients, live episodes, task sets and code versions.
7. A viewer sees no action. Each action asks, and a cancelled question sends nothing.
8. Weights change with a diff in words; a change by somebody else meanwhile is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from agentjet.protocol import AbortRequest, BeginRequest, FinishRequest
from tests.fakes import Running
from tests.page.chromium import Site, Tab, opened_tab, served_site
from tests.server.serving import ADMIN

JOB = {"batch_size": 3, "group_size": 2, "task_weights": {"math": 2, "code": 1}}
REWARDS = {"q1": (0.0, 1.0), "q2": (1.0, 1.0), "p1": (0.25, 0.75)}
"""Of each group of a batch, by task."""


async def episode(run: Running, task: str, reward: float | None, code: str = "v1") -> str:
    """A training episode; without a reward it is aborted."""
    task_set = "code" if task.startswith("p") else "math"
    wanted = BeginRequest(task_id=task, task_set=task_set, client_id="trainer", code_version=code, wait=5)
    begun = await run.gateway.begin(wanted)
    await run.say(begun.id)
    if reward is None:
        await run.gateway.abort(begun.id, AbortRequest(reason="Timeout: the tool <b>answered</b> nothing"))
    else:
        await run.gateway.finish(begun.id, FinishRequest(reward=reward))
    return begun.id


async def batch(run: Running, code: str) -> None:
    version = run.gateway.swarm.policy_version
    run.clock.advance(1)
    await episode(run, "p1", None, code)
    run.clock.advance(1)
    for task in ("p1", "q1", "q2"):
        for reward in REWARDS[task]:
            await episode(run, task, reward, code)
    await run.until(lambda: run.gateway.swarm.policy_version == version + 1 and run.gateway.phase.state == "sampling")


def change_job(site: Site, **changes: Any) -> None:
    """Replaces settings of the job, as another person would."""
    held = site.get("/job")
    body = {"revision": held["revision"], "job": held["job"] | changes}
    answer = httpx.put(
        f"{site.url}/swarm/v1/job", json=body, headers={"Authorization": f"Bearer {ADMIN}"}, trust_env=False
    )
    assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Three learned batches of two task sets, from two code versions, and a live episode."""
    with served_site(tmp_path_factory.mktemp("batches") / "data", job=JOB, batches=0) as site:
        for code in ("v1", "v1", "v2"):
            site.do(batch(site.run, code))
            site.do(site.run.gateway.commits.durable())
            change_job(site, lease_seconds=site.get("/job")["job"]["lease_seconds"] + 1)
        site.do(site.run.gateway.begin(BeginRequest(task_id="q9", task_set="math", client_id="trainer")))
        yield site


@pytest.fixture(scope="module")
def admin_tab(browser: Browser, site: Site) -> Iterator[Tab]:
    """A tab with the session of an admin."""
    with opened_tab(browser, site) as tab:
        yield tab


@pytest.fixture
def admin(admin_tab: Tab) -> Page:
    """The view Swarm with the session of an admin."""
    admin_tab.open("/", role="admin")
    return admin_tab.open("/swarm", role="admin")


def module(page: Page, name: str, expression: str, argument: Any = None) -> Any:
    """Evaluates an expression over `m`, a module of the page, and `given`."""
    path = f"new URL('parts/{name}.js', document.querySelector('script[type=module]').src)"
    return page.evaluate(f"async (given) => {{ const m = await import({path}); return {expression}; }}", argument)


def facts(page: Page, within: str) -> dict[str, str]:
    """Returns the numbers of the API that a part of the page shows, by their place there."""
    found = page.locator(f"{within} [data-fact]")
    shown: list[tuple[str, str]] = found.evaluate_all("all => all.map(one => [one.dataset.fact, one.value])")
    return dict(shown)


def test_an_average_has_no_bias_towards_zero_and_keeps_gaps(viewer: Tab) -> None:
    page = viewer.open()
    assert module(page, "curve", "m.smoothed([4, null, 4, 4], 0.9)") == [4, None, 4, 4]
    assert module(page, "curve", "m.smoothed([0, 1], 0.5)") == [0, pytest.approx(2 / 3)]
    assert module(page, "curve", "m.sentence('reward', [0.25, null, 0.5])") == (
        "reward rose from 0.25 to 0.5 over 2 steps; lowest 0.25, highest 0.5."
    )
    assert module(page, "curve", "m.sentence('reward', [null])") == "reward has no value yet."


VALUES: tuple[list[float], ...] = (
    [1.0, 0.0, 1.0],
    [0.1 * i for i in range(40)],
    [-1e6 + 7 * i for i in range(100)],
    [1e-9 * i * i for i in range(30)],
    [5.0],
    [],
)


def test_each_value_is_in_one_bin_with_exact_bounds(viewer: Tab) -> None:
    for values in VALUES:
        found = module(viewer.open(), "histogram", "m.counted(m.binsOf(given), given)", values)
        assert len(found) <= 15
        assert sum(one["count"] for one in found) == len(values)
        for one in filter(lambda one: one["count"], found):
            assert one["count"] == sum(one["low"] <= value <= one["high"] for value in values)


def test_weights_are_read_compared_and_refused_in_words(viewer: Tab) -> None:
    page = viewer.open()
    assert module(page, "weights", "m.typedWeights({math: ' 2 ', code: ''})") == {"math": 2}
    for text in ("0", "-1", "two", "Infinity"):
        problem = module(
            page, "weights", "(() => { try { m.typedWeights(given) } catch (e) { return e.detail } })()", {"math": text}
        )
        assert problem == f"math: {text} is not a weight. Give a number above 0, or nothing to remove it."
    diff = "m.weightDiff(given[0], given[1], ['math', 'code'])"
    assert module(page, "weights", diff, [{"math": 1, "code": 1}, {"math": 3, "code": 1}]) == [
        {"set": "math", "before": "1 (50 % of the groups)", "after": "3 (75 % of the groups)"},
        {"set": "code", "before": "1 (50 % of the groups)", "after": "1 (25 % of the groups)"},
    ]
    assert module(page, "weights", diff, [{}, {"math": 1}]) == [
        {"set": "math", "before": "as it comes", "after": "1 (100 % of the groups)"},
        {"set": "code", "before": "as it comes", "after": "refused"},
    ]
    assert module(page, "weights", "m.inexactKey({a: 1, b: {seed: 2 ** 60}})") == "job.b.seed"
    assert module(page, "weights", "m.inexactKey({a: 1.5, b: [1, 2]})") == ""


def test_metrics_are_found_by_an_expression_that_is_the_url(viewer: Tab, site: Site) -> None:
    page = viewer.open("/batches?metrics=^reward/")
    steps = site.get("/steps")
    names = sorted(name for name in steps["metrics"] if name.startswith("reward/"))
    expect(page.locator(".chart h3")).to_have_text(names)
    for place, value in facts(page, ".chart-legend").items():
        name = place.removeprefix('/steps#metrics["').split('"')[0]
        assert float(value) == steps["metrics"][name][-1]
    page.fill("input[type=search]", "grad_norm|entropy")
    expect(page.locator(".chart h3")).to_have_text(["optim/grad_norm"])
    assert "metrics=grad_norm%7Centropy" in page.url
    page.fill("input[type=search]", "reward[")
    expect(page.locator("#metrics-found")).to_contain_text("This is not a regular expression")
    page.reload()
    expect(page.locator("input[type=search]")).to_have_value("reward[")


def test_five_metrics_are_shown_first_and_the_others_in_boards(viewer: Tab, site: Site) -> None:
    page = viewer.open("/batches")
    boards = page.locator("details.family")
    expect(boards.first.locator("> summary")).to_contain_text("At a glance")
    shown = boards.first.locator(".chart h3").all_inner_texts()
    assert "reward/mean" in shown and len(shown) <= 5
    assert [one.get_attribute("open") is not None for one in boards.all()] == [True, *[False] * (boards.count() - 1)]
    num_metrics = len(site.get("/steps")["metrics"])
    assert sum(int(one) for one in boards.locator("> summary small").all_inner_texts()) == num_metrics > 10


def test_a_chart_is_read_by_keyboard(viewer: Tab, site: Site) -> None:
    steps = site.get("/steps")
    page = viewer.open("/batches?metrics=^reward/math/mean&smooth=0.8")
    chart = page.locator(".chart-plot")
    expect(chart.locator("canvas")).to_be_visible()
    chart.focus()
    page.keyboard.press("ArrowLeft")
    expect(chart).to_have_attribute("aria-valuenow", "2")
    value = "0.75"
    assert steps["metrics"]["reward/math/mean"] == [0.75] * 3
    expect(chart).to_have_attribute("aria-valuetext", f"step 2: reward/math/mean {value}")
    expect(page.locator(".chart .chart-legend")).to_contain_text(f"{value} smooth")
    page.keyboard.press("Enter")
    expect(page.locator("main h1")).to_have_text("Step 2")


def test_a_drag_chooses_a_range_and_a_click_opens_a_batch(viewer: Tab) -> None:
    page = viewer.settled("/batches?metrics=^reward/math/mean")
    expect(page.locator(".chart-plot canvas")).to_be_visible()
    box = page.locator(".chart-plot").bounding_box()
    assert box is not None
    left, middle, right = (box["x"] + box["width"] * part for part in (0.1, 0.5, 0.98))
    page.mouse.move(middle, box["y"] + 50)
    expect(page.locator(".chart .chart-legend")).to_contain_text("step 2")
    page.mouse.down()
    page.mouse.move(right, box["y"] + 50)
    page.mouse.up()
    page.get_by_role("button", name="Show all").click()
    expect(page.get_by_role("button", name="Show all")).to_have_count(0)
    page.mouse.click(left, box["y"] + 50)
    expect(page.locator("main h1")).to_have_text("Step 1")


def test_a_bar_opens_the_episodes_that_it_counts(viewer: Tab, site: Site) -> None:
    page = viewer.open("/batches")
    page.get_by_role("link", name="step 3").click()
    expect(page.locator("main h1")).to_have_text("Step 3")
    bars = page.locator(".histogram a")
    expect(bars).to_have_count(4)
    for bar in bars.all():
        query = (bar.get_attribute("href") or "").partition("?")[2]
        count = (bar.get_attribute("aria-label") or "").split()[0]
        asked = query.replace("step=3", "batch=2")  # the API counts batches from 0
        assert asked != query and len(site.get(f"/episodes?{asked}")["episodes"]) == int(count)


def test_a_batch_shows_its_groups_its_losses_and_changed_settings(viewer: Tab, site: Site) -> None:
    page = viewer.open("/batches/3")
    api = site.get("/batches/2")
    expect(page.locator("#groups-title")).to_be_visible()
    rows = page.locator("[aria-labelledby=groups-title] tbody tr")
    expect(rows.first).to_contain_text("all equal")
    shown = facts(page, "main")
    for number, group in enumerate(api["groups"]):
        for place, member in enumerate(group["members"]):
            path = f"/batches/2#groups[{number}].members[{place}]"
            assert float(shown[f"{path}.reward"]) == member["reward"]
            assert float(shown[f"{path}.advantage"]) == member["advantage"]
    for name, value in api["metrics"].items():
        assert float(shown[f'/batches/2#metrics["{name}"]']) == value
    lost = page.locator("[aria-labelledby=dropped-title]")
    expect(lost).to_contain_text("1 episode aborted: Timeout")
    assert lost.get_by_role("link").get_attribute("title") == "Timeout: the tool <b>answered</b> nothing"
    expect(page.locator("[aria-labelledby=job-title] tbody tr")).to_have_text([r"lease_seconds121122"])
    newest = site.get("/status")["policy_version"]
    viewer.open(f"/batches/{newest}")
    expect(page.locator("main")).to_contain_text(f"It made policy version {newest}")
    expect(page.locator(".neighbours a")).to_have_text(["All steps", f"‹ step {newest - 1}"])
    page.keyboard.press("]")
    page.keyboard.press("[")
    expect(page.locator("main h1")).to_have_text(f"Step {newest - 1}")


def test_a_batch_that_does_not_exist_is_said_so(viewer: Tab) -> None:
    page = viewer.open("/batches/999")
    expect(page.locator(".gone")).to_contain_text("There is no such step")


def test_the_swarm_shows_who_works_and_what_is_shared(viewer: Tab, site: Site) -> None:
    page = viewer.open("/swarm")
    status = site.get("/status")
    expect(page.locator("[aria-label='Task sets'] tbody tr")).to_have_count(2)
    shown = facts(page, "main")
    for name, one in status["task_sets"].items():
        for key in ("share", "weight", "reward_mean", "groups_open", "groups_complete"):
            assert float(shown[f'/status#task_sets["{name}"].{key}']) == one[key]
    for name, one in status["code_versions"].items():
        for key in ("episodes", "finished", "aborted", "reward_mean"):
            assert float(shown[f'/status#code_versions["{name}"].{key}']) == one[key]
    assert shown['/status#holding["trainer"]'] == "1"
    expect(page.locator("[aria-label='Live episodes'] tbody tr")).to_contain_text("math / q9")
    expect(page.get_by_role("button", name="Save a checkpoint")).to_have_count(0)
    expect(page.get_by_role("button", name="Change weights")).to_have_count(0)
    expect(page.get_by_role("button", name="Abort")).to_have_count(0)


def test_a_checkpoint_is_saved_only_when_asked_twice(admin: Page, site: Site) -> None:
    admin.get_by_role("button", name="Save a checkpoint").click()
    admin.get_by_role("button", name="Cancel").click()
    assert site.get("/checkpoints") == []
    admin.get_by_role("button", name="Save a checkpoint").click()
    admin.get_by_role("dialog").get_by_role("button", name="Save", exact=True).click()
    expect(admin.get_by_role("dialog")).to_contain_text("Policy version 3 is saved in")
    assert [one["policy_version"] for one in site.get("/checkpoints")] == [3]
    admin.get_by_role("dialog").locator("footer button").click()
    expect(admin.locator("[aria-label='Checkpoints'] tbody th")).to_have_text(["3"])


@pytest.mark.thorough
def test_an_export_is_reported_with_its_folder(admin: Page) -> None:
    admin.get_by_role("button", name="Export a policy").click()
    admin.get_by_role("dialog").get_by_role("button", name="Export", exact=True).click()
    expect(admin.get_by_role("dialog")).to_contain_text("Policy version 3 is exported to")


def test_an_aborted_episode_leaves_the_list(admin: Page, site: Site) -> None:
    begun = site.do(site.run.gateway.begin(BeginRequest(task_id="q10", task_set="math", client_id="trainer")))
    site.do(site.run.gateway.commits.durable())
    row = admin.locator("[aria-label='Live episodes'] tbody tr", has_text="q10")
    row.get_by_role("button", name="Abort").click()
    admin.fill("[name=reason]", "it loops")
    admin.get_by_role("dialog").get_by_role("button", name="Abort the episode").click()
    expect(row).to_have_count(0)
    view = site.get(f"/episodes/{begun.id}")
    assert (view["status"], view["reason"]) == ("aborted", "it loops")


def test_weights_change_with_a_diff_and_name_a_change_by_somebody_else(admin: Page, site: Site) -> None:
    admin.get_by_role("button", name="Change weights").click()
    dialog = admin.get_by_role("dialog")
    dialog.get_by_label("math").fill("lots")
    expect(dialog.locator(".bad")).to_contain_text("lots is not a weight")
    dialog.get_by_label("math").fill("4")
    expect(dialog.locator("li", has_text="math")).to_have_text(
        "math: 2 (66.7 % of the groups) → 4 (80 % of the groups)"
    )
    change_job(site, task_weights={"math": 3, "code": 1})
    dialog.get_by_role("button", name="Change the weights").click()
    expect(dialog.get_by_role("alert")).to_contain_text("revision")
    expect(dialog.locator("li", has_text="math")).to_have_text("math: 3 (75 % of the groups) → 4 (80 % of the groups)")
    dialog.get_by_role("button", name="Change the weights").click()
    expect(dialog).to_contain_text("The weights are changed")
    assert site.get("/job")["job"]["task_weights"] == {"math": 4, "code": 1}


@pytest.mark.thorough
def test_a_run_with_named_policies_shows_its_roles(browser: Browser, tmp_path: Path) -> None:
    served = served_site(tmp_path / "data", policies={"planner": {}, "coder": {}}, batches=1)
    with served as site, opened_tab(browser, site) as tab:
        page = tab.open("/swarm")
        policies = page.locator("[aria-label=Policies]")
        expect(policies.locator("tbody th")).to_have_text(["planner", "coder"])
        shown = facts(page, "[aria-label=Policies]")
        steps = site.get("/steps")["metrics"]
        assert float(shown['/steps#metrics["planner/reward/mean"][0]']) == steps["planner/reward/mean"][0]
        page = tab.open("/batches/1")
        member = site.get("/batches/0")["groups"][0]["members"][0]
        chip = page.locator(f"a[href='#/episodes/{member['episode_id']}']")
        expect(chip).to_contain_text("planner")
        expect(chip).to_contain_text("coder")
