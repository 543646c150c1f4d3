"""`conduct`: a study from plan to findings: explore, freeze, confirm, diagnose. `see_through`: that and what was added.

Functions of the study and of the outcomes: run again over the same book they make the same decisions, launch nothing
twice, and go on where they were interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from agentjet.research.confirm import confirm
from agentjet.research.desk import Desk, Runner
from agentjet.research.diagnosis.diagnose import diagnose
from agentjet.research.explore import tune
from agentjet.research.journal import Book
from agentjet.research.ledger import OutOfBudget
from agentjet.research.models import Finding, Setting, Study, Trial
from agentjet.research.planner.course import NOT_ADDED, annex, not_added
from agentjet.research.seeds import seed_of
from agentjet.research.steering import Steering

MAX_ADVICE = 3
"""Times an adviser is heard after the data began."""


class Adviser(Protocol):
    """What may propose something when a study has its findings: see `agentjet.research.planner.consult`."""

    def advise(self, desk: Desk, findings: list[Finding]) -> None: ...


@dataclass(frozen=True)
class Chapter:
    """A study that was conducted: the first, or an annex."""

    study: Study
    book: Book
    findings: list[Finding]
    desk: Desk


def conduct(study: Study, book: Book, runner: Runner, steering: Steering | None = None) -> tuple[list[Finding], Desk]:
    """The findings, in the order of the hypotheses, and the desk with its ledger."""
    desk = Desk(study, book, runner, steering)
    findings = confirm(study, tune(study, desk), desk)
    diagnose(desk)
    return findings, desk


def see_through(
    study: Study, book: Book, runner: Runner, steering: Steering | None = None, adviser: Adviser | None = None
) -> list[Chapter]:
    """The study, then annex after annex as long as something was added to the one before and can be paid."""
    chapters: list[Chapter] = []
    with ExitStack() as books:
        following: Study | None = study
        current = book
        while following is not None:
            findings, desk = conduct(following, current, runner, steering)
            chapters.append(Chapter(following, current, findings, desk))
            stopped = any(chapter.desk.helm.course.stopped for chapter in chapters)
            if adviser and not stopped and len(chapters) <= MAX_ADVICE:
                adviser.advise(desk, findings)
            probe(desk)
            left = desk.ledger.left("confirm")
            if dropped := not_added(desk.helm.course, left):
                current.decide(NOT_ADDED, dropped)
            following = annex(desk.helm.course, frozen(current), left)
            if following:
                steering = desk.helm.steering_after()
                current = books.enter_context(book.annex(len(chapters)))
    return chapters


def probe(desk: Desk) -> None:
    """The runs that were asked for to understand an arm. They decide nothing."""
    for number, (arm, setting) in enumerate(desk.helm.course.probes, 1):
        seed = seed_of(desk.study, "probe", number)
        try:
            desk.run([Trial(desk.study.id, arm, setting, seed, "probe")])
        except OutOfBudget as refusal:  # capped or vetoed since it was granted
            desk.book.decide(f"probe {number}", str(refusal))


def frozen(book: Book) -> Mapping[str, Setting]:
    """By arm, the setting it was judged at."""
    settings = book.decisions.get("frozen", {})
    assert isinstance(settings, dict)
    return settings
