"""The CPU of a front process for a call: parts of `python -m bench.capacity --measure` and `--against`.

A real gateway (HTTP on loopback, keys, renderer, trees, journal on disk, the router of the cluster) before replicas in
another process, over TCP. The replicas sample at the assumed rate of a GPU: tokens and log-probabilities mean nothing,
but are as long as real ones. CPU seconds of the gateway's process are the figure: agents and replicas do not count.

* `front_call_ms`: a call of the reference workload (`capacity.AGENTS`), with begin and finish of its episode.
* `plain_token_us`, `streamed_token_us`: a token of an answer, by answers of two lengths to equal prompts.

CPU time that passes without calls is subtracted. The gateway can be that of another checkout, whose `src` is then first
on the path of both processes; this file is always that of this checkout.

`compare` plays the workload in turn on a server whose fronts answer the calls, on one that answers them itself, and on
as many of these at once. Each front has as many replicas and episodes as one of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
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
from bench.machine import ROOT, ask_process, started
from bench.scripted import MODEL, ScriptedCompute, make_model_info
from bench.wire import Connection

REPLICAS, SLOTS = 2, 64
STEP, STEP_PER_COMPLETION = 0.012, 50e-6  # Seconds of a step, as `capacity.Fleet` assumes
EPISODES = 128  # Of the reference workload
PROMPT = 4000  # Tokens of a prompt whose cost is that of tokens
LENGTHS = 32, 544  # Tokens of the two answers whose difference is the cost of a token
LEAST_SECONDS = 5.0  # Of the measurement without calls
WORDS = "look at table row find sum the value in next column and add it to data"
PUBLICATION = Publication(0, "127.0.0.1:1", "/weights", 0, "", "float32", (0,) * 64, (-0.5,) * 63)
SECRET = b"of no use outside of this machine"
SAMPLE = "bench.front sample"  # In the command of the replicas
_rng = random.Random(0)
LOGPROBS = [struct.unpack("f", struct.pack("f", -_rng.expovariate(1.0)))[0] for _ in range(4096)]


# ---- the replicas, a separate process --------------------------------------------------------------------------------


@dataclass(slots=True)
class Completion:
    """`sent` and `done` count tokens; `offset` is where it begins in the list of tokens."""

    link: Link
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
    address: str = ""
    """At which fronts connect."""
    running: dict[int, Completion] = field(default_factory=dict)
    waiting: deque[tuple[int, Completion]] = field(default_factory=deque)
    next_step: float = 0.0

    def accept(self, link: Link, request: ProcessRequest) -> None:
        """Handles a request of the server or of a front; `link` is its connection."""
        id = request.args[0] if request.args else 0
        if request.op == "adopt":
            link.send(Answer(request.id, list(id.probe_logprobs)))
        elif request.op == "load":
            link.send(Answer(request.id, self.address))
        elif request.op == "sample":
            self.waiting.append((id, Completion(link, request.args[2], id * 7919)))
        elif self.running.pop(id, None) is None:  # `cancel`
            self.waiting = deque(one for one in self.waiting if one[0] != id)

    def advance(self, now: float) -> None:
        """Samples a token of each running completion, and sends the pieces that are due."""
        while self.waiting and len(self.running) < SLOTS:
            id, completion = self.waiting.popleft()
            self.running[id] = completion
        self.next_step = now + STEP + STEP_PER_COMPLETION * len(self.running)
        pieces = defaultdict[Link, list[tuple[int, Sampled]]](list)
        for id, one in list(self.running.items()):
            one.since = now if one.done == one.sent else one.since
            one.done += 1
            is_last = one.done == one.params.max_tokens
            if is_last or self._is_due(one, now):
                pieces[one.link].append((id, self._piece(one, is_last=is_last)))
                one.sent, one.sent_at = one.done, now
            if is_last:
                del self.running[id]
        for link, found in pieces.items():
            link.send(found)

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


def sample(address: str, names: list[str], words: list[int], fronts: int) -> None:
    """The process of all replicas. It ends with the gateway."""
    arrived: queue.SimpleQueue[tuple[Replica, Link, ProcessRequest]] = queue.SimpleQueue()
    replicas = []
    for name in names:
        variables = dict(zip(Link.VARIABLES, (address, name, SECRET.decode()), strict=True))
        replica = Replica(Link.from_environment(variables), words)

        def deliver(link: Link, request: ProcessRequest, replica: Replica = replica) -> None:
            arrived.put((replica, link, request))

        if fronts:  # Another checkout may have none.
            from agentjet.processes.rpc import admit_fronts

            replica.address = admit_fronts(replica.link, deliver).address
        replica.link.read_forever(partial(deliver, replica.link))
        replicas.append(replica)
    while True:
        now = time.monotonic()
        for replica in replicas:
            if replica.next_step <= now:
                replica.advance(now)
        due = min(replica.next_step for replica in replicas)
        time.sleep(max(0.0, due - time.monotonic()))
        while not arrived.empty():
            replica, link, request = arrived.get()
            replica.accept(link, request)


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

    def __init__(self, info: ModelInfo, words: list[int], fronts: int) -> None:
        super().__init__(info, 0.0)
        self.on_replicas: Callable[[PolicyId], None] = lambda policy: None
        self._words, self._fronts, self._count = words, fronts, REPLICAS * max(1, fronts)
        self._peers: dict[str, asyncio.Future[Peer]] = {}
        self._process: subprocess.Popen[bytes] | None = None

    async def open(self) -> None:
        """Starts the replicas, and gives them weights."""
        self._listener = Listener("127.0.0.1", SECRET, partial(self._claim, asyncio.get_running_loop()))
        settings = SamplerConfig(max_concurrent=SLOTS)
        secret = {"secret": SECRET} if self._fronts else {}  # Another checkout may have none.

        def make_fleet(assign: Callable[[], None]) -> Fleet:
            def changed() -> None:
                assign()
                self.on_replicas(PolicyId())

            return Fleet(PolicyId(), self._start, self._count, settings, changed, timeout=1e6, **secret)

        self._replicas = Replicas(make_fleet)
        await self._replicas.fleet.publish(PUBLICATION)

    async def _start(self, name: str) -> Peer:
        """See `fleet.Start`. The last one starts the process."""
        self._peers[name] = asyncio.get_running_loop().create_future()
        if len(self._peers) == self._count:
            given = json.dumps([self._listener.address, list(self._peers), self._words, self._fronts])
            self._process = subprocess.Popen([sys.executable, "-m", "bench.front", "sample", given])
        peer = await self._peers[name]
        if self._fronts:
            peer.address = await peer.ask("load")
        return peer

    def _claim(self, loop: asyncio.AbstractEventLoop, name: str) -> Any:
        async def connect(connection: Any) -> None:
            self._peers[name].set_result(Peer(name, *await asyncio.open_connection(sock=connection)))

        return lambda connection: asyncio.run_coroutine_threadsafe(connect(connection), loop)

    # What `server.fronts.Fronts` needs of a `ProcessCompute`.

    def replicas(self, policy: PolicyId) -> Any:
        return self._replicas.fleet.facts()

    def heard(self, front: int, report: Mapping[PolicyId, Any]) -> None:
        for work in report.values():
            self._replicas.fleet.heard(front, work)

    def front_gone(self, front: int) -> None:
        """The replicas keep what a front had: none ends here."""

    def others(self, front: int) -> dict[PolicyId, Any]:
        return {PolicyId(): self._replicas.fleet.others(front)}

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


def config(data_dir: str, fronts: int) -> ServeConfig:
    unlimited = dict.fromkeys(("max_connections", "max_episodes_per_client", "max_calls_per_client"), 1_000_000)
    job = {
        "batch_size": 100_000,
        "group_size": 8,
        "checkpoint_every": 0,
        "lease_seconds": 3600.0,
        "max_episode_seconds": 3600.0,
        "max_tokens": 4096,
    }
    server: dict[str, Any] = {"data_dir": data_dir, "call_timeout": 3600.0, **unlimited}
    settings = {"model": {"name": MODEL}, "server": server, "job": job}
    if fronts:
        settings |= {"server": {**server, "fronts": fronts}, "compute": {"backend": "cluster"}}
    return ServeConfig.model_validate(settings)


async def serve(data_dir: str, fronts: int) -> None:
    info = model_info(Path(data_dir) / "tokenizer")
    words = single_words(info.tokenizer_path)
    compute = ReplicatedCompute(info, list(words.values()), fronts)
    given = config(data_dir, fronts)
    try:
        await compute.open()
        with ExitStack() as stack:
            listener, *others = [stack.enter_context(listen("127.0.0.1", 0, backlog=4096)) for _ in range(1 + fronts)]
            found: Any = None
            if fronts:  # Another checkout may have none.
                from agentjet.fronts.supervision import FrontProcesses as Fronts

                found = Fronts(given, compute, others, time.time)  # type: ignore[arg-type]
            runs = Runs(given, compute, **({"fronts": found} if fronts else {}))
            app = create_app(runs, Keys.open(Path(data_dir)))
            (Path(data_dir) / "words.json").write_text(json.dumps(list(words)))
            await runs.start()
            await runs.default.engine.wait_until_up()
            while fronts and not all(one.ready for one in found.views()):
                await asyncio.sleep(0.05)
            tune_python()
            print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
            await uvicorn.Server(uvicorn_config(app, runs.default.config.server)).serve([listener])
        await runs.close()
    finally:
        compute.end()


# ---- the agents, a separate process ----------------------------------------------------------------------------------


class Agents:
    """Plays episodes, and measures the CPU seconds of the gateway's processes meanwhile, by kind: `server`, `front`."""

    def __init__(self, url: str, data_dir: str, pid: int) -> None:
        self._url = url
        self._token = (Path(data_dir) / "token").read_text().strip()
        self._words: list[str] = json.loads((Path(data_dir) / "words.json").read_text())
        server = psutil.Process(pid)
        commands = {one: " ".join(one.cmdline()) for one in server.children(recursive=True)}
        kinds = {one: "front" if "agentjet.fronts" in command else "server" for one, command in commands.items()}
        self._kinds = {server: "server"} | {one: kind for one, kind in kinds.items() if SAMPLE not in commands[one]}
        self._idle = {"server": 0.0, "front": 0.0}
        """CPU seconds a second without calls."""

    async def warm_up(self, fronts: int = 1) -> None:
        """Plays some episodes, then measures the CPU time that passes without calls."""
        await self.play([[Turn(0.0, 1000, 16, i % 2 == 0)] * 2 for i in range(32 * fronts)])
        before, began = self._cpu(), time.monotonic()
        await asyncio.sleep(LEAST_SECONDS)
        seconds = time.monotonic() - began
        self._idle = {kind: (now - before[kind]) / seconds for kind, now in self._cpu().items()}

    async def reference(self, fronts: int = 1) -> dict[str, float]:
        """Plays the reference workload; returns milliseconds of a call by kind of process.

        Every call has the mean sizes of the workload: costs are linear in them, and no long tail is waited for.
        """
        work, calls = AGENTS, round(AGENTS.calls.mean)
        sizes = [work.first_context] + [round(work.context.mean)] * (calls - 1)
        episodes = [
            [Turn(0.0, size, round(work.completion.mean), (number + i) % 2 == 0) for i, size in enumerate(sizes)]
            for number in range(EPISODES * fronts)
        ]
        used = await self.play(episodes)
        return {kind: 1e3 * seconds / sum(map(len, episodes)) for kind, seconds in used.items()}

    async def measure(self) -> dict[str, float]:
        await self.warm_up()
        found = {"front_call_ms": sum((await self.reference()).values())}
        tokens = await self.of_tokens()
        found |= {"plain_token_us": 1e6 * tokens["per_token"], "streamed_token_us": 1e6 * tokens["per_streamed_token"]}
        return found | {"idle_share": sum(self._idle.values())}

    async def of_tokens(self) -> dict[str, float]:
        """Returns CPU seconds of a token of a plain and of a streamed answer."""
        short, long = LENGTHS
        found = {}
        for name, streams in (("per_token", False), ("per_streamed_token", True)):
            costs = [await self._each([Turn(0.0, 32, length, streams)]) for length in LENGTHS]
            found[name] = (costs[1]["server"] - costs[0]["server"]) / (long - short)
        return found

    async def of_episode(self, fronts: int = 1) -> dict[str, float]:
        """Returns CPU seconds of begin and finish, by kind of process."""
        turn = Turn(0.0, 32, 16, False)
        one, two = await self._each([turn], fronts), await self._each([turn] * 2, fronts)
        return {kind: max(0.0, 2 * one[kind] - two[kind]) for kind in one}

    async def of_prompts(self) -> dict[str, float]:
        """Returns CPU seconds of a token of a prompt, and further ones of a token that was not known."""
        short, long = Turn(0.0, 32, 16, False), Turn(0.0, 32 + PROMPT, 16, False)
        turns = ([short], [long], [short] * 2, [long, short])
        costs = [(await self._each(one))["server"] for one in turns]
        known = max(0.0, (costs[3] - costs[1]) - (costs[2] - costs[0])) / PROMPT
        return {"per_prompt_token": known, "per_new_token": (costs[1] - costs[0]) / PROMPT - known}

    async def _each(self, turns: list[Turn], fronts: int = 1) -> dict[str, float]:
        """Plays equal episodes; returns CPU seconds of one of them."""
        count = REPLICAS * SLOTS * fronts
        return {kind: seconds / count for kind, seconds in (await self.play([turns] * count)).items()}

    async def play(self, episodes: list[list[Turn]]) -> dict[str, float]:
        """Plays all episodes at once; returns the CPU seconds that are due to them."""
        before, began = self._cpu(), time.monotonic()
        await asyncio.gather(*(self._episode(number, turns) for number, turns in enumerate(episodes)))
        seconds = time.monotonic() - began
        return {kind: now - before[kind] - self._idle[kind] * seconds for kind, now in self._cpu().items()}

    def _cpu(self) -> dict[str, float]:
        found = {"server": 0.0, "front": 0.0}
        for process, kind in self._kinds.items():
            found[kind] += sum(process.cpu_times()[:2])
        return found

    async def _episode(self, number: int, turns: list[Turn]) -> None:
        rng, control = random.Random(number), Connection(self._url)
        begin = {"task_id": f"task-{number // 8}", "client_id": "bench"}
        begun = (await control.request("POST", "/swarm/v1/episodes", self._token, begin)).json()
        calls = Connection(begun["base_url"])
        messages: list[dict[str, str]] = []
        for turn in turns:
            text = "".join(rng.choices(self._words, k=turn.context))
            messages.append({"role": "user", "content": text})
            body = {"model": "policy", "messages": messages, "max_tokens": turn.completion, "stream": turn.streams}
            reply = await calls.request("POST", "/v1/chat/completions", begun["api_key"], body)
            messages.append({"role": "assistant", "content": reply.text()})
        calls.close()
        path = f"/swarm/v1/episodes/{begun['episode_id']}/finish"
        (await control.request("POST", path, self._token, {"reward": float(number % 2)})).json()
        control.close()


# ---- measurements of this checkout and of another --------------------------------------------------------------------


@contextmanager
def served(fronts: int = 0, checkout: Path = ROOT) -> Iterator[dict[str, Any]]:
    """While inside, a gateway of a checkout runs. Yields the arguments of its `Agents`."""
    path = os.pathsep.join((str(checkout / "src"), str(ROOT)))
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "data"
        data_dir.mkdir()
        command = [sys.executable, "-m", "bench.front", "serve", json.dumps([str(data_dir), fronts])]
        with started(command, Path(folder) / "serve.log", environment={"PYTHONPATH": path}) as url:
            pid = next(one.pid for one in psutil.Process().children() if one.cmdline()[1:] == command[1:])
            try:
                yield {"url": url, "data_dir": str(data_dir), "pid": pid}
            except BaseException:  # Else the reason is gone with the folder.
                logs = [Path(folder) / "serve.log", *sorted((data_dir / "logs").glob("*.log"))]
                for log in logs:
                    print(f"{log.name}: {log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
                raise


def measure(checkout: Path = ROOT) -> dict[str, float]:
    """The figures of a checkout, with a gateway that starts now."""
    with served(checkout=checkout) as one:
        figures: dict[str, float] = ask_process("bench.front", "load", json.dumps([one]))
    return figures


def compare(fronts: int, times: int) -> dict[str, Any]:
    """Returns `rounds` of milliseconds of a call by kind of process: with fronts (`fronts`), without (`alone`), and in
    as many servers without fronts at the same time (`apart`), which need more CPU than one because they share cores.
    Returns also the `costs` of `capacity.Costs` in seconds that do not follow from them.
    """
    with ExitStack() as stack:
        apart = [stack.enter_context(served()) for _ in range(fronts)]
        many = stack.enter_context(served(fronts))
        found: dict[str, Any] = ask_process("bench.front", "compare", json.dumps([apart, many, times]))
    return found


async def play_in_turn(apart: Sequence[Mapping[str, Any]], many: Mapping[str, Any], times: int) -> dict[str, Any]:
    servers, other, fronts = [Agents(**each) for each in apart], Agents(**many), len(apart)
    one = servers[0]
    for server in servers:
        await server.warm_up()
    await other.warm_up(fronts)
    rounds = []
    for _ in range(times):
        alone, together = await one.reference(), await asyncio.gather(*(each.reference() for each in servers))
        shared = statistics.fmean(each["server"] for each in together)
        rounds.append({"alone": alone, "apart": {"server": shared}, "fronts": await other.reference(fronts)})
    in_fronts = await other.of_episode(fronts)
    costs = {"episode": (await one.of_episode())["server"], **await one.of_tokens(), **await one.of_prompts()}
    costs |= {"front_episode": in_fronts["front"], "server_episode": in_fronts["server"]}
    return {"rounds": rounds, "costs": costs}


def main(kind: str, given: str) -> None:
    arguments = json.loads(given)
    if kind == "serve":
        asyncio.run(serve(*arguments))
    elif kind == "sample":
        sample(*arguments)
    elif kind == "compare":
        print(json.dumps(asyncio.run(play_in_turn(*arguments))))
    else:
        print(json.dumps(asyncio.run(Agents(**arguments[0]).measure())))


if __name__ == "__main__":
    main(*sys.argv[1:])
