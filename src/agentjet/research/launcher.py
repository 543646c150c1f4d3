"""`TrialLauncher` launches the trials of a study, each at most once, within its budget.

The intent of a launch is in the journal before the launch. For an intent without an outcome the launcher asks the
runner whether it has the key, and launches only if not. A trial that the infrastructure lost, or whose environment
died, is launched again with the same seed and a new key.

`Spending` enforces the budget: spending never exceeds it, and tuning never uses the share reserved for confirming. A
run that continues another costs only what it adds. Spending is derived from the trials and is not stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from agentjet.errors import AgentJetError
from agentjet.research.diagnosis import with_dead_environment
from agentjet.research.journal import StudyLog
from agentjet.research.models import Outcome, Phase, Study, Trial
from agentjet.research.records import hash_of

ROUNDING = 1e-9


class OutOfBudget(AgentJetError):
    """The next trials cost more than is left for their phase. None of them was launched."""


class Spending:
    """Full runs spent on the launched trials of a study, by phase. Repeats of lost runs are counted separately, because
    they are not evidence.
    """

    def __init__(self, study: Study, launches: Iterable[tuple[Trial, int]] = ()) -> None:
        """`launches` are trials in the order of their first launch, each with its number of attempts."""
        self.budget = study.budget
        self.for_exploring = study.budget * (1 - study.reserve)
        self.spent: dict[Phase, float] = {"explore": 0.0, "confirm": 0.0}
        self.repeated = 0.0
        self._reached: dict[str, float] = {}
        for trial, attempts in launches:
            self.spent[trial.phase] += added_cost(self._reached, trial)
            self.repeated += (attempts - 1) * trial.fidelity

    @property
    def total(self) -> float:
        return sum(self.spent.values()) + self.repeated

    def left(self, phase: Phase) -> float:
        left = self.budget - self.total
        return min(left, self.for_exploring - self.spent["explore"]) if phase == "explore" else left

    def cost(self, trials: Iterable[Trial]) -> float:
        """Returns the cost that these trials would add, in this order."""
        reached = dict(self._reached)
        return sum(added_cost(reached, trial) for trial in trials)


def added_cost(reached: dict[str, float], trial: Trial) -> float:
    """Returns the cost that a trial adds to the run it continues, and updates `reached`."""
    before = reached.get(trial.run, 0.0)
    reached[trial.run] = max(before, trial.fidelity)
    return max(0.0, trial.fidelity - before)


def seed_of(study: Study, phase: Phase, number: int) -> int:
    """Derives a 31-bit seed from the study, so that a re-run uses the same seeds and phases share none. Arms share the
    seeds of a phase, so that random tasks are the same on both sides.
    """
    return int(hash_of([study.id, phase, number])[:8], 16) >> 1


MAX_ATTEMPTS = 3
"""Maximum launches of a trial that the infrastructure keeps losing."""


class TrialRunner(Protocol):
    """Runs trials. It keeps launches under their keys across restarts of the caller. It continues the shorter run of
    the same arm, setting and seed, if there is one.
    """

    def has(self, key: str) -> bool:
        """True if a launch under this key was accepted."""
        ...

    def launch(self, key: str, trial: Trial) -> None:
        """Starts a trial. Returns once `has(key)` is durably true."""
        ...

    def collect(self, key: str) -> Outcome:
        """Blocks until the launch under the key has ended."""
        ...


class TrialLauncher:
    """Launches the trials of a study once each, within its budget."""

    def __init__(self, study: Study, log: StudyLog, runner: TrialRunner) -> None:
        log.open_study(study)
        self.study = study
        self.log = log
        self.runner = runner

    @property
    def spending(self) -> Spending:
        return Spending(self.study, [(trial, self.log.attempts[name]) for name, trial in self.log.trials.items()])

    def run(self, trials: list[Trial]) -> list[Outcome]:
        """Returns outcomes of trials of one phase in the given order. Raises `OutOfBudget` before the first launch if
        the budget cannot pay for all.
        """
        new = [trial for trial in trials if trial.id not in self.log.trials]
        if new:
            spending, phase = self.spending, new[0].phase
            cost, left = spending.cost(new), spending.left(phase)
            if cost > left + ROUNDING:
                raise OutOfBudget(f"{len(trials)} trials to {phase} cost {cost:.2f} runs, and {left:.2f} are left")
        for trial in trials:
            self._launch(trial, attempt=1)
        return [self._finish(trial) for trial in trials]

    def _finish(self, trial: Trial) -> Outcome:
        """Returns the first result, or the last infrastructure failure."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            outcome = self._outcome(trial, attempt)
            if outcome.end != "infra_failed":
                break
            is_repeated = self.log.attempts[trial.id] > attempt
            if not is_repeated and trial.fidelity > self.spending.left("confirm") + ROUNDING:
                break
        return outcome

    def _outcome(self, trial: Trial, attempt: int) -> Outcome:
        """Returns the outcome of one launch, from the log or from the runner."""
        known = self.log.outcomes.get(trial.id, [])
        if len(known) < attempt:
            self._launch(trial, attempt)
            outcome = with_dead_environment(self.runner.collect(launch_key(trial, attempt)))
            assert outcome.trial == trial.id, f"the runner returned an outcome of {outcome.trial} for {trial.id}"
            self.log.append("outcome", outcome.to_json())
        return self.log.outcomes[trial.id][attempt - 1]

    def _launch(self, trial: Trial, attempt: int) -> None:
        """Launches exactly once, also after a crash in between."""
        key = launch_key(trial, attempt)
        if self.log.attempts.get(trial.id, 0) < attempt:
            self.log.append("intent", {"key": key, "trial": trial.to_json()})
        if len(self.log.outcomes.get(trial.id, [])) < attempt and not self.runner.has(key):
            self.runner.launch(key, trial)


def launch_key(trial: Trial, attempt: int) -> str:
    return f"{trial.id}-{attempt}"
