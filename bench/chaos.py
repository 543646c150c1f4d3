"""Nothing is lost, trained twice, or scored by its failure under any fault: `python -m bench.chaos`.

A real server on a tiny model, real clients with OpenAI's SDK, and a wire between them. The server trains two runs at
once in one worker: the default run, and one with two policies. Faults come one after the other, drawn from a seed:

* the gateway is killed at every transition of its journal and at random times, and its log's tail is torn;
* the worker is killed while it samples, saves and starts, in the middle of `forward_backward`, between that and
  `optim_step`, and stopped (SIGSTOP) at work;
* clients are killed, and agents hang;
* requests and answers are lost, cut and sent twice;
* the disk is full, and the clock jumps;
* clients wait for room for minutes, by their clock, and then the gateway dies.

Afterwards the journal of each run is compared with the clients' own books. Undisturbed workers learn the same episodes,
each for one policy alone: their weights must be equal bit by bit. Then checkpoints are damaged in copies of the data
dir: each copy must restore those weights or be refused. All counts are sums over the runs.

Prints a table, then one JSON object as the last line. The exit code is 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentjet.protocol import StatusResponse
from agentjet.types import PolicyId
from bench.breaking import reference
from bench.breaking.audit import Audit, Stuck, audit, stuck
from bench.breaking.damage import verdicts
from bench.breaking.inject import inject
from bench.breaking.plan import RUNS, Fault, plan
from bench.breaking.records import read
from bench.breaking.scene import Scene, Tally, make_clients
from bench.breaking.victims import Server, ServerEnded
from bench.breaking.wire import Wire
from bench.gatewaying.report import percentile

LEASE_SECONDS = 3.0
POLL_SECONDS = 0.2
NUM_CLIENTS = 4
GROUP_SIZE = 3
MAX_TRIES = 3
"""Tries of a fault whose moment does not occur."""
AIMS = {"gateway_p95": 3.0, "worker_p95": 10.0}
"""Seconds."""
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
    stuck: list[Stuck]
    drifted: int
    """Forests that were other bytes when they were made again."""
    weights_equal: bool
    damage: list[dict[str, Any]]
    """Results of each kind of damage to the checkpoints; see `recovery.Verdict`."""
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
            "no damage to a checkpoint went unnoticed": not self._damaged(silent=True),
            "no damage to a checkpoint stopped the server for good": not self._damaged(end="stuck"),
            "who waits politely outlives a restart": not self.tally.gave_up,
        }

    def _damaged(self, **verdict: object) -> list[dict[str, Any]]:
        return [one for one in self.damage if verdict.items() <= one.items()]

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
            "damage_kinds": len(self.damage),
            "damage_silent": len(self._damaged(silent=True)),
            "damage_stuck": len(self._damaged(end="stuck")),
            "damage_recovered": len(self._damaged(end="recovered")),
            "damage_refused": len(self._damaged(end="refused")),
            "stuck_s": {
                "lease": LEASE_SECONDS,
                "expired_max": round(max((one.expired_after for one in self.stuck), default=0.0), 2),
                "batch_waited_max": round(max((one.batch_waited for one in self.stuck), default=0.0), 2),
                "measured": len(self.stuck),
            },
            "transitions": len(t.moments),
            "batches": a.batches,
            "episodes": {"begun": a.begun, "dropped": a.dropped, **a.unscored},
            "by_kind": dict(t.faults),
            "torn": dict(t.torn),
            "missed": len(t.missed),
            "seconds": round(self.seconds),
        }


async def run(
    folder: Path, num_faults: int, seed: int, num_calm: int, num_damages: int | None, console: Console
) -> Outcome:
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
        await break_things(scene, faults, console)
        measured_from, offset = await calm(scene, num_calm)
        exported = await finish(scene)
        audits, hung = {}, []
        for name in RUNS:
            journal, books = server.folder_of(name) / "journal.sqlite", read(scene.books(name))
            audits[name] = audit(journal, books, folder / "forests" / name, wire.answers[name])
            hung += stuck(journal, books, measured_from, offset)
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
        console.print("its checkpoints are damaged ...")
        damage = await verdicts(folder / "settings.json", exported, num_damages)
        return Outcome(
            tally=scene.tally,
            audit=Audit.total([*audits.values()]),
            stuck=hung,
            drifted=sum("drifted" in fact for fact in server.said),
            weights_equal=all(are_equal),
            damage=damage,
            seconds=time.monotonic() - began,
        )
    finally:
        await scene.close()


async def break_things(scene: Scene, faults: list[Fault], console: Console) -> None:
    """Fault after fault; one whose moment did not come is tried again at the end."""
    backlog, began = [(fault, 1) for fault in faults], time.monotonic()
    while backlog:
        fault, tries = backlog.pop(0)
        so_far = f"{time.monotonic() - began:6.1f} s {scene.tally.faults.total():4}"
        console.print(f"{so_far} {fault.kind} {fault.at} {fault.when}")
        try:
            happened = await inject(scene, fault)
        except ServerEnded:  # Noted, and started again, before the next one.
            happened = False
        if happened:
            scene.tally.faults[fault.kind] += 1
        elif tries < MAX_TRIES:
            backlog.append((fault, tries + 1))
        else:
            scene.tally.missed.append(fault)
        await asyncio.sleep(0.3 * scene.dice.random())


async def calm(scene: Scene, num_stuck: int) -> tuple[float, float]:
    """Nothing fails but agents that hang, one after the other; returns since when (this machine's clock), and how far
    the server's clock is ahead.
    """
    await scene.settle_clients()
    await scene.steady(sampling=True)
    await scene.server.learned(await scene.server.up(), 2)
    since = time.time()
    for i in range(num_stuck):
        statuses = await scene.server.up()
        await scene.clients[i % len(scene.clients)].tell("hang silent")
        await asyncio.sleep(2 * LEASE_SECONDS)
        await scene.server.learned(statuses)
    offset = scene.folder / "clock"
    return since, json.loads(offset.read_text()) if offset.exists() else 0.0


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


def table(outcome: Outcome) -> Table:
    grid = Table("", "")
    t, a = outcome.tally, outcome.audit
    for kind, number in sorted(t.faults.items(), key=lambda item: -item[1]):
        grid.add_row(kind, str(number))
    grid.add_section()
    summary = outcome.summary()
    for name in ("faults", "finished", "trained", "waiting", "aborted", "lost", "trained_twice", "failures_scored"):
        grid.add_row(name, str(summary[name]))
    for name in ("damage_kinds", "damage_recovered", "damage_refused"):
        grid.add_row(name.replace("_", ", ", 1), str(summary[name]))
    for name, aim in AIMS.items():
        grid.add_row(f"recovery, {name}", f"{summary['recovery_s'][name]} s (aim {aim:g} s)")
    stuck_s = summary["stuck_s"]
    grid.add_row("a stuck episode delayed its batch by", f"{stuck_s['batch_waited_max']} s (lease {LEASE_SECONDS:g} s)")
    grid.add_section()
    for promise, is_kept in outcome.kept().items():
        grid.add_row(promise, "yes" if is_kept else "NO")
    for wrong in [*a.lost, *a.trained_twice, *a.failures_scored, *a.two_effects, *t.unexpected, *t.gave_up]:
        grid.add_row("", wrong)
    for one in outcome.damage:
        if one["silent"] or one["end"] == "stuck":
            grid.add_row("damage", f"{one['kind']}: {one['end']}: {one['why']}")
    for fault in t.missed:
        grid.add_row("its moment did not come", f"{fault.kind} {fault.at} {fault.when}")
    return grid


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="measure one stuck episode and few kinds of damage to checkpoints only"
    )
    parser.add_argument("--keep", type=Path, help="an empty folder for journal, books and logs; else they are removed")
    given = parser.parse_args()
    console = Console(stderr=True, soft_wrap=True)
    with tempfile.TemporaryDirectory() as made:
        folder = given.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        few = (1, 2) if given.quick else (6, None)
        outcome = asyncio.run(run(folder.resolve(), given.faults, given.seed, *few, console))
    Console(width=120).print(table(outcome))
    print(json.dumps({"bench": "chaos", "seed": given.seed, **outcome.summary()}))
    return 0 if all(outcome.kept().values()) else 1


if __name__ == "__main__":
    sys.exit(main())
