"""What a running study says on the terminal: a line for what people want to know of its journal's entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentjet.cli.research.words import plain
from agentjet.research.diagnosis.diagnose import needing
from agentjet.research.diagnosis.probing import NEEDS, missing
from agentjet.research.journal import Journal, Kind, annex_path
from agentjet.research.models import Finding, Outcome
from agentjet.research.notes import in_a_line
from agentjet.research.planner.course import NOT_ADDED
from agentjet.research.report.happenings import asked_text

SHOWN = ("rungs", "setting of ", "frozen", NOT_ADDED)
"""Decisions that are told, by how their names begin."""


class Told(Journal):
    """A journal that tells what is new in it."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        super().__init__(path)
        self._tell = tell
        self._told = {need for name, answer in self.decisions.items() for need in missing(name, answer)}
        """What nobody could answer, and was said so."""

    def annex(self, number: int) -> Told:
        return Told(annex_path(self.path, number), self._tell)

    def append(self, kind: Kind, body: Mapping[str, Any]) -> None:
        super().append(kind, body)
        line = self._line(kind, body)
        if line:
            self._tell(line)

    def _line(self, kind: Kind, body: Mapping[str, Any]) -> str:
        match kind:
            case "study":
                return f"study {self.study.id if self.study else ''}: {body['topic']}"
            case "outcome":
                return self._outcome(Outcome.from_json(body))
            case "decision" if body["name"].startswith(SHOWN):
                return f"decided: {body['name']}: {plain(body['content'])}"
            case "decision":
                return self._unanswered(body["name"], body["content"])
            case "finding":
                return self._finding(Finding.from_json(body["content"]))
            case "diagnosis":
                return f"diagnosed: {self._name(body['trial'])}: {body['cause'].replace('_', ' ')}: {body['seen']}"
            case "exchange" if body["failed"]:
                return f"{body['moment']}: nothing was proposed: {in_a_line(body['failed'])}"
            case "amendment" | "refusal":
                asked = asked_text(body["asked"])
                return f"refused: {asked}: {body['refused']}" if body["refused"] else f"granted: {asked}"
        return ""

    def _outcome(self, outcome: Outcome) -> str:
        score = "no score" if outcome.score is None else f"score {outcome.score:.4g}"
        note = f" ({in_a_line(outcome.note)})" if outcome.note else ""
        return f"{self._name(outcome.trial)}: {outcome.end.replace('_', ' ')}, {score}{note}"

    def _unanswered(self, name: str, answer: object) -> str:
        """What the runner could not tell of a trial, the first time for all trials."""
        new = [need for need in missing(name, answer) if need not in self._told]
        self._told |= set(new)
        return "\n".join(f"could not be asked: {NEEDS[need]}; open for that: {needing(need)}" for need in new)

    def _name(self, trial: str) -> str:
        """Trials are counted from 1, in the order they were meant to be launched."""
        meant = self.trials[trial]
        return f"trial {list(self.trials).index(trial) + 1}, {meant.phase} {meant.arm!r}, seed {meant.seed}"

    def _finding(self, finding: Finding) -> str:
        claims = {hypothesis.id: hypothesis.claim for hypothesis in self.study.hypotheses} if self.study else {}
        interval = (
            f": {finding.estimate:+.4g}, {finding.confidence:.1%} interval {finding.low:+.4g} to {finding.high:+.4g}"
            if finding.estimate is not None and finding.confidence is not None
            else ""
        )
        verdict = finding.verdict.replace("_", " ")
        return f"{claims.get(finding.hypothesis, finding.hypothesis)}: {verdict}{interval} ({finding.reason})"
