"""False alarms and power of the health rules: `python -m bench.alarms [--runs N] [--write]`.

Runs are simulated as the server records them: tasks of different difficulty, rewards drawn by group and episode, noise
whose neighbours correlate, failing agents, and the metrics that `swarm.facts` computes. The real rules
look at the run after every step. False alarms: the share of healthy runs with any warning of a rule at any look.
Power: the share of broken runs that the rule notices within the stated steps, at the damage of `DAMAGES`.

`--write` keeps the result in `bench/alarms.json` and its table in `server/health.md`, which `make docs` copies.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from agentjet.config import JobConfig
from agentjet.protocol import EvaluationView
from agentjet.server.health import RULES, STATED, TEXT, RunFacts, SilentEpisode
from agentjet.server.learning import learning
from agentjet.swarm.state import RECENT_STEPS
from bench.machine import CASES, grid, with_text

RESULT = Path(__file__).with_name("alarms.json")
RUNS, STEPS, SHORT, WITHIN = 2000, 60, 12, 10
KINDS = ("flat", "rising", "noisy", "solved", "short", "with evaluations", "failing agents", "rare successes", "fast")
NAMED = {"rare successes": {"groups"}}
"""Rules that name a kind: most groups with rare successes teach nothing, so that is no false alarm."""
RISING = ("rising", "solved", "with evaluations", "fast")
FAST, OWN_LIMIT = 6, 12
"""Steps within which a fast run, such as the demo, learns what it will, and the smaller limit of its agent."""
REWARDS = ("binary", "graded", "0 to 10", "two policies", "zero variance dropped")
SHAPES = ((8, 8), (4, 8), (8, 4), (16, 4))  # Batch sizes and group sizes
BROKEN_AT = 30
LEARNING = {"falls": "is it learning: falls", "yes": "is it learning: yes", "learned": "is it learning: learned"}
ESTIMATES = [name for name in RULES if name not in STATED]


@dataclass(frozen=True)
class World:
    """A kind of run. The functions of the step are the mean success of a task, and factors of healthy values."""

    kind: str = "flat"
    rewards: str = "binary"
    shape: tuple[int, int] = (8, 8)
    length: int = STEPS
    base: float = 0.5
    damage: Callable[[int], dict[str, float]] = field(default=lambda step: {})
    """Changes of the quantities of a step, by name."""


class Run:
    """One simulated run: `steps`, and what a look needs beside them."""

    def __init__(self, world: World, rng: np.random.Generator) -> None:
        self.world, self.rng = world, rng
        self.groups, self.size = world.shape
        self.job = JobConfig(batch_size=self.groups, group_size=self.size)
        self.policies = ("a", "b") if world.rewards == "two policies" else ()
        self.steps: list[dict[str, float]] = []
        self.evaluations: list[EvaluationView] = []
        self.broken: list[dict[str, float]] = []
        self.spread = float(rng.uniform(0.5, 1.2))
        self.failing = float(rng.uniform(0.05, 0.1)) if world.kind == "failing agents" else float(rng.uniform(0, 0.02))
        self.entropy, self.tokens = float(rng.uniform(0.3, 2)), float(rng.uniform(5, 400))
        self.norm, self.lengths = float(rng.uniform(0.05, 3)), float(rng.uniform(0.02, 0.12))
        self.turns = int(rng.integers(1, 6))

    def progress(self, step: int) -> float:
        """Part of the way from the first to the last success rate."""
        if self.world.kind not in RISING:
            return 0.0
        length = self.world.length
        return min(1.0, step / {"solved": length * 0.4, "fast": FAST}.get(self.world.kind, length * 0.8))

    def success(self, step: int) -> float:
        kind, base = self.world.kind, self.world.base
        top = {"solved": 0.995, "fast": base}.get(kind, 0.85)
        start = 0.02 if kind == "fast" else 0.15 if kind in RISING else base
        return start + (top - start) * self.progress(step) if top > start else start

    def outcomes(self, means: np.ndarray) -> np.ndarray:
        """Rewards of batches of the given mean success: tasks differ, and neighbouring steps correlate."""
        rng, num = self.rng, len(means)
        noise = rng.normal(0, 0.3 if self.world.kind in ("noisy", "fast") else 0.1, num)
        for at in range(1, num):
            noise[at] += 0.3 * noise[at - 1]
        inside = np.clip(means, 1e-12, 1 - 1e-12)[:, None]
        logits = np.log(inside / (1 - inside)) + noise[:, None] + rng.normal(0, self.spread, (num, self.groups))
        chances = 1 / (1 + np.exp(-logits))[..., None]
        won = rng.random((num, self.groups, self.size)) < chances
        if self.world.rewards == "graded":
            partial = np.round(rng.random(won.shape) * 0.5 * chances, 2) * (means > 0)[:, None, None]
            return np.where(won, 1.0, partial)
        return won * (10.0 if self.world.rewards == "0 to 10" else 1.0)

    def collect(self, means: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The batches of all steps, and the groups without variance that the recipe dropped for each."""
        rewards, dropped = self.outcomes(means), np.zeros(len(means))
        if self.world.rewards != "zero variance dropped":
            return rewards, dropped
        more = self.outcomes(np.repeat(means, 8)).reshape(len(means), -1, self.size)
        for at, spare in enumerate(more):
            drawn = np.concatenate([rewards[at], spare])
            mixed = np.flatnonzero(drawn.max(1) > drawn.min(1))[: self.groups]
            dropped[at] = (mixed[-1] + 1 if len(mixed) == self.groups else len(drawn)) - len(mixed)
            equal = np.flatnonzero(drawn.max(1) == drawn.min(1))[: self.groups - len(mixed)]
            rewards[at] = drawn[np.concatenate([mixed, equal])]
        return rewards, dropped

    def simulate(self) -> None:
        """Makes the metrics of all steps."""
        at = range(self.world.length)
        self.broken = [self.world.damage(step) for step in at]
        means = self.of_damage("success", [self.success(step) for step in at])
        columns = self._rewards(means)
        columns |= self._events(columns["batch/episodes"], len(at)) | self._of_policies(columns, len(at))
        num = self.groups * self.size
        scale = self.of_damage("silence", 1.0)
        self.silences = np.exp(self.rng.normal(0, 0.6, (len(at), num))).max(1) * 10 * scale
        self.longest = np.exp(self.rng.normal(0, 0.6, (len(at), 50))).max(1) * 10
        self.present = self.rng.integers(0, num, len(at))
        failing = self.of_damage("failing", self.failing)
        self.lost = self.rng.negative_binomial(np.maximum(1, self.present), 1 - failing)
        lists = [(name, values.tolist()) for name, values in columns.items()]
        self.steps = [{name: values[step] for name, values in lists} for step in at]

    def of_damage(self, name: str, healthy: float | Sequence[float]) -> np.ndarray:
        """A quantity of all steps, with the damage."""
        usual = np.broadcast_to(healthy, len(self.broken))
        return np.array([one.get(name, value) for one, value in zip(self.broken, usual, strict=True)], np.float64)

    def _rewards(self, means: np.ndarray) -> dict[str, np.ndarray]:
        rewards, dropped = self.collect(means)
        equal, most = rewards.max(2) == rewards.min(2), rewards.max((1, 2))
        whole = np.ones(len(means))
        columns = {
            "reward/mean": rewards.mean((1, 2)),
            "reward/std": rewards.std((1, 2)),
            "reward/max": most,
            "groups/zero_variance": equal.mean(1),
            "groups/at_best": (equal & (rewards[:, :, 0] == most[:, None])).mean(1),
            "batch/episodes": whole * self.groups * self.size,
            "episode/num_turns": whole * self.turns,
            "groups/dropped_zero_variance": dropped,
        }
        if self.policies:
            other, _ = self.collect(means)
            both = equal & (other.max(2) == other.min(2))
            columns |= {"a/reward/mean": columns["reward/mean"], "b/reward/mean": other.mean((1, 2))}
            columns["reward/mean"] = (rewards.mean((1, 2)) + other.mean((1, 2))) / 2
            columns["reward/std"] = np.concatenate([rewards, other], 2).std((1, 2))
            columns["groups/zero_variance"] = both.mean(1)
            columns["groups/at_best"] = (both & (rewards[:, :, 0] + other[:, :, 0] == 2)).mean(1)
        return columns

    def _events(self, episodes: np.ndarray, length: int) -> dict[str, np.ndarray]:
        rng, num = self.rng, self.groups * self.size
        calls = num * self.turns
        tokens = self.tokens * np.exp(rng.normal(0, self.lengths, length)) * self.of_damage("tokens", 1.0)
        orphaned = rng.binomial(num, self.of_damage("orphaned", 0.01)) / num
        failing, stale = self.of_damage("failing", self.failing), self.of_damage("stale", 0.05)
        is_fast = self.world.kind == "fast"
        cut = rng.binomial(calls, self.of_damage("truncated", 0.97 if is_fast else 0.02)) / calls
        own_limit = OWN_LIMIT * (1.0 + np.arange(length) % 2)  # Two kinds of calls in turn.
        limits = {"overridden/max_tokens": cut, "overridden/limit": own_limit} if is_fast else {}
        return limits | {
            "episodes/aborted": rng.negative_binomial(num, 1 - failing).astype(float),
            "groups/dropped_stale": rng.negative_binomial(self.groups, 1 - stale).astype(float),
            "completion/tokens": tokens,
            "completion/truncated": cut,
            "batch/unscorable": rng.binomial(num, self.of_damage("refused", 0.003)).astype(float),
            "batch/sampled_tokens": tokens * calls,
            "forest/orphan_tokens": tokens * calls * orphaned / (1 - orphaned + 1e-9),
        }

    def _of_policies(self, columns: dict[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
        rng, found = self.rng, {}
        mixed = 1 - columns["groups/zero_variance"]
        fall = 1 - (0.85 if self.world.kind == "fast" else 0.7) * np.array(
            [self.progress(step) for step in range(length)]
        )
        for policy in self.policies or ("",):
            start = f"{policy}/" if policy else ""
            noise = np.exp(rng.normal(0, 0.3, (2, length)))
            found[f"{start}optim/grad_norm"] = self.norm * np.sqrt(mixed) * noise[0] * self.of_damage("norm", 1.0)
            found[f"{start}optim/skipped_steps"] = np.zeros(length)
            entropy = self.entropy * fall * np.exp(rng.normal(0, 0.1, length))
            found[f"{start}policy/entropy"] = entropy * self.of_damage("entropy", 1.0)
            found[f"{start}policy/mismatch_kl"] = self.of_damage("mismatch", 0.001) * noise[1]
        return found

    def evaluate(self, score: float, num_tasks: int, at: int) -> None:
        """Adds a held-out score over fixed tasks."""
        wins = self.rng.binomial(num_tasks, min(max(score, 0.0), 1.0)) / num_tasks
        self.evaluations.append(
            EvaluationView(
                policy_version=at,
                score=wins,
                num_tasks=num_tasks,
                num_episodes=num_tasks,
                time=0.0,
                best=False,
                undone=False,
            )
        )

    def looks(self) -> Iterator[RunFacts]:
        """Yields the facts after every step."""
        self.simulate()
        tasks = int(self.rng.integers(30, 300))
        for at in range(self.world.length):
            scored = self.broken[at].get("score")
            if (self.world.kind == "with evaluations" and at % 2 == 0) or scored is not None:
                self.evaluate(self.success(at) if scored is None else scored, 100 if scored is not None else tasks, at)
            yield self.facts(at)

    def facts(self, at: int) -> RunFacts:
        return RunFacts(
            steps=self.steps[max(0, at + 1 - RECENT_STEPS) : at + 1],
            job=self.job,
            versions=range(max(1, at + 2 - RECENT_STEPS), at + 2),
            evaluations=self.evaluations,
            finished=int(self.present[at]),
            lost=int(self.lost[at]),
            silent=SilentEpisode("e", "t", "c", float(self.silences[at])),
            longest_seconds=float(self.longest[at]),
            policies=self.policies,
            first=self.steps[: min(10, at + 1)],
        )


@dataclass(frozen=True)
class Damage:
    """The smallest damage that a rule promises to notice within so many steps: `cases/alarms.json`.

    From step `BROKEN_AT` on quantities have the values of `changes`; `once`: in that step only. `ramp` is the change of
    the success and the steps that it takes. `score` is the held-out score from then on, after 0.7.
    """

    text: str
    changes: dict[str, float] = field(default_factory=dict)
    once: bool = False
    ramp: tuple[float, int] = (0.0, 1)
    score: float | None = None
    within: int = WITHIN

    def at(self, step: int) -> dict[str, float]:
        """The changes of a step."""
        if self.ramp[0]:
            change, steps = self.ramp
            return {"success": 0.5 + change * min(1.0, max(0, step - BROKEN_AT) / steps)}
        if self.score is not None:
            return {"score": 0.7 if step < BROKEN_AT else self.score}
        return self.changes if step == BROKEN_AT or (step > BROKEN_AT and not self.once) else {}


DAMAGES = {name: Damage(**one) for name, one in json.loads((CASES / "alarms.json").read_text()).items()}


def alarms_of(facts: RunFacts, expected: bool) -> set[str]:
    """The rules that warn at a look, and false answers about learning; `expected` if the run does rise.

    These are the functions that `health` calls; its view is left out, which takes longer than they do.
    """
    found = {name for name in ESTIMATES if (one := RULES[name](facts)) is not None and one.level != "ok"}
    answer = LEARNING.get(learning(facts.steps, facts.evaluations, facts.first, facts.policies).answer)
    return found | ({answer} if answer and not (expected and answer != LEARNING["falls"]) else set())


def false_alarms(kind: str, num_runs: int) -> dict[str, float]:
    """Share of the healthy runs of a kind with an alarm at any look, by rule."""
    counts = dict.fromkeys(estimates(), 0)
    for number in range(num_runs):
        rng = np.random.default_rng([KINDS.index(kind), number])
        world = World(
            kind,
            REWARDS[number % len(REWARDS)],
            SHAPES[number // len(REWARDS) % len(SHAPES)],
            SHORT if kind == "short" else STEPS,
            float(rng.uniform(0.01, 0.1) if kind == "rare successes" else rng.uniform(0.25, 0.75)),
        )
        rises = kind in RISING
        found: set[str] = set()
        for facts in Run(world, rng).looks():
            found |= alarms_of(facts, rises)
        for name in (found & counts.keys()) - NAMED.get(kind, set()):
            counts[name] += 1
    return {name: count / num_runs for name, count in counts.items()}


def power(rule: str, num_runs: int) -> float:
    """Share of the broken runs that a rule notices within its steps after the damage began."""
    damage, noticed = DAMAGES[rule], 0
    for number in range(num_runs):
        rng = np.random.default_rng([100 + list(DAMAGES).index(rule), number])
        shape = SHAPES[number % len(SHAPES)] if rule not in LEARNING.values() else (8, 8)
        world = World(damage=damage.at, shape=shape, length=BROKEN_AT + damage.within)
        for at, facts in enumerate(Run(world, rng).looks()):
            if at >= BROKEN_AT and rule in alarms_of(facts, False):
                noticed += 1
                break
    return noticed / num_runs


def estimates() -> list[str]:
    """The rules that are not facts, and the answers about learning."""
    return [*ESTIMATES, *LEARNING.values()]


def measure(num_runs: int, power_runs: int, processes: int = 1) -> dict[str, Any]:
    gc.disable()  # Nothing here makes cycles.
    names = estimates()
    with ProcessPoolExecutor(processes) as pool:
        by_kind = dict(zip(KINDS, pool.map(false_alarms, KINDS, [num_runs] * len(KINDS)), strict=True))
        powers = dict(zip(names, pool.map(power, names, [power_runs] * len(names)), strict=True))
    rules = {
        name: {
            "false_alarms": max(rates[name] for rates in by_kind.values()),
            "worst_kind": max(by_kind, key=lambda kind: by_kind[kind][name]),
            "power": powers[name],
            "damage": DAMAGES[name].text,
            "within": DAMAGES[name].within,
        }
        for name in names
    }
    return {
        "false_alarms_worst": max(one["false_alarms"] for one in rules.values()),
        "power_worst": min(one["power"] for one in rules.values()),
        "runs_of_each_kind": num_runs,
        "broken_runs": power_runs,
        "rules": rules,
        "stated": sorted(STATED),
        "any_rule": {kind: max(rates.values()) for kind, rates in by_kind.items()},
    }


def table(result: dict[str, Any]) -> str:
    """The table of the documentation."""
    lines = ["| rule | false alarms | damage | noticed | within steps |", "|---|---|---|---|---|"]
    for name, one in result["rules"].items():
        alarms, seen = f"{one['false_alarms']:.2%}", f"{one['power']:.0%}"
        lines.append(f"| {name} | {alarms} | {one['damage']} | {seen} | {one['within']} |")
    facts = ", ".join(f"`{name}`" for name in result["stated"])
    num = (
        f"{result['runs_of_each_kind']:,} healthy runs of each kind, {result['broken_runs']:,} broken ones of each rule"
    )
    return "\n".join([*lines, "", f"{num}. Rules that state a fact: {facts}."])


def with_table(page: str, result: dict[str, Any]) -> str:
    """The page with the table between its marks."""
    return with_text(page, "bench.alarms", table(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS, help="healthy runs of each kind")
    parser.add_argument("--power-runs", type=int, default=RUNS, help="broken runs of each rule")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"keep the result in {RESULT.name}")
    options = parser.parse_args()
    result = measure(options.runs, options.power_runs, options.processes)
    Console(width=140).print(grid(result["rules"]))
    print("stated facts:", ", ".join(result["stated"]))
    if options.write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        TEXT.write_text(with_table(TEXT.read_text(encoding="utf-8"), result), encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
