"""The client's settings: the only place in the client that reads the environment.

`AGENTJET_URL` and `AGENTJET_TOKEN` stand in for arguments that were not given.

The way of one request: authorisation, retries, and problem bodies turned into the project's exceptions.

Everything is asynchronous; the synchronous client drives this same code (see `threads.py`). Two kinds of failure
are retried, with exponential back-off and full jitter, each within a time of its own:

* the server does not answer, or something else answers in its place: within `Retry.patience` since its last answer;
* answers that mean "later" (429, 503; `Retry-After` honoured): within the caller's own patience, since the request
  began.

A repeated request carries the same `Idempotency-Key`, so it has one effect.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import ssl
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from agentjet.errors import (
    ConfigError,
    Conflict,
    Forbidden,
    InvalidRequest,
    Later,
    NotFound,
    RequestError,
    TooLarge,
    Unauthorized,
    Unreachable,
)
from agentjet.protocol import PREFIX, Event, Problem

DEFAULT_URL = "http://127.0.0.1:8400"
URL_VARIABLE = "AGENTJET_URL"
TOKEN_VARIABLE = "AGENTJET_TOKEN"
PROCESS = uuid.uuid4().hex
"""This process, as the clients in it name it to servers. Processes forked from it are the same."""
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Where the server is and how the client introduces itself."""

    url: str
    token: str
    client_id: str
    lease: int | None = None
    """Epoch of the lease that its requests show."""
    instance_id: str = ""
    """The process, for a client that has a name of its own: see `PROCESS`."""

    @property
    def is_loopback(self) -> bool:
        """Whether the server is on this machine: then no proxy of the environment is asked."""
        return urlsplit(self.url).hostname in LOOPBACK


def load_settings(
    url: str | None = None,
    token: str | None = None,
    client_id: str | None = None,
    lease: int | None = None,
    instance_id: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ClientSettings:
    """Arguments first, then the environment, then the default address.

    Raises `ConfigError` when the address is not an http(s) URL, or no header can carry the token.
    """
    address = url or environ.get(URL_VARIABLE) or DEFAULT_URL
    if not _is_address(address):
        raise ConfigError(f"{address!r} is not a server's address: expected something like {DEFAULT_URL}")
    return ClientSettings(
        url=address.rstrip("/"),
        token=_checked_token(token if token is not None else environ.get(TOKEN_VARIABLE, "")),
        client_id=client_id or f"{socket.gethostname()[:64]}-{os.getpid()}-{uuid.uuid4().hex[:6]}",
        lease=lease,
        instance_id=(PROCESS if client_id else "") if instance_id is None else instance_id,
    )


def _is_address(address: object) -> bool:
    """Whether requests can be sent there: an http(s) URL with a host and, if any, a port that there is."""
    if not isinstance(address, str):
        return False
    try:
        httpx.URL(address)
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        return False


def _checked_token(token: str) -> str:
    """Without the white space around it, such as the newline of the file it was read from. Never part of a message."""
    token = token.strip()
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(
            f"the token (an argument, or {TOKEN_VARIABLE}) has a character that no header can carry, such as a line "
            "break or a letter with an accent: give what is in the file 'token' of the server's data dir"
        )
    return token


def inherited_environment() -> dict[str, str]:
    """What a program that the client starts inherits."""
    return dict(os.environ)


LEASE_HEADER = "AgentJet-Lease"
ERRORS: dict[int, type[RequestError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
}
GATEWAY_TROUBLE = frozenset({502, 503, 504})
"""Without one of our problem bodies these come from something between client and server."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How long and how often a request is repeated. Times in seconds; clock and sleep can be replaced by tests."""

    patience: float = 120.0
    """How long a server that stopped answering is waited for: a restart should fit."""
    first_patience: float = 3.0
    """The same before the server has ever answered: the address is probably wrong."""
    first_delay: float = 0.1
    longest_delay: float = 10.0
    timeout: float = 30.0
    """Of one attempt, besides what the server was asked to wait."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random

    def delay(self, attempt: int) -> float:
        """Back-off before repeat number `attempt` (from 0): half fixed, half random."""
        ceiling = min(self.longest_delay, self.first_delay * 2.0 ** min(attempt, 16))
        return ceiling * (0.5 + 0.5 * self.jitter())


class ForeignAnswer(Exception):
    """A success that no AgentJet server sends."""

    def __init__(self, response: httpx.Response) -> None:
        kind = response.headers.get("Content-Type") or "a body without a Content-Type"
        super().__init__(f"answered with status {response.status_code} and {kind}, which no AgentJet server sends")


class Connection:
    """A server, as seen by one client. Belongs to the event loop that first used it."""

    def __init__(
        self, settings: ClientSettings, *, retry: Retry, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.settings = settings
        self.retry = retry
        self._answered = False
        self._http = httpx.AsyncClient(
            base_url=settings.url,
            headers=_headers(settings),
            timeout=retry.timeout,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            verify=_certificates() if settings.url.startswith("https") else False,
            trust_env=not settings.is_loopback,
            transport=transport,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        key: str | None = None,
        patience: float | None = None,
        server_wait: float = 0.0,
    ) -> Any:
        """Send a control request until it is answered; returns the decoded JSON body.

        `key` is the `Idempotency-Key` of a POST, by default a new one. `patience` bounds how long answers that mean
        "later" are retried (default: `Retry.patience`; 0: not at all); `server_wait` is what the server was asked to
        hold the request. Raises a `RequestError` or `Unreachable`.
        """
        retry = self.retry
        started = answered = retry.clock()
        num_refused = num_lost = 0
        patience = retry.patience if patience is None else patience
        headers = {"Idempotency-Key": key or uuid.uuid4().hex} if method == "POST" else {}
        payload = body.model_dump(mode="json") if body is not None else None
        error: RequestError | Unreachable
        while True:
            try:
                response = await self._http.request(
                    method, PREFIX + path, json=payload, headers=headers, timeout=retry.timeout + server_wait
                )
                answer = _decoded(response) if response.is_success else None
                self._answered, answered, num_lost = True, retry.clock(), 0
                if response.is_success:
                    return answer
                error = self._error(response)
                if not isinstance(error, Later):
                    raise error
                since, allowed, delay = started, patience, max(error.retry_after, retry.delay(num_refused))
                num_refused += 1
            except (httpx.TransportError, ForeignAnswer) as problem:
                error = self._unreachable(problem)
                allowed = retry.patience if self._answered else retry.first_patience
                since, delay = answered, retry.delay(num_lost)
                num_lost += 1
            if retry.clock() - since + delay > allowed:
                raise error
            await retry.sleep(delay)

    async def events(self, after: int = 0) -> AsyncGenerator[Event]:
        """The server's events numbered above `after`, without end; a broken stream is taken up again for as long as
        `Retry.patience` allows since the server was last heard of.
        """
        retry, attempt = self.retry, 0
        heard = retry.clock()
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
                    async for event in _parse_events(response):
                        attempt, after = 0, event.seq
                        yield event
                heard, delay = retry.clock(), retry.delay(attempt)
            except Later as error:
                heard, delay = retry.clock(), max(error.retry_after, retry.delay(attempt))
            except (httpx.TransportError, ForeignAnswer) as problem:
                heard, delay = retry.clock() if is_open else heard, retry.delay(attempt)
                if retry.clock() - heard + delay > retry.patience:
                    raise self._unreachable(problem) from problem
            await retry.sleep(delay)
            attempt += 1

    def _unreachable(self, problem: Exception) -> Unreachable:
        reason = str(problem) or type(problem).__name__
        if isinstance(problem, ForeignAnswer):
            return Unreachable(
                f"{self.settings.url} {reason}: a proxy or a login page answers in the server's place, or the address "
                "is another program's. Give the right address as an argument or in AGENTJET_URL"
            )
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            return Unreachable(
                f"{self.settings.url} shows a certificate that is not trusted here ({reason}): if it is the server's "
                "own, name its file (PEM) in SSL_CERT_FILE"
            )
        return Unreachable(
            f"no answer from {self.settings.url} ({reason}): is the server running there? Start one with "
            "`agentjet serve`, or give the right address as an argument or in AGENTJET_URL"
        )

    def _error(self, response: httpx.Response) -> RequestError:
        """The exception for an answer that is not a success."""
        status = response.status_code
        problem = _problem(response)
        text = (problem.detail or problem.title) if problem else response.text[:500] or response.reason_phrase
        code = problem.code if problem else None
        if status == 429 or status in GATEWAY_TROUBLE:
            return Later(text, retry_after=_retry_after(response, problem), code=code, status=status)
        if status == 401:
            text += f" ({self.settings.url}; a client takes the token as an argument or from {TOKEN_VARIABLE})"
        kind = ERRORS.get(status, InvalidRequest if status < 500 else RequestError)
        error = kind(text, code=code or ("server_error" if status >= 500 else None), status=status)
        error.param = problem.param if problem else None
        return error


def _headers(settings: ClientSettings) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {settings.token}"} if settings.token else {}
    return headers if settings.lease is None else {**headers, LEASE_HEADER: str(settings.lease)}


def _certificates() -> ssl.SSLContext:
    """Those known here, and those of SSL_CERT_FILE: reading them takes 20 ms, which plain http does not need."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        given = {name: os.environ[name] for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ}
        raise ConfigError(
            f"the trusted certificates cannot be read, {given}: {error}; name a file of certificates (PEM) there, or "
            "unset it"
        ) from None


def _decoded(response: httpx.Response) -> Any:
    """The JSON body of a success; None without a body. Raises `ForeignAnswer`."""
    if not response.content:
        return None
    try:
        return response.json()
    except ValueError:
        raise ForeignAnswer(response) from None


def _problem(response: httpx.Response) -> Problem | None:
    try:
        return Problem.model_validate_json(response.content)
    except ValidationError:
        return None


def _retry_after(response: httpx.Response, problem: Problem | None) -> float:
    """Seconds to wait, from the body (exact) or the header (whole seconds); 0 leaves it to the back-off."""
    if problem is not None and problem.retry_after is not None:
        return problem.retry_after
    try:
        return max(0.0, float(response.headers.get("Retry-After", "0")))
    except ValueError:
        return 0.0


async def _parse_events(response: httpx.Response) -> AsyncIterator[Event]:
    """Server-sent events whose data is one `Event` each; comments (keep-alives) are skipped."""
    lines: list[str] = []
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            lines.append(line[5:].strip())
        elif not line and lines:
            yield Event.model_validate(json.loads("\n".join(lines)))
            lines = []
