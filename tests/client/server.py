"""`FakeServer`: the control API in memory, behind `httpx.MockTransport`. It admits, groups and "learns" like the real
one. Tests can make it misbehave."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import ValidationError

from agentjet.client import AsyncSwarm, Retry, Swarm
from agentjet.protocol import (
    REPORTED_BATCHES,
    AbortRequest,
    BeginRequest,
    BeginResponse,
    CloseGroupsRequest,
    CloseGroupsResponse,
    EpisodeView,
    EvaluationRequest,
    Event,
    FinishRequest,
    Problem,
    ScoredAnswer,
    StatusResponse,
    ZeroVariance,
    batches_without_variance,
)

TOKEN = "the-token"
URL = "http://127.0.0.1:8400"


@dataclass
class FakeTime:
    """A clock that moves only while something sleeps."""

    now: float = 0.0
    sleeps: list[float] = field(default_factory=list)

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    def retry(self) -> Retry:
        return Retry(sleep=self.sleep, clock=lambda: self.now, jitter=lambda: 1.0)


class FakeServer:
    """A run that learns at once. `lose_answers` requests are carried out without an answer, `be_down` requests are
    not."""

    def __init__(
        self, *, batch_size: int = 2, group_size: int = 2, max_steps: int = 0, policies: tuple[str, ...] = ()
    ) -> None:
        self.policies = policies
        self.batch_size = batch_size
        self.group_size = group_size
        self.max_steps = max_steps
        self.num_calls = 1
        """Calls recorded for every finished episode."""
        self.version = 0
        self.steps: list[dict[str, float]] = []
        self.state = "sampling"
        self.episodes: dict[str, EpisodeView] = {}
        self.begun: list[BeginRequest] = []
        """The requests that began an episode, in order."""
        self.groups: dict[str, list[str]] = {}
        self.closed: list[CloseGroupsRequest] = []
        """The requests that closed groups, in order."""
        self.recorded: list[EvaluationRequest] = []
        """The evaluations, in order."""
        self.left: set[str] = set()
        """Closed groups, which are trained with fewer members."""
        self.events: list[Event] = []
        self.requests: Counter[str] = Counter()
        self.lose_answers = 0
        self.be_down = 0
        self.say_later = 0
        self.drop_streams_after: int | None = None
        self.most_live = 0
        self.hold_answers: asyncio.Event | None = None
        """Answers are worked out, but sent only when this is set."""
        self._answers: dict[str, httpx.Response] = {}
        self._changed = asyncio.Event()

    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._handle)

    def client(self, token: str = TOKEN, retry: Retry | None = None) -> Swarm:
        """A client of this server."""
        return Swarm(URL, token, transport=self.transport(), retry=retry or Retry())

    def connect(self, time: FakeTime | None = None, token: str = TOKEN) -> AsyncSwarm:
        """An asynchronous client, in time that does not pass."""
        return AsyncSwarm(URL, token, transport=self.transport(), retry=(time or FakeTime()).retry())

    def by_status(self) -> Counter[str]:
        return Counter(view.status for view in self.episodes.values())

    def emit(self, kind: str, body: dict[str, Any]) -> None:
        self.events.append(Event(seq=len(self.events) + 1, kind=kind, time=0.0, body=body))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)
        path = request.url.path.removeprefix("/swarm/v1")
        self.requests[f"{request.method} {path.rsplit('/', 1)[-1]}"] += 1
        if self.be_down > 0:
            self.be_down -= 1
            raise httpx.ConnectError("connection refused", request=request)
        if self.say_later > 0:
            self.say_later -= 1
            return _problem(503, "restarting", retry_after=7.0)
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _problem(401, "token_invalid", "The token is wrong: it is in the file 'token' of the data dir.")
        key = request.headers.get("Idempotency-Key", "")
        if key not in self._answers:
            answer = self._answer(request, path)
            if not key or answer.status_code == 429:
                return answer
            self._answers[key] = answer
        if self.hold_answers is not None:
            await self.hold_answers.wait()
        if self.lose_answers > 0:
            self.lose_answers -= 1
            raise httpx.ReadError("connection reset", request=request)
        return self._answers[key]

    def _answer(self, request: httpx.Request, path: str) -> httpx.Response:
        if path == "/status":
            return httpx.Response(200, text=self._status().model_dump_json())
        if path == "/events":
            after = int(request.headers["Last-Event-ID"])
            return httpx.Response(
                200, headers={"Content-Type": "text/event-stream"}, stream=_Stream(self._stream(after))
            )
        if request.method == "GET":
            return httpx.Response(200, text=self.episodes[path.rpartition("/")[2]].model_dump_json())
        body = json.loads(request.content or b"null")
        try:
            if path == "/evaluations":
                self.recorded.append(EvaluationRequest.model_validate(body))
                return httpx.Response(200, text="[]")
            if path == "/groups/close":
                return self._close(CloseGroupsRequest.model_validate(body))
            if path == "/episodes":
                return self._begin(BeginRequest.model_validate(body))
            _, _, episode_id, verb = path.split("/")
            return self._end(self.episodes[episode_id], verb, body)
        except ValidationError as error:
            return _problem(422, "invalid_value", str(error))

    def _begin(self, request: BeginRequest) -> httpx.Response:
        group = request.group or request.task_id
        if request.mode == "train":
            if len(self.groups.get(group, [])) >= self.group_size:
                return _problem(429, "group_full")
            if group not in self.groups and len(self.groups) >= self.batch_size:
                return _problem(429, "batch_full")
            self.groups.setdefault(group, []).append(f"ep{len(self.episodes)}")
        view = EpisodeView(
            episode_id=f"ep{len(self.episodes)}",
            status="live",
            mode=request.mode,
            task_id=request.task_id,
            task_set=request.task_set,
            group=group,
            client_id=request.client_id,
            policy_version=self.version,
            code_version=request.code_version,
        )
        self.episodes[view.episode_id] = view
        self.begun.append(request)
        self.most_live = max(self.most_live, self.by_status()["live"])
        begun = BeginResponse(
            episode_id=view.episode_id,
            base_url=f"{URL}/v1",
            api_key=f"key-of-{view.episode_id}",
            model="" if self.policies else "tiny",
            policies=self.policies,
            policy_version=self.version,
            lease_seconds=60.0,
            expires_at=60.0,
            group_size=self.group_size if request.mode == "train" else 0,
        )
        return httpx.Response(200, text=begun.model_dump_json())

    def _end(self, view: EpisodeView, verb: str, body: dict[str, Any] | None) -> httpx.Response:
        if view.status != "live" and not (verb == "abort" and view.status in ("aborted", "expired")):
            return _problem(409, f"episode_{view.status}")
        if verb == "finish":
            scores = FinishRequest.model_validate(body).model_dump()
            view = view.model_copy(update={"status": "finished", "num_calls": self.num_calls, **scores})
        elif verb == "abort" and view.status == "live":
            view = view.model_copy(update={"status": "aborted", "reason": AbortRequest.model_validate(body).reason})
            members = self.groups.get(view.group, [])
            if view.episode_id in members:
                members.remove(view.episode_id)
            if not members:
                self.groups.pop(view.group, None)
        self.episodes[view.episode_id] = view
        self._learn_when_ready()
        return httpx.Response(200, text=view.model_dump_json())

    def _close(self, request: CloseGroupsRequest) -> httpx.Response:
        self.closed.append(request)
        for name in request.groups:
            if request.not_needed:
                self.groups.pop(name.group, None)
            elif name.group in self.groups:
                self.left.add(name.group)
        self._learn_when_ready()
        return httpx.Response(200, text=CloseGroupsResponse(num_waiting=0).model_dump_json())

    def _learn_when_ready(self) -> None:
        finished = [[e for e in m if self.episodes[e].status == "finished"] for m in self.groups.values()]
        complete = [
            len(members) == (len(all_members) if name in self.left else self.group_size)
            for members, (name, all_members) in zip(finished, self.groups.items(), strict=True)
        ]
        if len(finished) == self.batch_size and all(complete):
            by_group = [[self.episodes[member].reward or 0.0 for member in members] for members in finished]
            rewards = [reward for group in by_group for reward in group]
            self.groups.clear()
            self.version += 1
            metrics = {
                "reward/mean": sum(rewards) / len(rewards),
                "perf/tokens_per_second": 100.0,
                "groups/zero_variance": sum(len(set(group)) == 1 for group in by_group) / len(by_group),
            }
            views = [self.episodes[member] for members in finished for member in members]
            for name in self.policies:
                own = [view.by_role.get(name, view.reward) or 0.0 for view in views]
                metrics[f"{name}/reward/mean"] = sum(own) / len(own)
            self.steps.append(metrics)
            self.emit("step", {"policy_version": self.version, "metrics": metrics})

    def _status(self) -> StatusResponse:
        return StatusResponse(
            version="0",
            state=self.state,
            waiting_for="somebody",
            model="" if self.policies else "tiny",
            policies=self.policies,
            policy_version=self.version,
            batch_size=self.batch_size,
            group_size=self.group_size,
            max_steps=self.max_steps,
            groups_complete=0,
            groups_open=len(self.groups),
            episodes=dict(self.by_status()),
            calls_active=0,
            last_step={},
            clients={},
            zero_variance=self._zero_variance(),
            last_event=len(self.events),
            uptime=1.0,
        )

    def _zero_variance(self) -> ZeroVariance | None:
        batches = batches_without_variance(self.steps)
        answers = [ScoredAnswer(answer="Two.", reward=0, count=2)]
        report = ZeroVariance(batches=batches, truncated=0.5, task_id="t", prompt="1 + 1?", answers=answers)
        return report if batches >= REPORTED_BATCHES else None

    async def _stream(self, after: int) -> AsyncIterator[bytes]:
        sent = 0
        while True:
            changed = self._changed
            for event in self.events[after:]:
                if sent == self.drop_streams_after:
                    raise httpx.ReadError("connection reset")
                yield f": keep-alive\n\nid: {event.seq}\nevent: {event.kind}\n".encode()
                yield f"data: {event.model_dump_json()}\n\n".encode()
                after, sent = event.seq, sent + 1
            await changed.wait()


class _Stream(httpx.AsyncByteStream):
    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._chunks:
            yield chunk


def _problem(status: int, code: str, detail: str = "", retry_after: float | None = None) -> httpx.Response:
    body = Problem(
        title=code, status=status, code=code, detail=detail or f"{code}, said the server", retry_after=retry_after
    )
    return httpx.Response(status, text=body.model_dump_json())
