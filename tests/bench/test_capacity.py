"""`bench.capacity` simulates what queueing theory has in closed form, and measures a real gateway.

1. An M/M/1 queue has the mean waiting time of its formula.
2. Little's law holds: agents = calls a second x (seconds of a call + seconds between two).
3. The throughput saturates at the exact rate of the slowest resource: the gateway, or the replicas' slots.
4. Group commit: changes during a wait for the disk share the next one.
5. A learner limits the batches a second, and groups wait for places; what is too old is dropped.
6. Several fronts share the calls; a journal process is the next limit.
7. The costs fitted to loads are those that made them; a seed repeats a simulation exactly.
8. (thorough) The whole bench, small: a real gateway and replicas over TCP.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from bench.capacity import first_limit, limits, spread
from bench.queueing.costs import Costs
from bench.queueing.measure import fit
from bench.queueing.simulation import Fleet, Load, Plan, Simulation
from bench.queueing.station import Station
from bench.queueing.workload import AGENTS, LongTail, Workload

FREE = Costs(**dict.fromkeys(Costs.__slots__, 0.0) | {"disk_bandwidth": 1e9})  # type: ignore[arg-type]
ONE_SECOND = Fleet(slots=64, step=0.01, step_per_completion=0.0, prompt_tokens_per_step=1e12)
"""A completion of 100 tokens takes a second."""


def equal(seconds: float = 1.0, calls: int = 4) -> Workload:
    def always(value: float) -> LongTail:
        return LongTail(value, 0.0, value)

    return Workload(always(calls), always(seconds), 10, always(10), always(100), 0.0)


def run(
    agents: int, fleet: Fleet = ONE_SECOND, workload: Workload | None = None, costs: Costs = FREE, **changes: int
) -> Load:
    return Simulation(Plan(agents, fleet, workload or equal(), costs, calls=4000, **changes)).run()


def test_a_station_is_an_mm1_queue() -> None:
    rng, station, now, waited = random.Random(1), Station(0.0), 0.0, 0.0
    for _ in range(200_000):
        now += rng.expovariate(0.7)
        seconds = rng.expovariate(1.0)
        waited += station.serve(now, seconds) - seconds - now
    assert waited / 200_000 == pytest.approx(0.7 / (1 - 0.7), rel=0.05)
    assert station.busy_share(now) == pytest.approx(0.7, rel=0.01)


@pytest.mark.parametrize("agents", [10, 60, 300])
def test_littles_law(agents: int) -> None:
    load = run(agents, workload=replace(equal(), completion=LongTail(100, 1.0, 1000), seconds=LongTail(1, 1.0, 9)))
    seconds = load.call_s + replace(equal(), seconds=LongTail(1, 1.0, 9)).seconds.mean
    assert load.calls_per_s * seconds == pytest.approx(agents, rel=0.05)


def test_few_agents_wait_for_nothing() -> None:
    load = run(10)
    assert load.call_s == pytest.approx(1.0)
    assert load.calls_per_s == pytest.approx(10 / 2, rel=0.01)
    assert first_limit(load) == "agents"


def test_full_replicas_limit_the_calls() -> None:
    """2 replicas of 64 slots complete 128 calls a second."""
    load = run(600, replace(ONE_SECOND, replicas=2))
    assert load.calls_per_s == pytest.approx(128, rel=0.01)
    assert load.replicas == pytest.approx(1.0, abs=0.01)
    assert first_limit(load) == "replicas"


def test_steps_take_longer_with_more_completions() -> None:
    """64 completions of 100 steps of 0.01 + 64 * 0.001 s."""
    load = run(600, replace(ONE_SECOND, step_per_completion=0.001))
    assert load.calls_per_s == pytest.approx(64 / (100 * 0.074), rel=0.01)


def test_the_gateway_limits_the_calls() -> None:
    """A call costs 20 ms, its 100 tokens 10 ms."""
    load = run(600, replace(ONE_SECOND, replicas=20), costs=replace(FREE, call=0.02, per_token=1e-4))
    assert load.calls_per_s == pytest.approx(1 / 0.03, rel=0.01)
    assert load.gateway == pytest.approx(1.0, abs=0.01)
    assert first_limit(load) == "gateway"


def test_idle_work_takes_its_share_of_the_gateway() -> None:
    load = run(600, replace(ONE_SECOND, replicas=20), costs=replace(FREE, call=0.02, idle_live=0.5 / 600))
    assert load.calls_per_s == pytest.approx(0.5 / 0.02, rel=0.03)


def test_fronts_share_the_calls_until_the_journal_is_the_limit() -> None:
    costs = replace(FREE, call=0.02, record=0.005)
    fleet = replace(ONE_SECOND, replicas=20)
    one, four = (run(900, fleet, costs=costs, fronts=fronts).calls_per_s for fronts in (1, 4))
    assert (one, four) == (pytest.approx(50, rel=0.06), pytest.approx(200, rel=0.06))
    assert run(900, fleet, costs=costs, fronts=8, journals=1).calls_per_s == pytest.approx(200, rel=0.06)


def test_changes_share_a_wait_for_the_disk() -> None:
    station = Station(1.0)
    assert [station.synced(now) for now in (0.0, 0.2, 0.9, 1.0, 5.0)] == [1.0, 2.0, 2.0, 3.0, 6.0]


def test_a_learner_limits_the_batches() -> None:
    """Each batch of 8 episodes takes 100 s: 0.08 episodes a second of 4 calls."""
    fleet = replace(ONE_SECOND, ranks=1, learn_seconds=100.0, weights_bytes=0.0, adopt=0.0)
    load = Simulation(Plan(64, fleet, equal(), FREE, batch_groups=1, max_staleness=2, calls=100, batches=20)).run()
    assert load.episodes_per_s == pytest.approx(0.08, rel=0.05)
    assert load.learner == pytest.approx(1.0, abs=0.01)
    assert load.refused > 0.5
    assert first_limit(load) == "learner"


def test_replicas_adopt_in_turns() -> None:
    """10 replicas pause for 2 s each, two at a time, so a batch takes 10 s to publish, and sampling goes on."""
    fleet = replace(ONE_SECOND, replicas=10, ranks=1, learn_seconds=1.0, weights_bytes=0.0, adopt=2.0)
    load = Simulation(Plan(64, fleet, equal(), FREE, batch_groups=1, max_staleness=2, calls=100, batches=20)).run()
    assert load.publishing / load.learner == pytest.approx(10 / 11, rel=0.02)
    quick = replace(fleet, adopt=0.2)
    faster = Simulation(Plan(64, quick, equal(), FREE, batch_groups=1, max_staleness=2, calls=100, batches=20)).run()
    assert faster.episodes_per_s > 2 * load.episodes_per_s


def test_calls_go_on_while_a_batch_is_built() -> None:
    """A thread builds each batch of 64 episodes for 2 x 100 s, and takes half of the gateway's time."""
    tokens = 64 * Simulation(Plan(64, ONE_SECOND, equal(), FREE))._tokens_per_episode
    costs = replace(FREE, call=0.02, batch_token=100 / tokens)
    fleet = replace(ONE_SECOND, replicas=20, ranks=1, learn_seconds=0.1, weights_bytes=0.0, adopt=0.0)
    plan = Plan(600, fleet, equal(), costs, batch_groups=8, max_staleness=1000, calls=4000, batches=1)
    assert Simulation(plan).run().calls_per_s == pytest.approx(25, rel=0.06)


def test_long_episodes_get_too_old() -> None:
    """While one episode runs, others fill batch after batch."""
    workload = replace(equal(), calls=LongTail(20, 2.0, 400))
    fleet = replace(ONE_SECOND, ranks=1, learn_seconds=0.1, weights_bytes=0.0, adopt=0.0)
    plan = Plan(64, fleet, workload, FREE, group_size=2, batch_groups=4, max_staleness=1, calls=500, batches=10)
    assert Simulation(plan).run().stale > 0
    assert Simulation(replace(plan, max_staleness=1000)).run().stale == 0


def test_a_seed_repeats_a_simulation() -> None:
    plan = Plan(100, Fleet(replicas=2, ranks=4), AGENTS, replace(FREE, call=0.002), calls=2000, batches=1)
    assert Simulation(plan).run() == Simulation(plan).run()
    assert Simulation(plan).run() != Simulation(replace(plan, seed=1)).run()


def test_fitted_costs_are_those_of_the_loads() -> None:
    rows = [[100.0, 5000.0, 0.0], [200.0, 100.0, 3.0], [50.0, 50.0, 20.0], [10.0, 9000.0, 1.0]]
    true = [0.005, 0.0001, 0.0]
    found, error = fit(rows, [sum(a * b for a, b in zip(row, true, strict=True)) for row in rows])
    assert found == pytest.approx(true, abs=1e-9)
    assert error < 1e-9


def test_limits_in_closed_form() -> None:
    found = limits(replace(FREE, call=0.01, bytes_call=1e6))
    assert found["calls_per_s"] == pytest.approx(100)
    assert found["disk_share"] == pytest.approx(0.1)
    assert found["gb_written_a_day"] == pytest.approx(8640)


def test_runs_spread_over_gateways() -> None:
    found = spread(64, 4)
    assert 1 <= found["least_loaded"] < found["random"]


@pytest.mark.thorough
def test_the_whole_bench_small() -> None:
    command = [sys.executable, "-m", "bench.capacity", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["costs"]["call"] > 0 and result["costs"]["bytes_token"] >= 0
    assert result["validation"][0]["measured"]["calls_per_s"] > 0
    assert {row["agents"] for row in result["grid"]} == {100}
