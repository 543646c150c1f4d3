"""The plan in a report.

1. Each arm's agent, if they differ, and a separate evaluator.
2. The expectation of a claim, if the plan has one.
3. The tuned arms, and if they tuned alike.
"""

from __future__ import annotations

from dataclasses import replace

from agentjet.research.journal import StudyLog
from agentjet.research.models import Arm, Hypothesis, Subject
from agentjet.research.report.document import render
from agentjet.research.scheduler import conduct
from tests.research.reported import rich_book
from tests.research.world import KNOB, STUDY, Formula


def test_agents_and_evaluator_are_told_where_they_differ() -> None:
    subject = Subject("smollm2-135m", "agent.py:play", "tasks.jsonl", "held.jsonl", evaluator="judge.py:score")
    for agents, rows in (
        ({}, ["| arm | changes |", "| a | gain = 0 |"]),
        ({"b": "b.py:play"}, ["| arm | agent | changes |", "| a | `agent.py:play` | gain", "| b | `b.py:play` | gain"]),
    ):
        log = StudyLog()
        log.open_study(replace(STUDY, subject=replace(subject, agents=agents)))
        text = render(log).markdown.text
        for row in ("| evaluator of the held-out tasks | `judge.py:score` |", *rows):
            assert row in text, row


def test_what_the_plan_expected_is_told_and_nothing_else() -> None:
    old = render(rich_book()).markdown.text
    assert "| F1 | b scores higher than a | b \\*bold\\* against a | confirmatory |" in old
    assert "expected" not in old, "of an older study nobody knows what was"
    claim, other = STUDY.hypotheses[0], Hypothesis("a scores higher than b", "a", "b", origin="llm")
    log = StudyLog()
    conduct(replace(STUDY, hypotheses=(replace(claim, sign="-", why="it costs 3 turns"), other)), log, Formula())
    told = render(log).markdown.text
    assert "| compared | expectation for the first | kind |" in told
    assert f"| {claim.arm} against {claim.against} | lower: it costs 3 turns | confirmatory | prior |" in told
    assert "| a against b | – | confirmatory | llm |" in told


def test_who_was_tuned_is_said() -> None:
    alike, none = "Every arm was tuned over the same values", "No arm has knobs"
    a, b = STUDY.arms

    def said(*arms: Arm) -> str:
        log = StudyLog()
        conduct(replace(STUDY, arms=arms), log, Formula())
        return render(log).markdown.text

    assert alike in said(a, b)
    fixed = [replace(arm, changes={**arm.changes, "lr": 1.0}, nuisance=()) for arm in (a, b)]
    assert none in said(*fixed)
    only_b = said(fixed[0], b)
    assert "each tuned the knobs in the table of arms; “a” has none.\nTheir differences include that." in only_b
    assert "tuned the knobs in the table of arms.\n" in said(
        a, replace(b, nuisance=(replace(KNOB, values=(1.0, 2.0)),))
    )
    log = StudyLog()
    log.open_study(STUDY)
    assert "No setting was tried yet." in render(log).markdown.text
