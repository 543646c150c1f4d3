"""`Question`, and `CampaignRuns`: launches each run of a campaign once, within its budget, and waits while servers or
disks fail.

A launch has an `intent` entry first; the runner is asked for its key before it launches. A run has an `observed` entry
with its cost. Spending counts the steps that this process has passed, so that a resumed campaign, which passes them
again, decides the same.
"""

from __future__ import annotations

import errno
import hashlib
import math
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np

from agentjet.errors import ConfigError
from agentjet.research.campaign.strategist import causes, facts_of, signs
from agentjet.research.campaign.subject_repo import METRIC
from agentjet.research.journal import HUMAN, JournalEntry, Notebook
from agentjet.research.models import MEASURED, Equal, Outcome, Record, Setting, Trial, hash_of, refuse
from agentjet.research.scheduler import AMOUNTS, MAX_ATTEMPTS, TrialRunner, added_cost, amount, launch_key
from agentjet.research.swarm_runner import ServerUnavailable

SHORT = 1 / 3
"""Share of a full run in the first screen."""
OBSERVING = "campaign"
"""Name in place of a study for the trials that observe."""
WAITS = (60.0, 3600.0)
"""Seconds before the servers are asked again: first, and at most."""
PATIENCE = 7 * 86400.0
"""Seconds without a server after which the campaign stops, to be resumed."""
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EAGAIN, errno.EMFILE)
"""Errors of the system that may pass: a full disk, no memory."""
LONGEST_RUN = 4
"""Maximum steps of a full run, in those of the subject as given, if arms learn from equal tokens or for equal times."""
MAX_BUDGET = 1_000_000
T = TypeVar("T")


class Clock(Protocol):
    """The module `time`, or one with which a week passes in a test at once."""

    def time(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


class Ending(Exception):
    """The campaign is over. The argument is the content of the entry `ended`."""


@dataclass(frozen=True)
class Budget(Record):
    """The most that a campaign may spend: full runs, or hours of work. Enforced by the campaign."""

    runs: float | None = None
    hours: float | None = None

    def __post_init__(self) -> None:
        given = {unit: amount for unit in ("runs", "hours") if (amount := getattr(self, unit)) is not None}
        wrong = len(given) != 1 or not all(0 < amount <= MAX_BUDGET for amount in given.values())
        shown = " and ".join(f"{amount:g} {unit}" for unit, amount in given.items()) or "nothing"
        refuse(wrong, f"budget = {shown}: give runs or hours, more than 0, at most {MAX_BUDGET:,}")

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Reads `48h` or `500runs`. Raises `ConfigError`."""
        given = re.fullmatch(r"(\d+\.?\d*|\.\d+)(runs|h)", text)
        if given is None:
            raise ConfigError(f"budget = {text!r}: give hours or full runs, such as 48h or 500runs")
        return cls(**{"runs" if given[2] == "runs" else "hours": float(given[1])})


@dataclass(frozen=True)
class Question(Record):
    """The question of a campaign and the rules that decide its answer. Fixed at its start."""

    topic: str
    budget: Budget
    seed: int = 0
    metric: str = METRIC
    sesoi: float = 0.05
    """The smallest effect of interest, as a share of the judge's scale."""
    alpha: float = 0.05
    """Chance of any wrong verdict in the whole campaign. `alpha_of` and `alpha_of_topic` give a study its share."""
    looks: tuple[int, ...] = (4, 8, 12)
    evaluator: str = ""
    """Hash of the judge's files."""
    equal: Equal = "episodes"
    """Amount that is the same in full runs of all arms."""

    def alpha_of(self, number: int) -> float:
        """Alpha of the study with this number, from 1. All shares add up to `alpha`, however many studies follow: the
        squares of 1/n add up to pi^2 / 6.
        """
        return self.alpha * 6 / (math.pi * number) ** 2

    def alpha_of_topic(self, number: int) -> float:
        """The same in a campaign whose topic was planned as a study. Another study follows only if people reopen it, so
        the first one gets four fifths of `alpha`, and each later one a fifth of the share before.
        """
        return self.alpha * 0.8 * 0.2 ** (number - 1)

    @property
    def study_cost(self) -> float:
        """Full runs until the first look of a study."""
        return 2.0 * self.looks[0]

    def __post_init__(self) -> None:
        refuse(not 0 < self.sesoi < 1, f"sesoi = {self.sesoi}: give a share of the judge's scale, between 0 and 1")
        least, runs = 2.0 + (self.equal in MEASURED) + self.study_cost, self.budget.runs or 0.0
        refuse(
            self.budget.runs is not None and runs < least,
            f"budget = {runs:g} runs: a campaign observes, screens, and conducts a study of 2 arms with "
            f"{self.looks[0]} seeds; give {least:g} runs or more",
        )


def seed_of(question: Question, number: int) -> int:
    """Seeds of a campaign: 0 for screens, others for studies, so that studies see fresh ones."""
    digest = hashlib.sha256(f"{question.seed} {number}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


@dataclass(frozen=True)
class RunObservation:
    """A run of a commit, and the entry that has it."""

    entry: int
    commit: str
    run: Outcome

    @cached_property
    def causes(self) -> frozenset[str]:
        return causes(self.run)

    def score_at(self, share: float) -> float:
        """Score at a share of the run, between its evenly spaced evaluations."""
        return float(np.interp(share, np.linspace(0, 1, len(self.run.curve)), self.run.curve))


class CampaignRuns:
    def __init__(
        self,
        question: Question,
        notebook: Notebook,
        runner: TrialRunner,
        clock: Clock,
        tell: Callable[[str], None],
        ending: Callable[[str], object],
    ) -> None:
        """`ending` gives the content of the entry `ended`."""
        self._ending = ending
        self.question, self.budget, self.equal, self.notebook = question, question.budget, question.equal, notebook
        self.runner, self.clock, self.tell = runner, clock, tell
        self._first: Outcome | None = None
        """The first full run. Its tokens or seconds are those of every arm."""
        self._subject = ""
        """The commit of that run."""
        self.probes = 0
        """Number of times that the subject was run to see if servers run anything."""
        self._steps: dict[str, int] = {}
        """By the hash of a commit and a setting, the steps of a full run, where tokens or seconds are equal."""
        self.spent = {"runs": 0.0, "hours": 0.0}
        self._waited = 0.0
        self._reached: dict[str, float] = {}
        self._under_way: dict[str, Trial] = {}
        self.added = 0.0
        """Added to the budget by people, in its unit."""
        self.vetoed: dict[str, int] = {}
        """By name of an intervention or an arm, the entry of its veto."""
        self._endings = 0
        self._passed = 0
        """Number of the last entry that this process has come to."""
        self._applied: set[int] = set()
        self._ignored: set[str] = set()
        """Names of files in the inbox that cannot be used."""

    def observe(
        self,
        commits: Sequence[str],
        seed: int,
        why: str,
        because: Sequence[int],
        share: float = 1.0,
        settings: Sequence[Setting] = (),
    ) -> list[RunObservation]:
        """Runs the commits at the same time, each once; lost runs are repeated with the same seed. `settings` are those
        of each besides its own.

        Raises `Ending` before a launch that the budget does not pay for.
        """
        trials = [
            Trial(OBSERVING, commit, self.setting(commit, own) if share == 1 else own, seed, "explore", share)
            for commit, own in zip(commits, settings or [{}] * len(commits), strict=True)
        ]
        for trial in trials:
            self._launch(trial, 1, because)
        return [self._observed(trial, why, because) for trial in trials]

    def _launch(self, trial: Trial, attempt: int, because: Sequence[int]) -> str:
        """Launches once, also after a crash in between, and returns the key."""
        own = {name: value for name, value in trial.setting.items() if name != "steps"}
        varied = f" {hash_of(own)[:8]}" if own else ""
        key = f"{trial.arm[:16]}{varied} {trial.seed} {trial.fidelity:.4f} {attempt}"
        while key not in self._under_way and self._cost(trial) > self.left():
            self.end("the budget is spent", f"launch {key}")
        self._under_way[key] = trial
        if self.known(f"observed {key}") is None:
            self.note("intent", {"key": key, "trial": trial.to_json()}, f"intent {key}", because)
            if not self.patiently(lambda: self.runner.has(key)):
                self.patiently(lambda: self.runner.launch(key, trial))
        return key

    def _observed(self, trial: Trial, why: str, because: Sequence[int]) -> RunObservation:
        for attempt in count(1):
            entry, run, is_new = self._attempt(trial, attempt, why, because)
            if run.end != "infra_failed" or (attempt % MAX_ATTEMPTS == 0 and not self.were_away(run, is_new)):
                break
        return RunObservation(entry.number, trial.arm, run)

    def _attempt(
        self, trial: Trial, attempt: int, why: str, because: Sequence[int]
    ) -> tuple[JournalEntry, Outcome, bool]:
        """The entry of an attempt, its outcome, and True if the notebook lacked it."""
        key = self._launch(trial, attempt, because)
        known = self.known(f"observed {key}")
        entry = known or self.note("observed", {"why": why, **self._collected(key, trial)}, f"observed {key}", because)
        del self._under_way[key]
        if self._is_first(entry):  # the second seed of a base serves in several rounds
            self.spend(entry.content["cost"], entry.content["hours"])
        run = Outcome.from_json(entry.content["outcome"])
        if run.score is not None:
            added_cost(self._reached, trial)
            self._measure(trial, run)
        return entry, run, known is None

    def were_away(self, lost: Outcome, is_new: bool = True) -> bool:
        """True if a run was lost because the servers could run nothing; they can again. False if the subject as given
        runs there, so that the arm itself is the reason. Waits while that is lost, too.

        Raises `ConfigError` if the very first run is lost.
        """
        if self._first is None:
            refuse(
                is_new,
                f"the first run was lost {MAX_ATTEMPTS} times: {lost.note}. Mend that and resume the campaign; if the "
                "cause is in the subject's files, start with another --out, because the campaign has its copy",
            )
            return True
        self.probes += 1
        probe = Trial(OBSERVING, self._subject, {}, seed_of(self.question, -1 - self.probes), "explore", SHORT)
        attempts = count(1)

        def until_it_runs() -> int:
            for attempt in attempts:
                _, run, is_new = self._attempt(probe, attempt, "a run was lost: does the subject run?", [])
                if run.end != "infra_failed":
                    break
                if is_new:
                    raise ServerUnavailable(f"runs are lost: {run.note}")
            return attempt

        return self.patiently(until_it_runs) > 1

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

    def setting(self, commit: str, own: Setting = MappingProxyType({})) -> Setting:
        """Settings of an arm's full runs, besides those of its commit: with their length, where a short run gave it."""
        steps = self._steps.get(hash_of([commit, dict(own)]))
        return {**own, "steps": steps} if steps else {**own}

    def _measure(self, trial: Trial, run: Outcome) -> None:
        if self._first is None:
            self._first, self._subject = run, trial.arm
        if self.equal not in MEASURED or trial.fidelity == 1:
            return
        steps, whole = (len(one.signals.get(AMOUNTS[self.equal][0], ())) for one in (run, self._first))
        used, given = (amount([one.signals], self.equal) for one in (run, self._first))
        if used and given:
            arm = hash_of([trial.arm, dict(trial.setting)])
            self._steps[arm] = max(1, min(round(given * steps / used), LONGEST_RUN * whole))

    # ---- budget ------------------------------------------------------------------------------------------------------

    def spend(self, runs: float, hours: float) -> None:
        self.spent["runs"] += runs
        self.spent["hours"] += hours

    def left(self) -> float:
        """Full runs that the budget still pays for, without those that are under way."""
        spent, waiting = self.spent, sum(map(self._cost, self._under_way.values()))
        if self.budget.runs is not None:
            return self.budget.runs + self.added - spent["runs"] - waiting
        assert self.budget.hours is not None
        each = spent["hours"] / spent["runs"] if spent["runs"] else 0.0
        return (self.budget.hours + self.added - spent["hours"]) / each - waiting if each else math.inf

    # ---- people ------------------------------------------------------------------------------------------------------

    def take(self, point: str, is_past: bool = False, kinds: Sequence[str] = HUMAN) -> bool:
        """Applies the messages of people that belong to this point of the campaign; true if there are new ones. Those
        that wait are entered first, unless the campaign has been further.
        """
        is_new = False
        for number in count(1):
            key = f"{point}, message {number}"
            entry = self.known(key) or (None if is_past or self.is_replayed() else self._entered(key, kinds))
            if entry is None:
                return is_new
            is_new |= self.apply(entry)
        raise AssertionError

    def _entered(self, key: str, kinds: Sequence[str]) -> JournalEntry | None:
        """The entry of the oldest message that waits. It may have been entered by a process that was killed then."""
        inbox, entered = self.notebook.inbox, {entry.content["file"] for entry in self.notebook.of(*HUMAN)}
        for name, message in inbox.waiting().items():
            if name not in entered and message.kind in kinds:
                entry = self.note(message.kind, {"file": name, **message.to_json()}, key)
                inbox.remove(name)
                return entry
            if name in entered:
                inbox.remove(name)
        for name in sorted({*inbox.foreign} - self._ignored):
            self.tell(f"{inbox.path / name} is not a message to this campaign, and is ignored: {inbox.foreign[name]}")
            self._ignored.add(name)
        return None

    def apply(self, entry: JournalEntry) -> bool:
        """Applies an entry of people, or counts an ending. False if that was done before."""
        if not self._is_first(entry):
            return False
        match entry.kind:
            case "veto":
                self.vetoed.setdefault(entry.content["text"].strip(), entry.number)
            case "budget" | "reopen":
                self.added += entry.content["hours" if self.budget.runs is None else "runs"]
            case "ended":
                self._endings += 1
        return True

    def _is_first(self, entry: JournalEntry) -> bool:
        """True if this process has not counted the entry yet."""
        is_first = entry.number not in self._applied
        self._applied.add(entry.number)
        return is_first

    def is_vetoed(self, *names: str) -> bool:
        """True for the name of a vetoed change, or of several changes with a vetoed one."""
        return any(part in self.vetoed for name in names for part in (name, *name.split(" + ")))

    def end(self, reason: str, point: str) -> bool:
        """Ends the campaign by `Ending`. Returns if people wrote just before, so that the caller looks again; true if
        they reopened the campaign after this end.
        """
        if self.take(f"{point}, before the end"):
            return False
        key = f"ended {self._endings + 1}" if self._endings else "ended"
        ended = self.note("ended", self._ending(reason), key)
        self.apply(ended)
        if not self.take(f"after {key}", kinds=("reopen",)):
            raise Ending(ended.content)
        return True

    # ---- entries and patience ----------------------------------------------------------------------------------------

    def note(self, kind: str, content: object, key: str, because: Sequence[int] = ()) -> JournalEntry:
        """The entry under the key, which has this content if it is new. Waits while the disk is full."""
        known = self.known(key) or self.patiently(lambda: self.notebook.entry(kind, content, because, key=key))
        return self._come_to(known)

    def known(self, key: str) -> JournalEntry | None:
        known = self.notebook.known(key)
        return known and self._come_to(known)

    def _come_to(self, entry: JournalEntry) -> JournalEntry:
        if entry.kind != "edited":  # a resumed campaign begins with it
            self._passed = max(self._passed, entry.number)
        return entry

    def is_replayed(self) -> bool:
        """True while the notebook has entries that this process has not come to."""
        return any(entry.kind != "edited" for entry in self.notebook.entries[self._passed :])

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


@dataclass
class StudyRuns:
    """The `TrialRunner` of a study. A lost run is repeated as in screens: see `were_away`."""

    runs: CampaignRuns
    names: Mapping[str, str] = field(default_factory=dict)
    """Names by which people know arms, if these are others."""
    trials: dict[str, Trial] = field(default_factory=dict)
    repeated: float = 0.0
    """Full runs of the repeats. The study does not count them."""

    def has(self, key: str) -> bool:
        """False, so that each process is given the trials."""
        return False

    def vetoed(self, trials: Sequence[Trial]) -> set[str]:
        """Names of the arms that people vetoed before these trials."""
        if trials:
            keys = [launch_key(trial, 1) for trial in trials]
            self.runs.take(f"launch {keys[0]}", is_past=any(map(self.runs.runner.has, keys)))
        return {trial.arm for trial in trials if self.runs.is_vetoed(self.names.get(trial.arm, trial.arm))}

    def launch(self, key: str, trial: Trial) -> None:
        self.trials[key] = trial
        if not self.runs.runner.has(key):
            self.runs.runner.launch(key, trial)

    def collect(self, key: str) -> Outcome:
        for attempt in count(1):
            name = key if attempt == 1 else f"{key} again {attempt}"
            self.launch(name, self.trials[key])
            outcome = self.runs.runner.collect(name)
            if outcome.end != "infra_failed" or (attempt % MAX_ATTEMPTS == 0 and not self.runs.were_away(outcome)):
                break
            self.repeated += bool(outcome.curve)
        return outcome
