"""Live reload: the version of the agent that an episode gets while its source is being edited.

* When the files change, groups that have begun are completed by the old version, and no group begins with it. So a
  group never mixes versions, and no finished episode is lost. Then the files are loaded, and groups begin again.
* Files that cannot be loaded, or not in time, leave the old version in use. A newer edit is loaded without waiting for
  an older load that hangs.
* A version whose first episodes all fail is rolled back to the one before it, until the files change again. Its
  failures do not use up the attempts at a task.
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

Request = Callable[[str], Coroutine[Any, Any, AsyncEpisode]]
"""Requests an episode for a code version."""
REPLACED = "not needed: the agent's code was replaced before the group began"
POLL_SECONDS = 0.5
"""Interval between checks of the files."""
SETTLE_SECONDS = 0.2
"""Time that the files must stay unchanged before they are loaded: an editor may be writing them."""
SLOW_SECONDS = 5.0
"""Duration of a load after which a message is shown. No group begins during a load."""
LOAD_SECONDS = 120.0
"""Time limit of a load. Then it is abandoned in its thread, and the run goes on with the version before it."""
MIN_TRIAL = 4
"""Fewest episodes that can prove a version bad."""


@dataclass(eq=False)
class LoadedVersion:
    """A version of the agent, and the outcomes of its episodes."""

    version: AgentVersion
    num_finished: int = 0
    num_failed: int = 0
    is_rolled_back: bool = False
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no group may begin with this version."""

    @property
    def code_version(self) -> str:
        return self.version.code_version


class LiveReload:
    """The versions of one run. Without `code` the first version stays for the whole run."""

    def __init__(
        self,
        first: AgentVersion,
        code: AgentSource | None,
        *,
        group_size: int,
        sleep: Callable[[float], Awaitable[None]],
        notify: Callable[[str], None],
    ) -> None:
        """`group_size` members, without spare ones, complete a group."""
        self._code = code
        self._group_size = group_size
        self._sleep = sleep
        self._notify = notify
        self._versions = [LoadedVersion(first)]
        self._begun: dict[str, LoadedVersion] = {}
        """Incomplete groups, and the version they began with."""
        self._num_done: dict[str, int] = {}
        """Members that are not attempted again, by group."""
        self._over: set[str] = set()
        """Groups that are complete or not needed. A reload does not wait for members that join them later."""
        self._none_begun = asyncio.Event()
        self._none_begun.set()
        self._stamp = code.stamp() if code is not None else ()
        self._reloading = asyncio.Lock()
        self.current = self._versions[0]
        self.changes: list[CodeChange] = []

    # ---- episodes --------------------------------------------------------------------------------------------------

    async def begin(
        self, spec: RolloutSpec, request: Request, on_abort: Callable[[AsyncEpisode], None], cleanup: RunCleanup
    ) -> tuple[AsyncEpisode, Agent]:
        """Begin an episode with the version its group began with.

        The first episode of a group gets the newest version, also if the files change while it waits for room.
        """
        if self._code is None:
            return await request(self.current.code_version), self.current.version.agent
        while True:
            if spec.group not in self._begun:
                await self.reload_if_changed()
            loaded = self._begun.get(spec.group, self.current)
            pending = asyncio.create_task(request(loaded.code_version))
            try:
                await self._begun_or_closed(pending, spec.group, loaded)
            except asyncio.CancelledError:
                await _abandon(pending, UNPLAYED, on_abort, cleanup)
                raise
            if pending.done() and (self._begun.get(spec.group) is loaded or not loaded.closed.is_set()):
                episode = pending.result()
                if not spec.spare and spec.group not in self._over:
                    self._begun[spec.group] = loaded
                    self._none_begun.clear()
                return episode, loaded.version.agent
            await _abandon(pending, REPLACED, on_abort, cleanup)

    async def _begun_or_closed(self, pending: asyncio.Task[AsyncEpisode], group: str, loaded: LoadedVersion) -> None:
        """Wait for the episode, or until its version is closed to new groups."""
        closing = asyncio.create_task(loaded.closed.wait())
        try:
            either: set[asyncio.Task[Any]] = {pending, closing}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
        if not pending.done() and self._begun.get(group) is loaded:  # the closed version completes this group
            await asyncio.wait([pending])

    def ended(self, spec: RolloutSpec, result: EpisodeResult, last: bool) -> None:
        """Record the end of an episode; `last`: it is not attempted again. Rolls back a version that only fails."""
        if self._code is None:
            return
        loaded = self._loaded(result.code_version)
        loaded.num_finished += result.outcome == "finished"
        loaded.num_failed += result.outcome in ("aborted", "expired")
        if spec.group in self._begun:
            self._num_done[spec.group] = self._num_done.get(spec.group, 0) + (last and not spec.spare)
            if result.outcome == "not_needed" or self._num_done[spec.group] >= self._group_size:
                self._over.add(spec.group)
                self._forget([spec.group])
        is_bad = not loaded.num_finished and loaded.num_failed >= max(MIN_TRIAL, self._group_size)
        if loaded is not self._versions[0] and is_bad and not loaded.is_rolled_back:
            self._roll_back(loaded, f"its first {loaded.num_failed} episodes all failed, the last with {result.error}")

    def is_on_trial(self, code_version: str) -> bool:
        """True for an edited version without a finished episode: its failures may come from the edit."""
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
        """Check the files regularly, without end."""
        while True:
            await self._sleep(POLL_SECONDS)
            await self.reload_if_changed()

    async def reload_if_changed(self) -> None:
        """Load the files if they changed since the last check, once the groups that have begun are complete."""
        assert self._code is not None
        async with self._reloading:
            if self._code.stamp() == self._stamp:
                return
            before = self.current
            before.closed.set()
            if self._begun:
                self._notify(f"the agent's files changed; code {before.code_version} completes the groups it has begun")
            await self._none_begun.wait()
            try:
                await self._reload(self._code)
            finally:
                self.current.closed.clear()

    async def _reload(self, code: AgentSource) -> None:
        before = self.current
        try:
            while (version := await self._newest(code)) is None:
                self._notify("the files changed again while they were being loaded: they are loaded again")
        except Exception as error:  # the boundary: an edit that raises must not end the run
            why = f"{type(error).__name__}: {error}"
            self.changes.append(CodeChange("not loaded", before=before.code_version, to="", why=why))
            self._notify(f"the edited code could not be loaded, code {before.code_version} stays: {why}")
            return
        if version.code_version == before.code_version:
            return
        self.current = LoadedVersion(version)
        self._versions.append(self.current)
        self.changes.append(CodeChange("loaded", before=before.code_version, to=version.code_version))
        self._notify(f"code {version.code_version} takes the place of {before.code_version}")

    async def _newest(self, code: AgentSource) -> AgentVersion | None:
        """The version of the unchanging files; None if they change before it is loaded.

        Raises any exception of the user's code, and `TimeoutError` if loading does not end.
        """
        self._stamp = await self._settled(code)
        loading = asyncio.create_task(in_thread(code.load))
        try:
            clock = asyncio.get_running_loop().time
            began, notified = clock(), False
            while True:
                await asyncio.wait([loading], timeout=POLL_SECONDS)
                if loading.done():
                    return loading.result()
                if code.stamp() != self._stamp:
                    return None
                if clock() - began > LOAD_SECONDS:
                    raise TimeoutError(f"loading it did not end within {LOAD_SECONDS:.0f} s")
                if clock() - began > SLOW_SECONDS and not notified:
                    notified = True
                    self._notify(
                        f"the edited code is still being loaded; no group begins until then, for {LOAD_SECONDS:.0f} s "
                        "at most. Another edit is loaded in its place"
                    )
        finally:
            if not loading.done():
                loading.cancel()
                code.abandon()

    async def _settled(self, code: AgentSource) -> Stamp:
        """The files' stamp once it no longer changes."""
        stamp = code.stamp()
        while True:
            await self._sleep(SETTLE_SECONDS)
            before, stamp = stamp, code.stamp()
            if stamp == before:
                return stamp

    def _roll_back(self, bad: LoadedVersion, why: str) -> None:
        bad.is_rolled_back = True
        bad.closed.set()
        self._forget([group for group, loaded in self._begun.items() if loaded is bad])
        good = [loaded for loaded in self._versions if not loaded.is_rolled_back][-1]
        self.changes.append(CodeChange("rolled back", before=bad.code_version, to=good.code_version, why=why))
        self._notify(f"ROLLED BACK to code {good.code_version}: of code {bad.code_version}, {why}")
        if self.current is bad:
            self.current = good
            if not self._reloading.locked():  # else the reload in progress opens the version
                good.closed.clear()


async def _abandon(
    pending: asyncio.Task[AsyncEpisode], why: str, on_abort: Callable[[AsyncEpisode], None], cleanup: RunCleanup
) -> None:
    """Cancel a request for an episode; if it was answered, abort the episode."""
    pending.cancel()
    await asyncio.wait([pending])
    if pending.cancelled() or pending.exception() is not None:
        return
    episode = pending.result()
    await cleanup.wait_for_abort(episode.abort(why, patience=0.0))
    on_abort(episode)
