"""`train` with `eval_tasks`, against a real server over a scripted worker. 1. Versions on the way are scored while they
are held, and recorded. 2. A score that no longer improves ends the run. 3. Wrong settings are sentences. 4. Evaluations
on the server: once per key, the best one marked.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from agentjet.client import (
    AgentFailing,
    AgentVersion,
    AsyncEpisode,
    AsyncSwarm,
    EpisodeResult,
    EvalReport,
    Evaluation,
    TrainReport,
)
from agentjet.client.evaluation import HeldOutEvaluations, trained_held_out
from agentjet.client.report import best_of
from agentjet.errors import Conflict, InvalidRequest
from agentjet.types import Task
from tests.client.test_evaluation import client
from tests.server.serving import Served, serving

TASKS = [Task(f"t{number}") for number in range(3)]
HELD_OUT = [Task("h0"), Task("h1")]


def trained(
    tmp_path: Path, scores: dict[int, float], **options: Any
) -> tuple[TrainReport, list[dict[str, Any]], list[int]]:
    """A run whose policy scores `scores` by version: its report, the recorded evaluations, held-out versions."""
    seen: list[int] = []

    async def scenario() -> tuple[TrainReport, list[dict[str, Any]]]:
        async with serving(tmp_path / "data") as served, client(served.url) as swarm:
            http = httpx.AsyncClient(trust_env=False, verify=False)

            async def agent(task: Task, episode: AsyncEpisode) -> float:
                if task.id.startswith("h"):
                    version = served.run.gateway.swarm.policy_version
                    seen.append(version)
                    assert episode.policy_version == version
                    return scores[version]
                body = {"model": episode.model, "messages": [{"role": "user", "content": "hi"}]}
                headers = {"Authorization": f"Bearer {episode.api_key}"}
                (await http.post(f"{episode.base_url}/chat/completions", json=body, headers=headers)).raise_for_status()
                return float(episode.id.endswith("1"))

            report = await swarm.train(agent, TASKS, concurrency=4, progress=False, eval_tasks=HELD_OUT, **options)
            await http.aclose()
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


def test_an_agent_that_fails_on_held_out_tasks_is_named_so() -> None:
    async def failing(version: AgentVersion) -> EvalReport:
        raise AgentFailing("the first 4 episodes all failed")

    held_out = HeldOutEvaluations(failing, every=1)
    with pytest.raises(AgentFailing, match="held-out evaluation: the first 4 episodes"):
        asyncio.run(held_out.run(AgentVersion("v", len), print))


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
    ("options", "said"),
    [
        ({"eval_tasks": HELD_OUT}, "eval_tasks needs eval_every"),
        ({"eval_every": 5}, "eval_every = 5 needs eval_tasks"),
        ({"stop_after": 3}, "stop_after = 3 counts evaluations"),
        ({"eval_tasks": HELD_OUT, "eval_every": -1}, "eval_every = -1: it must be a whole number"),
        ({"eval_tasks": HELD_OUT, "eval_every": 1, "eval_repeats": 0}, "eval_repeats = 0"),
        ({"eval_tasks": ["h"], "eval_every": 1}, r"tasks\[0\] = 'h'"),
    ],
)
def test_wrong_settings_are_sentences(options: dict[str, Any], said: str) -> None:
    async def agent(task: Task, episode: AsyncEpisode) -> float:
        return 0.0

    async def scenario() -> None:
        async with AsyncSwarm("http://127.0.0.1:1", "token") as swarm:
            with pytest.raises(ValueError, match=said):
                await swarm.train(agent, TASKS, steps=1, **options)
            with pytest.raises(ValueError, match="record = True needs at_version"):
                await swarm.evaluate(agent, TASKS, record=True)

    asyncio.run(scenario())


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


def test_the_server_stores_an_evaluation_once(tmp_path: Path) -> None:
    async def post(served: Served, key: str, **body: Any) -> httpx.Response:
        return await served.http.post(
            "/swarm/v1/evaluations",
            json={"policy_version": 0, "num_tasks": 1, "num_episodes": 1, **body},
            headers={"Idempotency-Key": key},
        )

    async def scenario() -> None:
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

    asyncio.run(scenario())
