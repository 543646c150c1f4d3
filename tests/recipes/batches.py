"""Small batches for the arithmetic of recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from agentjet.recipes.policy_gradient import PolicyGradient
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.batch import Facts, TrainingBatch
from agentjet.timeline.forest import Row, build_forest


def make_batch(
    groups: Sequence[Sequence[float]],
    *,
    calls: Sequence[Sequence[int]] | None = None,
    turn_rewards: Sequence[Sequence[float]] = (),
    metrics: Mapping[str, Sequence[float]] | None = None,
    entropies: Sequence[float] = (),
    prompts: Sequence[Sequence[int]] = (),
    named: Sequence[float] = (),
    means: Sequence[float] = (),
) -> TrainingBatch:
    """A batch of one role. `groups` are rewards of episodes; `calls` the tokens of each call of each episode, default
    one call of two tokens. Each call has its `entropies` and its `prompts`, by default 1 and different ones. Episodes
    have rewards that are `named` for the role, and `means` of their tasks; NaN for none.
    """
    rewards = [reward for group in groups for reward in group]
    tokens_E = calls or [[2]] * len(rewards)
    places = [(e, turn, size) for e, sizes in enumerate(tokens_E) for turn, size in enumerate(sizes)]
    rows = [
        Row(
            np.array([*prompt, *range(100, 100 + size)], np.int32),
            slice(len(prompt), len(prompt) + size),
            {"logprob": -1.0, "version": 0, "sequence": e, "call": number, "temperature": 1.0}
            | {"entropy": entropies[number] if entropies else 1.0},
        )
        for number, (e, _, size) in enumerate(places)
        for prompt in [prompts[number] if prompts else [1, 10 + number]]
    ]
    facts = Facts(
        groups=np.repeat(np.arange(len(groups)), [len(group) for group in groups]).astype(np.int32),
        rewards=np.array(rewards, np.float64),
        roles=("",),
        role_rewards=np.reshape(named or [np.nan] * len(rewards), (-1, 1)).astype(np.float64),
        spoke=np.ones((len(rewards), 1), bool),
        call_episode=np.array([e for e, _, _ in places], np.int32),
        call_role=np.zeros(len(places), np.int32),
        call_turn=np.array([turn for _, turn, _ in places], np.int32),
        call_rewards=np.array([r for rewards in turn_rewards for r in rewards] or [np.nan] * len(places)),
        call_truncated=np.zeros(len(places), bool),
        tasks=(("", "t"),) * len(rewards),
        seconds=np.ones(len(rewards)),
        metrics={name: np.array(values, np.float64) for name, values in (metrics or {}).items()},
        code_versions=("",) * len(rewards),
        task_means=np.array(means) if means else None,
    )
    return TrainingBatch(0, build_forest(rows), facts)


def recipe_of(name: str, **parameters: object) -> PolicyGradient:
    recipe = make_recipe({"name": name, **parameters})
    assert isinstance(recipe, PolicyGradient)
    return recipe


def advantages(batch: TrainingBatch, name: str, **parameters: object) -> list[float]:
    """The advantage of each call: all its tokens have the same one. 0 for calls that the recipe leaves out."""
    recipe = recipe_of(name, **parameters)
    outputs = {need: np.full(batch.forest.num_targets, -1, np.float32) for need in recipe.needs}
    forest = recipe.columns(batch, outputs)[0]
    found = [forest["advantage"][forest["call"] == call] for call in range(int(batch.forest["call"].max()) + 1)]
    assert all(np.all(own == own[:1]) for own in found)
    return [float(own[0]) if len(own) else 0.0 for own in found]
