"""The cluster's connections: `Hub` and `Peer` are the gateway's end, `Link` is that of each other process. No torch.

A process of the cluster gets an address, a name and a secret in its environment (`Link.VARIABLES`). It connects to the
gateway; from then on the connection is its life: it ends when the connection does, and the gateway takes the end of the
connection for its death.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import BinaryIO, Self

from agentjet.compute.channel import Channel, Message, WorkerRequest, encode, requests
from agentjet.compute.cluster.handshake import MAX_HANDSHAKES, dial, listen, tune, verify_async
from agentjet.errors import ComputeError, WorkerDied

log = logging.getLogger(__name__)

UNANSWERED_SECONDS = 20.0
"""A process reads from a thread, so data that stays unanswered for so long means that its machine is gone."""


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

    def read_forever(self, deliver: Callable[[WorkerRequest], object]) -> None:
        """Deliver requests from a separate thread; end this process with the connection."""

        def loop() -> None:
            try:
                for request in requests(self._stream):
                    deliver(request)
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


class Peer(Channel):
    """A connected process. `died` is done when its connection ended, unless this end closed it."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self.name = name
        self.num_messages = 0
        """Messages received so far."""
        self.heard_at = asyncio.get_running_loop().time()
        """Time of the last one, by the event loop."""
        self.died: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        address = writer.get_extra_info("peername")
        self.host = str(address[0]) if address else ""
        """Address of its machine; '' if the connection ended at once."""
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Boundary: a message that cannot be read ends the connection."""
        reason = "ended"
        try:
            while True:
                await self.receive()
                self.num_messages += 1
                self.heard_at = asyncio.get_running_loop().time()
        except EOFError:
            pass
        except OSError as error:
            reason = f"ended: {error}"
        except Exception as error:
            log.exception("%s sent a message that cannot be read", self.name)
            reason = f"was closed, because a message could not be read: {type(error).__name__}"
        self._finish(WorkerDied(f"the connection to {self.name} {reason}"))

    def close(self) -> None:
        """Close the connection, which ends the process; its requests fail. Idempotent."""
        self._task.cancel()
        self._writer.close()
        self.end(WorkerDied(f"{self.name} was ended"))

    def _finish(self, reason: WorkerDied) -> None:
        self._writer.close()
        self.end(reason)
        if not self.died.done():
            self.died.set_result(reason)


class Hub:
    """Listens for the processes of a cluster."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """`host` is the address of this machine at which the processes reach it."""
        self._host = host
        self._secret = secrets.token_hex(32)
        self._expected: dict[str, asyncio.Future[Peer]] = {}
        self._server: asyncio.Server | None = None
        self._handshakes: dict[asyncio.Task[None], None] = {}
        """The handshakes that have not ended, oldest first."""

    async def open(self) -> None:
        """Listen on a free port. Idempotent."""
        if self._server is None:
            listener, self._address = listen(self._host)
            self._server = await asyncio.start_server(self._admit, sock=listener)

    def environment(self, name: str) -> dict[str, str]:
        """Returns the variables with which the process of that name connects."""
        return dict(zip(Link.VARIABLES, (self._address, name, self._secret), strict=True))

    def expect(self, name: str) -> asyncio.Future[Peer]:
        """Returns the future connection of a process that will be started. Any other connection is refused."""
        future = self._expected.get(name)
        if future is None or future.done():  # A caller that was cancelled while it waited has cancelled the future.
            future = self._expected[name] = asyncio.get_running_loop().create_future()
        return future

    def forget(self, name: str) -> None:
        """Expect the process no longer."""
        if (future := self._expected.pop(name, None)) is not None:
            future.cancel()

    async def close(self) -> None:
        """Stop listening; connections stay. Idempotent."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._handshakes)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for name in list(self._expected):
            self.forget(name)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Verify a connection. Boundary: a stranger can end that connection only."""
        if len(self._handshakes) >= MAX_HANDSHAKES:
            next(iter(self._handshakes)).cancel()
        task = asyncio.current_task()
        assert task is not None
        self._handshakes[task] = None
        peer: Peer | None = None
        try:
            tune(writer.get_extra_info("socket"), unanswered_seconds=UNANSWERED_SECONDS)
            name = await verify_async(reader, writer, self._secret.encode(), self._refusal)
            if (future := self._expected.pop(name, None)) is not None and not future.done():
                peer = Peer(name, reader, writer)
                future.set_result(peer)
        except (ComputeError, OSError, EOFError) as error:
            log.warning("a connection was refused: %s", error or type(error).__name__)
        finally:
            del self._handshakes[task]
            if peer is None:
                writer.close()

    def _refusal(self, name: str) -> str:
        future = self._expected.get(name)
        return "no process of that name is expected" if future is None or future.done() else ""
