"""Planted failures of training runs: each must be found and named by its cause, and its healthy twin must stay without
a finding. `planted_failures.toml` has them.

The world that can fail is a policy of answers and of their lengths, in NumPy. A prompt is a context. The policy chooses
one of a few answers (a softmax, linear in shared features and in a memory of each context). It continues token by
token, with a chance that it learns too. An answer that is cut off is wrong. Only the `Plant` is broken: entropy,
lengths, divergences and equal groups follow from the policy. Signals have the names that a server gives them, and are
missing where it would report none. Each kind runs many times, every time in another world, through the researcher's own
launcher. Random draws depend on the seed alone.

Shapes: P prompts of a step, G answers each, A answers to choose from, F features, W weights.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from scipy import stats

from agentjet.research.diagnosis import diagnose
from agentjet.research.journal import StudyLog
from agentjet.research.models import Arm, Outcome, Setting, Study, Trial, Value
from agentjet.research.scheduler import TrialLauncher, seed_of
from tests.research.world import Launches

Floats, Ints = NDArray[np.float64], NDArray[np.int64]
STEPS = 90
SAMPLES = 64  # Answers of a step
CONTEXTS, ANSWERS, FEATURES = 20, 8, 16
"""Contexts are so many to train on, and as many held out."""
GIBBERISH = ANSWERS
"""One extra answer, of the greatest length and always wrong: the output of a policy that moved too far."""
KNOWN = 4.0, 600.0  # Its initial logit, and the squared distance from the first weights that makes up for it
MEMORY = 0.3  # Weight of a context's own weights, beside the shared ones
SHORT = -0.4  # The logit of writing on, at first: answers of 1.7 tokens
CLIP = 0.2
EVALUATIONS = 1000  # Held-out episodes of a score
SERVER: Mapping[str, Value] = {
    "job.optimizer.lr": 0.1,
    "job.recipe.kl_coef": 0.0,
    "job.group_size": 8,
    "job.max_staleness": 0,
    "job.max_tokens": 24,
    "job.temperature": 1.0,
}
"""The settings of this world, and their defaults."""


@dataclass(frozen=True)
class Plant:
    """The faults of an environment, a grader or a server; the defaults are healthy."""

    world: int = 0
    difficulty: float = 0.0  # Raises the bar for a right answer
    solvable: float = 1.0  # Factor of every chance,
    given: float = 0.0  # And what is added to it
    harder_at: int = STEPS  # From this step on the bar is higher: a curriculum, which is not a failure
    length_helps: bool = False  # Short answers are often wrong: growing longer is learning
    mute_at: int = STEPS  # From this step on it gives 0: an agent that scores its own crash
    hangs: float = 0.0  # The part of the episodes that never come back,
    hangs_at: int = 0  # From this step on
    leaks: bool = False  # The held-out tasks are among those that are trained
    sign: float = 1.0  # Sign of the advantages
    sampler_stops_at: int = STEPS  # From this step on the sampler keeps its weights, and reports new versions
    broken_rows: tuple[int, int] = (STEPS, STEPS)  # Steps whose data has a row that is not a number: from, to
    ignores: tuple[str, ...] = ()  # Settings that the server does not take up
    unused: tuple[str, ...] = ()  # Settings that it takes up, and that change nothing
    silent: tuple[int, int] = (0, 0)  # Steps that report nothing: from, to. The server was started again.
    seed: int | None = None  # The one that is used whichever is given
    dies_at: int = STEPS


@dataclass(frozen=True)
class Tasks:
    """The right answer of each context. The first half of the contexts is trained on."""

    features: Floats  # (2C, A, F)
    quality: Floats  # (2C, A)
    start: Floats  # (W,): the policy before training


def tasks(world: int) -> Tasks:
    rng = np.random.default_rng([11, world])
    features = rng.normal(size=(2 * CONTEXTS, ANSWERS, FEATURES)) / np.sqrt(FEATURES)
    features[:, :, 0] = 0.0
    features[:, -1, 0] = 1.0  # the last answer can be told in every context: that one can be hacked
    direction = rng.normal(size=FEATURES)
    direction[0] = -1.0
    quality = features @ direction + 0.4 * rng.normal(size=(2 * CONTEXTS, ANSWERS))
    start = np.concatenate(
        [0.35 * direction + 0.6 * rng.normal(size=FEATURES), np.zeros(2 * CONTEXTS * ANSWERS), [SHORT]]
    )
    return Tasks(features, quality, start)


def chances(found: Tasks, plant: Plant, step: int) -> Floats:
    """(2C, A + 1): how likely an answer of sufficient length is right."""
    bar = 0.3 + plant.difficulty + (0.8 if step >= plant.harder_at else 0.0)
    right = plant.given + plant.solvable * (0.002 + 0.996 / (1 + np.exp(-40 * (found.quality - bar))))
    return np.pad(right, ((0, 0), (0, 1)))


def long_enough(plant: Plant, extra: Ints) -> Floats:
    """The chance that the answer's length suffices; `extra` are its tokens beyond the first."""
    return np.asarray(1 - np.exp(-(extra + 1) / 4.0)) if plant.length_helps else np.ones(extra.shape)


@dataclass(frozen=True)
class Policy:
    """Weights as probabilities in some contexts, (N, A + 1), and of writing on."""

    answers: Floats
    stay: float

    @classmethod
    def of(cls, weights: Floats, found: Tasks, contexts: Ints, temperature: float) -> Policy:
        features, moved = found.features[contexts], (weights - found.start)[:-1]
        memory = weights[FEATURES:-1].reshape(2 * CONTEXTS, ANSWERS)[contexts]
        logits = features @ weights[:FEATURES] + MEMORY * memory
        depth, reach = KNOWN
        strange = np.full((len(contexts), 1), depth * ((moved**2).sum() / reach - 1))
        return cls(
            softmax(np.hstack([logits, strange]) / temperature), float(1 / (1 + np.exp(-weights[-1] / temperature)))
        )

    def entropies(self) -> tuple[Floats, float]:
        """Entropy of the answers, (N,), and of one decision to continue."""
        sure = min(max(self.stay, 1e-12), 1 - 1e-12)
        return -(self.answers * np.log(self.answers + 1e-12)).sum(-1), float(
            -sure * np.log(sure) - (1 - sure) * np.log(1 - sure)
        )


@dataclass(frozen=True)
class Samples:
    """Answers of a step, (P, G) each."""

    step: int
    contexts: Ints  # (P,)
    answers: Ints
    extra: Ints  # Tokens beyond the first
    truncated: NDArray[np.bool_]
    luck: Floats  # Random draws that are compared with the chance that the answer is right
    policy: Policy  # That it was sampled from


def rewards_of(samples: Samples, found: Tasks, plant: Plant) -> Floats:
    """As training pays, (P, G): right or wrong."""
    if samples.step >= plant.mute_at:
        return np.zeros(samples.answers.shape)
    right = np.take_along_axis(chances(found, plant, samples.step)[samples.contexts], samples.answers, 1)
    return (samples.luck < right * long_enough(plant, samples.extra) * ~samples.truncated).astype(float)


def softmax(logits: Floats) -> Floats:
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


class Adam:
    """Kingma and Ba 2015: every weight moves about as far, however small its gradient is."""

    def __init__(self) -> None:
        self._mean: Floats | float = 0.0
        self._square: Floats | float = 0.0
        self._steps = 0

    def __call__(self, gradient: Floats) -> Floats:
        self._steps += 1
        self._mean = 0.9 * self._mean + 0.1 * gradient
        self._square = 0.99 * self._square + 0.01 * gradient**2
        scale = np.sqrt(self._square / (1 - 0.99**self._steps)) + 1e-8
        return np.asarray(self._mean / (1 - 0.9**self._steps) / scale)


@dataclass
class Run:
    """One training run: its signals, and what can be asked about it later."""

    plant: Plant
    setting: Mapping[str, Value]
    seed: int
    steps: int
    signals: dict[str, list[float | None]] = field(default_factory=dict)
    rewards: list[Floats] = field(default_factory=list)
    weights: list[Floats] = field(default_factory=list)  # As the learner had them before each step, and at the end
    sampler: list[Floats] = field(default_factory=list)  # As the sampler had them in each step

    def __post_init__(self) -> None:
        taken = {name: value for name, value in self.setting.items() if name not in self.plant.ignores}
        self.understood: dict[str, Value] = {name: taken.get(name, value) for name, value in SERVER.items()}
        used = {name: SERVER[name] if name in self.plant.unused else value for name, value in self.understood.items()}
        self.lr, self.kl_coef, self.temperature = (
            float(used[name]) for name in ("job.optimizer.lr", "job.recipe.kl_coef", "job.temperature")
        )
        self.group_size, self.max_staleness, self.max_tokens = (
            int(used[name]) for name in ("job.group_size", "job.max_staleness", "job.max_tokens")
        )
        self.tasks = tasks(self.plant.world)
        self.rng = np.random.default_rng(self.seed if self.plant.seed is None else self.plant.seed)
        self.weights.append(self.tasks.start)
        self.adam = Adam()
        attempts = 3 * SAMPLES * STEPS
        for step in range(min(self.steps, self.plant.dies_at)):
            expired = self._expired(step)
            attempts -= SAMPLES + expired
            if attempts < 0:  # the time a run may take is over
                break
            self._step(step, expired)

    @property
    def held_out(self) -> Ints:
        return np.arange(CONTEXTS) + (0 if self.plant.leaks else CONTEXTS)

    def _expired(self, step: int) -> int:
        """Episodes that hang until as many have come back as a step needs."""
        hangs = self.plant.hangs if step >= self.plant.hangs_at else 0.0
        return int(self.rng.negative_binomial(SAMPLES, 1 - hangs)) if hangs else 0

    def _step(self, step: int, expired: int) -> None:
        now = self.weights[-1]
        stopped = min(step, self.plant.sampler_stops_at)
        self.sampler.append(self.weights[max(0, stopped - self.max_staleness)])
        samples = self._sample(step, self.sampler[-1])
        rewards = rewards_of(samples, self.tasks, self.plant)
        centred = rewards - rewards.mean(axis=1, keepdims=True)
        equal = np.ptp(rewards, axis=1) == 0
        advantages = np.where(equal[:, None], 0.0, centred / (rewards.std(axis=1, keepdims=True, ddof=1) + 1e-6))
        advantages *= self.plant.sign
        learner = Policy.of(now, self.tasks, samples.contexts, self.temperature)
        gradient = self._gradient(now, samples, learner, advantages)
        if self.plant.broken_rows[0] <= step < self.plant.broken_rows[1]:
            gradient = gradient * np.nan
        finite = bool(np.isfinite(gradient).all())
        self.weights.append(now + self.lr * self.adam(gradient) if finite else now)
        self.rewards.append(rewards)
        self._report(samples, rewards, advantages, learner, gradient if finite else None, expired)

    def _sample(self, step: int, weights: Floats) -> Samples:
        shape = (SAMPLES // self.group_size, self.group_size)
        contexts = self.rng.integers(CONTEXTS, size=shape[0])
        policy = Policy.of(weights, self.tasks, contexts, self.temperature)
        below = self.rng.random((*shape, 1)) > np.cumsum(policy.answers, axis=-1)[:, None, :]
        drawn = np.log(self.rng.random(shape)) / np.log(min(max(policy.stay, 1e-9), 1 - 1e-9))
        extra = np.minimum(drawn, self.max_tokens).astype(np.int64)
        answers = np.minimum(below.sum(axis=-1), GIBBERISH)
        extra = np.where(answers == GIBBERISH, self.max_tokens, extra)
        return Samples(
            step,
            contexts,
            answers,
            np.minimum(extra, self.max_tokens - 1),
            extra > self.max_tokens - 1,
            self.rng.random(shape),
            policy,
        )

    def _gradient(self, now: Floats, samples: Samples, learner: Policy, advantages: Floats) -> Floats:
        """(W,): of the clipped objective per answer, with the KL term."""
        contexts, answers = samples.contexts, samples.answers
        chosen = np.take_along_axis(learner.answers, answers, 1)
        pushed = advantages * clipped(chosen, np.take_along_axis(samples.policy.answers, answers, 1), advantages)
        push = np.zeros_like(learner.answers)  # (P, A): what each answer's log-probability is pushed by
        np.add.at(push, (np.arange(len(contexts))[:, None], answers), pushed / SAMPLES)
        push -= learner.answers * push.sum(axis=-1, keepdims=True)
        log = np.log(learner.answers + 1e-12)
        start = Policy.of(self.tasks.start, self.tasks, contexts, self.temperature)
        term = log - np.log(start.answers + 1e-12)
        mean = (learner.answers * term).sum(axis=-1, keepdims=True)
        push -= self.kl_coef * learner.answers * (term - mean) / len(contexts)
        push /= self.temperature
        memory = np.zeros((2 * CONTEXTS, ANSWERS))
        np.add.at(memory, contexts, MEMORY * push[:, :ANSWERS])
        shared = np.einsum("pa,paf->f", push[:, :ANSWERS], self.tasks.features[contexts])
        depth, reach = KNOWN
        strange = push[:, GIBBERISH].sum() * depth * 2 / reach * (now - self.tasks.start)[:-1]
        on = samples.extra * clipped(learner.stay, samples.policy.stay, advantages) * (1 - learner.stay)
        off = ~samples.truncated * clipped(1 - learner.stay, 1 - samples.policy.stay, advantages) * learner.stay
        on, off = (side * (answers != GIBBERISH) for side in (on, off))
        length = float((advantages * (on - off)).sum()) / SAMPLES / self.max_tokens
        return np.concatenate([np.concatenate([shared, memory.ravel()]) + strange, [length / self.temperature]])

    def _report(
        self,
        samples: Samples,
        rewards: Floats,
        advantages: Floats,
        learner: Policy,
        gradient: Floats | None,
        expired: int,
    ) -> None:
        """The names, and the gaps, of a server's metrics: what is not computed is not reported."""
        tokens = 1 + samples.extra
        of_answer, of_token = learner.entropies()
        chosen = np.take_along_axis(learner.answers, samples.answers, 1)
        sampled = np.take_along_axis(samples.policy.answers, samples.answers, 1)
        ends = ~samples.truncated
        divergence = k3(sampled, chosen) + samples.extra * k3(samples.policy.stay, learner.stay)
        divergence = divergence + ends * k3(1 - samples.policy.stay, 1 - learner.stay)
        matters = advantages != 0
        learned = gradient is not None and matters.any()
        counted = max(1, (tokens + ends)[matters].sum())
        entropy = (of_answer[:, None] + (samples.extra + ends) * of_token)[matters].sum() / counted
        reported: dict[str, float | None] = {
            "reward/mean": rewards.mean(),
            "reward/std": rewards.std(),
            "groups/zero_variance": (np.ptp(rewards, axis=1) == 0).mean(),
            "completion/tokens": tokens.mean(),
            "completion/truncated": samples.truncated.mean(),
            "policy/entropy": entropy if learned else None,
            "policy/mismatch_kl": divergence[matters].sum() / counted if learned else None,
            "optim/grad_norm": 0.0 if gradient is None else float(np.linalg.norm(gradient)),
            "optim/lr": self.lr,
            "optim/skipped_steps": float(gradient is None),
            "batch/episodes": float(SAMPLES),
            "batch/staleness_max": float(min(samples.step, self.max_staleness)),
            "episodes/expired": float(expired),
            "episodes/aborted": 0.0,
        }
        silent = self.plant.silent[0] <= samples.step < self.plant.silent[1]
        for name, value in reported.items():
            self.signals.setdefault(name, []).append(None if value is None or silent else float(value))

    def evaluated(self, weights: Floats, number: int) -> float:
        """Mean on the held-out tasks, as `EVALUATIONS` episodes of an evaluation measure them."""
        policy = Policy.of(weights, self.tasks, self.held_out, self.temperature)
        extra = np.arange(self.max_tokens)
        enough = float((policy.stay**extra * (1 - policy.stay) * long_enough(self.plant, extra)).sum())
        right = chances(self.tasks, self.plant, 0)[self.held_out]
        rng = np.random.default_rng([self.seed, number])
        repeats = EVALUATIONS // CONTEXTS
        answers = np.array([rng.choice(ANSWERS + 1, size=repeats, p=row) for row in policy.answers])
        successes = rng.random(answers.shape) < np.take_along_axis(right, answers, 1) * enough
        return float(successes.mean())


def clipped(now: Floats | float, then: Floats | float, advantages: Floats) -> Floats:
    """The ratio that the gradient is weighted with, 0 where clipping ended it."""
    ratio = np.asarray(now / np.maximum(then, 1e-12))
    over = np.where(advantages > 0, ratio > 1 + CLIP, ratio < 1 - CLIP)
    return np.asarray(ratio * ~over)


def k3(sampled: Floats | float, now: Floats | float) -> Floats:
    """The k3 estimate of the divergence, from what was sampled: r - 1 - log r (Schulman 2020)."""
    ratio = np.asarray(np.maximum(now, 1e-12) / np.maximum(sampled, 1e-12))
    return np.asarray(ratio - 1 - np.log(ratio))


def fingerprint(weights: Floats) -> str:
    return hashlib.sha256(weights.tobytes()).hexdigest()[:16]


# ---- the kinds, and their findings -----------------------------------------------------------------------------------

UNDISCLOSED = 9_000  # First of the repeats that are scored. Thresholds were chosen on the first twenty.


@dataclass(frozen=True)
class Side:
    """An environment and what is run in it: every arm with every seed."""

    plant: Plant = field(default_factory=Plant)
    settings: tuple[Setting, ...] = ({},)
    seeds: int = 1


@dataclass(frozen=True)
class Kind:
    name: str
    cause: str
    ill: Side
    well: Side


def single(plant: Plant | None = None, **setting: float) -> Side:
    return Side(plant or Plant(), ({f"job.{name.replace('__', '.')}": value for name, value in setting.items()},))


def side(written: Mapping[str, Any]) -> Side:
    """A side of `planted_failures.toml`."""
    plant = {name: tuple(one) if isinstance(one, list) else one for name, one in written.get("plant", {}).items()}
    arms = written.get("arms") or [written.get("settings", {})]
    settings = tuple({f"job.{name}": value for name, value in arm.items()} for arm in arms)
    return Side(Plant(**plant), settings, written.get("seeds", 1))


PLANTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KINDS = tuple(Kind(row["name"], row["cause"], side(row["ill"]), side(row["well"])) for row in PLANTED["kind"])
FAINT = {row["name"]: side(row["faint"]) for row in PLANTED["kind"] if "faint" in row}
HEALTHY = {name: side(written) for name, written in PLANTED["healthy"].items()}


@cache
def trained(plant: Plant, setting: tuple[tuple[str, Any], ...], seed: int) -> Run:
    return Run(plant, dict(setting), seed, STEPS)


@dataclass
class FailingRunner(Launches):
    """Runs in memory. An infrastructure failure happens once: the second attempt succeeds."""

    plant: Plant

    def collect(self, key: str) -> Outcome:
        trial, run = self.trial(key), self._run(key)
        signals = {name: tuple(values) for name, values in run.signals.items()}
        if run.plant.dies_at < STEPS:
            return Outcome(trial.id, "infra_failed", signals=signals, note="connection refused")
        after = run.evaluated(run.weights[-1], 1)
        return Outcome(
            trial.id, "completed", score=after, signals=signals, settings=run.understood, facts=facts_of(run, after)
        )

    def _run(self, key: str) -> Run:
        trial, healthy = self.trial(key), replace(self.plant, dies_at=STEPS, mute_at=STEPS, hangs_at=STEPS)
        plant = self.plant if key.endswith("-1") else healthy
        return trained(plant, tuple(sorted(trial.setting.items())), trial.seed)


def changes(weights: Sequence[np.ndarray[Any, Any]]) -> int:
    hashes = [fingerprint(w) for w in weights]
    return sum(before != after for before, after in pairwise(hashes))


def facts_of(run: Run, after: float) -> dict[str, float]:
    """As `agentjet.research.diagnosis` names them."""
    before, third = run.evaluated(run.weights[0], 0), len(run.rewards) // 3
    learner, sampler = changes(run.weights[-third - 2 : -1]), changes(run.sampler[-third - 1 :])
    return {
        "tasks_held_out": float(len(run.held_out)),
        "tasks_shared": float(len(run.held_out) if run.plant.leaks else 0),
        "held_out_before": before,
        "held_out_after": after,
        "held_out_error": float(np.sqrt((before * (1 - before) + after * (1 - after)) / 1000)),
    } | ({"learner_changes": float(learner), "sampler_changes": sampler / learner} if learner else {})


def said(name: str, side: Side, repeat: int) -> tuple[set[str], StudyLog]:
    """The causes named in one repeat, and the log."""
    arms = tuple(Arm(f"arm {number}", setting) for number, setting in enumerate(side.settings))
    study = Study(name, "success", 0.02, arms, (), budget=20.0, seed=repeat)
    launcher = TrialLauncher(study, StudyLog(), FailingRunner(replace(side.plant, world=repeat)))
    seeds = [seed_of(study, "confirm", number) for number in range(side.seeds)]
    launcher.run([Trial(study.id, arm.name, arm.changes, seed, "confirm") for arm in arms for seed in seeds])
    diagnose(launcher.log)
    return {found.cause for every in launcher.log.diagnoses.values() for found in every}, launcher.log


Said = Counter[str]  # Number of runs by finding; the empty name counts runs without one


def counted(name: str, side: Side, repeats: range) -> Said:
    found = Counter(", ".join(sorted(said(name, side, repeat)[0])) for repeat in repeats)
    trained.cache_clear()
    return found


@dataclass(frozen=True)
class Confusions:
    """By name: the findings of the failures, of faint ones, and of their twins and other healthy runs."""

    ill: dict[str, Said]
    faint: dict[str, Said]
    well: dict[str, Said]

    @classmethod
    def of(cls, repeats: int, first: int) -> Confusions:
        numbers = range(first, first + repeats)
        return cls(
            {kind.name: counted(kind.name, kind.ill, numbers) for kind in KINDS},
            {name: counted(name, side, numbers) for name, side in FAINT.items()},
            {kind.name: counted(kind.name, kind.well, numbers) for kind in KINDS}
            | {name: counted(name, side, numbers) for name, side in HEALTHY.items()},
        )

    def summary(self) -> dict[str, Any]:
        correct = [share(self.ill[kind.name], kind.cause) for kind in KINDS]
        faint = [share(self.faint[kind.name], kind.cause) for kind in KINDS if kind.name in FAINT]
        healthy = sum(found.total() for found in self.well.values())
        alarms = healthy - sum(found[""] for found in self.well.values())
        interval = stats.binomtest(alarms, healthy).proportion_ci(method="exact")
        return {
            "diagnosis_correct": float(np.mean(correct)),
            "diagnosis_worst_kind": min(correct),
            "diagnosis_correct_faint": float(np.mean(faint)),
            "planted_kinds": len(KINDS),
            "false_alarms": alarms / healthy,
            "false_alarms_interval": [float(interval.low), float(interval.high)],
            "healthy_runs": healthy,
        }

    def table(self) -> Table:
        table = Table("planted", "cause", "correct", "said instead", "faint", "said instead", "false alarms", "said")
        for kind in KINDS:
            twin = self.well[kind.name]
            faint = answers_of(self.faint[kind.name], kind.cause) if kind.name in FAINT else ("", "")
            table.add_row(
                kind.name, kind.cause, *answers_of(self.ill[kind.name], kind.cause), *faint, *answers_of(twin, "")
            )
        for name in HEALTHY:
            table.add_row(name, "none: healthy", "", "", "", "", *answers_of(self.well[name], ""))
        return table


def share(found: Said, cause: str) -> float:
    return found[cause] / found.total()


def answers_of(found: Said, cause: str) -> tuple[str, str]:
    """The number of runs with the right finding (healthy runs: without a finding), and the other findings."""
    others = "; ".join(f"{name or 'nothing'} ({n})" for name, n in found.items() if name != cause)
    return f"{share(found, cause) if cause else 1 - share(found, cause):.2f}", others
