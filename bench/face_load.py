"""Agents on real sockets: `python -m bench.face_load URL TOKEN RATE SECONDS` plays episodes with calls at a rate."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from typing import Any

from bench.wire import Connection

RATE = 100.0  # Calls a second of the agents
LOAD = (sys.executable, "-m", "bench.face_load")
CALLS = 10  # Calls of an episode
AGENTS = 20


async def ask(connection: Connection, path: str, token: str, body: object) -> Any:
    """The answer to a POST. Raises `WrongAnswer`."""
    return (await connection.request("POST", path, token, body)).json()


async def agent(number: int, url: str, token: str, period: float, end: float) -> None:
    """Plays episodes until `end`, with a call in each period at a random time."""
    draw, connection = random.Random(number), Connection(url)
    due = time.perf_counter() + draw.random() * period
    name = f"agent-{number // 4}"  # The four members of a group have one client.
    for episode in itertools.count():
        if time.perf_counter() > end:
            break
        task = {"task_id": f"t{episode}", "task_set": "math", "client_id": name, "wait": 60.0}
        begun = await ask(connection, "/swarm/v1/episodes", token, task)
        messages = []
        for turn in range(CALLS):
            messages.append({"role": "user", "content": f"Table {number}, look {turn}: 17 | 4.25 | copper | 903"})
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += period * (0.5 + draw.random())
            body = {"model": begun["model"], "messages": messages}
            answer = await ask(connection, "/v1/chat/completions", begun["api_key"], body)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        path = f"/swarm/v1/episodes/{begun['episode_id']}/finish"
        await ask(connection, path, token, {"reward": float(draw.random() < 0.5)})
    connection.close()


async def agents(url: str, token: str, rate: float, length: float) -> None:
    end = time.perf_counter() + length
    await asyncio.gather(*(agent(i, url, token, AGENTS / rate, end) for i in range(AGENTS)))


if __name__ == "__main__":
    asyncio.run(agents(*sys.argv[1:3], *map(float, sys.argv[3:5])))
