"""Messages between the server and its processes: `Peer` is the server's end of a connection, `Link` that of a process.

A process gets an address, a name and a secret in its environment (`Link.VARIABLES`). It connects to the server. From
then on the connection is its life: the process ends with the connection, and the server takes the end of the connection
for its death. A replica also admits fronts (`FrontLink`), which come and go.

Messages are pickles with their length in front. A pickle can run any code, so both ends prove that they know the secret
before the first one. A stranger may send anything: it costs a small message of memory, a thread, and
`HANDSHAKE_SECONDS` at most. Messages of the handshake are small JSON objects with their length in front:
connecting end -> name, version, nonce -> proof and nonce of the listening end -> proof -> accepted, or the refusal.

A batch travels in parts, with other requests between them, so that no thread holds Python's lock for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hmac
import itertools
import json
import logging
import os
import pickle
import secrets
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, Protocol, Self, TypeVar

from agentjet import __version__
from agentjet.errors import AgentJetError, ComputeError, WorkerDied
from agentjet.processes.guardian import ProcessEnd
from agentjet.processes.progress import show_progress
from agentjet.types import PolicyId, Sampled, SlowWork

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")
_SHORT = struct.Struct("<H")
PART_BYTES = 2**18
"""Size of a part. The event loop copies one part at a time."""
SENDING = "sending"
"""Operation of a request whose parts are being sent: the process cannot work on it yet."""
HANDSHAKE_SECONDS = 10.0
MAX_HANDSHAKES = 256
"""Connections of a listener that may be in their handshake. Beyond it the oldest one is closed."""
MAX_MESSAGE_BYTES = 4096
ACCEPT_SECONDS = 0.2
"""Time from an error of `accept` to the next try."""
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""A silent connection is probed after 5 s, and ended after three probes without an answer: 11 s."""
UNANSWERED_SECONDS = 20.0
"""A process reads from a thread, so data that stays unanswered for so long means that its machine is gone."""
SERVER_UNANSWERED_SECONDS = 120.0
"""The same for a process: the server may be stopped for a while."""
REASON_SECONDS = 2.0
"""Time for a process to end by itself whose connection ended. Then it is killed."""
MAX_UNSENT_BYTES = 2**26
"""Messages to a front that may wait until it reads. Beyond them its connection ends."""


# ---- messages --------------------------------------------------------------------------------------------------------


class ProcessRequest(NamedTuple):
    """A request, perhaps about a policy. `sample` and `cancel` have the id of the completion as first argument."""

    op: str
    id: int
    policy: PolicyId | None
    args: tuple[Any, ...]


class Answer(NamedTuple):
    """The answer to the request `id`. `ends`: its failure ends the process, not a request that waits behind it."""

    id: int
    result: Any = None
    error: AgentJetError | None = None
    ends: bool = False


IDS = itertools.count((os.getpid() << 32) + 1)
"""Ids of requests, over all processes. They begin with the process id: a replica has requests of several processes."""
Message = Answer | SlowWork | list[tuple[int, Sampled]]
"""A message of a process: an answer, the progress of the present request, or pieces of completions by id."""
Send = Callable[[Message], object]
SIGN_OF_WORK = Answer(0)
"""The answer to no request. The server counts it as a message."""
FRONT_OPS = ("sample", "cancel", "score")
"""Requests that fronts may send to a replica."""
LEAVE = "leave"
"""Operation of the request that stands for the end of a front's connection."""


class Part(NamedTuple):
    """A part of a large request: some bytes of one of its contents. `content` is -1 if the request was given up."""

    id: int
    content: int
    body: bytes
    is_last: bool


def encode(message: Any) -> bytes:
    """Returns the pickle of a message with its length in front."""
    body = pickle.dumps(message)
    return _LENGTH.pack(len(body)) + body


def read(stream: BinaryIO) -> Any:
    """Returns the next message of a blocking stream; raises `EOFError` at its end."""
    return pickle.loads(_read(stream, *_LENGTH.unpack(_read(stream, _LENGTH.size))))


def _read(stream: BinaryIO, length: int) -> bytes:
    body = stream.read(length)
    if len(body) < length:
        raise EOFError
    return body


@dataclass(frozen=True, slots=True)
class LargeRequest:
    """A request with large arrays. Its contents are a pickle, then the memory of each array, which is not copied."""

    request: ProcessRequest
    contents: Sequence[bytes | memoryview]

    @staticmethod
    async def encoded(request: ProcessRequest) -> LargeRequest:
        """Encode a request in a thread."""

        def encoded() -> LargeRequest:
            arrays: list[pickle.PickleBuffer] = []
            head = pickle.dumps(request, protocol=5, buffer_callback=arrays.append)
            return LargeRequest(request, (head, *(array.raw() for array in arrays)))

        return await asyncio.to_thread(encoded)

    def parts(self) -> Iterator[bytes]:
        """Yields the encoded parts, each when it is needed."""
        last = len(self.contents) - 1
        for number, content in enumerate(self.contents):
            for start in range(0, max(1, len(content)), PART_BYTES):
                body = bytes(content[start : start + PART_BYTES])
                is_last = number == last and start + PART_BYTES >= len(content)
                yield encode(Part(self.request.id, number, body, is_last))


def requests(stream: BinaryIO) -> Iterator[ProcessRequest]:
    """Yields the requests of a blocking stream, large ones when their last part came. Raises `EOFError` at its end."""
    incomplete: dict[int, list[bytearray]] = {}
    while True:
        message = read(stream)
        if not isinstance(message, Part):
            yield message
            continue
        if message.content < 0:
            incomplete.pop(message.id, None)  # It may have been given up after its last part.
            continue
        contents = incomplete.setdefault(message.id, [])
        if message.content == len(contents):
            contents.append(bytearray())
        contents[message.content] += message.body
        if message.is_last:
            del incomplete[message.id]
            yield pickle.loads(contents[0], buffers=contents[1:])


# ---- the server's end ------------------------------------------------------------------------------------------------


Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """An unbounded queue with one reader, for the pieces of completions. `asyncio.Queue` takes three times as long."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._arrival: asyncio.Future[None] | None = None
        """Done when an item arrives; None unless the reader waits."""

    def put(self, item: Item) -> None:
        self._items.append(item)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def get(self) -> Item:
        """Returns the oldest item, and waits for one."""
        while not self._items:
            self._arrival = asyncio.get_running_loop().create_future()
            try:
                await self._arrival
            finally:
                self._arrival = None
        return self._items.popleft()


@dataclass(frozen=True, slots=True)
class Pending:
    """A request without its last answer. It stays until that comes, also if the caller of `ask` was cancelled."""

    op: str
    policy: PolicyId | None
    answers: Mailbox[Any] = field(default_factory=Mailbox)

    async def next(self) -> Any:
        """Returns the next answer, or raises it."""
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


class Process(Protocol):
    """A process from its start on."""

    @property
    def ended(self) -> asyncio.Future[ProcessEnd]:
        """Done when the process has ended."""
        ...

    @property
    def pid(self) -> int:
        """The process of this machine whose descendants it is, or itself; 0 on another machine."""
        ...

    @property
    def place(self) -> str:
        """The machine and the process id; "" if they are unknown."""
        ...

    @property
    def log_path(self) -> Path: ...

    async def stop(self) -> None:
        """Kill the process with its children and wait for its end. Idempotent."""
        ...


class Peer:
    """A connected process. `died` is done when its connection ended, unless this end closed it."""

    def __init__(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: Process | None = None
    ) -> None:
        """`process` has the connection; None if it ends with the connection, and nothing waits for its end."""
        self.name = name
        self.process = process
        self.address = ""
        """Address at which the process listens for fronts, once it is loaded; "" if it does not."""
        self.num_messages = 0
        """Messages received so far."""
        self.heard_at = asyncio.get_running_loop().time()
        """Time of the last one, by the event loop."""
        self.died: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        self.work: SlowWork | None = None
        """Progress of the request that the process works on, if the process reported any."""
        self.fatal: AgentJetError | None = None
        """The failure that the process sent before it ended."""
        self._reader = reader
        self._writer = writer
        self.unanswered: tuple[Pending, ...] = ()
        """The requests that the end of the connection failed, oldest first."""
        self._pending: dict[int, Pending] = {}
        self._end: WorkerDied | None = None
        self._task = asyncio.create_task(self._read())

    @property
    def pending(self) -> Mapping[int, Pending]:
        """The requests without their last answer, by id, oldest first."""
        return self._pending

    async def ask(self, op: str, policy: PolicyId | None = None, *args: Any) -> Any:
        """Send a request; returns its answer. Raises the error of the process, or `WorkerDied`."""
        return await self.send(request := ProcessRequest(op, next(IDS), policy, args), encode(request))

    async def send(self, request: ProcessRequest, message: bytes) -> Any:
        """As `ask`, for a request whose encoded `message` several processes get. The caller chooses all ids."""
        self._write(message)
        pending = self._pending[request.id] = Pending(request.op, request.policy)
        return await pending.next()

    async def send_large(self, large: LargeRequest) -> Any:
        """As `send`, in parts."""
        op, id, policy, _ = large.request
        sending = self._pending[id] = Pending(SENDING, policy)
        try:
            for part in large.parts():
                self._write(part)
                await self._writer.drain()
        except OSError:  # The connection ended, and `_read` has not seen it yet.
            return await sending.next()
        except BaseException:
            self._pending.pop(id, None)
            with contextlib.suppress(WorkerDied):
                self._write(encode(Part(id, -1, b"", True)))
            raise
        if self._pending.pop(id, None) is not None:  # The answer may be here before the last `drain` returns.
            self._pending[id] = Pending(op, policy, sending.answers)
        return await sending.next()

    async def sample(self, policy: PolicyId, *args: Any) -> AsyncGenerator[Sampled, None]:
        """Request a completion; yields its pieces. Closing the iterator cancels it."""
        id = next(IDS)
        self._write(encode(ProcessRequest("sample", id, policy, (id, *args))))
        pending = self._pending[id] = Pending("sample", policy)
        try:
            while True:
                piece: Sampled = await pending.next()
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            if self._pending.pop(id, None) is not None:
                with contextlib.suppress(WorkerDied):
                    self._write(encode(ProcessRequest("cancel", id, policy, (id,))))

    def close(self) -> None:
        """Close the connection, which ends the process; its requests fail. Idempotent."""
        self._task.cancel()
        self._finish(WorkerDied(f"{self.name} was ended"))

    async def stop(self) -> str:
        """Close the connection and wait for the end of the process; returns its reason, or "". Idempotent.

        A call that is cancelled waits for that end, too.
        """
        died = self.died.done()
        self.close()
        if self.process is None:
            return ""
        await uninterrupted(self._end_process(self.process, died))
        return self.process.ended.result().reason

    @staticmethod
    async def _end_process(process: Process, died: bool) -> None:
        if died:  # It is ending by itself.
            await asyncio.wait([process.ended], timeout=REASON_SECONDS)
        await process.stop()

    async def _read(self) -> None:
        """Boundary: a message that cannot be read ends the connection."""
        reason = "ended"
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                self._receive(pickle.loads(await self._reader.readexactly(length)))
                self.num_messages += 1
                self.heard_at = asyncio.get_running_loop().time()
        except EOFError:
            pass
        except OSError as error:
            reason = f"ended: {error}"
        except Exception as error:
            log.exception("%s sent a message that cannot be read", self.name)
            reason = f"was closed, because a message could not be read: {type(error).__name__}"
        died = WorkerDied(f"the connection to {self.name} {reason}")
        self._finish(died)
        self.died.set_result(died)

    def _receive(self, message: Message) -> None:
        """Hand a message to the callers that wait for it."""
        if isinstance(message, SlowWork):
            self.work = message
            return
        if isinstance(message, list):
            for id, piece in message:
                if (pending := self._pending.get(id)) is not None:
                    pending.answers.put(piece)
                    if piece.finish_reason is not None:
                        del self._pending[id]
            return
        if message.id == SIGN_OF_WORK.id:
            return
        self.work = None
        if (pending := self._pending.get(message.id)) is None:
            return
        if message.ends:  # It stays the oldest one, for the reason of the end.
            self.fatal = message.error
        else:
            del self._pending[message.id]
        pending.answers.put(message.result if message.error is None else message.error)

    def _finish(self, reason: WorkerDied) -> None:
        """Fail all pending and later requests with the reason. Idempotent."""
        self._writer.close()
        if self._end is not None:
            return
        self._end, self.work, self.unanswered = reason, None, tuple(self._pending.values())
        for pending in self.unanswered:
            pending.answers.put(copy.copy(reason))
        self._pending.clear()

    def _write(self, message: bytes) -> None:
        if self._end is not None:
            raise copy.copy(self._end)  # Several callers raise it.
        self._writer.write(message)


async def uninterrupted(ending: Coroutine[Any, Any, None]) -> None:
    """Await this to its end, also if the caller is cancelled then: what it ends is gone when this returns."""
    task = asyncio.create_task(ending)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):  # Its caller may be cancelled again.
                await asyncio.wait([task])
        raise


# ---- the end of a process --------------------------------------------------------------------------------------------


class Link:
    """The connection of this process to the server."""

    VARIABLES = "AGENTJET_LINK", "AGENTJET_NAME", "AGENTJET_SECRET"
    SIGNS = "AGENTJET_SIGNS"
    """Variable with the seconds between two signs of work. Without it, the process sends none."""

    def __init__(self, connection: socket.socket, name: str, secret: bytes) -> None:
        self.name = name
        self.secret = secret
        """For connections to other processes of the server."""
        self._connection = connection
        self._stream: BinaryIO = connection.makefile("rb")
        self._writing = threading.Lock()
        self.before_exit: Callable[[], object] = lambda: None
        """Called before the process ends with the connection. From any thread."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Connect to the server. Raises `OSError`, and `ComputeError` for a refusal."""
        address, name, secret = (environment[variable] for variable in cls.VARIABLES)
        # The server may be stopped for a while, and ends what did not connect.
        connection = dial(address, name, secret.encode(), patience=SERVER_UNANSWERED_SECONDS)
        link = cls(connection, name, secret.encode())
        if seconds := environment.get(cls.SIGNS):
            threading.Thread(
                target=show_progress, args=(lambda: link.send(SIGN_OF_WORK), float(seconds)), daemon=True
            ).start()
        return link

    @classmethod
    def of_program(cls) -> Self:
        """As `from_environment`, for a program that does nothing else: logs go to standard error."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the server decides.
        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s"
        )
        return cls.from_environment()

    @property
    def local_host(self) -> str:
        """The address of this machine as the server sees it. Other machines of the cluster reach it there, too."""
        return str(self._connection.getsockname()[0])

    def send(self, message: Message) -> None:
        """Send a message, from any thread. A server that is gone ends this process."""
        with self._writing:
            try:
                self._connection.sendall(encode(message))
            except OSError:
                self.exit(0)

    def read_forever(self, deliver: Callable[[ProcessRequest], object]) -> None:
        """Deliver requests from a separate thread; end this process with the connection."""

        def loop() -> None:
            try:
                for request in requests(self._stream):
                    deliver(request)
            except (EOFError, OSError):
                self._lost(0)
            except Exception:  # Boundary: a request that cannot be read, such as one with a class that is missing here.
                traceback.print_exc()
                self._lost(1)

        threading.Thread(target=loop, daemon=True).start()

    async def requests(self) -> AsyncIterator[ProcessRequest]:
        """Yields the requests in an event loop."""
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[ProcessRequest]()
        self.read_forever(lambda request: loop.call_soon_threadsafe(inbox.put_nowait, request))
        while True:
            yield await inbox.get()

    def exit(self, code: int) -> None:
        """End the process at once."""
        try:
            self.before_exit()
        finally:
            os._exit(code)

    def _lost(self, code: int) -> None:
        """Called in the reading thread when the connection ended."""
        self.exit(code)


Deliver = Callable[[Link, ProcessRequest], object]
"""Takes a request and the connection on which it must be answered."""


class FrontLink(Link):
    """The connection of a front to this process, whose end ends no process. A front that reads nothing delays none."""

    def __init__(self, connection: socket.socket, name: str, secret: bytes, deliver: Deliver) -> None:
        """Delivers the requests of the front, and `LEAVE` after the last one, from a separate thread."""
        super().__init__(connection, name, secret)
        self._deliver = deliver
        self._unsent = bytearray()
        self._is_sending = False
        """True while a thread sends what the front did not read at once."""
        self.read_forever(self._deliver_allowed)

    def send(self, message: Message) -> None:
        """Send a message, from any thread. Does not wait for the front. A front that is gone gets nothing."""
        with self._writing:
            self._unsent += encode(message)
            if self._is_sending:
                if len(self._unsent) > MAX_UNSENT_BYTES:
                    _shut(self._connection)
                return
            try:
                del self._unsent[: self._connection.send(self._unsent, socket.MSG_DONTWAIT)]
            except BlockingIOError:
                pass
            except OSError:
                self._unsent.clear()
            if self._unsent:
                self._is_sending = True
                try:
                    threading.Thread(target=self._send_rest, daemon=True).start()
                except RuntimeError:  # There are too many threads. The front connects again.
                    _shut(self._connection)

    def _send_rest(self) -> None:
        while True:
            with self._writing:
                part = bytes(self._unsent[:PART_BYTES])
                if not part:
                    self._is_sending = False
                    return
            try:
                num_sent = self._connection.send(part)
            except OSError:
                return  # The rest stays, and nothing further is sent.
            with self._writing:
                del self._unsent[:num_sent]

    def _deliver_allowed(self, request: ProcessRequest) -> None:
        if request.op in FRONT_OPS:
            self._deliver(self, request)
        else:
            refusal = f"{self.name} may not request {request.op!r}: only the server may, and a front {FRONT_OPS}"
            self.send(Answer(request.id, error=ComputeError(refusal)))

    def _lost(self, code: int) -> None:
        _shut(self._connection)
        self._stream.close()
        self._connection.close()
        self._deliver(self, ProcessRequest(LEAVE, 0, None, ()))


def admit_fronts(link: Link, deliver: Deliver) -> Listener:
    """Listen for fronts at the address of this machine that the server sees. See `FrontLink`. Raises `OSError`."""

    def take(name: str, connection: socket.socket) -> None:
        tune(connection, unanswered_seconds=UNANSWERED_SECONDS)
        FrontLink(connection, name, link.secret, deliver)

    return Listener(link.local_host, link.secret, lambda name: partial(take, name))


@contextlib.contextmanager
def answering(
    request: ProcessRequest,
    send: Callable[[Answer], object],
    *,
    ends: Callable[[Exception], bool] = lambda error: False,
    fatal: type[ComputeError] = ComputeError,
) -> Iterator[None]:
    """Boundary of every request: a failure becomes an answer.

    `ends` is asked for other errors than `AgentJetError`. If it is true, the error is answered as `fatal`, and raised.
    """
    try:
        yield
    except AgentJetError as error:
        send(Answer(request.id, error=error))
    except Exception as error:
        traceback.print_exc()
        does_end = ends(error)
        kind = fatal if does_end else ComputeError
        failure = kind(f"{request.op} failed: {type(error).__name__}: {error}")
        send(Answer(request.id, error=failure, ends=does_end))
        if does_end:
            raise


# ---- connections -----------------------------------------------------------------------------------------------------


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


Claim = Callable[[str], Callable[[socket.socket], object]]
"""Returns the function that takes the connection of the process of that name. Raises `ComputeError` to refuse it."""


class Listener:
    """Admits connections that prove the secret. Strangers delay no other connection."""

    def __init__(self, host: str, secret: bytes, claim: Claim) -> None:
        """Listens on a free port of `host`. `claim` is called in the thread of a connection. Raises `OSError`."""
        self._secret = secret
        self._claim = claim
        self._handshakes: dict[socket.socket, None] = {}
        """Connections that have not proven the secret, oldest first."""
        self._lock = threading.Lock()
        """Guards the handshakes."""
        self._is_closed = False
        self._listener, self.address = listen(host)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening, and end the handshakes. Connections that were admitted stay. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # A closed listener alone would not end `accept`.
        self._listener.close()
        with self._lock:
            for connection in self._handshakes:
                _shut(connection)

    def _accept(self) -> None:
        """Accept connections until `close`. An error, such as too many open files, delays them."""
        connection: socket.socket | None = None
        while not self._is_closed:
            try:
                connection = connection or self._listener.accept()[0]
                with self._lock:
                    self._handshakes[connection] = None
                    if len(self._handshakes) > MAX_HANDSHAKES:  # One with the secret takes milliseconds.
                        _shut(oldest := next(iter(self._handshakes)))
                        del self._handshakes[oldest]
                threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
                connection = None
            except (OSError, RuntimeError) as error:  # RuntimeError: there are too many threads.
                if not self._is_closed:
                    log.warning("connections wait, because none can be accepted: %s", error)
                    time.sleep(ACCEPT_SECONDS)

    def _admit(self, connection: socket.socket) -> None:
        """Verify a connection and hand it over. Boundary: a stranger, or a malformed request, ends its connection."""
        try:
            try:
                take = verify(connection, self._secret, self._claim)
            finally:
                with self._lock:
                    self._handshakes.pop(connection, None)
            take(connection)
        except Exception as error:
            connection.close()
            if not self._is_closed:
                log.warning("a connection was refused: %s", error or type(error).__name__)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def dial(address: str, name: str, secret: bytes, *, patience: float = HANDSHAKE_SECONDS) -> socket.socket:
    """Returns a proven connection to `HOST:PORT`. The other end has `patience` seconds for the handshake.

    Raises `OSError`, and `ComputeError` for a refusal.
    """
    connection = socket.create_connection(host_and_port(address), timeout=HANDSHAKE_SECONDS)
    try:
        tune(connection, unanswered_seconds=SERVER_UNANSWERED_SECONDS)
        deadline, nonce = time.monotonic() + patience, secrets.token_hex(16)
        answer = _request(connection, deadline, name, {"name": name, "version": __version__, "nonce": nonce})
        if not _is_proof(answer.get("proof"), secret, "server", nonce):
            raise ComputeError(f"{name}: the other end does not know the secret")
        _request(connection, deadline, name, {"proof": _proof(secret, "client", str(answer.get("nonce")))})
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def _request(connection: socket.socket, deadline: float, name: str, body: dict[str, str]) -> dict[str, Any]:
    """Send a message of the handshake; returns the answer. Raises `ComputeError` for a refusal."""
    _send_short(connection, body)
    answer = _receive_short(connection, deadline)
    if "refused" in answer:
        raise ComputeError(f"{name} was refused: {answer['refused']}")
    return answer


def verify(connection: socket.socket, secret: bytes, claim: Claim) -> Callable[[socket.socket], object]:
    """Do the handshake as the process that listens; returns the result of `claim` for the name of the other one.

    Raises `ComputeError` for a refusal, `OSError` for a connection that ends or takes too long.
    """
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    try:
        hello = _receive_short(connection, deadline)
        name, nonce = hello.get("name"), secrets.token_hex(16)
        if hello.get("version") != __version__:
            raise ComputeError(
                f"{name!r} has AgentJet {hello.get('version')!r} and the gateway has {__version__!r}: "
                "install the gateway's version where it runs"
            )
        _send_short(connection, {"proof": _proof(secret, "server", str(hello.get("nonce"))), "nonce": nonce})
        if not _is_proof(_receive_short(connection, deadline).get("proof"), secret, "client", nonce):
            raise ComputeError(f"{name!r} does not know the secret")
        take = claim(str(name))
    except ComputeError as error:
        with contextlib.suppress(OSError):
            _send_short(connection, {"refused": str(error)})
        raise
    _send_short(connection, {"accepted": str(name)})
    connection.settimeout(None)
    return take


def _proof(secret: bytes, side: str, nonce: str) -> str:
    return hmac.digest(secret, f"{side} {nonce}".encode(errors="replace"), "sha256").hex()


def _is_proof(value: object, secret: bytes, side: str, nonce: str) -> bool:
    return hmac.compare_digest(str(value).encode(errors="replace"), _proof(secret, side, nonce).encode())


def _send_short(connection: socket.socket, body: dict[str, str]) -> None:
    message = json.dumps(body).encode()
    connection.sendall(_SHORT.pack(len(message)) + message)


def _receive_short(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Returns a message of the handshake. Raises `ComputeError` for anything else."""
    (length,) = _SHORT.unpack(_exactly(connection, _SHORT.size, deadline))
    body = None
    with contextlib.suppress(ValueError, RecursionError):
        body = json.loads(_exactly(connection, length, deadline)) if length <= MAX_MESSAGE_BYTES else None
    if not isinstance(body, dict):
        raise ComputeError("it did not begin with the handshake")
    return body


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
