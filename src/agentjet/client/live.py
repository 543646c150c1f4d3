"""Live code: which version of the agent an episode gets while its source is being edited.

The unit is the group. Those that have begun are completed by the version they began with, so that no group mixes
versions and no finished episode is lost; new ones begin with the newest version. A version whose first episodes all
fail is rolled back to the one before it, until the files change again. One that cannot be loaded is not taken up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from agentjet.client.code import Code, Version
from agentjet.client.episode import AsyncEpisode
from agentjet.client.report import CodeChange, EpisodeResult
from agentjet.client.rollout import Agent
from agentjet.client.threads import in_thread

Ask = Callable[["Loaded"], Coroutine[Any, Any, AsyncEpisode]]
REPLACED = "not needed: the agent's code was replaced before the group began"
LOOK_SECONDS = 0.5
"""Between two looks at the files."""
SETTLE_SECONDS = 0.2
"""So long the files must stay as they are before they are loaded: an editor may be in the midst of writing."""
MIN_TRIAL = 4
"""Least number of episodes a version is judged by."""


@dataclass(eq=False)
class Loaded:
    """A version, and how its episodes fared."""

    version: Version
    number: int
    """0 for the first; tells the groups of two versions of one task apart."""
    num_finished: int = 0
    num_failed: int = 0
    is_rolled_back: bool = False
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while another version is in its place."""

    @property
    def code_version(self) -> str:
        return self.version.code_version


class LiveCode:
    """The versions of one run. Without a `code` to look at there is one version for ever."""

    def __init__(
        self,
        first: Version,
        code: Code | None,
        *,
        group_size: int = 1,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._code = code
        self._sleep = sleep
        self._say = say
        self._trial = max(MIN_TRIAL, group_size)
        self._versions = [Loaded(first, 0)]
        self._of_group: dict[str, Loaded] = {}
        self._stamp = code.stamp() if code is not None else ()
        self._looking = asyncio.Lock()
        self.current = self._versions[0]
        self.changes: list[CodeChange] = []

    def of(self, group: str) -> Loaded:
        """The version that episodes of a group get: the one it began with, the newest when it has not begun."""
        begun_with = self._of_group.get(group)
        return self.current if begun_with is None or begun_with.is_rolled_back else begun_with

    def name_of(self, group: str, loaded: Loaded) -> str:
        """The group as the server is to know it: another one with each version that it is begun with."""
        return f"{group}/{loaded.number}" if loaded.number else group

    async def begin(
        self, group: str, ask: Ask, given_back: Callable[[AsyncEpisode], None]
    ) -> tuple[AsyncEpisode, Agent]:
        """Begin an episode with the version its group gets, also when that becomes another while there is no room."""
        await self.look()
        while True:
            loaded = self.of(group)
            if self._code is None:
                return await ask(loaded), loaded.version.agent
            asking = asyncio.create_task(ask(loaded))
            try:
                await self._answered_or_replaced(asking, group, loaded)
            finally:
                if not asking.done():
                    asking.cancel()
                    await asyncio.wait([asking])
            if asking.cancelled():
                continue
            episode = asking.result()
            if self.of(group) is loaded:
                self._of_group[group] = loaded
                return episode, loaded.version.agent
            await episode.abort(REPLACED)
            given_back(episode)

    async def _answered_or_replaced(self, asking: asyncio.Task[AsyncEpisode], group: str, loaded: Loaded) -> None:
        leaving = asyncio.create_task(loaded.left.wait())
        try:
            either: set[asyncio.Task[Any]] = {asking, leaving}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
        if not asking.done() and self.of(group) is loaded:  # it has begun with this version, which completes it
            await asyncio.wait([asking])

    def ended(self, result: EpisodeResult) -> None:
        """Take an episode's end into account; rolls back a version that only fails."""
        loaded = next(it for it in reversed(self._versions) if it.code_version == result.code_version)
        loaded.num_finished += result.outcome == "finished"
        loaded.num_failed += result.outcome in ("aborted", "expired")
        is_bad = not loaded.num_finished and loaded.num_failed >= self._trial
        if loaded.number and is_bad and not loaded.is_rolled_back:
            self._roll_back(loaded, f"its first {loaded.num_failed} episodes all failed, the last with {result.error}")

    def _roll_back(self, bad: Loaded, why: str) -> None:
        bad.is_rolled_back = True
        good = [loaded for loaded in self._versions if not loaded.is_rolled_back][-1]
        self.changes.append(CodeChange("rolled back", good.code_version, bad.code_version, why))
        self._say(f"ROLLED BACK to code {good.code_version}: of code {bad.code_version}, {why}")
        if self.current is bad:
            self._take(good)

    async def look(self) -> None:
        """Take up the files if they changed since the last look and can be loaded."""
        if self._code is None:
            return
        async with self._looking:
            stamp = self._code.stamp()
            if stamp == self._stamp:
                return
            while True:
                await self._sleep(SETTLE_SECONDS)
                if (now := self._code.stamp()) == stamp:
                    break
                stamp = now
            self._stamp = stamp
            before = self.current.code_version
            try:
                version = await in_thread(self._code.load)
            except Exception as error:  # the boundary: whatever is wrong with an edit ends no run
                why = f"{type(error).__name__}: {error}"
                self.changes.append(CodeChange("not loaded", before, "", why))
                self._say(f"the edited code could not be loaded, code {before} stays: {why}")
                return
            if version.code_version == before and not self.current.is_rolled_back:
                return
            loaded = Loaded(version, len(self._versions))
            self._versions.append(loaded)
            self.changes.append(CodeChange("loaded", version.code_version, before))
            self._say(f"code {version.code_version} takes the place of {before}")
            self._take(loaded)

    async def watch(self) -> None:
        """Without end: look."""
        while True:
            await self._sleep(LOOK_SECONDS)
            await self.look()

    def _take(self, loaded: Loaded) -> None:
        left, self.current = self.current, loaded
        left.left.set()
        loaded.left.clear()
