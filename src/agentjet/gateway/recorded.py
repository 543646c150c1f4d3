"""`RecordedRun`: a run that is read from its folder, without its server. Nothing in the folder changes.

The server may have ended, may have been killed, or may be writing the journal now.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from agentjet.errors import ConfigError
from agentjet.gateway import views
from agentjet.gateway.checkpoints import CheckpointStore
from agentjet.gateway.overview import facts_of, health_of, waiting_of
from agentjet.gateway.reader import Reader
from agentjet.gateway.variance import variance_facts, zero_variance
from agentjet.protocol import (
    CheckpointInfo,
    EvaluationView,
    HealthView,
    JobBody,
    StatusResponse,
    StepList,
    WaitingView,
    flatten,
)
from agentjet.swarm import Journal, records
from agentjet.swarm.origin import policies_of
from agentjet.swarm.queries import Queries
from agentjet.types import JOURNAL

MOST_STEPS = 1_000_000
WAITING_FOR = "unknown: the run is read from its folder; a server that runs it has the live page (`agentjet open`)"


class RecordedRun:
    """The records of a run in its folder. Close it at the end."""

    def __init__(self, folder: Path, *, title: str = "") -> None:
        """`title` names the run for people."""
        self.folder = folder
        self.title = title or str(folder)
        self.reader = Reader.at(folder / JOURNAL)
        self._checkpoints = CheckpointStore(folder)

    def check(self) -> None:
        """Raises `ConfigError` if the journal cannot be read, for example because a newer AgentJet wrote it."""
        Journal.open_read_only(self.folder / JOURNAL).close()

    async def close(self) -> None:
        await self.reader.close()

    async def status(self) -> StatusResponse:
        """Returns the state at the end of the journal. Seconds since clients were seen are not recorded."""
        return await self.reader.read(self._status)

    def _status(self, journal: Journal) -> StatusResponse:
        queries, origin = self._queries(journal), journal.origin
        name, uniform = str(origin.get("model.name", "")), variance_facts(queries)
        return StatusResponse(
            **views.recorded_status(queries),
            zero_variance=None if uniform is None else zero_variance(uniform, journal),
            state="offline",
            waiting_for=WAITING_FOR,
            run=self.folder.name,
            policies=policies_of(origin),
            model=Path(name).name if Path(name).is_dir() else name,
            model_weights=str(origin.get("model_weights", "")),
            calls_active=0,
            clients={},
            unusable_checkpoints=[str(path) for path in self._checkpoints.unusable()],
            last_event=journal.last_event(),
            uptime=0.0,
        )

    async def health(self) -> HealthView:
        """Returns the trend of the reward, and the results of the rules that need no server."""
        checkpoints = [info.policy_version for info in self._checkpoints.listing()]
        return await self.reader.read(lambda journal: health_of(facts_of(self._queries(journal), checkpoints), journal))

    async def waiting(self) -> WaitingView:
        """Returns the groups that were being filled at the end of the journal. Leases are not recorded."""
        return await self.reader.read(self._waiting)

    def _waiting(self, journal: Journal) -> WaitingView:
        return waiting_of(self._queries(journal), WAITING_FOR, has_leases=False)(journal)

    async def job(self) -> JobBody:
        """Returns the job settings in force at the end of the journal."""
        settings = await self.reader.read(lambda journal: self._queries(journal).settings)
        return JobBody(revision=settings.revision, job=settings.job.model_dump(mode="json"))

    async def steps(self) -> StepList:
        """Returns all steps that the journal has."""
        return await self.reader.read(lambda journal: views.step_list(records.steps(journal, 0, MOST_STEPS)))

    async def evaluations(self) -> list[EvaluationView]:
        return await self.reader.read(lambda journal: self._queries(journal).evaluations())

    async def checkpoints(self) -> list[CheckpointInfo]:
        return self._checkpoints.scored(await self.evaluations())

    async def settings(self) -> dict[str, Any]:
        """Returns the origin of the run and its job settings, by name, for a comparison."""
        return await self.reader.read(settings_of)

    def _queries(self, journal: Journal) -> Queries:
        return Queries.recorded(journal, time.time)


def settings_of(journal: Journal) -> dict[str, Any]:
    """Returns the origin of a run and its job settings, by name."""
    try:
        held = journal.job_settings()
    except ConfigError:  # Other settings can be compared without the package of the run's recipe.
        held = None
    job = flatten(held.job.model_dump(mode="json"), "job.") if held is not None else ()
    return {**journal.origin, **dict(job)}
