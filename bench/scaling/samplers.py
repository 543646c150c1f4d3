"""Figures of replicas with SmolLM2-135M: exactness, speed, and the pause of a publish.

All need the sampler's environment (`sampler_python`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentjet.compute.embedded.policy import resolve_dtype
from agentjet.compute.embedded.token_sampling import score
from agentjet.types import SamplingParams
from tests.cluster.local_replica import MAX_CONCURRENT, Completed, Running, Wanted, running

PROMPT_TOKENS, NEW_TOKENS = 40, 48
BATCHES = 3  # Batches of prompts that count


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(20, 40_000, (count, PROMPT_TOKENS)).tolist()


def logprob_error(world: Running, *, count: int = 8, new_tokens: int = 48) -> dict[str, float]:
    """Log-probabilities of a replica against those of the learner for the same tokens, at temperature 1.

    `max` is the largest difference, `kl` the estimate of `policy/mismatch_kl` (mean of exp(d) - d - 1), `tokens` their
    number.
    """
    params = SamplingParams(max_tokens=new_tokens, piece_tokens=16)
    wanted = {i: Wanted(prompt, dataclasses.replace(params, seed=i)) for i, prompt in enumerate(prompts(count))}
    found: dict[int, Completed] = world.replica.sample(wanted)
    differences = []
    for i, one in found.items():
        tokens = np.array([*wanted[i].tokens, *one.tokens], np.int32)
        learner = score(world.policy, tokens, 0)[-len(one.tokens) :]
        differences += [own.logprob - theirs for own, theirs in zip(learner, one.logprobs, strict=True)]
    d = np.array(differences)
    return {"max": float(np.abs(d).max()), "kl": float((np.exp(d) - d - 1).mean()), "tokens": float(len(d))}


def publish_pause(worlds: Sequence[Running], *, publishes: int = 4) -> dict[str, float]:
    """Publishes to replicas at the same time, while each samples 8 completions, one token a piece.

    Times are of arrival at the gateway, the largest of all publishes and replicas. `pause_s`: from a replica's last
    token of the old version to its first one of the new. `gap_s`: the same of each completion, which contains the
    recomputation of all contexts before it. `step_s` is the usual time between two tokens.
    """
    with ThreadPoolExecutor(len(worlds)) as threads:
        pauses, gaps, steps = zip(*threads.map(lambda world: _pauses(world, publishes), worlds), strict=True)
    return {"pause_s": max(pauses), "gap_s": max(gaps), "step_s": float(np.median(np.concatenate(steps)))}


def _pauses(world: Running, publishes: int) -> tuple[float, float, NDArray[np.float64]]:
    """Returns the longest pause and gap of one replica, and the times between tokens of one version, in seconds."""
    params = SamplingParams(max_tokens=48 * (publishes + 1), piece_tokens=1)
    wanted = {i: Wanted(prompt, dataclasses.replace(params, seed=i)) for i, prompt in enumerate(prompts(8))}
    versions = range(1, publishes + 1)
    publications = {40 * v: world.replica.publish(world.published, v) for v in versions}
    found: dict[int, Completed] = world.replica.sample(wanted, publications)
    tokens = [(np.array(one.times), np.array(one.versions)) for one in found.values()]
    first = {v: [at[of == v].min() for at, of in tokens] for v in versions}
    last = {v: [at[of == v - 1].max() for at, of in tokens] for v in versions}
    steps = np.concatenate([np.diff(at)[np.diff(of) == 0] for at, of in tokens])
    pause = max(min(first[v]) - max(last[v]) for v in versions)
    gap = max(np.subtract(first[v], last[v]).max() for v in versions)
    return float(pause), float(gap), steps


def sampling_seconds(world: Running, batches: Sequence[Sequence[list[int]]], new_tokens: int) -> list[float]:
    """Returns the seconds of each batch of prompts through a replica and its connection."""
    seconds = []
    params = SamplingParams(max_tokens=new_tokens, piece_tokens=16)
    for batch in batches:
        wanted = {i: Wanted(prompt, dataclasses.replace(params, seed=i)) for i, prompt in enumerate(batch)}
        started = time.monotonic()
        found: dict[int, Completed] = world.replica.sample(wanted)
        seconds.append(time.monotonic() - started)
        assert all(len(one.tokens) == new_tokens for one in found.values())
    return seconds


def figures(python: str) -> dict[str, Any]:
    """Returns the rows of `python -m bench.scale` about replicas. Speed: the best of some batches of prompts."""
    torch.set_num_threads(1)
    dtype = str(resolve_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    batches = [prompts(MAX_CONCURRENT, seed) for seed in range(BATCHES + 1)]
    with running(python, dtype) as one:
        seconds = sampling_seconds(one, batches, NEW_TOKENS)[1:]
        with running(python, dtype) as two:
            pause = publish_pause([one, two])
    with running(python, dtype, lora_rank=16) as adapted:
        adapter = publish_pause([adapted])
    with running(python, "float32") as world:
        exact = logprob_error(world)
    with running(python, "bfloat16") as world:
        rounded = logprob_error(world, new_tokens=16)
    return {
        "logprob_err": exact["max"],
        "mismatch_kl_bf16": rounded["kl"],
        "logprob_err_bf16": rounded["max"],
        "publish_pause_s": pause["pause_s"],
        "publish_gap_s": pause["gap_s"],
        "publish_pause_adapter_s": adapter["pause_s"],
        "publish_gap_adapter_s": adapter["gap_s"],
        "step_s": pause["step_s"],
        "sampler_tokens_per_s": MAX_CONCURRENT * NEW_TOKENS / min(seconds),
    }
