"""Fronts that sample at the replicas of a server: real processes over real TCP, `fake_replica.py`. Pinned here:

1. completions of several fronts at once are exact, also over a publish; no token counts before the probe of its version
   is known, and a completion that begins after a publish has tokens of the new version only;
2. a replica that dies, hangs, lies or reports wrong routes, and that only fronts use, is replaced, and no completion
   fails; the work of a front that is silent ends no replica;
3. newcomers get work, also that of a front that waited; replicas that are withdrawn or whose connection was cut are
   left, and completions continue; a completion that kills every replica fails alone;
4. the end of a front's connection cancels its completions at the replica;
5. strangers are refused, and a front cannot change weights; ids of requests do not collide;
6. a policy that failed or was removed fails its completions;
7. adoption, death, suspension, scaling and cuts of connections in any order: no completion of server or fronts fails,
   and no token is wrong.
"""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from agentjet.compute.fleet import MAX_RECENT, FrontWork, ReplicaWork, RoutingFacts
from agentjet.compute.remote import RemoteFleet, RemoteSamplers
from agentjet.compute.samplers import Replicas
from agentjet.config import SamplerConfig
from agentjet.errors import ComputeError, ConfigError, PolicyRemoved, WorkerDied
from agentjet.processes.rpc import Peer, dial
from agentjet.types import Sampled
from tests.cluster.fake_replica import POLICY, Hooks, publication
from tests.cluster.nursery import ForkServer
from tests.cluster.scene import SLOW, Scene, all_of, complete, first, run, scene
from tests.cluster.test_replicas import Life, live_through, name_of

pytestmark = pytest.mark.usefixtures("retries_are_quick")

REPORT_SECONDS = 0.02
REMOVED = RoutingFacts(POLICY, failure=PolicyRemoved("the server listed no replicas"))
SLOWLY = Hooks(step_seconds=SLOW)


class Fronted:
    """A scene with fronts, which get the facts of the server and report to it."""

    def __init__(self, on: Scene, count: int) -> None:
        self.on = on
        self.fronts = [RemoteSamplers(f"front-{number}") for number in range(count)]
        on.changed = self.push
        self.push()

    def push(self) -> None:
        facts = self.on.fleet.facts()
        for front in self.fronts:
            front.update(pickle.loads(pickle.dumps(facts)))

    async def report(self) -> None:
        """Report for ever, and give each front the work of the others."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            works = [pickle.loads(pickle.dumps(front.report())).get(POLICY, FrontWork()) for front in self.fronts]
            for number, work in enumerate(works):
                self.on.fleet.heard(number, work)
            for number, front in enumerate(self.fronts):
                front.others(POLICY, pickle.loads(pickle.dumps(self.on.fleet.others(number))))

    def begin(self, front: int, count: int, *, max_tokens: int = 60) -> list[asyncio.Task[list[Sampled]]]:
        return [asyncio.create_task(self.complete(front, i, max_tokens=max_tokens)) for i in range(count)]

    async def complete(self, front: int, number: int = 0, **how: Any) -> list[Sampled]:
        return await complete(partial(self.fronts[front].sample, POLICY), number, **how)

    def cut(self, front: int) -> None:
        """Ends the connections of a front, as its network does."""
        for replica in self.replicas(front).fleet.replicas:
            assert replica.peer is not None
            replica.peer._writer.transport.abort()

    async def close(self) -> None:
        self.on.changed = lambda: None
        await asyncio.gather(*(front.close() for front in self.fronts))

    def replicas(self, front: int) -> Replicas[RemoteFleet]:
        return self.fronts[front]._policies[POLICY].replicas

    def work(self, front: int) -> FrontWork:
        """Returns a report of a front, which the server does not get."""
        return self.fronts[front].report()[POLICY]

    def names(self, front: int) -> set[str]:
        """Returns the replicas that a front is connected to."""
        return set(self.work(front).replicas)


@asynccontextmanager
async def fronted(
    server: ForkServer,
    num_replicas: int = 2,
    *,
    fronts: int = 2,
    hooks: Callable[[int], Hooks] = lambda number: SLOWLY,
    reports: bool = True,
    **how: Any,
) -> AsyncGenerator[Fronted, None]:
    async with scene(server, num_replicas, hooks=hooks, **how) as on:
        found = Fronted(on, fronts)
        reporting = asyncio.create_task(found.report() if reports else asyncio.sleep(0))
        try:
            yield found
        finally:
            reporting.cancel()
            await found.close()


def versions(completions: list[list[Sampled]]) -> set[int]:
    return {piece.policy_version for pieces in completions for piece in pieces}


@pytest.mark.parametrize("in_turns", [False, True])
def test_completions_of_fronts_are_exact_over_publishes(server: ForkServer, in_turns: bool) -> None:
    async def test() -> None:
        async with fronted(server) as at:
            early = at.begin(0, 3)
            await at.on.serve()
            tasks = [*at.begin(0, 6), *at.begin(1, 6), *at.on.begin(3)]
            scores = [at.fronts[n].score(POLICY, range(9), 1) for n in range(2)]
            await asyncio.gather(*early)
            await at.on.fleet.publish(publication(1), in_turns=in_turns)
            late = [*at.begin(0, 4), *at.begin(1, 4)]
            assert versions(await all_of(tasks)) <= {0, 1} and versions(await all_of(late)) == {1}
            assert [len(score) for score in await asyncio.gather(*scores)] == [8, 8]
            assert at.on.born.num_started == 2

    run(test())


def test_tokens_wait_for_the_facts_of_their_version(server: ForkServer) -> None:
    async def test() -> None:
        async with fronted(server, 1, fronts=1) as at:
            await at.on.serve()
            found: list[Sampled] = []

            async def collect() -> None:
                sample = at.fronts[0].sample

                async def noting(*args: Any) -> AsyncGenerator[Sampled, None]:
                    async for piece in sample(POLICY, *args):
                        found.append(piece)
                        yield piece

                await complete(noting, 5, max_tokens=200)

            task = asyncio.create_task(collect())
            await at.on.until(lambda: bool(found))
            at.on.changed = lambda: None
            await at.on.fleet.publish(publication(1))
            sent = at.on.fleet.replicas[0].num_messages
            await at.on.until(lambda: at.on.fleet.replicas[0].num_messages > sent + 10)
            assert versions([found]) == {0} and not task.done()
            at.push()
            await task
            assert versions([found]) == {0, 1}
            for version in range(2, 2 + 2 * MAX_RECENT):
                await at.on.fleet.publish(publication(version))
            assert len(at.on.fleet.facts().replicas[0].verified) == MAX_RECENT
            at.on.changed = at.push
            await at.on.fleet.publish(publication(1))  # An older version, after a restart of the learner.
            assert versions([await at.complete(0)]) == {1}

    run(test())


FAULTS = [
    *(Hooks(die=at) for at in ("sample:2", "token:50", "sent:9", "score", "cancel", "paused:2", "adopted:2")),
    *(Hooks(hang=at) for at in ("token:30", "sample:3", "adopted:2", "resumed:2")),
    *(Hooks(routes=fault) for fault in ("stale", "wide", "repeated")),
    Hooks(fail_from="adopt:2", fail_to="adopt:99"),
    Hooks(lies=(1,)),
]


@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_a_replica_with_a_fault_that_only_fronts_use_is_replaced(server: ForkServer, fault: Hooks) -> None:
    async def test() -> None:
        faulty = Hooks(**{**vars(fault), "step_seconds": SLOW})
        async with fronted(server, hooks=lambda n: faulty if n == 2 else SLOWLY, timeout=0.6) as at:
            await at.on.serve()
            tasks = [*at.begin(0, 6), *at.begin(1, 6)]
            scoring = [asyncio.create_task(at.fronts[n % 2].score(POLICY, range(9), 1)) for n in range(4)]
            cancelled = at.begin(0, 2, max_tokens=3000)
            await at.on.until(lambda: at.work(0).tokens > 0)
            for task in cancelled:
                task.cancel()
            await at.on.fleet.publish(publication(1))
            await all_of(tasks)
            assert [len(score) for score in await asyncio.gather(*scoring)] == [8] * 4
            while at.on.born.num_started < 3 and fault.die != "cancel":
                await all_of([*at.begin(0, 4), *at.begin(1, 4)])  # A replica without work may hang unnoticed.
                await asyncio.gather(*(front.score(POLICY, range(9), 1) for front in at.fronts for _ in range(4)))
            await at.on.until(lambda: at.on.versions() == [1, 1])
            assert versions(await all_of(at.begin(1, 3))) == {1}
            assert at.on.born.num_started <= 3 and not at.on.fleet.failed.done()

    run(test())


def test_the_work_of_a_silent_front_ends_no_replica(server: ForkServer) -> None:
    async def test() -> None:
        async with fronted(server, 1, reports=False, timeout=0.3) as at:
            await at.on.serve()
            (name,) = at.on.names()
            at.on.fleet.heard(0, FrontWork(replicas={name: ReplicaWork(running=5, suspects=0, num_messages=1)}))
            assert at.on.fleet.replicas[0].has_work and at.on.fleet.replicas[0].load.count == 5
            await asyncio.sleep(0.8)  # More than two timeouts.
            assert at.on.names() == [name]

    run(test())


def test_newcomers_get_work_and_withdrawn_replicas_lose_it(server: ForkServer) -> None:
    async def test() -> None:
        async with fronted(server, 1, limits=SamplerConfig(max_concurrent=2)) as at:
            await at.on.serve()
            endless = at.begin(0, 9, max_tokens=4000)
            await at.on.until(lambda: at.on.fleet.replicas[0].load.others > 1)
            waiting = at.begin(1, 1)
            await at.on.until(lambda: at.work(1).waiting == 0)  # It has a place beside those of the other front.
            at.on.fleet.scale(4)
            await at.on.until(lambda: len(at.on.names("samples")) == 4 and len(at.names(1)) == 4)
            tasks = at.begin(1, 9)
            for task in endless:
                task.cancel()
            at.on.fleet.scale(2)
            assert len(at.names(0)) == len(at.names(1)) == 2
            await all_of([*tasks, *waiting])

    run(test())


@pytest.mark.parametrize("cause", ["work", "unwanted"])
def test_a_crash_that_the_server_sees_first_counts_as_one(server: ForkServer, cause: str) -> None:
    """Else a completion that crashes replicas might do so for ever."""

    async def test() -> None:
        async with fronted(server, 1, fronts=1, reports=False) as at:
            await at.on.serve()
            await at.on.until(lambda: len(at.names(0)) == 1)
            (replica,) = at.replicas(0).fleet.replicas
            crashed = frozenset([replica.name] if cause == "work" else [])
            at.fronts[0].update(replace(at.on.fleet.facts(), replicas=(), crashed=crashed))
            assert replica.end.result().cause == cause and at.names(0) == set()

    run(test())


def test_a_cut_connection_is_made_again(server: ForkServer) -> None:
    async def test() -> None:
        async with fronted(server, fronts=1) as at:
            await at.on.serve()
            tasks, names = at.begin(0, 8, max_tokens=150), set(at.on.names())
            await at.on.until(lambda: at.work(0).tokens > 0)
            at.cut(0)
            await all_of(tasks)
            assert at.replicas(0).num_resumed == 8
            assert at.names(0) == names and at.on.born.num_started == 2

    run(test())


def test_a_completion_that_kills_every_replica_fails_alone(server: ForkServer) -> None:
    async def test() -> None:
        async with fronted(server, hooks=lambda number: Hooks(poison=999, step_seconds=SLOW)) as at:
            await at.on.serve()
            beside = [*at.begin(0, 8, max_tokens=100), *at.begin(1, 8, max_tokens=100)]
            with pytest.raises(ComputeError, match="4 replicas in a row"):
                await at.complete(0, prompt=[5, 999, 6])
            await all_of(beside)

    run(test())


@pytest.mark.parametrize("how", ["close", "remove", "cancel"])
def test_the_end_of_a_front_frees_its_places_at_the_replica(server: ForkServer, how: str) -> None:
    async def test() -> None:
        limits = SamplerConfig(max_concurrent=1)  # The replica samples one at a time, and has two more that wait.
        async with fronted(server, 1, limits=limits, reports=False) as at:
            await at.on.serve()
            endless = at.begin(0, 2, max_tokens=4000)
            await at.on.until(lambda: at.work(0).tokens > 0)
            other = at.begin(1, 1)
            await asyncio.sleep(0.1)
            assert not other[0].done()
            if how == "close":
                await at.fronts.pop(0).close()
            elif how == "remove":
                at.fronts.pop(0).update(REMOVED)
            for task in endless if how == "cancel" else ():
                task.cancel()
            await all_of(other)
            ends = await asyncio.gather(*endless, return_exceptions=True)
            kind = asyncio.CancelledError if how == "cancel" else PolicyRemoved
            assert {type(end) for end in ends} == {kind}

    run(test())


def test_strangers_are_refused_and_fronts_change_no_weights(server: ForkServer) -> None:
    async def test() -> None:
        async with fronted(server, 1, fronts=0) as at:
            await at.on.serve()
            (facts,) = at.on.fleet.facts().replicas
            assert str(facts.secret) not in repr(facts)
            with pytest.raises(ComputeError, match="does not know the secret"):
                await asyncio.to_thread(dial, facts.address, "stranger", b"a guess")
            connection = await asyncio.to_thread(dial, facts.address, "front", facts.secret)
            front = Peer("replica", *await asyncio.open_connection(sock=connection))
            for op, args in (("load", ()), ("adopt", (publication(1),)), ("suspend", ()), ("leave", ())):
                with pytest.raises(ComputeError, match=f"may not request '{op}'"):
                    await front.ask(op, POLICY, *args)
            front.close()
            assert versions([await at.on.complete()]) == {0}

    run(test())


def test_ids_of_processes_do_not_collide() -> None:
    program = "from agentjet.processes.rpc import IDS; input(); print(next(IDS) >> 32)"
    command = [sys.executable, "-c", program]
    live = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first_ids = [process.communicate("\n")[0] for process in live]
    assert [int(id) for id in first_ids] == [process.pid for process in live]


class FrontedLife(Life):
    """As `Life`. A third of the completions are the server's own."""

    def started(self) -> None:
        self._at = Fronted(self.on, 2)
        self._stack.push_async_callback(self._at.close)
        self._stack.callback(asyncio.create_task(self._at.report()).cancel)

    def completions(self, count: int, *, max_tokens: int = 60) -> list[asyncio.Task[list[Sampled]]]:
        by_fronts = (self._at.begin(front, count, max_tokens=max_tokens) for front in range(2))
        return [*self.on.begin(count, max_tokens=max_tokens), *(task for tasks in by_fronts for task in tasks)]

    @rule(front=st.integers(0, 1))
    def cut(self, front: int) -> None:
        async def cut() -> None:
            self._at.cut(front)

        self._do(cut())


def test_fronts_in_any_order_of_events(server: ForkServer) -> None:
    live_through(lambda: FrontedLife(server), max_examples=5)


def test_a_policy_without_replicas_fails_its_completions(server: ForkServer) -> None:
    async def test() -> None:
        async with fronted(server, 1, hooks=first(Hooks(), SLOWLY)) as at:
            at.on.born.fail_start = [ConfigError("install vLLM")] * 4
            tasks = at.begin(0, 2)
            with pytest.raises(ConfigError):
                await at.on.fleet.publish(publication(0))
            with pytest.raises(WorkerDied, match="install vLLM"):
                await all_of(tasks)
            with pytest.raises(WorkerDied, match="install vLLM"):
                await at.complete(1)
            at.fronts[1].update(REMOVED)
            assert not at.fronts[1].report()
            with pytest.raises(PolicyRemoved):
                await at.complete(1)
            with pytest.raises(PolicyRemoved):
                await at.fronts[1].score(POLICY, range(5), 0)

    run(test())
