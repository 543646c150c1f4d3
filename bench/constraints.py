"""The cost of constrained and truncated sampling on SmolLM2: bytes of the stored sets, and CPU time.

Eight completions of a kind run at a time, the kinds in turns, by the worker's own sampler on one thread. Sampling
steps are compared while all eight run, and learning by its forward pass. Sets are packed as in the journal, one call
at a time. Prints a table, then one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from agentjet.compute.embedded.learner import PolicyLearner
from agentjet.compute.embedded.model import load_policy
from agentjet.compute.embedded.policy import Policy
from agentjet.compute.embedded.sampler import ModelSampler, NewToken
from agentjet.config import ModelConfig
from agentjet.rendering import Renderer
from agentjet.timeline.forest import Row, build_forest, call_row
from agentjet.timeline.support import decode_set, pack_sets
from agentjet.types import Constraint, Conversation, Message, SamplingParams

AT_A_TIME = 8
BOUND = 24
"""Longest string of the second schema: a limit makes the set another one after every character."""
QUESTION = Conversation((Message("user", "Describe a town you know, as JSON."),))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "country": {"type": "string"},
        "inhabitants": {"type": "integer"},
        "is_capital": {"type": "boolean"},
        "sights": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["name", "country", "inhabitants", "is_capital", "sights"],
    "additionalProperties": False,
}


BOUNDED = json.loads(json.dumps(SCHEMA).replace('"string"', f'"string", "maxLength": {BOUND}'))


@dataclass(slots=True)
class Kind:
    """One way of sampling, and what it gave so far: calls, and CPU seconds of steps in which all eight ran."""

    params: SamplingParams
    calls: list[list[NewToken]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def main() -> None:
    """Measure every kind, in turns, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3, help="of eight completions of each kind")
    arguments = parser.parse_args()
    policy = load_policy(ModelConfig(name=arguments.model, dtype="bfloat16", threads=1))
    renderer = Renderer(policy.info)
    plain, bounded = (renderer.grammar(QUESTION, Constraint(schema=schema)) for schema in (SCHEMA, BOUNDED))
    prompt = np.array(renderer.tokenize(renderer.render(QUESTION)), np.int32)
    kinds = {
        "free": Kind(SamplingParams(max_tokens=64)),
        "top_p = 0.95": Kind(SamplingParams(max_tokens=64, top_p=0.95)),
        "top_k = 50": Kind(SamplingParams(max_tokens=64, top_k=50)),
        "JSON": Kind(SamplingParams(max_tokens=160, grammar=plain)),
        "JSON, bounded": Kind(SamplingParams(max_tokens=160, grammar=bounded)),
    }
    sampler = ModelSampler(policy, AT_A_TIME, 16384)
    for round in range(arguments.rounds):
        for kind in kinds.values():
            sample(sampler, prompt, kind, round)
    results = {name: report(policy, prompt, kind) for name, kind in kinds.items()}
    free = results["free"]
    print(f"{'kind':14} {'tokens':>7} {'no choice':>10} {'bytes/token':>12} {'ms/step':>8} {'ratio':>6} {'learn':>6}")
    for name, result in results.items():
        result["step_ratio"] = result["step_ms"] / free["step_ms"]
        result["learn_ratio"] = result["learn_us_per_token"] / free["learn_us_per_token"]
        print(
            f"{name:14} {result['tokens']:7.0f} {result['no_choice']:10.0%} {result['bytes_per_token']:12.1f} "
            f"{result['step_ms']:8.1f} {result['step_ratio']:6.2f} {result['learn_ratio']:6.2f}"
        )
    print(json.dumps({"vocabulary": policy.vocabulary, "kinds": results}))


def sample(sampler: ModelSampler, prompt: np.ndarray, kind: Kind, round: int) -> None:
    """Eight completions."""
    calls: list[list[NewToken]] = [[] for _ in range(AT_A_TIME)]
    for i in range(AT_A_TIME):
        sampler.submit(i, prompt, replace(kind.params, seed=AT_A_TIME * round + i))
    seconds: list[float] = []
    while not sampler.is_idle:
        began = time.process_time()
        fresh = sampler.step()
        if len(fresh) == AT_A_TIME:
            seconds.append(time.process_time() - began)
        for new in fresh:
            calls[new.id].append(new)
    kind.calls += calls
    kind.seconds += seconds[1:]  # the first computes the prompt


def report(policy: Policy, prompt: np.ndarray, kind: Kind) -> dict[str, float]:
    """Figures of a kind's tokens and sets."""
    sets = [new.support for call in kind.calls for new in call]
    alone = sum(bool(one) and int(decode_set(one, policy.vocabulary).sum()) == 1 for one in sets)
    forest = build_forest([row(prompt, call, i) for i, call in enumerate(kind.calls)])
    learner = PolicyLearner(policy)
    seconds = []
    for _ in range(3):
        began = time.process_time()
        learner.logprobs(forest)
        seconds.append(time.process_time() - began)
    return {
        "tokens": len(sets),
        "no_choice": alone / len(sets),
        "bytes_per_token": sum(len(pack_sets([new.support for new in call])) for call in kind.calls) / len(sets),
        "step_ms": 1000 * median(kind.seconds),
        "learn_us_per_token": 1e6 * min(seconds) / len(sets),
    }


def row(prompt: np.ndarray, call: list[NewToken], sequence: int) -> Row:
    """A call as the learner gets it."""
    return call_row(
        np.concatenate([prompt, [new.token for new in call]]).astype(np.int32),
        np.array([new.logprob for new in call], np.float32),
        np.zeros(len(call), np.int32),
        1.0,
        1.0,
        sequence,
        tuple(new.support for new in call),
    )


if __name__ == "__main__":
    main()
