"""`agentjet compare`: figures worked out by hand, and refusals that name the file. `tests.locks` has its outputs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentjet.cli.checkpoints import roll_back
from agentjet.cli.runs import read_runs
from agentjet.errors import ConfigError
from agentjet.protocol import EvaluationRequest, EvaluationView
from agentjet.server.collection import code_notes, compared_tasks, differing_settings, figures, notes
from agentjet.server.learning import held_out_fall
from tests.cli.test_commands import run
from tests.fakes import running

pytestmark = pytest.mark.anyio


def step(reward: float) -> dict[str, float]:
    sizes = {"batch/episodes": 4.0, "batch/sampled_tokens": 100.0}
    return {"reward/mean": reward, **sizes, "time/sample": 30.0, "time/wait": 10.0, "time/learn": 20.0}


def test_figures_of_steps() -> None:
    rewards = [0.0, 0.1, 0.2, 0.3, 0.4, 0.9, 0.4]
    found = figures(7, {version: step(reward) for version, reward in enumerate(rewards, 1)}, [], [])
    assert (found["policy_version"], found["batches"], found["episodes"]) == (7, 7, 28)
    assert (found["sampled_tokens"], found["minutes"]) == (700, 7.0)
    assert (found["reward_first_5"], found["reward_last_5"]) == (pytest.approx(0.2), pytest.approx(0.44))
    assert (found["reward_best"], found["reward_best_version"]) == (0.9, 6)
    assert (found["evaluations"], found["score_best"]) == (0, None)


def test_a_run_whose_code_changed_has_a_note() -> None:
    both = (
        {"code/a/reward_mean": 0.1, "code/b/reward_mean": None},
        {"code/a/reward_mean": None, "code/b/reward_mean": 0.1},
    )
    changed = {version: both[version > 8] for version in range(1, 15)}
    same = {version: {"code/a/reward_mean": 0.1} for version in range(1, 15)}
    (note,) = code_notes(["old", "new", "plain"], [changed, same, {1: {}}])
    assert note.startswith("The agent's code changed during old (a at first, b now)")


async def trained(data_dir: Path, lr: float, scores: tuple[float, ...]) -> None:
    async with running(data_dir, job={"optimizer": {"lr": lr}}) as up:
        await up.batch()
        for score in scores:
            await up.gateway.versions.record_evaluation(
                EvaluationRequest(policy_version=1, score=score, num_tasks=1, num_episodes=1)
            )
        await asyncio.to_thread(reads_only, data_dir)  # while the server runs


def reads_only(data_dir: Path) -> None:
    files = sorted(path.name for path in data_dir.iterdir())
    read_runs([data_dir])
    assert sorted(path.name for path in data_dir.iterdir()) == files


async def test_batches_that_were_undone_do_not_count(tmp_path: Path) -> None:
    for _ in range(2):
        async with running(tmp_path / "a", job={"checkpoint_every": 1, "keep_checkpoints": 9}) as up:
            await up.batch()
            await up.batch()
            score = up.gateway.swarm.policy_version / 10
            await up.gateway.versions.record_evaluation(
                EvaluationRequest(policy_version=round(10 * score), score=score, num_tasks=1, num_episodes=1)
            )
        if up.gateway.swarm.policy_version == 2:
            roll_back(tmp_path / "a", "1")
    found = (await asyncio.to_thread(read_runs, [tmp_path / "a"])).runs[0].figures
    assert (found["policy_version"], found["batches"], found["episodes"]) == (5, 3, 12)
    assert found["reward_best_version"] == 1, "not 2, which was undone"
    assert (found["evaluations"], found["score_first"], found["score_best_version"]) == (1, 0.5, 5)


def test_settings_that_differ() -> None:
    assert differing_settings([{"a": 1, "b": 2}, {"a": 1, "c": 3}]) == {"b": [2, None], "c": [None, 3]}


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is only one run: name another one beside it, such as agentjet compare"):
        run("compare", str(tmp_path))
    with pytest.raises(ConfigError, match=r"is not a data dir of AgentJet: it has no .*\. Name the folder that"):
        run("compare", str(tmp_path), str(tmp_path))
    with pytest.raises(ConfigError, match=r"gone' is not a data dir of AgentJet: there is no such folder\. Name the"):
        run("compare", str(tmp_path / "gone"), str(tmp_path))
    asyncio.run(untrained(tmp_path / "new"))
    with pytest.raises(ConfigError, match=r"new' has no batch and no evaluation, .*: name a data dir"):
        run("compare", str(tmp_path / "new"), str(tmp_path / "new"))
    with pytest.raises(ConfigError, match="has no run 'other'"):
        run("compare", str(tmp_path / "new"), str(tmp_path / "new"), "--run", "other")


def test_the_same_run_twice_is_refused(tmp_path: Path) -> None:
    asyncio.run(trained(tmp_path / "a", 1e-5, ()))
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for other in ("a", "link", "a/runs/default"):
        with pytest.raises(ConfigError, match="are the same run: name two different ones; those of one data dir"):
            run("compare", str(tmp_path / "a"), str(tmp_path / other))


def test_runs_without_evaluations_are_named_with_the_way_to_make_one(tmp_path: Path) -> None:
    for name, scores in (("a", ()), ("b", (0.5,))):
        asyncio.run(trained(tmp_path / name, 1e-5, scores))
    sentence = f"No score to compare: {tmp_path / 'a'}. To record one, evaluate a run while its server runs: swarm.eva"
    assert sentence in " ".join(run("compare", str(tmp_path / "a"), str(tmp_path / "b")).split())


# ---- scores of different tasks ---------------------------------------------------------------------------------------

Recorded = tuple[str, str, float]
"""Name, task list and score of an evaluation."""


def views(*recorded: Recorded, held_out: bool, begin: int) -> list[EvaluationView]:
    fields: dict[str, Any] = {"held_out": held_out, "num_tasks": 4, "num_episodes": 4, "best": False, "undone": False}
    return [
        EvaluationView(policy_version=n, score=score, name=name, task_list=tasks, time=begin + n, **fields)
        for n, (name, tasks, score) in enumerate(recorded)
    ]


SAME, OTHER, OLD = ("evaluation", "4 tasks, aa"), ("evaluation", "4 tasks, bb"), ("evaluation", "")


@pytest.mark.parametrize("held_out", [True, False])
@pytest.mark.parametrize(
    ("runs", "ends", "says"),
    [
        ([[(*SAME, 0.1), (*SAME, 0.2)], [(*SAME, 0.3)]], [(0.1, 0.2), (0.3, 0.3)], []),
        (  # two runs that share no tasks
            [[(*SAME, 0.1)], [(*OTHER, 0.3), (*OTHER, 0.4)]],
            [(None, None), (0.3, 0.4)],
            ["a on 'evaluation' (4 tasks, aa), 0.1 first and 0.1 last", "(4 tasks, bb), which b has"],
        ),
        (  # one run with two lists: the one that both have is compared
            [[(*SAME, 0.1), (*OTHER, 0.9), (*SAME, 0.2)], [(*SAME, 0.3)]],
            [(0.1, 0.2), (0.3, 0.3)],
            ["a on 'evaluation' (4 tasks, bb), 0.9 first and 0.9 last", "(4 tasks, aa), which a, b have"],
        ),
        (  # one list for most of the runs
            [[(*SAME, 0.1)], [(*SAME, 0.2)], [(*OTHER, 0.9)]],
            [(0.1, 0.1), (0.2, 0.2), (None, None)],
            ["c on 'evaluation' (4 tasks, bb)", "which a, b have"],
        ),
        ([[("math", "4 tasks, aa", 0.1)], [("code", "4 tasks, aa", 0.3)]], [(None, None), (0.3, 0.3)], ["a on 'math'"]),
        ([[(*OLD, 0.1)], [(*SAME, 0.3)]], [(None, None), (0.3, 0.3)], ["a on 'evaluation' (its tasks are not"]),
        ([[(*OLD, 0.1)], [(*OLD, 0.3)]], [(0.1, 0.1), (0.3, 0.3)], ["named 'evaluation' are not recorded: they are"]),
    ],
)  # fmt: skip
def test_only_scores_of_the_same_tasks_are_compared(
    runs: list[list[Recorded]], ends: list[tuple[float | None, float | None]], says: list[str], held_out: bool
) -> None:
    evaluations = [views(*run, held_out=held_out, begin=10 * number) for number, run in enumerate(runs)]
    tasks = compared_tasks(evaluations)
    start = "score" if held_out else "evaluation"
    found = [figures(0, {}, run, tasks) for run in evaluations]
    assert [(one[f"{start}_first"], one[f"{start}_last"]) for one in found] == ends
    text = " ".join(notes(["a", "b", "c"][: len(runs)], evaluations, tasks))
    assert bool(text) == bool(says)
    for words in says:
        assert words in text


def test_an_undone_evaluation_has_no_part_in_the_choice_of_the_compared_tasks() -> None:
    """Both runs had the older list, but one of them only before its rollback."""
    undone, newest = views((*SAME, 0.9), (*OTHER, 0.4), held_out=True, begin=0)
    runs = [[undone.model_copy(update={"undone": True}), newest], views((*SAME, 0.3), held_out=True, begin=-9)]
    assert compared_tasks(runs) == [newest.tasks]


@pytest.mark.parametrize("reverse", [False, True])
async def test_the_best_score_is_one_of_the_newest_held_out_tasks(reverse: bool, tmp_path: Path) -> None:
    lists = [SAME, OTHER][:: -1 if reverse else 1]
    async with running(tmp_path / "a") as up:
        for (name, task_list), score in ((lists[0], 0.9), (lists[1], 0.2), (lists[1], 0.1)):
            request = EvaluationRequest(
                policy_version=0, score=score, num_tasks=4, num_episodes=4, name=name, task_list=task_list
            )
            answer = await up.gateway.versions.record_evaluation(request)
        assert [one.best for one in answer] == [False, True, False]
        assert held_out_fall(answer) == ""


async def untrained(data_dir: Path) -> None:
    async with running(data_dir):
        pass
