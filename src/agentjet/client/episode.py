"""`AsyncEpisode` and `Episode`: one attempt at a task, as the agent holds it."""

from __future__ import annotations

import math
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from agentjet.errors import Conflict, InvalidRequest, NotFound
from agentjet.protocol import LARGEST, AbortRequest, BeginRequest, BeginResponse, EpisodeView, FinishRequest
from agentjet.types import EpisodeStatus, Mode, Reward

T = TypeVar("T")


class Drive(Protocol):
    """Runs a coroutine on the loop of an episode's client, from another thread, and returns its result."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T: ...


class Requests(Protocol):
    """What an episode needs of the way to its server; `Connection` has it."""

    async def request(
        self, method: str, path: str, *, body: BaseModel | None = None, patience: float | None = None
    ) -> Any: ...


STOPPED = "the client stopped"
NOT_NEEDED = "not needed: the client's run has its steps"
UNPLAYED = "not needed: nobody waits for it any more"
"""Of an episode that was begun just as its client stopped asking for one."""
GOODBYE_SECONDS = 5.0
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

    def __init__(self, connection: Requests, begun: BeginResponse, request: BeginRequest) -> None:
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

    def driven(self, drive: Drive) -> Episode:
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

    def __init__(self, episode: AsyncEpisode, drive: Drive) -> None:
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
