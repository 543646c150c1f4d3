"""`Spending`: what a study has spent, in full runs. The program keeps to it, so nobody has to be asked to.

Invariants: the spending never exceeds the budget, and exploring never touches the share reserved for confirming. A run
that continues another costs what it adds. It is counted anew from the trials each time: it has no state to lose.

Seeds, derived from the study so that a re-run draws the same, and so that no confirming seed was ever explored.

SteeringFile: what a person asks of a running study, as lines of a file beside its journal, and where they are taken.

Anybody may append at any time. The study reads the lines at its fixed points only, before each batch of trials, and
writes down which it took there: a study that is resumed takes the same lines at the same points, and ends the same.

`TrialLauncher`: where trials are launched, each at most once, and their outcomes come back.

A launch has two entries in the book: the intent, before anybody is asked, and the acknowledgement, after. Between
the two nobody knows; so a desk that finds an unacknowledged intent asks the runner whether it has the key, and
launches only what it has not. A run that the infrastructure lost is launched again with the same seed, under a new key;
so is one whose environment died on the way.

Before each batch of trials, that is after the one before it, the study takes what was asked of it meanwhile: whoever
composes the next batch knows.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from agentjet.errors import AgentJetError, ConfigError
from agentjet.research.amendments import AmendedStudy, AmendmentLog
from agentjet.research.journal import StudyLog
from agentjet.research.models import Amendment, Origin, Outcome, Phase, Request, Study, Trial, canonical
from agentjet.research.run_signals import with_dead_environment

ROUNDING = 1e-9


class OutOfBudget(AgentJetError):
    """What was about to be launched costs more than is left for its phase. Nothing of it was launched."""


class Spending:
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
        return sum(added_cost(reached, trial) for trial in trials)

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
            self.spent[phase] += added_cost(self._reached, trial)

    def repeat(self, trial: Trial) -> None:
        """Debit another attempt at a trial. Raises `OutOfBudget`."""
        if trial.fidelity > self.budget - self.total + ROUNDING:
            raise OutOfBudget(f"repeating trial {trial.id} costs {trial.fidelity:.2f} runs: too much for what is left")
        self.repeated += trial.fidelity


def added_cost(reached: dict[str, float], trial: Trial) -> float:
    """What a trial adds to the run it continues; `reached` is brought up to date."""
    run = canonical([trial.arm, dict(trial.setting), trial.seed, trial.phase])
    before = reached.get(run, 0.0)
    reached[run] = max(before, trial.fidelity)
    return max(0.0, trial.fidelity - before)


def seed_of(study: Study, phase: Phase, number: int) -> int:
    """31 bits. Arms share the seeds of a phase: what is random in the tasks is then the same for both sides."""
    name = canonical([study.id, phase, number])
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1


STEERING_POLL_SECONDS = 1.0


class SteeringFile:
    """`steer.jsonl`, an action a line. `first` is the line a study begins to read at."""

    def __init__(self, path: Path, first: int = 0) -> None:
        self.path = path
        self.first = first

    def append(self, request: Request) -> None:
        """On disk when it returns. Several may append at the same time."""
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            torn = file.read() not in (b"", b"\n")  # by a crash: that line says nothing, and is refused
            file.write(b"\n" * torn + request.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def after(self, taken: int) -> list[str]:
        """The whole lines that follow so many that were taken."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        return lines[self.first + taken : -1]

    def unread(self, books: Sequence[StudyLog]) -> list[str]:
        """The lines that neither a study nor its annexes took."""
        return self.after(sum(amendment.origin == "human" for book in books for amendment in book.amendments))

    def wait(self, taken: int) -> None:
        """Until there is a line that was not taken."""
        while not self.after(taken):
            time.sleep(STEERING_POLL_SECONDS)


class SteeringReader(AmendmentLog):
    """Passes the fixed points of a study, and takes there what was asked of it."""

    def __init__(self, study: Study, book: StudyLog, ledger: Spending, steering: SteeringFile | None) -> None:
        super().__init__(AmendedStudy(study, begun=True), book, lambda: ledger.left("confirm"))
        self._ledger = ledger
        self._steering = steering

    def pass_point(self) -> None:
        """Take what was asked. Returns when the study is not paused."""
        self.point += 1
        while True:
            while self.recorded("human"):
                self.take(None, "human")
            if self.point < self._book.num_points:
                return
            for line in self._steering.after(self.taken("human")) if self._steering else []:
                self.take(line, "human")
            if not self.course.paused:
                self._book.append("point", {})
                return
            if self._steering is None:
                raise ConfigError("the study is paused: resume it, and run it with its steer file")
            self._steering.wait(self.taken("human"))

    def take(self, said: object, origin: Origin) -> Amendment:
        amendment = super().take(said, origin)
        if self.course.cap is not None:
            self._ledger.cap(self.course.cap)
        return amendment

    def steering_after(self) -> SteeringFile | None:
        """What a study that follows on this one reads."""
        return self._steering and SteeringFile(self._steering.path, self._steering.first + self.taken("human"))


MAX_ATTEMPTS = 3
"""Launches of a trial that the infrastructure keeps losing."""


class Runner(Protocol):
    """What trains. It keeps what was launched under its key across restarts of the caller, and continues the shorter
    run of the same arm, setting and seed where it has one."""

    def has(self, key: str) -> bool:
        """Whether a launch under this key was accepted."""
        ...

    def launch(self, key: str, trial: Trial) -> None:
        """Begin. Returns when it is sure that `has(key)` will be true."""
        ...

    def collect(self, key: str) -> Outcome:
        """Wait for the end of what was launched under the key."""
        ...


class ArmVetoed(OutOfBudget):
    """A person wants no further trial of an arm: nothing is left for it."""


class TrialLauncher:
    """Launches what a study asks for, within its budget, once."""

    def __init__(self, study: Study, book: StudyLog, runner: Runner, steering: SteeringFile | None = None) -> None:
        book.open_study(study)
        self.study = study
        self.book = book
        self.ledger = Spending(study)
        self.helm = SteeringReader(study, book, self.ledger, steering)
        self.runner = runner
        self.helm.pass_point()

    @property
    def vetoed(self) -> frozenset[str]:
        """Arms of which no trial is launched any more."""
        return self.helm.course.vetoed

    def run(self, trials: list[Trial]) -> list[Outcome]:
        """Outcomes in the order given. Raises `OutOfBudget` before any is launched when not all can be paid."""
        for trial in trials:
            if trial.arm in self.vetoed:
                raise ArmVetoed(f"arm {trial.arm!r} was vetoed")
        self.ledger.reserve(trials)
        for trial in trials:
            self._launch(trial, attempt=1)
        outcomes = [self._finish(trial) for trial in trials]
        self.helm.pass_point()
        return outcomes

    def _finish(self, trial: Trial) -> Outcome:
        """The first outcome that is one, or the last infrastructure failure."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            outcome = self._outcome(trial, attempt)
            if outcome.end != "infra_failed" or attempt == MAX_ATTEMPTS:
                break
            try:
                self.ledger.repeat(trial)
            except OutOfBudget:
                break
        return outcome

    def _outcome(self, trial: Trial, attempt: int) -> Outcome:
        """What came of one launch: from the book, or waited for."""
        known = self.book.outcomes.get(trial.id, [])
        if len(known) < attempt:
            self._launch(trial, attempt)
            outcome = with_dead_environment(self.runner.collect(launch_key(trial, attempt)))
            assert outcome.trial == trial.id, f"the runner answers {trial.id} with an outcome of {outcome.trial}"
            self.book.append("outcome", outcome.to_json())
        return self.book.outcomes[trial.id][attempt - 1]

    def _launch(self, trial: Trial, attempt: int) -> None:
        """Launched exactly once, whatever was interrupted."""
        key = launch_key(trial, attempt)
        if self.book.attempts.get(trial.id, 0) < attempt:
            self.book.append("intent", {"key": key, "trial": trial.to_json()})
        if key in self.book.unacknowledged:
            if not self.runner.has(key):
                self.runner.launch(key, trial)
            self.book.append("ack", {"key": key})


def launch_key(trial: Trial, attempt: int) -> str:
    return f"{trial.id}-{attempt}"
