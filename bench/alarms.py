"""False alarms and power of the health rules: `python -m bench.alarms [--runs N] [--write]`.

Runs are simulated as the server records them: tasks of different difficulty, rewards drawn by group and episode, noise
whose neighbours correlate, failing agents, and the metrics that `batch_forest` computes. The real `health(Facts)`
looks at the run after every step. False alarms: the share of healthy runs with any warning of a rule at any look.
Power: the share of broken runs that the rule notices within the stated steps, at the damage of `DAMAGES`.

`--write` keeps the result in `bench/alarms.json` and its table in `gateway/health.md`, which `make docs` copies.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from agentjet.config import JobConfig
from agentjet.gateway.health import RULES, STATED, TEXT, Facts, SilentEpisode, health
from agentjet.protocol import EvaluationView, HealthView
from agentjet.swarm.store import RECENT_STEPS

RESULT = Path(__file__).with_name("alarms.json")
RUNS, POWER_RUNS, STEPS, SHORT, WITHIN = 2000, 400, 60, 12, 10
KINDS = ("flat", "rising", "noisy", "solved", "short", "with evaluations", "failing agents", "rare successes")
NAMED = {"rare successes": {"groups"}}
"""Rules that name a kind: most groups with rare successes teach nothing, so that is no false alarm."""
REWARDS = ("binary", "graded", "0 to 10", "two policies", "zero variance dropped")
SHAPES = ((8, 8), (4, 8), (8, 4), (16, 4))
"""Batch sizes and group sizes."""
BROKEN_AT = 30
LEARNING = {"falls": "is it learning: falls", "yes": "is it learning: yes", "learned": "is it learning: learned"}
Rng = np.random.Generator
Step = dict[str, float]


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

    def __init__(self, world: World, rng: Rng) -> None:
        self.world, self.rng = world, rng
        self.groups, self.size = world.shape
        self.job = JobConfig(batch_size=self.groups, group_size=self.size)
        self.policies = ("a", "b") if world.rewards == "two policies" else ()
        self.noise = dict.fromkeys(("a", "b"), 0.0)
        self.steps: list[Step] = []
        self.evaluations: list[EvaluationView] = []
        self.durations: list[float] = []
        self.spread = float(rng.uniform(0.5, 1.2))
        self.failing = float(rng.uniform(0.05, 0.1)) if world.kind == "failing agents" else float(rng.uniform(0, 0.02))
        self.entropy, self.tokens = float(rng.uniform(0.3, 2)), float(rng.uniform(5, 400))
        self.norm, self.lengths = float(rng.uniform(0.05, 3)), float(rng.uniform(0.02, 0.12))
        self.turns = int(rng.integers(1, 6))
        self.code = 0

    def progress(self, step: int) -> float:
        """Part of the way from the first to the last success rate."""
        kind = self.world.kind
        if kind in ("rising", "solved", "with evaluations"):
            return min(1.0, step / (self.world.length * (0.8 if kind != "solved" else 0.4)))
        return 0.0

    def success(self, step: int) -> float:
        top = 0.995 if self.world.kind == "solved" else 0.85
        start = self.world.base if self.world.kind not in ("rising", "solved", "with evaluations") else 0.15
        return start + (top - start) * self.progress(step) if top > start else start

    def outcomes(self, mean: float, policy: str) -> np.ndarray:
        """Rewards of the groups of a batch: tasks differ, and neighbouring steps correlate."""
        rng, scale = self.rng, 0.3 if self.world.kind == "noisy" else 0.1
        self.noise[policy] = 0.3 * self.noise[policy] + float(rng.normal(0, scale))
        if not 0 < mean < 1:
            chances = np.full(self.groups, mean)
        else:
            logit = math.log(mean / (1 - mean)) + self.noise[policy] + rng.normal(0, self.spread, self.groups)
            chances = 1 / (1 + np.exp(-logit))
        won = rng.random((self.groups, self.size)) < chances[:, None]
        if self.world.rewards == "graded":
            values = np.where(won, 1.0, np.round(rng.random(won.shape) * 0.5 * chances[:, None], 2))
            return values if 0 < mean < 1 else won * 1.0
        return won * (10.0 if self.world.rewards == "0 to 10" else 1.0)

    def collect(self, mean: float, policy: str) -> tuple[np.ndarray, float]:
        """A batch, and the groups without variance that the recipe dropped for it."""
        rewards = self.outcomes(mean, policy)
        if self.world.rewards != "zero variance dropped":
            return rewards, 0.0
        kept, dropped = [], 0
        while len(kept) < self.groups and dropped < 10 * self.groups:
            for group in rewards:
                if len(kept) < self.groups:
                    is_equal = group.max() == group.min()
                    dropped += is_equal
                    kept += [] if is_equal else [group]
            rewards = self.outcomes(mean, policy)
        kept += list(rewards[: self.groups - len(kept)])
        return np.array(kept), float(dropped)

    def add(self) -> None:
        """Adds the next step."""
        rng, at = self.rng, len(self.steps)
        broken = self.world.damage(at)
        mean = broken.get("success", self.success(at))
        rewards, dropped = self.collect(mean, "a")
        equal = rewards.max(1) == rewards.min(1)
        most, num = rewards.max(), rewards.size
        step: Step = {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "reward/max": float(most),
            "groups/zero_variance": float(equal.mean()),
            "groups/at_best": float((equal & (rewards[:, 0] == most)).mean()),
            "batch/episodes": float(num),
            "episode/num_turns": float(self.turns),
            "groups/dropped_zero_variance": dropped,
        }
        if self.policies:
            other, _ = self.collect(broken.get("success", self.success(at)), "b")
            step |= {"a/reward/mean": step["reward/mean"], "b/reward/mean": float(other.mean())}
            step["reward/mean"] = (step["a/reward/mean"] + step["b/reward/mean"]) / 2
            step["reward/std"] = float(np.concatenate([rewards, other]).std())
            both = equal & (other.max(1) == other.min(1))
            step["groups/zero_variance"] = float(both.mean())
            step["groups/at_best"] = float((both & (rewards[:, 0] + other[:, 0] == 2)).mean())
        self.steps.append(step | self._events(step, broken, num) | self._of_policies(step, broken))
        self.durations += list(np.exp(rng.normal(0, 0.6, num)) * 10)
        del self.durations[:-50]

    def _events(self, step: Step, broken: dict[str, float], num: int) -> Step:
        rng, calls = self.rng, num * self.turns
        lost = float(rng.negative_binomial(num, 1 - broken.get("failing", self.failing)))
        tokens = self.tokens * math.exp(rng.normal(0, self.lengths)) * broken.get("tokens", 1.0)
        orphaned = rng.binomial(num, broken.get("orphaned", 0.01)) / num
        sampled = tokens * calls
        return {
            "episodes/aborted": lost,
            "groups/dropped_stale": float(rng.negative_binomial(self.groups, 1 - broken.get("stale", 0.05))),
            "completion/tokens": tokens,
            "completion/truncated": rng.binomial(calls, broken.get("truncated", 0.02)) / calls,
            "batch/unscorable": float(rng.binomial(num, broken.get("refused", 0.003))),
            "batch/sampled_tokens": sampled,
            "forest/orphan_tokens": sampled * orphaned / (1 - orphaned + 1e-9),
        }

    def _of_policies(self, step: Step, broken: dict[str, float]) -> Step:
        rng, found = self.rng, {}
        mixed = 1 - step["groups/zero_variance"]
        fall = 1 - 0.7 * self.progress(len(self.steps))
        for policy in self.policies or ("",):
            start = f"{policy}/" if policy else ""
            noise = math.exp(rng.normal(0, 0.3))
            found[f"{start}optim/grad_norm"] = self.norm * math.sqrt(mixed) * noise * broken.get("norm", 1.0)
            found[f"{start}optim/skipped_steps"] = 0.0
            found[f"{start}policy/entropy"] = (
                self.entropy * fall * math.exp(rng.normal(0, 0.1)) * broken.get("entropy", 1)
            )
            found[f"{start}policy/mismatch_kl"] = broken.get("mismatch", 0.001) * math.exp(rng.normal(0, 0.3))
        return found

    def evaluate(self, score: float, num_tasks: int) -> None:
        """Adds a held-out score over fixed tasks."""
        at = len(self.steps)
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

    def looks(self) -> Iterator[HealthView]:
        """Yields the health after every step."""
        tasks = int(self.rng.integers(30, 300))
        for at in range(self.world.length):
            self.add()
            scored = self.world.damage(at).get("score")
            if (self.world.kind == "with evaluations" and at % 2 == 0) or scored is not None:
                self.evaluate(self.success(at) if scored is None else scored, 100 if scored is not None else tasks)
            yield health(self.facts())

    def facts(self) -> Facts:
        at, num = len(self.steps), self.groups * self.size
        broken = self.world.damage(at - 1)
        silence = float(np.exp(self.rng.normal(0, 0.6, num)).max()) * 10 * broken.get("silence", 1.0)
        present = int(self.rng.integers(0, num))
        lost = int(self.rng.negative_binomial(max(1, present), 1 - broken.get("failing", self.failing)))
        return Facts(
            steps=self.steps[-RECENT_STEPS:],
            job=self.job,
            versions=range(max(1, at - RECENT_STEPS + 1), at + 1),
            evaluations=self.evaluations,
            finished=present,
            lost=lost,
            silent=SilentEpisode("e", "t", "c", silence),
            longest_seconds=max(self.durations),
            policies=self.policies,
            first=self.steps[:10],
        )


def after(start: int, **changes: float) -> Callable[[int], dict[str, float]]:
    """The damage from a step on."""
    return lambda step: changes if step >= start else {}


@dataclass(frozen=True)
class Damage:
    """The smallest damage that a rule promises to notice within so many steps."""

    text: str
    changes: Callable[[int], dict[str, float]]
    world: World = World()
    within: int = WITHIN
    tasks: int = 0


def ramp(change: float, steps: int) -> Callable[[int], dict[str, float]]:
    return lambda step: {"success": 0.5 + change * min(1.0, max(0, step - BROKEN_AT) / steps)}


DAMAGES: dict[str, Damage] = {
    "gradient": Damage("a norm 30 times its median, once", lambda step: {"norm": 30.0} if step == BROKEN_AT else {}),
    "mismatch": Damage("0.02 nats a token", after(BROKEN_AT, mismatch=0.02)),
    "entropy": Damage("the entropy falls to a third, and the reward stays", after(BROKEN_AT, entropy=0.33)),
    "reward": Damage("every reward is 0 after a mean of 0.5", after(BROKEN_AT, success=0.0), within=3),
    "groups": Damage("no reward differs within a group", after(BROKEN_AT, success=0.0)),
    "silent": Damage("no call for 20 times the longest usual duration", after(BROKEN_AT, silence=20.0)),
    "episodes": Damage("three tenths of the episodes fail", after(BROKEN_AT, failing=0.3)),
    "dropped": Damage("two thirds of the groups are dropped as stale", after(BROKEN_AT, stale=0.67)),
    "truncated": Damage("a quarter of the answers are cut", after(BROKEN_AT, truncated=0.25)),
    "refused": Damage("requests of a fifth of the episodes are refused", after(BROKEN_AT, refused=0.2)),
    "delivery": Damage("a quarter of the tokens are not delivered", after(BROKEN_AT, orphaned=0.25)),
    "held_out": Damage(
        "the score falls by 0.3 of 1 on 100 tasks, over 3 evaluations",
        lambda step: {"score": 0.7 if step < BROKEN_AT else 0.4},
        within=3,
    ),
    LEARNING["falls"]: Damage("the success falls from 0.5 to 0.1 within 30 steps", ramp(-0.4, 30), within=40),
    LEARNING["yes"]: Damage("the success rises from 0.5 to 0.9 within 30 steps", ramp(0.4, 30), within=40),
    LEARNING["learned"]: Damage("the success rose from 0.5 to 0.9, and stays", ramp(0.4, 30), within=65),
}


def alarms_of(view: HealthView, expected: bool) -> set[str]:
    """The rules that warn at a look, and false answers about learning; `expected` if the run does rise."""
    found = {rule.name for rule in view.rules if rule.level != "ok"}
    answer = LEARNING.get(view.learning.answer)
    return found | ({answer} if answer and not (expected and view.learning.answer != "falls") else set())


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
        rises = kind in ("rising", "solved", "with evaluations")
        found: set[str] = set()
        for view in Run(world, rng).looks():
            found |= alarms_of(view, rises)
        for name in (found & counts.keys()) - NAMED.get(kind, set()):
            counts[name] += 1
    return {name: count / num_runs for name, count in counts.items()}


def power(rule: str, num_runs: int) -> float:
    """Share of the broken runs that a rule notices within its steps after the damage began."""
    damage, noticed = DAMAGES[rule], 0
    for number in range(num_runs):
        rng = np.random.default_rng([100 + list(DAMAGES).index(rule), number])
        shape = SHAPES[number % len(SHAPES)] if rule not in LEARNING.values() else (8, 8)
        world = replace(damage.world, damage=damage.changes, shape=shape, length=BROKEN_AT + damage.within)
        for at, view in enumerate(Run(world, rng).looks()):
            if at >= BROKEN_AT and rule in alarms_of(view, False):
                noticed += 1
                break
    return noticed / num_runs


def estimates() -> list[str]:
    """The rules that are not facts, and the answers about learning."""
    return [*(name for name in RULES if name not in STATED), *LEARNING.values()]


def measure(num_runs: int, power_runs: int, processes: int = 1) -> dict[str, Any]:
    gc.disable()  # Nothing here makes cycles.
    names = estimates()
    with ProcessPoolExecutor(processes) if processes > 1 else nullcontext() as pool:
        each: Any = map if pool is None else pool.map
        by_kind = dict(zip(KINDS, each(false_alarms, KINDS, [num_runs] * len(KINDS)), strict=True))
        powers = dict(zip(names, each(power, names, [power_runs] * len(names)), strict=True))
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
    start, mark, rest = page.partition("<!-- bench.alarms -->\n")
    return f"{start}{mark}{table(result)}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS, help="healthy runs of each kind")
    parser.add_argument("--power-runs", type=int, default=POWER_RUNS, help="broken runs of each rule")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"keep the result in {RESULT.name}")
    options = parser.parse_args()
    result = measure(options.runs, options.power_runs, options.processes)
    print(f"{'rule':26} {'false alarms':>12} {'power':>6}  damage (within steps)")
    for name, one in result["rules"].items():
        print(
            f"{name:26} {one['false_alarms']:12.4f} {one['power']:6.3f}  {one['damage']} ({one['within']})"
            f"  [{one['worst_kind']}]"
        )
    print("stated facts:", ", ".join(result["stated"]))
    if options.write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        TEXT.write_text(with_table(TEXT.read_text(encoding="utf-8"), result), encoding="utf-8")
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps({**result, "cpu_seconds": round(sum(one.ru_utime + one.ru_stime for one in usages))}))


if __name__ == "__main__":
    main()
