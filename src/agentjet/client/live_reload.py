"""Live reload: the version of the agent that an episode gets while its source is being edited.

* A group never mixes versions, and no finished episode is lost: each version runs from a copy of its files. The files
  are loaded once the groups that have begun are complete, or after `GROUPS_SECONDS`. No group begins until then. An
  episode of older code that imports a module after the load gets that of the new version.
* Files that cannot be loaded leave the old version in use. During a held-out evaluation the version stays, too.
* A version whose first episodes all fail is rolled back to the one before it, until the files change again. Its
  failures do not use up the attempts at a task. A failed held-out evaluation of an edited version ends no run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agentjet.client.agent_source import AgentSource, AgentVersion, content_hash, edits, one_line
from agentjet.client.episode import AsyncEpisode
from agentjet.client.report import CodeChange, EpisodeResult
from agentjet.client.rollout import Agent, AgentFailing, RolloutSpec, Visit
from agentjet.client.threads import in_thread
from agentjet.errors import AgentJetError, ConfigError, Conflict

SETTLE_SECONDS = 0.2
"""Time that the files must stay unchanged before they are loaded: an editor may be writing them."""
GROUPS_SECONDS = 600.0
"""Longest wait for the groups that have begun. The server keeps those with a live episode."""
IDLE_SECONDS = 2.0
"""Time without an episode of a begun group after which their other members are not waited for: the workers that would
begin them wait for this load."""
MOST_LOADS = 10
"""Loads in a row of files that change in between."""
LOAD_SECONDS = 120.0
"""Time limit of a load. Then the run continues with the version before it."""
MIN_TRIAL = 4
"""Fewest episodes that can prove a version bad."""


async def first_version(agent: Callable[..., Any], code: AgentSource | None, code_version: str | None) -> AgentVersion:
    """The version that a run begins with. Raises `ConfigError` for files that cannot be loaded."""
    if code is None:
        return AgentVersion.of(agent, code_version)
    try:
        version = await in_thread(code.load)
    except AgentJetError:
        raise
    except Exception as error:  # the boundary: the user's file may raise anything
        raise ConfigError(f"the agent's files cannot be loaded: {one_line(error)}") from error
    return version if code_version is None else replace(version, code_version=code_version)


@dataclass(eq=False)
class LoadedVersion:
    """A version of the agent, and the outcomes of its episodes."""

    version: AgentVersion
    num_finished: int = 0
    num_failed: int = 0
    is_rolled_back: bool = False


@dataclass(eq=False)
class _Group:
    """A group that has begun, or was refused."""

    visit: Visit
    loaded: LoadedVersion | None = None
    """The version that it began with. None: it begins with the present one."""
    is_open: bool = False
    """True if it has begun and lacks members."""
    is_left: bool = False
    """True if it gets no further member, because it would get one of another version."""
    num_live: int = 0
    """Episodes that are being begun or have not ended."""
    num_done: int = 0
    """Members that are not attempted again."""

    def forget(self) -> None:
        """Let it begin again, with another version."""
        self.loaded, self.is_open = None, False


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
        self._groups: dict[str, _Group] = {}
        """Groups with episodes that have not ended for good."""
        self._stamp = first.stamp
        """The stamp of the files that were loaded last, or could not be loaded."""
        self._problem = ""
        """The reason for which the files cannot be listed."""
        self._reloading = asyncio.Lock()
        self._phase: Literal["groups", "loading", "evaluating"] = "groups"
        """No version is rolled back but in "groups". The modules of another one would be mixed with those of a load,
        and would change the score of a held-out evaluation. No version is loaded in "evaluating", either."""
        self.current = self._versions[0]
        self.changes: list[CodeChange] = []

    async def begin(
        self, spec: RolloutSpec, request: Callable[[str], Awaitable[AsyncEpisode]]
    ) -> tuple[AsyncEpisode, Agent]:
        """Begin an episode with the version its group began with. `request` requests one for a code version."""
        if self._code is None:
            return await request(self.current.version.code_version), self.current.version.agent
        known = self._groups.get(spec.group)
        if known is None or known.loaded is None:
            await self._reload_if_changed(self._code)
        group = self._group_of(spec)
        if group.is_left:
            raise Conflict(f"Group {spec.group!r} is left with the members of older code.", code="group_closed")
        loaded = group.loaded = group.loaded or self.current
        group.num_live += 1
        if not spec.spare and group.num_done < self._group_size:
            group.is_open = True
        try:
            return await request(loaded.version.code_version), loaded.version.agent
        except AgentJetError as error:
            group.num_live -= 1
            if isinstance(error, Conflict) and error.code == "group_closed" and not spec.spare:
                self._count_done(group)  # The recipe wants fewer episodes.
            else:  # There was no room: the group may begin later, with another version.
                group.forget()
            raise

    def _group_of(self, spec: RolloutSpec) -> _Group:
        if spec.group not in self._groups:
            self._groups = {name: group for name, group in self._groups.items() if group.visit.num_left}
            self._groups[spec.group] = _Group(spec.visit)
        return self._groups[spec.group]

    def ended(self, spec: RolloutSpec, result: EpisodeResult, last: bool) -> None:
        """Record the end of an episode; `last`: it is not attempted again. Rolls back a version that only fails."""
        if self._code is None:
            return
        group, loaded = self._groups[spec.group], self._loaded(result.code_version)
        group.num_live -= 1
        loaded.num_finished += result.outcome == "finished"
        loaded.num_failed += result.outcome in ("aborted", "expired")
        if result.outcome == "not_needed":
            group.num_done = self._group_size - 1
        if result.outcome == "not_needed" or (last and not spec.spare):
            self._count_done(group)
        is_bad = not loaded.num_finished and loaded.num_failed >= max(MIN_TRIAL, self._group_size)
        if loaded is not self._versions[0] and is_bad and not loaded.is_rolled_back and self._phase == "groups":
            self._roll_back(loaded, f"its first {loaded.num_failed} episodes all failed, the last with {result.error}")

    def _count_done(self, group: _Group) -> None:
        """Count a member that is not attempted again."""
        group.num_done += 1
        if group.num_done >= self._group_size:
            group.is_open = False

    def is_on_trial(self, code_version: str) -> bool:
        """True for an edited version without a finished episode: its failures may come from the edit."""
        loaded = self._loaded(code_version)
        return loaded is not self._versions[0] and not loaded.num_finished

    def _loaded(self, code_version: str) -> LoadedVersion:
        return next(loaded for loaded in reversed(self._versions) if loaded.version.code_version == code_version)

    def end(self) -> None:
        """Report an edit that no episode ran, because it came after the last group had begun."""
        if self._code is not None and (edited := self._edits(self._code)):
            self._keep(f"{edited} after the last group of this run had begun, so no episode ran the edit")

    def _edits(self, code: AgentSource) -> str:
        """The files that differ from the current version, for a message. Empty if they were tried before."""
        try:
            stamp = code.stamp()
        except (AgentJetError, OSError) as error:  # An edit must not end the run, such as one that adds large files.
            if str(error) != self._problem:
                self._problem = str(error)
                self._keep(self._problem)
            return ""
        self._problem = ""
        if stamp == self._stamp:
            return ""
        version = self.current.version
        restamped = {Path(path) for path, *_ in {*stamp} ^ {*version.stamp}}
        before = {path: version.files[path] for path in restamped & version.files.keys()}
        found = edits(before, {path: content_hash(path) for path in restamped if path.exists()})
        if not found:  # written without a change, or edited back
            self._stamp = stamp
        return found

    async def _reload_if_changed(self, code: AgentSource) -> None:
        async with self._reloading:
            if self._phase == "evaluating" or not (edited := self._edits(code)):
                return
            if self._open():
                before = self.current.version.code_version
                self._notify(f"{edited}; code {before} completes the groups it has begun")
            await self._wait_for_groups()
            await self._reload(code)

    async def _wait_for_groups(self) -> None:
        """Wait until the groups that have begun are complete. Those that nothing completes are left as they are."""
        waited = idle = 0.0
        while (left := self._open()) and waited < GROUPS_SECONDS and idle < IDLE_SECONDS:
            await self._sleep(SETTLE_SECONDS)
            waited += SETTLE_SECONDS
            idle = 0.0 if any(group.num_live for group in self._open()) else idle + SETTLE_SECONDS
        for group in left:
            group.is_left, group.is_open = True, False

    def _open(self) -> list[_Group]:
        """Groups that lack members, or whose spare episodes still run."""
        return [group for group in self._groups.values() if group.is_open or (group.num_live > 0 and not group.is_left)]

    @asynccontextmanager
    async def held_out(self, *, reload: bool = True) -> AsyncIterator[AgentVersion]:
        """The version for a held-out evaluation. No version is loaded or rolled back before the evaluation ends.

        If an edited version fails (`AgentFailing`), the evaluation is skipped. The version is rolled back if it is on
        trial. Without `reload` no edit is loaded before.
        """
        if self._code is not None and reload:  # else an edit could wait for one evaluation after the other
            await self._reload_if_changed(self._code)
        async with self._reloading:
            self._phase = "evaluating"
        try:
            yield self.current.version
        except AgentFailing as failing:
            if self.current is self._versions[0]:
                raise
            if self.current.num_finished:
                self._notify(f"skipped: {failing}")
            else:
                self._roll_back(self.current, str(failing))
        finally:
            self._phase = "groups"

    async def _reload(self, code: AgentSource) -> None:
        before, stamp = self.current.version, self._stamp
        self._phase = "loading"
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                version = await self._newest(code)
        except asyncio.CancelledError:  # The run ends: the edit was not loaded.
            before.activate()
            self._stamp = stamp
            raise
        except Exception as error:  # the boundary: an edit that raises must not end the run
            before.activate()  # A part of the source may be loaded, or still be loading.
            late = f"loading it did not end within {LOAD_SECONDS:g} s"
            self._keep(f"{type(error).__name__}: {str(error) or late}")
            return
        finally:
            self._phase = "groups"
        if version.code_version == before.code_version:
            self.current.version = version
            return
        self.current = LoadedVersion(version)
        self._versions.append(self.current)
        edited = edits(before.files, version.files)
        self.changes.append(CodeChange("loaded", before=before.code_version, to=version.code_version, why=edited))
        self._notify(f"code {version.code_version} takes the place of {before.code_version}: {edited}")

    def _keep(self, why: str) -> None:
        """Record that the current version stays in spite of an edit."""
        before = self.current.version.code_version
        self.changes.append(CodeChange("not loaded", before=before, to="", why=why))
        self._notify(f"the edited code was not loaded, code {before} stays: {why}")

    async def _newest(self, code: AgentSource) -> AgentVersion:
        """The version of the files once they no longer change. Raises any exception of the user's code."""
        for _ in range(MOST_LOADS):
            self._stamp = code.stamp()
            await self._sleep(SETTLE_SECONDS)
            version = await in_thread(code.load)
            self._stamp = version.stamp
            if code.stamp() == self._stamp:
                break
        return version

    def _roll_back(self, bad: LoadedVersion, why: str) -> None:
        bad.is_rolled_back = True
        for group in self._groups.values():
            if group.loaded is bad:
                group.forget()
        good = [loaded for loaded in self._versions if not loaded.is_rolled_back][-1]
        before, to = bad.version.code_version, good.version.code_version
        self.changes.append(CodeChange("rolled back", before=before, to=to, why=why))
        self._notify(f"ROLLED BACK to code {to}: of code {before}, {why}")
        if self.current is bad:
            self.current = good
            good.version.activate()
