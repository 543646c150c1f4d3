"""A gateway before replicas of a fixed token rate, as a process: `python -m bench.queueing.serve SETTINGS`.

Everything of `agentjet serve` except the models: uvicorn on loopback, keys, renderer, trees, a journal on disk, and
replicas in another process over TCP. Prints its address on standard output when it is ready, and ends on SIGTERM. Adds
the route `GET /counters`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import uvicorn
from tokenizers import Tokenizer

from agentjet.compute.cluster.fleet import Fleet
from agentjet.compute.cluster.replicas import Replicas
from agentjet.compute.cluster.weights import Publication
from agentjet.compute.protocol import LossSpec, Outputs
from agentjet.config import OptimizerConfig, SamplerConfig, ServeConfig
from agentjet.config.loader import cache_dir
from agentjet.gateway.runs import Runs
from agentjet.processes.guardian import Launch
from agentjet.processes.supervisor import Supervisor
from agentjet.rendering.chat_template import template_for
from agentjet.server import Keys, create_app
from agentjet.server.http import listen, tune_python, uvicorn_config
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import ModelInfo, Op, PolicyId, Sampled, SamplingParams
from bench.gatewaying.scripted import MODEL, ScriptedCompute, make_model_info
from bench.queueing import replica

WORDS = (
    "look",
    "at",
    "table",
    "row",
    "find",
    "sum",
    "the",
    "value",
    "in",
    "next",
    "column",
    "and",
    "add",
    "it",
    "to",
    "data",
)
PUBLICATION = Publication(0, "127.0.0.1:1", "/weights", 0, "", "float32", (0,) * 64, (-0.5,) * 63)


@dataclass(frozen=True, slots=True)
class Settings:
    """The gateway and its replicas. With `learn_seconds` batches of `batch_groups` groups are learned in that time."""

    data_dir: str
    replicas: int = 1
    slots: int = 64
    step: float = 0.001
    batch_groups: int = 100_000
    group_size: int = 8
    max_staleness: int = 0
    learn_seconds: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def model_info(folder: Path) -> ModelInfo:
    """The tokenizer and template of SmolLM2 if that was unpacked here, else bytes as tokens."""
    scripted = make_model_info(folder)
    for bundled in sorted(cache_dir().glob("smollm2-135m-*/tokenizer.json")):
        template, tool_format = template_for("smollm2-135m", "")
        return replace(
            scripted,
            tokenizer_path=str(bundled.parent),
            chat_template=template,
            tool_format=tool_format,
            context_length=1 << 20,
            end_tokens=(2,),
        )
    return replace(scripted, context_length=1 << 20)


def words(tokenizer_path: str) -> dict[str, int]:
    """Texts of one token each, which stay so in any order, and their tokens."""
    tokenizer = Tokenizer.from_file(f"{tokenizer_path}/tokenizer.json")
    for texts in ([f" {word}" for word in WORDS], list("abcdefgh")):
        found = {text: tokenizer.encode(text, add_special_tokens=False).ids for text in texts}
        if single := {text: ids[0] for text, ids in found.items() if len(ids) == 1}:
            return single
    raise AssertionError("the tokenizer has no token of one letter")


class Endless:
    """See `Process`. All of them end with their server."""

    place, log_path = "", Path()

    def __init__(self) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def stop(self) -> None:
        if not self.ended.done():
            self.ended.set_result("was stopped")


class ReplicatedCompute(ScriptedCompute):
    """See `compute.protocol.Compute`. The cluster's router, real connections, and a learner that only waits."""

    def __init__(self, info: ModelInfo, settings: Settings) -> None:
        super().__init__(info, 0.0)
        self._info = info
        self._settings = settings
        self._links: list[dict[str, str]] = []
        self._process: subprocess.Popen[bytes] | None = None

    async def open(self) -> None:
        """Start the replicas, all in one process, and give them weights."""
        supervisor = Supervisor("127.0.0.1", self)
        settings = SamplerConfig(max_concurrent=self._settings.slots)
        make_fleet = partial(
            Fleet,
            PolicyId("default", "policy"),
            lambda name: supervisor.start(Launch(name, (), Path())),
            self._settings.replicas,
            settings,
            timeout=1e6,
        )
        self._replicas = Replicas(make_fleet)
        await self._replicas.fleet.publish(PUBLICATION)

    async def num_gpus(self) -> None:
        """There are none."""

    async def start(self, launch: Launch) -> Endless:
        """See `Placement`. The last one starts the process."""
        self._links.append(dict(launch.environment))
        if len(self._links) == self._settings.replicas:
            tokens = list(words(self._info.tokenizer_path).values())
            given = {"links": self._links, "words": tokens, "slots": self._settings.slots, "step": self._settings.step}
            environment = {**os.environ, replica.VARIABLE: json.dumps(given)}
            self._process = subprocess.Popen([sys.executable, "-m", replica.__name__], env=environment)
        return Endless()

    def kill(self) -> None:
        """End the replicas. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def sample(
        self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Sampled]:
        async with aclosing(self._replicas.sample(token_ids, params)) as pieces:
            async for piece in pieces:
                yield piece

    async def load_batch(self, policy: PolicyId, batch: TrainingBatch) -> None:
        return

    async def forward_backward(self, op: Op, batch_id: int, loss: LossSpec) -> Outputs:
        await asyncio.sleep(self._settings.learn_seconds)
        return Outputs({})

    async def optim_step(self, op: Op, optimizer: OptimizerConfig) -> dict[str, float]:
        return {"optim/grad_norm": 1.0}

    async def publish(self, policy: PolicyId, version: int, **how: bool) -> dict[str, float]:  # type: ignore[override]
        return {}


def config(settings: Settings) -> ServeConfig:
    unlimited = dict.fromkeys(("max_connections", "max_episodes_per_client", "max_calls_per_client"), 1_000_000)
    job = {
        "batch_size": settings.batch_groups,
        "group_size": settings.group_size,
        "max_staleness": settings.max_staleness,
        "checkpoint_every": 0,
        "lease_seconds": 3600.0,
        "max_episode_seconds": 3600.0,
        "max_tokens": 4096,
    }
    server = {"data_dir": settings.data_dir, "call_timeout": 3600.0, **unlimited}
    return ServeConfig.model_validate({"model": {"name": MODEL}, "server": server, "job": job})


def counters(runs: Runs) -> dict[str, float]:
    """CPU seconds, seconds ready to run without a core (event loop), bytes of memory, written bytes, rows (Linux)."""
    db = runs.default._journal.file.db
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    tables = ("episodes", "groups", "calls", "events", "idempotency", "instances", "batches", "operations")
    return {
        "cpu_s": time.process_time(),
        "wait_s": int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9,
        "rss": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "written": float(io["wchar"]),
        "file": db.execute("PRAGMA page_count").fetchone()[0] * db.execute("PRAGMA page_size").fetchone()[0],
        "call_bodies": db.execute("SELECT SUM(LENGTH(body)) FROM calls").fetchone()[0] or 0,
        "rows": sum(db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in tables),
        "calls": db.execute("SELECT COUNT(*) FROM calls").fetchone()[0],
    }


async def serve(settings: Settings) -> None:
    data_dir = Path(settings.data_dir)
    data_dir.mkdir(parents=True)
    info = model_info(data_dir / "tokenizer")
    compute = ReplicatedCompute(info, settings)
    try:
        await compute.open()
        runs = Runs(config(settings), compute)
        app = create_app(runs, Keys.open(data_dir))
        app.add_api_route("/counters", lambda: counters(runs))
        (data_dir / "words.json").write_text(json.dumps(list(words(info.tokenizer_path))))
        with listen("127.0.0.1", 0, backlog=4096) as listener:
            await runs.start()
            await runs.default.engine.wait_until_up()
            tune_python()
            print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
            await uvicorn.Server(uvicorn_config(app, runs.default.config.server)).serve([listener])
    finally:
        compute.kill()


if __name__ == "__main__":
    asyncio.run(serve(Settings(**json.loads(sys.argv[1]))))
