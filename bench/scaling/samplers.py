"""Figures of one replica with SmolLM2-135M: exactness, speed against vLLM's offline API, and the pause of a publish.

Each function starts its own replica and returns figures; all need the sampler's environment (`sampler_python`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from agentjet.compute.embedded.model import load_policy
from agentjet.compute.embedded.policy import Policy, locate_model, resolve_dtype
from agentjet.compute.embedded.token_sampling import score
from agentjet.config import ComputeConfig, ModelConfig, SamplerConfig
from agentjet.types import SamplingParams
from bench.scaling.replicas import SOURCE, START_SECONDS, Completed, LocalReplica, Wanted, publish

MODEL = "smollm2-135m"
PROMPT_TOKENS = 40
PAUSED = re.compile(r"sampling paused for ([\d.]+) s")


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """A replica that has adopted the weights of `policy` as version 0."""

    replica: LocalReplica
    policy: Policy
    published: Any
    """The same model without AgentJet's attention."""
    folder: Path
    model: ModelConfig
    sampler: SamplerConfig


@contextmanager
def running(python: str, dtype: str, *, max_concurrent: int = 64, context: int = 512) -> Iterator[Running]:
    """Starts a replica whose completions end only at their `max_tokens`."""
    config = ModelConfig.model_validate(
        {"name": MODEL, "device": "cpu", "dtype": dtype, "threads": 1, "context_length": context}
    )
    policy = load_policy(config)
    sampler = SamplerConfig(max_concurrent=max_concurrent, cache_tokens=16_384)
    with tempfile.TemporaryDirectory() as name, LocalReplica(python, Path(name) / "log") as replica:
        info = dataclasses.replace(policy.info, end_tokens=())
        replica.load(config, info, sampler, ComputeConfig())
        published = AutoModelForCausalLM.from_pretrained(locate_model(MODEL), dtype=getattr(torch, dtype)).eval()
        replica.adopt(publish(published, Path(name), 0))
        yield Running(replica, policy, published, Path(name), config, sampler)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(20, 40_000, (count, PROMPT_TOKENS)).tolist()


def logprob_error(python: str, dtype: str, *, count: int = 8, new_tokens: int = 48) -> dict[str, float]:
    """Log-probabilities of a replica against those of the learner for the same tokens, at temperature 1.

    `max` is the largest difference, `kl` the estimate of `policy/mismatch_kl` (mean of exp(d) - d - 1), `tokens` their
    number.
    """
    with running(python, dtype) as world:
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


def publish_pause(python: str, dtype: str, *, publishes: int = 4) -> dict[str, float]:
    """Publishes to a replica that samples 8 completions, one token a piece.

    `pause_s` is the longest time for which a replica sampled nothing, by its log. `gap_s` is the longest time without a
    token at the gateway: it contains the recomputation of all running contexts, whose cached keys are dropped. `step_s`
    is the usual time between two tokens.
    """
    with running(python, dtype, context=2048) as world:
        params = SamplingParams(max_tokens=48 * (publishes + 1), piece_tokens=1)
        wanted = {i: Wanted(prompt, dataclasses.replace(params, seed=i)) for i, prompt in enumerate(prompts(8))}
        versions = range(1, publishes + 1)
        publications = {40 * v: publish(world.published, world.folder, v) for v in versions}
        found: dict[int, Completed] = world.replica.sample(wanted, publications)
        pauses, steps = [], []
        for one in found.values():
            gaps = np.diff(one.times)
            changed = np.diff(one.versions) > 0
            pauses += gaps[changed].tolist()
            steps += gaps[~changed].tolist()
            assert sorted(set(one.versions)) == [0, *versions]
        logged = PAUSED.findall((world.folder / "log").read_text())[1:]  # Without version 0.
        assert len(logged) == publishes
    pause, gap = max(map(float, logged)), max(pauses)
    return {"pause_s": pause, "gap_s": gap, "step_s": float(np.median(steps)), "publishes": float(publishes)}


def sampler_efficiency(
    python: str, dtype: str, *, count: int = 64, new_tokens: int = 48, rounds: int = 4
) -> dict[str, float]:
    """Sampled tokens a second through a replica and its connection, against `vllm.LLM.generate` with equal settings.

    The best of some rounds of each, after one that is not counted; prompts differ between rounds.
    """
    batches = [prompts(count, seed) for seed in range(rounds + 1)]
    ours = []
    with running(python, dtype, max_concurrent=count) as world:
        params = SamplingParams(max_tokens=new_tokens, piece_tokens=16)
        for batch in batches:
            wanted = {i: Wanted(prompt, dataclasses.replace(params, seed=i)) for i, prompt in enumerate(batch)}
            started = time.monotonic()
            found: dict[int, Completed] = world.replica.sample(wanted)
            ours.append(time.monotonic() - started)
            assert all(len(one.tokens) == new_tokens for one in found.values())
        job: dict[str, Any] = {
            "model": world.model.model_dump(mode="json"),
            "sampler": world.sampler.model_dump(mode="json"),
            "info": dataclasses.asdict(dataclasses.replace(world.policy.info, end_tokens=())),
            "prompts": batches,
            "new_tokens": new_tokens,
            "rounds": len(batches),
        }
    done = subprocess.run(
        [python, "-m", "bench.scaling.offline"],
        input=json.dumps(job),
        env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{SOURCE.parent}"},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"vLLM's offline API failed: {done.stderr[-2000:]}")
    theirs = json.loads(done.stdout.strip().splitlines()[-1])
    total = count * new_tokens
    return {
        "ours_tokens_per_s": total / min(ours[1:]),
        "vllm_tokens_per_s": total / min(theirs[1:]),
        "efficiency": min(theirs[1:]) / min(ours[1:]),
    }


def figures(python: str) -> dict[str, Any]:
    """Returns the rows of `python -m bench.scale` about one replica."""
    torch.set_num_threads(1)
    dtype = str(resolve_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    speed, pause = sampler_efficiency(python, dtype), publish_pause(python, dtype)
    exact, rounded = logprob_error(python, "float32"), logprob_error(python, "bfloat16", new_tokens=16)
    return {
        "logprob_err": exact["max"],
        "mismatch_kl_bf16": rounded["kl"],
        "logprob_err_bf16": rounded["max"],
        "publish_pause_one_s": pause["pause_s"],
        "publish_gap_one_s": pause["gap_s"],
        "sampler_efficiency": speed["efficiency"],
        "sampler_tokens_per_s": speed["ours_tokens_per_s"],
        "vllm_tokens_per_s": speed["vllm_tokens_per_s"],
    }
