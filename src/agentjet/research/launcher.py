"""`TrialLauncher` launches the trials of a study, each at most once, within its budget and its steering requests.

A launch has two journal entries: the intent before the launch and the acknowledgement after it. For an unacknowledged
intent the launcher asks the runner whether it has the key, and launches only if not. A trial that the infrastructure
lost, or whose environment died, is launched again with the same seed and a new key.

`Spending` enforces the budget: spending never exceeds it, and tuning never uses the share reserved for confirming. A
run that continues another costs only what it adds. Spending is derived from the trials and is not stored.

`SteeringFile` holds the requests of people, one line each, appended at any time. The study reads them before each batch
of trials and records which it took there. A resumed study takes the same lines at the same points.
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
from agentjet.research.models import Origin, Outcome, Phase, Request, Study, Trial, canonical
from agentjet.research.run_signals import with_dead_environment

ROUNDING = 1e-9


class OutOfBudget(AgentJetError):
    """The next trials cost more than is left for their phase. None of them was launched."""


class Spending:
    """Full runs spent, by phase. Repeats of lost runs are counted separately, because they are not evidence."""

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
        """Limits the total spending from now on."""
        self.for_exploring *= budget / self.budget
        self.budget = budget

    def left(self, phase: Phase) -> float:
        left = self.budget - self.total
        return min(left, self.for_exploring - self.spent["explore"]) if phase == "explore" else left

    def cost(self, trials: Iterable[Trial]) -> float:
        """Returns the cost that these trials would add, in this order."""
        reached = dict(self._reached)
        return sum(added_cost(reached, trial) for trial in trials)

    def reserve(self, trials: list[Trial]) -> None:
        """Debits all trials, which belong to one phase. Raises `OutOfBudget` and debits none if the budget is too
        small.
        """
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
        """Debits another attempt at a trial. Raises `OutOfBudget`."""
        if trial.fidelity > self.budget - self.total + ROUNDING:
            raise OutOfBudget(f"repeating trial {trial.id} costs {trial.fidelity:.2f} runs, more than is left")
        self.repeated += trial.fidelity


def added_cost(reached: dict[str, float], trial: Trial) -> float:
    """Returns the cost that a trial adds to the run it continues, and updates `reached`."""
    run = canonical([trial.arm, dict(trial.setting), trial.seed, trial.phase])
    before = reached.get(run, 0.0)
    reached[run] = max(before, trial.fidelity)
    return max(0.0, trial.fidelity - before)


def seed_of(study: Study, phase: Phase, number: int) -> int:
    """Derives a 31-bit seed from the study, so that a re-run uses the same seeds and phases share none. Arms share the
    seeds of a phase, so that random tasks are the same on both sides.
    """
    name = canonical([study.id, phase, number])
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1


STEERING_POLL_SECONDS = 1.0


class SteeringFile:
    """`steer.jsonl`, one action a line. `first` is the first line that this study reads."""

    def __init__(self, path: Path, first: int = 0) -> None:
        self.path = path
        self.first = first

    def append(self, request: Request) -> None:
        """Appends a request and syncs it. Several processes may append at the same time."""
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            torn = file.read() not in (b"", b"\n")  # torn by a crash: the line is invalid and will be refused
            file.write(b"\n" * torn + request.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def after(self, taken: int) -> list[str]:
        """Returns the complete lines after the first `taken` ones."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        return lines[self.first + taken : -1]

    def unread(self, logs: Sequence[StudyLog]) -> list[str]:
        """Returns the lines that neither the study nor its annexes took."""
        return self.after(sum(amendment.origin == "human" for log in logs for amendment in log.amendments))

    def wait(self, taken: int) -> None:
        """Blocks until there is a new line."""
        while not self.after(taken):
            time.sleep(STEERING_POLL_SECONDS)


class SteeringReader:
    """Takes the steering requests of a study before each batch of trials."""

    def __init__(self, study: Study, log: StudyLog, spending: Spending, file: SteeringFile | None) -> None:
        self._requests = AmendmentLog(AmendedStudy(study, begun=True), log, lambda: spending.left("confirm"))
        self._log = log
        self._spending = spending
        self._file = file

    @property
    def amended(self) -> AmendedStudy:
        """The study with all granted requests."""
        return self._requests.amended

    def take_pending(self) -> None:
        """Takes the pending requests. Blocks while the study is paused."""
        self._requests.point += 1
        while True:
            while self._requests.recorded("human"):
                self.take(None, "human")
            if self._requests.point < self._log.num_points:
                return
            for line in self._file.after(self._requests.taken("human")) if self._file else []:
                self.take(line, "human")
            if not self.amended.paused:
                self._log.append("point", {})
                return
            if self._file is None:
                raise ConfigError("the study is paused: resume it, and run it with its steering file")
            self._file.wait(self._requests.taken("human"))

    def take(self, request: object, origin: Origin) -> None:
        """Takes one request, and applies a cap to the spending."""
        self._requests.take(request, origin)
        if self.amended.cap is not None:
            self._spending.cap(self.amended.cap)

    def file_for_annex(self) -> SteeringFile | None:
        """Returns the steering file for the annex that follows."""
        return self._file and SteeringFile(self._file.path, self._file.first + self._requests.taken("human"))


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


class ArmVetoed(OutOfBudget):
    """A person vetoed an arm, so no trial of it may be launched."""


class TrialLauncher:
    """Launches the trials of a study once each, within its budget."""

    def __init__(
        self, study: Study, log: StudyLog, runner: TrialRunner, steering_file: SteeringFile | None = None
    ) -> None:
        log.open_study(study)
        self.study = study
        self.log = log
        self.spending = Spending(study)
        self.steering = SteeringReader(study, log, self.spending, steering_file)
        self.runner = runner
        self.steering.take_pending()

    @property
    def vetoed(self) -> frozenset[str]:
        """Arms that may launch no further trials."""
        return self.steering.amended.vetoed

    def run(self, trials: list[Trial]) -> list[Outcome]:
        """Returns outcomes in the given order. Raises `OutOfBudget` before the first launch if the budget cannot pay
        for all.
        """
        for trial in trials:
            if trial.arm in self.vetoed:
                raise ArmVetoed(f"arm {trial.arm!r} was vetoed")
        self.spending.reserve(trials)
        for trial in trials:
            self._launch(trial, attempt=1)
        outcomes = [self._finish(trial) for trial in trials]
        self.steering.take_pending()
        return outcomes

    def _finish(self, trial: Trial) -> Outcome:
        """Returns the first result, or the last infrastructure failure."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            outcome = self._outcome(trial, attempt)
            if outcome.end != "infra_failed" or attempt == MAX_ATTEMPTS:
                break
            try:
                self.spending.repeat(trial)
            except OutOfBudget:
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
        if key in self.log.unacknowledged:
            if not self.runner.has(key):
                self.runner.launch(key, trial)
            self.log.append("ack", {"key": key})


def launch_key(trial: Trial, attempt: int) -> str:
    return f"{trial.id}-{attempt}"
