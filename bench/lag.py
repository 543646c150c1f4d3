"""The longest gap of a server's event loop under heavy work: `python -m bench.lag`.

Each case is one `agentjet serve` with a tiny model, over a journal that was prepared. A timer of its loop runs every
5 ms. Two figures are of the longest time between two of its runs:

* **ms**: CPU time of the whole server process, of all threads, so that other programs do not count. Children do not
  count either.
* **wall_ms**: time on the clock. It shows a hook that sleeps, and it grows on a busy machine.

| case | work |
|---|---|
| checkpoint | the journal deletes 20,000 calls of 55 kB that a checkpoint covers |
| rotation | a checkpoint of 6 GB is removed |
| turns | 8 episodes of 50 turns finish with rewards of turns, and are learned |
| batch | a batch of 100 MB is built from the journal, sent and learned in 8 steps |
| members | a batch of 128 groups of 8 episodes is learned |
| events | 200 streams read 7,000 events from the first on |
| hook_columns, hook_rollout | a hook next to the weights, and one of the gateway, sleep 40 s |
| schema | an agent asks for an answer by a schema with `multipleOf = 9999991` |
| resume | after a restart an episode with 50 long calls makes its next call |

Prints a table, then one JSON object as the last line. The exit code is 1 if a case exceeds 50 ms of CPU time, or 5 s
on the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from rich.console import Console

from agentjet.cli import server_process
from agentjet.config import ServeConfig
from agentjet.front.keys import Keys
from agentjet.recipes.baselines import Grpo
from agentjet.types import JOURNAL
from bench.machine import ROOT, grid, missed_bounds, report, started
from bench.scripted import Watch
from bench.wire import ask
from tests.swarm.world import World
from tests.tiny import make_model

EVERY = 0.005  # Seconds between two runs of the timer
LIMITS = {"ms": 50.0, "wall_ms": 5000.0}
TOKEN = re.compile(r"Token of clients")
ADDRESS = re.compile(r"listens on (http://[\d.:]+)")
CALL_BYTES = 55_000
NUM_GROUPS = 128
PATIENCE = 600.0  # Seconds after which a server that has not done its work is given up


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the cases: those that are asked for, unless they are given."""

    calls: int = 20_000
    gigabytes: float = 6.0
    turns: int = 50
    turn_tokens: int = 1500
    batch_tokens: int = 2_600_000
    streams: int = 200
    events: int = 7000
    seconds: float = 40.0


QUICK = Sizes(200, 0.05, 5, 50, 20_000, 5, 400, 2.0)


@dataclass(frozen=True, slots=True)
class Live:
    """A server that is up."""

    url: str
    folder: Path  # The folder of the default run

    def ask(self, method: str, path: str, body: Any = None, key: str = "") -> Any:
        """An answer as JSON, also a refusal. `path` may be a URL."""
        key = key or (self.folder.parents[1] / "token").read_text().strip()
        return ask(method, path if "://" in path else self.url + path, key, body)

    def status(self) -> Any:
        return self.ask("GET", "/swarm/v1/status")

    def begin(self, **request: Any) -> Any:
        return self.ask("POST", "/swarm/v1/episodes", {"task_id": "t", "client_id": "bench", **request})

    def say(self, episode: Any, **request: Any) -> Any:
        """One call of an episode."""
        body = {"model": "policy", "messages": [{"role": "user", "content": "Say digits."}], **request}
        return self.ask("POST", f"{episode['base_url']}/chat/completions", body, episode["api_key"])

    def finish(self, episode_id: str, reward: float, **request: Any) -> Any:
        return self.ask("POST", f"/swarm/v1/episodes/{episode_id}/finish", {"reward": reward, **request})

    def play(self, *rewards: float) -> None:
        """Episodes of one group, each with a call."""
        group = f"group {time.time()}"
        for episode in [self.begin(group=group) for _ in rewards]:
            self.say(episode)
            self.finish(episode["episode_id"], rewards[0])
            rewards = rewards[1:]

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits until it is so. Raises `TimeoutError`."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"it took more than {PATIENCE:g} s: {self.status()}")
            time.sleep(0.2)

    def learned(self, version: int) -> Any:
        """The metrics of the batch that leads to a version, once it and its checkpoint are done."""
        self.until(lambda: (now := self.status())["policy_version"] >= version and now["state"] == "sampling")
        with self.journal() as journal:
            (metrics,) = journal.execute("SELECT metrics FROM batches WHERE id = ?", (version - 1,)).fetchone()
        return json.loads(metrics)

    @contextmanager
    def journal(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(f"file:{self.folder / JOURNAL}?mode=ro", uri=True)) as connection:
            yield connection

    def num_calls(self) -> int:
        with self.journal() as journal:
            return int(journal.execute("SELECT COUNT(*) FROM calls").fetchone()[0])


@dataclass(frozen=True, slots=True)
class Case:
    """Work of a server. `act` returns facts that show that the work was done."""

    act: Callable[[Live, Sizes], dict[str, Any]]
    prepare: Callable[[Path, Sizes], None] | None = None  # Writes the journal in the folder of the run
    job: dict[str, Any] = field(default_factory=dict)
    recipe: str = ""  # The import path of a recipe with a sleeping hook
    first: Callable[[Live, Sizes], None] | None = None  # Work of an earlier server on the same folder
    between: Callable[[Path, Sizes], None] | None = None  # Changes of the folder between the two servers


# ---- recipes with a hook that sleeps ---------------------------------------------------------------------------------


class SleepyColumns(Grpo):
    """A hook next to the weights."""

    seconds: float = 40.0  # That the hook sleeps

    def columns(self, batch: Any, outputs: Any) -> Any:
        time.sleep(self.seconds)
        return super().columns(batch, outputs)


class SleepyRollout(Grpo):
    """A hook of the gateway."""

    seconds: float = 40.0

    def rollout(self, task: Any, default: Any, version: int) -> Any:
        time.sleep(self.seconds)
        return default


# ---- the cases -------------------------------------------------------------------------------------------------------


@contextmanager
def world(folder: Path, **job: Any) -> Iterator[World]:
    """A swarm on the journal of a run, whose episodes begin now."""
    swarm = World(folder, **job)
    swarm.now = time.time()
    try:
        yield swarm
    finally:
        swarm.close()


def tokens(draw: random.Random, number: int) -> list[int]:
    """Random tokens, so that episodes share no prefix."""
    return draw.choices(range(3, 203), k=number)


def learn_one(live: Live, sizes: Sizes) -> None:
    live.play(1.0, 0.0)
    live.learned(1)


def add_calls(folder: Path, sizes: Sizes) -> None:
    """Copies the calls of the learned batch. Spaces lengthen the JSON of their bodies."""
    with closing(sqlite3.connect(folder / JOURNAL)) as connection:
        (number,) = connection.execute("SELECT COUNT(*) FROM calls").fetchone()
        connection.executescript(
            f"""PRAGMA synchronous = OFF; BEGIN;
            WITH RECURSIVE counted(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM counted WHERE n < {sizes.calls / number})
            INSERT INTO calls (id, episode_id, undelivered, body, role, untrained, num_tokens, num_bytes)
            SELECT calls.id || '.' || n, episode_id, 0, body || printf('%*s', {CALL_BYTES} - LENGTH(body), ''), role,
            'side', num_tokens, {CALL_BYTES} FROM counted, calls; COMMIT;"""
        )


def checkpoint(live: Live, sizes: Sizes) -> dict[str, Any]:
    before = live.num_calls()
    live.play(1.0, 0.0)
    live.learned(2)
    live.until(lambda: live.num_calls() < 10)
    return {"deleted_calls": before - live.num_calls()}


def add_gigabytes(folder: Path, sizes: Sizes) -> None:
    block = os.urandom(2**20)
    with (folder / "checkpoints" / "step_000001" / "more").open("wb") as file:
        for _ in range(int(sizes.gigabytes * 10**9 / len(block))):
            file.write(block)


def rotation(live: Live, sizes: Sizes) -> dict[str, Any]:
    checkpoints = live.folder / "checkpoints"
    size = sum(path.stat().st_size for path in checkpoints.rglob("*"))
    live.play(1.0, 0.0)
    live.learned(2)
    live.until(lambda: not [*checkpoints.glob("*step_000001*")])
    return {"removed_gb": round((size - sum(path.stat().st_size for path in checkpoints.rglob("*"))) / 10**9, 2)}


def open_episodes(folder: Path, sizes: Sizes) -> None:
    """A group of 8 live episodes with many turns."""
    draw = random.Random(0)
    with world(folder, batch_size=1, group_size=8, recipe="dense_turn_credit") as swarm:
        for episode in [swarm.begin("g", client_id="bench") for _ in range(8)]:
            call = None
            for _ in range(sizes.turns):
                call = swarm.call(episode, *tokens(draw, sizes.turn_tokens), parent=call, kept=0 if call is None else 2)


def live_episodes(live: Live) -> dict[str, float]:
    """The live episodes, and when they began."""
    with live.journal() as journal:
        return dict(journal.execute("SELECT id, begun FROM episodes WHERE status = 'live'").fetchall())


def turns(live: Live, sizes: Sizes) -> dict[str, Any]:
    episodes = [*live_episodes(live)]
    for number, episode_id in enumerate(episodes):
        live.finish(episode_id, 1.0, by_turn={"": [number * turn / sizes.turns for turn in range(sizes.turns)]})
    metrics = live.learned(1)
    return {"members": len(episodes), "turns": metrics["episode/num_turns"], "tokens": metrics["forest/tokens"]}


def resume(live: Live, sizes: Sizes) -> dict[str, Any]:
    episode_id, begun = next(iter(live_episodes(live).items()))
    key = Keys.open(live.folder.parents[1]).sign(episode_id, begun)
    before = live.num_calls()
    answer = live.say({"base_url": f"{live.url}/v1", "api_key": key})
    return {"answered": "choices" in answer, "added_calls": live.num_calls() - before}


def open_batch(folder: Path, sizes: Sizes) -> None:
    """Groups with many tokens and equal rewards, which the learner need not compute; one member is live."""
    draw = random.Random(0)
    with world(folder, batch_size=9, group_size=8) as swarm:
        for group in range(8):
            for _ in range(8):
                episode, call = swarm.begin(f"g{group}"), None
                for _ in range(4):
                    some = tokens(draw, sizes.batch_tokens // 256)
                    call = swarm.call(episode, *some, parent=call, kept=0 if call is None else 2)
                swarm.finish(episode, 1.0)
        for number, episode in enumerate([swarm.begin("small") for _ in range(8)]):
            swarm.call(episode, 7, 8 + number)
            if number:
                swarm.finish(episode, number % 2)


def batch(live: Live, sizes: Sizes) -> dict[str, Any]:
    live.finish(next(iter(live_episodes(live))), 0.0)
    metrics = live.learned(1)
    return {"tokens": metrics["forest/tokens"], "steps": metrics["optim/steps"]}


def many_groups(folder: Path, sizes: Sizes) -> None:
    """Groups with equal rewards; one member is live."""
    with world(folder, batch_size=NUM_GROUPS, group_size=8) as swarm:
        for group in range(NUM_GROUPS):
            for number in range(8):
                episode = swarm.begin(f"g{group}")
                swarm.call(episode, 7, 8 + number)
                if group or number:
                    swarm.finish(episode, 1.0)


def members(live: Live, sizes: Sizes) -> dict[str, Any]:
    live.finish(next(iter(live_episodes(live))), 0.0)
    return {"members": live.learned(1)["batch/episodes"]}


def emit_events(folder: Path, sizes: Sizes) -> None:
    with world(folder) as swarm:
        for _ in range(sizes.events // 2):
            swarm.abort(swarm.begin("", mode="eval"), "it was tried")


def events(live: Live, sizes: Sizes) -> dict[str, Any]:
    last = live.status()["last_event"]
    host, _, port = live.url.removeprefix("http://").partition(":")
    key = (live.folder.parents[1] / "token").read_text().strip()
    head = f"GET /swarm/v1/events?after=0 HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n\r\n"

    async def stream() -> int:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode())
        tail, num_bytes = b"", 0
        while f"\nid: {last}\n".encode() not in tail:
            if not (piece := await reader.read(65536)):
                raise ConnectionError(f"a stream ended: {tail[-200:]!r}")
            tail, num_bytes = tail[-100:] + piece, num_bytes + len(piece)
        writer.close()
        return num_bytes

    async def all_streams() -> list[int]:
        return await asyncio.gather(*(stream() for _ in range(sizes.streams)))

    sent = asyncio.run(all_streams())
    return {"streams": len(sent), "events": last, "sent_mb": round(sum(sent) / 10**6)}


def hook_columns(live: Live, sizes: Sizes) -> dict[str, Any]:
    began = time.monotonic()
    live.play(1.0, 0.0)
    live.until(lambda: (now := live.status())["policy_version"] == 1 or now["state"] == "failed")
    return {"state": live.status()["state"], "seconds": round(time.monotonic() - began, 1)}


def hook_rollout(live: Live, sizes: Sizes) -> dict[str, Any]:
    began = time.monotonic()
    answer = live.begin(group="g")
    return {"begun": "episode_id" in answer, "seconds": round(time.monotonic() - began, 1)}


def schema(live: Live, sizes: Sizes) -> dict[str, Any]:
    shape = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 9999991}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": shape, "strict": True}}
    answer = live.say(live.begin(mode="eval"), response_format=form)
    return {"refused": answer["error"]["code"]}


SMALL = {"batch_size": 1, "group_size": 2, "checkpoint_every": 1}
TURNS = {"batch_size": 1, "group_size": 8, "recipe": "dense_turn_credit"}
STEPS = {"batch_size": 9, "group_size": 8, "recipe": {"name": "grpo", "epochs": 4, "mini_batches": 2}}
CASES = {
    "checkpoint": Case(checkpoint, job=SMALL, first=learn_one, between=add_calls),
    "rotation": Case(rotation, job={**SMALL, "keep_checkpoints": 1}, first=learn_one, between=add_gigabytes),
    "turns": Case(turns, open_episodes, TURNS),
    "batch": Case(batch, open_batch, STEPS),
    "members": Case(members, many_groups, {"batch_size": NUM_GROUPS, "group_size": 8}),
    "events": Case(events, emit_events),
    "hook_columns": Case(hook_columns, job=SMALL, recipe="bench.lag:SleepyColumns"),
    "hook_rollout": Case(hook_rollout, job=SMALL, recipe="bench.lag:SleepyRollout"),
    "schema": Case(schema),
    "resume": Case(resume, open_episodes, TURNS),
}


# ---- the server ------------------------------------------------------------------------------------------------------


def serve(settings: Path) -> None:
    """`agentjet serve` with a timer of its loop, and the route `GET /watched` for it. The first request starts it."""
    make, watches = server_process.create_app, list[Watch]()

    async def watched() -> dict[str, float]:
        if not watches:
            watches.append(Watch(EVERY))
        return watches[0].watched()

    def create_app(*given: Any) -> FastAPI:
        app = make(*given)
        app.add_api_route("/watched", watched)
        return app

    server_process.create_app = create_app
    server_process.run(ServeConfig.model_validate_json(settings.read_text()))


@contextmanager
def server(case: Case, sizes: Sizes, folder: Path, model: Path) -> Iterator[Live]:
    job = {"max_tokens": 8, "lease_seconds": 3600, "max_episode_seconds": 7200, "checkpoint_every": 0, **case.job}
    if case.recipe:
        job["recipe"] = {"name": case.recipe, "seconds": sizes.seconds}
    settings = {
        "model": {"name": str(model), "device": "cpu", "dtype": "float32", "threads": 1},
        "sampler": {"cache_tokens": 16384},
        "server": {"data_dir": str(folder / "data"), "port": 0, "keep_transcripts": 0},
        "job": job,
    }
    file, log = folder / "settings.json", folder / "serve.log"
    file.write_text(ServeConfig.model_validate(settings).model_dump_json())
    command = [sys.executable, "-m", "bench.lag", "--serve", str(file)]
    with started(command, log, ready=TOKEN.pattern, environment={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}):
        (url,) = ADDRESS.findall(log.read_text())
        yield Live(url, folder / "data" / "runs" / "default")


def measure(case: Case, sizes: Sizes, folder: Path, model: Path) -> dict[str, Any]:
    """The figures of a case, and what it did."""
    run = folder / "data" / "runs" / "default"
    if case.prepare is not None:
        case.prepare(run, sizes)
    if case.first is not None and case.between is not None:
        with server(case, sizes, folder, model) as live:
            case.first(live, sizes)
        case.between(run, sizes)
    with server(case, sizes, folder, model) as live:
        live.ask("GET", "/watched")
        time.sleep(1.0)
        live.ask("GET", "/watched")
        facts = case.act(live, sizes)
        time.sleep(0.1)  # The gap may last.
        watched = live.ask("GET", "/watched")
        loop = live.status()["loop"] or {}
    figures = {"ms": round(1000 * watched["stall_s"], 1), "wall_ms": round(1000 * watched["wall_s"], 1)}
    return {**figures, **({"held_by": loop.get("held_by", "")} if missed_bounds(figures, {}, LIMITS) else {}), **facts}


def run(names: Sequence[str], sizes: Sizes, folder: Path) -> dict[str, Any]:
    model, console = make_model(folder / "model"), Console(stderr=True, soft_wrap=True)
    found: dict[str, Any] = {}
    for name in names:
        began = time.monotonic()
        own = folder / name
        own.mkdir()
        found[name] = measure(CASES[name], sizes, own, model)
        shutil.rmtree(own)
        console.print(f"{name}: {found[name]} in {time.monotonic() - began:.0f} s")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES], help="some of the cases")
    parser.add_argument("--quick", action="store_true", help="small sizes, which show that the bench works")
    parser.add_argument("--folder", type=Path, help="where the journals are written; the largest case needs 7 GB")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        return 0
    with tempfile.TemporaryDirectory(prefix="lag-", dir=given.folder) as made:
        found = run(given.only, QUICK if given.quick else Sizes(), Path(made))
    facts = {name: {key: value for key, value in case.items() if key not in LIMITS} for name, case in found.items()}
    rows = {name: {**case, "what it did": str(facts[name])} for name, case in found.items()}
    worst = {f"worst_{figure}": max(case[figure] for case in found.values()) for figure in LIMITS}
    report("lag", {**worst, "cases": found}, grid(rows, *LIMITS, "what it did"))
    return 1 if any(missed_bounds(case, {}, LIMITS) for case in found.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
