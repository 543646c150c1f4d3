"""`Ledger`: what a study has spent, in full runs. The program keeps to it, so nobody has to be asked to.

Invariants: the spending never exceeds the budget, and exploring never touches the share reserved for confirming. A run
that continues another costs what it adds. It is counted anew from the trials each time: it has no state to lose.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentjet.errors import AgentJetError
from agentjet.research.models import Phase, Study, Trial, canonical

ROUNDING = 1e-9


class OutOfBudget(AgentJetError):
    """What was about to be launched costs more than is left for its phase. Nothing of it was launched."""


class Ledger:
    """Spending by phase. Repeats of runs that the infrastructure lost are counted apart: they are no evidence."""

    def __init__(self, study: Study) -> None:
        self.budget = study.budget
        self.for_exploring = study.budget * (1 - study.reserve)
        self.spent: dict[Phase, float] = {"explore": 0.0, "confirm": 0.0, "probe": 0.0}
        self.repeated = 0.0
        self._reached: dict[str, float] = {}

    @property
    def total(self) -> float:
        return sum(self.spent.values()) + self.repeated

    def cap(self, budget: float) -> None:
        """From now on no more than this is spent, in all."""
        self.for_exploring *= budget / self.budget
        self.budget = budget

    def left(self, phase: Phase) -> float:
        left = self.budget - self.total
        return min(left, self.for_exploring - self.spent["explore"]) if phase == "explore" else left

    def cost(self, trials: Iterable[Trial]) -> float:
        """What these would add, one after the other."""
        reached = dict(self._reached)
        return sum(advance(reached, trial) for trial in trials)

    def reserve(self, trials: list[Trial]) -> None:
        """Debit them all, or raise `OutOfBudget` and debit none. The trials are of one phase."""
        if not trials:
            return
        cost, phase = self.cost(trials), trials[0].phase
        assert all(trial.phase == phase for trial in trials)
        left = self.left(phase)
        if cost > left + ROUNDING:
            raise OutOfBudget(f"{len(trials)} trials to {phase} cost {cost:.2f} runs, and {left:.2f} are left")
        for trial in trials:
            self.spent[phase] += advance(self._reached, trial)

    def repeat(self, trial: Trial) -> None:
        """Debit another attempt at a trial. Raises `OutOfBudget`."""
        if trial.fidelity > self.budget - self.total + ROUNDING:
            raise OutOfBudget(f"repeating trial {trial.id} costs {trial.fidelity:.2f} runs: too much for what is left")
        self.repeated += trial.fidelity


def advance(reached: dict[str, float], trial: Trial) -> float:
    """What a trial adds to the run it continues; `reached` is brought up to date."""
    run = canonical([trial.arm, dict(trial.setting), trial.seed, trial.phase])
    before = reached.get(run, 0.0)
    reached[run] = max(before, trial.fidelity)
    return max(0.0, trial.fidelity - before)
