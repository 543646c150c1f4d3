"""A gateway whose model is a script, as a process: `python -m bench.scripted SETTINGS`, with `Settings` as JSON.

Everything of `agentjet serve` except the model: uvicorn on loopback, keys, renderer, trees, a journal on disk. The
model always samples the same twenty tokens and costs next to nothing, so a bench measures the gateway. The tokenizer is
a real one (byte-level BPE without merges, so a token is a byte) in a real folder, with a real chat template. Prints its
address on standard output when it is ready, and ends on SIGTERM.

Adds two routes: `GET /counters` (CPU time, memory, waits and writes of the process) and `GET /empty` (a page without a
script).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.responses import HTMLResponse
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentjet.config import ServeConfig
from agentjet.front.http import listen, tune_python, uvicorn_config
from agentjet.front.keys import Keys
from agentjet.server.app import create_app
from agentjet.server.runs import Runs
from agentjet.swarm import Journal
from agentjet.types import ModelInfo, PolicyId, Sampled, SamplingParams
from bench.machine import forget_peak, memory_mb, percentile
from tests import fakes

MODEL = "scripted"
ANSWER = "Look at row 42 next"  # Nineteen tokens, and the one that ends a turn
END = "<|im_end|>"
EMPTY = "<!doctype html><html lang=en><title>Empty</title><p>Empty"
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
WATCH_SECONDS = 0.002  # Between two looks of `Watch`


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the process; `job` and `server` are those sections of `agentjet serve`."""

    data_dir: str
    seconds: float = 0.0  # Duration of a completion, over which its tokens are evenly spread
    waits_for_disk: bool = True  # False: answers before the disk has the journal, unlike the product
    watches: bool = False  # A timer of the event loop measures its stops: see `Watch`
    context_length: int = 16_384
    job: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)

    def config(self) -> ServeConfig:
        server = {"data_dir": self.data_dir, **self.server}
        return ServeConfig.model_validate({"model": {"name": MODEL}, "server": server, "job": self.job})

    def command(self) -> list[str]:
        return [sys.executable, "-m", "bench.scripted", json.dumps(asdict(self))]


def make_model_info(folder: Path, context_length: int = 16_384) -> ModelInfo:
    """Writes the tokenizer into `folder`, which is made; returns the card that a worker would send."""
    special = ("<|endoftext|>", "<|im_start|>", END)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate((*special, *letters))}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return ModelInfo(
        name=MODEL,
        tokenizer_path=str(folder),
        chat_template=TEMPLATE,
        context_length=context_length,
        end_tokens=(special.index(END),),
        eos_token=END,
    )


class ScriptedCompute(fakes.ScriptedCompute):
    """See `compute.protocol.Compute`. Nothing is learned: the benches fill no batch."""

    def __init__(self, card: ModelInfo, seconds: float) -> None:
        super().__init__(card, lambda prompt, params: ())
        made = Tokenizer.from_file(f"{card.tokenizer_path}/tokenizer.json")
        self._answer = (*made.encode(ANSWER, add_special_tokens=False).ids, card.end_tokens[0])
        self._seconds = seconds

    async def sample(
        self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Sampled]:
        # Every piece has its own due time, counted from the start, so that late ones do not add up.
        loop = asyncio.get_running_loop()
        began, answer, version = loop.time(), self._answer, self.policies[policy].version
        start, sent_at = 0, -1.0
        for done in range(1, len(answer) + 1):
            at = self._seconds * done / len(answer)
            if done == len(answer) or params.is_due(done - start, sent_at, at):
                await asyncio.sleep(max(0.0, began + at - loop.time()))
                piece = answer[start:done]
                yield Sampled(piece, (-0.5,) * len(piece), version, "stop" if done == len(answer) else None)
                start, sent_at = done, at


class TimedSync:
    """A journal's wait for the disk, and how long each took; or none at all."""

    def __init__(self, journal: Journal, *, wait: bool) -> None:
        self._sync = journal.file.sync if wait else lambda: None
        self.waits: list[float] = []
        journal.file.sync = self  # type: ignore[method-assign]

    def __call__(self) -> None:
        began = time.perf_counter()
        self._sync()
        self.waits.append(time.perf_counter() - began)


class Watch:
    """The longest stop of an event loop, in CPU seconds of its process and in seconds of the wall clock.

    A callback that asks to be called every few milliseconds notes how much of both passed between two of its calls.
    Time in which another thread holds Python's lock counts, as the loop stands still then, too.
    """

    def __init__(self, every: float = WATCH_SECONDS) -> None:
        self._loop, self._every = asyncio.get_running_loop(), every
        self._last, self._longest = self._now(), (0.0, 0.0)
        self._loop.call_later(every, self._look)

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.process_time(), time.monotonic()

    def _look(self) -> None:
        (cpu, wall), now = self._last, self._now()
        self._longest = max(self._longest[0], now[0] - cpu), max(self._longest[1], now[1] - wall)
        self._last = now
        self._loop.call_later(self._every, self._look)

    def watched(self) -> dict[str, float]:
        """Since the last time; memory in MiB, now and at its highest."""
        (stall, wall), self._longest = self._longest, (0.0, 0.0)
        sizes = {"rss_mb": memory_mb(), "highest_mb": memory_mb("VmHWM")}
        forget_peak()
        return {"stall_s": stall, "wall_s": wall, **sizes}


def counters(timed: TimedSync) -> dict[str, float]:
    """CPU seconds, resident memory, and the waits for the disk since the last time."""
    waits, timed.waits = timed.waits, []
    return {
        "cpu_s": time.process_time(),
        "rss_mb": memory_mb(),
        "commits": len(waits),
        "commit_s": sum(waits),
        "commit_p50_ms": 1000 * percentile(waits, 50),
        "commit_p99_ms": 1000 * percentile(waits, 99),
    }


async def serve(settings: Settings) -> None:
    card = make_model_info(Path(settings.data_dir) / "tokenizer", settings.context_length)
    compute = ScriptedCompute(card, settings.seconds)
    runs = Runs(settings.config(), compute)
    journal = runs.default._journal
    if not settings.waits_for_disk:
        journal.file.db.execute("PRAGMA synchronous = OFF")
    timed, watches = TimedSync(journal, wait=settings.waits_for_disk), list[Watch]()

    async def counted() -> dict[str, float]:
        found = counters(timed)
        return found | (watches[0].watched() if watches else {})  # Last: the counting itself is no stop of the loop.

    app: FastAPI = create_app(runs, Keys.open(Path(settings.data_dir)))
    app.add_api_route("/counters", counted)
    app.add_api_route("/empty", lambda: HTMLResponse(EMPTY))
    try:
        with listen("127.0.0.1", 0, backlog=4096) as listener:
            await runs.start()
            await runs.default.engine.wait_until_up()
            tune_python()
            if settings.watches:
                watches.append(Watch())
            print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
            await uvicorn.Server(uvicorn_config(app, runs.default.config.server)).serve([listener])
        await runs.close()
    finally:
        await compute.close()


if __name__ == "__main__":
    asyncio.run(serve(Settings(**json.loads(sys.argv[1]))))
