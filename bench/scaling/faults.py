"""Faults of a whole cluster: nothing is lost, trained twice or of a wrong version: `python -m bench.scaling.faults`.

A real server, two real ranks with a tiny model, fake replicas (real processes over TCP whose tokens can be checked),
and real clients with OpenAI's SDK. Faults come one after the other, in an order drawn from a seed. Every kill is
SIGKILL:

* replicas while they sample, start or adopt a version; one is stopped (SIGSTOP), one claims weights it did not load;
* ranks in each request, and while replicas adopt;
* the gateway at random times, in the middle of a publish, and at transitions of its journal.

With `--fronts N`, N fronts answer the calls. They are killed at random times, while a request of an agent is under way,
while they finish an episode or build a batch, at a publish, and while they start; some are stopped (SIGSTOP). A wire
between clients and server loses, cuts and repeats messages.

Afterwards the journal is compared with the clients' own books. Every token that was learned must be one of its version
in its context. An undisturbed cluster learns the same batches: its
weights must be equal bit by bit. Prints the figures as JSON; `bench.scale` has them in its table.

`calls_failed` are calls that ended with an error after the SDK's own repeats. A stream that was cut cannot be
repeated by the SDK: only the wire, the end of the gateway or that of a front may cut it, and `streams_cut` counts it.
`calls_stale` are those of episodes that the server ended because their tokens were older than `max_staleness`. `lost`
are acknowledged episodes, rewards, aborts and calls that the journal does not have. `failover_s` is the 95th percentile
of the seconds from a kill to the next token of each completion of the dead replica. `all_replicas_dead_s` is the same
if no replica was left; then a new one must start. With fronts, which have the completions, neither is measured. Then
`front_s` is the percentile of the seconds until a killed front answers again, and `fronts_ended` are fronts that ended
without being killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import pickle
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from agentjet.compute.vllm.replica import PIECE_SECONDS
from agentjet.protocol import FrontView, StatusResponse
from agentjet.swarm.groups import STALE
from agentjet.types import DEFAULT_RUN, PolicyId
from bench.breaking import reference
from bench.breaking.audit import Audit, Books, audit, read, rows
from bench.breaking.inject import meet
from bench.breaking.plan import RUNS, WIRE
from bench.breaking.plan import Fault as WireFault
from bench.breaking.scene import Scene, make_clients
from bench.breaking.victims import GivenUp, Server, ServerEnded, Statuses
from bench.breaking.wire import SEEN, Wire
from bench.chaos import break_things, finish
from bench.machine import CASES, free_port, percentile
from tests.cluster.fake_replica import COMMAND, Hooks, logprob

ONE_RUN = {DEFAULT_RUN: RUNS[DEFAULT_RUN]}
NUM_CLIENTS, GROUP_SIZE = 2, 3
LEASE_SECONDS = 60.0
REQUESTS = ("chat", "stream", "begin")
QUICK = {"replica": ("",), "front": ("", "finish", "starting", *REQUESTS)}
"""Kinds and moments of faults that come one after the other, without a batch learned between them."""
MAX_RETRIES = 12  # The SDK repeats a call for about a minute
MOMENT_SECONDS = 120.0  # The longest wait for a moment
POLL_SECONDS = 0.02
REPLACED = re.compile(r"^WARNING: front \d+: .*; it is replaced$", re.MULTILINE)
ENDED = ("ended while it was answered", "has ended: aborted")
NOTICE_SECONDS = 10.0  # Time for a client to notice that its stream was cut
HOOKS = Hooks(step_seconds=0.03, adopt_seconds=0.1, piece_seconds=PIECE_SECONDS)
"""Completions last longer than the gateway is late on a busy machine."""
JOB = {
    "batch_size": 2,
    "group_size": GROUP_SIZE,
    "min_group_size": 2,
    "max_tokens": 48,
    "max_staleness": 1,
    "lease_seconds": LEASE_SECONDS,
    "max_episode_seconds": 600.0,
    "checkpoint_every": 3,
    "keep_checkpoints": 2,
    "optimizer": {"lr": 1e-3},
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `kind` dies `delay` seconds after the moment `at`; see `bench.scaling.kills`. Or `kind` is one of
    the wire, and `at` the request that it meets.
    """

    kind: str
    at: str = ""
    delay: float = 0.0  # The longest delay; the seed decides
    count: int = 1
    stops: bool = False
    next_replica: str = ""  # The replica that starts next dies at this point of its code, or `lies`
    transition: str = ""  # The gateway dies when its journal commits this transition

    @property
    def is_quick(self) -> bool:
        """True if it may follow another one before a batch was learned."""
        return self.kind in WIRE or (self.at in QUICK.get(self.kind, ()) and not self.next_replica)


FAULTS: dict[str, list[tuple[int, Fault]]] = {
    part: [(times, Fault(**fault)) for times, fault in rows]
    for part, rows in json.loads((CASES / "cluster.json").read_text(encoding="utf-8")).items()
}
"""By part: how many of each fault a whole run has. `count` 9 is more than there are replicas."""


def plan(part: Sequence[tuple[int, Fault]], share: float, dice: random.Random) -> list[Fault]:
    """Returns `share` of the faults of a part, in order. The seed rounds up or down."""
    faults = [fault for times, fault in part for _ in range(int(times * share + dice.random()))]
    dice.shuffle(faults)
    return faults


class Stage:
    """The cluster in which faults happen, and what they did."""

    def __init__(self, scene: Scene, cuts: list[float]) -> None:
        """`cuts` gets the times at which the wire cut calls, in Unix seconds."""
        self.scene = scene
        self._cuts = cuts
        self._since: Statuses | None = None  # The statuses at the last fault after which a batch must be learned

    @property
    def server(self) -> Server:
        return self.scene.server

    async def ready(self, fault: Fault) -> None:
        """Wait until the fault may come: two replicas sample for one of them, else a batch was learned since the last.

        So replicas die also while the ranks are started again.
        """
        is_quick = fault.is_quick
        while True:
            with contextlib.suppress(ServerEnded, httpx.TransportError):
                await self.scene.steady(sampling=False)
                while await self._num_serving() < (2 if is_quick and fault.kind == "replica" else 1):
                    await self.server.wait(lambda found: found[DEFAULT_RUN].state != "failed")
                    await asyncio.sleep(POLL_SECONDS)
                if fault.kind == "front":
                    await self.server.wait(lambda found: _most_answer(found[DEFAULT_RUN].fronts))
                if self._since is not None and not is_quick:
                    await self.server.learned(self._since)
                    self._since = None
                return

    async def _num_serving(self) -> int:
        answer = await self.server.request("GET", "/swarm/v1/cluster")
        processes = answer.raise_for_status().json()["processes"]
        return sum(one["kind"] == "replica" and one["version"] is not None for one in processes)

    async def inject(self, fault: Fault) -> bool:
        """Let a fault happen, and start again what does not do so by itself. False if its moment did not come."""
        server, said = self.server, len(self.server.said)
        await self.ready(fault)
        dice = self.scene.dice
        if fault.kind in WIRE:
            is_met = await meet(self.scene, WireFault(fault.kind, fault.at, amount=fault.delay * dice.random()), 30.0)
            self._cuts.append(time.time() - 1.0)  # The client was faster.
            return is_met
        statuses = await server.up()
        if fault.next_replica:
            self._hook(fault.next_replica, statuses[DEFAULT_RUN])
        delay, at = fault.delay * dice.random(), fault.at
        if fault.transition:
            await server.order("trap", at=fault.transition, when="committed")
        else:
            order: dict[str, Any] = {"kind": fault.kind, "count": fault.count, "stops": fault.stops}
            if at in REQUESTS and fault.kind == "front":
                seen = self.scene.wire.order(WireFault(SEEN, at))
                if not await server.until(seen.done.is_set, MOMENT_SECONDS):
                    self.scene.wire.cancel(seen)
                    return False
                order["front"], at = (seen.front if seen.front >= 0 else None), ""
            if at == "starting":
                await server.order("kill", kind="front")
                await server.until(lambda: any("killed" in fact for fact in server.said[said:]), MOMENT_SECONDS)
                said = len(server.said)
            await server.order("kill", **order, at=at, delay=delay)
        if not await server.until(lambda: any("killed" in fact for fact in server.said[said:]), MOMENT_SECONDS):
            await server.order("trap" if fault.transition else "kill")
            return False
        if fault.kind == "gateway":
            await server.dead(MOMENT_SECONDS)
            await self.scene.bring_back()
        if not fault.is_quick:
            self._since = statuses
        return True

    def _hook(self, point: str, status: StatusResponse) -> None:
        """Give the replica that starts next a fault of its own."""
        version = status.policy_version
        fault = {"lies": tuple(range(version + 1, version + 4))} if point == "lies" else {"die": point}
        path = self.scene.folder / "part.json"
        path.write_text(Hooks(**{**asdict(HOOKS), **fault}).environment()[Hooks.VARIABLE])
        path.rename(self.scene.folder / "next.json")


def _most_answer(fronts: Sequence[FrontView]) -> bool:
    return sum(one.ready for one in fronts) > len(fronts) / 2


def make_sampler_python(folder: Path) -> Path:
    """An "interpreter" that runs the fake replica. `folder/next.json` has the hooks of the one that starts next."""
    path, variables = folder / "sampler-python", HOOKS.environment()
    usual = variables[Hooks.VARIABLE]
    lines = [
        "#!/bin/sh",
        f"""[ "$1" = -I ] && exec '{COMMAND[0]}' "$@"  # `agentjet serve` looks for a Python.""",
        f"hooks='{usual}'",
        f'if mv "{folder}/next.json" "{folder}/$$.json" 2> /dev/null; then hooks=$(cat "{folder}/$$.json"); fi',
        f"export {Hooks.VARIABLE}=\"$hooks\" PYTHONPATH='{variables['PYTHONPATH']}'",
        f"exec '{COMMAND[0]}' '{COMMAND[1]}'",
    ]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return path


@dataclass
class Run:
    """A run of faults, from its empty folder to its figures."""

    folder: Path
    seed: int
    faults: Sequence[Fault]
    minutes: float = math.inf  # After so many, the other faults are missed
    colocated: bool = False  # Ranks and replicas compute in turns
    fronts: int = 0
    gave_up: str = ""

    @classmethod
    def drawn(cls, folder: Path, share: float, seed: int, *, colocated: bool = False, fronts: int = 0) -> Run:
        """A run of `share` of all faults."""
        dice = random.Random(seed)
        part = FAULTS["with_fronts" if fronts else "on_this_machine"] + FAULTS["colocated"] * colocated
        part += FAULTS["colocated_with_fronts"] * (colocated and bool(fronts))
        return cls(folder, seed, plan(part, share, dice), colocated=colocated, fronts=fronts)

    def settings(self, public_port: int) -> dict[str, Any]:
        """`public_port` is that of the wire."""
        python = make_sampler_python(self.folder)
        samplers = min(3, os.cpu_count() or 1)  # A cluster of one machine has one core for each.
        compute = {"backend": "cluster", "ranks": 2, "samplers": samplers, "sampler_python": str(python)}
        compute["colocated"] = self.colocated
        model = {"name": str(self.folder / "model"), "device": "cpu", "dtype": "float32", "threads": 1}
        server: dict[str, Any] = {"worker_timeout": 20.0, "call_timeout": 300.0}
        if self.fronts:
            server |= {"fronts": self.fronts, "front_url": f"http://127.0.0.1:{public_port}/f{{front}}"}
        sampler = {"max_concurrent": 8, "cache_tokens": 8192}
        job = {**JOB, "max_staleness": 0} if self.colocated else JOB
        return {"model": model, "compute": compute, "sampler": sampler, "job": job, "server": server}

    async def figures(self) -> dict[str, Any]:
        began, folder, cuts = time.monotonic(), self.folder, list[float]()
        (policy,), exported = ONE_RUN[DEFAULT_RUN], Path()
        (folder / "forests" / DEFAULT_RUN).mkdir(parents=True)
        reference.make_model(folder / "model")
        wire = Wire(free_port(following=self.fronts))
        await wire.open()
        settings = self.settings(wire.port)
        server = Server(folder, settings, ONE_RUN, port=wire.server_port)
        scene = Scene(folder, server, wire, random.Random(self.seed), [])
        try:
            await server.start()
            await server.until(lambda: (server.data_dir / "admin-token").exists())
            scene.clients += make_clients(
                *(folder, NUM_CLIENTS + bool(self.fronts), wire, server),
                seed=self.seed,
                group_size=GROUP_SIZE,
                lease=LEASE_SECONDS,
                max_retries=MAX_RETRIES,
            )
            for client in scene.clients:
                await client.start()
            await break_things(scene, self.faults, Stage(scene, cuts).inject, seconds=60 * self.minutes)
            await server.learned(await server.up(), 2)
            await asyncio.gather(*(client.stop(within=60.0) for client in scene.clients))
            exported = (await finish(scene))[DEFAULT_RUN][policy]
        except GivenUp as error:
            self.gave_up = str(error)
        finally:
            await scene.close()
        books = read(scene.books(DEFAULT_RUN))
        forests = folder / "forests" / DEFAULT_RUN
        journal = server.folder_of(DEFAULT_RUN) / "journal.sqlite"
        found = audit(journal, books, forests, wire.answers[DEFAULT_RUN])
        stale = {row.id for row in rows(journal).values() if (row.reason or "").startswith(STALE)}
        checked = check_forests(forests, policy)
        alone = await reference.undisturbed(
            settings, forests, folder / "undisturbed", PolicyId(DEFAULT_RUN, policy), found.batches
        )
        equal = not self.gave_up and reference.equal_weights(exported, alone)
        report = self._report(scene, found, checked, equal, time.monotonic() - began)
        return report | self._failed_calls(books, stale, self._downs(server, cuts))

    def _failed_calls(
        self, books: Books, stale: Collection[str], downs: Sequence[tuple[float, float]]
    ) -> dict[str, Any]:
        """`stale`: ids of episodes that the server ended because their tokens were too old. `downs`: see `_downs`."""
        ended, cut, failed = [], [], []
        for call in books.failed_calls:
            is_cut = call["how"] == "streamed" and any(began <= call["at"] <= end for began, end in downs)
            is_ended = call["episode"] in stale and any(text in call["error"] for text in ENDED)
            (ended if is_ended else cut if is_cut else failed).append(call)
        return {
            "calls": len(books.calls),
            "calls_failed": len(failed),
            "calls_stale": len(ended),
            "streams_cut": len(cut),
            "errors": Counter(call["error"][:200] for call in books.failed_calls),
        }

    def _report(
        self, scene: Scene, found: Audit, checked: tuple[int, int], equal: bool, seconds: float
    ) -> dict[str, Any]:
        said = scene.server.said
        return {
            "faults": scene.tally.faults.total(),
            "by_kind": dict(sorted(scene.tally.faults.items())),
            "publishes_cut": sum(bool(fact.get("cut")) or fact.get("at") == "publish" for fact in said),
            "missed": len(scene.tally.missed),
            "gave_up": self.gave_up,
            "lost": len(found.lost),
            "trained_twice": len(found.trained_twice),
            "failures_scored": len(found.failures_scored),
            "two_effects": len(found.two_effects),
            "tokens_checked": checked[0],
            "wrong_versions": checked[1],
            "weights_equal": equal,
            **self._failovers(scene.server.said),
            "fronts_ended": self._fronts_ended(scene.server),
            "gateway_s": round(percentile(scene.tally.gateway_s, 95), 1),
            "unexpected_ends": scene.tally.unexpected,
            "batches": found.batches,
            "episodes": {"begun": found.begun, "finished": found.finished, "trained": found.trained}
            | {"waiting": found.waiting, "dropped": found.dropped, **found.unscored},
            "seconds": round(seconds),
        }

    def _failovers(self, said: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns the seconds until the work of a dead process goes on. The gateway cannot see that of fronts."""
        if self.fronts:
            seconds = [fact["after"] for fact in said if "after" in fact]
            return {"front_s": round(percentile(seconds, 95), 1)}
        failovers = [fact["failover"] for fact in said if fact.get("survives")]
        all_dead = [fact["failover"] for fact in said if "failover" in fact and not fact["survives"]]
        return {
            "failover_s": round(percentile(failovers, 95), 3),
            "failover_max_s": round(max(failovers, default=0.0), 3),
            "failovers": len(failovers),
            "all_replicas_dead_s": round(percentile(all_dead, 95), 3),
        }

    def _fronts_ended(self, server: Server) -> int:
        """Returns how many fronts ended that the bench had not killed."""
        killed = sum(len(fact["pids"]) for fact in server.said if fact.get("killed") == "front")
        return max(0, len(REPLACED.findall(server.log.read_text(errors="replace"))) - killed)

    def _downs(self, server: Server, cuts: Sequence[float]) -> list[tuple[float, float]]:
        """Returns when the gateway or a front was down, in Unix seconds, with some seconds for clients to notice.

        `cuts` are times at which the wire cut calls.
        """
        offset = time.time() - time.monotonic()
        ends = [offset + fact["time"] for fact in server.said if fact.get("killed") in ("gateway", "front")] + [*cuts]
        starts = [offset + fact["time"] for fact in server.said if "gateway" in fact or "front" in fact] + [*cuts]
        return [(end, min((one for one in starts if one >= end), default=end) + NOTICE_SECONDS) for end in ends]


# ---- tokens of fake replicas: each must be one of its version in its context -----------------------------------------


def wrong_tokens(tokens: Any, contexts: Any, logprobs: Any, versions: Any) -> int:
    """Returns the number of tokens whose log-probability is not that of their version in their context (bytes)."""
    found = (
        abs(reported - logprob(context, int(token), int(version))) > 1e-5
        for token, context, reported, version in zip(tokens, contexts, logprobs, versions, strict=True)
    )
    return int(sum(found))


def check_forests(folder: Path, policy: str) -> tuple[int, int]:
    """Returns the tokens that were learned, and those of a wrong version."""
    checked = wrong = 0
    for path in sorted(folder.glob("*.pickle")):
        forest = pickle.loads(path.read_bytes())["batches"][policy].forest
        contexts: list[bytes] = []
        for parent in forest.parent:  # Parents stand before their children.
            before = contexts[parent] + np.int32(forest.tokens[parent]).tobytes() if parent >= 0 else b""
            contexts.append(before)
        nodes = forest.node
        checked += len(nodes)
        wrong += wrong_tokens(
            forest.tokens[nodes], [contexts[node] for node in nodes], forest["logprob"], forest["version"]
        )
    return checked, wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="share of the faults of a whole run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--colocated", action="store_true", help="ranks and replicas compute in turns")
    parser.add_argument("--fronts", type=int, default=0, help="processes that answer the calls")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time for faults, on a busy machine")
    parser.add_argument("--keep", type=Path, help="an empty folder for journal, books and logs; else they are removed")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        kept = given.keep or Path(made)
        kept.mkdir(parents=True, exist_ok=True)
        run = Run.drawn(kept.resolve(), given.share, given.seed, colocated=given.colocated, fronts=given.fronts)
        run.minutes = given.minutes
        print(json.dumps(asyncio.run(run.figures())))
