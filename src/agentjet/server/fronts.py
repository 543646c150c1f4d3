"""The calls of a run on fronts: `FrontedCalls` in place of `Calls`, and `FrontGate`, for the gateway of the run.

Invariants:

* a call belongs to the front of its episode, and no other process records it;
* a finished episode has all of its calls on disk before its reward is. The front reports their counts;
* a front that dies or hangs is replaced. Its calls that are under way end with a retryable error, or with the end of
  their connection. The leases of its episodes stand still until the next one answers;
* what the gate of a run lets in, it lets in on all fronts: `FrontGate` waits for an answer of each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, closing, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

from agentjet.config import JobConfig, ServeConfig
from agentjet.errors import ComputeError, Later, RequestError
from agentjet.front.concurrency import Gate
from agentjet.front.run import RunReport, RunState
from agentjet.front.segment import front_of
from agentjet.protocol import FrontView
from agentjet.server.run_policies import RunPolicies
from agentjet.swarm import EpisodeRecord, Journal, SwarmState
from agentjet.swarm.journal import Slice
from agentjet.timeline.batch import TrainingBatch

CLOSE_SECONDS = 5.0
"""Time for a front to mark the answers that a stop cuts off."""


class Fronts(Protocol):
    """The front processes of a server: see `agentjet.fronts.supervision`."""

    runs: dict[str, FrontedCalls]
    """The open runs, the default one first."""

    def __len__(self) -> int: ...

    def start(self) -> None:
        """Starts the processes. The open runs must be in `runs`: a front refuses the keys of all others."""

    async def close(self) -> None:
        """Ends the processes. Idempotent."""

    def address(self, front: int, url: str) -> str:
        """Returns the base URL of a front. `url` is a URL of this server, as the client reaches it."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The base URLs of the fronts, as this machine reaches them if `server.front_url` is empty."""

    def views(self) -> list[FrontView]:
        """Returns the present state of each front."""

    async def ask(self, front: int, op: str, *args: Any) -> Any:
        """Returns the answer of a front. If it dies before that, the next one is asked."""

    async def ask_all(self, op: str, *args: Any) -> None:
        """Returns when all fronts that are up have answered a message or ended."""

    def tell(self, op: str, *args: Any) -> None:
        """Sends a message to all fronts that are up, in order. Others get the present state when they start."""

    def later(self, work: Awaitable[Any]) -> None:
        """Does some work in the background. Its failure is logged."""

    async def batch(self, run: str, batch_id: int) -> tuple[dict[str, TrainingBatch], dict[str, float]]:
        """Returns forests and metrics of a batch, built by the front with the least load."""


class FrontGate(Gate):
    """The gate of a run on its fronts."""

    def __init__(self, fronts: Fronts, run: str) -> None:
        super().__init__()
        self._fronts = fronts
        self._run = run

    @property
    def _calls(self) -> FrontedCalls | None:
        """None while the run is not open on the fronts."""
        return self._fronts.runs.get(self._run)

    def _set(self, is_open: bool, refusal: Callable[[], Later] | None = None) -> None:
        super()._set(is_open, refusal)
        if self._calls is not None:
            self._calls.push()

    async def drained(self) -> None:
        await super().drained()
        if self._calls is not None:
            await self._calls.drained()

    def num_calls(self) -> int:
        return super().num_calls() + (0 if self._calls is None else self._calls.num_active)

    def busy_seconds(self) -> float:
        return super().busy_seconds() + (0.0 if self._calls is None else self._calls.busy_seconds())


class FrontedCalls:
    """The calls of a run on the fronts, for the run's gateway."""

    def __init__(
        self, fronts: Fronts, policies: RunPolicies, swarm: SwarmState, gate: Gate, clock: Callable[[], float]
    ) -> None:
        self.began = clock()
        self.fronts = fronts
        self._policies = policies
        self._swarm = swarm
        self._gate = gate
        self._calling: dict[int, dict[str, AbstractContextManager[Any]]] = {}
        """Open contexts of `SwarmState.calling`, by front and episode."""
        self._busy: dict[int, tuple[float, float]] = {}
        """Seconds with calls inside the gate, by front: those of earlier processes, and of the present one."""
        self._num_calls: dict[int, int] = {}
        self._ends = WeakValueDictionary[str, asyncio.Lock]()
        """Held around the requests that end an episode: a refused one must not undo the end of another."""
        self._finished: set[str] = set()
        """Episodes that their fronts finished, before the event about their end."""

    @property
    def num_active(self) -> int:
        """Calls whose answers are not delivered yet."""
        return sum(self._num_calls.values())

    def waiting_for(self) -> str:
        """Returns a phrase about the fronts that answer no calls now, or ''."""
        return ", ".join(f"front {one.front} ({one.problem})" for one in self.fronts.views() if one.problem)

    def busy_seconds(self) -> float:
        """Returns the seconds in which the busiest front sampled a call."""
        return max((sum(parts) for parts in self._busy.values()), default=0.0)

    def open(self) -> None:
        self.fronts.runs[self._policies.run] = self
        self.push()

    def opening(self) -> tuple[str, ServeConfig, RunState]:
        """Returns the message that opens the run, or changes its state."""
        policies, gate = self._policies, self._gate
        models = {name: renderer.model for name, renderer in policies.renderers.items()}
        state = RunState(
            policies.names,
            policies.model_name,
            gate.is_open,
            gate.refusal(),
            models,
            self._swarm.job_revision,
            policies.num_starts,
        )
        return policies.run, without_job(policies.config), state

    def push(self) -> None:
        if self._policies.run in self.fronts.runs:
            self.fronts.tell("open", *self.opening())

    async def drained(self) -> None:
        if self._policies.run in self.fronts.runs:
            await self.fronts.ask_all("drained", self._policies.run)

    async def close(self) -> None:
        """Ends all answers. Recorded calls whose answers were not taken are undelivered."""
        if self.fronts.runs.pop(self._policies.run, None) is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.fronts.ask_all("close", self._policies.run)
        for front in list(self._calling):
            self.gone(front)

    # ---- episodes ---------------------------------------------------------------------------------------------------

    def front(self, episode: EpisodeRecord) -> int:
        return front_of(episode, len(self.fronts))

    def address(self, episode: EpisodeRecord, url: str) -> str:
        """Returns the base URL of the front of an episode. `url` is a URL of this server."""
        return self.fronts.address(self.front(episode), url)

    @asynccontextmanager
    async def ending(self, episode_id: str) -> AsyncIterator[None]:
        """Context in which an episode is ended: its calls are on disk and counted, and no further one is recorded.

        If the end fails, calls are recorded again.
        """
        async with self._ends.setdefault(episode_id, asyncio.Lock()):
            episode = self._swarm.up_to_date(episode_id)
            try:
                if episode.status == "live":
                    await self._finish(episode)
                if self._swarm.episode(episode_id).status == "live":  # Its time may be over since.
                    self._finished.add(episode_id)
                yield
            except BaseException:
                self._finished.discard(episode_id)
                if self._swarm.episode(episode_id).status == "live":
                    self.fronts.later(self.fronts.ask(self.front(episode), "resume", self._policies.run, episode_id))
                raise

    def episode_ended(self, episode_id: str) -> None:
        """Ends the calls of an episode that has ended."""
        if episode_id in self._finished:
            self._finished.discard(episode_id)
        else:
            self.fronts.later(self._finish_ended(self._swarm.episode(episode_id)))

    def undelivered(self, episode_id: str) -> list[str]:
        """Returns nothing: the front of an episode marks them at its end."""
        return []

    async def _finish(self, episode: EpisodeRecord) -> None:
        counts = await self.fronts.ask(self.front(episode), "finish", self._policies.run, episode.id)
        if counts is not None:
            self._swarm.account(episode.id, counts)

    async def _finish_ended(self, episode: EpisodeRecord) -> None:
        with suppress(Later, ComputeError):  # A disk refuses writes, or the run was closed. It trains nothing.
            await self._finish(episode)

    async def prune(self, rows: Slice) -> bool:
        """Deletes rows of a front's file. Returns False if the server has no such front any more."""
        front = int(self._swarm.file.segments[rows.schema].stem.rpartition("-")[2])
        if front >= len(self.fronts):
            return False
        await self.fronts.ask(front, "prune", self._policies.run, rows)
        return True

    async def training_batches(self, batch_id: int) -> tuple[dict[str, TrainingBatch], dict[str, float]]:
        return await self.fronts.batch(self._policies.run, batch_id)

    # ---- reports ----------------------------------------------------------------------------------------------------

    def heard(self, front: int, report: RunReport) -> None:
        """Records the activity of episodes that a front reports."""
        swarm, activity = self._swarm, report.activity
        # One transaction costs less than one for each episode; an idle front needs none.
        together = swarm.transaction() if activity.counts else nullcontext()
        with suppress(Later), together:  # The journal has logged it; the end of an episode repeats them.
            for episode_id, counts in activity.counts.items():
                if (known := swarm.episodes.get(episode_id)) is not None and known.status == "live":
                    swarm.account(episode_id, counts)
        for episode_id, is_call in activity.heard.items():
            if (known := swarm.episodes.get(episode_id)) is not None and known.status == "live":
                (swarm.leases.active if is_call else swarm.leases.renew)(known)
        calling = self._calling.setdefault(front, {})
        for episode_id in calling.keys() - activity.calling:
            calling.pop(episode_id).__exit__(None, None, None)
        for episode_id in activity.calling - calling.keys():
            with suppress(RequestError):  # It has ended.
                context = swarm.calling(episode_id)
                context.__enter__()
                calling[episode_id] = context
        self._busy[front] = self._busy.get(front, (0.0, 0.0))[0], report.busy_seconds
        self._num_calls[front] = report.num_calls

    def gone(self, front: int) -> None:
        for context in self._calling.pop(front, {}).values():
            context.__exit__(None, None, None)
        self._busy[front] = sum(self._busy.get(front, (0.0, 0.0))), 0.0
        self._num_calls[front] = 0

    def renew_leases(self, fronts: set[int]) -> None:
        for episode in self._swarm.live():
            if self.front(episode) in fronts:
                self._swarm.leases.renew(episode)


def without_job(config: ServeConfig) -> ServeConfig:
    """Returns settings for a front. It reads those of the job in the journal: they may have a recipe of a plug-in."""
    return config.model_copy(update={"job": JobConfig()})


def prune_file(path: Path, rows: Slice) -> None:
    """Deletes rows of the file of a front that is gone. Raises `ConfigError` if another process has it open."""
    with closing(Journal.open(path)) as journal, journal.file.transaction():
        journal.delete(rows.of_own_file())
