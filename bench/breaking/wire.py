"""The network between clients and server, on loopback: loses requests and answers, sends them twice, closes
connections. Fronts are behind the same port, at `/f0`, `/f1` and so on: a proxy that does not remove the prefix.

One request a connection: a header asks the server for that, so every answer ends with the connection. The answers to
each `Idempotency-Key` are kept, since one key must have one effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import defaultdict
from dataclasses import dataclass, field

from agentjet.types import DEFAULT_RUN
from bench.breaking.plan import Fault

PATHS = {
    "begin": re.compile(rb"POST (?:/runs/(\w+))?/swarm/v1/episodes "),
    "finish": re.compile(rb"POST (?:/runs/\w+)?/swarm/v1/episodes/[^/ ]+/finish "),
    "abort": re.compile(rb"POST (?:/runs/\w+)?/swarm/v1/episodes/[^/ ]+/abort "),
    "chat": re.compile(rb"POST (?:/f\d+)?(?:/runs/\w+)?/v1/chat/completions "),
}
FRONT = re.compile(rb"[A-Z]+ /f(\d+)/")
KEY = re.compile(rb"\r\nidempotency-key: *(\S+)", re.IGNORECASE)
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CONNECTION = re.compile(rb"\r\nconnection:[^\r]*", re.IGNORECASE)
WIDE = b'"n":8'  # In the body of a request for several completions: some are recorded well before the last
STREAM = b'"stream":true'
SEEN = "seen"
"""Kind of an order that does no harm: `done` is set when such a request comes, and `front` is its front."""


@dataclass(slots=True)
class Order:
    """The next request of that kind meets this fault."""

    fault: Fault
    skip: int
    done: asyncio.Event = field(default_factory=asyncio.Event)
    front: int = -1


class Wire:
    """Listens on `port` for clients; the server is at `server_port`, when it is there at all, and its fronts follow."""

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self.answers: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        """Episode ids that were answered to a `begin`, by its run and its key."""
        self.server_port = server_port
        self._orders: list[Order] = []
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**20)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def order(self, fault: Fault) -> Order:
        """Orders a fault. Wait for `done` of the order; `cancel` it if that takes too long."""
        order = Order(fault, fault.skip)
        self._orders.append(order)
        return order

    def cancel(self, order: Order) -> None:
        if order in self._orders:
            self._orders.remove(order)

    def _fault(self, request: bytes) -> Order | None:
        """The order that this request meets, if any."""
        for order in self._orders:
            meant = PATHS["chat" if order.fault.at == "stream" else order.fault.at].match(request) is not None
            if order.fault.at == "stream":
                meant = meant and STREAM in request
            if order.fault.kind == "hung up" and order.fault.at == "chat":
                meant = meant and WIDE in request
            if not meant:
                continue
            order.skip -= 1
            if order.skip < 0:
                self._orders.remove(order)
                if order.fault.kind == SEEN:
                    order.front = _front(request)
                    order.done.set()
                return order
        return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        order = None
        try:
            request = await self._read(reader)
            order = self._fault(request)
            await self._forward(request, order, reader, writer)
            if order is not None:
                order.done.set()
        except (OSError, asyncio.IncompleteReadError):
            # The server is down, or the client gone: the other side sees a closed connection.
            if order is not None and not order.done.is_set():
                self._orders.append(order)
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        length = LENGTH.search(head)
        body = await reader.readexactly(int(length[1])) if length else b""
        return CONNECTION.sub(b"", head[:-2]) + b"Connection: close\r\n\r\n" + body

    async def _forward(
        self, request: bytes, order: Order | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        kind = order.fault.kind if order is not None else ""
        if kind == "request lost":
            return
        if kind == "request twice":
            first, answer = await asyncio.gather(self._ask(request), self._ask(request))
            writer.write(answer or first)
        elif kind == "answer lost":
            await self._ask(request)
            return
        elif kind == "answer cut":
            answer = await self._ask(request)
            writer.write(answer[: len(answer) * 2 // 3])
        elif kind == "hung up" and order is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ask(request), 0.02 + order.fault.amount)
            return
        else:
            await self._relay(request, reader, writer)
        await writer.drain()

    async def _ask(self, request: bytes) -> bytes:
        """The whole answer; hangs up when cancelled."""
        upstream, downstream = await asyncio.open_connection("127.0.0.1", self.server_port + 1 + _front(request))
        try:
            downstream.write(request)
            answer = await upstream.read(-1)
        finally:
            downstream.close()
        self._note(request, answer)
        return answer

    async def _relay(self, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """As it comes, so that streams stream; a client that hangs up is felt by the server."""
        upstream, downstream = await asyncio.open_connection("127.0.0.1", self.server_port + 1 + _front(request))
        gone = asyncio.create_task(reader.read(1))
        answer = b""
        try:
            downstream.write(request)
            while True:
                more = asyncio.create_task(upstream.read(65536))
                await asyncio.wait([more, gone], return_when=asyncio.FIRST_COMPLETED)
                if not more.done():
                    more.cancel()
                    return
                if not (piece := more.result()):
                    break
                answer += piece
                writer.write(piece)
            self._note(request, answer)
        finally:
            gone.cancel()
            downstream.close()

    def _note(self, request: bytes, answer: bytes) -> None:
        key, begin = KEY.search(request), PATHS["begin"].match(request)
        if key and begin and answer.startswith(b"HTTP/1.1 200"):
            run = begin[1].decode() if begin[1] else DEFAULT_RUN
            with contextlib.suppress(ValueError):  # Cut off by a server that died.
                self.answers[run][key[1].decode()].add(json.loads(answer.partition(b"\r\n\r\n")[2])["episode_id"])


def _front(request: bytes) -> int:
    """The front of a request; -1 for the server."""
    match = FRONT.match(request)
    return int(match[1]) if match else -1
