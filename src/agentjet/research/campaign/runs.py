"""`CampaignRuns`: the launches of a campaign, each once, within its budget, and patient while servers or disks fail.

A launch has an `intent` entry first; the runner is asked for its key before it launches. A run has an `observed`
entry with its cost. Spending counts the steps that this process has passed, so that a resumed campaign,
which passes them again, decides the same.
"""

from __future__ import annotations

import errno
import math
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from agentjet.errors import ConfigError
from agentjet.research.campaign.models import Budget
from agentjet.research.campaign.notebook import Notebook
from agentjet.research.campaign.strategist import causes, facts_of, signs
from agentjet.research.journal import JournalEntry
from agentjet.research.models import Outcome, Study, Trial
from agentjet.research.records import Setting
from agentjet.research.scheduler import MAX_ATTEMPTS, TrialRunner, added_cost
from agentjet.research.subject import MEASURED, Equal
from agentjet.research.swarm_runner import ServerUnavailable

OBSERVING = "campaign"
"""Name in place of a study for the trials that observe."""
WAITS = (60.0, 3600.0)
"""Seconds before the servers are asked again: first, and at most."""
PATIENCE = 7 * 86400.0
"""Seconds without a server after which the campaign stops, to be resumed."""
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EAGAIN, errno.EMFILE)
"""Errors of the system that may pass: a full disk, no memory."""
AMOUNTS: Mapping[str, tuple[str, ...]] = {
    "episodes": ("batch/episodes",),
    "tokens": ("batch/sampled_tokens",),
    "seconds": ("time/sample", "time/wait", "time/learn"),
}
"""Signals that add up to an amount."""
LONGEST_RUN = 4
"""Maximum steps of a full run, in those of the subject as given, if arms learn from equal tokens or for equal times."""
T = TypeVar("T")


class Clock(Protocol):
    """The module `time`, or one with which a week passes in a test at once."""

    def time(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


class Ending(Exception):
    """The campaign is over."""


@dataclass(frozen=True)
class Observation:
    """A run of a commit, and the entry that has it."""

    entry: int
    commit: str
    run: Outcome

    @property
    def causes(self) -> frozenset[str]:
        return causes(self.run)

    def score_at(self, share: float) -> float:
        """Score at a share of the run, between its evenly spaced evaluations."""
        return float(np.interp(share, np.linspace(0, 1, len(self.run.curve)), self.run.curve))


@dataclass(frozen=True)
class StudyRunner:
    """A `TrialRunner` for a study whose arms are commits: `runner` gets the commit as the trial's arm."""

    runner: TrialRunner
    study: Study

    def has(self, key: str) -> bool:
        return self.runner.has(key)

    def launch(self, key: str, trial: Trial) -> None:
        self.runner.launch(key, replace(trial, arm=self.study.arm(trial.arm).code))

    def collect(self, key: str) -> Outcome:
        return replace(self.runner.collect(key), trial=key.rpartition("-")[0])


class CampaignRuns:
    def __init__(
        self,
        notebook: Notebook,
        runner: TrialRunner,
        budget: Budget,
        clock: Clock,
        tell: Callable[[str], None],
        equal: Equal = "episodes",
    ) -> None:
        self.notebook, self.runner, self.budget = notebook, runner, budget
        self.clock, self.tell, self.equal = clock, tell, equal
        self._first: Outcome | None = None
        """The first full run. Its tokens or seconds are those of every arm."""
        self._steps: dict[str, int] = {}
        """By commit, the steps of a full run, where tokens or seconds are equal."""
        self.spent = {"runs": 0.0, "hours": 0.0}
        """Full runs and hours of work so far."""
        self._waited = 0.0
        self._reached: dict[str, float] = {}
        self._under_way: dict[str, Trial] = {}

    def observe(
        self, commits: Sequence[str], seed: int, why: str, because: Sequence[int], share: float = 1.0
    ) -> list[Observation]:
        """Runs the commits at the same time, each once; lost runs are repeated with the same seed.

        Raises `Ending` before a launch that the budget does not pay for.
        """
        trials = [
            Trial(OBSERVING, commit, self.setting(commit) if share == 1 else {}, seed, "explore", share)
            for commit in commits
        ]
        for trial in trials:
            self._launch(trial, 1, because)
        return [self._observed(trial, why, because) for trial in trials]

    def _launch(self, trial: Trial, attempt: int, because: Sequence[int]) -> str:
        """Launches once, also after a crash in between, and returns the key."""
        key = f"{trial.arm[:16]} {trial.seed} {trial.fidelity:.4f} {attempt}"
        if key not in self._under_way and self._cost(trial) > self.left():
            raise Ending("the budget is spent")
        self._under_way[key] = trial
        if self.notebook.known(f"observed {key}") is None:
            self.note("intent", {"key": key, "trial": trial.to_json()}, f"intent {key}", because)
            if not self.patiently(lambda: self.runner.has(key)):
                self.patiently(lambda: self.runner.launch(key, trial))
        return key

    def _observed(self, trial: Trial, why: str, because: Sequence[int]) -> Observation:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            key = self._launch(trial, attempt, because)
            entry = self.notebook.known(f"observed {key}") or self.note(
                "observed", {"why": why, **self._collected(key, trial)}, f"observed {key}", because
            )
            del self._under_way[key]
            self.spend(entry.content["cost"], entry.content["hours"])
            run = Outcome.from_json(entry.content["outcome"])
            if run.score is not None:
                added_cost(self._reached, trial)
                self._measure(trial, run)
            if run.end != "infra_failed":
                break
        return Observation(entry.number, trial.arm, run)

    def _collected(self, key: str, trial: Trial) -> dict[str, Any]:
        begun = self.working_time()
        run = self.patiently(lambda: self.runner.collect(key))
        trained = bool(run.curve) or run.score is not None  # else it never answered
        return {
            "trial": trial.to_json(),
            "outcome": run.to_json(),
            "facts": facts_of(run),
            "signs": [sign.to_json() for sign in signs(run)],
            "cost": self._cost(trial) if trained else 0.0,
            "hours": (self.working_time() - begun) / 3600,
        }

    def _cost(self, trial: Trial) -> float:
        """Full runs that a trial adds to those that were made."""
        return added_cost(dict(self._reached), trial)

    # ---- equal amounts -----------------------------------------------------------------------------------------------

    def setting(self, commit: str) -> Setting:
        """Settings of a commit's full runs, besides its own: their length, where a short run gave it."""
        return {"job.max_steps": self._steps[commit]} if commit in self._steps else {}

    def _measure(self, trial: Trial, run: Outcome) -> None:
        self._first = self._first or run
        if self.equal not in MEASURED or trial.fidelity == 1:
            return
        steps, whole = (len(one.signals.get(AMOUNTS[self.equal][0], ())) for one in (run, self._first))
        used, given = (amount([one.signals], self.equal) for one in (run, self._first))
        if used and given:
            self._steps[trial.arm] = max(1, min(round(given * steps / used), LONGEST_RUN * whole))

    # ---- budget ------------------------------------------------------------------------------------------------------

    def spend(self, runs: float, hours: float) -> None:
        self.spent["runs"] += runs
        self.spent["hours"] += hours

    def left(self) -> float:
        """Full runs that the budget still pays for, without those that are under way."""
        spent, waiting = self.spent, sum(map(self._cost, self._under_way.values()))
        if self.budget.runs is not None:
            return self.budget.runs - spent["runs"] - waiting
        assert self.budget.hours is not None
        each = spent["hours"] / spent["runs"] if spent["runs"] else 0.0
        return (self.budget.hours - spent["hours"]) / each - waiting if each else float("inf")

    # ---- entries and patience ----------------------------------------------------------------------------------------

    def note(self, kind: str, content: object, key: str, because: Sequence[int] = ()) -> JournalEntry:
        """The entry under the key, which has this content if it is new. Waits while the disk is full."""
        known = self.notebook.known(key)
        return known or self.patiently(lambda: self.notebook.entry(kind, content, because, key=key))

    def patiently(self, act: Callable[[], T]) -> T:
        """Calls `act`, again and again while servers or the disk are away. Raises `ConfigError` in the end."""
        pause, waited = WAITS[0], 0.0
        while True:
            try:
                return act()
            except (ServerUnavailable, OSError, sqlite3.OperationalError) as error:
                if isinstance(error, OSError) and error.errno not in PASSING:
                    raise
                if waited >= PATIENCE:
                    raise ConfigError(
                        f"gave up after {waited / 3600:.0f} h: {error}. Resume the campaign later"
                    ) from None
                self.tell(f"{error}: trying again in {pause:.0f} s")
            self.clock.sleep(pause)
            waited += pause
            self._waited += pause
            pause = min(2 * pause, WAITS[1])

    def working_time(self) -> float:
        """Seconds, without waiting for servers and disks."""
        return self.clock.time() - self._waited


Signals = Mapping[str, Sequence[float | None]]


def amount(runs: Iterable[Signals], of: str) -> float:
    """Sum over runs of training episodes, of sampled tokens of training, or of seconds; 0 for steps."""
    values = [value for signals in runs for name in AMOUNTS.get(of, ()) for value in signals.get(name, ())]
    return math.fsum(value for value in values if value is not None)
