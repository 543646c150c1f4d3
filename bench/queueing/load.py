"""The agents, as a process: `python -m bench.queueing.load PLAN`. Prints the measured `Load` and the server's counters.

Each agent plays one episode of the workload after another. The measurement begins after as many seconds as it lasts.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.gatewaying.load import content, streamed
from bench.gatewaying.report import percentile
from bench.gatewaying.scripted import MODEL
from bench.gatewaying.wire import Connection
from bench.queueing.simulation import Load
from bench.queueing.workload import LongTail, Turn, Workload

AT_ONCE = 64
"""Episodes that are begun at the same time before the measurement."""


@dataclass(frozen=True, slots=True)
class Play:
    """The agents of a load, and the seconds of its measurement.

    `hold = "begin"`: the agents begin their episodes and then do nothing. `hold = "call"`: each then sends one call.
    """

    url: str
    data_dir: str
    agents: int
    workload: Workload
    seconds: float
    group_size: int = 8
    hold: Literal["", "begin", "call"] = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Play:
        values = json.loads(text)
        work: dict[str, Any] = {
            name: LongTail(**value) if isinstance(value, dict) else value
            for name, value in values.pop("workload").items()
        }
        return cls(**values, workload=Workload(**work))


@dataclass(slots=True)
class Tally:
    answered: list[tuple[float, float, Turn, int]] = field(default_factory=list)
    """Time of the answer, seconds of the call, the turn, and the length of its prompt."""
    ended: list[float] = field(default_factory=list)
    """Times at which episodes finished."""
    live: int = 0


class Agents:
    """All agents of a load."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.tally = Tally()
        self._token = (Path(play.data_dir) / "token").read_text().strip()
        self._words: list[str] = json.loads((Path(play.data_dir) / "words.json").read_text())
        self._numbers = itertools.count()
        self._begun = 0

    def text(self, tokens: int) -> str:
        return "".join(self._words[number % len(self._words)] for number in range(tokens))

    async def run(self) -> dict[str, Any]:
        play, gate = self.play, asyncio.Event()
        room = asyncio.Semaphore(AT_ONCE)
        works = [asyncio.create_task(self._agent(gate, room)) for _ in range(play.agents)]
        while self.tally.live < play.agents:
            await asyncio.sleep(0.05)
            for work in works:
                if work.done():
                    work.result()
        gc.freeze()
        idle = await self._counters()
        await asyncio.sleep(play.seconds if play.hold else 0.0)
        still = await self._counters()
        if play.hold != "begin":
            gate.set()
        await asyncio.sleep(play.seconds)
        before, began = await self._counters(), time.perf_counter()
        await asyncio.sleep(play.seconds)
        after, ended = await self._counters(), time.perf_counter()
        for work in works:
            if work.done():
                work.result()  # Only a failure ends an agent.
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        measured = [one for one in self.tally.answered if began <= one[0] < ended]
        seconds, taken = ended - began, [one[1] for one in measured]
        load = Load(
            calls_per_s=len(measured) / seconds,
            tokens_per_s=sum(one[2].completion for one in measured) / seconds,
            episodes_per_s=sum(began <= end < ended for end in self.tally.ended) / seconds,
            call_s=sum(taken) / max(1, len(taken)),
            call_p50=percentile(taken, 50),
            call_p95=percentile(taken, 95),
            gateway=(after["cpu_s"] - before["cpu_s"]) / seconds,
        )
        prompts = sum(one[3] for one in measured)
        context = sum(one[2].context for one in measured)
        counters = {"idle": idle, "still": still, "before": before, "after": after}
        return {"load": asdict(load), "prompts": prompts, "context": context, "seconds": seconds, **counters}

    async def _agent(self, gate: asyncio.Event, room: asyncio.Semaphore) -> None:
        connection, first = Connection(self.play.url), True
        while True:
            turns = self.play.workload.episode(next(self._numbers))
            if first:
                async with room:
                    key, episode = await self._begin(connection)
                self.tally.live += 1
                first = False
                await gate.wait()
            else:
                key, episode = await self._begin(connection)
            messages: list[dict[str, str]] = []
            for turn, prompt in zip(turns, _prompts(turns), strict=True):
                if not self.play.hold:
                    await asyncio.sleep(turn.seconds)
                messages.append({"role": "user", "content": self.text(turn.context)})
                await self._call(connection, key, messages, turn, prompt)
            body = json.dumps({"reward": float(len(turns) % 2)}).encode()
            path = f"/swarm/v1/episodes/{episode}/finish"
            content(await connection.request("POST", path, self._token, body))
            self.tally.ended.append(time.perf_counter())

    async def _begin(self, connection: Connection) -> tuple[str, str]:
        number, self._begun = self._begun, self._begun + 1
        task = f"task-{os.getpid()}-{number // self.play.group_size}"
        body = json.dumps({"task_id": task, "client_id": "bench", "wait": 30}).encode()
        while True:
            reply = await connection.request("POST", "/swarm/v1/episodes", self._token, body)
            if reply.status != 429:
                begun = content(reply)
                return begun["api_key"], begun["episode_id"]

    async def _call(
        self, connection: Connection, key: str, messages: list[dict[str, str]], turn: Turn, prompt: int
    ) -> None:
        asked = {"model": MODEL, "messages": messages, "max_tokens": turn.completion, "stream": turn.streams}
        reply = await connection.request("POST", "/v1/chat/completions", key, json.dumps(asked).encode())
        said = streamed(reply) if turn.streams else str(content(reply)["choices"][0]["message"]["content"])
        messages.append({"role": "assistant", "content": said})
        self.tally.answered.append((reply.done, reply.done - reply.sent, turn, prompt))

    async def _counters(self) -> dict[str, float]:
        connection = Connection(self.play.url)
        found = content(await connection.request("GET", "/counters", ""))
        connection.close()
        return found


def _prompts(turns: list[Turn]) -> Iterator[int]:
    """Prompt tokens of each turn, without those of the template."""
    length = 0
    for turn in turns:
        length += turn.context
        yield length
        length += turn.completion


if __name__ == "__main__":
    print(json.dumps(asyncio.run(Agents(Play.from_json(sys.argv[1])).run())))
