"""The cost of an optimiser step of a recipe against that of GRPO, on one batch of a tiny model, in CPU seconds.

A recipe that needs another pass (a ratio of sequences, a reference, values, ...) is measured and named with it, apart
from the others. Epochs and mini-batches are 1: they are a choice of the recipe, not a cost of its step.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from agentjet.compute.embedded.learner import PolicyLearner
from agentjet.compute.embedded.model import load_policy
from agentjet.compute.protocol import LossSpec
from agentjet.config import JobConfig, ModelConfig
from agentjet.recipes.recipe import Recipe
from agentjet.timeline.batch import Facts, TrainingBatch
from agentjet.timeline.forest import build_forest, call_row
from bench.learning.chosen import chosen

EPISODES, CALLS, PROMPT, ANSWER = 32, 2, 40, 24
GROUP_SIZE = 8
COMPUTED = frozenset({"reference", "sequence_log_ratio"})
"""Columns of `reads` for which the learner does a further pass."""


def batch_of(seed: int = 0) -> TrainingBatch:
    """A batch of random tokens, in which nearly every episode has an advantage."""
    rng = np.random.default_rng(seed)
    num_calls = EPISODES * CALLS
    rows = []
    for episode in range(EPISODES):
        context = np.random.default_rng(episode // GROUP_SIZE).integers(3, 250, PROMPT)
        for turn in range(CALLS):
            context = np.concatenate([context, rng.integers(3, 250, ANSWER)])
            logprobs = (-5 + 0.3 * rng.normal(size=ANSWER)).astype(np.float32)
            versions = np.zeros(ANSWER, np.int32)
            call = episode * CALLS + turn
            rows.append(call_row(context.astype(np.int32), logprobs, versions, None, 1.0, episode, call=call))
            context = np.concatenate([context, rng.integers(3, 250, 8)])
    seconds = rng.uniform(1, 5, EPISODES)
    facts = Facts(
        groups=(np.arange(EPISODES) // GROUP_SIZE).astype(np.int32),
        rewards=rng.uniform(0, 1, EPISODES),
        roles=("",),
        role_rewards=np.full((EPISODES, 1), np.nan),
        spoke=np.ones((EPISODES, 1), bool),
        call_episode=np.repeat(np.arange(EPISODES), CALLS).astype(np.int32),
        call_role=np.zeros(num_calls, np.int32),
        call_turn=np.tile(np.arange(CALLS), EPISODES).astype(np.int32),
        call_rewards=rng.uniform(0, 1, num_calls),
        call_truncated=np.zeros(num_calls, bool),
        tasks=tuple(("", f"t{episode // GROUP_SIZE}") for episode in range(EPISODES)),
        seconds=seconds,
        metrics={"env_seconds": seconds},
        code_versions=("",) * EPISODES,
    )
    return TrainingBatch(0, build_forest(rows), facts)


def passes(recipe: Recipe) -> list[str]:
    """Returns what the recipe needs besides one forward and one backward pass."""
    heads = recipe.value_heads.names if recipe.value_heads is not None else ()
    return sorted({*recipe.needs, *heads, *(set(recipe.reads) & COMPUTED)})


def measure(names: list[str], model: Path, rounds: int) -> dict[str, float]:
    """Returns the CPU seconds of a step over those of GRPO's, by recipe: the median over pairs of steps."""
    torch.set_num_threads(1)
    policy = load_policy(ModelConfig(name=str(model), device="cpu", dtype="float32", threads=1))
    learner, batch, found = PolicyLearner(policy), batch_of(), {}

    def seconds(recipe: Recipe) -> float:
        job = JobConfig(recipe=recipe)
        began = time.thread_time()
        learner.forward_backward(batch, LossSpec.of(job))
        learner.optim_step(job.optimizer, 0)
        return time.thread_time() - began

    once = {"epochs": 1, "mini_batches": 1}
    grpo = chosen("grpo", **once)
    seconds(grpo)
    for name in names:
        recipe = chosen(name, model, **once)
        seconds(recipe)
        taken = [(seconds(recipe), seconds(grpo)) for _ in range(rounds)]
        # Both steps of a pair meet nearly the same load of other programs.
        found[name] = round(median(own / theirs for own, theirs in taken), 3)
    return found
