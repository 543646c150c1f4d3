"""`conduct`: a study from its plan to its findings. Explore, freeze, confirm, diagnose.

A function of the study and of the outcomes: run again over the same book it makes the same decisions, launches nothing
twice, and goes on where it was interrupted.
"""

from __future__ import annotations

from agentjet.research.confirm import confirm
from agentjet.research.desk import Desk, Runner
from agentjet.research.diagnosis.diagnose import diagnose
from agentjet.research.explore import tune
from agentjet.research.journal import Book
from agentjet.research.models import Finding, Study


def conduct(study: Study, book: Book, runner: Runner) -> tuple[list[Finding], Desk]:
    """The findings, in the order of the hypotheses, and the desk with its ledger."""
    desk = Desk(study, book, runner)
    findings = confirm(study, tune(study, desk), desk)
    diagnose(desk)
    return findings, desk
