"""Nothing is lost, trained twice, or scored by its failure under any fault: `python -m bench.chaos`.

A real server on a tiny model, real clients with OpenAI's SDK, and a wire between them. The server trains two runs at
once in one worker: the default run, and one with two policies. Faults come one after the other, drawn from a seed:

* the gateway is killed at every transition of its journal and at random times, and its log's tail is torn;
* the worker is killed while it samples, saves and starts, in the middle of `forward_backward`, between that and
  `optim_step`, and stopped (SIGSTOP) at work;
* clients are killed, and agents hang;
* requests and answers are lost, cut and sent twice;
* the disk is full, and the clock jumps.

Afterwards the journal of each run is compared with the clients' own books. Undisturbed workers learn the same episodes,
each for one policy alone: their weights must be equal bit by bit. All counts are sums over the runs. Damaged
checkpoints are a matter of `tests/compute/test_checkpoint.py`.

Prints a table, then one JSON object as the last line. The exit code is 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from agentjet.protocol import StatusResponse
from agentjet.types import PolicyId
from bench.breaking import reference
from bench.breaking.audit import Audit, audit, read
from bench.breaking.inject import inject
from bench.breaking.plan import RUNS, Fault, plan
from bench.breaking.scene import Scene, Tally, make_clients
from bench.breaking.victims import Server, ServerEnded
from bench.breaking.wire import Wire
from bench.machine import grid, percentile, report

LEASE_SECONDS = 3.0
POLL_SECONDS = 0.2
NUM_CLIENTS = 4
GROUP_SIZE = 3
MAX_TRIES = 3  # Tries of a fault whose moment does not occur
JOB = {
    "batch_size": 2,
    "group_size": GROUP_SIZE,
    "min_group_size": 2,
    "max_tokens": 8,
    "lease_seconds": LEASE_SECONDS,
    "max_episode_seconds": 12.0,
    "checkpoint_every": 2,
    "keep_checkpoints": 2,
    "optimizer": {"lr": 1e-3},
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run, judged."""

    tally: Tally
    audit: Audit
    drifted: int  # Forests that were other bytes when they were made again
    weights_equal: bool
    seconds: float

    def kept(self) -> dict[str, bool]:
        """The promises, and whether they were kept."""
        a = self.audit
        return {
            "finished = trained + waiting + dropped for a reason": a.finished == a.trained + a.waiting + a.aborted,
            "something was trained": a.trained > 0,
            "nothing acknowledged was lost": not a.lost,
            "nothing was trained twice": not a.trained_twice,
            "no failure was scored": not a.failures_scored,
            "one key, one effect": not a.two_effects,
            "a replayed forest is the same bytes": not self.drifted,
            "weights equal those of an undisturbed run": self.weights_equal,
            "nothing ended that was not killed": not self.tally.unexpected,
        }

    def summary(self) -> dict[str, Any]:
        a, t = self.audit, self.tally
        return {
            "faults": t.faults.total(),
            "finished": a.finished,
            "trained": a.trained,
            "waiting": a.waiting,
            "aborted": a.aborted,
            "lost": len(a.lost),
            "trained_twice": len(a.trained_twice),
            "failures_scored": len(a.failures_scored),
            "recovery_s": {
                "gateway_p95": round(percentile(t.gateway_s, 95), 2),
                "worker_p95": round(percentile(t.worker_s, 95), 2),
                "hung_worker_p95": round(percentile(t.hung_s, 95), 2),
            },
            "weights_equal": self.weights_equal,
            "transitions": len(t.moments),
            "batches": a.batches,
            "episodes": {"begun": a.begun, "dropped": a.dropped, **a.unscored},
            "by_kind": dict(t.faults),
            "torn": dict(t.torn),
            "missed": len(t.missed),
            "seconds": round(self.seconds),
        }


async def run(folder: Path, num_faults: int, seed: int, console: Console) -> Outcome:
    """The whole of it, in `folder`."""
    began = time.monotonic()
    for name in RUNS:
        (folder / "forests" / name).mkdir(parents=True)
    reference.make_model(folder / "model")
    model = {"name": str(folder / "model"), "device": "cpu", "dtype": "float32", "threads": 1}
    settings = {"model": model, "sampler": {"max_concurrent": 4, "cache_tokens": 8192}, "job": JOB}
    faults = plan(num_faults, seed)
    server = Server(folder, settings)
    wire = Wire(server.port)
    await wire.open()
    scene = Scene(folder, server, wire, random.Random(seed), [])
    try:
        await server.start()
        await server.until(lambda: (server.data_dir / "admin-token").exists())
        await server.start_team()
        await server.sampling()
        scene.clients += make_clients(
            folder, NUM_CLIENTS, wire, server, seed=seed, group_size=GROUP_SIZE, lease=LEASE_SECONDS
        )
        for client in scene.clients:
            await client.start()

        async def injected(fault: Fault) -> bool:
            try:
                return await inject(scene, fault)
            finally:
                await asyncio.sleep(0.3 * scene.dice.random())

        await break_things(scene, faults, injected)
        await scene.settle_clients()
        await scene.steady(sampling=True)
        await scene.server.learned(await scene.server.up(), 2)
        exported = await finish(scene)
        audits = {}
        for name in RUNS:
            journal, books = server.folder_of(name) / "journal.sqlite", read(scene.books(name))
            audits[name] = audit(journal, books, folder / "forests" / name, wire.answers[name])
        console.print("undisturbed workers learn the same batches ...")
        are_equal = [
            reference.equal_weights(
                exported[name][policy],
                await reference.undisturbed(
                    settings,
                    folder / "forests" / name,
                    folder / "undisturbed" / policy,
                    PolicyId(name, policy),
                    audits[name].batches,
                ),
            )
            for name, policies in RUNS.items()
            for policy in policies
        ]
        return Outcome(
            tally=scene.tally,
            audit=Audit.total([*audits.values()]),
            drifted=sum("drifted" in fact for fact in server.said),
            weights_equal=all(are_equal),
            seconds=time.monotonic() - began,
        )
    finally:
        await scene.close()


async def break_things(
    scene: Scene, faults: Sequence[Any], inject: Callable[[Any], Awaitable[bool]], *, seconds: float = math.inf
) -> None:
    """Makes fault after fault; one whose moment did not come is tried again at the end.

    `inject` returns False if the moment did not come. After so many seconds, the other faults are missed.
    """
    backlog, began, tally = [(fault, 1) for fault in faults], time.monotonic(), scene.tally
    while backlog:
        fault, tries = backlog.pop(0)
        if (now := time.monotonic() - began) > seconds:
            tally.missed.append(fault)
            continue
        print(f"{now:6.1f} s {tally.faults.total():4} {fault}", file=sys.stderr, flush=True)
        try:
            happened = await inject(fault)
        except ServerEnded:  # Noted, and started again, before the next one.
            happened = False
        if happened:
            tally.faults[fault.kind] += 1
        elif tries < MAX_TRIES and time.monotonic() - began < seconds:
            backlog.append((fault, tries + 1))
        else:
            tally.missed.append(fault)


async def finish(scene: Scene) -> dict[str, dict[str, Path]]:
    """Clients first, then the server, in order; returns the last policies, by run.

    A short group closes a lease after its last member. It may complete a batch, so the end waits until none is open.
    """
    await asyncio.gather(*(client.stop(within=30.0) for client in scene.clients))
    while any(_may_learn(status) for status in (await scene.server.up()).values()):
        await asyncio.sleep(POLL_SECONDS)
    exported = await scene.server.exports()
    await scene.server.stop()
    return exported


def _may_learn(status: StatusResponse) -> bool:
    """True if the run may learn one more batch without a client."""
    return bool(status.groups_open) or status.state != "sampling" or status.groups_complete >= status.batch_size


AIMS = {"gateway_p95": 3.0, "worker_p95": 10.0}  # Seconds


def rows(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """The table: faults by kind, figures, promises, and what broke them."""
    tally, a, summary = outcome.tally, outcome.audit, outcome.summary()
    found: dict[str, Any] = dict(tally.faults.most_common())
    found |= {name: value for name, value in summary.items() if isinstance(value, int)}
    found |= {f"recovery, {name} (aim {aim:g} s)": summary["recovery_s"][name] for name, aim in AIMS.items()}
    found |= {promise: "yes" if is_kept else "NO" for promise, is_kept in outcome.kept().items()}
    broken = [*a.lost, *a.trained_twice, *a.failures_scored, *a.two_effects, *tally.unexpected]
    found |= {f"broken {number}": one for number, one in enumerate(broken)}
    found |= {f"did not come: {fault.kind} {fault.at} {fault.when}": "" for fault in tally.missed}
    return {name: {"": value} for name, value in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="an empty folder for journal, books and logs; else they are removed")
    given = parser.parse_args()
    console = Console(stderr=True, soft_wrap=True)
    with tempfile.TemporaryDirectory() as made:
        folder = given.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        outcome = asyncio.run(run(folder.resolve(), given.faults, given.seed, console))
    report("chaos", {"seed": given.seed, **outcome.summary()}, grid(rows(outcome)), machine=False)
    return 0 if all(outcome.kept().values()) else 1


if __name__ == "__main__":
    sys.exit(main())
