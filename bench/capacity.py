"""How many episodes, replicas and tokens a server carries: `python -m bench.capacity`.

Measures the costs of gateway and journal in this run, validates a simulation against a real gateway, then simulates
100 to 100,000 concurrent episodes on 1 to 1,000 replicas: the resource that saturates first, and the gain of further
gateway processes and journals. The replicas and the learner of the simulation are assumptions: no GPU is needed.

Prints tables, then one JSON object as the last line. `docs/scaling.md` explains the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.queueing.costs import Costs
from bench.queueing.load import Play
from bench.queueing.measure import QUICK, Effort, delta, measure, play, serving
from bench.queueing.simulation import Fleet, Load, Plan, Simulation
from bench.queueing.workload import AGENTS, LongTail, Workload

VALIDATION = Workload(LongTail(6, 0.8, 32), LongTail(2.0, 1.2, 20), 64, LongTail(64, 1.0, 512), LongTail(64, 1.0, 512))
"""Shorter episodes than `AGENTS`, so that many end while they are measured."""
STEP = 0.02
"""Seconds of a token of a validated completion."""
LEARNED = 1000
"""Episodes up to which a simulation lasts until batches were learned. One gateway takes hours for larger batches."""
SATURATED = 0.85
"""Share of a resource's time from which it counts as saturated."""


@dataclass(frozen=True, slots=True)
class Point:
    """A load that is both measured and simulated. With `batch_groups` batches are learned in 2 s each."""

    agents: int
    replicas: int
    slots: int = 64
    batch_groups: int = 0

    @property
    def name(self) -> str:
        learns = f", batches of {self.batch_groups} groups" if self.batch_groups else ""
        return f"{self.agents} agents, {self.replicas} x {self.slots} completions{learns}"


POINTS = (Point(64, 4), Point(128, 4, 64, 8), Point(256, 1, 32), Point(256, 4), Point(512, 8))
LEARN_SECONDS = 2.0


# ---- validation ----------------------------------------------------------------------------------------------


def simulated(point: Point, costs: Costs, seconds: float) -> Load:
    fleet = Fleet(
        replicas=point.replicas,
        slots=point.slots,
        step=STEP,
        step_per_completion=0.0,
        prompt_tokens_per_step=1e9,
        ranks=1 if point.batch_groups else 0,
        learn_seconds=LEARN_SECONDS,
        weights_bytes=0.0,
        adopt=0.0,
    )
    plan = Plan(point.agents, fleet, VALIDATION, costs, batch_groups=point.batch_groups, max_staleness=1)
    return Simulation(replace(plan, seconds=seconds)).run()


def slowed(costs: Costs, factor: float) -> Costs:
    """The costs on a machine that takes `factor` times as long."""
    names = ["call", "per_prompt_token", "per_new_token", "per_token", "per_streamed_token"]
    names += ["begin", "finish", "per_live", "route"]
    return replace(costs, **{name: getattr(costs, name) * factor for name in names})


def validate(point: Point, costs: Costs, folder: Path, seconds: float) -> dict[str, Any]:
    """Measure and simulate a point. `errors` are relative; the adjusted ones are of a simulation that gets the share of
    a core that the gateway got in the measurement."""
    groups = {"batch_groups": point.batch_groups, "learn_seconds": LEARN_SECONDS} if point.batch_groups else {}
    settings = {"replicas": point.replicas, "slots": point.slots, "step": STEP, "max_staleness": 1, **groups}
    with serving(folder, **settings) as (url, data_dir):
        outcome = play(Play(url, data_dir, point.agents, VALIDATION, seconds))
    measured, cpu = Load(**outcome["load"]), delta(outcome, "cpu_s")
    factor = 1 + delta(outcome, "wait_s") / cpu
    found, adjusted = simulated(point, costs, seconds), simulated(point, slowed(costs, factor), seconds)
    return {
        "point": point.name,
        "agents": point.agents,
        "measured": asdict(measured),
        "simulated": asdict(found),
        "adjusted": asdict(adjusted),
        "waited_for_a_core": round(delta(outcome, "wait_s") / outcome["seconds"], 3),
        "errors": _errors(found, measured),
        "adjusted_errors": _errors(adjusted, measured),
    }


def _errors(found: Load, measured: Load) -> dict[str, float]:
    names = ("calls_per_s", "call_s")
    return {name: round(getattr(found, name) / max(1e-9, getattr(measured, name)) - 1, 3) for name in names}


def validation_table(points: Sequence[dict[str, Any]]) -> Table:
    heads = (
        "calls/s measured",
        "simulated",
        "error",
        "adjusted",
        "s a call measured",
        "simulated",
        "error",
        "adjusted",
    )
    grid = Table("validation", *heads, "gateway", "no core")
    for one in points:
        cells = []
        for name in ("calls_per_s", "call_s"):
            cells += [f"{one['measured'][name]:.2f}", f"{one['simulated'][name]:.2f}"]
            cells += [f"{one[errors][name]:+.0%}" for errors in ("errors", "adjusted_errors")]
        shares = [f"{one['measured']['gateway']:.2f}", f"{one['waited_for_a_core']:.2f}"]
        grid.add_row(one["point"], *cells, *shares)
    return grid


# ---- simulated loads -----------------------------------------------------------------------------------------


def fleet(replicas: int) -> Fleet:
    """Replicas with two ranks each, so that the learner is rarely the limit."""
    return Fleet(replicas=replicas, ranks=2 * replicas)


def first_limit(load: Load) -> str:
    """The resource with the largest share of use, if that counts as saturated."""
    shares = {"gateway": load.gateway, "journal": load.journal, "disk": load.disk, "replicas": load.replicas}
    shares["publish" if load.publishing > load.learner / 2 else "learner"] = load.learner
    name = max(shares, key=lambda name: shares[name])
    return name if shares[name] >= SATURATED else "agents"


def grid(costs: Costs, agents: Sequence[int], replicas: Sequence[int], console: Console) -> list[dict[str, Any]]:
    """The simulated loads of one gateway, except those with far too few or too many replicas."""
    found = []
    for number in agents:
        for count in [count for count in replicas if 1 <= number / count <= 1000]:
            console.print(f"simulating {number} episodes on {count} replicas ...")
            plan = Plan(number, fleet(count), AGENTS, costs)
            if number > LEARNED:
                plan = replace(plan, calls=max(plan.calls, number), batches=0)
            load = Simulation(plan).run()
            found.append({"agents": number, "num_replicas": count, "limit": first_limit(load), **rounded(asdict(load))})
    return found


def variants(costs: Costs, agents: int, replicas: int, console: Console) -> list[dict[str, Any]]:
    """Changes of one load: runs spread over several gateways, and designs that are not built."""
    whole = Plan(agents, fleet(replicas), AGENTS, costs)
    plain = replace(AGENTS, streamed=0.0)
    cases = {"one gateway": (whole, 1)}
    for gateways in (2, 4, 8, 16):
        part = replace(whole, agents=agents // gateways, fleet=fleet(max(1, replicas // gateways)))
        cases[f"{gateways} gateways, each with its own runs"] = part, gateways
    cases["25 times as many of all, 400 such gateways"] = (
        replace(whole, agents=agents // 16, fleet=fleet(max(1, replicas // 16))),
        400,
    )
    for fronts, journals in ((2, 0), (8, 1), (8, 4), (16, 1)):
        design = f"{journals} journal process{'es' if journals > 1 else ''}" if journals else "a journal each"
        cases[f"not built: {fronts} fronts of one run, {design}"] = replace(whole, fronts=fronts, journals=journals), 1
    cases["no call is streamed"] = replace(whole, workload=plain), 1
    found = []
    for name, (plan, times) in cases.items():
        console.print(f"simulating {agents} episodes on {replicas} replicas: {name} ...")
        load = Simulation(replace(plan, batches=1)).run()
        totals = {n: getattr(load, n) * times for n in ("calls_per_s", "tokens_per_s", "episodes_per_s")}
        found.append({"case": name, "limit": first_limit(load), **rounded({**asdict(load), **totals})})
    return found


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in values.items()}


def load_table(rows: Sequence[dict[str, Any]], *names: str) -> Table:
    heads = ["calls/s", "tokens/s", "s/call", "p95", "gateway", "journal", "replicas"]
    heads += ["learner", "publish", "waiting", "stale"]
    table = Table(*names, *heads, "limit")
    for row in rows:
        shares = [f"{row[n]:.2f}" for n in ["gateway", "journal", "replicas", "learner", "publishing", "refused"]]
        times = [f"{row['call_s']:.1f}", f"{row['call_p95']:.1f}"]
        rates = [f"{row['calls_per_s']:.1f}", f"{row['tokens_per_s']:.0f}"]
        keys = [f"{row[name]}" for name in names]
        table.add_row(*keys, *rates, *times, *shares, str(row["stale"]), row["limit"])
    return table


# ---- limits in closed form, and runs on several gateways -----------------------------------------------------


def limits(costs: Costs) -> dict[str, float]:
    """The load at which each part of one gateway saturates, for the workload `AGENTS`, from the costs alone."""
    turns = [turn for number in range(2000) for turn in AGENTS.episode(number)]
    calls, seconds = len(turns) / 2000, statistics.fmean(turn.seconds for turn in turns)
    completion = statistics.fmean(turn.completion for turn in turns)
    context = statistics.fmean(turn.context for turn in turns)
    prompts = []
    for number in range(2000):
        length = 0
        for turn in AGENTS.episode(number):
            length += turn.context
            prompts.append(length)
            length += turn.completion
    token = AGENTS.streamed * costs.per_streamed_token + (1 - AGENTS.streamed) * costs.per_token
    call = costs.call + costs.per_prompt_token * statistics.fmean(prompts) + costs.per_new_token * context
    call += token * completion + (costs.begin + costs.finish) / calls
    assumed = Fleet()
    cycle = seconds + completion * (assumed.step + assumed.slots / 2 * assumed.step_per_completion)
    tree = calls * (context + completion)
    written = costs.bytes_call + costs.bytes_token * (context + completion)
    held = costs.memory_live + costs.memory_token * tree / 2 + costs.memory_call
    return {
        "cpu_ms_per_call": 1e3 * call,
        "of_it_streaming_ms": 1e3 * AGENTS.streamed * completion * (costs.per_streamed_token - costs.per_token),
        "calls_per_s": 1 / call,
        "tokens_per_s": completion / call,
        "episodes_at_once": cycle / call,
        "replicas": (cycle - seconds) / call / assumed.slots,
        "disk_share": written / call / costs.disk_bandwidth,
        "gb_written_a_day": 86400 * written / call / 1e9,
        "kb_memory_per_episode": held / 1024,
        "batch_s_per_1000_episodes": 1000 * tree * costs.batch_token,
        "rank_mb_per_1000_episodes": 1000 * tree * costs.rank_bytes_token / 1e6,
        "rank_s_per_1000_episodes": 1000 * tree * costs.rank_token,
        "idle_share_10000": 1e4 * costs.idle_live,
        "begin_ms_10000": 1e3 * (costs.begin + 1e4 * costs.per_live),
    }


def spread(runs: int, gateways: int, *, trials: int = 200, seed: int = 0) -> dict[str, float]:
    """The busiest gateway's load divided by the mean, at the median trial. The size of run `i` goes with 1 / i."""
    rng, sizes = random.Random(seed), [1 / (1 + number) for number in range(runs)]
    mean, found = sum(sizes) / gateways, {}
    for name in ("random", "least_loaded"):
        worst = []
        for _ in range(trials):
            loads = [0.0] * gateways
            for size in rng.sample(sizes, runs):  # Runs start in any order.
                place = rng.randrange(gateways) if name == "random" else loads.index(min(loads))
                loads[place] += size
            worst.append(max(loads) / mean)
        found[name] = round(statistics.median(worst), 2)
    return {"runs": runs, "gateways": gateways, **found, "best_possible": round(max(1.0, sizes[0] / mean), 2)}


# ---- the picture ---------------------------------------------------------------------------------------------


def draw(rows: Sequence[dict[str, Any]], limit: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "capacity"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
    for count in sorted({row["num_replicas"] for row in rows}):
        line = [(row["agents"], row["calls_per_s"]) for row in rows if row["num_replicas"] == count]
        axes.plot(*zip(*line, strict=True), marker="o", label=f"{count} replicas")
    axes.axhline(limit, color="grey", linestyle="--", label="CPU of one gateway")
    axes.set(xscale="log", yscale="log", xlabel="concurrent episodes", ylabel="calls a second")
    axes.set_title("Simulated with measured costs: one gateway")
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


# ---- the whole -----------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, help="JSON output of an earlier run: use its costs, measure nothing")
    parser.add_argument("--without-simulation", action="store_true", help="measure and validate only")
    parser.add_argument("--most", type=int, default=100_000, help="concurrent episodes of the largest simulation")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each validated point, and of its warm-up")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything works")
    parser.add_argument("--folder", type=Path, help="where the journals are written; its disk is part of the figures")
    parser.add_argument("--svg", type=Path, help="draw the simulated loads")
    given = parser.parse_args()
    progress, output = Console(stderr=True), Console(width=180)
    result: dict[str, Any] = {"bench": "capacity", "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    result["load_average"] = round(os.getloadavg()[0], 2)
    if given.costs:
        earlier = json.loads(given.costs.read_text().strip().splitlines()[-1])
        result |= {name: earlier[name] for name in ("machine", "load_average", "costs", "validation")}
        costs = Costs(**result["costs"])
    else:
        with tempfile.TemporaryDirectory(dir=given.folder) as made:
            progress.print("measuring costs ...")
            costs = measure(Path(made), QUICK if given.quick else Effort())
            result["costs"], result["validation"] = rounded(asdict(costs)), []
            for point in POINTS[:1] if given.quick else POINTS:
                progress.print(f"validating {point.name} ...")
                seconds = 2.0 if given.quick else given.seconds
                result["validation"].append(validate(point, costs, Path(made), seconds))
    table = Table("measured", "value")
    for name, value in result["costs"].items():
        table.add_row(name, f"{value:.4g}")
    output.print(table)
    output.print(validation_table(result["validation"]))
    result["limits"] = rounded(limits(costs))
    if not given.without_simulation:
        most = 100 if given.quick else given.most
        agents = [number for number in (100, 1000, 10_000, 100_000) if number <= most]
        result["grid"] = grid(costs, agents, (1, 10) if given.quick else (1, 10, 100, 1000), progress)
        result["variants"] = variants(costs, min(4000, most), 4 if given.quick else 48, progress)
        output.print(load_table(result["grid"], "agents", "num_replicas"))
        output.print(load_table(result["variants"], "case"))
        if given.svg:
            draw(result["grid"], result["limits"]["calls_per_s"], given.svg)
    result["spread"] = [spread(runs, gateways) for runs, gateways in ((8, 4), (32, 4), (128, 4), (128, 16))]
    for name in ("limits", "spread"):
        output.print(f"{name}: {result[name]}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
