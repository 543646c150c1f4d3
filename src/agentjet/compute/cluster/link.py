"""The process's end of a connection to the gateway, and the handshake of all connections of the cluster. No torch.

A process of the cluster gets an address, a name and a secret in its environment (`Link.VARIABLES`). It connects to the
gateway; from then on the connection is its life: it ends when the connection does, and the gateway takes the end of the
connection for its death.

Both ends prove that they know the secret before the first pickle, because a pickle can run any code.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Self

from agentjet import __version__
from agentjet.compute.channel import Message, Request, encode, read
from agentjet.errors import ComputeError

HANDSHAKE_SECONDS = 10.0
MAX_HANDSHAKE_BYTES = 4096
_SHORT = struct.Struct("<H")


def prove(connection: socket.socket, name: str, secret: bytes) -> None:
    """Do the handshake as the process that connected. Raises `ComputeError` with the reason of a refusal."""
    connection.settimeout(HANDSHAKE_SECONDS)
    nonce = secrets.token_hex(16)
    _send(connection, {"name": name, "version": __version__, "nonce": nonce})
    answer = _receive(connection)
    if "refused" in answer:
        raise ComputeError(f"{name} was refused: {answer['refused']}")
    if not hmac.compare_digest(str(answer.get("proof")), _proof(secret, "server", nonce)):
        raise ComputeError(f"{name}: the other end does not know the secret")
    _send(connection, {"proof": _proof(secret, "client", str(answer["nonce"]))})
    connection.settimeout(None)


def verify(connection: socket.socket, secret: bytes) -> str:
    """Do the handshake as the process that listens; returns the name of the other one.

    Raises `ComputeError` for a wrong secret or another version of AgentJet, `OSError` for a connection that ends.
    """
    connection.settimeout(HANDSHAKE_SECONDS)
    hello = _receive(connection)
    if hello.get("version") != __version__:
        reason = (
            f"it has AgentJet {hello.get('version')!r} and the gateway has {__version__!r}: "
            "install the gateway's version where it runs"
        )
        _send(connection, {"refused": reason})
        raise ComputeError(f"{hello.get('name')!r} was refused: {reason}")
    nonce = secrets.token_hex(16)
    _send(connection, {"proof": _proof(secret, "server", str(hello.get("nonce"))), "nonce": nonce})
    if not hmac.compare_digest(str(_receive(connection).get("proof")), _proof(secret, "client", nonce)):
        raise ComputeError(f"{hello.get('name')!r} was refused: it does not know the secret")
    connection.settimeout(None)
    return str(hello["name"])


def _proof(secret: bytes, side: str, nonce: str) -> str:
    return hmac.digest(secret, f"{side} {nonce}".encode(), "sha256").hex()


def _send(connection: socket.socket, body: dict[str, str]) -> None:
    data = json.dumps(body).encode()
    connection.sendall(_SHORT.pack(len(data)) + data)


def _receive(connection: socket.socket) -> dict[str, Any]:
    """Returns one small JSON object. Raises `ComputeError` for anything else."""
    (length,) = _SHORT.unpack(_exactly(connection, _SHORT.size))
    if length > MAX_HANDSHAKE_BYTES:
        raise ComputeError("a connection did not begin with the handshake")
    try:
        body = json.loads(_exactly(connection, length))
    except ValueError as error:
        raise ComputeError("a connection did not begin with the handshake") from error
    if not isinstance(body, dict):
        raise ComputeError("a connection did not begin with the handshake")
    return body


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        if not (part := connection.recv(length - len(data))):
            raise ConnectionError("the connection ended during the handshake")
        data += part
    return bytes(data)


def dial(address: str, name: str, secret: bytes) -> socket.socket:
    """Returns a proven connection to `HOST:PORT`. Raises `OSError`, and `ComputeError` for a refusal."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=HANDSHAKE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    prove(connection, name, secret)
    return connection


class Link:
    """The connection of this process to the gateway."""

    VARIABLES = "AGENTJET_LINK", "AGENTJET_NAME", "AGENTJET_SECRET"

    def __init__(self, connection: socket.socket, name: str, secret: bytes) -> None:
        self.name = name
        self.secret = secret
        """For connections to other processes of the cluster."""
        self._connection = connection
        self._stream: BinaryIO = connection.makefile("rb")
        self._writing = threading.Lock()
        self.before_exit: Callable[[], object] = lambda: None
        """Called before the process ends with the connection. From any thread."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        address, name, secret = (environment[variable] for variable in cls.VARIABLES)
        return cls(dial(address, name, secret.encode()), name, secret.encode())

    @property
    def local_host(self) -> str:
        """The address of this machine as the gateway sees it. Other machines of the cluster reach it there, too."""
        return str(self._connection.getsockname()[0])

    def send(self, message: Message) -> None:
        """Send a message, from any thread. A gateway that is gone ends this process."""
        with self._writing:
            try:
                self._connection.sendall(encode(message))
            except OSError:
                self._exit()

    def read_forever(self, deliver: Callable[[Request], object]) -> None:
        """Deliver requests from a separate thread; end this process with the connection."""

        def loop() -> None:
            try:
                while True:
                    deliver(read(self._stream))
            except (EOFError, OSError):
                self._exit()

        threading.Thread(target=loop, daemon=True).start()

    def _exit(self) -> None:
        """End the process: the gateway is gone."""
        try:
            self.before_exit()
        finally:
            os._exit(0)
