"""The handshake of the connections to the gateway and to rank 0's files. No torch.

The connections between ranks are those of torch.distributed, which has none: they need a private network.

Both ends prove that they know the secret before the first pickle, because a pickle can run any code. A stranger may
send anything: it costs a small message of memory and `HANDSHAKE_SECONDS` at most.

Messages are small JSON objects with their length in front. Each arrow is one:
connecting end -> name, version, nonce -> proof and nonce of the listening end -> proof -> accepted, or the refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from agentjet import __version__
from agentjet.errors import ComputeError

HANDSHAKE_SECONDS = 10.0
MAX_HANDSHAKES = 256
"""Connections of a listener that may be in their handshake. Beyond it the oldest one is closed."""
MAX_MESSAGE_BYTES = 4096
_SHORT = struct.Struct("<H")
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""A silent connection is probed after 5 s, and ended after three probes without an answer: 11 s."""


def tune(connection: socket.socket, *, unanswered_seconds: float) -> None:
    """Send small messages at once, and notice a machine that vanished without closing its connections.

    The connection ends if sent data stays unanswered for so long. A process that reads nothing counts as such, too.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {**KEEPALIVE, "TCP_USER_TIMEOUT": int(unanswered_seconds * 1000)}
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:  # Systems differ in what they have.
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def listen(host: str) -> tuple[socket.socket, str]:
    """Returns a listener on a free port of `host`, and its address `HOST:PORT`. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=1024)
    port = listener.getsockname()[1]
    return listener, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """Returns the parts of `HOST:PORT`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def dial(address: str, name: str, secret: bytes) -> socket.socket:
    """Returns a proven connection to `HOST:PORT`. Raises `OSError`, and `ComputeError` for a refusal."""
    connection = socket.create_connection(host_and_port(address), timeout=HANDSHAKE_SECONDS)
    try:
        tune(connection, unanswered_seconds=120.0)  # The gateway may be stopped for a while.
        _prove(connection, name, secret)
    except BaseException:
        connection.close()
        raise
    return connection


def verify(connection: socket.socket, secret: bytes) -> str:
    """Do the handshake as the process that listens; returns the name of the other one.

    Raises `ComputeError` for a refusal, `OSError` for a connection that ends or takes too long.
    """
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    try:
        hello = _decode(_receive(connection, deadline))
        challenge, nonce = _challenge(hello, secret)
        connection.sendall(_encode(challenge))
        name = _proven_name(hello, _decode(_receive(connection, deadline)), nonce, secret)
    except ComputeError as error:
        with contextlib.suppress(OSError):
            connection.sendall(_encode({"refused": str(error)}))
        raise
    connection.sendall(_encode({"accepted": name}))
    connection.settimeout(None)
    return name


async def verify_async(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, refusal: Callable[[str], str]
) -> str:
    """As `verify`, in an event loop. `refusal` returns the reason to refuse a process of that name, or ''.

    Raises `EOFError` and `TimeoutError`, too.
    """
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        try:
            hello = _decode(await _receive_async(reader))
            challenge, nonce = _challenge(hello, secret)
            writer.write(_encode(challenge))
            name = _proven_name(hello, _decode(await _receive_async(reader)), nonce, secret)
            if reason := refusal(name):
                raise ComputeError(f"{name!r}: {reason}")
        except ComputeError as error:
            writer.write(_encode({"refused": str(error)}))
            raise
        writer.write(_encode({"accepted": name}))
        return name


def _prove(connection: socket.socket, name: str, secret: bytes) -> None:
    """Do the handshake as the process that connected."""
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    nonce = secrets.token_hex(16)
    connection.sendall(_encode({"name": name, "version": __version__, "nonce": nonce}))
    answer = _answer(connection, deadline, name)
    if not _is_proof(answer.get("proof"), secret, "server", nonce):
        raise ComputeError(f"{name}: the other end does not know the secret")
    connection.sendall(_encode({"proof": _proof(secret, "client", str(answer.get("nonce")))}))
    _answer(connection, deadline, name)
    connection.settimeout(None)


def _answer(connection: socket.socket, deadline: float, name: str) -> dict[str, Any]:
    answer = _decode(_receive(connection, deadline))
    if "refused" in answer:
        raise ComputeError(f"{name} was refused: {answer['refused']}")
    return answer


def _challenge(hello: dict[str, Any], secret: bytes) -> tuple[dict[str, str], str]:
    """Returns the answer to the first message, and its nonce. Raises `ComputeError` for another version."""
    if hello.get("version") != __version__:
        raise ComputeError(
            f"{hello.get('name')!r} has AgentJet {hello.get('version')!r} and the gateway has {__version__!r}: "
            "install the gateway's version where it runs"
        )
    nonce = secrets.token_hex(16)
    return {"proof": _proof(secret, "server", str(hello.get("nonce"))), "nonce": nonce}, nonce


def _proven_name(hello: dict[str, Any], answer: dict[str, Any], nonce: str, secret: bytes) -> str:
    if not _is_proof(answer.get("proof"), secret, "client", nonce):
        raise ComputeError(f"{hello.get('name')!r} does not know the secret")
    return str(hello.get("name"))


def _proof(secret: bytes, side: str, nonce: str) -> str:
    return hmac.digest(secret, f"{side} {nonce}".encode(errors="replace"), "sha256").hex()


def _is_proof(value: object, secret: bytes, side: str, nonce: str) -> bool:
    return hmac.compare_digest(str(value).encode(errors="replace"), _proof(secret, side, nonce).encode())


def _encode(body: dict[str, str]) -> bytes:
    message = json.dumps(body).encode()
    return _SHORT.pack(len(message)) + message


def _decode(message: bytes) -> dict[str, Any]:
    """Returns a JSON object. Raises `ComputeError` for anything else."""
    try:
        body = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise ComputeError("it did not begin with the handshake") from error
    if not isinstance(body, dict):
        raise ComputeError("it did not begin with the handshake")
    return body


def _length(header: bytes) -> int:
    (length,) = _SHORT.unpack(header)
    if length > MAX_MESSAGE_BYTES:
        raise ComputeError("it did not begin with the handshake")
    return int(length)


def _receive(connection: socket.socket, deadline: float) -> bytes:
    return _exactly(connection, _length(_exactly(connection, _SHORT.size, deadline)), deadline)


def _exactly(connection: socket.socket, length: int, deadline: float) -> bytes:
    message = bytearray()
    while len(message) < length:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError("the handshake took too long")
        connection.settimeout(left)
        if not (part := connection.recv(length - len(message))):
            raise ConnectionError("the connection ended during the handshake")
        message += part
    return bytes(message)


async def _receive_async(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(_length(await reader.readexactly(_SHORT.size)))
