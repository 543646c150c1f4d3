"""Publishing to sampler replicas, as real processes over real TCP: `fake_replica.py`. Pinned here:

1. a publish while completions run: every token has its version, no piece has two; a replica may die at any point of it,
   and the next publish may begin before it is done;
2. one by one: a replica adopts at a time, and the others sample;
3. the probe: a replica that claims weights it does not have is replaced, and none of its tokens count; if no replica
   passes, the policy fails with the reason;
4. weights that cannot be fetched end no replica that samples, unless others could fetch them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from agentjet.compute.cluster.probe import probe_failure
from agentjet.compute.cluster.weights import PROBE_TOKENS
from agentjet.errors import ComputeError, ConfigError
from tests.cluster.fake_replica import POLICY, Hooks, publication
from tests.cluster.nursery import ForkServer
from tests.cluster.scene import SLOW, all_of, first, run, scene

pytestmark = pytest.mark.usefixtures("retries_are_quick")


# ---- publish --------------------------------------------------------------------------------------------------------


def test_a_publish_while_completions_run(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 2, hooks=lambda number: Hooks(step_seconds=SLOW)) as on:
            await on.serve()
            tasks = on.begin(6, max_tokens=500)
            await on.complete(50, max_tokens=8)  # Others have tokens, too, by then.
            await on.fleet.publish(publication(1))
            assert set(on.versions()) == {1}
            found = await all_of(tasks)
            assert {piece.policy_version for pieces in found for piece in pieces} == {0, 1}
            assert {piece.policy_version for piece in await on.complete()} == {1}

    run(test())


@pytest.mark.parametrize("action", ["die", "hang"])
@pytest.mark.parametrize("point", ["adopt:2", "paused:2", "adopted:2", "resumed:2"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_replica_ends_in_the_middle_of_a_publish(server: ForkServer, point: str, action: str, count: int) -> None:
    async def test() -> None:
        faulty = Hooks(step_seconds=SLOW, **{action: point})
        async with scene(server, count, hooks=first(faulty), timeout=0.5) as on:
            await on.serve()
            tasks = on.begin(4, max_tokens=60)
            await on.fleet.publish(publication(1))
            assert set(on.versions()) <= {1, None} and 1 in on.versions()
            await all_of([*tasks, *on.begin(6)])  # A replica without work may hang unnoticed.
            await on.until(lambda: on.born.num_started > count and on.versions() == [1] * count)

    run(test())


def test_the_next_publish_begins_while_replicas_adopt(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 3, hooks=lambda number: Hooks(adopt_seconds=0.02, step_seconds=SLOW)) as on:
            await on.serve()
            publishes = [asyncio.create_task(on.fleet.publish(publication(9)))]
            tasks = on.begin(6, max_tokens=80)
            for version in range(1, 5):
                await on.until(lambda: on.adopting > 0)
                publishes.append(asyncio.create_task(on.fleet.publish(publication(version))))
                on.kill(on.names()[version % 3])  # Its successor, a newcomer, adopts while the next one begins.
            await asyncio.gather(*publishes)
            assert set(on.versions()) <= {4, None}
            await all_of(tasks)
            await on.until(lambda: on.versions() == [4] * 3)

    run(test())


def test_weights_go_back_to_an_older_version(server: ForkServer) -> None:
    """After a restart of the learner. The same weights again are not loaded again."""

    async def test() -> None:
        async with scene(server, 1, hooks=lambda number: Hooks(step_seconds=SLOW)) as on:
            for version in (0, 1, 2):
                await on.fleet.publish(publication(version))
            tasks = on.begin(3, max_tokens=60)
            await on.until(lambda: bool(on.names("samples")))
            on.most_adopting = 0
            await on.fleet.publish(replace(publication(2), address="127.0.0.1:10"))
            assert on.most_adopting == 0
            await on.fleet.publish(publication(1))
            assert on.versions() == [1]
            assert {piece.policy_version for pieces in await all_of(tasks) for piece in pieces} <= {1, 2}

    run(test())


@pytest.mark.parametrize(("count", "together"), [(3, 1), (8, 2)])
def test_in_turns_most_replicas_sample(server: ForkServer, count: int, together: int) -> None:
    async def test() -> None:
        async with scene(server, count, hooks=lambda number: Hooks(adopt_seconds=0.02, step_seconds=SLOW)) as on:
            await on.serve()
            tasks = on.begin(6, max_tokens=120)
            on.most_adopting = 0
            await on.fleet.publish(publication(1), in_turns=True)
            assert on.most_adopting == together and on.versions() == [1] * count
            await all_of(tasks)
            await on.fleet.publish(publication(2))
            assert on.most_adopting == count

    run(test())


def test_a_cancelled_publish_goes_on(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 2, hooks=lambda number: Hooks(adopt_seconds=0.05)) as on:
            await on.serve()
            publish = asyncio.create_task(on.fleet.publish(publication(1)))
            await on.until(lambda: on.adopting > 0)
            publish.cancel()
            await on.until(lambda: on.versions() == [1, 1])
            assert on.born.num_started == 2

    run(test())


# ---- suspended while the ranks use the GPUs --------------------------------------------------------------------------


def test_suspended_replicas_sample_after_the_next_publish(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 2, hooks=lambda number: Hooks(step_seconds=SLOW), timeout=0.5) as on:
            await on.serve()
            tasks = on.begin(6, max_tokens=80)
            await on.complete(50, max_tokens=8)
            for version in (1, 1):  # The same weights again wake them, too.
                await on.fleet.suspend()
                await on.fleet.suspend()
                tokens = on.replicas.num_running + on.replicas.num_waiting
                late = on.begin(1)
                await asyncio.sleep(0.8)  # Longer than a replica may be silent that has work.
                assert on.replicas.num_running + on.replicas.num_waiting == tokens + 1 and on.born.num_started == 2
                assert {one.state for one in on.replicas.status()} == {"is suspended until the next publish"}
                await on.fleet.publish(publication(version))
                await all_of(late)
            found = await all_of(tasks)
            assert {piece.policy_version for pieces in found for piece in pieces} == {0, 1}

    run(test())


@pytest.mark.parametrize("action", ["die", "hang", "fail"])
@pytest.mark.parametrize("point", ["suspend", "suspended"])
def test_a_replica_that_cannot_be_suspended_is_ended(server: ForkServer, point: str, action: str) -> None:
    async def test() -> None:
        async with scene(server, 2, hooks=first(Hooks(**{action: point})), timeout=0.5) as on:
            await on.serve()
            await on.fleet.suspend()
            assert len(on.born.pids) == 1, "the ended one has freed its GPU, and no other starts"
            tasks = on.begin(4)
            await asyncio.sleep(0.05)
            assert on.born.num_started == 2
            await on.fleet.publish(publication(1))
            await all_of(tasks)
            await on.until(lambda: on.born.num_started == 3 and on.versions() == [1, 1])

    run(test())


def test_suspend_ends_replicas_that_start_for_ever(server: ForkServer) -> None:
    async def test() -> None:
        hooks = {1: Hooks(), 2: Hooks(hang="load")}
        async with scene(server, 2, hooks=lambda number: hooks.get(number, Hooks()), timeout=0.5) as on:
            await on.fleet.publish(publication(0))
            await on.fleet.suspend()
            assert len(on.born.pids) == 1
            await on.fleet.publish(publication(1))
            await on.until(lambda: on.versions() == [1, 1])

    run(test())


def test_suspend_waits_for_replicas_that_start_or_adopt(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 2, hooks=lambda number: Hooks(adopt_seconds=0.05)) as on:
            await on.until(lambda: on.born.num_started == 2)
            await on.fleet.suspend()  # They load, and have no weights yet.
            assert len(on.names("waits for weights")) == 2
            publish = asyncio.create_task(on.fleet.publish(publication(0)))
            await on.until(lambda: on.adopting == 2)
            publish.cancel()  # As when the learner dies: the next one needs the GPUs.
            await on.fleet.suspend()
            assert on.adopting == 0 and on.versions() == [0, 0]
            assert len(on.names("is suspended until the next publish")) == 2
            await on.fleet.publish(publication(0))
            await on.complete()

    run(test())


# ---- probe and fetch ------------------------------------------------------------------------------------------------


def test_a_replica_that_lies_is_replaced_and_its_tokens_do_not_count(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 2, hooks=first(Hooks(lies=(1,), step_seconds=SLOW))) as on:
            await on.serve()
            tasks = on.begin(8, max_tokens=100)  # `mistakes` finds tokens of stale weights.
            await on.fleet.publish(publication(1))
            assert f"{POLICY}/replica-1" not in on.names() and 1 in on.versions()
            await all_of(tasks)
            await on.until(lambda: on.versions() == [1, 1])
            assert not on.fleet.failed.done()

    run(test())


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("version", [0, 1])
def test_a_policy_fails_if_no_replica_passes_the_probe(server: ForkServer, version: int, count: int) -> None:
    async def test() -> None:
        async with scene(server, count, hooks=lambda number: Hooks(lies=(version,))) as on:
            if version:
                await on.serve()
            kind = ComputeError if version else ConfigError  # A retry does not help those who never passed one.
            with pytest.raises(kind, match=f"probe of version {version}: the largest error"):
                await on.fleet.publish(publication(version))
            assert "failed the probe" in str(await on.fleet.failed)
            with pytest.raises(kind, match="probe" if version else r"set model.dtype = 'float32'"):
                await on.complete()

    run(test())


@pytest.mark.parametrize(
    ("dtype", "change", "passes"),
    [
        ("float32", lambda at: 1e-4, True),
        ("float32", lambda at: 0.01 if at == 5 else 0.0, False),
        ("bfloat16", lambda at: 0.3 if at == 5 else 0.01, True),
        ("bfloat16", lambda at: 0.06, False),
        ("bfloat16", lambda at: float("nan") if at == 5 else 0.0, False),
        ("float32", lambda at: float("nan"), False),
    ],
)
def test_probe(dtype: str, change: Callable[[int], float], passes: bool) -> None:
    wanted = replace(publication(1), dtype=dtype)
    found = [value + change(at) for at, value in enumerate(wanted.probe_logprobs)]
    assert (probe_failure(wanted, found) == "") == passes
    assert "instead of 63" in probe_failure(wanted, found[1:])


@pytest.mark.parametrize("change", [0.02, 0.2])
def test_a_replica_with_the_old_weights_in_16_bits(change: float) -> None:
    """Both ends round. A change that is smaller than that cannot be told from it."""
    chance = random.Random(0)
    rounded = lambda values: tuple(value + chance.gauss(0, 0.09) for value in values)  # noqa: E731
    old = tuple(chance.uniform(-25, -5) for _ in range(PROBE_TOKENS - 1))
    new = tuple(value + chance.gauss(0, change) for value in old)
    before = replace(publication(1), dtype="bfloat16", probe_logprobs=rounded(old))
    wanted = replace(publication(2), dtype="bfloat16", probe_logprobs=rounded(new))
    assert probe_failure(wanted, rounded(new), before) == ""
    stale = "its log-probabilities are nearer to those of version 1" if change > 0.1 else ""
    assert probe_failure(wanted, rounded(old), before) == stale
    assert probe_failure(wanted, rounded(old)) == "", "alone, it is within the rounding"


def test_weights_that_cannot_be_fetched(server: ForkServer) -> None:
    async def test() -> None:
        faulty = Hooks(step_seconds=SLOW, fail_from="adopt:2", fail_to="adopt:8")
        async with scene(server, 2, hooks=lambda number: faulty) as on:
            await on.serve()
            tasks = on.begin(4, max_tokens=80)
            with pytest.raises(ComputeError, match="no replica could adopt version 1: failed at adopt"):
                await on.fleet.publish(publication(1))
            assert on.versions() == [0, 0] and on.born.num_started == 2
            await on.fleet.publish(publication(2))
            assert on.versions() == [2, 2] and on.born.num_started == 2
            await all_of(tasks)

    run(test())


def test_a_replica_that_cannot_fetch_what_others_can_is_replaced(server: ForkServer) -> None:
    async def test() -> None:
        faulty = Hooks(step_seconds=SLOW, fail_from="adopt:2", fail_to="adopt:99")
        async with scene(server, 2, hooks=first(faulty)) as on:
            await on.serve()
            tasks = on.begin(4, max_tokens=80)
            await on.fleet.publish(publication(1))
            assert set(on.versions()) == {1}
            await all_of(tasks)
            await on.until(lambda: on.versions() == [1, 1])
            assert on.born.num_started == 3

    run(test())
