"""Losses over whole mini-batches, for `bench.recipes`.

* `batch_loss_cost`, `batch_loss_memory`: CPU and peak memory of `forward_backward` with PPO's clipped loss as a
  `batch_loss` over the same as a `token_loss`, where the mini-batch is one micro-batch. `batch_loss_cost_pieces`: the
  same CPU in several micro-batches, where log-probabilities are computed twice.
* `batch_loss_grad_err`: the largest relative distance of the learner's gradient, in one and in several micro-batches,
  to autograd on one row per call, of 14 losses in float64. `entropy_grad_err`: that of an entropy bonus.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from agentjet.compute.learner import PolicyLearner
from agentjet.compute.model import load_policy
from agentjet.compute.protocol import LossSpec
from agentjet.config import JobConfig, ModelConfig
from agentjet.recipes.baselines import Grpo
from agentjet.recipes.losses import Clip, sequence_mean
from agentjet.recipes.recipe import Recipe, Teaching
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import build_forest, call_row
from bench.machine import forget_peak, grid, peak_memory
from tests.compute.architectures import make_architecture
from tests.compute.baseline import Double, episodes, relative, row_distributions, row_entropies, row_logprobs
from tests.compute.conftest import make_policy

MOST = {"batch_loss_cost": 1.1, "batch_loss_memory": 1.1, "batch_loss_grad_err": 1e-9, "entropy_grad_err": 1e-6}
ROUNDS = 4
GROUPS, MEMBERS, PROMPT, ANSWER = 3, 4, 64, 64
WHOLE, PIECES = 100_000, 300
TOP_K = 4


class WholeClip(Clip):
    """The same loss, of all tokens at once."""

    is_linear = True

    def batch_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return Clip().token_loss(logp, columns)


def random_batch(vocabulary: int) -> TrainingBatch:
    chance = np.random.default_rng(0)
    rows = []
    for group in range(GROUPS):
        prompt = chance.integers(20, vocabulary, PROMPT)
        for member in range(MEMBERS):
            tokens = np.concatenate([prompt, chance.integers(20, vocabulary, ANSWER)]).astype(np.int32)
            logprobs, versions = np.full(ANSWER, -3, np.float32), np.zeros(ANSWER, np.int32)
            rows.append(call_row(tokens, logprobs, versions, float(member - 1.5), 1.0, group * MEMBERS + member))
    return TrainingBatch(0, build_forest(rows))


def cost(model: str) -> dict[str, float]:
    policy = load_policy(ModelConfig.model_validate({"name": model, "threads": 2}))
    learner, batch = PolicyLearner(policy), random_batch(policy.vocabulary)
    ratios: dict[str, list[float]] = {"batch_loss_cost": [], "batch_loss_memory": [], "batch_loss_cost_pieces": []}

    def used(loss: Clip, tokens: int) -> tuple[float, int]:
        forget_peak()
        began = time.process_time()
        learner.forward_backward(batch, LossSpec.of(JobConfig(recipe=Grpo(loss=loss), micro_batch_tokens=tokens)))
        return time.process_time() - began, peak_memory()

    for number in range(ROUNDS):
        for tokens, key in ((WHOLE, "batch_loss_cost"), (PIECES, "batch_loss_cost_pieces")):
            (plain, before), (whole, after) = used(Clip(), tokens), used(WholeClip(), tokens)
            if number:  # The first round warms up.
                ratios[key].append(whole / plain)
                if tokens == WHOLE:
                    ratios["batch_loss_memory"].append(after / before)
    return {key: round(statistics.median(values), 3) for key, values in ratios.items()}


# ---- gradients -------------------------------------------------------------------------------------------------------

Formula = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


def means(logp: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """The mean log-ratio of each sequence [S]."""
    each = sequence_mean(logp - columns["logprob"], columns)
    first = [int((columns["sequence"] == number).nonzero()[0, 0]) for number in columns["sequence"].unique()]
    return each[first]


FORMULAS: dict[str, Formula] = {
    "squared means of sequences": lambda logp, columns: means(logp, columns).square().sum(),
    "largest mean": lambda logp, columns: means(logp, columns).max(),
    "log-sum-exp of sequences": lambda logp, columns: means(logp, columns).logsumexp(0),
    "pairs of sequences": lambda logp, columns: -means(logp, columns).diff().sigmoid().log().mean(),
    "softmax of sequences": lambda logp, columns: means(logp, columns).softmax(0).square().sum(),
    "variance of ratios": lambda logp, columns: (logp - columns["logprob"]).exp().var(),
    "covariance with the advantage": lambda logp, columns: (
        ((logp - logp.mean()) * (columns["advantage"] - columns["advantage"].mean())).mean().square()
    ),
    "tokens above the median": lambda logp, columns: logp[logp > logp.median()].sum(),
    "effective sample size": lambda logp, columns: (
        (logp - columns["logprob"]).exp().sum().square() / (2 * (logp - columns["logprob"])).exp().sum()
    ),
    "product of batch means": lambda logp, columns: logp.mean() * (logp * columns["advantage"]).mean(),
    "squared entropy of the batch": lambda logp, columns: columns["new_entropy"].mean().square(),
    "change of the likely tokens": lambda logp, columns: (
        (columns["new_top"] - columns["old_top"] - 0.1).exp().sum(-1).square().mean()
    ),
    "likely tokens times entropy": lambda logp, columns: (
        columns["new_top"].logsumexp(-1).sum() * columns["new_entropy"].mean() + means(logp, columns).sum().square()
    ),
    "entropy times ratio": lambda logp, columns: (columns["new_entropy"] * logp).sum() + means(logp, columns).prod(),
}


class Whole(Recipe):
    """A recipe whose loss is a formula."""

    name: str = "whole"
    formula: str = ""

    @property
    def reads(self) -> tuple[str, ...]:
        return ("logprob", "advantage", "sequence", "new_entropy", "new_top", "old_top")

    @property
    def teaching(self) -> Teaching:
        return Teaching(top_k=TOP_K, top_of="policy")

    def batch_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return FORMULAS[self.formula](logp, columns), {}


def gradients() -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """The errors, and those of each loss."""
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, Double():
        policy = make_policy(make_architecture(Path(folder) / "double", "llama"))
        policy.model.double()
        calls = [row.with_columns(number=number) for number, row in enumerate(episodes(policy))]
        forest = build_forest(calls)
        forest = forest.with_columns(place=np.arange(forest.num_targets))
        logp = torch.cat([row_logprobs(policy, row) for row in calls])
        entropy = torch.cat([row_entropies(policy, row) for row in calls])
        logps = torch.cat([row_distributions(policy, row) for row in calls])
        top = logps.gather(1, logps.detach().topk(TOP_K).indices)
        columns = {name: torch.from_numpy(forest[name]).double() for name in ("logprob", "advantage")}
        columns |= {"sequence": torch.from_numpy(forest["sequence"].astype(np.int64)), "new_entropy": entropy}
        stored = top.detach().numpy().astype(np.float32).astype(np.float64)
        columns |= {"new_top": top, "old_top": torch.from_numpy(stored)}
        weights = list(policy.trainable().values())
        learner, batch = PolicyLearner(policy), TrainingBatch(0, forest)

        def distance(recipe: Recipe, loss: Tensor, tokens: int) -> float:
            truth = torch.cat([one.flatten() for one in torch.autograd.grad(loss, weights, retain_graph=True)])
            learner.forward_backward(batch, LossSpec.of(JobConfig(recipe=recipe, micro_batch_tokens=tokens)))
            found = torch.cat([one.grad.flatten() for one in learner.masters() if one.grad is not None])
            for master in learner.masters():
                master.grad = None
            return float(relative(found, truth))

        def distances(recipe: Recipe, loss: Tensor) -> dict[str, float]:
            return {"one": distance(recipe, loss, WHOLE), "several": distance(recipe, loss, 50)}

        for name, formula in FORMULAS.items():
            rows[name] = distances(Whole(formula=name), formula(logp, columns))
        bonus = Grpo(entropy_coef=0.1, loss={"name": "rft"}, aggregation="sequence_sum")
        weight = float(np.float32(1 / forest.num_sequences))
        bonus_rows = distances(bonus, ((-columns["advantage"] * logp - 0.1 * entropy) * weight).sum())
    worst = max(value for row in rows.values() for value in row.values())
    return {"batch_loss_grad_err": worst, "entropy_grad_err": max(bonus_rows.values())}, rows


def measured(model: str = "smollm2-135m") -> tuple[dict[str, float], list[Table]]:
    errors, rows = gradients()
    return {**errors, **cost(model)}, [grid(rows, title="relative distance of gradients, in micro-batches")]
