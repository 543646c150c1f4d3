"""One episode over several servers, each with its part: begun on all or on none, finished on all or on none.

The finish has two phases. Every server but the first promises the reward (`prepare`). Then the first server, the
*anchor*, finishes: that is the decision. The others follow, or `recover` finishes them later. A team's id contains the
anchor's member, which `recover` needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from agentjet.client.episode import (
    AsyncEpisode,
    Episode,
    RunCoroutine,
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

    def __init__(self, team: str, parts: Mapping[str, AsyncEpisode], deciding: set[str] | None = None) -> None:
        self.team = team
        self._parts = dict(parts)
        self._anchor = next(iter(self._parts.values()))
        self._deciding = set() if deciding is None else deciding
        self._asked_anchor = False
        """True once a finish was sent to the anchor: from then on only the anchor has the decision."""
        self._said: set[str] = set()
        """Abort reasons that this client gave, so that they are not the cause of the end."""
        self.reward: Reward | None = None
        """The reward it was finished with, by member in `by_role`."""
        self.unsettled: dict[str, str] = {}
        """Members whose part has not received the decision, and why; `Team.recover` sends it."""

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
        """A training episode may have parts in "eval" mode: their servers' jobs are over."""
        return "train" if any(part.mode == "train" for part in self.values()) else "eval"

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
        """The status in the servers' last answers. A team's episode is live while all its parts are."""
        if self.reward is not None:
            return "finished"
        cause = self._cause()
        return "live" if cause is None else cause.status

    @property
    def num_calls(self) -> int:
        """Calls that the servers recorded, as of their last answers."""
        return sum(part.num_calls for part in self.values())

    @property
    def reason(self) -> str:
        """Why it ended without a reward, as the server has it that ended it."""
        cause = self._cause()
        return "" if cause is None else cause.reason

    def _cause(self) -> AsyncEpisode | None:
        """The part that ended first without a score; other parts were aborted because of it."""
        ended = [part for part in self.values() if part.status in ("aborted", "expired")]
        return min(ended, key=lambda part: part.reason in self._said, default=None)

    def checked(self, returned: object) -> Reward:
        """Rewards of all members: one number for all; a number or `Reward` for each by name; or a `Reward` whose
        `by_role` names members, and roles of theirs as "MEMBER/ROLE", and whose value is for the others. The team's own
        value is the members' mean; metrics are shown by every server.

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
            roles = {f"{member}/{role}": v for member, reward in rewards.items() for role, v in reward.by_role.items()}
        else:
            whole = checked_reward(returned)
            self._refuse_strangers([name.partition("/")[0] for name in whole.by_role], "by_role")
            metrics = dict(whole.metrics)
            by_member = {member: whole.by_role.get(member, whole.value) for member in self}
            roles = {name: value for name, value in whole.by_role.items() if "/" in name}
        return Reward(sum(by_member.values()) / len(by_member), by_member | roles, metrics)

    def _refuse_strangers(self, names: Iterable[str], where: str) -> None:
        if strangers := [name for name in names if name not in self._parts]:
            raise InvalidRequest(
                f"{where} name {strangers[0]!r}, who is not in the team: its members are {', '.join(self)}",
                code="invalid_reward",
                status=422,
                param=strangers[0],
            )

    async def finish(self, reward: float | Reward | Mapping[str, float | Reward]) -> None:
        """End the episode everywhere, each part with its member's reward (see `checked`).

        Raises `InvalidRequest` for a wrong reward, before anything is sent. Raises `Conflict` if a part has ended; then
        no part counts. Raises `Unreachable` if a server stays away before the decision is confirmed: if the anchor did
        finish, `Team.recover` finishes the others. After the decision this succeeds: a part that did not receive it is
        in `unsettled`.
        """
        agreed = self.checked(reward)
        self._deciding.add(self.team)
        try:
            await self._finish(agreed, {member: _share(agreed, member) for member in self})
        finally:
            self._deciding.discard(self.team)

    async def _finish(self, agreed: Reward, shares: Mapping[str, Reward]) -> None:
        others = [member for member in self if self[member] is not self._anchor]
        if self.mode == "train":
            promised = await _all({member: self[member].prepare(shares[member]) for member in others})
            failed = {member: error for member, error in promised.items() if error is not None}
            if failed:
                member, error = next(iter(failed.items()))
                await self._give_up(f"{member} of the team could not promise: {error}")
                raise error
        self._asked_anchor = True
        try:
            await self._anchor.finish(shares[next(iter(self))])
        except (Conflict, NotFound) as refusal:
            await self._give_up(f"the team's anchor refused: {refusal}")
            raise
        self.reward = agreed
        told = await _all({member: self[member].finish(shares[member]) for member in others})
        self.unsettled = {member: str(outcome) for member, outcome in told.items() if outcome is not None}

    async def _give_up(self, why: str) -> None:
        """A part has ended: abort the others, with the server's reason if there is one."""
        ended = {member: part for member, part in self.items() if not _is_open(part)}
        await _all({member: part.refresh() for member, part in ended.items() if not part.reason})
        causes = [f"{part.reason} (the part of {member})" for member, part in ended.items() if part.reason]
        await self._abort_all([*causes, why][0])

    async def abort(self, reason: str = "", *, patience: float | None = None) -> None:
        """End the episode without a score on every server. Parts that ended before are left alone.

        Raises `Conflict` (`episode_finished`) and aborts no part if the anchor was finished by a `finish` without an
        answer.
        """
        if self._asked_anchor:
            await self._anchor.abort(reason, patience=patience)
        await self._abort_all(reason, patience=patience)

    async def _abort_all(self, reason: str, patience: float | None = None) -> None:
        self._said.add(reason)
        still_open = {member: part for member, part in self.items() if _is_open(part)}
        done = await _all({member: part.abort(reason, patience=patience) for member, part in still_open.items()})
        for error in done.values():
            if error is not None and not isinstance(error, (Conflict, NotFound)):
                raise error

    async def heartbeat(self) -> None:
        """Renew all leases. Raises `Conflict` if a server has ended its part; the others are aborted then."""
        heard = await _all({member: part.heartbeat() for member, part in self.items() if part.status == "live"})
        failed = {member: error for member, error in heard.items() if error is not None}
        for member, error in failed.items():
            if isinstance(error, (Conflict, NotFound)):
                await self._give_up(f"the part of {member} ended: {error}")
                raise error
        for error in failed.values():
            raise error

    async def refresh(self) -> None:
        """Request every part's present state; renews no lease. Servers that are away are left out."""
        await _all({member: part.refresh() for member, part in self.items()})

    def blocking(self, run: RunCoroutine) -> TeamEpisode:
        """This episode for synchronous code."""
        return TeamEpisode(self, run)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.status == "live":
            await self.abort(abort_reason(error), patience=patience_after(error))


class TeamEpisode(Mapping[str, Episode]):
    """A team's episode for synchronous code: the same, each method returning when it is done."""

    def __init__(self, episode: AsyncTeamEpisode, run: RunCoroutine) -> None:
        self._episode = episode
        self._run = run
        self._parts = {member: Episode(part, run) for member, part in episode.items()}
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
        """See `AsyncTeamEpisode.reward`."""
        return self._episode.reward

    def finish(self, reward: float | Reward | Mapping[str, float | Reward]) -> None:
        """See `AsyncTeamEpisode.finish`."""
        self._run(self._episode.finish(reward))

    def abort(self, reason: str = "") -> None:
        """See `AsyncTeamEpisode.abort`."""
        self._run(self._episode.abort(reason))

    def heartbeat(self) -> None:
        """See `AsyncTeamEpisode.heartbeat`."""
        self._run(self._episode.heartbeat())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.status == "live":
            self._run(self._episode.abort(abort_reason(error), patience=patience_after(error)))


def _share(agreed: Reward, member: str) -> Reward:
    """A member's part of what `checked` returned."""
    roles = {name.removeprefix(f"{member}/"): v for name, v in agreed.by_role.items() if name.startswith(f"{member}/")}
    return Reward(agreed.by_role[member], roles, agreed.metrics)


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
