"""`Runs`: the launches of a campaign, each once, within its budget, and patient while servers or disks are away.

A launch has an `intent` entry first; the laboratory is asked for its key before it launches. A run has an `observed`
entry and a `spent` entry. Spending counts the steps that this process has passed, so that a resumed campaign,
which passes them again, decides the same.
"""

from __future__ import annotations

import errno
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from agentjet.errors import ConfigError
from agentjet.research.campaign.laboratory import Clock, Laboratory, LaboratoryAway
from agentjet.research.campaign.models import Budget, Observation, Order
from agentjet.research.campaign.notebook import Entry, EntryKind, Notebook
from agentjet.research.campaign.strategist import causes, facts_of, signs

ATTEMPTS = 3
"""Launches of a run that the infrastructure lost."""
WAITS = (60.0, 3600.0)
"""Seconds before the laboratory is asked again: first, and at most."""
PATIENCE = 7 * 86400.0
"""Seconds without a laboratory after which the campaign stops, to be resumed."""
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EAGAIN, errno.EMFILE)
"""Errors of the system that may pass: a full disk, no memory."""
T = TypeVar("T")


class SystemClock:
    """The computer's clock."""

    def now(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Ending(Exception):
    """The campaign is over."""


@dataclass(frozen=True)
class Seen:
    """An observation and its entry."""

    entry: int
    run: Observation

    @property
    def causes(self) -> frozenset[str]:
        return causes(self.run)

    def score_at(self, share: float) -> float:
        """Score at a share of the run, between its evenly spaced evaluations."""
        return float(np.interp(share, np.linspace(0, 1, len(self.run.curve)), self.run.curve))


class Runs:
    def __init__(
        self, notebook: Notebook, laboratory: Laboratory, budget: Budget, clock: Clock, tell: Callable[[str], None]
    ) -> None:
        self.notebook, self.laboratory, self.budget = notebook, laboratory, budget
        self.clock, self.tell = clock, tell
        self._waited = 0.0
        self._spent = {"runs": 0.0, "hours": 0.0}
        self._reached: dict[tuple[str, int], float] = {}
        """By commit and seed, the share of a full run that was made."""
        self._under_way: dict[str, Order] = {}

    def observe(self, orders: Sequence[Order], why: str, because: Sequence[int]) -> list[Seen]:
        """Runs the orders at the same time, each once; lost runs are repeated with the same seed.

        Raises `Ending` before a launch that the budget does not pay for.
        """
        for order in orders:
            self._launch(order, 1, because)
        return [self._observed(order, why, because) for order in orders]

    def _launch(self, order: Order, attempt: int, because: Sequence[int]) -> str:
        """Launches once, also after a crash in between, and returns the key."""
        key = f"{order.commit[:16]} {order.seed} {order.share:.4f} {attempt}"
        if key not in self._under_way and self._cost(order) > self.left():
            raise Ending("the budget is spent")
        self._under_way[key] = order
        if self.notebook.known(f"observed {key}") is None:
            self.note("intent", lambda: {"key": key, "order": order.to_json()}, f"intent {key}", because)
            if not self.patiently(lambda: self.laboratory.has(key)):
                self.patiently(lambda: self.laboratory.launch(key, order))
        return key

    def _observed(self, order: Order, why: str, because: Sequence[int]) -> Seen:
        for attempt in range(1, ATTEMPTS + 1):
            key = self._launch(order, attempt, because)

            def made(key: str = key, cost: float = self._cost(order)) -> dict[str, Any]:
                begun = self.working_time()
                run = self.patiently(lambda: self.laboratory.collect(key))
                hours = (self.working_time() - begun) / 3600
                facts, shown = (facts_of(run), signs(run)) if not run.error else ({}, [])
                return {
                    "why": why,
                    "observation": run.to_json(),
                    "facts": facts,
                    "signs": [sign.to_json() for sign in shown],
                    "cost": cost,
                    "hours": hours,
                }

            entry = self.note("observed", made, f"observed {key}", because)
            del self._under_way[key]
            self.spend(f"spent {key}", entry.content["cost"], entry.content["hours"], entry)
            run = Observation.from_json(entry.content["observation"])
            if not run.error:
                reached = self._reached.get((order.commit, order.seed), 0.0)
                self._reached[order.commit, order.seed] = max(reached, order.share)
            if not run.error or run.subject_fails:
                break
        return Seen(entry.number, run)

    def _cost(self, order: Order) -> float:
        """Full runs that an order adds: a longer run continues the shorter one of the same commit and seed."""
        return max(0.0, order.share - self._reached.get((order.commit, order.seed), 0.0))

    # ---- budget ------------------------------------------------------------------------------------------------------

    def spend(self, key: str, runs: float, hours: float, entry: Entry) -> None:
        self.note("spent", lambda: {"runs": runs, "hours": hours}, key, [entry.number])
        self._spent["runs"] += runs
        self._spent["hours"] += hours

    def spent(self) -> dict[str, float]:
        """Full runs and hours of work so far."""
        return dict(self._spent)

    def left(self) -> float:
        """Full runs that the budget still pays for, without those that are under way."""
        spent, waiting = self._spent, sum(map(self._cost, self._under_way.values()))
        if self.budget.runs is not None:
            return self.budget.runs - spent["runs"] - waiting
        assert self.budget.hours is not None
        each = spent["hours"] / spent["runs"] if spent["runs"] else 0.0
        return (self.budget.hours - spent["hours"]) / each - waiting if each else float("inf")

    # ---- entries and patience ----------------------------------------------------------------------------------------

    def note(self, kind: EntryKind, make: Callable[[], object], key: str, because: Sequence[int] = ()) -> Entry:
        """The entry under the key. `make` is called once, also if the disk is full at first."""
        made: list[object] = []

        def once() -> object:
            if not made:
                made.append(make())
            return made[0]

        return self.patiently(lambda: self.notebook.once(key, kind, once, because))

    def patiently(self, act: Callable[[], T]) -> T:
        """Calls `act`, again and again while the laboratory or the disk is away. Raises `ConfigError` in the end."""
        pause, waited = WAITS[0], 0.0
        while True:
            try:
                return act()
            except (LaboratoryAway, OSError, sqlite3.OperationalError) as error:
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
        return self.clock.now() - self._waited


def volume(signals: Iterable[Mapping[str, Sequence[float | None]]]) -> dict[str, float]:
    """Training episodes and sampled tokens of runs, from their signals."""
    found, names = [*signals], {"episodes": "batch/episodes", "tokens": "batch/sampled_tokens"}
    return {
        part: math.fsum(value for of_run in found for value in of_run.get(name, ()) if value is not None)
        for part, name in names.items()
    }
