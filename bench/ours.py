"""AgentJet's worker on the workload of `bench.step`, in process. Prints one JSON object as its last line.

The sampler and the learner are those of the embedded backend, on one copy of the weights, with the worker's
deterministic algorithms, fingerprints and memory handling. The caller sets the worker's environment. The server around
them (HTTP, the journal) is not measured here, and neither are the programs that TRL's users build around its trainer.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from agentjet.compute.learner import PolicyLearner
from agentjet.compute.model import load_policy
from agentjet.compute.rank import HEAP, make_deterministic, sampler_limits
from agentjet.compute.sampler import ModelSampler, NewToken
from agentjet.config import JobConfig, ModelConfig, SamplerConfig
from agentjet.config.schema import OptimizerConfig
from agentjet.recipes.baselines import Grpo
from agentjet.rendering import Renderer
from agentjet.timeline.forest import Forest, build_forest, call_row
from agentjet.types import Conversation, Message, SamplingParams
from bench.machine import require_fast_path, synchronise
from bench.workload import StepTime, Workload, report, reward
from tests.compute.direct import learn_directly


def run(workload: Workload, dtype: str) -> dict[str, Any]:
    """Sample and learn for the workload's steps."""
    make_deterministic()
    policy = load_policy(
        ModelConfig.model_validate({"name": workload.model, "dtype": dtype, "threads": workload.threads})
    )
    require_fast_path(policy)
    policy.end_tokens = frozenset()  # as in every contender: end tokens are ordinary here
    renderer = Renderer(policy.info)
    sampler = ModelSampler(policy, *sampler_limits(policy, SamplerConfig()))
    learner = PolicyLearner(policy)
    job = JobConfig(
        batch_size=workload.num_prompts,
        group_size=workload.repeats,
        max_tokens=workload.new_tokens,
        optimizer=OptimizerConfig(lr=workload.lr, beta2=0.999),
    )
    questions = workload.questions()
    steps = []
    for step in range(workload.total_steps):
        began = time.perf_counter()
        batch = questions[step * workload.num_prompts : (step + 1) * workload.num_prompts]
        prompts = [_tokens(renderer, question) for question in batch for _ in range(workload.repeats)]
        completions = _sample(sampler, prompts, workload, step)
        rewards = [reward(renderer.text([t.token for t in completion])) for completion in completions]
        synchronise()
        scored = time.perf_counter()
        forest = _forest(prompts, completions, rewards, workload.repeats, step)
        learn_directly(learner, forest, job, step)
        learner.weights_changed()
        sampler.invalidate()
        HEAP.settle()
        synchronise()
        learning, tokens = time.perf_counter() - scored, (sum(map(len, prompts)), sum(map(len, completions)))
        steps.append(StepTime(scored - began, learning, *tokens))
    told = {"dtype": policy.info.dtype, "forest_tokens": forest.num_nodes}
    return {**report(workload, steps, device=str(policy.device)), **told}


def _tokens(renderer: Renderer, question: str) -> np.ndarray:
    encoded = renderer.render(Conversation((Message("user", question),)))
    return np.array(renderer.tokenize(encoded), np.int32)


def _sample(sampler: ModelSampler, prompts: list[np.ndarray], workload: Workload, step: int) -> list[list[NewToken]]:
    """All completions of a step, submitted at once."""
    completions: list[list[NewToken]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        seed = (workload.seed * workload.total_steps + step) * len(prompts) + i
        sampler.submit(i, prompt, SamplingParams(max_tokens=workload.new_tokens, seed=seed))
    while not sampler.is_idle:
        for new in sampler.step():
            completions[new.id].append(new)
    return completions


def _forest(
    prompts: list[np.ndarray], completions: list[list[NewToken]], rewards: list[float], repeats: int, version: int
) -> Forest:
    advantages = np.concatenate(
        [Grpo().group_advantages(np.array(rewards[at : at + repeats])) for at in range(0, len(rewards), repeats)]
    )
    return build_forest(
        [
            call_row(
                tokens=np.concatenate([prompt, np.array([t.token for t in completion], np.int32)]),
                logprobs=np.array([t.logprob for t in completion], np.float32),
                versions=np.full(len(completion), version, np.int32),
                advantage=float(advantages[i]),
                temperature=1.0,
                sequence=i,
            )
            for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", type=Workload.from_json, default=Workload())
    parser.add_argument("--weights", choices=["auto", "bfloat16", "float32"], default="auto")
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.workload, arguments.weights)))


if __name__ == "__main__":
    main()
