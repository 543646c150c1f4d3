"""The connection to one server: settings, authorisation, retries, error answers as exceptions, and heartbeats.

Two kinds of failure are retried, with exponential back-off and full jitter, each within its own time limit:

* The server does not answer, or another program answers in its place: up to `Retry.patience` seconds since its last
  answer.
* The server answers "later" (429 or 503, `Retry-After` honoured): up to the caller's `patience`, since the request
  began.

A repeated request carries the same `Idempotency-Key`, so it has one effect. This module is the only reader of the
environment in the client.

Heartbeats come from a thread that agents cannot block. It has an event loop and a connection to itself, which start
with the first episode. An agent that blocks its event loop keeps its lease.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import os
import random
import re
import socket
import ssl
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import httpx
from pydantic import BaseModel, ValidationError

from agentjet.client.threads import FORKED, LoopThread
from agentjet.errors import (
    AgentJetError,
    ConfigError,
    Conflict,
    Later,
    NotFound,
    RequestError,
    Unauthorized,
    Unavailable,
    Unreachable,
    queued_seconds,
    thread_stack,
)
from agentjet.protocol import PREFIX, Event, Problem, StatusResponse, refusal_of

if TYPE_CHECKING:  # An episode has a connection.
    from agentjet.client.episode import AsyncEpisode

LEASE_SHARE = 1 / 3
"""Interval between heartbeats as a share of the lease."""
PING_SECONDS = 1.0
"""Interval between pings of an agents' loop, and the time from which an answer is late."""
PUNCTUAL_SECONDS = 0.25
"""Delay of this thread's own timer, or wait of the agents' thread for a processor, from which the machine is busy.
A late answer then proves nothing.
"""
NUM_LATE = 3
"""Late answers in a row, each while an agent's own code runs, before the warning."""
log = logging.getLogger(__name__)
T = TypeVar("T")


class Heartbeats:
    """Renews the leases of episodes until they end."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        """`connect` makes the connection of the thread, at the first episode."""
        self._connect = connect
        self._connection: Connection | None = None
        self._loop = LoopThread()
        self._watched: set[int] = set()
        """Identities of the threads whose loops are pinged."""

    def follow(self, episode: AsyncEpisode) -> concurrent.futures.Future[bool]:
        """Send heartbeats until the episode ends. The result is True if it ended without its `finish`.

        Cancelling the future ends the heartbeats. Raises `RuntimeError` in a forked process.
        """
        return self._loop.submit(self._beat(episode))

    def watch(self) -> None:
        """Watch the running event loop, until this is closed: agents should not block it."""
        thread = threading.get_ident()
        if thread not in self._watched:
            self._watched.add(thread)
            self._loop.submit(_watch(asyncio.get_running_loop(), thread, threading.get_native_id()))

    async def close(self) -> None:
        """End the heartbeats and their thread; idempotent."""
        if self._loop.is_running:
            await asyncio.wrap_future(self._loop.submit(self._end()))
            self._loop.stop()
            self._watched.clear()

    async def _beat(self, episode: AsyncEpisode) -> bool:
        logged = ""
        while True:
            await asyncio.sleep(episode.lease_seconds * LEASE_SHARE)
            if episode.status != "live":
                return False
            try:
                if self._connection is None:
                    self._connection = self._connect()
                await episode.renew(self._connection)
            except (Conflict, NotFound):  # The episode ended, or its run is not served any more.
                return not episode.is_finishing and episode.reward is None  # else its own `finish` may have ended it
            except AgentJetError:  # The server may be away for a while: the agent's own request raises.
                pass
            except Exception as error:  # The boundary: the lease would end. A repeated failure is logged once.
                if repr(error) != logged:
                    log.exception("a heartbeat could not be sent; the next one tries again")
                logged = repr(error)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._connection is not None:
            await self._connection.close()
            self._connection = None


async def _watch(loop: asyncio.AbstractEventLoop, thread: int, native_id: int) -> None:
    """Warn once if `loop`, which runs in `thread`, answers several pings in a row late, each time inside an agent."""
    num_late, agent, task = 0, "", Path(f"/proc/self/task/{native_id}")
    while num_late < NUM_LATE:
        answered = threading.Event()
        try:
            loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # The loop is closed.
            return
        began, queued = time.monotonic(), queued_seconds(task)
        await asyncio.sleep(PING_SECONDS)
        delays = time.monotonic() - began - PING_SECONDS, queued_seconds(task) - queued
        if max(delays) > PUNCTUAL_SECONDS:
            continue
        agent = "" if answered.is_set() or not loop.is_running() else agent_of(thread)
        num_late = num_late + 1 if agent else 0
    log.warning(
        "%s blocks the event loop of the client, so the other agents wait: await its slow calls, use "
        "asyncio.to_thread for blocking ones, or make the agent a plain function, which gets a thread",
        agent,
    )


def agent_of(thread: int) -> str:
    """The agent whose own code a thread runs now: its function, file and line. Empty if it runs none."""
    for below, line in pairwise(thread_stack(thread)):
        if line.function == "call_agent" and Path(line.file) == CLIENT / "rollout.py":
            is_own = CLIENT.parent in Path(below.file).parents  # Such as the start of a plain function's thread.
            return "" if is_own else f"the agent {below.function} ({below.file}:{below.line})"
    return ""


CLIENT = Path(__file__).parent
DEFAULT_URL = "http://127.0.0.1:8400"
URL_VARIABLE = "AGENTJET_URL"
TOKEN_VARIABLE = "AGENTJET_TOKEN"
PROCESS = uuid.uuid4().hex
"""Identifies this process to servers. Forked processes share it."""
RUN_PATH = re.compile(r"/runs/[^/]+$")
API_PATH = re.compile(r"(?<!/runs)(/swarm)?/v1/*$")
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
CONNECTING = re.compile(r"connect|proxy|remote end|bad ?gateway|502|503")
"""Words in the errors of HTTP clients that reached no server, or another program."""
GATEWAY_TROUBLE = frozenset({502, 503, 504})
"""Without a problem body, these answers come from a proxy between client and server."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The server's address, and the identity of the client."""

    url: str
    token: str
    client_id: str
    instance_id: str = ""
    """Identifies the process behind a named client: see `PROCESS`."""

    @property
    def server_url(self) -> str:
        """The address without the path of a run, `/runs/NAME`."""
        return RUN_PATH.sub("", self.url)

    @property
    def is_loopback(self) -> bool:
        """True if the server is on this machine. Proxies of the environment are not used then."""
        return urlsplit(self.url).hostname in LOOPBACK


def load_settings(
    url: str | None = None,
    token: str | None = None,
    client_id: str | None = None,
    instance_id: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ClientSettings:
    """Arguments take precedence over AGENTJET_URL and AGENTJET_TOKEN, and these over the default address. The path of
    an API at the end of the address, such as `/v1`, is left out.

    Raises `ConfigError` if the address is not an http(s) URL, or if the token has a character that a header cannot
    carry.
    """
    address = url or environ.get(URL_VARIABLE) or DEFAULT_URL
    if not _is_address(address):
        raise ConfigError(f"{address!r} is not a server's address: expected something like {DEFAULT_URL}")
    address = API_PATH.sub("", address)  # A front that has this address answers that it is not the server.
    if address.rstrip("/").endswith("/runs"):
        raise ConfigError(f"{address!r} names no run: add its name, or leave out /runs for the default run")
    return ClientSettings(
        url=address.rstrip("/"),
        token=_checked_token(token if token is not None else environ.get(TOKEN_VARIABLE, "")),
        client_id=client_id or f"{socket.gethostname()[:64]}-{os.getpid()}-{uuid.uuid4().hex[:6]}",
        instance_id=(PROCESS if client_id else "") if instance_id is None else instance_id,
    )


def without_proxy(host: str | None, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that make programs reach a host of this machine directly; none for another host."""
    known = environ.get("NO_PROXY") or environ.get("no_proxy", "")
    if host not in LOOPBACK or host in known.split(",") or known == "*":
        return {}
    direct = ",".join(filter(None, [known, host]))
    return {"NO_PROXY": direct, "no_proxy": direct}


def reach_directly(url: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Lets agents of this process reach a server on this machine: SDKs would ask the proxy of the environment."""
    if _proxies(environ):
        environ.update(without_proxy(urlsplit(url).hostname, environ))


def proxy_hint(error: BaseException, url: str, environ: Mapping[str, str] = os.environ) -> str:
    """A sentence for an agent that could not connect to a server on this machine, if there is a proxy; else empty."""
    host, names = urlsplit(url).hostname, _proxies(environ)
    if host not in LOOPBACK or not names or not CONNECTING.search(f"{type(error).__name__} {error}".lower()):
        return ""
    return (
        f" ({' and '.join(names)} is set, and the agent's client may have asked that proxy for {host}: make the client "
        f"inside the agent, or start the script with NO_PROXY={host})"
    )


def _proxies(environ: Mapping[str, str]) -> list[str]:
    return [name for name in PROXIES if environ.get(name)]


def _is_address(address: object) -> bool:
    if not isinstance(address, str):
        return False
    try:
        httpx.URL(address)
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        return False


def _checked_token(token: str) -> str:
    """The token without surrounding white space, such as the newline of its file. Error messages never show it."""
    token = token.strip()
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(
            f"the token (an argument, or {TOKEN_VARIABLE}) has a character that a header cannot carry, such as a "
            "line break or an accented letter: give the content of the file 'token' in the server's data dir"
        )
    return token


@dataclass(frozen=True, slots=True)
class Retry:
    """Limits of repeated requests, in seconds. Tests replace `clock`, `sleep` and `jitter`."""

    patience: float = 120.0
    """Time to wait for a server that stopped answering. A restart of the server must fit."""
    first_patience: float = 3.0
    """The same before the server's first answer: the address is probably wrong."""
    first_delay: float = 0.1
    longest_delay: float = 10.0
    timeout: float = 30.0
    """Limit of one attempt, in addition to the time that the server was asked to wait."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random

    def delay(self, attempt: int) -> float:
        """Back-off before repeat number `attempt` (from 0): half fixed, half random."""
        ceiling = min(self.longest_delay, self.first_delay * 2.0 ** min(attempt, 16))
        return ceiling * (0.5 + 0.5 * self.jitter())


class ForeignAnswer(httpx.TransportError):
    """A success that an AgentJet server does not send."""

    def __init__(self, response: httpx.Response) -> None:
        kind = response.headers.get("Content-Type") or "a body without a Content-Type"
        super().__init__(
            f"answered with status {response.status_code} and {kind}, which an AgentJet server does not send"
        )


class Connection:
    """One client's connection to a server. Belongs to the event loop that first used it."""

    prefix: ClassVar[str] = PREFIX
    """The path of the API, below the address."""

    def __init__(
        self, settings: ClientSettings, *, retry: Retry, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.settings = settings
        self.retry = retry
        self.heartbeats = Heartbeats(lambda: Connection(settings, retry=retry, transport=transport))
        self._going_on: set[asyncio.Task[Any]] = set()
        self._delayed: WeakKeyDictionary[asyncio.Task[Any], str] = WeakKeyDictionary()
        """The reason of each task that repeats a request. A cancelled task keeps its entry until it is collected."""
        self.num_resumed = 0
        """Delayed requests that the server has answered by something else than another delay."""
        self._answered = False
        self._pid: int | None = None
        """The process of the first request. A forked process would share its sockets."""
        self._http = httpx.AsyncClient(
            base_url=settings.url,
            headers={"Authorization": f"Bearer {settings.token}"} if settings.token else {},
            timeout=retry.timeout,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            verify=_certificates() if settings.url.startswith("https") else False,
            trust_env=not settings.is_loopback,
            transport=transport,
        )

    @property
    def delay_reason(self) -> str:
        """Sentences about the reason why a request is being repeated and the limit of that; empty if there is none, or
        if the server is only busy (429).
        """
        return next((reason for task, reason in list(self._delayed.items()) if not task.done()), "")

    async def close(self) -> None:
        for task in self._going_on:
            task.cancel()
        await asyncio.gather(*self._going_on, return_exceptions=True)
        await self.heartbeats.close()
        await self._http.aclose()

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | Mapping[str, Any] | None = None,
        key: str | None = None,
        patience: float | None = None,
        server_wait: float = 0.0,
    ) -> Any:
        """Send a control request until it is answered; returns the decoded JSON body.

        Requests about the server's runs (`/runs...`) go to the server, also from the client of one run.
        `key` is the `Idempotency-Key` of a POST, by default a new one. `patience` limits the seconds of retries after
        "later" answers (default: `Retry.patience`; 0 disables them). `server_wait` is the time that the server was
        asked to hold the request. Raises a `RequestError` or `Unreachable`.
        """
        if self._pid not in (None, os.getpid()):
            raise RuntimeError(FORKED)
        self._pid, retry = os.getpid(), self.retry
        started = answered = retry.clock()
        num_refused = num_lost = 0
        patience = retry.patience if patience is None else patience
        headers = {"Idempotency-Key": key or uuid.uuid4().hex} if method == "POST" else {}
        payload = body.model_dump(mode="json") if isinstance(body, BaseModel) else body
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        address = self.settings.server_url if path.startswith("/runs") else self.settings.url
        error: RequestError | Unreachable | None
        while True:
            try:
                response = await self._http.request(
                    method,
                    address + self.prefix + path,
                    json=payload,
                    headers=headers,
                    timeout=retry.timeout + server_wait,
                )
                answer = _decoded(response) if response.is_success else None
                self._answered, answered, num_lost = True, retry.clock(), 0
                error = None if response.is_success else self._error(response)
                if not isinstance(error, Unavailable):
                    self.num_resumed += self._delayed.pop(task, None) is not None
                if error is None:
                    return answer
                if not isinstance(error, Later):
                    raise error
                since, allowed, delay = started, patience, max(error.retry_after, retry.delay(num_refused))
                num_refused += 1
                if isinstance(error, Unavailable):
                    self._delayed[task] = _delay(error, allowed)
            except httpx.TransportError as problem:
                error = self._unreachable(problem)
                allowed = retry.patience if self._answered else retry.first_patience
                since, delay = answered, retry.delay(num_lost)
                num_lost += 1
                self._delayed[task] = _delay(error, allowed)
            if retry.clock() - since + delay > allowed:
                self._delayed.pop(task, None)
                raise error
            await retry.sleep(delay)

    async def go_on(self, requests: Coroutine[Any, Any, T], seconds: float) -> T | None:
        """The result of requests, or None after an error or `seconds`. Then, and after a cancellation, they go on until
        `close`.
        """
        task = asyncio.create_task(requests)
        self._going_on.add(task)
        task.add_done_callback(self._going_on.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # else asyncio logs the exception
        await asyncio.wait([task], timeout=seconds)
        return None if not task.done() or task.cancelled() or task.exception() else task.result()

    async def status(self) -> StatusResponse:
        return StatusResponse.model_validate(await self.request("GET", "/status"))

    async def events(self, after: int = 0) -> AsyncGenerator[Event]:
        """The server's events numbered above `after`, without end.

        Reconnects a broken stream. Raises `Unreachable` after `Retry.patience` seconds without an answer.
        """
        retry, attempt = self.retry, 0
        answered = retry.clock()
        while True:
            is_open = False
            try:
                async with self._http.stream(
                    "GET",
                    f"{PREFIX}/events",
                    headers={"Last-Event-ID": str(after), "Accept": "text/event-stream"},
                    timeout=httpx.Timeout(retry.timeout, read=None),
                ) as response:
                    if not response.is_success:
                        await response.aread()
                        raise self._error(response)
                    if not response.headers.get("Content-Type", "").startswith("text/event-stream"):
                        raise ForeignAnswer(response)
                    self._answered = is_open = True
                    async with aclosing(_parse_events(response)) as parsed:
                        async for event in parsed:
                            attempt, after = 0, event.seq
                            yield event
                answered, delay = retry.clock(), retry.delay(attempt)
            except Later as error:
                answered, delay = retry.clock(), max(error.retry_after, retry.delay(attempt))
            except httpx.TransportError as problem:
                answered, delay = retry.clock() if is_open else answered, retry.delay(attempt)
                if retry.clock() - answered + delay > retry.patience:
                    raise self._unreachable(problem) from problem
            await retry.sleep(delay)
            attempt += 1

    def _unreachable(self, problem: Exception) -> Unreachable:
        reason = str(problem) or type(problem).__name__
        if isinstance(problem, ForeignAnswer):
            return Unreachable(
                f"{self.settings.url} {reason}: a proxy, a login page or another program answers at this "
                "address. Give the right address as an argument or in AGENTJET_URL"
            )
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            return Unreachable(
                f"{self.settings.url} has a certificate that this client does not trust ({reason}): if the server "
                "signed it itself, set SSL_CERT_FILE to its file (PEM)"
            )
        return Unreachable(
            f"no answer from {self.settings.url} ({reason}): start a server with `agentjet serve`, "
            "or give the right address as an argument or in AGENTJET_URL"
        )

    def _error(self, response: httpx.Response) -> RequestError:
        status, problem = response.status_code, _problem(response)
        text, code = problem.detail or problem.title, problem.code or None
        kind = Unavailable if status in GATEWAY_TROUBLE else refusal_of(status)
        if issubclass(kind, Later):
            return kind(text, retry_after=problem.retry_after or 0.0, code=code)
        if kind is Unauthorized:
            text += f" ({self.settings.url}; a client takes the token as an argument or from {TOKEN_VARIABLE})"
        return kind(text, code=code, param=problem.param)


def _delay(error: RequestError | Unreachable, seconds: float) -> str:
    limit = f"for {seconds:g} s" if seconds < math.inf else "until the server takes them"
    lost = " without an answer" if isinstance(error, Unreachable) else ""
    return f"{str(error).rstrip('.')}. This client repeats its requests {limit}{lost}."


def _certificates() -> ssl.SSLContext:
    """The installed certificates and those of SSL_CERT_FILE. Loading takes 20 ms, which plain http does not need."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        given = {name: os.environ[name] for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ}
        raise ConfigError(
            f"the trusted certificates cannot be read, {given}: {error}; set it to a file of certificates (PEM), or "
            "unset it"
        ) from None


def _decoded(response: httpx.Response) -> Any:
    """The JSON body of a success, or None without a body. Raises `ForeignAnswer`."""
    if not response.content:
        return None
    try:
        return response.json()
    except (ValueError, RecursionError):
        raise ForeignAnswer(response) from None


def _problem(response: httpx.Response) -> Problem:
    """The body of a refusal. Its equivalent for an answer of a proxy, or of a server that crashed."""
    try:
        return Problem.model_validate_json(response.content)
    except ValidationError:
        wait, status = response.headers.get("Retry-After", ""), response.status_code
        return Problem(
            title=response.reason_phrase,
            status=status,
            code="server_error" if status >= 500 else "",
            detail=response.text[:500],
            retry_after=float(wait) if wait.isdecimal() else None,
        )


async def _parse_events(response: httpx.Response) -> AsyncGenerator[Event, None]:
    """Parses server-sent events whose data is one `Event` each. Comments (keep-alives) are skipped. Raises
    `ForeignAnswer`.
    """
    lines: list[str] = []
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            lines.append(line[5:].strip())
        elif not line and lines:
            try:
                event = Event.model_validate_json("\n".join(lines))
            except ValidationError:
                raise ForeignAnswer(response) from None
            yield event
            lines = []
