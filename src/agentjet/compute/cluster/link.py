"""The process's end of its connection to the gateway. No torch.

A process of the cluster gets an address, a name and a secret in its environment (`Link.VARIABLES`). It connects to the
gateway; from then on the connection is its life: it ends when the connection does, and the gateway takes the end of the
connection for its death.
"""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import BinaryIO, Self

from agentjet.compute.channel import Message, Request, encode, read
from agentjet.compute.cluster.handshake import dial


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
            except Exception:  # Boundary: a message that cannot be read.
                traceback.print_exc()
                self._exit(1)

        threading.Thread(target=loop, daemon=True).start()

    def _exit(self, code: int = 0) -> None:
        """End the process: the gateway is gone."""
        try:
            self.before_exit()
        finally:
            os._exit(code)
