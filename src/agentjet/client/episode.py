"""Episodes: one attempt at a task, from begin to finish or abort.

* `AsyncEpisode` and `Episode` are the handles that agents get.
* `begin_episode` begins one, and aborts it if the caller is cancelled.
* `Endpoint` makes episodes that call another model, for a baseline. The server does not record them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import math
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self
from urllib.parse import quote

from agentjet.client.connection import Connection
from agentjet.errors import AgentJetError, ConfigError, Conflict, NotFound, redact
from agentjet.protocol import (
    MAX_CLOSED_GROUPS,
    AbortRequest,
    BeginRequest,
    BeginResponse,
    CloseGroupsRequest,
    EpisodeView,
    FinishRequest,
    GroupName,
)
from agentjet.types import (
    MAX_REWARD_TEXT,
    EpisodeStatus,
    Mode,
    Reward,
    beginning,
    checked_number,
    invalid_reward,
    wrong_reward_name,
)

Returned = float | Reward | Mapping[str, float | Reward]
"""A reward as agents return it: for the whole episode, or by policy in a run with named policies."""
RunCoroutine = Callable[[Coroutine[Any, Any, EpisodeView]], EpisodeView]
"""Runs a coroutine on the loop of an episode's client, from another thread, and returns its result."""
STOPPED = "the client stopped"
NOT_NEEDED = "not needed: the client's run has its steps"
UNPLAYED = "not needed: its client no longer waits for it"
"""Abort reason of an episode that was begun just as its client stopped waiting for it."""
ABORT_SECONDS = 5.0
"""Longest wait for the abort of a cancelled episode. Its lease would end it anyway."""
COMPLETE_SECONDS = 30.0
"""Longest wait for aborts after the last step. A busy server answers late, and each episode left behind blocks a place
of the next run until its lease expires."""
SERVER_WAIT = 20.0
"""Longest time that the server is asked to hold a `begin`: short enough for every proxy."""
NO_LEASE = 1e9
"""Seconds: such a lease does not expire."""


def episode_path(episode_id: str, verb: str = "") -> str:
    """The path of an episode, or of a request about it, below the path of the API."""
    return f"/episodes/{quote(episode_id, safe='')}" + (f"/{verb}" if verb else "")


class _EpisodeFields:
    """The fields that both kinds of episode share: access to the model, and the task."""

    def __init__(self, begun: BeginResponse, request: BeginRequest, *, is_recorded: bool) -> None:
        self.begun = begun
        self.request = request
        self.id: str = begun.episode_id
        self.base_url: str = begun.base_url
        """OpenAI-compatible; give it to any SDK together with `api_key`."""
        self.api_key: str = begun.api_key
        self.model: str = begun.model
        """The model's name for requests; empty if the run names its policies."""
        self.policies: tuple[str, ...] = begun.policies
        """The policies that the run names. The agent sends one of these names as `model`."""
        self.policy_version: int = begun.policy_version
        self.lease_seconds: float = begun.lease_seconds
        self.max_turns: int = begun.max_turns
        """Maximum number of calls of each role, chosen by the recipe: end the agent's loop there. 0: no maximum."""
        self.task_id: str = request.task_id
        self.task_set: str = request.task_set
        self.group: str = request.group_name
        self.mode: Mode = request.mode
        self.code_version: str = request.code_version
        self.is_recorded = is_recorded
        """False if the model is an endpoint's: then no server records the episode."""

    @property
    def anthropic_base_url(self) -> str:
        """The same for Anthropic's SDKs, which append `/v1` themselves."""
        return self.base_url.removesuffix("/v1")

    @property
    def url_with_key(self) -> str:
        """`base_url` with the key in its path, for clients that can set a URL and no key. The URL is as secret as the
        key. Anthropic's SDKs need it without the `/v1` at its end.

        Raises `ConfigError` for an endpoint, which takes its key in a header only.
        """
        if not self.is_recorded:
            raise ConfigError(
                f"episode.url_with_key is a URL of an AgentJet server, and the model is at {self.base_url}: give the "
                "agent episode.base_url and episode.api_key"
            )
        return f"{self.anthropic_base_url}/k/{self.api_key}/v1"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of task {self.task_id!r}>"  # never the key


class AsyncEpisode(_EpisodeFields):
    """An episode for asynchronous code. As a context manager it sends heartbeats, and aborts unless it was finished
    inside."""

    def __init__(self, connection: Connection | None, begun: BeginResponse, request: BeginRequest) -> None:
        """Without a connection nothing is recorded: the model is an endpoint's."""
        super().__init__(begun, request, is_recorded=connection is not None)
        self._connection = connection
        self.status: EpisodeStatus = "live"
        """The status in the server's last answer."""
        self.reward: Reward | None = None
        """The reward that the server accepted."""
        self.reason = ""
        """The server's reason for an end without a reward."""
        self.is_finishing = False
        """True while `finish` waits for its answer."""
        self.num_calls = 0
        """Calls that the server recorded, as of its last answer."""

    async def finish(self, reward: Returned) -> EpisodeView:
        """End the episode with its reward.

        Raises `InvalidRequest` as `checked_reward` does, before anything is sent. Raises `Conflict` if the episode was
        aborted or its lease has expired.
        """
        reward = checked_reward(reward, self.policies)
        self.is_finishing = True
        try:
            view = await self._post("finish", finish_body(reward))
            self.reward = reward
            return view
        finally:
            self.is_finishing = False

    async def abort(self, reason: str = "", *, patience: float | None = None) -> EpisodeView:
        """End the episode without a score; it is not trained on. Retries for `patience` seconds."""
        return await self._post("abort", AbortRequest(reason=redact(reason)[:2000]), patience=patience)

    async def heartbeat(self) -> EpisodeView:
        """Renew the lease. Calls of the model renew it too."""
        return await self._post("heartbeat", None)

    async def renew(self, connection: Connection) -> None:
        """Renew the lease over another connection, in its thread. Raises `Conflict` or `NotFound` after the end.

        The answer changes no field: it may be older than that of `finish`, which another thread receives.
        """
        try:
            await connection.request("POST", episode_path(self.id, "heartbeat"))
        except (Conflict, NotFound) as error:
            self._ended_by_server(error)
            raise

    def keep_alive(self) -> concurrent.futures.Future[bool]:
        """Send heartbeats from a thread until the episode ends. The result is True if it ended without `finish`."""
        if self._connection is None:
            return concurrent.futures.Future()
        return self._connection.heartbeats.follow(self)

    def watch_loop(self) -> None:
        """Warn once if the running event loop is blocked."""
        if self._connection is not None:
            self._connection.heartbeats.watch()

    async def refresh(self) -> None:
        """Update status, reason and number of calls. Does not renew the lease."""
        if self._connection is not None:
            answer = await self._connection.request("GET", episode_path(self.id))
            self._update(EpisodeView.model_validate(answer))

    async def _post(
        self, verb: str, body: FinishRequest | AbortRequest | None, patience: float | None = None
    ) -> EpisodeView:
        if self._connection is None:
            return self._update(self._unrecorded_view(body))
        try:
            answer = await self._connection.request("POST", episode_path(self.id, verb), body=body, patience=patience)
        except (Conflict, NotFound) as error:
            self._ended_by_server(error)
            raise
        return self._update(EpisodeView.model_validate(answer))

    def _ended_by_server(self, error: Conflict | NotFound) -> None:
        if self.status == "live":
            known: dict[str | None, EpisodeStatus] = {"episode_aborted": "aborted", "episode_finished": "finished"}
            self.status = known.get(error.code, "expired")

    def _update(self, view: EpisodeView) -> EpisodeView:
        self.status, self.reason, self.num_calls = view.status, view.reason, view.num_calls
        if self.reward is None and view.reward is not None:  # Another process may have finished it.
            self.reward = Reward(view.reward, view.by_role, view.metrics, text=view.reward_text)
        return view

    def _unrecorded_view(self, body: FinishRequest | AbortRequest | None) -> EpisodeView:
        ended: dict[type, EpisodeStatus] = {FinishRequest: "finished", AbortRequest: "aborted"}
        facts = self.request.model_dump(include={"mode", "task_id", "task_set", "client_id"}) | {"group": self.group}
        return EpisodeView(
            episode_id=self.id, status=ended.get(type(body), self.status), policy_version=self.policy_version, **facts
        )

    async def __aenter__(self) -> Self:
        self._heartbeats = self.keep_alive()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._heartbeats.cancel()
        if self.status == "live":
            with _leaving(self, error):
                await self.abort(abort_reason(error), patience=patience_after(error))


class Episode(_EpisodeFields):
    """An episode for synchronous code: each method returns when it is done."""

    def __init__(self, episode: AsyncEpisode, run: RunCoroutine) -> None:
        """`run` runs a coroutine on the loop of the episode's client."""
        super().__init__(episode.begun, episode.request, is_recorded=episode.is_recorded)
        self._episode = episode
        self._run = run

    @property
    def status(self) -> EpisodeStatus:
        """See `AsyncEpisode.status`."""
        return self._episode.status

    @property
    def reward(self) -> Reward | None:
        """See `AsyncEpisode.reward`."""
        return self._episode.reward

    def finish(self, reward: Returned) -> EpisodeView:
        """See `AsyncEpisode.finish`."""
        return self._run(self._episode.finish(reward))

    def abort(self, reason: str = "", *, patience: float | None = None) -> EpisodeView:
        """See `AsyncEpisode.abort`."""
        return self._run(self._episode.abort(reason, patience=patience))

    def heartbeat(self) -> EpisodeView:
        """See `AsyncEpisode.heartbeat`."""
        return self._run(self._episode.heartbeat())

    def __enter__(self) -> Self:
        self._heartbeats = self._episode.keep_alive()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._heartbeats.cancel()
        if self.status == "live":
            with _leaving(self, error):
                self.abort(abort_reason(error), patience=patience_after(error))


@contextmanager
def _leaving(episode: AsyncEpisode | Episode, error: BaseException | None) -> Iterator[None]:
    """Adds the failure of an abort to the exception that caused it as a note: the caller gets its own exception."""
    try:
        yield
    except Exception as failure:  # the boundary: a server that is away, or a client that is closed
        if error is not None:
            error.add_note(f"its episode was not aborted: {failure}")
        elif episode.status != "finished":  # Another process, such as the agent's, may have finished it.
            raise


def patience_after(error: BaseException | None) -> float | None:
    """Seconds of retries for an abort: 0 after Ctrl-C or cancellation, else the default."""
    return None if error is None or isinstance(error, Exception) else 0.0


def abort_reason(error: BaseException | None) -> str:
    """The reason for an end without a reward, with the server's message if an HTTP client raised its refusal.

    The text of an exception can have the URL of a request, and thus the key of an episode: it is left out.
    """
    if error is None:
        return "left without a reward"
    reason, message = f"{type(error).__name__}: {error}", refusal(error)
    return redact(f"{reason}: {message}" if message not in reason else reason)[:2000]


def refusal(error: BaseException) -> str:
    """The server's message in the answer of an error such as `httpx.HTTPStatusError`; empty without one."""
    try:
        return str(error.response.json()["error"]["message"])  # type: ignore[attr-defined]
    except Exception:  # the boundary: any client's exception
        return ""


def finish_body(reward: Reward) -> FinishRequest:
    return FinishRequest(
        reward=reward.value,
        by_role=dict(reward.by_role),
        by_call=dict(reward.by_call),
        by_turn={role: list(rewards) for role, rewards in _turns(reward).items()},
        metrics=dict(reward.metrics),
        text=reward.text,
    )


def _turns(reward: Reward) -> Mapping[str, Sequence[float]]:
    """The rewards of turns by role. The role is empty if the agent names none."""
    if isinstance(reward.by_turn, Mapping):
        return reward.by_turn
    return {"": reward.by_turn} if len(reward.by_turn) else {}


def checked_reward(returned: object, policies: tuple[str, ...] = ()) -> Reward:
    """An agent's return value as a `Reward` that the server accepts. `policies` are those that the run names.

    A mapping has a number or a `Reward` for every policy. The episode's own number is then their mean, and a role of a
    policy's `Reward` becomes `POLICY/ROLE`. Raises `Unprocessable` naming the number that is out of range, the
    policy that is missing or unknown, or the value that is not a reward.
    """
    if isinstance(returned, Mapping):
        return _of_policies(returned, policies)
    reward = _as_reward(returned, "reward")
    if policies and (wrong := wrong_reward_name(reward.by_role, policies)):
        raise invalid_reward(wrong[1], wrong[0])
    return reward


def _of_policies(returned: Mapping[str, object], policies: tuple[str, ...]) -> Reward:
    if not policies:
        raise invalid_reward(
            f"the reward is by policy ({', '.join(map(str, returned))}), but the model of this episode has no named "
            "policies: return a number, or Reward(number, by_role={...}) for the roles of one model",
            "reward",
        )
    if wrong := wrong_reward_name(returned, policies):
        raise invalid_reward(wrong[1], wrong[0])
    if not returned:
        raise invalid_reward(f"the reward is empty: give a number for each of {', '.join(policies)}", policies[0])
    by_role: dict[str, float] = {}
    by_turn: dict[str, Sequence[float]] = {}
    by_call: dict[str, float] = {}
    metrics: dict[str, float] = {}
    texts: dict[str, str] = {}
    for name, given in returned.items():
        reward = _as_reward(given, f"reward[{name!r}]")
        by_role |= {name: reward.value} | {f"{name}/{role}": value for role, value in reward.by_role.items()}
        by_turn |= {f"{name}/{role}" if role else name: rewards for role, rewards in _turns(reward).items()}
        by_call |= reward.by_call
        metrics |= reward.metrics
        texts[name] = reward.text
    mean = math.fsum(by_role[policy] for policy in policies) / len(policies)
    return Reward(mean, by_role, metrics, by_turn or (), by_call, _joined(texts))


def _as_reward(returned: object, name: str) -> Reward:
    """The reward; a number becomes one. A reward is checked again, because its maps may have changed."""
    return replace(returned) if isinstance(returned, Reward) else Reward(checked_number(returned, name))


def _joined(texts: Mapping[str, str]) -> str:
    """The texts of several policies, each with its name. If they are too long together, each is cut to its share."""
    lines = [f"{name}: {text}" for name, text in texts.items() if text]
    share = MAX_REWARD_TEXT // max(1, len(lines)) - 1
    if sum(map(len, lines)) + len(lines) > MAX_REWARD_TEXT:
        lines = [beginning(line, share) for line in lines]
    return "\n".join(lines)


async def wait_for_end(requests: Awaitable[object], seconds: float) -> None:
    """Wait up to `seconds` for requests that end episodes or groups. Without an answer their leases end them."""
    with suppress(AgentJetError, TimeoutError):
        async with asyncio.timeout(seconds):
            await requests


async def abort_unless_finished(episode: AsyncEpisode, reason: str, patience: float) -> None:
    """Abort an episode. If its agent has just finished it, reads its reward."""
    try:
        await episode.abort(reason, patience=patience)
    except Conflict:
        await episode.refresh()


async def begin_episode(
    connection: Connection,
    request: BeginRequest,
    *,
    wait: float,
    on_abort: Callable[[AsyncEpisode], None] = lambda episode: None,
) -> AsyncEpisode:
    """Begin an episode. Waits up to `wait` seconds for room, then raises `Later`.

    If this is cancelled, the server may have begun the episode: it is aborted and passed to `on_abort`. A server that
    answers late delays the cancellation by `ABORT_SECONDS` at most. The episode is aborted when the server answers; if
    the connection is closed before, its lease ends it.
    """
    key = uuid.uuid4().hex

    async def begin(server_wait: float, patience: float) -> AsyncEpisode:
        body = request.model_copy(update={"wait": server_wait})
        answer = await connection.request(
            "POST", "/episodes", body=body, key=key, patience=patience, server_wait=server_wait
        )
        return AsyncEpisode(connection, BeginResponse.model_validate(answer), request)

    async def abort_begun() -> AsyncEpisode:
        episode = await begin(0.0, 0.0)
        await episode.abort(UNPLAYED)
        return episode

    try:
        return await begin(min(wait, SERVER_WAIT), wait)
    except asyncio.CancelledError:
        # The server may have begun it just now. The same request again, without waiting, returns it.
        if (episode := await connection.go_on(abort_begun(), ABORT_SECONDS)) is not None:
            on_abort(episode)
        raise


async def close_groups(connection: Connection, groups: Sequence[GroupName], *, not_needed: bool = False) -> None:
    """See `CloseGroupsRequest`. A server that does not know the request waits for `job.lease_seconds` instead."""
    client_id = connection.settings.client_id
    for start in range(0, len(groups), MAX_CLOSED_GROUPS):
        some = list(groups[start : start + MAX_CLOSED_GROUPS])
        body = CloseGroupsRequest(client_id=client_id, groups=some, not_needed=not_needed)
        with suppress(NotFound):
            await connection.request("POST", "/groups/close", body=body)


_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model behind an OpenAI-compatible API; `base_url` usually ends in `/v1`."""

    base_url: str
    model: str
    api_key: str = field(default="none", repr=False)
    """Endpoints without keys still need a value: SDKs send one."""

    def begin(self, request: BeginRequest) -> AsyncEpisode:
        """An episode whose agent calls this endpoint. Its policy version is 0."""
        begun = BeginResponse(
            episode_id=f"outside{next(_numbers):06d}",
            base_url=self.base_url,
            api_key=self.api_key,
            model=self.model,
            policy_version=0,
            lease_seconds=NO_LEASE,
            expires_at=NO_LEASE,
        )
        return AsyncEpisode(None, begun, request)
