"""`AsyncEpisode` and `Episode`: one attempt at a task, as the agent holds it.

`RunCleanup`: how a run gives back the episodes that are live at its end.

Beginning an episode, so that none is left behind when whoever asked for it is cancelled.

An evaluation against somebody else's model: episodes that point at any OpenAI-compatible endpoint.

Nothing is recorded and nobody but this client knows of them: they begin at once, and end as they are told to.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from agentjet.client.connection import Connection
from agentjet.errors import AgentJetError, Conflict, InvalidRequest, NotFound, RequestError
from agentjet.protocol import LARGEST, AbortRequest, BeginRequest, BeginResponse, EpisodeView, FinishRequest
from agentjet.types import EpisodeStatus, Mode, Reward

T = TypeVar("T")


class RunCoroutine(Protocol):
    """Runs a coroutine on the loop of an episode's client, from another thread, and returns its result."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T: ...


class RequestSender(Protocol):
    """What an episode needs of the way to its server; `Connection` has it."""

    async def request(
        self, method: str, path: str, *, body: BaseModel | None = None, patience: float | None = None
    ) -> Any: ...


STOPPED = "the client stopped"
NOT_NEEDED = "not needed: the client's run has its steps"
UNPLAYED = "not needed: nobody waits for it any more"
"""Of an episode that was begun just as its client stopped asking for one."""
ABORT_SECONDS = 5.0
"""How long the abort of a cancelled episode is tried: its lease would reclaim it anyway."""


class _Attempt:
    """What both kinds of episode show: how the agent reaches the model, and what it is an attempt at."""

    def __init__(self, begun: BeginResponse, request: BeginRequest) -> None:
        self.begun = begun
        self.request = request
        self.id: str = begun.episode_id
        self.base_url: str = begun.base_url
        """OpenAI-compatible; give it to any SDK together with `api_key`."""
        self.api_key: str = begun.api_key
        self.model: str = begun.model
        self.policy_version: int = begun.policy_version
        self.lease_seconds: float = begun.lease_seconds
        self.task_id: str = request.task_id
        self.task_set: str = request.task_set
        self.group: str = request.group or request.task_id
        self.mode: Mode = request.mode
        self.code_version: str = request.code_version

    @property
    def anthropic_base_url(self) -> str:
        """The same for Anthropic's SDKs, which write `/v1` themselves."""
        return self.base_url.removesuffix("/v1")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of task {self.task_id!r}>"  # never the key


class AsyncEpisode(_Attempt):
    """An episode to be awaited. As a context manager it aborts unless `finish` was called inside."""

    def __init__(self, connection: RequestSender, begun: BeginResponse, request: BeginRequest) -> None:
        super().__init__(begun, request)
        self._connection = connection
        self.status: EpisodeStatus = "live"
        """As far as this client knows."""
        self.reward: Reward | None = None
        """What it was finished with."""
        self.reason = ""
        """Why it ended without a reward, as the server has it."""
        self.num_calls = 0
        """Calls that the server recorded, as of its last answer."""

    async def prepare(self, reward: float | Reward) -> EpisodeView:
        """Promise the reward: `finish` with the same one will be granted, after any crash. See docs/reliability.md.

        From here on the episode makes no calls, and leaving its context neither finishes nor aborts it. Raises as
        `finish` does.
        """
        return await self._post("prepare", finish_body(checked_reward(reward)))

    async def finish(self, reward: float | Reward) -> EpisodeView:
        """End the episode with its reward.

        Raises `InvalidRequest` before anything is sent when a number is not finite, `Conflict` when the episode was
        aborted or its lease has run out.
        """
        reward = checked_reward(reward)
        view = await self._post("finish", finish_body(reward))
        self.reward = reward
        return view

    async def abort(self, reason: str = "", *, patience: float | None = None) -> EpisodeView:
        """End the episode without a score; it will not be trained on. `patience`: seconds to keep trying."""
        return await self._post("abort", AbortRequest(reason=reason[:2000]), patience=patience)

    async def heartbeat(self) -> EpisodeView:
        """Show life: renews the lease. Calls of the model do so too."""
        return await self._post("heartbeat", None)

    async def look(self) -> EpisodeView:
        """The episode as the server has it; shows no life."""
        answer = await self._connection.request("GET", f"/episodes/{quote(self.id, safe='')}")
        return self._seen(EpisodeView.model_validate(answer))

    def checked(self, returned: object) -> Reward:
        """What an agent returned, as a reward. Raises as `checked_reward`."""
        return checked_reward(returned)

    def driven(self, drive: RunCoroutine) -> Episode:
        """This episode for synchronous code."""
        return Episode(self, drive)

    async def _post(
        self, verb: str, body: FinishRequest | AbortRequest | None, patience: float | None = None
    ) -> EpisodeView:
        try:
            answer = await self._connection.request(
                "POST", f"/episodes/{quote(self.id, safe='')}/{verb}", body=body, patience=patience
            )
        except (Conflict, NotFound) as error:
            if self.status == "live":
                self.status = "aborted" if error.code == "episode_aborted" else "expired"
            raise
        return self._seen(EpisodeView.model_validate(answer))

    def _seen(self, view: EpisodeView) -> EpisodeView:
        self.status, self.reason, self.num_calls = view.status, view.reason, view.num_calls
        return view

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.status == "live":
            await self.abort(abort_reason(error), patience=patience_after(error))


class Episode(_Attempt):
    """An episode for synchronous code: the same, each method returning when it is done.

    `drive` runs a coroutine on the loop of `episode`'s client and returns its result.
    """

    def __init__(self, episode: AsyncEpisode, drive: RunCoroutine) -> None:
        super().__init__(episode.begun, episode.request)
        self._episode = episode
        self._drive = drive

    @property
    def status(self) -> EpisodeStatus:
        """As far as this client knows."""
        return self._episode.status

    @property
    def reward(self) -> Reward | None:
        """What it was finished with."""
        return self._episode.reward

    def prepare(self, reward: float | Reward) -> EpisodeView:
        """See `AsyncEpisode.prepare`."""
        return self._drive(self._episode.prepare(reward))

    def finish(self, reward: float | Reward) -> EpisodeView:
        """See `AsyncEpisode.finish`."""
        return self._drive(self._episode.finish(reward))

    def abort(self, reason: str = "") -> EpisodeView:
        """See `AsyncEpisode.abort`."""
        return self._drive(self._episode.abort(reason))

    def heartbeat(self) -> EpisodeView:
        """See `AsyncEpisode.heartbeat`."""
        return self._drive(self._episode.heartbeat())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.status == "live":
            self._drive(self._episode.abort(abort_reason(error), patience=patience_after(error)))


def patience_after(error: BaseException | None) -> float | None:
    """How long the abort is tried: briefly by somebody who wants to leave (Ctrl-C, cancellation)."""
    return None if error is None or isinstance(error, Exception) else 0.0


def abort_reason(error: BaseException | None) -> str:
    """Why an episode ended without a reward, in one line."""
    if error is None:
        return "left without a reward"
    return f"{type(error).__name__}: {error}"[:2000]


def finish_body(reward: Reward) -> FinishRequest:
    """A reward as it is sent."""
    return FinishRequest(reward=reward.value, by_role=dict(reward.by_role), metrics=dict(reward.metrics))


def checked_reward(reward: object) -> Reward:
    """What an agent returned, as a `Reward` whose every number the server takes.

    Raises `InvalidRequest` (422) naming the number that is not, or the type that is no reward.
    """
    if isinstance(reward, Reward):
        numbers = {"reward": reward.value}
        numbers |= {f"by_role[{name!r}]": value for name, value in reward.by_role.items()}
        numbers |= {f"metrics[{name!r}]": value for name, value in reward.metrics.items()}
    else:
        numbers = {"reward": reward}  # type: ignore[dict-item]
    for name, value in numbers.items():
        try:
            fits = math.isfinite(value) and abs(value) <= LARGEST and not isinstance(value, str)
        except OverflowError:  # a whole number beyond every float
            value, fits = math.inf, False
        except TypeError:
            raise InvalidRequest(
                f"{name} is {value!r}: an agent returns a number or a Reward",
                code="invalid_reward",
                status=422,
                param=name,
            ) from None
        if not fits:
            raise InvalidRequest(
                f"{name} is {value}: it must be a finite number from -{LARGEST:g} to {LARGEST:g}",
                code="invalid_reward",
                status=422,
                param=name,
            )
    if isinstance(reward, Reward):
        return reward
    return Reward(float(numbers["reward"]))


COMPLETE_SECONDS = 30.0
"""Seconds for giving episodes back after the last step: a busy server answers late, and each one left behind blocks a
place of the next run until its lease runs out."""


@dataclass
class RunCleanup:
    """The end of one run, and how many episodes were left behind."""

    has_enough: bool = False
    """The run reached its goal; otherwise it was interrupted, or failed."""
    num_left: int = 0
    """Episodes that may be live on the server still, until their leases run out."""

    @property
    def seconds(self) -> float:
        """Seconds that one step of giving an episode back may take. They are few after an interruption."""
        return COMPLETE_SECONDS if self.has_enough else ABORT_SECONDS / 2

    async def trim_malloc(self, asking: Awaitable[object], *, at_least: float = 0.0) -> None:
        """Wait for requests that give an episode back. A server that gave no answer may have left it live: counted."""
        try:
            async with asyncio.timeout(max(self.seconds, at_least)):
                await asking
        except RequestError as refusal:
            self.num_left += refusal.status >= 500  # What the server refuses otherwise is not live.
        except (AgentJetError, TimeoutError):
            self.num_left += 1

    def __str__(self) -> str:
        return (
            f"{self.num_left} episode{'' if self.num_left == 1 else 's'} could not be given back, since the server did "
            "not answer in time: each may keep its place until its lease runs out"
        )


SERVER_WAIT = 20.0
"""Longest the server is asked to hold a `begin`: short enough for every proxy."""


async def begin(
    connection: Connection,
    request: BeginRequest,
    *,
    wait: float,
    given_back: Callable[[AsyncEpisode], None] = lambda episode: None,
    ending: RunCleanup | None = None,
) -> AsyncEpisode:
    """Begin an episode, waiting up to `wait` seconds for room, then raise `Later`.

    When this is cancelled, an episode that the server began all the same is aborted and passed to `given_back`; one
    that could not be aborted is counted in `ending`.
    """
    request = request.model_copy(update={"wait": min(wait, SERVER_WAIT)})
    key = uuid.uuid4().hex
    try:
        return await _asked(connection, request, key, patience=wait)
    except asyncio.CancelledError:
        # The server may have begun it just now. To ask for the same again, without waiting, tells; then it is given
        # back.
        async def trim_malloc() -> None:
            episode = await _asked(connection, request.model_copy(update={"wait": 0.0}), key, patience=0.0)
            await episode.abort(UNPLAYED, patience=0.0)
            given_back(episode)

        await (ending or RunCleanup()).trim_malloc(trim_malloc())
        raise


async def _asked(connection: Connection, request: BeginRequest, key: str, *, patience: float) -> AsyncEpisode:
    answer = await connection.request(
        "POST", "/episodes", body=request, key=key, patience=patience, server_wait=request.wait
    )
    return AsyncEpisode(connection, BeginResponse.model_validate(answer), request)


NO_LEASE = 1e9
"""Seconds: nobody reclaims it."""
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model behind an OpenAI-compatible API; `base_url` usually ends in `/v1`."""

    base_url: str
    model: str
    api_key: str = field(default="none", repr=False)
    """Endpoints that want none still need the SDK to send one."""

    def begin(self, request: BeginRequest) -> AsyncEpisode:
        """An episode whose agent talks to this endpoint. Its policy version is 0."""
        begun = BeginResponse(
            episode_id=f"outside{next(_numbers):06d}",
            base_url=self.base_url,
            api_key=self.api_key,
            model=self.model,
            policy_version=0,
            lease_seconds=NO_LEASE,
            expires_at=NO_LEASE,
        )
        return AsyncEpisode(_EndpointConnection(begun.episode_id, request), begun, request)


@dataclass
class _EndpointConnection:
    """Answers an episode's requests in a server's place."""

    episode_id: str
    asked: BeginRequest
    status: EpisodeStatus = "live"

    async def request(
        self, method: str, path: str, *, body: BaseModel | None = None, patience: float | None = None
    ) -> Any:
        """See `Connection.request`."""
        if isinstance(body, FinishRequest):
            self.status = "finished"
        elif isinstance(body, AbortRequest):
            self.status = "aborted"
        asked = self.asked
        return EpisodeView(
            episode_id=self.episode_id,
            status=self.status,
            mode=asked.mode,
            task_id=asked.task_id,
            task_set=asked.task_set,
            group=asked.group,
            client_id=asked.client_id,
            policy_version=0,
            reason=body.reason if isinstance(body, AbortRequest) else "",
        ).model_dump()
