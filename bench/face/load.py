"""Agents and viewers on real sockets.

`python -m bench.face.load agents URL TOKEN RATE SECONDS` plays agents that begin episodes, make calls at a rate and
finish them; it prints the time and the seconds of each call as JSON. `... viewers URL TOKEN` plays tabs on the
Overview, each in a separate browser: the event stream, and what `page/stream.js` and the Overview read after events. It
reads the number of tabs from its input, a line at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from urllib.parse import urlsplit

from bench.gatewaying.wire import Connection

CALLS = 10
"""Calls of an episode."""
AGENTS = 20
AFTER = {"step": ("/status", "/steps", "/health", "/waiting"), "episode": ("/status", "/waiting", "/episodes?limit=10")}
"""Reads of the Overview after an event of a kind; any other kind: the status."""


Timed = tuple[float, float]
"""The time at which a call began, and its seconds."""


class Failed(Exception):
    """An answer that is not 200."""


async def ask(connection: Connection, method: str, path: str, token: str, body: object = None) -> tuple[bytes, float]:
    """The body and the seconds of a request."""
    reply = await connection.request(method, path, token, b"" if body is None else json.dumps(body).encode())
    if reply.status != 200:
        raise Failed(f"{method} {path}: {reply.status} {reply.body[:300]!r}")
    return reply.body, reply.done - reply.sent


async def agent(number: int, url: str, token: str, period: float, end: float, calls: list[Timed]) -> None:
    """Plays episodes until `end`, with a call in each period at a random time."""
    draw, connection = random.Random(number), Connection(url)
    due = time.perf_counter() + draw.random() * period
    name = f"agent-{number // 4}"  # The four members of a group have one client.
    for episode in itertools.count():
        if time.perf_counter() > end:
            break
        task = {"task_id": f"t{episode}", "task_set": "math", "client_id": name, "wait": 60.0}
        begun = json.loads((await ask(connection, "POST", "/swarm/v1/episodes", token, task))[0])
        messages = []
        for turn in range(CALLS):
            messages.append({"role": "user", "content": f"Table {number}, look {turn}: 17 | 4.25 | copper | 903"})
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += period * (0.5 + draw.random())
            body = {"model": begun["model"], "messages": messages}
            now = time.time()
            answer, took = await ask(connection, "POST", "/v1/chat/completions", begun["api_key"], body)
            calls.append((now, took))
            messages.append({"role": "assistant", "content": json.loads(answer)["choices"][0]["message"]["content"]})
        path = f"/swarm/v1/episodes/{begun['episode_id']}/finish"
        await ask(connection, "POST", path, token, {"reward": float(draw.random() < 0.5)})
    connection.close()


async def agents(url: str, token: str, rate: float, length: float) -> dict[str, list[Timed]]:
    calls: list[Timed] = []
    end = time.perf_counter() + length
    await asyncio.gather(*(agent(i, url, token, AGENTS / rate, end, calls) for i in range(AGENTS)))
    return {"calls": calls}


class Viewer:
    """A tab on the Overview, until it is cancelled."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token
        self._dirty: set[str] = set()
        self._woken = asyncio.Event()
        self._version = self._at = 0

    async def watch(self) -> None:
        connection = Connection(self._url)
        for path in ("/status", "/steps", "/health", "/waiting", "/episodes?limit=10", "/evaluations"):
            await self._read(connection, path)
        status = json.loads((await ask(connection, "GET", "/swarm/v1/status", self._token))[0])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(status["last_event"]))
            tasks.create_task(self._refresh(connection))

    async def _refresh(self, connection: Connection) -> None:
        try:
            while True:
                await self._woken.wait()
                self._woken.clear()
                paths, self._dirty = self._dirty, set()
                for path in sorted(paths):
                    await self._read(connection, path)
        finally:
            connection.close()

    async def _read(self, connection: Connection, path: str) -> None:
        query = [f"after={self._version}"] if path == "/steps" and self._version else []
        query += [f"at={self._at}"] if self._at else []
        asked = "&".join([path, *query]) if "?" in path else f"{path}?{'&'.join(query)}"
        body, _ = await ask(connection, "GET", f"/swarm/v1{asked}", self._token)
        if path == "/steps" and (versions := json.loads(body)["versions"]):
            self._version = versions[-1]

    async def _follow(self, after: int) -> None:
        parts = urlsplit(self._url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        head = f"GET /swarm/v1/events?form=tick&after={after} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        writer.write(f"{head}Authorization: Bearer {self._token}\r\n\r\n".encode())
        try:
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    tick = json.loads(line[6:])
                    self._at = tick["last_event"]
                    for kind in tick["kinds"]:
                        self._dirty.update(AFTER.get(kind, ("/status",)))
                    self._woken.set()
        finally:
            writer.close()
        raise Failed("the server closed the stream")


async def viewers(url: str, token: str) -> None:
    loop, tabs = asyncio.get_running_loop(), list[asyncio.Task[None]]()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        for tab in tabs:
            tab.cancel()
        for failed in await asyncio.gather(*tabs, return_exceptions=True):
            if not isinstance(failed, asyncio.CancelledError):
                raise Failed(f"a viewer ended: {failed!r}")
        tabs = [asyncio.create_task(Viewer(url, token).watch()) for _ in range(int(line))]


if __name__ == "__main__":
    kind, url, token, *rest = sys.argv[1:]
    if kind == "agents":
        print(json.dumps(asyncio.run(agents(url, token, *map(float, rest)))))
    else:
        asyncio.run(viewers(url, token))
