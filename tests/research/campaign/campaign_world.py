"""A runner of formulas: the score follows from the settings of a commit, and launches may leave files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentjet.research.campaign.strategist import Intervention
from agentjet.research.models import Outcome, Refused, Subject, Transcript, canonical
from agentjet.research.swarm_runner import ServerUnavailable
from tests.research.world import Launches

SICK: Mapping[str, Any] = {"job.max_tokens": 10, "job.optimizer.lr": 0.001, "job.temperature": 1.0} | dict.fromkeys(
    ("job.batch_size", "job.group_size"), 8
)


class Commits:
    """A `SubjectRepo` whose only file has settings."""

    def __init__(self, settings: Mapping[str, Any] = SICK) -> None:
        self._settings: dict[str, dict[str, Any]] = {}
        self.first = self._add(dict(settings))
        self.changed: list[str] = []

    def _add(self, settings: dict[str, Any]) -> str:
        commit = hashlib.sha256(canonical(settings).encode()).hexdigest()[:40]
        self._settings[commit] = settings
        return commit

    def commit(self, base: str, intervention: Intervention) -> str:
        if "judge.py" in intervention.patch:
            raise Refused("judge.py: the judge's files are fixed")
        settings = {**self._settings[base], **intervention.changes}
        if intervention.patch:
            settings["patch"] = intervention.patch
        if settings == self._settings[base]:
            raise Refused("it changes nothing")
        return self._add(settings)

    def settings(self, commit: str) -> dict[str, Any]:
        return self._settings[commit]

    def described(self, commit: str) -> Subject:
        return Subject("tiny", "agent.py:agent", "tasks.jsonl", "x", "j.py:score", settings=self._settings[commit])

    def num_tasks(self) -> int:
        return 32

    def files(self, commit: str) -> Mapping[str, str]:
        return {"subject.toml": f'agent = "agent.py:agent"\n# {canonical(self._settings[commit])}\n'}

    def judge_source(self) -> str:
        return ""

    def changed_outside(self) -> list[str]:
        return self.changed


def truncating(settings: Mapping[str, Any]) -> dict[str, float]:
    """Answers need 30 tokens; the share of truncated ones falls with the limit."""
    whole = min(1.0, float(settings["job.max_tokens"]) / 30)
    return {"score": 0.2 + 0.6 * whole, "truncated": 1 - whole}


@dataclass
class FormulaRunner(Launches):
    """`TrialRunner` of commits."""

    commits: Commits
    formula: Callable[[Mapping[str, Any]], Mapping[str, float]] = truncating
    noise: float = 0.01
    away: int = 0
    """So many calls fail, because no server is there."""
    lost: int = 0
    """So many runs are lost, the first ones."""
    error: str = ""
    """The subject's own error, in every run."""

    def has(self, key: str) -> bool:
        self._reach()
        return super().has(key)

    def collect(self, key: str) -> Outcome:
        self._reach()
        trial = self.trial(key)
        if self.error:
            return Outcome(trial.id, "arm_failed", note=self.error)
        if self.lost:
            self.lost -= 1
            return Outcome(trial.id, "infra_failed", note="the server died")
        settings = {**self.commits.settings(trial.arm), **trial.setting}
        found = self.formula(settings)
        rng = np.random.default_rng([trial.seed, *trial.arm.encode()])
        score = float(found["score"] + self.noise * rng.normal())
        signals = {"completion/truncated": (found.get("truncated", 0.0),) * 6, "policy/entropy": (1.0,) * 6}
        return Outcome(
            trial.id,
            "completed",
            score=score,
            curve=(0.1, score),
            signals=signals,
            settings={name: value for name, value in settings.items() if name.startswith("job.")},
            facts={name: value for name, value in found.items() if name in ("swapped", "rejected", "overpaid")},
            transcripts=(Transcript("best", {"ask": "x"}, ({"role": "user", "content": "x"},), 1.0),),
        )

    def _reach(self) -> None:
        if self.away:
            self.away -= 1
            raise ServerUnavailable("no server answers")


@dataclass
class FakeClock:
    """Time passes by sleeping, and a little by looking."""

    seconds: float = 1_000.0
    slept: list[float] = field(default_factory=list)

    def time(self) -> float:
        self.seconds += 1.0
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.seconds += seconds
