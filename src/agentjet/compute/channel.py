"""A channel: requests of the gateway to one process that hosts weights, and their answers. No torch.

A batch travels in parts, with other requests between them, so that no thread holds Python's lock for long.
Messages are pickles with their length in front. The pipe or connection is private to the two processes: a connection
over TCP proves its secret before the first pickle (`cluster.hub`).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import pickle
import struct
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, Self

from agentjet.errors import AgentJetError, WorkerDied
from agentjet.types import PolicyId, Sampled, SlowWork

_LENGTH = struct.Struct("<Q")
PART_BYTES = 2**18
"""Size of a part. The event loop copies one part at a time."""
SENDING = "sending"
"""Operation of a request whose parts are being sent: the process cannot work on it yet."""


class WorkerRequest(NamedTuple):
    """A request about a policy. `sample` and `cancel` have the id of the completion as first argument."""

    op: str
    id: int
    policy: PolicyId
    args: tuple[Any, ...]


class Answer(NamedTuple):
    """The answer to the request `id`. `ends`: its failure ends the process, not a request that waits behind it."""

    id: int
    result: Any = None
    error: AgentJetError | None = None
    ends: bool = False


Message = Answer | SlowWork | list[tuple[int, Sampled]]
"""A message of the process: an answer, the progress of the present request, or pieces of completions by id."""


def encode(message: Any) -> bytes:
    """Returns the pickle of a message with its length in front."""
    body = pickle.dumps(message)
    return _LENGTH.pack(len(body)) + body


def read(stream: BinaryIO) -> Any:
    """Returns the next message of a blocking stream; raises `EOFError` at its end."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(header)
    body = stream.read(length)
    if len(body) < length:
        raise EOFError
    return pickle.loads(body)


class Part(NamedTuple):
    """A part of a large request: some bytes of one of its contents. `content` is -1 if the request was given up."""

    id: int
    content: int
    body: bytes
    is_last: bool


@dataclass(frozen=True, slots=True)
class LargeRequest:
    """A request with large arrays. Its contents are a pickle, then the memory of each array, which is not copied."""

    request: WorkerRequest
    contents: Sequence[bytes | memoryview]

    @classmethod
    async def encoded(cls, request: WorkerRequest) -> Self:
        """Encode a request in a thread."""
        return await asyncio.to_thread(cls._encoded, request)

    @classmethod
    def _encoded(cls, request: WorkerRequest) -> Self:
        arrays: list[pickle.PickleBuffer] = []
        head = pickle.dumps(request, protocol=5, buffer_callback=arrays.append)
        return cls(request, (head, *(array.raw() for array in arrays)))

    def parts(self) -> Iterator[bytes]:
        """Yields the encoded parts, each when it is needed."""
        last = len(self.contents) - 1
        for number, content in enumerate(self.contents):
            for start in range(0, max(1, len(content)), PART_BYTES):
                body = bytes(content[start : start + PART_BYTES])
                is_last = number == last and start + PART_BYTES >= len(content)
                yield encode(Part(self.request.id, number, body, is_last))


def requests(stream: BinaryIO) -> Iterator[WorkerRequest]:
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


async def read_async(reader: asyncio.StreamReader) -> Any:
    """Returns the next message; raises `asyncio.IncompleteReadError` at the end."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


@dataclass(frozen=True, slots=True)
class Pending:
    """A request without its last answer. It stays until that comes, also if the caller of `ask` was cancelled."""

    op: str
    policy: PolicyId
    answers: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    async def next(self) -> Any:
        """Returns the next answer, or raises it."""
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


class Channel:
    """The gateway's end. The owner of the process calls `receive` until it raises, then `end`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self.work: SlowWork | None = None
        """Progress of the request that the process works on, if the process reported any."""
        self.fatal: AgentJetError | None = None
        """The failure that the process sent before it ended."""
        self._end: WorkerDied | None = None

    @property
    def pending(self) -> Mapping[int, Pending]:
        """The requests without their last answer, by id, oldest first."""
        return self._pending

    async def ask(self, op: str, policy: PolicyId, *args: Any) -> Any:
        """Send a request about a policy; returns its answer. Raises the error of the process, or `WorkerDied`."""
        return await self.send(request := WorkerRequest(op, next(self._ids), policy, args), encode(request))

    async def send(self, request: WorkerRequest, message: bytes) -> Any:
        """As `ask`, for a request whose encoded `message` several processes get. The caller chooses all ids."""
        self._write(message)
        pending = self._pending[request.id] = Pending(request.op, request.policy)
        return await pending.next()

    async def ask_large(self, op: str, policy: PolicyId, *args: Any) -> Any:
        """As `ask`, for arguments with large arrays."""
        return await self.send_large(await LargeRequest.encoded(WorkerRequest(op, next(self._ids), policy, args)))

    async def send_large(self, large: LargeRequest) -> Any:
        """As `send`, in parts."""
        op, id, policy, _ = large.request
        sending = self._pending[id] = Pending(SENDING, policy)
        try:
            for part in large.parts():
                self._write(part)
                with contextlib.suppress(ConnectionError):  # The next part raises the reason of the end.
                    await self._writer.drain()
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
        id = next(self._ids)
        self._write(encode(WorkerRequest("sample", id, policy, (id, *args))))
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
                    self._write(encode(WorkerRequest("cancel", id, policy, (id,))))

    async def receive(self) -> Pending | None:
        """Read one message and hand its answers to their callers; returns the request that succeeded, if one did.

        Raises `asyncio.IncompleteReadError` or `ConnectionError` at the end of the process.
        """
        message: Message = await read_async(self._reader)
        if isinstance(message, SlowWork):
            self.work = message
            return None
        if isinstance(message, list):
            for id, piece in message:
                if (pending := self._pending.get(id)) is not None:
                    pending.answers.put_nowait(piece)
                    if piece.finish_reason is not None:
                        del self._pending[id]
            return None
        self.work = None
        if (pending := self._pending.get(message.id)) is None:
            return None
        if message.ends:  # It stays the oldest one, for the reason of the end.
            self.fatal = message.error
        else:
            del self._pending[message.id]
        pending.answers.put_nowait(message.result if message.error is None else message.error)
        return pending if message.error is None else None

    def end(self, reason: WorkerDied) -> None:
        """Fail all pending and later requests with the reason."""
        self._end, self.work = reason, None
        for pending in self._pending.values():
            pending.answers.put_nowait(copy.copy(reason))
        self._pending.clear()

    def _write(self, message: bytes) -> None:
        if self._end is not None:
            raise copy.copy(self._end)  # Several callers raise it.
        if self._writer.is_closing():
            raise WorkerDied("the worker process is not running")
        self._writer.write(message)
