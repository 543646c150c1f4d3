"""Figures of replicas with SmolLM2-135M: exactness, speed against vLLM's offline API, and the pause of a publish.

All need the sampler's environment (`sampler_python`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from agentjet.compute.embedded.distributions import score
from agentjet.compute.embedded.model import load_policy
from agentjet.compute.embedded.policy import Policy, locate_model, resolve_dtype
from agentjet.config import ComputeConfig, ModelConfig, SamplerConfig
from agentjet.types import SamplingParams
from bench.scaling.replicas import SOURCE, START_SECONDS, Completed, LocalReplica, Wanted

MODEL = "smollm2-135m"
CONTEXT, MAX_CONCURRENT = 512, 64
PROMPT_TOKENS, NEW_TOKENS = 40, 48
BATCHES, ROUNDS = 3, 2
"""Batches of prompts that count, and how often each side samples them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """A replica that has adopted the weights of `policy` as version 0."""

    replica: LocalReplica
    policy: Policy
    published: Any
    """The same model without AgentJet's attention."""
    model: ModelConfig
    sampler: SamplerConfig


@contextmanager
def running(python: str, dtype: str, *, lora_rank: int = 0) -> Iterator[Running]:
    """Starts a replica on one core, whose completions end only at their `max_tokens`."""
    lora = {"rank": lora_rank}
    config = ModelConfig.model_validate(
        {"name": MODEL, "device": "cpu", "dtype": dtype, "threads": 1, "context_length": CONTEXT, "lora": lora}
    )
    policy = load_policy(config)
    sampler = SamplerConfig(max_concurrent=MAX_CONCURRENT, cache_tokens=16_384)
    with tempfile.TemporaryDirectory() as name, LocalReplica(python, Path(name) / "log") as replica:
        info = dataclasses.replace(policy.info, end_tokens=())
        replica.load(config, info, sampler, ComputeConfig())
        published = AutoModelForCausalLM.from_pretrained(locate_model(MODEL), dtype=getattr(torch, dtype)).eval()
        if lora_rank:
            adapter = PeftConfig(r=lora_rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
            published = get_peft_model(published, adapter)
        replica.adopt(replica.publish(published, 0))
        yield Running(replica, policy, published, config, sampler)


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


def offline_seconds(
    python: str, world: Running, batches: Sequence[Sequence[list[int]]], new_tokens: int
) -> list[float]:
    """Returns the seconds of the same with `vllm.LLM.generate` and equal settings. Raises `RuntimeError`."""
    with tempfile.TemporaryDirectory() as name:
        file, result = Path(name) / "job", Path(name) / "result"
        job: dict[str, Any] = {
            "model": world.model.model_dump(mode="json"),
            "sampler": world.sampler.model_dump(mode="json"),
            "info": dataclasses.asdict(dataclasses.replace(world.policy.info, end_tokens=())),
            "prompts": batches,
            "new_tokens": new_tokens,
            "rounds": len(batches),
            "result": str(result),
        }
        file.write_text(json.dumps(job))
        done = subprocess.run(
            [python, "-m", "bench.scaling.offline", str(file)],
            env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{SOURCE.parent}"},
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
        )
        if not result.exists():
            raise RuntimeError(f"vLLM's offline API failed: {done.stderr[-2000:]}")
        seconds: list[float] = json.loads(result.read_text())
    return seconds


def figures(python: str) -> dict[str, Any]:
    """Returns the rows of `python -m bench.scale` about replicas.

    Speed: the best of some batches of prompts, after one that is not counted. Both sides take turns, because the speed
    of a machine drifts.
    """
    torch.set_num_threads(1)
    dtype = str(resolve_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    batches = [prompts(MAX_CONCURRENT, seed) for seed in range(BATCHES + 1)]
    ours, theirs = list[float](), list[float]()
    with running(python, dtype) as one:
        for _ in range(ROUNDS):
            ours += sampling_seconds(one, batches, NEW_TOKENS)[1:]
            theirs += offline_seconds(python, one, batches, NEW_TOKENS)[1:]
        exact = logprob_error(one) if dtype == "float32" else None
        with running(python, dtype) as two:
            pause = publish_pause([one, two])
    with running(python, dtype, lora_rank=16) as adapted:
        adapter = publish_pause([adapted])
    if exact is None:
        with running(python, "float32") as world:
            exact = logprob_error(world)
    with running(python, "bfloat16") as world:
        rounded = logprob_error(world, new_tokens=16)
    total = MAX_CONCURRENT * NEW_TOKENS
    return {
        "logprob_err": exact["max"],
        "mismatch_kl_bf16": rounded["kl"],
        "logprob_err_bf16": rounded["max"],
        "publish_pause_s": pause["pause_s"],
        "publish_gap_s": pause["gap_s"],
        "publish_pause_adapter_s": adapter["pause_s"],
        "publish_gap_adapter_s": adapter["gap_s"],
        "step_s": pause["step_s"],
        "sampler_efficiency": min(theirs) / min(ours),
        "sampler_tokens_per_s": total / min(ours),
        "vllm_tokens_per_s": total / min(theirs),
    }
