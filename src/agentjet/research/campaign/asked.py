"""The study of a topic in a campaign: its arms are commits of the subject, and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentjet.errors import ConfigError
from agentjet.research.campaign.runs import SHORT, Question
from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.models import MEASURED, Arm, Knob, Refused, Study, Value, refuse, shown_model
from agentjet.research.plan import check_arms
from agentjet.research.question import METRICS_IN_WORDS, StudyQuestion, arms_of
from agentjet.research.scheduler import estimate_cost

RESERVE = 0.4
"""Share of the budget that tuning may not spend."""


def planned(
    question: Question,
    asked: StudyQuestion,
    levels: Mapping[str, Sequence[Value]],
    repo: SubjectRepo,
    knobs: Sequence[Knob] = (),
) -> dict[str, Any]:
    """Returns the study as JSON, the commits of its arms, and what was asked. Every arm that does not set a knob tunes
    it. Raises `ConfigError` for arms that cannot be compared, and for a budget that cannot pay for them.
    """
    first = repo.described(repo.first)
    arms, claims = arms_of(asked, levels, first, repo.num_tasks)
    commits: dict[str, str] = {}
    made, agents = [], {}
    for name, arm in arms.items():
        commits[name] = repo.first
        if arm.patch or arm.keys:
            try:
                commits[name] = repo.arm(repo.first, name, arm.patch, keys=arm.keys)
            except Refused as error:
                raise ConfigError(f"arm {name!r}: {error}") from None
        code = commits[name] if commits[name] != repo.first else ""
        if code:
            agents[name] = arm.keys.get("agent", f"{first.agent} of {code[:8]}")
        tuned = tuple(knob for knob in knobs if knob.name not in arm.changes)
        made.append(Arm(name, dict(arm.changes), tuned, code))
    for knob in knobs:
        refuse(len(knob.values) < 2, f"--tune {knob.name}={knob.values[0]:g}: give two values or more to choose from")
        refuse(
            all(knob.name in arm.changes for arm in made),
            f"--tune {knob.name}: the arms differ in it, so none can tune it: give its values by --level",
        )
    check_arms(made, {"job.optimizer.total_steps": first.steps, **first.settings})
    study = Study(
        asked.topic,
        question.metric if asked.metrics[0] == "score" else METRICS_IN_WORDS[asked.metrics[0]],
        question.sesoi,
        tuple(made),
        claims,
        budget=1.0,
        reserve=RESERVE if knobs else 0.0,
        looks=question.looks,
        alpha=question.alpha_of(1),
        evaluator=question.evaluator,
        seed=question.seed,
        subject=replace(first, model=shown_model(first.model), agents=agents, code=question.evaluator),
        form=asked.form,
        reading=asked.reading(levels),
    )
    cost, before = estimate_cost(study), 1 + (SHORT * len(made) if question.equal in MEASURED else 0)
    refuse(
        question.budget.runs is not None and question.budget.runs < before + cost.least,
        f"budget = {question.budget.runs} runs: {len(made)} arms with {question.looks[0]} to {question.looks[-1]} "
        f"seeds need {before + cost.least:.0f} to {before + cost.most:.0f} full runs: give more, or fewer levels "
        "(--level)",
    )
    runs = cost.most if question.budget.runs is None else min(cost.most, question.budget.runs - before)
    content = replace(study, budget=round(runs, 6)).to_json()
    return {"study": content, "commits": commits, "asked": asked.model_dump(mode="json")}


def knobs_of(given: Mapping[str, Sequence[Value]]) -> list[Knob]:
    """Raises `ConfigError` for a setting that cannot be tuned."""
    for name, values in given.items():
        wrong = [value for value in values if isinstance(value, bool) or not isinstance(value, int | float)]
        refuse(
            not name.startswith("job.") or bool(wrong),
            f"--tune {name}={values[0]}: numbers of a setting of the job are tuned, such as job.optimizer.lr=1e-5",
        )
    return [Knob(name, tuple(sorted({float(value) for value in values}))) for name, values in given.items()]  # type: ignore[arg-type]
