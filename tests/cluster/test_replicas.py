"""The sampler replicas of a policy, as real processes over real TCP: `fake_replica.py`. Pinned here:

1. a replica with a fault, at any point: completions continue elsewhere with exact context, derived seed and right end;
   a publish and a suspension end, and the replica is replaced;
2. adoption, death, suspension and scaling in any order: no completion fails, no token is wrong, and in the end all
   replicas serve the newest version;
3. a completion that kills every replica fails alone, and errors of a completion are its own;
4. scaling: completions move, waiting ones get the new places; no replica: completions wait;
5. a policy whose replicas cannot start, serve or pass the probe fails with the reason;
6. publishing: in turns, to an older version, cancelled, suspended; weights that no replica can fetch end none;
7. `close` in any state ends everything that waits, and every process.

Routing: `test_routing.py`.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from agentjet.compute.weights import PROBE_DECODED, PROBE_TOKENS, probe_failure
from agentjet.config import SamplerConfig
from agentjet.errors import ComputeError, ConfigError, GrammarError, OutOfCache, PolicyRemoved, WorkerDied
from agentjet.types import Sampled, SamplingParams, TokenScore
from tests.cluster.fake_replica import POLICY, Hooks, publication
from tests.cluster.nursery import ForkServer
from tests.cluster.scene import SLOW, all_of, run, scene

pytestmark = pytest.mark.usefixtures("retries_are_quick")

# ---- one fault ------------------------------------------------------------------------------------------------------

FAULTS = [
    *(Hooks(die=at) for at in ("sample", "sample:4", "token", "token:50", "sent", "sent:9", "cancel", "score")),
    *(Hooks(hang=at) for at in ("token:30", "sample:3", "load")),
    *(Hooks(die=at) for at in ("adopt:2", "paused:2", "adopted:2", "resumed:2", "suspend", "suspended")),
    *(Hooks(hang=at) for at in ("adopt:2", "paused:2", "adopted:2", "resumed:2", "suspend", "suspended")),
    *(Hooks(fail=at) for at in ("suspend", "suspended")),
    Hooks(fail_from="adopt:2", fail_to="adopt:99"),
    Hooks(lies=(1,)),
    *(Hooks(routes=fault) for fault in ("stale", "wide", "repeated")),
]


def name_of(fault: Hooks) -> str:
    return " ".join(f"{key}-{value}" for key, value in vars(fault).items() if value != vars(Hooks())[key])


@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_a_replica_with_a_fault_is_replaced_and_harms_no_completion(server: ForkServer, fault: Hooks) -> None:
    """`mistakes` finds tokens of stale weights, too."""

    async def test() -> None:
        faulty = replace(fault, step_seconds=SLOW)
        async with scene(server, 2, hooks=lambda n: faulty if n == 2 else Hooks(step_seconds=SLOW), timeout=0.5) as on:
            await on.fleet.publish(publication(0))
            await on.until(lambda: on.versions() == [0, 0] or fault.hang == "load")
            cancelled, scores = on.begin(2, max_tokens=3000), [on.replicas.score(range(9), 1) for _ in range(4)]
            tasks = on.begin(8)
            scoring = asyncio.gather(*scores)
            for task in cancelled:
                await asyncio.sleep(0.01)
                task.cancel()
            await on.fleet.publish(publication(1))
            assert 1 in on.versions() and set(on.versions()) <= {1, None}
            await on.fleet.suspend()
            late = on.begin(1)
            await on.fleet.publish(publication(2))
            await all_of([*tasks, *late])
            assert [len(score) for score in await scoring] == [8] * 4
            while on.born.num_started < 3 and fault.die != "cancel":
                await all_of(on.begin(6))  # A replica without work may hang unnoticed.
            await on.until(lambda: on.versions() == [2, 2])
            assert on.born.num_started <= 3 and not on.fleet.failed.done()

    run(test())


def test_a_score_of_weights_that_fail_the_probe_does_not_count(server: ForkServer) -> None:
    """A replica answers a score that waited for the adoption before it is refused."""

    async def test() -> None:
        hooks = Hooks(adopt_seconds=0.05)
        async with scene(server, 2, hooks=lambda n: replace(hooks, lies=(1,)) if n == 1 else hooks) as on:
            await on.fleet.publish(publication(0))
            await on.until(lambda: on.versions() == [0, 0])
            liar = on.fleet.replicas[0]
            assert liar.peer is not None
            ask, num_asked = liar.peer.ask, 0

            async def ask_late(op: str, *args: Any) -> Any:
                nonlocal num_asked
                if op != "score":
                    return await ask(op, *args)
                num_asked += 1
                while not liar.is_adopting:
                    await asyncio.sleep(0)
                return 1, [TokenScore(0.0, ())]

            liar.peer.ask = ask_late  # type: ignore[method-assign]
            scores = [asyncio.create_task(on.replicas.score(range(9), 1)) for _ in range(4)]
            while not num_asked:
                await asyncio.sleep(0)
            await on.fleet.publish(publication(1))
            assert [len(one) for one in await asyncio.gather(*scores)] == [8] * 4
            assert liar.end.done()

    run(test())


# ---- everything in any order ----------------------------------------------------------------------------------------


class Life(RuleBasedStateMachine):
    """Adoption, death, suspension and scaling of replicas, while completions run."""

    def __init__(self, server: ForkServer) -> None:
        super().__init__()
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self._version = 0
        self._count = 1
        self._publishes: list[asyncio.Task[None]] = []
        self._tasks: list[asyncio.Task[list[Sampled]]] = []

    def started(self) -> None:
        """Called when replicas start."""

    def completions(self, count: int, *, max_tokens: int = 60) -> list[asyncio.Task[list[Sampled]]]:
        return self.on.begin(count, max_tokens=max_tokens)

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, 30))

    @initialize(count=st.integers(1, 3))
    def start(self, count: int) -> None:
        async def begin() -> None:
            hooks = Hooks(step_seconds=0.001)
            self.on = await self._stack.enter_async_context(
                scene(self._server, count, hooks=lambda n: hooks, timeout=0.5)
            )
            self.started()
            await self.on.serve()
            self._tasks += self.completions(6, max_tokens=150)

        self._count = count
        self._do(begin())

    @rule(count=st.integers(1, 4))
    def begin(self, count: int) -> None:
        async def begin() -> None:
            self._tasks += self.completions(count, max_tokens=80)

        self._do(begin())

    @rule(milliseconds=st.integers(1, 40))
    def wait(self, milliseconds: int) -> None:
        self._do(asyncio.sleep(milliseconds / 1000))

    @rule(which=st.integers(0, 3), number=st.sampled_from([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
    def end(self, which: int, number: signal.Signals) -> None:
        connected = {one.name for one in self.on.fleet.replicas if one.peer is not None}
        # A process that is stopped before it connects is waited for longer than `_do` waits (`CONNECT_SECONDS`).
        names = [name for name in self.on.born.pids if number == signal.SIGKILL or name in connected]
        if names:
            self.on.born.signal(names[which % len(names)], number)
        self.wait(5)

    @rule()
    def kill_all(self) -> None:
        """Only those that serve: a policy fails if too many end before."""
        for replica in self.on.fleet.replicas:
            if replica.version is not None:
                self.on.kill(replica.name)
        self.wait(5)

    @rule(in_turns=st.booleans(), back=st.sampled_from([0, 0, 0, 1]))
    def publish(self, in_turns: bool, back: int) -> None:
        async def publish() -> None:
            publish = self.on.fleet.publish(publication(self._version), in_turns=in_turns)
            self._publishes.append(asyncio.create_task(publish))
            await asyncio.sleep(0.002)

        self._version = max(0, self._version + 1 - 2 * back)
        self._do(publish())

    @rule()
    def suspend(self) -> None:
        self._do(self.on.fleet.suspend())
        assert all(one.is_suspended for one in self.on.fleet.replicas)
        self.publish(in_turns=False, back=0)

    @rule(count=st.integers(1, 4))
    def scale(self, count: int) -> None:
        async def scale() -> None:
            self.on.fleet.scale(count)

        self._count = count
        self._do(scale())

    @rule(which=st.integers(0, 9))
    def cancel(self, which: int) -> None:
        async def cancel() -> None:
            self._tasks.pop(which % len(self._tasks)).cancel()

        if self._tasks:
            self._do(cancel())

    def teardown(self) -> None:
        async def settle() -> None:
            try:
                await all_of(self._tasks)
                await asyncio.gather(*self._publishes)
                while self.on.versions() != [self._version] * self._count:
                    await all_of(self.completions(4))  # One that was stopped needs work to be noticed.
                assert not self.on.fleet.failed.done()
            finally:
                await self._stack.aclose()

        self._do(settle())
        self._loop.close()


def test_replicas_adopt_die_and_are_suspended_in_any_order(server: ForkServer) -> None:
    live_through(lambda: Life(server))


def live_through(make: Callable[[], Life], max_examples: int = 15) -> None:
    limits = settings(
        max_examples=max_examples,
        stateful_step_count=8,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    run_state_machine_as_test(make, settings=limits)  # type: ignore[no-untyped-call]


# ---- completions ----------------------------------------------------------------------------------------------------


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


def test_a_replica_without_work_may_be_silent(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 1, timeout=0.4) as on:
            await on.fleet.publish(publication(0))
            await asyncio.sleep(1.0)  # More than two timeouts.
            await on.complete()
            assert on.born.num_started == 1

    run(test())


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


def test_waiting_completions_get_the_places_of_newcomers(server: ForkServer) -> None:
    async def test() -> None:
        limits = SamplerConfig(max_concurrent=2)
        async with scene(server, 1, hooks=lambda number: Hooks(step_seconds=SLOW), limits=limits) as on:
            endless = on.begin(12, max_tokens=4000)  # Before there is any replica.
            await on.until(lambda: bool(on.names("waits for weights")))
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


# ---- policies that fail ---------------------------------------------------------------------------------------------


def test_starts_that_fail_are_repeated(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 1) as on:
            on.born.fail_start = [ComputeError("no GPU is free"), WorkerDied("it was killed")]
            await on.fleet.publish(publication(0))  # The third start.
            on.born.fail_start = [ComputeError("no GPU is free")] * 5
            on.kill(on.names()[0])
            await on.complete()  # It served before, so it is tried for ever.
            assert on.born.num_started == 9
            on.born.explain = lambda name: "RuntimeError: the same"
            on.born.hooks = lambda number: Hooks(die="adopt" if number < 13 else "")
            on.kill(on.names()[0])
            await on.complete()
            assert on.born.num_started == 13
            on.born.fail_start = [ConfigError("another node without vLLM")] * 3
            on.fleet.scale(2)
            await on.until(lambda: on.versions() == [0, 0])

    run(test())


CAUSE = "RuntimeError: head_dim=16"


@pytest.mark.parametrize(
    ("count", "errors", "hooks", "causes", "kind", "reason"),
    [
        (2, [ConfigError("install vLLM")] * 4, Hooks(), [""] * 9, ConfigError, "install vLLM"),
        (2, [ComputeError("out of memory")] * 4, Hooks(), [""] * 9, ComputeError, "out of memory"),
        *(
            (count, [], Hooks(die=at), [CAUSE] * 9, ConfigError, f"same reason: {CAUSE}.*backend = 'embedded'")
            for at in ("load", "adopt", "adopted")
            for count in (1, 4)
        ),
        *(
            (1, [], Hooks(die="adopt"), causes, ComputeError, "3 replicas ended before one could serve")
            for causes in (["", "", ""], ["OSError: a", "OSError: a", ""], ["OSError: a", "OSError: b", "OSError: a"])
        ),
        *((count, [], Hooks(lies=(0,)), [""] * 9, ConfigError, "probe of version 0: the larg") for count in (1, 3)),
    ],
)
def test_a_policy_whose_replicas_never_serve_fails(
    server: ForkServer,
    count: int,
    errors: list[Exception],
    hooks: Hooks,
    causes: list[str],
    kind: type[Exception],
    reason: str,
) -> None:
    """A `ConfigError` is for settings that cannot work. The engine tries again after a `ComputeError`."""

    async def test() -> None:
        async with scene(server, count, hooks=lambda number: hooks) as on:
            left = list(causes)
            on.born.fail_start, on.born.explain = list(errors), lambda name: left.pop(0)
            task = on.begin(1)
            with pytest.raises(kind, match=reason):
                await on.fleet.publish(publication(0))
            assert on.fleet.failed.done() and on.born.num_started <= 2 + 2 * count
            with pytest.raises(kind):
                await all_of(task)
            with pytest.raises(kind):
                await on.complete()

    run(test())


@pytest.mark.parametrize("count", [1, 3])
def test_a_policy_fails_if_no_replica_passes_a_later_probe(server: ForkServer, count: int) -> None:
    async def test() -> None:
        async with scene(server, count, hooks=lambda number: Hooks(lies=(1,))) as on:
            await on.serve()
            with pytest.raises(ComputeError, match="probe of version 1: the largest error"):
                await on.fleet.publish(publication(1))
            assert "failed the probe" in str(await on.fleet.failed)

    run(test())


# ---- publishing -----------------------------------------------------------------------------------------------------


def test_the_same_weights_again_are_not_loaded_again(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 1) as on:
            for version in (0, 1, 2):
                await on.fleet.publish(publication(version))
            on.most_adopting = 0
            await on.fleet.publish(replace(publication(2), address="127.0.0.1:10"))
            assert on.most_adopting == 0
            await on.fleet.publish(publication(1))  # An older version, after a restart of the learner.
            assert on.versions() == [1]

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


def test_a_publish_that_is_cancelled_goes_on_and_a_suspension_waits_for_it(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 2, hooks=lambda number: Hooks(adopt_seconds=0.05)) as on:
            await on.until(lambda: on.born.num_started == 2)
            await on.fleet.suspend()  # They load, and have no weights yet.
            assert len(on.names("waits for weights")) == 2
            for version in (0, 1):
                publish = asyncio.create_task(on.fleet.publish(publication(version)))
                await on.until(lambda: on.adopting == 2)
                publish.cancel()  # As when the learner dies: the next one needs the GPUs.
                await on.fleet.suspend()
                assert on.adopting == 0 and on.versions() == [version] * 2
            assert len(on.names("is suspended until the next publish")) == 2
            await on.fleet.publish(publication(1))  # The same weights again wake them, too.
            await on.complete()
            publish = asyncio.create_task(on.fleet.publish(publication(2)))
            await on.until(lambda: on.adopting > 0)
            publish.cancel()
            await on.until(lambda: on.versions() == [2, 2])
            assert on.born.num_started == 2

    run(test())


def test_completions_of_suspended_replicas_wait(server: ForkServer) -> None:
    async def test() -> None:
        async with scene(server, 2, hooks=lambda number: Hooks(step_seconds=SLOW), timeout=0.4) as on:
            await on.serve()
            tasks = on.begin(6, max_tokens=80)
            await on.complete(50, max_tokens=8)
            await on.fleet.suspend()
            count = on.replicas.num_running + on.replicas.num_waiting
            late = on.begin(1)
            await asyncio.sleep(0.7)  # Longer than a replica may be silent that has work.
            assert on.replicas.num_running + on.replicas.num_waiting == count + 1 and on.born.num_started == 2
            await on.fleet.publish(publication(1))
            found = await all_of([*tasks, *late])
            assert {piece.policy_version for pieces in found for piece in pieces} == {0, 1}

    run(test())


def test_weights_that_cannot_be_fetched_end_no_replica(server: ForkServer, caplog: pytest.LogCaptureFixture) -> None:
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
    failed = [(record.args[0], record.args[1]) for record in caplog.records if "did not adopt" in record.message]
    assert len(failed) == len({*failed}) >= 2, "one line for each replica and version"


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


@pytest.mark.parametrize(("dtype", "change"), [("float32", 0.01), ("bfloat16", 0.45)])
def test_a_replica_that_decodes_with_the_old_weights(dtype: str, change: float) -> None:
    """Its prompts are computed with the new ones. A change of four times the rounding is found, in 16 bits, too."""
    chance = random.Random(0)
    rounding = 0.0 if dtype == "float32" else 0.09
    rounded = lambda values: tuple(value + chance.gauss(0, rounding) for value in values)  # noqa: E731
    old = tuple(chance.uniform(-25, -5) for _ in range(PROBE_TOKENS - 1))
    new = tuple(value + chance.gauss(0, change) for value in old)
    before = replace(publication(1), dtype=dtype, probe_logprobs=rounded(old))
    wanted = replace(publication(2), dtype=dtype, probe_logprobs=rounded(new))
    half = (*rounded(new[:-PROBE_DECODED]), *rounded(old[-PROBE_DECODED:]))
    assert probe_failure(wanted, rounded(new), before) == ""
    reason = "largest error" if dtype == "float32" else "decoded tokens' mean error"
    assert reason in probe_failure(wanted, half, before)


# ---- close ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hang", ["", "load", "adopt", "adopt:2", "token:20"])
def test_close_in_any_state(server: ForkServer, hang: str) -> None:
    async def test() -> None:
        async with scene(server, 2, hooks=lambda number: Hooks(hang=hang, step_seconds=SLOW)) as on:
            ends: list[asyncio.Task[Any]] = [*on.begin(3, max_tokens=2000)]
            if hang:
                ends.append(asyncio.create_task(on.fleet.publish(publication(0))))
            if hang == "adopt:2":
                await on.until(lambda: on.versions() == [0, 0])
                ends[-1] = asyncio.create_task(on.fleet.publish(publication(1)))
            if hang.startswith("adopt"):
                await on.until(lambda: on.adopting == 2)
            if hang == "token:20":
                await on.until(lambda: bool(on.names("samples")))
                await ends.pop()
            pids = list(on.born.pids.values())
            await asyncio.gather(on.fleet.close(), on.fleet.close())
            found = await asyncio.gather(*ends, return_exceptions=True)
            assert {type(one) for one in found} == {PolicyRemoved}
            await on.until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
            with pytest.raises(PolicyRemoved):
                await on.complete()

    run(test())
