"""The gateway's cost per call: `python -m bench.gateway`.

A real gateway (HTTP on loopback, keys, renderer, trees, journal on disk) over a scripted model that costs nothing.
Agents each send a growing history, every second call is streamed, and all episodes are open at once:

* **capacity**: every agent sends its next call as soon as it is answered; the figure is requests per second.
* **overhead**: the same calls at a share of that rate, with completions of half a second. The figure is the time from
  a request's first byte to its answer's last, less that half second. It is measured as served, without waiting for the
  disk, and with cores that cannot sleep between two calls.
* **the peer**, with `--peer ROUNDS`: LiteLLM's proxy under the same load of 100 episodes, in turn with the gateway.
  The proxy checks a key and forwards. It has one HTTP hop more (its backend), and neither tokens nor a journal.

Server and generator are separate processes. Prints a table, then one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import litellm_peer
from bench.machine import ask_process, busy_cores, grid, percentile, report, started
from bench.scripted import ANSWER, MODEL, Settings
from bench.wire import BrokenConnection, Connection, WrongAnswer

COMPLETION_SECONDS = 0.5  # Duration of a completion while the overhead is measured
ROOM = 1000  # Groups of a batch, and episodes of a group: far more than any run begins, so nothing is ever learned
COLUMNS = ("calls", "errors", "rps", "p50_ms", "p99_ms", "commit_p50_ms", "server_cpu", "generator_cpu", "lag_p99_ms")
COUNTERS = ("cpu_s", "rss_mb", "commits", "commit_s", "commit_p50_ms", "commit_p99_ms")  # See `scripted.counters`
PEER_FIGURES = ("calls", "errors", "first_error", "rps", "p50_ms", "p99_ms", "generator_cpu")  # LiteLLM has no counters
PEER_EPISODES = 100  # Open at once, at the gateway and at the peer
AT_ONCE = 32  # Episodes begun, and ended, at the same time
JOB = {"batch_size": ROOM, "group_size": ROOM, "lease_seconds": 3600.0, "max_episode_seconds": 3600.0}
ERRORS = (BrokenConnection, OSError, ValueError, LookupError, TypeError)
SYSTEM = (
    "You are an agent that searches a table of measurements. Each turn, say which row to look at next. "
    "You will be told what that row holds. Be brief, never repeat a row, and stop when the sum is found."
)


# ---- the load generator, a separate process --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Episodes that are all open at once, each with `calls` calls one after the other, every second one streamed."""

    url: str
    token: str  # A client's, which begins and ends episodes
    episodes: int
    calls: int
    rate: float = 0.0  # Calls a second over all episodes; 0: the next call as soon as the last one is answered
    seconds: float = 0.0  # Duration of the scripted completion, which is not the server's cost
    key: str = ""  # Of a server without episodes and counters, for all calls


@dataclass(slots=True)
class Agent:
    """The agent of one episode: it sends its whole history, appends the answer and the environment's next message."""

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

    async def begin(self, token: str) -> None:
        body = {"task_id": f"table-{self.number}", "client_id": "bench"}
        begun = (await self.connection.request("POST", "/swarm/v1/episodes", token, body)).json()
        self.key, self.episode_id = begun["api_key"], begun["episode_id"]

    async def finish(self, token: str) -> None:
        path = f"/swarm/v1/episodes/{self.episode_id}/finish"
        ended = (await self.connection.request("POST", path, token, {"reward": float(self.number % 2)})).json()
        assert ended["status"] == "finished", ended


class Generator:
    """Begins all episodes, makes all calls, ends all episodes. Returns the outcome."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.taken: dict[bool, list[float]] = {False: [], True: []}  # Seconds of plain and of streamed calls
        self.late: list[float] = []
        self.errors: list[str] = []

    async def run(self) -> dict[str, Any]:
        load = self.load
        agents = [Agent(i, Connection(load.url), load.key or load.token) for i in range(load.episodes)]
        await self.warm_up(agents[:8])
        before = await self.counters()
        begin_s = await timed(agents, self.begin)
        ready = await self.counters()
        gc.freeze()
        cpu, began = time.process_time(), time.perf_counter()
        await asyncio.gather(*(self.converse(agent, began) for agent in agents))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        after = await self.counters()
        finish_s = await timed(agents, self.finish)
        for agent in agents:
            agent.connection.close()
        plain, stream = ([1000 * (taken - load.seconds) for taken in self.taken[kind]] for kind in (False, True))
        calls = len(plain) + len(stream)
        return {
            "calls": calls,
            "errors": len(self.errors),
            "first_error": self.errors[0] if self.errors else "",
            "seconds": seconds,
            "rps": calls / seconds,
            "p50_ms": percentile([*plain, *stream], 50),
            "p99_ms": percentile([*plain, *stream], 99),
            "plain_p50_ms": percentile(plain, 50),
            "stream_p50_ms": percentile(stream, 50),
            "lag_p99_ms": 1000 * percentile(self.late, 99),  # Delay of the generator behind its plan
            "generator_cpu": cpu / seconds,
            "begin_s": begin_s,
            "finish_s": finish_s,
            "server_cpu": (after["cpu_s"] - ready["cpu_s"]) / seconds,
            "rss_mb": after["rss_mb"],
            "kb_per_episode": 1024 * (after["rss_mb"] - before["rss_mb"]) / load.episodes,
            "commits": after["commits"],
            "commit_share": after["commit_s"] / seconds,  # The server's thread waited; its event loop went on
            "commit_p50_ms": after["commit_p50_ms"],
            "commit_p99_ms": after["commit_p99_ms"],
        }

    async def warm_up(self, agents: Sequence[Agent]) -> None:
        """A few whole episodes that are not counted: imports, caches, and the generator's own code."""
        for agent in agents:
            await self.begin(agent)
            for turn in range(2):
                await self.call(agent, turn)
            await self.finish(agent)
        if self.errors:
            raise SystemExit(f"{self.load.url} does not answer as scripted: {self.errors[0]}")
        self.taken = {False: [], True: []}

    async def begin(self, agent: Agent) -> None:
        if not self.load.key:
            await agent.begin(self.load.token)

    async def finish(self, agent: Agent) -> None:
        if not self.load.key:
            await agent.finish(self.load.token)

    async def converse(self, agent: Agent, began: float) -> None:
        """The calls of an episode. With a rate, each call is planned at a random time within its `period`."""
        rng, load = random.Random(agent.number), self.load
        period = load.episodes / load.rate if load.rate else 0.0
        for turn in range(load.calls):
            if period:
                due = max(time.perf_counter(), began + (turn + rng.random()) * period)
                await asyncio.sleep(due - time.perf_counter())
                self.late.append(time.perf_counter() - due)
            await self.call(agent, turn)

    async def call(self, agent: Agent, turn: int) -> None:
        """One call, checked and counted. The answer of a failed call is not appended to the history."""
        agent.listen(turn)
        streams = (agent.number + turn) % 2 == 1
        body = {"model": MODEL, "messages": agent.messages, "stream": streams}
        try:
            reply = await agent.connection.request("POST", "/v1/chat/completions", agent.key, body)
            if (said := reply.text()) != ANSWER:
                raise WrongAnswer(f"answered {said!r}")
        except ERRORS as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            return
        agent.messages.append({"role": "assistant", "content": said})
        self.taken[streams].append(reply.done - reply.sent)

    async def counters(self) -> dict[str, float]:
        """The counters of the server's process; zeros where it has none."""
        if self.load.key:
            return dict.fromkeys(COUNTERS, 0.0)
        connection = Connection(self.load.url)
        found: dict[str, float] = (await connection.request("GET", "/counters", "")).json()
        connection.close()
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


# ---- the measurements ------------------------------------------------------------------------------------------------


def measure(load: Load) -> dict[str, Any]:
    """Puts a load on a running server, from a separate process."""
    outcome: dict[str, Any] = ask_process("bench.gateway", "--load", json.dumps(asdict(load)))
    return outcome


def ours(episodes: int, calls: int, folder: Path, rate: float = 0.0, *, wait: bool = True) -> dict[str, Any]:
    """One measurement of a gateway with a fresh data dir. With a rate, completions last `COMPLETION_SECONDS`."""
    seconds = COMPLETION_SECONDS if rate else 0.0
    with tempfile.TemporaryDirectory(dir=folder) as made:
        data_dir = Path(made) / "data"
        settings = Settings(str(data_dir), seconds, waits_for_disk=wait, job=JOB)
        with started(settings.command(), Path(made) / "serve.log") as url:
            token = (data_dir / "token").read_text().strip()
            return measure(Load(url, token, episodes, calls, rate, seconds))


def run(episodes: int, calls: int, share: float, folder: Path) -> dict[str, Any]:
    """All measurements, one after the other, and the verdict. The overhead is measured at a share of the capacity."""
    console = Console(stderr=True)
    console.print("measuring capacity ...")
    capacity = ours(episodes, calls, folder)
    rate = share * capacity["rps"]
    console.print(f"measuring the overhead at {rate:.0f} calls/s ...")
    served = ours(episodes, calls, folder, rate)
    console.print("the same without waiting for the disk ...")
    unsynced = ours(episodes, calls, folder, rate, wait=False)
    console.print("the same with cores kept awake ...")
    # A sleeping core takes time to wake. That is the machine's cost, and a busy server does not pay it.
    with busy_cores(os.cpu_count() or 1, nice=19):
        awoken = ours(episodes, calls, folder, rate)
    outcomes = {"capacity": capacity, "overhead": served, "without fsync": unsynced, "kept awake": awoken}
    times = {"": served, "_without_fsync": unsynced, "_awake": awoken}
    return {
        "rps": round(capacity["rps"], 1),
        **{f"{key}{how}": round(one[key], 2) for how, one in times.items() for key in ("p50_ms", "p99_ms")},
        **{key: round(served[key], 2) for key in ("commit_p50_ms", "commit_p99_ms")},
        "errors": sum(outcome["errors"] for outcome in outcomes.values()),
        "first_error": next((outcome["first_error"] for outcome in outcomes.values() if outcome["errors"]), ""),
        "rss_mb": round(served["rss_mb"], 1),
        "kb_per_episode": round(served["kb_per_episode"], 1),
        "rate": round(rate, 1),
        "outcomes": outcomes,
    }


def against_peer(rounds: int, calls: int, folder: Path) -> dict[str, Any]:
    """The capacity of the gateway and of LiteLLM's proxy under one load, in turn, and the median of their ratios."""
    outcomes, ratios = dict[str, Any](), list[float]()
    for k in range(1, rounds + 1):
        mine = ours(PEER_EPISODES, calls, folder)
        with tempfile.TemporaryDirectory(dir=folder) as made, litellm_peer.proxy(Path(made)) as url:
            peer = measure(Load(url, "", PEER_EPISODES, calls, key=litellm_peer.KEY))
        for name, outcome in (("gateway", mine), ("LiteLLM", peer)):
            outcomes[f"{name} {k}"] = {key: outcome[key] for key in PEER_FIGURES}
        ratios.append(round(mine["rps"] / peer["rps"], 2))
    errors = sum(outcome["errors"] for outcome in outcomes.values())
    return {"ratio": statistics.median(ratios), "ratios": ratios, "errors": errors, "outcomes": outcomes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000, help="open at once")
    parser.add_argument("--calls", type=int, default=10, help="of each episode")
    parser.add_argument("--share", type=float, default=0.6, help="of the capacity, for the overhead")
    parser.add_argument("--peer", type=int, metavar="ROUNDS", help="measure only the ratio to LiteLLM's proxy")
    parser.add_argument("--quick", action="store_true", help="a few calls, to see that everything works")
    parser.add_argument("--folder", type=Path, help="where the journals are written; its disk is part of the figure")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        print(json.dumps(asyncio.run(Generator(Load(**json.loads(given.load))).run())))
        return 0
    load: tuple[int, int, float] = (20, 3, 0.3) if given.quick else (given.episodes, given.calls, given.share)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path = Path(folder)
        verdict = against_peer(given.peer, given.calls, path) if given.peer else run(*load, path)
    columns = [one for one in COLUMNS if one in PEER_FIGURES] if given.peer else COLUMNS
    report("gateway", verdict, grid(verdict["outcomes"], *columns))
    return 0 if verdict["errors"] == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
