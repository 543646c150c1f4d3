"""The sampler replicas of a policy, as real processes over real TCP: `fake_replica.py`. Pinned here:

1. a completion whose replica dies, at any point, continues elsewhere: exact context, derived seed, right end;
2. replicas that hang are ended; a completion that kills every replica fails alone;
3. scaling: completions move, waiting ones get the new places, newcomers adopt before they get work;
4. no replica: completions wait. A policy whose replicas cannot start fails with the reason;
5. `close` in any state ends everything that waits, and every process;
6. random faults: no completion fails, no token is wrong.

Publishing: `test_publishing.py`. Routing: `test_routing.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentjet.compute.cluster.replicas import derived_seed
from agentjet.config import SamplerConfig
from agentjet.errors import ComputeError, ConfigError, GrammarError, OutOfCache, PolicyRemoved, WorkerDied
from agentjet.types import Sampled, SamplingParams
from tests.cluster.fake_replica import POLICY, Hooks, mistakes, publication
from tests.cluster.nursery import ForkServer
from tests.cluster.scene import SLOW, all_of, first, run, scene

pytestmark = pytest.mark.usefixtures("retries_are_quick")


# ---- deaths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["sample", "sample:4", "token", "token:50", "sent", "sent:9", "cancel", "score"])
def test_completions_outlive_their_replica(server: ForkServer, point: str) -> None:
    async def test() -> None:
        async with scene(server, hooks=first(Hooks(die=point))) as on:
            await on.serve()
            cancelled = on.begin(2, max_tokens=3000)
            scores = [asyncio.create_task(on.replicas.score(range(9), 1)) for _ in range(4)]
            done = on.begin(10)
            for task in cancelled:
                task.cancel()
            await all_of(done)
            assert [len(await one) for one in scores] == [8] * 4
            await on.until(lambda: on.born.num_started == 3 or point == "cancel")

    run(test())


def test_all_replicas_are_killed_at_once_again_and_again(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 3, hooks=lambda number: Hooks(step_seconds=SLOW)) as on:
            await on.fleet.publish(publication(0))
            tasks = on.begin(12, max_tokens=300)
            for _ in range(3):
                await on.until(lambda: len(on.names("samples")) > 0)
                before = on.resumed
                for name in on.names():
                    on.kill(name)
                await on.until(lambda before=before: on.resumed > before)  # type: ignore[misc]
            await all_of(tasks)

    run(test())


def test_errors_of_a_completion_are_its_own(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 1) as on:
            await on.fleet.publish(publication(0))
            task = on.begin(1, max_tokens=200)
            with pytest.raises(OutOfCache):
                await on.complete(max_tokens=5000)
            with pytest.raises(GrammarError):
                async for _ in on.replicas.sample([5], SamplingParams(4, grammar="bad")):
                    pass
            await all_of(task)
            assert on.resumed == 0 and on.born.num_started == 1

    run(test())


def test_a_completion_that_kills_every_replica_fails_alone(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 2, hooks=lambda number: Hooks(poison=999, step_seconds=SLOW)) as on:
            await on.fleet.publish(publication(0))
            beside = on.begin(12, max_tokens=100)
            with pytest.raises(ComputeError, match="4 replicas in a row"):
                await on.complete(prompt=[5, 999, 6])
            await all_of(beside)

    run(test())


@pytest.mark.parametrize("hooks", [Hooks(hang="token:30"), Hooks(hang="sample:3"), Hooks(hang="adopt:2"), None])
def test_a_replica_that_hangs_is_ended(server: ForkServer, hooks: Hooks | None) -> None:
    """None: it is stopped from outside, connection and all."""

    async def test() -> None:
        async with scene(server, 2, hooks=first(hooks or Hooks(step_seconds=SLOW)), timeout=0.6) as on:
            await on.serve()
            hanging = f"{POLICY}/replica-1"
            tasks = on.begin(8, max_tokens=100)
            if hooks is None:
                on.born.signal(hanging, signal.SIGSTOP)
            await on.fleet.publish(publication(1))
            await all_of(tasks)
            while hanging in on.born.pids:  # It needs work to hang.
                await all_of(on.begin(6))
            await on.complete(99)

    run(test())


def test_a_replica_without_work_may_be_silent(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 1, timeout=0.1) as on:
            await on.fleet.publish(publication(0))
            await asyncio.sleep(0.3)  # Three timeouts.
            await on.complete()
            assert on.born.num_started == 1

    run(test())


# ---- how many -------------------------------------------------------------------------------------------------------


def test_the_end_of_a_replica_is_logged_with_its_reason(server: ForkServer, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with scene(server, 2) as on:
            await on.serve()
            on.kill(f"{POLICY}/replica-1")
            await on.until(lambda: on.born.num_started == 3 and on.versions() == [0, 0])  # It has connected.
            on.fleet.scale(1)
            await on.until(lambda: len(on.born.pids) == 1)

    run(test())
    assert caplog.messages == [f"{POLICY}/replica-1 lost its connection: ended by SIGKILL"]


def test_completions_of_ended_replicas_move(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 3, hooks=lambda number: Hooks(step_seconds=SLOW)) as on:
            await on.serve()
            tasks = on.begin(12, max_tokens=80)
            await on.until(lambda: len(on.names("samples")) == 3)
            on.fleet.scale(1)
            assert len(on.names()) == 1
            await all_of(tasks)
            await on.until(lambda: len(on.born.pids) == 1)
            assert on.resumed > 0 and on.born.num_started == 3

    run(test())


def test_waiting_completions_get_the_places_of_newcomers(server: ForkServer) -> None:
    async def test() -> None:
        limits = SamplerConfig(max_concurrent=2)
        async with scene(server, 1, hooks=lambda number: Hooks(step_seconds=SLOW), limits=limits) as on:
            endless = on.begin(12, max_tokens=4000)  # Before there is any replica.
            await on.fleet.publish(publication(3))
            on.fleet.scale(4)
            await on.until(lambda: len(on.names("samples")) == 4)
            tasks = on.begin(12, max_tokens=50)
            for task in endless:
                task.cancel()
            on.fleet.scale(2)
            on.fleet.scale(3)
            assert {piece.policy_version for pieces in await all_of(tasks) for piece in pieces} == {3}
            await on.until(lambda: on.versions() == [3] * 3)

    run(test())


def test_nothing_is_sampled_before_the_first_publish(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 1) as on:
            task = on.begin(1)
            await on.until(lambda: bool(on.names("waits for weights")))
            other = asyncio.create_task(on.complete(5))
            await asyncio.sleep(0)
            other.cancel()
            await on.fleet.publish(publication(0))
            await all_of(task)

    run(test())


def test_replicas_that_cannot_start(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 1) as on:
            on.born.fail_start = [ComputeError("no GPU is free"), WorkerDied("it was killed")]
            await on.fleet.publish(publication(0))  # The third start.
            on.born.fail_start = [ComputeError("no GPU is free")] * 5
            on.kill(on.names()[0])
            await on.complete()  # It served before, so it is tried for ever.
            assert on.born.num_started == 9

    run(test())


@pytest.mark.parametrize("error", [ConfigError("install vLLM"), ComputeError("out of memory")])
def test_a_policy_whose_replicas_never_start_fails(server: ForkServer, error: Exception) -> None:
    async def test() -> None:
        async with scene(server, 2) as on:
            on.born.fail_start = [error] * 4
            task = on.begin(1)
            with pytest.raises(type(error), match=str(error)):
                await on.fleet.publish(publication(0))
            assert str(error) in str(await on.fleet.failed)
            with pytest.raises(type(error)):
                await all_of(task)

    run(test())


@pytest.mark.parametrize("point", ["load", "adopt", "adopted"])
@pytest.mark.parametrize("count", [1, 4])
def test_replicas_that_all_end_of_the_same_error_refuse_the_settings(
    server: ForkServer, point: str, count: int
) -> None:
    async def test() -> None:
        async with scene(server, count, hooks=lambda number: Hooks(die=point)) as on:
            on.born.explain = lambda name: f"RuntimeError: head_dim=16 in {name}"
            with pytest.raises(ConfigError, match=r"same reason: RuntimeError: head_dim=16.*backend = 'embedded'"):
                await on.fleet.publish(publication(0))
            assert on.born.num_started <= 2 + count

    run(test())


@pytest.mark.parametrize(
    "causes", [["", "", ""], ["OSError: a", "OSError: a", ""], ["OSError: a", "OSError: b", "OSError: a"]]
)
def test_replicas_that_were_killed_before_they_served_refuse_nothing(server: ForkServer, causes: list[str]) -> None:
    """The engine tries again after a `ComputeError`."""

    async def test() -> None:
        async with scene(server, 1, hooks=lambda number: Hooks(die="adopt")) as on:
            left = list(causes)
            on.born.explain = lambda name: left.pop(0)
            with pytest.raises(ComputeError, match="3 replicas ended before one could serve"):
                await on.fleet.publish(publication(0))
            assert left == []

    run(test())


def test_replicas_that_served_once_are_started_for_ever(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 1) as on:
            await on.serve()
            on.born.explain = lambda name: "RuntimeError: the same"
            on.born.hooks = lambda number: Hooks(die="adopt" if number < 7 else "")
            on.kill(on.names()[0])
            await on.complete()
            assert on.born.num_started == 7

    run(test())


def test_a_newcomer_that_cannot_start_does_not_harm_the_others(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 1) as on:
            await on.fleet.publish(publication(0))
            on.born.fail_start = [ConfigError("another node without vLLM")] * 3
            on.fleet.scale(2)
            await on.until(lambda: on.versions() == [0, 0])
            await on.complete()

    run(test())


# ---- close ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["starting", "loading", "adopting", "sampling", "publishing", "hanging", "waiting"])
def test_close_in_any_state(server: ForkServer, state: str) -> None:
    async def test() -> None:
        hang = {"loading": "load", "adopting": "adopt", "publishing": "adopt:2", "hanging": "token:20"}.get(state, "")
        async with scene(server, 2, hooks=lambda number: Hooks(hang=hang, step_seconds=SLOW)) as on:
            ends = [*on.begin(3, max_tokens=2000)]
            if state not in ("starting", "loading", "waiting"):
                ends.append(asyncio.create_task(on.fleet.publish(publication(0))))  # type: ignore[arg-type]
            if state == "publishing":
                await on.until(lambda: on.versions() == [0, 0])
                ends[-1] = asyncio.create_task(on.fleet.publish(publication(1)))  # type: ignore[arg-type]
            if state in ("adopting", "publishing"):
                await on.until(lambda: on.adopting == 2)
            if state in ("sampling", "hanging"):
                await on.until(lambda: bool(on.names("samples")))
                await ends.pop()
            if state == "waiting":
                await on.until(lambda: len(on.names("waits for weights")) == 2)
            pids = list(on.born.pids.values())
            await asyncio.gather(on.fleet.close(), on.fleet.close())
            found = await asyncio.gather(*ends, return_exceptions=True)
            assert {type(one) for one in found} == {PolicyRemoved}
            await on.until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
            with pytest.raises(PolicyRemoved):
                await on.complete()

    run(test())


# ---- everything at once ---------------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.tuples(st.sampled_from(["kill", "kill", "kill all", "stop", "publish", "in turns", "suspend", "scale",
                               "cancel"]),
              st.integers(0, 3), st.integers(1, 40)),
    max_size=8,
)  # fmt: skip


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EVENTS, st.integers(1, 3))
def test_random_faults(server: ForkServer, events: list[tuple[str, int, int]], count: int) -> None:
    """Each event comes after some more tokens were received."""

    async def test() -> None:
        async with scene(server, count, hooks=lambda number: Hooks(step_seconds=0.001), timeout=0.5) as on:
            await on.serve()
            publishes: list[asyncio.Task[None]] = []
            tokens = 0
            enough = asyncio.Event()

            async def complete(number: int) -> None:
                nonlocal tokens
                prompt, params = range(number, number + 130), SamplingParams(150, seed=number, piece_tokens=8)
                pieces: list[Sampled] = []
                async with aclosing(on.replicas.sample(prompt, params)) as stream:
                    async for piece in stream:
                        pieces.append(piece)
                        tokens += len(piece.tokens)
                        enough.set()
                assert mistakes(prompt, params, pieces, derived_seed) == []

            tasks = [asyncio.create_task(complete(number)) for number in range(8)]
            for version, (event, which, delay) in enumerate(events, 1):
                until = tokens + delay
                while tokens < until and not all(task.done() for task in tasks):
                    enough.clear()
                    await asyncio.wait([asyncio.create_task(enough.wait()), *tasks], timeout=0.05)
                names = list(on.born.pids)
                if event in ("kill", "stop") and names:
                    signal_ = signal.SIGKILL if event == "kill" else signal.SIGSTOP
                    on.born.signal(names[which % len(names)], signal_)
                elif event == "kill all":
                    for name in names:
                        on.kill(name)
                elif event in ("publish", "in turns"):
                    publish = on.fleet.publish(publication(version), in_turns=event == "in turns")
                    publishes.append(asyncio.create_task(publish))
                elif event == "suspend":
                    await on.fleet.suspend()
                    publishes.append(asyncio.create_task(on.fleet.publish(publication(version))))
                elif event == "scale":
                    on.fleet.scale(1 + which)
                elif event == "cancel":
                    tasks[which].cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [one for one in found if one is not None and not isinstance(one, asyncio.CancelledError)] == []
            await asyncio.gather(*publishes)
            assert not on.fleet.failed.done()

    run(test())
