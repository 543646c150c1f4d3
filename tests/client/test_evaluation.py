"""1. Estimates and intervals, against numbers worked out by hand. 2. Against a real server over a scripted worker: an
evaluation at one policy version sees that one only. 3. Against an endpoint of somebody else, the server is not asked.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import httpx
import pytest

from agentjet.client import (
    AsyncEpisode,
    AsyncSwarm,
    Endpoint,
    EpisodeResult,
    EvalReport,
    Retry,
    pass_at_k,
    wilson_interval,
)
from agentjet.client.report import estimate
from agentjet.errors import Conflict
from agentjet.types import Task
from tests.fakes import recent_episodes
from tests.server.serving import TOKEN, serving

TASKS = [Task(f"t{number}") for number in range(3)]


def report(**rewards: list[float | None]) -> EvalReport:
    """By task the rewards of its repeats; None for one that was not finished."""
    results = [
        EpisodeResult(task, "", "aborted" if reward is None else "finished", 0, reward)
        for task, repeats in rewards.items()
        for reward in repeats
    ]
    return EvalReport(results=tuple(results), seconds=1.0)


# ---- 1. estimates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_right", "num_tries", "k", "expected"),
    [(0, 4, 2, 0), (4, 4, 1, 1), (1, 4, 1, Fraction(1, 4)), (1, 4, 2, Fraction(1, 2)), (2, 5, 3, Fraction(9, 10))],
)
def test_pass_at_k_by_hand(num_right: int, num_tries: int, k: int, expected: Fraction) -> None:
    assert pass_at_k(num_right, num_tries, k) == pytest.approx(float(expected))


def test_pass_at_k_is_the_share_of_draws_with_a_right_one() -> None:
    for num_tries in range(1, 7):
        for num_right in range(num_tries + 1):
            tries = [True] * num_right + [False] * (num_tries - num_right)
            for k in range(1, num_tries + 1):
                draws = [any(draw) for draw in combinations(tries, k)]
                assert pass_at_k(num_right, num_tries, k) == pytest.approx(sum(draws) / len(draws))


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_needs_that_many_tries(k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(1, 4, k)


def test_zeros_and_ones_have_wilsons_interval() -> None:
    found = estimate([1.0, 0.0, 1.0, 1.0])
    assert (found.value, found.low, found.high) == (0.75, *wilson_interval(3, 4))
    assert estimate([1.0, 1.0]).low < 0.4, "two tasks that succeed are no certainty"


def test_other_values_are_resampled() -> None:
    """With two tasks of 0.2 and 0.8, a resample has the mean 0.2 or 0.8 in a quarter of the cases each."""
    found = estimate([0.2, 0.8])
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.2, 0.8))
    values = [number / 100 for number in range(100)]
    found = estimate(values)
    standard_error = math.sqrt(sum((value - 0.495) ** 2 for value in values) / 100) / 10
    assert found.low == pytest.approx(0.495 - 1.96 * standard_error, abs=0.006)
    assert found.high == pytest.approx(0.495 + 1.96 * standard_error, abs=0.006)
    assert estimate(values) == found, "the same values, the same interval"


def test_where_there_is_no_interval_none_is_claimed() -> None:
    assert math.isnan(estimate([]).value)
    found = estimate([0.5])
    assert found.value == 0.5 and math.isnan(found.low) and str(found) == "0.500"


def test_repeats_of_a_task_are_one_observation() -> None:
    """100 equal repeats give no more evidence about other tasks than one."""
    few, many = report(a=[1.0], b=[0.0]), report(a=[1.0] * 100, b=[0.0] * 100)
    assert few.mean_at_k == many.mean_at_k
    assert many.repeats == 100


def test_the_mean_is_over_tasks_whatever_failed() -> None:
    found = report(a=[1.0, None, 0.0], b=[1.0, 1.0, 1.0], c=[None, None, None])
    assert found.mean_at_k.value == 0.75 and found.mean_at_k.num_tasks == 2
    assert found.by_task[("", "c")] == ()
    assert "over 2 tasks, 5 episodes finished, 4 not" in str(found)


def test_each_task_set_has_its_own_figures() -> None:
    scored = [("math", "a", 1.0), ("math", "b", 0.0), ("code", "a", 0.5), ("code", "a", 0.7)]
    results = tuple(EpisodeResult(task, task_set, "finished", 0, reward) for task_set, task, reward in scored)
    found = EvalReport(results=results, seconds=1.0)
    assert {name: (one.value, one.num_tasks) for name, one in found.by_task_set.items()} == {
        "math": (0.5, 2),
        "code": (pytest.approx(0.6), 1),
    }
    assert "\n  math: 0.500 (95 % interval" in str(found) and "\n  code: 0.600" in str(found)
    assert str(report(a=[1.0])).count("\n") == 0, "one set needs no figures of its own"


def test_one_task_alone_is_judged_by_its_repeats() -> None:
    one = report(a=[1.0, 0.0, 1.0, 1.0])
    found = one.mean_at_k
    assert (found.low, found.high) == wilson_interval(3, 4)
    assert found.num_tasks == 1 and "over 1 task, 4 episodes finished" in str(one)


def test_a_metric_that_no_episode_has_is_refused_with_those_there_are() -> None:
    scored = EpisodeResult("a", "", "finished", 0, 1.0, {"turns": 2.0})
    found = EvalReport(results=(scored,), seconds=1.0)
    assert found.metric_at_k("turns").value == 2.0
    with pytest.raises(ValueError, match="no episode has the metric 'zz'; there are: turns"):
        found.metric_at_k("zz")
    assert math.isnan(report(a=[None]).metric_at_k("zz").value), "nothing was finished: nothing is known"


def test_pass_at_k_over_tasks() -> None:
    found = report(a=[1.0, 0.0, 0.0, 0.0], b=[0.0] * 4, c=[1.0] * 4)
    assert found.pass_at(1).value == pytest.approx((0.25 + 0 + 1) / 3)
    assert found.pass_at(2).value == pytest.approx((0.5 + 0 + 1) / 3)
    assert found.pass_at(4).value == pytest.approx(2 / 3)
    assert (found.pass_at(4).low, found.pass_at(4).high) == wilson_interval(2, 3)
    assert report(a=[0.6, 0.4]).pass_at(1, right=0.5).value == 0.5
    with pytest.raises(ValueError, match=r"pass@2 of task 'b': it has 1 finished"):
        report(a=[1.0, 1.0], b=[1.0, None]).pass_at(2)


# ---- 2. one policy version ----------------------------------------------------------------------------------------


def client(url: str) -> AsyncSwarm:
    return AsyncSwarm(url, TOKEN, retry=Retry(patience=5.0))


@pytest.mark.parametrize("at_version", ["newest", 0])
def test_learning_waits_for_an_evaluation_at_a_version(tmp_path: Path, at_version: object) -> None:
    """A batch is complete after the first of the evaluation's episodes, which run one by one: between two of them, too,
    the version is held."""

    async def scenario() -> None:
        async with serving(tmp_path / "data") as served, client(served.url) as swarm:
            versions: list[int] = []
            learning: list[asyncio.Task[None]] = []

            async def agent(task: Task, episode: AsyncEpisode) -> float:
                if not learning:
                    learning.append(asyncio.create_task(served.run.batch()))
                    await served.run.until(lambda: served.run.gateway.swarm.queries.status_counts()["finished"] == 4)
                versions.append(served.run.gateway.swarm.policy_version)
                return 1.0

            found = await swarm.evaluate(
                agent,
                TASKS,
                concurrency=1,
                progress=False,
                at_version=at_version,  # type: ignore[arg-type]
            )
            assert versions == [0, 0, 0] and found.policy_versions == (0, 0)
            await learning[0]
            assert served.run.gateway.swarm.policy_version == 1
            assert served.run.gateway.swarm.queries.status_counts()["live"] == 0
            with pytest.raises(Conflict) as gone:
                await swarm.evaluate(agent, TASKS, progress=False, at_version=0)
            assert gone.value.code == "version_gone"

    asyncio.run(scenario())


def test_plays_that_failed_before_they_were_scored_are_counted(tmp_path: Path) -> None:
    tries: Counter[str] = Counter()

    async def agent(task: Task, episode: AsyncEpisode) -> float:
        tries[task.id] += 1
        if tries[task.id] <= {"t0": 0, "t1": 1, "t2": 9}[task.id]:
            raise ValueError("no number in the answer")
        return 1.0

    async def scenario() -> None:
        async with serving(tmp_path / "data") as served, client(served.url) as swarm:
            found = await swarm.evaluate(agent, TASKS, concurrency=3, progress=False)
            assert (len(found.results), len(found.finished), found.num_repeated) == (3, 2, 1 + 2)

    asyncio.run(scenario())


def test_the_temperature_of_an_evaluation_is_that_of_every_call(tmp_path: Path) -> None:
    async def agent(task: Task, episode: AsyncEpisode) -> float:
        async with httpx.AsyncClient(base_url=episode.base_url, verify=False, trust_env=False) as http:
            body = {"model": episode.model, "messages": [{"role": "user", "content": "hi"}], "temperature": 0.7}
            headers = {"Authorization": f"Bearer {episode.api_key}"}
            (await http.post("/chat/completions", json=body, headers=headers)).raise_for_status()
        return 1.0

    async def scenario() -> None:
        async with serving(tmp_path / "data") as served, client(served.url) as swarm:
            await swarm.evaluate(agent, TASKS[:1], progress=False, temperature=0.0)
            await swarm.evaluate(agent, TASKS[:1], progress=False)
            assert [asked.params.temperature for asked in served.run.compute.asked] == [0.0, 0.7]
            stored = recent_episodes(served.run.gateway.swarm, 2)
            assert [episode.temperature for episode in stored] == [None, 0.0]
            refused = await served.http.post("/swarm/v1/episodes", json={"task_id": "t", "temperature": 0.5})
            assert refused.status_code == 422 and "mode 'eval'" in refused.text

    asyncio.run(scenario())


# ---- 3. somebody else's model -------------------------------------------------------------------------------------


def test_an_endpoint_is_asked_instead_of_the_server() -> None:
    """The server of this client does not even exist."""
    seen: list[tuple[str, str, str, str]] = []

    async def agent(task: Task, episode: AsyncEpisode) -> float:
        seen.append((episode.base_url, episode.api_key, episode.model, episode.mode))
        await episode.heartbeat()
        if task.id == "t2":
            raise RuntimeError("broken")
        return float(task.id == "t0")

    async def scenario() -> EvalReport:
        async with AsyncSwarm("http://127.0.0.1:1", TOKEN) as swarm:
            with pytest.raises(ValueError, match="no versions"):
                await swarm.evaluate(agent, TASKS, endpoint=endpoint, at_version="newest")
            return await swarm.evaluate(agent, TASKS, repeats=2, progress=False, endpoint=endpoint)

    endpoint = Endpoint("http://127.0.0.1:2/v1", "theirs", "their-key")
    assert "their-key" not in repr(endpoint)
    found = asyncio.run(scenario())
    assert set(seen) == {("http://127.0.0.1:2/v1", "their-key", "theirs", "eval")}
    assert found.mean_at_k.value == 0.5
    assert [result.outcome for result in found.results] == ["finished"] * 4 + ["aborted"] * 2
    assert found.errors == {"RuntimeError: broken": 2}
