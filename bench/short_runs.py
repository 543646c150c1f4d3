"""Short trainings in this process, for `bench.recipes`.

* `explained_variance`: part of the returns' variance that values explain, by `value_lr`. The heads learn a stationary
  task for 200 batches of 16 answers of SmolLM2-135M, which stays: the return is 1 if a sum of two numbers is small. The
  figures are means of batches 20 to 40, and of the last 20. `explained_variance_before` is the last one of the former
  default 0.1, `explained_variance_after` that of the present default.
* `entropy_after`: entropy per token, in nats, after 30 batches of a tiny model, by recipe, a mean over three seeds. The
  reward is that of the served runs.
* `optimizer_seconds`: CPU seconds of a step on SmolLM2-135M, by `job.optimizer.name`, without forward and backward.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from agentjet.compute.learner import PolicyLearner
from agentjet.compute.model import load_policy
from agentjet.compute.optimizer import Optimizer
from agentjet.compute.passes import ValueModel, pass_of
from agentjet.compute.policy import Policy
from agentjet.config import JobConfig, ModelConfig, OptimizerConfig
from agentjet.errors import ConfigError
from agentjet.recipes.critic import Ppo, explained_variance
from agentjet.recipes.recipe import ValueHeads
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.forest import Row, build_forest
from agentjet.types import SamplingParams
from bench.machine import report
from tests.compute.conftest import make_policy, run, sampler_of
from tests.compute.direct import learn_directly
from tests.compute.test_locks import Call, Episode, training_batch
from tests.tiny import make_model, tokenizer

GROUPS, GROUP_SIZE, TOKENS = 4, 4, 8
RATES = (0.03, 0.1, 0.3, 1.0, 3.0)
FORMER_RATE = 0.1
ANSWERS, VALUE_BATCHES, VALUE_BATCH = 160, 200, 16
SEEDS, ENTROPY_BATCHES = 3, 30
STEPS = 4
BONUSES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "entropy_bonus": {"entropy_coef": 0.03},
    "adaptive_entropy": {"entropy_coef": 0.03, "target": 4.0},  # A random model begins at 5.6 nats.
}
Groups = list[list[Episode]]


def share(text: str) -> float:
    """Returns the share of letters and digits."""
    return sum(one.isascii() and one.isalnum() for one in text) / len(text) if text else 0.0


def sampled(policy: Policy, number: int) -> Groups:
    """Returns a batch of single answers with the share of letters and digits as their reward."""
    prompts = [np.array(tokenizer().encode(f"word {group}").ids, np.int32) for group in range(GROUPS)]
    places = [(group, member) for group in range(GROUPS) for member in range(GROUP_SIZE)]
    params = [SamplingParams(max_tokens=TOKENS, seed=1000 * number + place) for place in range(len(places))]
    requests = {place: (prompts[group], params[place]) for place, (group, _) in enumerate(places)}
    groups: Groups = [[] for _ in range(GROUPS)]
    for place, (tokens, logprobs) in run(sampler_of(policy), requests).items():
        group, _ = places[place]
        call = Call(
            np.concatenate([prompts[group], np.array(tokens, np.int32)]),
            np.array(logprobs, np.float32),
            np.zeros(len(tokens), np.int32),
            1.0,
            (),
        )
        groups[group].append(Episode(share(tokenizer().decode(tokens)), (call,)))
    return groups


def answers(policy: Policy) -> tuple[Tensor, Tensor]:
    """Returns the hidden states [A, T, width] before the tokens of answers, and the return [A] of each answer."""
    sums = [(a, b) for a in range(20) for b in range(a, 20)]
    random.Random(0).shuffle(sums)
    encode = Tokenizer.from_file(f"{policy.info.tokenizer_path}/tokenizer.json").encode
    rows = []
    for a, b in sums[:ANSWERS]:
        prompt = encode(f"What is {a} + {b}? Reply with only the number.").ids
        answer = encode(f" {a} + {b} = {a + b} is the sum of these").ids[:TOKENS]
        rows.append(Row(np.array(prompt + answer, np.int32), slice(len(prompt), None), {}))
    with torch.no_grad():
        hidden, targets = pass_of(policy).hidden(build_forest(rows))
    returns = torch.tensor([float(a + b < 19) for a, b in sums[:ANSWERS]])
    return hidden[targets].reshape(ANSWERS, TOKENS, -1), returns


def explained(policy: Policy) -> dict[str, list[float]]:
    """Returns parts of the variance that values explain, by their rate."""
    hidden, returns = answers(policy)
    found = {}
    for rate in RATES:
        chance, values = np.random.default_rng(0), ValueModel(ValueHeads(("value",), rate, 0.0), policy)
        parts = []
        for _ in range(VALUE_BATCHES):
            chosen = chance.choice(ANSWERS, VALUE_BATCH, replace=False)
            value = values.values(hidden[chosen].flatten(0, 1))["value"]
            goal = returns[chosen].repeat_interleave(TOKENS)
            parts.append(explained_variance(value.detach().numpy(), goal.numpy()))
            (0.5 * (value - goal) ** 2).mean().backward()  # type: ignore[no-untyped-call]
            values.step()
        found[f"{rate:g}"] = [round(statistics.mean(part), 3) for part in (parts[20:40], parts[-20:])]
    return found


def entropies(folder: Path) -> dict[str, float]:
    found = {}
    for name, own in BONUSES.items():
        job = JobConfig(recipe=make_recipe({"name": name, **own}), optimizer=OptimizerConfig(lr=1e-2))
        ends = []
        for seed in range(SEEDS):
            learner = PolicyLearner(make_policy(folder))
            for number in range(ENTROPY_BATCHES + 1):
                batch = training_batch(sampled(learner.policy, 1000 * seed + number), number)
                metrics = learn_directly(learner, batch.forest, job, number, batch.facts)
            ends.append(metrics["policy/entropy"])
        found[name] = round(statistics.mean(ends), 3)
    return found


def optimizer_seconds(policy: Policy) -> dict[str, float | None]:
    """Returns the median CPU seconds of a step; None without the library of an optimiser."""
    found: dict[str, float | None] = {}
    for name in ("adamw", "muon", "adamw_8bit"):
        try:
            optimizer = Optimizer(name, policy, policy.trainable())
        except ConfigError:
            found[name] = None
            continue
        seconds = []
        for _ in range(STEPS):
            for weight in policy.trainable().values():
                weight.grad = torch.randn_like(weight)
            began = time.process_time()
            optimizer.step(OptimizerConfig.model_validate({"name": name}), 1e-6)
            seconds.append(time.process_time() - began)
        found[name] = round(statistics.median(seconds[1:]), 3)
    return found


def measured(model: str = "smollm2-135m") -> dict[str, Any]:
    policy = load_policy(ModelConfig.model_validate({"name": model, "device": "cpu", "dtype": "float32"}))
    by_rate = explained(policy)
    with tempfile.TemporaryDirectory() as scratch:
        entropy = entropies(make_model(Path(scratch) / "model"))
    return {
        "explained_variance": by_rate,
        "explained_variance_before": by_rate[f"{FORMER_RATE:g}"][-1],
        "explained_variance_after": by_rate[f"{Ppo().value_lr:g}"][-1],
        "entropy_after": entropy,
        "optimizer_seconds": optimizer_seconds(policy),
    }


if __name__ == "__main__":
    report("short_runs", measured())
