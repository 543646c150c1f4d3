"""`Collection`: the runs and the studies of `agentjet look`, as lists, and comparisons of its runs.

`figures`, `compared_tasks`, `notes` and `differing_settings` compare runs also for `agentjet compare`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Container, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from agentjet.errors import AgentJetError, ConfigError, NotFound, RequestError, ServerFailed, UpstreamFailed
from agentjet.protocol import (
    ComparedRunView,
    ComparisonView,
    EvaluationView,
    LookedRunView,
    LookedStudyView,
    LookView,
    StatusResponse,
    StepList,
)
from agentjet.server.learning import code_versions
from agentjet.server.read import RunReader

FINAL_STEPS = 5
"""The first and the final reward are means of this many batches: the reward of a single batch is mostly noise."""
TIMES = ("time/sample", "time/wait", "time/learn")

KINDS = {True: "held-out score", False: "score"}

Figures = dict[str, float | None]
Steps = Mapping[int, Mapping[str, float | None]]
"""Metrics of a run by the policy version after the step, in order. None stands for a metric that a step lacks."""
Tasks = tuple[bool, str, str]
"""Equal for scores that are compared with each other: see `EvaluationView.tasks`."""


class ReadableRun(Protocol):
    """A run that is read from a folder or from another server. Its methods raise `AgentJetError`."""

    title: str
    """The path or the URL that it was opened with."""

    async def status(self) -> StatusResponse: ...
    async def all_steps(self) -> StepList: ...
    async def evaluations(self) -> list[EvaluationView]: ...
    async def settings(self) -> dict[str, Any]: ...
    async def close(self) -> None: ...


class ReadableStudy(Protocol):
    """A study that is read from its folder, as JSON. Its methods block, and raise `ConfigError`."""

    title: str

    def summary(self) -> dict[str, Any]: ...
    def record(self) -> dict[str, Any]: ...


class Collection:
    """Runs and studies by name. The first run is the one that the page shows first."""

    def __init__(self, runs: Mapping[str, ReadableRun], studies: Mapping[str, ReadableStudy]) -> None:
        self.runs = runs
        self.studies = studies

    async def close(self) -> None:
        for run in self.runs.values():
            await run.close()

    async def view(self) -> LookView:
        """Returns the lists. A run or a study that cannot be read has its error."""
        runs = await asyncio.gather(*(_run_view(name, run) for name, run in self.runs.items()))
        studies = [await asyncio.to_thread(_study_view, name, study) for name, study in self.studies.items()]
        return LookView(runs=runs, studies=studies)

    def run(self, name: str) -> ReadableRun:
        """Raises `NotFound`."""
        if name not in self.runs:
            raise NotFound(_missing("run", name, self.runs), code="run_not_found")
        return self.runs[name]

    async def study(self, name: str) -> dict[str, Any]:
        """Returns the record of a study. Raises `NotFound`, and `ServerFailed` if it cannot be read."""
        if name not in self.studies:
            raise NotFound(_missing("study", name, self.studies), code="study_not_found")
        study = self.studies[name]
        try:
            return {"name": name, "title": study.title, **await asyncio.to_thread(study.record)}
        except ConfigError as error:
            raise ServerFailed(f"{error}.", code="study_unreadable") from None

    async def compare(self, names: Sequence[str]) -> ComparisonView:
        """Returns the figures of runs, and the settings in which they differ. Raises `NotFound`, and `UpstreamFailed`
        if a server does not answer.

        A server does not return all settings of its model: beside its run, the others are left out.
        """
        runs = [self.run(name) for name in names]
        try:
            evaluations = await asyncio.gather(*(run.evaluations() for run in runs))
            tasks = compared_tasks(evaluations)
            steps = await asyncio.gather(*map(_metrics_by_version, runs))
            each = zip(names, runs, steps, evaluations, strict=True)
            compared = await asyncio.gather(*(_compared(*facts, tasks) for facts in each))
            settings = await asyncio.gather(*(run.settings() for run in runs))
        except RequestError:
            raise
        except AgentJetError as error:
            raise UpstreamFailed(f"{error}.", code="run_unreadable") from None
        different = differing_settings(settings)
        if any(_is_served(run) for run in runs):
            different = {
                key: values for key, values in different.items() if key.startswith("job.") or None not in values
            }
        titles = [run.title for run in runs]
        found = notes(titles, evaluations, tasks) + code_notes(titles, steps)
        return ComparisonView(runs=compared, settings=different, notes=found)


def _is_served(run: ReadableRun) -> bool:
    return not isinstance(run, RunReader)


async def _run_view(name: str, run: ReadableRun) -> LookedRunView:
    is_served = _is_served(run)
    try:
        status, steps = await run.status(), await run.all_steps()
    except AgentJetError as error:
        return LookedRunView(name=name, title=run.title, is_served=is_served, error=str(error))
    reward = status.last_step.get("reward/mean")
    return LookedRunView(
        name=name,
        title=run.title,
        is_served=is_served,
        model=status.model or ", ".join(status.policies),
        waiting_for=status.waiting_for,
        policy_version=status.policy_version,
        episodes=status.episodes,
        steps=len(steps.versions),
        newest_step=steps.times[-1] if steps.times else None,
        reward=reward if reward is not None and math.isfinite(reward) else None,
    )


def _study_view(name: str, study: ReadableStudy) -> LookedStudyView:
    try:
        return LookedStudyView(name=name, title=study.title, summary=study.summary())
    except ConfigError as error:
        return LookedStudyView(name=name, title=study.title, error=str(error))


async def _metrics_by_version(run: ReadableRun) -> Steps:
    steps = await run.all_steps()
    return {
        version: {metric: values[number] for metric, values in steps.metrics.items()}
        for number, version in enumerate(steps.versions)
    }


async def _compared(
    name: str, run: ReadableRun, steps: Steps, evaluations: Sequence[EvaluationView], tasks: Container[Tasks]
) -> ComparedRunView:
    status = await run.status()
    return ComparedRunView(
        name=name,
        title=run.title,
        figures=figures(status.policy_version, steps, evaluations, tasks),
        evaluations=evaluations,
    )


def _missing(noun: str, name: str, known: Mapping[str, object]) -> str:
    return f"There is no {noun} {name!r} here; there are: {', '.join(known) or 'none'}."


# ---- comparison ------------------------------------------------------------------------------------------------------


def compared_tasks(runs: Sequence[Sequence[EvaluationView]]) -> list[Tasks]:
    """Returns the tasks whose scores are compared: one list of held-out evaluations, and one of others.

    It is the list that most of the runs were evaluated on, of several such ones that of the newest evaluation.
    """
    kept = [[one for one in run if not one.undone] for run in runs]
    newest = {one.tasks: number for number, one in enumerate(sorted(chain(*kept), key=lambda one: one.time))}
    num_runs = {tasks: sum(any(one.tasks == tasks for one in run) for run in kept) for tasks in newest}
    by_kind = [[tasks for tasks in newest if tasks[0] is held_out] for held_out in (True, False)]
    return [max(lists, key=lambda tasks: (num_runs[tasks], newest[tasks])) for lists in by_kind if lists]


def notes(names: Sequence[str], runs: Sequence[Sequence[EvaluationView]], compared: Sequence[Tasks]) -> list[str]:
    """Returns a sentence for scores of other tasks than the compared ones, and for runs without scores."""
    found, own = [], [[one for one in run if not one.undone] for run in runs]
    for tasks in compared:
        kind, every = KINDS[tasks[0]], [[one for one in run if one.held_out is tasks[0]] for run in own]
        same = [[one for one in run if one.tasks == tasks] for run in every]
        others = [
            f"{name} on {_tasks_text(other)}, {scores[0].score:.3g} first and {scores[-1].score:.3g} last"
            for name, run in zip(names, every, strict=True)
            for other in dict.fromkeys(one.tasks for one in run if one.tasks != tasks)
            if (scores := [one for one in run if one.tasks == other])
        ]
        having = [name for name, scores in zip(names, same, strict=True) if scores]
        if others:
            found.append(
                f"Not compared, because the tasks differ: {kind}s of {'; of '.join(others)}. The {kind}s shown are on "
                f"{_tasks_text(tasks)}, which {', '.join(having)} {'has' if len(having) == 1 else 'have'}."
            )
        numbers = sorted({one.num_tasks for scores in same for one in scores})
        if not tasks[2] and (len(having) > 1 or len(numbers) > 1):
            shown = " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))
            found.append(
                f"The tasks of the {kind}s named {tasks[1]!r} are not recorded: they are compared by their name "
                f"({shown} tasks)."
            )
    if without := [name for name, run in zip(names, own, strict=True) if not run]:
        found.append(
            f"No score to compare: {', '.join(without)}. To record one, evaluate a run while its server runs: "
            "swarm.evaluate(agent, tasks), agentjet eval AGENT TASKS URL, or eval_tasks and eval_every of swarm.train."
        )
    return found


def code_notes(names: Sequence[str], runs: Sequence[Steps]) -> list[str]:
    """Returns a sentence for each run whose first and final batches ran other code of the agent."""
    found = []
    for name, steps in zip(names, runs, strict=True):
        versions = [code_versions(step) for step in steps.values()]
        first, final = set().union(*versions[:FINAL_STEPS]), set().union(*versions[-FINAL_STEPS:])
        if first and final and not first & final:
            found.append(
                f"The agent's code changed during {name} ({', '.join(sorted(first))} at first, "
                f"{', '.join(sorted(final))} now): its first and last figures may come from two reward functions."
            )
    return found


def _tasks_text(tasks: Tasks) -> str:
    return f"{tasks[1] or 'evaluation'!r} ({tasks[2] or 'its tasks are not recorded'})"


def figures(
    policy_version: int,
    steps: Steps,
    evaluations: Sequence[EvaluationView],
    tasks: Container[Tasks],
) -> Figures:
    """Returns the figures of a run. `steps` are its metrics by the policy version after the step, in order.

    Batches and evaluations that a rollback undid are in no figure. `score_...` are held-out scores; `evaluation_...`
    are other recorded ones. Both are of the compared `tasks`. None stands for a score that does not exist.
    """
    known = [one for one in evaluations if not one.undone]
    held_out = [one for one in known if one.held_out and one.tasks in tasks]
    others = [one for one in known if not one.held_out and one.tasks in tasks]
    rewards = {version: reward for version, step in steps.items() if (reward := step.get("reward/mean")) is not None}
    best = max(held_out, key=lambda one: one.score, default=None)
    return {
        "policy_version": policy_version,
        "batches": len(steps),
        f"reward_first_{FINAL_STEPS}": _mean(list(rewards.values())[:FINAL_STEPS]),
        f"reward_last_{FINAL_STEPS}": _mean(list(rewards.values())[-FINAL_STEPS:]),
        "reward_best": max(rewards.values(), default=None),
        "reward_best_version": max(rewards, key=rewards.__getitem__, default=None),
        "evaluations": len(known),
        "score_first": held_out[0].score if held_out else None,
        "score_last": held_out[-1].score if held_out else None,
        "score_best": None if best is None else best.score,
        "score_best_version": None if best is None else best.policy_version,
        "evaluation_first": others[0].score if others else None,
        "evaluation_last": others[-1].score if others else None,
        "episodes": round(_sum(steps, "batch/episodes")),
        "sampled_tokens": round(_sum(steps, "batch/sampled_tokens")),
        "minutes": sum(_sum(steps, name) for name in TIMES) / 60,
    }


def differing_settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    values = {key: [one.get(key) for one in settings] for key in dict.fromkeys(key for one in settings for key in one)}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def _sum(steps: Mapping[int, Mapping[str, float | None]], name: str) -> float:
    return math.fsum(step.get(name) or 0.0 for step in steps.values())


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
