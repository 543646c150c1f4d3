"""`FrontRun`: a run of a front, and what server and front tell each other about it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from agentjet.compute.protocol import Sampler
from agentjet.config import ServeConfig
from agentjet.errors import Later, RequestError
from agentjet.front.calls import Calls
from agentjet.front.concurrency import Gate, GroupCommit
from agentjet.front.keys import Keys
from agentjet.front.segment import EpisodeActivity, Segment
from agentjet.front.tracing import Tracing
from agentjet.rendering import Renderer
from agentjet.swarm.facts import build
from agentjet.swarm.state import CallCounts
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import ModelInfo


@dataclass(frozen=True, slots=True)
class RunState:
    """The facts that calls of a run depend on, besides its journal."""

    names: tuple[str, ...]
    model_name: str
    is_open: bool
    """True if calls may be sampled now."""
    refusal: Later | None
    """The refusal of calls, if the engine is stopped."""
    models: Mapping[str, ModelInfo]
    """Loaded models by policy. Empty until all policies were up once."""
    job_revision: int
    num_starts: int = 0
    """Number of the present workers, by which a call that crashes several is given up."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """The activity of a run since the last report."""

    activity: EpisodeActivity
    num_calls: int
    """Calls whose answers are not delivered yet."""
    busy_seconds: float
    """Seconds since the start of the front in which a call was sampled."""
    refusal: str = ""
    """The reason why the front's file takes no calls now; empty if it takes them."""


@dataclass(eq=False)
class FrontPolicies:
    """The policies of a run on the backend, as its calls need them."""

    run: str
    config: ServeConfig
    compute: Sampler
    names: tuple[str, ...] = field(default=(), init=False)
    """The policies that the settings name. Empty for a run with one policy without a name."""
    model_name: str = field(default="", init=False)
    """The model name for requests. For a local model, the name of its folder. Empty with named policies."""
    renderers: dict[str, Renderer] = field(default_factory=dict, init=False)
    """Renderers of the models by policy. Empty until all policies were up once."""
    num_starts: int = field(default=0, init=False)
    """Number of times that the policies were brought up: 1, and 1 for each crash of a worker."""

    def is_of_another_run(self, error: Exception) -> bool:
        """True if a worker crashed during an operation of another run."""
        return False


class FrontRun:
    """A run of a front."""

    def __init__(
        self, segment: Segment, policies: FrontPolicies, keys: Keys, tracing: Tracing, clock: Callable[[], float]
    ) -> None:
        self.segment = segment
        self.policies = policies
        self.gate = Gate()
        self.commits = GroupCommit(segment)
        self.calls = Calls(policies, self.commits, self.gate, tracing, clock)
        self.keys = keys
        self._revision = -1
        self._changing = asyncio.Lock()

    async def change(self, state: RunState) -> None:
        """Applies a state. Later states wait for it."""
        async with self._changing:
            if (refusal := state.refusal) is not None:
                self.gate.shut(lambda: copy.copy(refusal))  # Each raise of one error adds frames to its traceback.
            elif not state.is_open:  # Before anything that may fail: the weights change next.
                self.gate.hold()
            if state.job_revision != self._revision:
                # It is an earlier one if the server has not committed the change yet: the next state repeats it.
                self._revision = await asyncio.to_thread(self.segment.read_job)
            renderers: dict[str, Renderer] = {}
            for name, model in state.models.items():
                same = [one for one in (*renderers.values(), *self.policies.renderers.values()) if one.model == model]
                renderers[name] = same[0] if same else await asyncio.to_thread(Renderer, model)
            policies = self.policies
            policies.names, policies.model_name, policies.renderers = state.names, state.model_name, renderers
            policies.num_starts = state.num_starts
            if state.is_open:
                self.gate.open()

    async def drained(self) -> None:
        async with self._changing:
            pass
        await self.gate.drained()

    async def finish(self, episode_id: str) -> CallCounts | None:
        """Ends an episode here. Returns its counts when its calls are on disk; None for one that had ended.

        Raises `Later` if the disk refuses the calls. Then a live episode goes on.
        """
        try:
            counts = self.segment.finish(episode_id, self.calls.undelivered(episode_id))
            await self.commits.durable()
        except Later:
            self.segment.resume(episode_id)
            is_live = False
            with suppress(RequestError):  # The server may have ended it before, and deleted it.
                is_live = self.segment.episode(episode_id).status == "live"
            if not is_live:
                self.calls.episode_ended(episode_id)
            raise
        self.calls.episode_ended(episode_id)
        return counts

    def report(self) -> RunReport:
        return RunReport(
            self.segment.report(), self.calls.num_active, self.gate.busy_seconds(), self.segment.file.refusal
        )

    def batch(self, batch_id: int) -> tuple[dict[str, TrainingBatch], dict[str, float]]:
        """See `facts.build`. Runs in a thread."""
        with self.segment.run.reading() as journal:
            batch = journal.stored_batch(batch_id)()
            members = {episode_id: journal.known_episode(episode_id) for episode_id in batch.episode_ids}
            return build(journal, batch, members, self.policies.names)

    async def close(self) -> None:
        await self.calls.close()
        await self.commits.close()
        self.segment.close()
