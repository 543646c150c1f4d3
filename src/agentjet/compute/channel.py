"""A channel: requests of the gateway to one process that hosts weights, and their answers. No torch.

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
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

from agentjet.errors import AgentJetError, WorkerDied
from agentjet.types import PolicyId, Sampled, SlowWork

_LENGTH = struct.Struct("<Q")


class Request(NamedTuple):
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
        self._end: WorkerDied | None = None

    @property
    def pending(self) -> Mapping[int, Pending]:
        """The requests without their last answer, by id, oldest first."""
        return self._pending

    async def ask(self, op: str, policy: PolicyId, *args: Any) -> Any:
        """Send a request about a policy; returns its answer. Raises the error of the process, or `WorkerDied`."""
        return await self.send(request := Request(op, next(self._ids), policy, args), encode(request))

    async def send(self, request: Request, message: bytes) -> Any:
        """As `ask`, for a request whose encoded `message` several processes get. The caller chooses all ids."""
        self._write(message)
        pending = self._pending[request.id] = Pending(request.op, request.policy)
        return await pending.next()

    async def sample(self, policy: PolicyId, *args: Any) -> AsyncGenerator[Sampled, None]:
        """Request a completion; yields its pieces. Closing the iterator cancels it."""
        id = next(self._ids)
        self._write(encode(Request("sample", id, policy, (id, *args))))
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
                    self._write(encode(Request("cancel", id, policy, (id,))))

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
        if not message.ends:  # Else it stays the oldest one, for the reason of the end.
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
