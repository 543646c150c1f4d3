"""Live code: which version of the agent an episode gets while its source is being edited.

When the files change, no group begins with the old version any more; those that have begun are completed by it, so that
no group mixes versions and no finished episode is lost. Then the files are loaded and groups begin again. What cannot
be loaded, or not in time, is not taken up; a newer edit is loaded without waiting for an older one's end. A version
whose first episodes all fail is rolled back to the one before it, until the files change again; its failures cost no
task an attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from agentjet.client.agent_source import AgentSource, AgentVersion, Stamp
from agentjet.client.episode import UNPLAYED, AsyncEpisode, RunCleanup
from agentjet.client.report import CodeChange, EpisodeResult
from agentjet.client.rollout import Agent, RolloutSpec
from agentjet.client.threads import in_thread

Ask = Callable[[str], Coroutine[Any, Any, AsyncEpisode]]
"""Asks the server for an episode of a code version."""
REPLACED = "not needed: the agent's code was replaced before the group began"
LOOK_SECONDS = 0.5
"""Between two looks at the files."""
SETTLE_SECONDS = 0.2
"""So long the files must stay as they are before they are loaded: an editor may be in the midst of writing."""
SLOW_SECONDS = 5.0
"""A load that takes longer is said: meanwhile no group begins."""
LOAD_SECONDS = 120.0
"""A load that takes longer is left behind in its thread, and the run goes on with the version before it."""
MIN_TRIAL = 4
"""Least number of episodes a version is judged by."""


@dataclass(eq=False)
class LoadedVersion:
    """A version, and how its episodes fared."""

    version: AgentVersion
    num_finished: int = 0
    num_failed: int = 0
    is_rolled_back: bool = False
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no group may begin with it."""

    @property
    def code_version(self) -> str:
        return self.version.code_version


class LiveReload:
    """The versions of one run. Without a `code` to look at there is one version for ever."""

    def __init__(
        self,
        first: AgentVersion,
        code: AgentSource | None = None,
        *,
        group_size: int = 1,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`group_size` members of a group, spare ones not among them, complete it."""
        self._code = code
        self._group_size = group_size
        self._sleep = sleep
        self._say = say
        self._versions = [LoadedVersion(first)]
        self._begun: dict[str, LoadedVersion] = {}
        """Groups that are not complete, and the version they began with."""
        self._num_done: dict[str, int] = {}
        """Members that are not tried again, by group."""
        self._over: set[str] = set()
        """Groups that are complete, or not needed: whoever still joins one is not waited for."""
        self._none_begun = asyncio.Event()
        self._none_begun.set()
        self._stamp = code.stamp() if code is not None else ()
        self._looking = asyncio.Lock()
        self.current = self._versions[0]
        self.changes: list[CodeChange] = []

    # ---- episodes --------------------------------------------------------------------------------------------------

    async def begin(
        self, slot: RolloutSpec, ask: Ask, given_back: Callable[[AsyncEpisode], None], ending: RunCleanup
    ) -> tuple[AsyncEpisode, Agent]:
        """Begin an episode with the version its group began with. One that opens its group gets the newest, also when
        that becomes another while there is no room.
        """
        if self._code is None:
            return await ask(self.current.code_version), self.current.version.agent
        while True:
            if slot.group not in self._begun:
                await self.look()
            loaded = self._begun.get(slot.group, self.current)
            asking = asyncio.create_task(ask(loaded.code_version))
            try:
                await self._answered_or_left(asking, slot.group, loaded)
            except asyncio.CancelledError:
                await _give_back(asking, UNPLAYED, given_back, ending)
                raise
            if asking.done() and (self._begun.get(slot.group) is loaded or not loaded.left.is_set()):
                episode = asking.result()
                if not slot.spare and slot.group not in self._over:
                    self._begun[slot.group] = loaded
                    self._none_begun.clear()
                return episode, loaded.version.agent
            await _give_back(asking, REPLACED, given_back, ending)

    async def _answered_or_left(self, asking: asyncio.Task[AsyncEpisode], group: str, loaded: LoadedVersion) -> None:
        leaving = asyncio.create_task(loaded.left.wait())
        try:
            either: set[asyncio.Task[Any]] = {asking, leaving}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
        if not asking.done() and self._begun.get(group) is loaded:  # the version completes it
            await asyncio.wait([asking])

    def ended(self, slot: RolloutSpec, result: EpisodeResult, last: bool) -> None:
        """Take an episode's end into account; `last`: it is not tried again. Rolls back a version that only fails."""
        if self._code is None:
            return
        loaded = self._loaded(result.code_version)
        loaded.num_finished += result.outcome == "finished"
        loaded.num_failed += result.outcome in ("aborted", "expired")
        if slot.group in self._begun:
            self._num_done[slot.group] = self._num_done.get(slot.group, 0) + (last and not slot.spare)
            if result.outcome == "not_needed" or self._num_done[slot.group] >= self._group_size:
                self._over.add(slot.group)
                self._forget([slot.group])
        is_bad = not loaded.num_finished and loaded.num_failed >= max(MIN_TRIAL, self._group_size)
        if loaded is not self._versions[0] and is_bad and not loaded.is_rolled_back:
            self._roll_back(loaded, f"its first {loaded.num_failed} episodes all failed, the last with {result.error}")

    def is_on_trial(self, code_version: str) -> bool:
        """Whether a version is an edit of which no episode was finished: what fails may be the edit."""
        loaded = self._loaded(code_version)
        return loaded is not self._versions[0] and not loaded.num_finished

    def _loaded(self, code_version: str) -> LoadedVersion:
        return next(loaded for loaded in reversed(self._versions) if loaded.code_version == code_version)

    def _forget(self, groups: list[str]) -> None:
        for group in groups:
            self._begun.pop(group, None)
        if not self._begun:
            self._none_begun.set()

    # ---- versions --------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Without end: look."""
        while True:
            await self._sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Take up the files if they changed since the last look: when the groups that have begun are complete."""
        assert self._code is not None
        async with self._looking:
            if self._code.stamp() == self._stamp:
                return
            before = self.current
            before.left.set()
            if self._begun:
                self._say(f"the agent's files changed; code {before.code_version} completes the groups it has begun")
            await self._none_begun.wait()
            try:
                await self._load(self._code)
            finally:
                self.current.left.clear()

    async def _settled(self, code: AgentSource) -> Stamp:
        """The files' stamp once it stays what it is."""
        stamp = code.stamp()
        while True:
            await self._sleep(SETTLE_SECONDS)
            before, stamp = stamp, code.stamp()
            if stamp == before:
                return stamp

    async def _load(self, code: AgentSource) -> None:
        before = self.current
        try:
            while (version := await self._newest(code)) is None:
                self._say("the files changed again while they were being loaded: they are loaded anew")
        except Exception as error:  # the boundary: whatever is wrong with an edit, it ends no run
            why = f"{type(error).__name__}: {error}"
            self.changes.append(CodeChange("not loaded", before=before.code_version, to="", why=why))
            self._say(f"the edited code could not be loaded, code {before.code_version} stays: {why}")
            return
        if version.code_version == before.code_version:
            return
        self.current = LoadedVersion(version)
        self._versions.append(self.current)
        self.changes.append(CodeChange("loaded", before=before.code_version, to=version.code_version))
        self._say(f"code {version.code_version} takes the place of {before.code_version}")

    async def _newest(self, code: AgentSource) -> AgentVersion | None:
        """The version of the files once they are quiet; None when they change before it is loaded.

        Raises whatever is wrong with them, and `TimeoutError` when loading them does not end.
        """
        self._stamp = await self._settled(code)
        loading = asyncio.create_task(in_thread(code.load))
        try:
            clock = asyncio.get_running_loop().time
            began, told = clock(), False
            while True:
                await asyncio.wait([loading], timeout=LOOK_SECONDS)
                if loading.done():
                    return loading.result()
                if code.stamp() != self._stamp:
                    return None
                if clock() - began > LOAD_SECONDS:
                    raise TimeoutError(f"loading it did not end within {LOAD_SECONDS:.0f} s")
                if clock() - began > SLOW_SECONDS and not told:
                    told = True
                    self._say(
                        f"the edited code is still being loaded; no group begins until it is, for {LOAD_SECONDS:.0f} s "
                        "at most. Another edit is loaded in its place"
                    )
        finally:
            if not loading.done():
                loading.cancel()
                code.abandon()

    def _roll_back(self, bad: LoadedVersion, why: str) -> None:
        bad.is_rolled_back = True
        bad.left.set()
        self._forget([group for group, loaded in self._begun.items() if loaded is bad])
        good = [loaded for loaded in self._versions if not loaded.is_rolled_back][-1]
        self.changes.append(CodeChange("rolled back", before=bad.code_version, to=good.code_version, why=why))
        self._say(f"ROLLED BACK to code {good.code_version}: of code {bad.code_version}, {why}")
        if self.current is bad:
            self.current = good
            if not self._looking.locked():  # else the look that goes on decides
                good.left.clear()


async def _give_back(
    asking: asyncio.Task[AsyncEpisode], why: str, given_back: Callable[[AsyncEpisode], None], ending: RunCleanup
) -> None:
    """End a request that nobody waits for any more; an episode that it has brought is aborted."""
    asking.cancel()
    await asyncio.wait([asking])
    if asking.cancelled() or asking.exception() is not None:
        return
    episode = asking.result()
    await ending.trim_malloc(episode.abort(why, patience=0.0))
    given_back(episode)
