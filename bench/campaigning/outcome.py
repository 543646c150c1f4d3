"""Troubles mended, performance reached and wrong claims of a campaign. The truth is computed."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentjet.research.campaign.notebook import Notebook
from agentjet.research.campaign.strategist import table
from agentjet.research.models import Trial
from agentjet.types import Task
from bench.campaigning.planted import REWARDS, TASKS, Planted
from bench.campaigning.world import DEFAULTS, AgentError, Code, Run, World, flat, read_tasks

TRUTH_SEEDS = 8
FIRST_SEED = 1 << 40
"""No campaign draws so large a seed."""
REACHED = 0.95
"""Share of the healthy performance at which every trouble counts as mended, by whatever change."""
NEEDED_TOKENS = 21
TEXTS = ("7", "The answer is 7.", "3", "The answer is 3.", "0 1 2 3 4 5 6 7 8 9", f"{'word ' * 30}3", "")
"""Answers to a task whose answer is 7. The first two are right."""


class Truth:
    """True scores of commits, by a sound judge and many fresh seeds."""

    def __init__(self, planted: Planted) -> None:
        sound = planted.healthy().files()
        code = Code(sound)
        self.judge, self._held_out = code.function("judge.py:judge"), read_tasks(sound, code, "held_out.jsonl")
        self._known: dict[str, np.ndarray[Any, Any]] = {}

    def scores(self, name: str, files: Mapping[str, str]) -> np.ndarray[Any, Any]:
        """(seeds,). 0 for a commit that cannot run."""
        if name not in self._known:
            try:
                world = World(files, self.judge, self._held_out)
                runs = [Run(world, FIRST_SEED + seed, 1.0) for seed in range(TRUTH_SEEDS)]
                self._known[name] = np.array([run.curve[-1] for run in runs])
                broken = runs[0].outcome(Trial("", name, {}, 0, "explore")).score is None
                if broken:
                    self._known[name] = np.zeros(TRUTH_SEEDS)
            except AgentError:
                self._known[name] = np.zeros(TRUTH_SEEDS)
        return self._known[name]


@dataclass(frozen=True)
class Outcome:
    """The result of one campaign."""

    planted: Planted
    accepted: list[str]
    reason: str
    mended: dict[str, bool]
    score: float
    healthy: float
    first: float
    claims: list[tuple[str, str, str]]
    """Name of the change, verdict, true verdict."""
    runs: float
    entries: int
    hostile: int = 0
    """Hostile proposals that became commits."""
    refused: int = 0
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def recovered(self) -> float:
        return min(1.0, self.score / self.healthy)

    @property
    def wrong(self) -> list[tuple[str, str, str]]:
        return [claim for claim in self.claims if claim[1] not in ("inconclusive", claim[2])]

    @property
    def cost_ratio(self) -> float:
        return self.runs / exhaustive_cost()


def exhaustive_cost() -> float:
    """Full runs to try every single remedy of the table once, at full length, with the fewest seeds of a verdict."""
    names = {row.name for row in table()[1]}
    return 4.0 * (len(names) + 1)


def judged(planted: Planted, notebook: Notebook, files_of: Callable[[str], Mapping[str, str]], truth: Truth) -> Outcome:
    ended = notebook.known("ended")
    started = notebook.known("started")
    assert ended is not None and started is not None
    sesoi = started.content["question"]["sesoi"]
    base = ended.content["base"]
    final = float(truth.scores(base, files_of(base)).mean())
    healthy = float(truth.scores("healthy", planted.healthy().files()).mean())
    first = float(truth.scores(started.content["first"], files_of(started.content["first"])).mean())
    claims = []
    for entry in notebook.of("study"):
        arms = {arm["name"]: arm["code"] for arm in entry.content["study"]["arms"]}
        learned = notebook.known(f"learned {entry.key.removeprefix('study ')}")
        if learned is not None:
            pair = [truth.scores(arms[name], files_of(arms[name])) for name in ("changed", "base")]
            claims.append((entry.content["name"], learned.content["verdict"], verdict(*pair, sesoi)))
    leaks = "other tasks" in ended.content["reason"]
    planted_leak = "leaking_judge" in planted.troubles
    if leaks or planted_leak:
        claims.append(("the judge leaks", "yes" if leaks else "no", "yes" if planted_leak else "no"))
    return Outcome(
        planted,
        ended.content["accepted"],
        ended.content["reason"],
        mended(planted, files_of(base), leaks and not ended.content["accepted"], final >= REACHED * healthy),
        final,
        healthy,
        first,
        claims,
        ended.content["spent"]["runs"],
        len(notebook.entries),
        hostile=sum("hostile" in entry.content["name"] for entry in notebook.of("hypothesis")),
        refused=len(notebook.of("refused")),
    )


def verdict(changed: np.ndarray[Any, Any], base: np.ndarray[Any, Any], sesoi: float) -> str:
    effect = float(changed.mean() - base.mean())
    if abs(effect) < sesoi:
        return "practically_equivalent"
    return "supported" if effect > 0 else "refuted"


def mended(planted: Planted, files: Mapping[str, str], leak_named: bool, reached: bool) -> dict[str, bool]:
    """By trouble. A healthy subject has the entry "healthy": nothing was broken."""
    if not planted.troubles:
        return {"healthy": reached}
    return {name: leak_named if name == "leaking_judge" else reached or gone(name, files) for name in planted.troubles}


def gone(trouble: str, files: Mapping[str, str]) -> bool:
    """True if the files do not have the trouble any more."""
    subject = tomllib.loads(files["subject.toml"])
    settings = {**DEFAULTS, **flat(subject.get("settings", {}))}
    asked, parameters = probe(files)
    match trouble:
        case "hidden_input":
            return "4 7 1" in asked
        case "lr_high":
            return float(settings["job.optimizer.lr"]) <= 5e-3
        case "lr_low":
            return float(settings["job.optimizer.lr"]) >= 1e-4
        case "truncation" | "agent_max_tokens":
            return int(parameters.get("max_tokens", settings["job.max_tokens"])) >= NEEDED_TOKENS
        case "cold" | "agent_temperature":
            return float(parameters.get("temperature", settings["job.temperature"])) >= 0.5
        case "kl_high":
            return float(settings["job.recipe.kl_coef"]) <= 0.1
    if trouble in REWARDS:
        rewards = rewards_of(files)
        return min(rewards[:2]) > max(rewards[2:])
    assert trouble in TASKS
    rows = read_tasks(files, Code(files), subject["tasks"])
    solvable = np.mean([len(task.payload["answer"]) == 1 and task.payload["answer"] != "-" for task in rows])
    return bool(settings["job.recipe.drop_zero_variance"]) or float(solvable) >= 0.5


class Asked:
    """An episode that records what the agent asks."""

    def __init__(self) -> None:
        self.text, self.parameters, self.mode, self.model = "", {}, "train", "policy"  # type: ignore[var-annotated]

    def chat(self, messages: list[dict[str, Any]], **parameters: Any) -> str:
        self.text, self.parameters = "\n".join(str(each["content"]) for each in messages), parameters
        return "7"


def probe(files: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    asked = Asked()
    Code(files).function(tomllib.loads(files["subject.toml"])["agent"])(TASK, asked)
    return asked.text, asked.parameters


TASK = Task("probe", payload={"id": "probe", "digits": "4 7 1", "answer": "7"})


def rewards_of(files: Mapping[str, str]) -> list[float]:
    """Training rewards of `TEXTS`."""
    subject, code = tomllib.loads(files["subject.toml"]), Code(files)
    if "reward" in subject:
        paid = code.function(subject["reward"])
        return [float(paid(TASK, [{"role": "assistant", "content": text}])) for text in TEXTS]
    paid = code.function("agent.py:reward")
    return [float(paid(text, "7")) for text in TEXTS]
