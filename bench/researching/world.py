"""A world where GRPO can be studied in milliseconds: a contextual bandit with shared features, in NumPy.

A policy is a softmax over a few actions, linear in features of context and action, so learning in one context moves
the others as in a network. A step samples prompts, and `num_repeat` answers each. It pays 0 or 1 by a true (or, where
the grader can be hacked, a wrong) probability, and takes one policy-gradient step on group-relative advantages. The
score is the exact expected true reward, in points of 100.

Results are about methods of research, not about language models. A run depends on its setting and seed alone, not on
the runs that were computed beside it. The first third of a run is a run of a third of the length.

Shapes: R runs, P prompts of a step, G answers a prompt, C contexts, A actions, F features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentjet.research.records import Setting, canonical

Floats = NDArray[np.float64]
STEPS = 90
SAMPLES_PER_STEP = 64
CONTEXTS, ACTIONS, FEATURES = 20, 8, 16
CHUNK = 64
"""Runs computed beside each other."""
DEFAULTS: Mapping[str, float] = {
    "lr": 8.0,
    "num_repeat": 8.0,
    "normalise": 1.0,  # divide advantages by the group's standard deviation
    "kl": 0.0,  # weight of the KL to the starting policy, as a loss term
    "decay": 0.0,  # of lr, over the run: 1 ends at zero
    "collapse": 0.0,  # chance that a seed learns the opposite of what it should
    "label": 0.0,  # changes nothing but the random numbers
    "skill": 0.0,  # added to the success rate of every action: an effect that is there by construction
}


@dataclass(frozen=True)
class World:
    """An environment: which action is good where. `hackable` pays, besides, for an action that is not good."""

    seed: int = 0
    hackable: bool = False
    evaluations: int = 1000
    """Held-out episodes a score is measured on."""
    features: Floats = field(init=False, repr=False, compare=False)
    """(C, A, F)."""
    true: Floats = field(init=False, repr=False, compare=False)
    """(C, A): the chance of success."""
    paid: Floats = field(init=False, repr=False, compare=False)
    """(C, A): the chance of a reward in training."""
    start: Floats = field(init=False, repr=False, compare=False)
    """(F,): the policy before training."""

    def __post_init__(self) -> None:
        rng = np.random.default_rng([7, self.seed])
        features = rng.normal(size=(CONTEXTS, ACTIONS, FEATURES)) / np.sqrt(FEATURES)
        features[:, :, 0] = 0.0
        features[:, -1, 0] = 1.0  # the last action can be told in every context: that one can be hacked
        direction = rng.normal(size=FEATURES)
        direction[0] = -1.0
        quality = features @ direction + 0.4 * rng.normal(size=(CONTEXTS, ACTIONS))
        true = 0.05 + 0.9 / (1 + np.exp(-2.5 * (quality - 0.5)))
        paid = true.copy()
        if self.hackable:
            paid[:, -1] = 0.9
            true[:, -1] = 0.05
        start = 0.8 * direction
        for name, value in (("features", features), ("true", true), ("paid", paid), ("start", start)):
            object.__setattr__(self, name, value)


def curves(world: World, settings: Sequence[Setting], seeds: Sequence[int], marks: Sequence[int]) -> Floats:
    """Scores of runs after `marks` steps each, (R, len(marks)); settings and seeds are pairwise."""
    settings = [{**DEFAULTS, **setting} for setting in settings]
    found = np.empty((len(settings), len(marks)))
    by_shape: dict[int, list[int]] = {}
    for i, setting in enumerate(settings):
        by_shape.setdefault(int(setting["num_repeat"]), []).append(i)
    for num_repeat, members in by_shape.items():
        for first in range(0, len(members), CHUNK):
            chunk = members[first : first + CHUNK]
            found[chunk] = train(world, [settings[i] for i in chunk], [seeds[i] for i in chunk], num_repeat, marks)
    return found


def train(world: World, settings: list[Setting], seeds: list[int], num_repeat: int, marks: Sequence[int]) -> Floats:
    """One chunk of equal group size, (R, len(marks))."""
    prompts = SAMPLES_PER_STEP // num_repeat
    streams = [stream(setting, seed) for setting, seed in zip(settings, seeds, strict=True)]
    lr, normalise, kl, decay, skill, collapse = (
        np.array([float(setting[name]) for setting in settings])
        for name in ("lr", "normalise", "kl", "decay", "skill", "collapse")
    )
    lr = np.where(np.array([rng.random() for rng in streams]) < collapse, -lr, lr)
    draws = np.stack([rng.random((marks[-1], prompts, 1 + 2 * num_repeat)) for rng in streams], axis=1)  # (T,R,P,1+2G)
    theta = np.tile(world.start, (len(settings), 1))
    reference = softmax(world.features @ world.start)  # (C, A)
    scores: list[Floats] = []
    for step in range(marks[-1]):
        contexts = (draws[step, :, :, 0] * CONTEXTS).astype(int)  # (R, P)
        features = world.features[contexts]  # (R, P, A, F)
        policy = softmax(np.einsum("rpaf,rf->rpa", features, theta))
        below = draws[step, :, :, 1 : 1 + num_repeat, None] > np.cumsum(policy, axis=-1)[:, :, None, :]
        actions = np.minimum(below.sum(axis=-1), ACTIONS - 1)  # (R, P, G)
        chance = np.take_along_axis(world.paid[contexts], actions, axis=-1) + skill[:, None, None]
        rewards = (draws[step, :, :, 1 + num_repeat :] < chance).astype(float)
        advantages = rewards - rewards.mean(axis=-1, keepdims=True)
        deviation = rewards.std(axis=-1, keepdims=True)
        advantages /= np.where(normalise[:, None, None] > 0, deviation + 1e-4, 1.0)
        taken = (actions[..., None] == np.arange(ACTIONS)).astype(float)  # (R, P, G, A)
        weights = np.einsum("rpg,rpga->rpa", advantages, taken) / SAMPLES_PER_STEP  # the push on each log-probability
        log_ratio = np.log(policy + 1e-12) - np.log(reference[contexts] + 1e-12)
        drift = policy * (log_ratio - (policy * log_ratio).sum(axis=-1, keepdims=True)) / prompts
        push = weights - policy * weights.sum(axis=-1, keepdims=True) - kl[:, None, None] * drift
        theta += (lr * (1 - decay * step / STEPS))[:, None] * np.einsum("rpa,rpaf->rf", push, features)
        if step + 1 in marks:
            whole = softmax(np.einsum("caf,rf->rca", world.features, theta))
            scores.append(100 * ((whole * world.true).sum(axis=-1).mean(axis=-1) + skill))
    return np.stack(scores, axis=1)


def softmax(logits: Floats) -> Floats:
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


def stream(setting: Setting, seed: int) -> np.random.Generator:
    """Random numbers of one run, from its content alone."""
    content = canonical(dict(setting)).encode()
    return np.random.default_rng([seed, *content])


def measured(world: World, setting: Setting, seed: int, mark: int, score: float) -> float:
    """The score that an evaluation of `world.evaluations` episodes reports for a policy with this true score."""
    rng = np.random.default_rng([seed, mark, 1, *canonical(dict(setting)).encode()])
    return 100 * float(rng.binomial(world.evaluations, min(1.0, max(0.0, score / 100)))) / world.evaluations
