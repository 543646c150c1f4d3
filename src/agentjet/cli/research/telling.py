"""What a running study says on the terminal: a line for what people want to know of its journal's entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentjet.research.diagnosis.diagnose import needing
from agentjet.research.diagnosis.probing import NEEDS, missing
from agentjet.research.journal import Journal, Kind
from agentjet.research.models import Finding, Outcome
from agentjet.research.notes import in_a_line

SHOWN = ("rungs", "setting of ", "frozen")
"""Decisions that are told, by how their names begin."""


class Told(Journal):
    """A journal that tells what is new in it."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        super().__init__(path)
        self._tell = tell
        self._told = {need for name, answer in self.decisions.items() for need in missing(name, answer)}
        """What nobody could answer, and was said so."""

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
                return f"diagnosed: trial {self._number(body['trial'])}: {body['cause']}: {body['seen']}"
            case "exchange" if body["failed"]:
                return f"{body['moment']}: nothing was proposed: {in_a_line(body['failed'])}"
            case "amendment" | "refusal":
                return (
                    f"{'refused' if body['refused'] else 'granted'}: {plain(body['asked'])}: {body['refused']}".rstrip(
                        ": "
                    )
                )
        return ""

    def _outcome(self, outcome: Outcome) -> str:
        trial = self.trials[outcome.trial]
        number = self._number(trial.id)
        score = "no score" if outcome.score is None else f"score {outcome.score:.4g}"
        note = f" ({in_a_line(outcome.note)})" if outcome.note else ""
        return f"trial {number}: {trial.phase} {trial.arm!r}, seed {trial.seed}: {outcome.end}, {score}{note}"

    def _unanswered(self, name: str, answer: object) -> str:
        """What the runner could not tell of a trial, the first time for all trials."""
        new = [need for need in missing(name, answer) if need not in self._told]
        self._told |= set(new)
        return "\n".join(f"could not be asked: {NEEDS[need]}; open for that: {needing(need)}" for need in new)

    def _number(self, trial: str) -> int:
        """Trials are counted from 1, in the order they were meant to be launched."""
        return list(self.trials).index(trial) + 1

    def _finding(self, finding: Finding) -> str:
        claims = {hypothesis.id: hypothesis.claim for hypothesis in self.study.hypotheses} if self.study else {}
        interval = (
            f": {finding.estimate:+.4g}, {finding.confidence:.1%} interval {finding.low:+.4g} to {finding.high:+.4g}"
            if finding.estimate is not None and finding.confidence is not None
            else ""
        )
        return f"{claims.get(finding.hypothesis, finding.hypothesis)}: {finding.verdict}{interval} ({finding.reason})"


def plain(content: object) -> str:
    """What a journal holds, as a person would write it down."""
    if isinstance(content, Mapping):
        return "; ".join(f"{name} = {plain(value)}" for name, value in content.items() if value not in ("", {}))
    if isinstance(content, list | tuple):
        return ", ".join(map(plain, content))
    return f"{content:.4g}" if isinstance(content, float) else str(content)
