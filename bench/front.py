"""The CPU of a front process for a call: parts of `python -m bench.capacity --measure` and `--against`.

A real gateway (HTTP on loopback, keys, renderer, trees, journal on disk, the router of the cluster) before replicas in
another process, over TCP. The replicas sample at the assumed rate of a GPU: tokens and log-probabilities mean nothing,
but are as long as real ones. CPU seconds of the gateway's process are the figure: agents and replicas do not count.

* `front_call_ms`: a call of the reference workload (`capacity.AGENTS`), with begin and finish of its episode.
* `plain_token_us`, `streamed_token_us`: a token of an answer, by answers of two lengths to equal prompts.

CPU time that passes without calls is subtracted. The gateway can be that of another checkout, whose `src` is then first
on the path of both processes; this file is always that of this checkout.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from tokenizers import Tokenizer

from agentjet.compute.fleet import Fleet
from agentjet.compute.samplers import Replicas
from agentjet.compute.vllm.replica import PIECE_SECONDS
from agentjet.compute.weights import Publication
from agentjet.config import SamplerConfig, ServeConfig
from agentjet.config.loader import cache_dir
from agentjet.front.http import listen, tune_python, uvicorn_config
from agentjet.front.keys import Keys
from agentjet.processes.rpc import Answer, Link, Listener, Peer, ProcessRequest
from agentjet.rendering.chat_template import template_for
from agentjet.server.app import create_app
from agentjet.server.runs import Runs
from agentjet.types import ModelInfo, PolicyId, Sampled, SamplingParams
from bench.capacity import AGENTS, Turn
from bench.machine import ROOT, last_json, started
from bench.scripted import MODEL, ScriptedCompute, make_model_info
from bench.wire import Connection

REPLICAS, SLOTS = 2, 64
STEP, STEP_PER_COMPLETION = 0.012, 50e-6  # Seconds of a step, as `capacity.Fleet` assumes
EPISODES = 128  # Of the reference workload
LENGTHS = 32, 544  # Tokens of the two answers whose difference is the cost of a token
LEAST_SECONDS = 2.0  # Of the measurement without calls
WORDS = "look at table row find sum the value in next column and add it to data"
PUBLICATION = Publication(0, "127.0.0.1:1", "/weights", 0, "", "float32", (0,) * 64, (-0.5,) * 63)
SECRET = b"of no use outside of this machine"
_rng = random.Random(0)
LOGPROBS = [struct.unpack("f", struct.pack("f", -_rng.expovariate(1.0)))[0] for _ in range(4096)]


# ---- the replicas, a separate process --------------------------------------------------------------------------------


@dataclass(slots=True)
class Completion:
    """`sent` and `done` count tokens; `offset` is where it begins in the list of tokens."""

    params: SamplingParams
    offset: int
    done: int = 0
    sent: int = 0
    sent_at: float = -1.0
    since: float = 0.0


@dataclass(slots=True)
class Replica:
    """Sends pieces by the rule of `compute.vllm.replica`."""

    link: Link
    words: list[int]
    running: dict[int, Completion] = field(default_factory=dict)
    waiting: deque[tuple[int, Completion]] = field(default_factory=deque)
    next_step: float = 0.0

    def accept(self, request: ProcessRequest) -> None:
        id = request.args[0]
        if request.op == "adopt":
            self.link.send(Answer(request.id, list(id.probe_logprobs)))
        elif request.op == "sample":
            self.waiting.append((id, Completion(request.args[2], id * 7919)))
        elif self.running.pop(id, None) is None:  # `cancel`
            self.waiting = deque(one for one in self.waiting if one[0] != id)

    def advance(self, now: float) -> None:
        """Samples a token of each running completion, and sends the pieces that are due."""
        while self.waiting and len(self.running) < SLOTS:
            id, completion = self.waiting.popleft()
            self.running[id] = completion
        self.next_step = now + STEP + STEP_PER_COMPLETION * len(self.running)
        pieces = []
        for id, one in list(self.running.items()):
            one.since = now if one.done == one.sent else one.since
            one.done += 1
            is_last = one.done == one.params.max_tokens
            if is_last or self._is_due(one, now):
                pieces.append((id, self._piece(one, is_last=is_last)))
                one.sent, one.sent_at = one.done, now
            if is_last:
                del self.running[id]
        if pieces:
            self.link.send(pieces)

    @staticmethod
    def _is_due(one: Completion, now: float) -> bool:
        count = one.done - one.sent
        if hasattr(one.params, "is_due"):
            return one.params.is_due(count, one.sent_at, now) or now - one.since >= PIECE_SECONDS
        return count >= one.params.piece_tokens or now - one.since >= PIECE_SECONDS

    def _piece(self, one: Completion, *, is_last: bool) -> Sampled:
        places = range(one.offset + one.sent, one.offset + one.done)
        tokens = tuple(self.words[place % len(self.words)] for place in places)
        logprobs = tuple(LOGPROBS[place % len(LOGPROBS)] for place in places)
        return Sampled(tokens, logprobs, 0, "length" if is_last else None)


def sample(address: str, names: list[str], words: list[int]) -> None:
    """The process of all replicas. It ends with the gateway."""
    arrived: queue.SimpleQueue[tuple[Replica, ProcessRequest]] = queue.SimpleQueue()
    replicas = []
    for name in names:
        variables = dict(zip(Link.VARIABLES, (address, name, SECRET.decode()), strict=True))
        replica = Replica(Link.from_environment(variables), words)
        replica.link.read_forever(lambda request, replica=replica: arrived.put((replica, request)))
        replicas.append(replica)
    while True:
        now = time.monotonic()
        for replica in replicas:
            if replica.next_step <= now:
                replica.advance(now)
        due = min(replica.next_step for replica in replicas)
        time.sleep(max(0.0, due - time.monotonic()))
        while not arrived.empty():
            replica, request = arrived.get()
            replica.accept(request)


# ---- the gateway, a separate process ---------------------------------------------------------------------------------


def model_info(folder: Path) -> ModelInfo:
    """The tokenizer and template of SmolLM2 if that was unpacked here, else bytes as tokens."""
    scripted = make_model_info(folder, 1 << 20)
    for bundled in sorted(cache_dir().glob("smollm2-135m-*/tokenizer.json")):
        template, tool_format = template_for("smollm2-135m", "")
        path = str(bundled.parent)
        return replace(scripted, tokenizer_path=path, chat_template=template, tool_format=tool_format, end_tokens=(2,))
    return scripted


def single_words(tokenizer_path: str) -> dict[str, int]:
    """Texts of one token each, which stay so in any order, and their tokens."""
    tokenizer = Tokenizer.from_file(f"{tokenizer_path}/tokenizer.json")
    for texts in ([f" {word}" for word in WORDS.split()], list("abcdefgh")):
        found = {text: tokenizer.encode(text, add_special_tokens=False).ids for text in texts}
        if single := {text: ids[0] for text, ids in found.items() if len(ids) == 1}:
            return single
    raise AssertionError("the tokenizer has no token of one letter")


class ReplicatedCompute(ScriptedCompute):
    """See `compute.protocol.Compute`. The cluster's router and real connections; nothing is learned."""

    def __init__(self, info: ModelInfo, words: list[int]) -> None:
        super().__init__(info, 0.0)
        self._words = words
        self._peers: dict[str, asyncio.Future[Peer]] = {}
        self._process: subprocess.Popen[bytes] | None = None

    async def open(self) -> None:
        """Starts the replicas, and gives them weights."""
        self._listener = Listener("127.0.0.1", SECRET, partial(self._claim, asyncio.get_running_loop()))
        settings = SamplerConfig(max_concurrent=SLOTS)
        self._replicas = Replicas(partial(Fleet, PolicyId(), self._start, REPLICAS, settings, timeout=1e6))
        await self._replicas.fleet.publish(PUBLICATION)

    async def _start(self, name: str) -> Peer:
        """See `fleet.Start`. The last one starts the process."""
        self._peers[name] = asyncio.get_running_loop().create_future()
        if len(self._peers) == REPLICAS:
            given = json.dumps([self._listener.address, list(self._peers), self._words])
            self._process = subprocess.Popen([sys.executable, "-m", "bench.front", "sample", given])
        return await self._peers[name]

    def _claim(self, loop: asyncio.AbstractEventLoop, name: str) -> Any:
        async def connect(connection: Any) -> None:
            self._peers[name].set_result(Peer(name, *await asyncio.open_connection(sock=connection)))

        return lambda connection: asyncio.run_coroutine_threadsafe(connect(connection), loop)

    async def sample(
        self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Sampled]:
        async with aclosing(self._replicas.sample(token_ids, params)) as pieces:
            async for piece in pieces:
                yield piece

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def config(data_dir: str) -> ServeConfig:
    unlimited = dict.fromkeys(("max_connections", "max_episodes_per_client", "max_calls_per_client"), 1_000_000)
    job = {
        "batch_size": 100_000,
        "group_size": 8,
        "checkpoint_every": 0,
        "lease_seconds": 3600.0,
        "max_episode_seconds": 3600.0,
        "max_tokens": 4096,
    }
    server = {"data_dir": data_dir, "call_timeout": 3600.0, **unlimited}
    return ServeConfig.model_validate({"model": {"name": MODEL}, "server": server, "job": job})


async def serve(data_dir: str) -> None:
    info = model_info(Path(data_dir) / "tokenizer")
    words = single_words(info.tokenizer_path)
    compute = ReplicatedCompute(info, list(words.values()))
    try:
        await compute.open()
        runs = Runs(config(data_dir), compute)
        app = create_app(runs, Keys.open(Path(data_dir)))

        async def counters() -> dict[str, float]:
            return {"cpu_s": time.process_time()}

        app.add_api_route("/counters", counters)
        (Path(data_dir) / "words.json").write_text(json.dumps(list(words)))
        with listen("127.0.0.1", 0, backlog=4096) as listener:
            await runs.start()
            await runs.default.engine.wait_until_up()
            tune_python()
            print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
            await uvicorn.Server(uvicorn_config(app, runs.default.config.server)).serve([listener])
    finally:
        compute.end()


# ---- the agents, a separate process ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    url: str
    data_dir: str


class Agents:
    """Plays episodes, and measures the CPU seconds of the gateway meanwhile."""

    def __init__(self, load: Load) -> None:
        self._url = load.url
        self._token = (Path(load.data_dir) / "token").read_text().strip()
        self._words: list[str] = json.loads((Path(load.data_dir) / "words.json").read_text())
        self._idle = 0.0
        """CPU seconds a second without calls."""

    async def measure(self) -> dict[str, float]:
        short, long = LENGTHS
        await self.play([[Turn(0.0, 1000, 16, i % 2 == 0)] * 2 for i in range(16)])
        before, began = await self._cpu(), time.monotonic()
        await asyncio.sleep(LEAST_SECONDS)
        self._idle = (await self._cpu() - before) / (time.monotonic() - began)
        # Every call has the mean sizes of the workload: costs are linear in them, and no long tail is waited for.
        work, calls = AGENTS, round(AGENTS.calls.mean)
        sizes = [work.first_context] + [round(work.context.mean)] * (calls - 1)
        reference = [
            [Turn(0.0, size, round(work.completion.mean), (number + i) % 2 == 0) for i, size in enumerate(sizes)]
            for number in range(EPISODES)
        ]
        found = {"front_call_ms": 1e3 * await self.play(reference) / sum(map(len, reference))}
        for name, streams in (("plain", False), ("streamed", True)):
            costs = [
                await self.play([[Turn(0.0, 32, length, streams)] for _ in range(REPLICAS * SLOTS)])
                for length in LENGTHS
            ]
            found[f"{name}_token_us"] = 1e6 * (costs[1] - costs[0]) / (REPLICAS * SLOTS * (long - short))
        return found | {"idle_share": self._idle}

    async def play(self, episodes: list[list[Turn]]) -> float:
        """Plays all episodes at once; returns the CPU seconds of the gateway that are due to them."""
        before, began = await self._cpu(), time.monotonic()
        await asyncio.gather(*(self._episode(number, turns) for number, turns in enumerate(episodes)))
        return await self._cpu() - before - self._idle * (time.monotonic() - began)

    async def _cpu(self) -> float:
        connection = Connection(self._url)
        found = (await connection.request("GET", "/counters", "")).json()
        connection.close()
        return float(found["cpu_s"])

    async def _episode(self, number: int, turns: list[Turn]) -> None:
        rng, connection = random.Random(number), Connection(self._url)
        begin = {"task_id": f"task-{number // 8}", "client_id": "bench"}
        begun = (await connection.request("POST", "/swarm/v1/episodes", self._token, begin)).json()
        messages: list[dict[str, str]] = []
        for turn in turns:
            text = "".join(rng.choices(self._words, k=turn.context))
            messages.append({"role": "user", "content": text})
            body = {"model": "policy", "messages": messages, "max_tokens": turn.completion, "stream": turn.streams}
            reply = await connection.request("POST", "/v1/chat/completions", begun["api_key"], body)
            messages.append({"role": "assistant", "content": reply.text()})
        path = f"/swarm/v1/episodes/{begun['episode_id']}/finish"
        (await connection.request("POST", path, self._token, {"reward": float(number % 2)})).json()
        connection.close()


# ---- measurements of this checkout and of another --------------------------------------------------------------------


def measure(checkout: Path = ROOT) -> dict[str, float]:
    """The figures of a checkout, with a gateway that starts now."""
    path = os.pathsep.join((str(checkout / "src"), str(ROOT)))
    environment = {"PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "data"
        data_dir.mkdir()
        command = [sys.executable, "-m", "bench.front", "serve", str(data_dir)]
        with started(command, Path(folder) / "serve.log", environment=environment) as url:
            load = json.dumps(asdict(Load(url, str(data_dir))))
            done = subprocess.run([sys.executable, "-m", "bench.front", "load", load], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the load ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    figures: dict[str, float] = last_json(done.stdout)
    return figures


def main(kind: str, given: str) -> None:
    if kind == "serve":
        asyncio.run(serve(given))
    elif kind == "sample":
        sample(*json.loads(given))
    else:
        print(json.dumps(asyncio.run(Agents(Load(**json.loads(given))).measure())))


if __name__ == "__main__":
    main(*sys.argv[1:])
