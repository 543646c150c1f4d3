"""Environments that train unmodified: `python -m bench.environments`.

* `kinds`: each kind of `cases/environments.toml` trains one batch of SmolLM2-135M (or `--model`) with an unmodified
  package. `kinds` counts those that did.
* `exact`: the same kinds on a sampler that follows grammars at random and records its tokens. Every trained token must
  be one that was sampled, behind its exact context, once; by the audit of `make conformance`.
* `overhead`: CPU of client and environment's process per episode, beyond the same episodes played in the client:
  `overhead_ms`. Start of a process until it takes orders: `start_ms`, and its CPU: `start_cpu_ms`.
* `cocktail`: three kinds by weights, of which one crashes in 30 % of its episodes: the largest error of a share, and
  batches that took more than ten times the median.
* `sandbox`: attempts to leave a sandbox, and the CPU of its start: `bench/sandbox.py`.
* `game`, `mcp`, `terminal`: an example's whole run. The share of the held-out tasks that is solved, before and after
  training (`_before`, `_after`, `_gain`), and `_seconds`.

Prints tables, then one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from agentjet import environments
from agentjet.cli.serve import ChildServer
from agentjet.client import AsyncSwarm, Retry, TrainReport
from agentjet.client.command import environment as variables_of
from agentjet.client.episode import AsyncEpisode
from agentjet.client.threads import in_thread
from agentjet.compute.token_choice import Grammars
from agentjet.environments import Environment, EnvironmentMixture, EnvironmentTask, Model
from agentjet.environments.pool import Worker
from agentjet.errors import AgentJetError
from agentjet.sandbox.usage import cpu_of, descendants
from agentjet.types import Reward, SamplingParams, Task
from bench import sandbox
from bench.machine import CASES, ROOT, bounded, grid, report
from bench.talk import Talk
from conformance.audit import _contexts, _trained
from conformance.policy import Policy
from tests.fakes import saying
from tests.server.serving import ADMIN, serving
from tests.timeline.models import make_model

EXAMPLES = {"game": "household_game", "mcp": "mcp_tools", "terminal": "terminal_tasks"}
LEAST = {"kinds": 9, "exact": 9} | {f"{part}_gain": 0.2 for part in EXAMPLES} | sandbox.LEAST
MOST = (
    {"overhead_ms": 20, "share_err": 0.05, "stalled": 0} | {f"{part}_seconds": 600 for part in EXAMPLES} | sandbox.MOST
)
MODEL = "smollm2-135m"
TEMPLATE = "qwen3"
"""Template with tools, of the sampler that records."""
CONTEXT = 65_536
EPISODES = 60
STARTS = 5
Found = tuple[dict[str, Any], list[Table]]


@contextmanager
def cases() -> Iterator[dict[str, dict[str, Any]]]:
    """The settings of each kind, with its target."""
    with tempfile.TemporaryDirectory() as out:
        with suppress(ImportError):
            from examples.mcp_tools import tasks

            tasks.write(Path(out) / "shop.jsonl")
        text = (CASES / "environments.toml").read_text(encoding="utf-8")
        yield tomllib.loads(text.replace("{root}", str(ROOT)).replace("{out}", out))


def load(kind: str, settings: dict[str, Any]) -> Environment:
    others = {name: value for name, value in settings.items() if name != "target"}
    return environments.load(f"{kind}:{settings['target']}", **{"task_set": kind, "processes": 2, **others})


# ---- kinds -----------------------------------------------------------------------------------------------------------


def kinds(model: str = MODEL) -> Found:
    rows = {}
    job = ["job.batch_size=1", "job.group_size=2", "job.max_tokens=64", "job.recipe.drop_zero_variance=false"]
    with (
        tempfile.TemporaryDirectory() as folder,
        cases() as settings,
        ChildServer(None, [f"model.name={json.dumps(model)}", *job], Path(folder)) as server,
        server.connect() as swarm,
    ):
        for kind, chosen in settings.items():
            began = time.monotonic()
            try:
                with load(kind, chosen) as environment:
                    done = swarm.train(environment.agent, environment.tasks, steps=1, concurrency=2, progress=False)
                rows[kind] = row_of(done, environment) | {"seconds": round(time.monotonic() - began, 1)}
            except AgentJetError as error:
                rows[kind] = {"trained": False, "problem": str(error)[:80]}
    columns = ("trained", "tasks", "held out", "calls", "aborted", "seconds", "problem")
    return {"kinds": sum(row["trained"] for row in rows.values())}, [grid(rows, *columns)]


def row_of(done: TrainReport, environment: Environment) -> dict[str, Any]:
    return {
        "trained": len(done.steps) == 1,
        "tasks": len(environment.tasks),
        "held out": len(environment.held_out),
        "calls": sum(result.num_calls for result in done.finished),
        "aborted": done.num_aborted,
    }


# ---- exactness -------------------------------------------------------------------------------------------------------


class Recording(Policy):
    """A sampler that follows the grammar at random, and records what it was asked for and what it sampled."""

    def __init__(self, folder: Path) -> None:
        super().__init__(make_model(folder, TEMPLATE), [])
        self.sampled: dict[tuple[int, ...], int] = {}
        """The tokens of each call, with the length of its prompt."""
        self._random = random.Random(0)
        self._grammars = Grammars(self.model.card, self.model.tokenizer.get_vocab_size())
        ids = range(self.model.tokenizer.get_vocab_size())
        self._blank = {token for token in ids if not self.model.tokenizer.decode([token]).strip()}
        """Tokens of white space, which JSON allows without end."""
        self._free = saying(lambda prompt: f"It is {self._random.randrange(100)}.", TEMPLATE)

    def __call__(self, prompt: Sequence[int], params: SamplingParams) -> Sequence[int]:
        guide = self._grammars.guide(params.grammar)
        completion = list(self._free(prompt, params)) if guide is None else []
        while guide is not None and len(completion) < params.max_tokens:
            bits = int.from_bytes(guide.mask, "little")
            allowed = [token for token in range(bits.bit_length()) if bits >> token & 1]
            allowed = [token for token in allowed if token not in self._blank] or allowed
            ends = [token for token in allowed if token in self.model.card.end_tokens]
            completion.append(ends[0] if ends else self._random.choice(allowed))
            if ends or guide.advance(completion[-1]):
                break
        self.sampled[*prompt, *completion[: params.max_tokens]] = len(prompt)
        return completion


async def problems_of(swarm: AsyncSwarm, policy: Recording) -> list[str]:
    """The differences between what was trained and what was sampled; empty: it is exact."""
    wanted: Counter[bytes] = Counter()
    async for view in swarm.all_episodes(batch=0):
        whole: dict[str, list[int]] = {}
        for call in (await swarm.episode_tree(view.episode_id)).calls:
            kept = whole[call.parent][: call.kept] if call.parent else []
            tokens = whole[call.call_id] = [*kept, *call.tokens]
            length = policy.sampled.get(tuple(tokens))
            if length is None:
                return [f"{view.episode_id}: a call has other tokens than the sampler"]
            if not call.orphan:
                wanted.update(_contexts(tokens)[length:])
    trained = Counter(context for context, _, _ in _trained(policy.learned[0]))
    missing, extra = wanted - trained, trained - wanted
    return [f"{missing.total()} tokens of {wanted.total()} are not trained, {extra.total()} were not sampled"] * bool(
        missing or extra or not wanted
    )


@asynccontextmanager
async def recorded(job: dict[str, Any]) -> AsyncIterator[tuple[AsyncSwarm, Recording]]:
    """The real application over a recording sampler."""
    with tempfile.TemporaryDirectory() as folder:
        policy = Recording(Path(folder) / "model")
        card = replace(policy.model.card, context_length=CONTEXT)
        async with (
            serving(Path(folder) / "data", policy, job=job, card=card, call_timeout=60.0) as served,
            AsyncSwarm(served.url, ADMIN, retry=Retry(patience=30.0)) as swarm,
        ):
            policy.attach(served.run.compute)
            yield swarm, policy


async def exact_kind(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    # The tokenizer of the recording sampler spells long actions out.
    job = {"batch_size": 1, "group_size": 2, "max_tokens": 256, "recipe": {"drop_zero_variance": False}}
    async with recorded(job) as (swarm, policy):
        environment = await in_thread(load, kind, settings)
        with environment:
            await swarm.train(environment.agent, environment.tasks, steps=1, concurrency=2, progress=False)
            problems = await problems_of(swarm, policy)
    tokens = len(list(_trained(policy.learned[0])))
    return {"exact": not problems, "tokens": tokens, "problem": "".join(problems)[:80]}


def exact() -> Found:
    rows = {}
    with cases() as settings:
        for kind, chosen in settings.items():
            try:
                rows[kind] = asyncio.run(exact_kind(kind, chosen))
            except AgentJetError as error:
                rows[kind] = {"exact": False, "tokens": 0, "problem": str(error)[:80]}
    return {"exact": sum(row["exact"] for row in rows.values())}, [grid(rows)]


# ---- overhead --------------------------------------------------------------------------------------------------------


def played_here(environment: Environment) -> Callable[[Task, AsyncEpisode], Any]:
    """The same agent without a process: the library's steps and the calls of the model in a thread of the client."""

    def play(task: Task, begun: dict[str, Any]) -> Reward:
        return environment.kind.play(EnvironmentTask(task.id, task.payload), Model(**begun))

    async def agent(task: Task, episode: AsyncEpisode) -> Reward:
        variables_of(task, episode)
        return await in_thread(play, task, environment._model(episode))

    return agent


async def cpu_ms(swarm: AsyncSwarm, agent: Any, tasks: list[Task], others: set[int]) -> float:
    """CPU of this process and those below it per episode, without `others`."""

    def used() -> float:
        return time.process_time() + cpu_of({*descendants(os.getpid())} - others)

    await swarm.evaluate(agent, tasks[:4], concurrency=2, progress=False)  # Starts what stays.
    before = used()
    done = await swarm.evaluate(agent, tasks, repeats=EPISODES // len(tasks) + 1, concurrency=2, progress=False)
    assert len(done.finished) == len(done.results), done.errors
    return 1000 * (used() - before) / len(done.results)


@contextmanager
def scripted() -> Iterator[tuple[str, str]]:
    """A gateway over a scripted model as a process. Yields its address and token."""
    with tempfile.TemporaryDirectory() as folder:
        settings = json.dumps({"data_dir": folder, "job": {"max_tokens": 32}})
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "bench.scripted", settings],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        try:
            assert server.stdout is not None
            address = server.stdout.readline().decode().split()[-1]
            yield address, (Path(folder) / "admin-token").read_text().strip()
        finally:
            server.terminate()
            server.communicate()


async def overhead_ms(url: str, token: str) -> tuple[float, float]:
    """CPU per episode in milliseconds: played here, and in processes."""
    server = {*descendants(os.getpid())}
    async with AsyncSwarm(url, token) as swarm:
        with environments.load("bench.talk/Talk", processes=2, held_out=0) as environment:
            here = await cpu_ms(swarm, played_here(environment), environment.tasks, server)
            pooled = await cpu_ms(swarm, environment.agent, environment.tasks, server)
    return here, pooled


def overhead() -> Found:
    starts, cpus = [], []
    for _ in range(STARTS):
        began = time.monotonic()
        worker = Worker(Talk(), None)
        worker.ask({"kind": "bench.talk/Talk", "settings": {}}, 60.0)
        starts.append(1000 * (time.monotonic() - began))
        cpus.append(1000 * cpu_of(descendants(os.getpid())))
        worker.end()
    with scripted() as (url, token):
        here, pooled = asyncio.run(overhead_ms(url, token))
    figures = {"overhead_ms": round(pooled - here, 1), "episode_ms": round(here, 1)}
    figures |= {"start_ms": round(statistics.median(starts)), "start_cpu_ms": round(statistics.median(cpus))}
    return figures, []


# ---- a cocktail ------------------------------------------------------------------------------------------------------

WEIGHTS = {"gymnasium": 1.0, "reasoning_gym": 1.0, "crashing": 2.0}
STEPS = 8


async def mixed_run(mixed: EnvironmentMixture) -> tuple[TrainReport, list[float]]:
    """The report, and the times at which the policy version changed."""
    job = {"task_weights": WEIGHTS, "batch_size": 8, "group_size": 2, "max_tokens": 64}
    times = [time.monotonic()]

    async def watch() -> None:
        while True:
            if (await swarm.status()).policy_version >= len(times):
                times.append(time.monotonic())
            await asyncio.sleep(0.02)

    async with recorded(job) as (swarm, _), asyncio.timeout(900):
        watching = asyncio.create_task(watch())
        try:
            done = await swarm.train(mixed.agent, mixed.tasks, steps=STEPS, concurrency=24, progress=False)
        finally:
            watching.cancel()
        return done, times


def cocktail() -> Found:
    with cases() as settings:
        made = [load(kind, settings[kind] | {"processes": 4}) for kind in ("gymnasium", "reasoning_gym")]
        crashing = environments.load("bench.talk/Talk", task_set="crashing", crashes=0.3, processes=4)
        with environments.mixture([*made, crashing]) as mixed:
            done, times = asyncio.run(mixed_run(mixed))
    rows = {}
    for name, weight in WEIGHTS.items():
        shares = [step.metrics.get(f"batch/share/{name}", 0.0) for step in done.steps]
        results = [result for result in done.results if result.task_set == name]
        failed = sum(result.outcome == "aborted" for result in results)
        wanted = weight / sum(WEIGHTS.values())
        rows[name] = {"weight": wanted, "share": statistics.fmean(shares), "episodes": len(results), "failed": failed}
    seconds = [after - before for before, after in itertools.pairwise(times)]
    late = sum(one > 10 * statistics.median(seconds) for one in seconds)
    figures = {
        "share_err": round(max(abs(row["share"] - row["weight"]) for row in rows.values()), 3),
        "stalled": late + STEPS - len(done.steps),
        "crashed": round(rows["crashing"]["failed"] / rows["crashing"]["episodes"], 2),
    }
    return figures, [grid(rows)]


# ---- examples --------------------------------------------------------------------------------------------------------


def example(part: str) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [sys.executable, "-m", f"examples.{EXAMPLES[part]}.train", "--out", str(out)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)
        result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    before, after = result["before"]["success"], result["after"]["success"]
    figures = {"before": before, "after": after, "gain": round(after - before, 4), "seconds": result["seconds"]}
    return {f"{part}_{name}": value for name, value in figures.items()}, []


PARTS: dict[str, Callable[[], Found]] = {
    "kinds": kinds,
    "exact": exact,
    "overhead": overhead,
    "cocktail": cocktail,
    "sandbox": sandbox.measured,
    **{part: partial(example, part) for part in EXAMPLES},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART", help=", ".join(PARTS))
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    tables: list[Table] = []
    for part in arguments.only:
        more, shown = PARTS[part]()
        found |= more
        tables += shown
    report("environments", found, *tables, bounded(found, LEAST, MOST))


if __name__ == "__main__":
    main()
