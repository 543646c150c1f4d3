"""The load generator, a separate process: `python -m bench.gatewaying.load LOAD`, with a `Load` as JSON.

Plays agents: each sends its whole history, appends the answer and the environment's next message, and sends again.
Every second call streams. An answer must be the whole script; anything else is an error. Prints an `Outcome` as JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.gatewaying.report import Counters, Load, Outcome, percentile
from bench.gatewaying.scripted import ANSWER
from bench.gatewaying.wire import BrokenConnection, Connection, Reply

AT_ONCE = 32
"""Episodes begun, and ended, at the same time."""
SYSTEM = (
    "You are an agent that searches a table of measurements. Each turn, say which row to look at next. "
    "You will be told what that row holds. Be brief, never repeat a row, and stop when the sum is found."
)
ERRORS = (BrokenConnection, OSError, ValueError, LookupError, TypeError)


class WrongAnswer(ValueError):
    """Not the script's, or not 200."""


@dataclass(slots=True)
class Agent:
    """The agent of one episode: its connection, key and messages."""

    number: int
    connection: Connection
    key: str
    episode_id: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def listen(self, turn: int) -> None:
        """Appends the environment's message before call `turn`."""
        if not turn:
            task = f"Table {self.number}: find the rows whose third column adds up to {self.number * 7 % 1000}."
            self.messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
        else:
            row = f"Row 42 of table {self.number}, look {turn}: {'17 | 4.25 | copper | 903 | ' * 4}end of row."
            self.messages.append({"role": "user", "content": row})

    def streams(self, turn: int) -> bool:
        return (self.number + turn) % 2 == 1


@dataclass(slots=True)
class Tally:
    """The measured seconds, call by call."""

    plain: list[float] = field(default_factory=list)
    stream: list[float] = field(default_factory=list)
    lag: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


async def run(load: Load) -> Outcome:
    """Begin all episodes, make all calls, end all episodes."""
    agents = [Agent(i, Connection(load.url), load.token) for i in range(load.episodes)]
    await warm_up(load, agents)
    before = await ask_counters(load)
    begin_s = await timed(agents, lambda agent: begin(load, agent)) if load.episodes_api else 0.0
    ready = await ask_counters(load)
    gc.freeze()
    tally, cpu, began = Tally(), time.process_time(), time.perf_counter()
    await asyncio.gather(*(converse(load, agent, began, tally) for agent in agents))
    seconds = time.perf_counter() - began
    cpu = time.process_time() - cpu
    after = await ask_counters(load)
    finish_s = await timed(agents, lambda agent: finish(load, agent)) if load.episodes_api else 0.0
    for agent in agents:
        agent.connection.close()
    outcome = summarise(load, tally, seconds, cpu)
    if before is None or ready is None or after is None:
        return outcome
    return with_counters(load, outcome, begin_s, finish_s, (before, ready, after))


async def warm_up(load: Load, agents: Sequence[Agent]) -> None:
    """A few whole episodes that are not counted: imports, caches, and the generator's own code."""
    tally = Tally()
    for agent in agents[:8]:
        if load.episodes_api:
            await begin(load, agent)
        for turn in range(2):
            await call(load, agent, turn, tally)
        if load.episodes_api:
            await finish(load, agent)
    if tally.errors:
        raise SystemExit(f"{load.url} does not answer as scripted: {tally.errors[0]}")


async def converse(load: Load, agent: Agent, began: float, tally: Tally) -> None:
    """The calls of an episode. With a rate, each call is planned at a random time within its `period`."""
    rng = random.Random(agent.number)
    period = load.episodes / load.rate if load.rate else 0.0
    for turn in range(load.calls):
        if period:
            due = max(time.perf_counter(), began + (turn + rng.random()) * period)
            await asyncio.sleep(due - time.perf_counter())
            tally.lag.append(time.perf_counter() - due)
        await call(load, agent, turn, tally)


async def call(load: Load, agent: Agent, turn: int, tally: Tally) -> None:
    """One call, checked and counted. The answer of a failed call is not appended to the history."""
    agent.listen(turn)
    streams = agent.streams(turn)
    body = json.dumps({"model": load.model, "messages": agent.messages, "stream": streams}).encode()
    try:
        reply = await agent.connection.request("POST", "/v1/chat/completions", agent.key, body)
        said = streamed(reply) if streams else answered(reply)
        if said != ANSWER:
            raise WrongAnswer(f"answered {said!r}")
    except ERRORS as error:
        tally.errors.append(f"{type(error).__name__}: {error}")
        return
    agent.messages.append({"role": "assistant", "content": said})
    (tally.stream if streams else tally.plain).append(reply.done - reply.sent)


def answered(reply: Reply) -> str:
    """The content of a plain answer."""
    return str(content(reply)["choices"][0]["message"]["content"])


def streamed(reply: Reply) -> str:
    """The content of a streamed answer that came to its end."""
    if reply.status != 200:
        raise WrongAnswer(f"{reply.status} {reply.body[:300]!r}")
    events = [line[6:] for line in reply.body.split(b"\n") if line.startswith(b"data: ")]
    if not events or events[-1].strip() != b"[DONE]":
        raise WrongAnswer(f"a stream without its end: {reply.body[-200:]!r}")
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(str(choice["delta"].get("content") or "") for choice in choices)


async def begin(load: Load, agent: Agent) -> None:
    body = json.dumps({"task_id": f"table-{agent.number}", "client_id": "bench"}).encode()
    begun = content(await agent.connection.request("POST", "/swarm/v1/episodes", load.token, body))
    agent.key, agent.episode_id = begun["api_key"], begun["episode_id"]


async def finish(load: Load, agent: Agent) -> None:
    body = json.dumps({"reward": float(agent.number % 2)}).encode()
    path = f"/swarm/v1/episodes/{agent.episode_id}/finish"
    ended = content(await agent.connection.request("POST", path, load.token, body))
    assert ended["status"] == "finished", ended


async def ask_counters(load: Load) -> Counters | None:
    """The counters of our server; None for a peer."""
    if not load.episodes_api:
        return None
    connection = Connection(load.url)
    found = content(await connection.request("GET", "/counters", ""))
    connection.close()
    return Counters(**found)


def content(reply: Reply) -> dict[str, Any]:
    if reply.status != 200:
        raise WrongAnswer(f"{reply.status} {reply.body[:300]!r}")
    found: dict[str, Any] = json.loads(reply.body)
    return found


async def timed(agents: Sequence[Agent], work: Callable[[Agent], Awaitable[None]]) -> float:
    """Seconds that `work` takes for all agents, a few at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(agent: Agent) -> None:
        async with room:
            await work(agent)

    began = time.perf_counter()
    await asyncio.gather(*map(one, agents))
    return time.perf_counter() - began


def summarise(load: Load, tally: Tally, seconds: float, cpu: float) -> Outcome:
    """The figures that the generator measures itself."""
    plain, stream = ([1000 * (taken - load.seconds) for taken in kind] for kind in (tally.plain, tally.stream))
    calls = len(plain) + len(stream)
    return Outcome(
        calls=calls,
        errors=len(tally.errors),
        first_error=tally.errors[0] if tally.errors else "",
        seconds=seconds,
        rps=calls / seconds,
        p50_ms=percentile([*plain, *stream], 50),
        p99_ms=percentile([*plain, *stream], 99),
        plain_p50_ms=percentile(plain, 50),
        stream_p50_ms=percentile(stream, 50),
        lag_p99_ms=1000 * percentile(tally.lag, 99),
        generator_cpu=cpu / seconds,
    )


def with_counters(
    load: Load, outcome: Outcome, begin_s: float, finish_s: float, counters: tuple[Counters, Counters, Counters]
) -> Outcome:
    """The server's side of it: counters before the episodes, before their calls, and after those."""
    before, ready, after = counters
    return replace(
        outcome,
        begin_s=begin_s,
        finish_s=finish_s,
        server_cpu=(after.cpu_s - ready.cpu_s) / outcome.seconds,
        rss_mb=after.rss_mb,
        kb_per_episode=1024 * (after.rss_mb - before.rss_mb) / load.episodes,
        commits=after.commits,
        commit_share=after.commit_s / outcome.seconds,
        commit_p50_ms=after.commit_p50_ms,
        commit_p99_ms=after.commit_p99_ms,
    )


if __name__ == "__main__":
    print(asyncio.run(run(Load.from_json(sys.argv[1]))).to_json())
