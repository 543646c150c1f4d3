"""1. Before the data, a plan can grow within its budget, and exploratory claims can be promoted. Afterwards they
   cannot.
2. After it, additions are exploratory and paid from the remaining budget.
3. Settings must be in the priors or in the study. A model's reasons contain no numbers; a person's may.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentjet.research.amendments import EVERYTHING, AmendedStudy, annex, grant
from agentjet.research.models import (
    Action,
    AddArm,
    AddHypothesis,
    AddSeeds,
    Hypothesis,
    Promote,
    Refused,
    RequestProbe,
    Stop,
    Study,
    Subject,
    Veto,
)
from tests.research.world import STUDY

SUBJECT = Subject("tiny", "agent.py:agent", "tasks.jsonl", "held_out.jsonl")
TRAINED = replace(
    STUDY,
    subject=SUBJECT,
    arms=tuple(
        replace(arm, changes={"job.recipe.kl_coef": kl}) for arm, kl in zip(STUDY.arms, (0.0, 0.1), strict=True)
    ),
)
ARM = AddArm(arm="c", against="a", changes={"gain": 5.0})


def after(*actions: Action, study: Study = STUDY, begun: bool = False) -> AmendedStudy:
    amended = AmendedStudy(study, begun)
    for action in actions:
        amended = grant(amended, action, "llm", EVERYTHING)
    return amended


def test_before_the_data_the_plan_grows() -> None:
    amended = after(ARM, Promote(arm="c", against="a"), AddHypothesis(arm="c", against="b"), AddSeeds(seeds=10))
    assert [arm.name for arm in amended.study.arms] == ["a", "b", "c"]
    assert amended.study.arm("c").nuisance == STUDY.arms[0].nuisance, "it is tuned like the others"
    assert amended.study.hypotheses[1:] == (
        Hypothesis("c scores higher than a", "c", "a", True, "llm"),
        Hypothesis("c scores higher than b", "c", "b", False, "llm"),
    )
    assert amended.study.looks == (4, 8, 10)
    assert amended.study.alpha == STUDY.alpha and amended.study.sesoi == STUDY.sesoi


def test_after_the_data_the_study_stands() -> None:
    amended = after(ARM, AddSeeds(seeds=5), RequestProbe(arm="b", changes={"lr": 2.0}), Stop(), begun=True)
    assert amended.study == STUDY
    assert amended.stopped
    assert amended.probes == (("b", {"gain": 3.0, "lr": 2.0}),)
    later = annex(amended, {"a": {"gain": 0.0, "lr": 16.0}}, left=30.0)
    assert later is not None
    assert [(arm.name, dict(arm.changes), len(arm.nuisance)) for arm in later.arms] == [
        ("a", {"gain": 0.0, "lr": 16.0}, 0),
        ("c", {"gain": 5.0}, 1),
    ]
    assert (later.budget, later.looks, later.sesoi, later.alpha) == (30.0, (4, 5), STUDY.sesoi, STUDY.alpha)
    assert not any(hypothesis.confirmatory for hypothesis in later.hypotheses)
    assert later.id != STUDY.id


def test_nothing_added_is_no_annex() -> None:
    assert annex(after(begun=True), {}, left=30.0) is None
    assert annex(after(ARM, begun=True), {}, left=0.0) is None
    vetoed = grant(after(ARM, begun=True), Veto(arm="c"), "human", EVERYTHING)
    assert annex(vetoed, {}, left=30.0) is None


@pytest.mark.parametrize(
    ("action", "begun", "named"),
    [
        (Promote(arm="b", against="a"), False, "no exploratory hypothesis"),
        (Promote(arm="b", against="a"), True, "an exploratory claim stays exploratory"),
        (AddHypothesis(arm="b", against="a"), False, "compared already"),
        (AddHypothesis(arm="a", against="b", confirmatory=True), True, "new claims are exploratory"),
        (AddSeeds(seeds=12), True, "the looks were fixed"),
        (AddSeeds(seeds=41), False, "more than the budget of 80"),
        (RequestProbe(arm="a"), False, "nothing has run yet"),
        (RequestProbe(arm="a", changes={"speed": 1.0}), True, "'speed' is not a setting"),
        (AddArm(arm="c", against="a", changes={"gain": "high"}), True, "the values in this study are"),
        (AddArm(arm="c", against="a", changes={"gain": True}), True, "the values in this study are"),
        (AddArm(arm="c", against="a", changes={"gain": 3.0}), True, "under another name"),
        (AddArm(arm="c", against="a", changes={"gain": 5.0}, why="worth 3 points"), True, "numbers come from trials"),
    ],
)
def test_refused(action: Action, begun: bool, named: str) -> None:
    with pytest.raises(Refused, match=named):
        after(action, begun=begun)


def test_what_is_left_bounds_what_is_asked() -> None:
    amended = grant(AmendedStudy(STUDY, True), ARM, "human", 8.0)
    with pytest.raises(Refused, match=r"this takes 12 full runs at the least, and 8\.00 are left"):
        grant(amended, AddHypothesis(arm="c", against="b"), "human", 8.0)
    with pytest.raises(Refused, match=r"this takes 9 full runs at the least, and 8\.00 are left"):
        grant(amended, RequestProbe(arm="b"), "human", 8.0)
    assert grant(amended, Veto(arm="c"), "human", 0.0).hypotheses == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"job.optimizer.lr": 5.0}, "from 1e-08 to 0.1"),
        ({"job.recipe.name": "ppo"}, "one of grpo"),
        ({"job.group_size": 2.5}, "a whole number"),
        ({"job.seed": 3}, "not a setting that an arm"),
        ({"server.port": 1}, "not a setting that an arm"),
        ({"job.optimizer.schedule": "linear"}, "total_steps"),
        ({"gain": 1.0}, "not a setting that an arm"),
    ],
)
def test_arms_on_servers_keep_to_what_the_priors_know(changes: dict[str, float | str], named: str) -> None:
    with pytest.raises(Refused, match=named):
        after(AddArm(arm="c", against="a", changes=changes), study=TRAINED, begun=True)


def test_arms_on_servers_may_change_what_nobody_thought_of_before() -> None:
    amended = after(AddArm(arm="c", against="a", changes={"job.recipe.loss.name": "gspo"}), study=TRAINED, begun=True)
    assert dict(amended.arms[0].changes) == {"job.recipe.loss.name": "gspo"}


def test_a_person_may_say_numbers() -> None:
    said = ARM.model_copy(update={"why": "3 of 4 seeds of b were lost"})
    assert grant(AmendedStudy(STUDY, True), said, "human", EVERYTHING).arms
