"""One episode over several servers, each with its part: begun on all or on none, finished on all or on none.

The finish has two phases. Every server but the first promises the reward (`prepare`), then the first one, the *anchor*,
finishes: that is the decision. The others follow, now or, when they or this client are away, by `recover`. A team's id
names the anchor's member, so that whoever recovers knows whom to ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from agentjet.client.episode import (
    AsyncEpisode,
    Drive,
    Episode,
    abort_reason,
    checked_reward,
    patience_after,
)
from agentjet.errors import AgentJetError, Conflict, InvalidRequest, NotFound
from agentjet.protocol import EpisodeView
from agentjet.types import EpisodeStatus, Mode, Reward


class AsyncTeamEpisode(Mapping[str, AsyncEpisode]):
    """The parts of an episode by member, in the order in which they were begun: the anchor's first.

    As a context manager it aborts unless `finish` was called inside.
    """

    def __init__(self, team: str, parts: Mapping[str, AsyncEpisode]) -> None:
        self.team = team
        self._parts = dict(parts)
        self._anchor = next(iter(self._parts.values()))
        self.reward: Reward | None = None
        """What it was finished with, by member in `by_role`."""
        self.unsettled: dict[str, str] = {}
        """Members whose part has not heard of the decision, and why; `Team.recover` tells them."""

    def __getitem__(self, member: str) -> AsyncEpisode:
        return self._parts[member]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.team} of task {self.task_id!r}: {', '.join(self)}>"

    @property
    def task_id(self) -> str:
        return self._anchor.task_id

    @property
    def mode(self) -> Mode:
        return self._anchor.mode

    @property
    def code_version(self) -> str:
        return self._anchor.code_version

    @property
    def policy_version(self) -> int:
        """The anchor's version at the beginning."""
        return self._anchor.policy_version

    @property
    def lease_seconds(self) -> float:
        """The shortest of the servers' leases."""
        return min(part.lease_seconds for part in self.values())

    @property
    def status(self) -> EpisodeStatus:
        """As far as this client knows. A team's episode lives while all its parts do."""
        if self.reward is not None:
            return "finished"
        ended: list[EpisodeStatus] = [part.status for part in self.values() if part.status in ("aborted", "expired")]
        return ended[0] if ended else "live"

    @property
    def reason(self) -> str:
        """Why it ended without a reward, as the server has it that ended it."""
        return next((part.reason for part in self.values() if part.reason), "")

    def checked(self, returned: object) -> Reward:
        """Rewards of all members: one number for all, a number or `Reward` for each by name, or a `Reward` whose
        `by_role` names members and whose value is for the others. The team's own value is their mean.

        Raises `InvalidRequest` for anything else.
        """
        if isinstance(returned, Mapping):
            self._refuse_strangers(returned, "the rewards")
            if missing := [member for member in self if member not in returned]:
                raise InvalidRequest(
                    f"no reward for {missing[0]!r}: the team's members are {', '.join(self)}",
                    code="invalid_reward",
                    status=422,
                    param=missing[0],
                )
            rewards = {member: checked_reward(returned[member]) for member in self}
            metrics = {name: value for reward in rewards.values() for name, value in reward.metrics.items()}
            by_member = {member: reward.value for member, reward in rewards.items()}
        else:
            whole = checked_reward(returned)
            self._refuse_strangers(whole.by_role, "by_role")
            by_member = {member: whole.by_role.get(member, whole.value) for member in self}
            metrics = dict(whole.metrics)
        return Reward(sum(by_member.values()) / len(by_member), by_member, metrics)

    def _refuse_strangers(self, names: Mapping[str, object], where: str) -> None:
        if strangers := [name for name in names if name not in self._parts]:
            raise InvalidRequest(
                f"{where} name {strangers[0]!r}, who is not in the team: its members are {', '.join(self)}",
                code="invalid_reward",
                status=422,
                param=strangers[0],
            )

    async def finish(self, reward: float | Reward | Mapping[str, float | Reward]) -> None:
        """End the episode everywhere, each part with its member's reward (see `checked`).

        Raises `InvalidRequest` before anything is sent when a reward is wrong; `Conflict` when a part has ended, after
        which none of them counts; `Unreachable` when a server stays away before the decision fell. Once it fell this
        succeeds: a part that cannot be told of it is in `unsettled`.
        """
        agreed = self.checked(reward)
        shares = {member: Reward(agreed.by_role[member], metrics=agreed.metrics) for member in self}
        others = [member for member in self if self[member] is not self._anchor]
        if self.mode == "train":
            await self._prepare(others, shares)
        try:
            await self._anchor.finish(shares[next(iter(self))])
        except (Conflict, NotFound) as refusal:
            await self._give_up(others, f"the team's anchor refused: {refusal}")
            raise
        self.reward = agreed
        told = await _all({member: self[member].finish(shares[member]) for member in others})
        self.unsettled = {member: str(outcome) for member, outcome in told.items() if outcome is not None}

    async def _prepare(self, others: list[str], shares: Mapping[str, Reward]) -> None:
        promised = await _all({member: self[member].prepare(shares[member]) for member in others})
        failed = {member: error for member, error in promised.items() if error is not None}
        if failed:
            member, error = next(iter(failed.items()))
            await self._give_up(list(self), f"{member} of the team could not promise: {error}")
            raise error

    async def _give_up(self, members: list[str], reason: str) -> None:
        await _all({member: self[member].abort(reason) for member in members if _is_open(self[member])})

    async def abort(self, reason: str = "", *, patience: float | None = None) -> None:
        """End the episode without a score on every server, the anchor first. Parts that ended before are left alone."""
        for member, part in self.items():
            if _is_open(part):
                with suppress(Conflict, NotFound):
                    await part.abort(reason or f"the team's episode ended with {member}", patience=patience)

    async def heartbeat(self) -> None:
        """Show life everywhere. Raises `Conflict` when a server has ended its part; the others are aborted then."""
        heard = await _all({member: part.heartbeat() for member, part in self.items() if part.status == "live"})
        ended = [error for error in heard.values() if isinstance(error, (Conflict, NotFound))]
        if ended:
            await self._give_up(list(self), f"another part of the team's episode ended: {ended[0]}")
            raise ended[0]
        for error in heard.values():
            if error is not None:
                raise error

    async def look(self) -> None:
        """Ask every server for its part; shows no life."""
        await _all({member: part.look() for member, part in self.items()})

    def driven(self, drive: Drive) -> TeamEpisode:
        """This episode for synchronous code."""
        return TeamEpisode(self, drive)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.status == "live":
            await self.abort(abort_reason(error), patience=patience_after(error))


class TeamEpisode(Mapping[str, Episode]):
    """A team's episode for synchronous code: the same, each method returning when it is done."""

    def __init__(self, episode: AsyncTeamEpisode, drive: Drive) -> None:
        self._episode = episode
        self._drive = drive
        self._parts = {member: Episode(part, drive) for member, part in episode.items()}
        self.team = episode.team
        self.task_id = episode.task_id
        self.mode: Mode = episode.mode

    def __getitem__(self, member: str) -> Episode:
        return self._parts[member]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.team} of task {self.task_id!r}: {', '.join(self)}>"

    @property
    def status(self) -> EpisodeStatus:
        """See `AsyncTeamEpisode.status`."""
        return self._episode.status

    @property
    def reward(self) -> Reward | None:
        """What it was finished with."""
        return self._episode.reward

    def finish(self, reward: float | Reward | Mapping[str, float | Reward]) -> None:
        """See `AsyncTeamEpisode.finish`."""
        self._drive(self._episode.finish(reward))

    def abort(self, reason: str = "") -> None:
        """See `AsyncTeamEpisode.abort`."""
        self._drive(self._episode.abort(reason))

    def heartbeat(self) -> None:
        """See `AsyncTeamEpisode.heartbeat`."""
        self._drive(self._episode.heartbeat())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.status == "live":
            self._drive(self._episode.abort(abort_reason(error), patience=patience_after(error)))


def _is_open(part: AsyncEpisode) -> bool:
    return part.status in ("live", "prepared")


async def _all(
    coroutines: Mapping[str, Coroutine[Any, Any, EpisodeView]],
) -> dict[str, AgentJetError | None]:
    """Run them side by side to their ends; by name what each raised of the project's errors, or None."""
    outcomes = await asyncio.gather(*coroutines.values(), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, AgentJetError):
            raise outcome
    return {
        name: outcome if isinstance(outcome, AgentJetError) else None
        for name, outcome in zip(coroutines, outcomes, strict=True)
    }
