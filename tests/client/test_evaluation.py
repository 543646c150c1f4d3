"""Evaluations, most of them against a real server over a scripted worker.

1. Estimates and intervals, against numbers worked out by hand. 2. An evaluation at one policy version sees that one
only. 3. Against an endpoint of somebody else, the server is not asked. 4. `train` with `eval_tasks`: versions on the
way are scored while they are held; a score that no longer improves ends the run. 5. Evaluations on the server: each of
one version is stored once, under the name of its task set; otherwise a sentence has the reason. Only held-out scores
have a best one, which is kept.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from agentjet.cli.runs import read_runs
from agentjet.client import (
    AgentVersion,
    AsyncEpisode,
    AsyncSwarm,
    Endpoint,
    EpisodeResult,
    EvalReport,
    Evaluation,
    Retry,
    TrainReport,
    pass_at_k,
    wilson_interval,
)
from agentjet.client.report import best_of, estimate
from agentjet.client.training import HeldOutEvaluations, record_if_possible, trained_held_out
from agentjet.errors import Conflict, InvalidRequest
from agentjet.types import Task
from tests.client.test_real_server import TASKS as NUMBERS
from tests.client.test_real_server import agent as asking_agent
from tests.client.test_real_server import ask, client
from tests.fakes import recent_episodes
from tests.server.serving import TOKEN, Served, serving

pytestmark = pytest.mark.anyio

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


@pytest.mark.parametrize("at_version", ["newest", 0])
async def test_learning_waits_for_an_evaluation_at_a_version(tmp_path: Path, at_version: object) -> None:
    """A batch is complete after the first of the evaluation's episodes, which run one by one: between two of them, too,
    the version is held."""
    async with serving(tmp_path / "data") as served, client(served) as swarm:
        versions: list[int] = []
        learning: list[asyncio.Task[None]] = []

        async def agent(task: Task, episode: AsyncEpisode) -> float:
            if not learning:
                learning.append(asyncio.create_task(served.run.batch()))
                await served.run.until(lambda: served.run.gateway.swarm.queries.journal.outcomes()["finished"] == 4)
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
        assert served.run.gateway.swarm.queries.journal.outcomes()["live"] == 0
        with pytest.raises(Conflict) as gone:
            await swarm.evaluate(agent, TASKS, progress=False, at_version=0)
        assert gone.value.code == "version_gone"


async def test_plays_that_failed_before_they_were_scored_are_counted(tmp_path: Path) -> None:
    tries: Counter[str] = Counter()

    async def agent(task: Task, episode: AsyncEpisode) -> float:
        tries[task.id] += 1
        if tries[task.id] <= {"t0": 0, "t1": 1, "t2": 9}[task.id]:
            raise ValueError("no number in the answer")
        return 1.0

    async with serving(tmp_path / "data") as served, client(served) as swarm:
        found = await swarm.evaluate(agent, TASKS, concurrency=3, progress=False)
        assert (len(found.results), len(found.finished), found.num_repeated) == (3, 2, 1 + 2)


async def test_the_temperature_of_an_evaluation_is_that_of_every_call(tmp_path: Path) -> None:
    async def agent(task: Task, episode: AsyncEpisode) -> float:
        (await ask(episode, "hi", temperature=0.7)).raise_for_status()
        return 1.0

    async with serving(tmp_path / "data") as served, client(served) as swarm:
        await swarm.evaluate(agent, TASKS[:1], progress=False, temperature=0.0)
        await swarm.evaluate(agent, TASKS[:1], progress=False)
        assert [asked.params.temperature for asked in served.run.compute.asked] == [0.0, 0.7]
        stored = recent_episodes(served.run.gateway.swarm, 2)
        assert [episode.temperature for episode in stored] == [None, 0.0]
        refused = await served.http.post("/swarm/v1/episodes", json={"task_id": "t", "temperature": 0.5})
        assert refused.status_code == 422 and "mode 'eval'" in refused.text


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


HELD_OUT = [Task("h0"), Task("h1")]


def trained(
    tmp_path: Path, scores: dict[int, float], **options: Any
) -> tuple[TrainReport, list[dict[str, Any]], list[int]]:
    """A run whose policy scores `scores` by version: its report, the recorded evaluations, held-out versions."""
    seen: list[int] = []

    async def scenario() -> tuple[TrainReport, list[dict[str, Any]]]:
        async with serving(tmp_path / "data") as served, client(served) as swarm:

            async def agent(task: Task, episode: AsyncEpisode) -> float:
                if task.id.startswith("h"):
                    version = served.run.gateway.swarm.policy_version
                    seen.append(version)
                    assert episode.policy_version == version
                    return scores[version]
                (await ask(episode, "hi")).raise_for_status()
                return float(episode.id.endswith("1"))

            report = await swarm.train(agent, TASKS, concurrency=4, progress=False, eval_tasks=HELD_OUT, **options)
            assert report.best is not None
            assert served.run.gateway.store.tags.read() == {"best": report.best.policy_version}
            with pytest.raises(InvalidRequest, match=r"is reserved.*Set job\.keep_best=false first"):
                await swarm.untag("best")
            assert report.best.policy_version in [info.policy_version for info in await swarm.checkpoints()]
            return report, [view.model_dump() for view in await swarm.evaluations()]

    report, recorded = asyncio.run(scenario())
    return report, recorded, seen


def test_versions_on_the_way_are_scored_and_recorded(tmp_path: Path) -> None:
    report, recorded, seen = trained(tmp_path, {0: 0.1, 2: 0.6, 3: 0.5}, steps=3, eval_every=2)
    assert len(report.steps) == 3 and not report.stopped_early
    assert [(e.policy_version, e.score) for e in report.evaluations] == [(0, 0.1), (2, 0.6), (3, 0.5)]
    assert seen == [0, 0, 2, 2, 3, 3], "learning waited for each evaluation"
    assert report.best is report.evaluations[1]
    assert [(r["policy_version"], r["score"], r["best"]) for r in recorded] == [
        (0, 0.1, False), (2, 0.6, True), (3, 0.5, False),
    ]  # fmt: skip
    assert {(r["num_tasks"], r["num_episodes"]) for r in recorded} == {(2, 2)}
    assert "held-out score by version: 0: 0.100, 2: 0.600, 3: 0.500; best: version 2" in str(report)
    assert all(not result.task_id.startswith("h") for result in report.results)


def test_a_score_that_no_longer_improves_ends_the_run(tmp_path: Path) -> None:
    report, recorded, _ = trained(
        tmp_path, {0: 0.1, 1: 0.6, 2: 0.6, 3: 0.5}, steps=50, eval_every=1, stop_after=2, eval_repeats=2
    )
    assert [e.policy_version for e in report.evaluations] == [0, 1, 2, 3] and len(recorded) == 4
    assert report.stopped_early and len(report.steps) == 3 and report.best is report.evaluations[1]
    assert recorded[0]["num_episodes"] == 4 and "stopped early" in str(report)


def scored(*scores: float | None) -> list[Evaluation]:
    return [
        Evaluation(version, EvalReport((EpisodeResult("t", "", "finished", version, score),), 1.0))
        for version, score in enumerate(scores)
    ]


@pytest.mark.parametrize(
    ("scores", "stalled"),
    [
        ((), False), ((0.5,), False), ((0.5, 0.4), False), ((0.5, 0.4, 0.5), True), ((0.5, 0.4, 0.6), False),
        ((None, None, None), False), ((0.5, None, None), True), ((0.1, 0.5, 0.4, 0.4), True),
    ],
)  # fmt: skip
def test_when_a_score_has_stalled(scores: tuple[float | None, ...], stalled: bool) -> None:
    async def never(version: object) -> EvalReport:
        raise AssertionError

    assert HeldOutEvaluations(never, 1, 2, done=scored(*scores)).stalled is stalled
    assert not HeldOutEvaluations(never, 1, 0, done=scored(*scores)).stalled


def test_an_evaluation_that_takes_too_long_ends_no_run() -> None:
    async def late(version: object) -> EvalReport:
        raise Conflict("The policy is at version 2.", code="version_gone")

    async def broken(version: object) -> EvalReport:
        raise Conflict("The engine is stopped.", code="engine_stopped")

    said: list[str] = []
    held_out = HeldOutEvaluations(late, 1)
    asyncio.run(held_out.run(AgentVersion("", lambda task, episode: 0.0), said.append))
    assert held_out.done == [] and "The policy is at version 2." in said[0]
    with pytest.raises(Conflict, match="stopped"):
        asyncio.run(HeldOutEvaluations(broken, 1).run(AgentVersion("", lambda task, episode: 0.0), said.append))


def test_evaluations_without_a_score_are_not_the_best() -> None:
    assert best_of(scored(None, None)) is None
    first, second, _ = scored(None, 0.5, 0.5)
    assert best_of([first, second, _]) is second


@pytest.mark.parametrize(
    ("held_out", "said"),
    [
        ([Task("a", payload=1), Task("c", payload=1)], "1 of 2 held-out tasks are also trained on"),
        ([Task("a", payload=2), Task("b", payload=1)], ""),
        ([], ""),
    ],
)
def test_held_out_tasks_that_are_trained_on_are_counted(held_out: list[Task], said: str) -> None:
    found = trained_held_out([Task("a", payload=1), Task("b", payload=2)], held_out)
    assert found.startswith(said) and bool(found) == bool(said)


class Shape:
    """A payload that is not JSON and has no representation."""

    def __init__(self, sides: object) -> None:
        self.sides = sides

    def __repr__(self) -> str:
        raise RuntimeError("it is not loaded")


SHARED = Shape(lambda: 3)


@pytest.mark.parametrize(
    ("trained", "held_out", "is_same"),
    [
        (np.arange(5000), np.arange(5000), True),
        (np.zeros(5000), np.eye(1, 5000, 2500)[0], False),  # Their representations are shortened, and equal.
        (Shape(3), Shape(3), True),
        (Shape(3), Shape(4), False),
        (SHARED, SHARED, True),
        (Shape(lambda: 3), Shape(lambda: 3), False),  # They cannot be pickled, so nothing shows that they are equal.
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, True),
    ],
)
def test_payloads_are_compared_by_their_content(trained: object, held_out: object, is_same: bool) -> None:
    assert bool(trained_held_out([Task("a", payload=trained)], [Task("a", payload=held_out)])) == is_same


async def test_the_server_stores_an_evaluation_once(tmp_path: Path) -> None:
    async def post(served: Served, key: str, **body: Any) -> httpx.Response:
        return await served.http.post(
            "/swarm/v1/evaluations",
            json={"policy_version": 0, "num_tasks": 1, "num_episodes": 1, **body},
            headers={"Idempotency-Key": key},
        )

    async with serving(tmp_path / "data") as served:
        for _ in range(2):
            answer = await post(served, "a", score=0.5)
        assert [view["score"] for view in answer.json()] == [0.5]
        assert (await post(served, "a", score=0.6)).status_code == 409
        assert [view["best"] for view in (await post(served, "b", score=0.5)).json()] == [True, False]
        refused = await post(served, "c", score=0.5, policy_version=3)
        assert refused.status_code == 422 and "the policy is at version 0" in refused.json()["detail"]
    async with serving(tmp_path / "data") as served:
        assert len((await served.http.get("/swarm/v1/evaluations")).json()) == 2


async def right(task: Task, episode: AsyncEpisode) -> float:
    return 1.0


async def scores(swarm: AsyncSwarm) -> list[tuple[int, str, float, bool, bool]]:
    return [(one.policy_version, one.name, one.score, one.held_out, one.best) for one in await swarm.evaluations()]


# ---- 1. recorded -----------------------------------------------------------------------------------------------------


async def test_before_and_after_training_are_on_the_list_and_in_compare(tmp_path: Path, capsys: Any) -> None:
    async with serving(tmp_path / "data") as served, client(served) as swarm:

        async def improving(task: Task, episode: AsyncEpisode) -> float:
            return min(1.0, 0.25 + episode.policy_version)

        await swarm.evaluate(improving, NUMBERS, repeats=2)
        report = await swarm.train(asking_agent, NUMBERS, steps=2, concurrency=8, progress=False)
        await swarm.evaluate(improving, NUMBERS, repeats=2)
        last = report.steps[-1].policy_version
        before, after = await swarm.evaluations()
        assert [(one.policy_version, one.score) for one in (before, after)] == [(0, 0.25), (last, 1.0)]
        assert {(one.name, one.held_out, one.best) for one in (before, after)} == {("numbers", False, False)}
        assert (before.num_tasks, before.num_episodes) == (4, 8)
    assert "not recorded" not in capsys.readouterr().out
    figures = (await asyncio.to_thread(read_runs, [tmp_path / "data"])).runs[0].figures
    assert (figures["evaluations"], figures["evaluation_first"], figures["evaluation_last"]) == (2, 0.25, 1.0)
    assert figures["score_first"] is figures["score_best"] is figures["score_best_version"] is None


@pytest.mark.parametrize(
    ("task_sets", "name"), [(("", ""), "evaluation"), (("math", "math"), "math"), (("math", "code"), "evaluation")]
)
@pytest.mark.parametrize("options", [{}, {"at_version": "newest"}])
async def test_the_name_is_that_of_the_task_set(
    task_sets: tuple[str, ...], name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    async with serving(tmp_path / "data") as served, client(served) as swarm:
        tasks = [Task(f"t{number}", task_set) for number, task_set in enumerate(task_sets)]
        await swarm.evaluate(right, tasks, progress=False, **options)
        assert await scores(swarm) == [(0, name, 1.0, False, False)]


PAYLOAD, OTHER = {"question": "1 + 1"}, {"question": "2 + 2"}


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ([Task("a"), Task("b")], [Task("b"), Task("a")], True),
        ([Task("a", payload=PAYLOAD)], [Task("a", payload=dict(PAYLOAD))], True),
        ([Task("a", payload=object())], [Task("a", payload=object())], True),
        ([Task("a"), Task("b")], [Task("a"), Task("c")], False),
        ([Task("a"), Task("b")], [Task("a")], False),
        ([Task("a", "s")], [Task("a", "t")], False),
        ([Task("line-1", payload=PAYLOAD)], [Task("line-1", payload=OTHER)], False),
    ],
)
async def test_the_same_tasks_are_one_list(one: list[Task], other: list[Task], is_same: bool, tmp_path: Path) -> None:
    """An asking_agent that changes its payloads does not change the list of a training's held-out tasks."""
    async with serving(tmp_path / "data") as served, client(served) as swarm:
        for tasks in (one, other):
            await swarm.evaluate(right, tasks, progress=False)
        first, second = await swarm.evaluations()
        assert (first.task_list == second.task_list) is is_same
        assert first.task_list.startswith(f"{len(one)} task{'s' * (len(one) > 1)}, ")

        async def changing(task: Task, episode: AsyncEpisode) -> float:
            if isinstance(task.payload, dict):
                task.payload["seen"] = task.payload.get("seen", 0) + 1
            return await asking_agent(task, episode)

        given = {"eval_tasks": copy.deepcopy(one), "eval_every": 1}
        await swarm.train(changing, NUMBERS, steps=1, concurrency=8, progress=False, **given)
        held_out = [evaluation for evaluation in await swarm.evaluations() if evaluation.held_out]
        assert len(held_out) == 2 and {evaluation.task_list for evaluation in held_out} == {first.task_list}


# ---- 2. not recorded, with the reason --------------------------------------------------------------------------------


@pytest.mark.parametrize("learned_in", [0, 1, 2], ids=["first", "second", "last"])
@pytest.mark.parametrize("progress", [True, False])
async def test_a_score_of_several_versions_is_not_recorded(
    learned_in: int, progress: bool, tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agentjet.client")
    async with serving(tmp_path / "data") as served, client(served) as swarm:
        seen: list[int] = []

        async def learning(task: Task, episode: AsyncEpisode) -> float:
            seen.append(episode.policy_version)
            if len(seen) == learned_in + 1:
                await served.run.batch()
            return 1.0

        report = await swarm.evaluate(learning, NUMBERS[:3], concurrency=1, progress=progress)
        assert report.mean_reward == 1.0 and seen == [0] * (learned_in + 1) + [1] * (2 - learned_in)
        assert await scores(swarm) == []
    sentence = "The score is not recorded: the policy learned during the evaluation, from version 0 to 1, and a score "
    assert (sentence in capsys.readouterr().out) is progress
    assert (sentence in caplog.text) is not progress


def ended_report(outcome: Any, reward: float | None) -> EvalReport:
    return EvalReport((EpisodeResult("t", "", outcome, 0, reward),), 1.0)


@pytest.mark.parametrize(
    ("given", "url", "reason"),
    [
        (ended_report("aborted", None), "", "no episode finished"),
        (ended_report("finished", 1.0), "http://127.0.0.1:1", "no answer from http://127.0.0.1:1"),
        (ended_report("finished", 1.0), "", ""),
    ],
)
async def test_a_failure_to_record_is_a_reason(given: EvalReport, url: str, reason: str, tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as served, client(served) as swarm:
        async with AsyncSwarm(url or served.url, TOKEN, retry=Retry(patience=0.0)) as other:
            found = await record_if_possible(other.connection, given, "1 task, 0")
        assert found.startswith(reason) and bool(found) == bool(reason), found
        assert len(await swarm.evaluations()) == (not reason)


# ---- 3. nothing to record --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"record": False},
        {"record": False, "at_version": "newest"},
        {"endpoint": Endpoint("http://127.0.0.1:2/v1", "theirs", "their-key")},
    ],
)
async def test_nothing_is_recorded(options: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    async with serving(tmp_path / "data") as served, client(served) as swarm:
        await swarm.evaluate(right, NUMBERS, **options)
        assert await scores(swarm) == []
    assert "not recorded" not in capsys.readouterr().out


# ---- 4. held-out scores ----------------------------------------------------------------------------------------------


async def test_the_best_is_a_held_out_score(tmp_path: Path) -> None:
    """Better scores before, beside and after it are no held-out scores."""
    async with serving(tmp_path / "data") as served, client(served) as swarm:

        async def half(task: Task, episode: AsyncEpisode) -> float:
            return 0.5

        tags: Callable[[], dict[str, int]] = served.run.gateway.store.tags.read
        await swarm.evaluate(right, NUMBERS, progress=False)
        assert tags() == {} and await scores(swarm) == [(0, "numbers", 1.0, False, False)]
        health = await swarm.health()
        assert [rule for rule in health.rules if rule.name == "held_out"] == []
        await swarm.evaluate(half, NUMBERS, progress=False, at_version="newest", record=True)
        await served.run.until(lambda: tags() == {"best": 0})
        await served.run.batch()
        await swarm.evaluate(right, NUMBERS, progress=False)
        await swarm.checkpoint()
        assert await scores(swarm) == [
            (0, "numbers", 1.0, False, False),
            (0, "numbers", 0.5, True, True),
            (1, "numbers", 1.0, False, False),
        ]
        assert [(one.policy_version, one.score) for one in await swarm.checkpoints()] == [(0, 0.5), (1, None)]
        [rule] = [rule for rule in (await swarm.health()).rules if rule.name == "held_out"]
        assert rule.text == "held-out score 0.5 at version 0"
        assert tags() == {"best": 0}
    figures = (await asyncio.to_thread(read_runs, [tmp_path / "data"])).runs[0].figures
    assert {name: value for name, value in figures.items() if "score" in name or "evaluation" in name} == {
        "evaluations": 3,
        "score_first": 0.5,
        "score_last": 0.5,
        "score_best": 0.5,
        "score_best_version": 0,
        "evaluation_first": 1.0,
        "evaluation_last": 1.0,
    }
