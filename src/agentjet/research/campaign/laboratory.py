"""`Laboratory` runs commits of a subject; `Subjects` makes the commits. The campaign uses only these protocols."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from agentjet.errors import AgentJetError
from agentjet.research.campaign.models import Intervention, Observation, Order
from agentjet.research.launcher import TrialRunner
from agentjet.research.models import Study


class LaboratoryAway(AgentJetError):
    """No server, no disk, no memory: nothing was lost, and the same call may succeed later."""


class Laboratory(Protocol):
    """Runs orders under keys. A launched order outlives the campaign's process.

    Each method raises `LaboratoryAway` if it cannot work now. The campaign waits and calls it again.
    """

    def has(self, key: str) -> bool:
        """True if the order under the key was launched, also by an earlier process."""
        ...

    def launch(self, key: str, order: Order) -> None:
        """Starts an order. Called once for a key that `has` does not know."""
        ...

    def collect(self, key: str) -> Observation:
        """Blocks until the order under the key has ended. A lost run is an observation with an `error`."""
        ...

    def runner(self, study: Study) -> TrialRunner:
        """A runner of the study's trials. The commit of a trial is `study.arm(trial.arm).code`."""
        ...


class Subjects(Protocol):
    """The repository of the subject's commits: see `agentjet.research.campaign.subject_repo.SubjectRepo`."""

    @property
    def first(self) -> str:
        """The commit of the subject as the user gave it."""
        ...

    def commit(self, base: str, intervention: Intervention) -> str:
        """Makes the commit of an intervention on top of `base`. The same arguments give the same commit.

        Raises `Refused` (`agentjet.research.models`) with the reason: it does not apply or import, changes nothing, or
        touches the judge.
        """
        ...

    def files(self, commit: str) -> Mapping[str, str]:
        """Text files of the commit by path."""
        ...

    def judge_source(self) -> str:
        """Source of the evaluator's file if it can be copied as a training reward, else ""."""
        ...

    def changed_outside(self) -> list[str]:
        """Files of the user's folder that differ from the campaign's copy."""
        ...


class Clock(Protocol):
    """Time, so that a week passes in a test at once."""

    def now(self) -> float:
        """Seconds since 1970."""
        ...

    def sleep(self, seconds: float) -> None: ...
