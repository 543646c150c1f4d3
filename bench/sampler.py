"""The embedded sampler against `transformers`' continuous batching: `python -m bench.sampler`.

Same model, weights, prompts, machine and number of sampled tokens; each contender in a process of its own. The `mixed`
workload runs 32 requests of 2,000 tokens of context beside 32 short ones. A table, then one JSON object as the last
line; `ratio` is our tokens per second over the library's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

SHORT, LONG = 40, 2000
WORKLOADS = {"8": [SHORT] * 8, "32": [SHORT] * 32, "64": [SHORT] * 64, "mixed": [LONG, SHORT] * 32}
CONTENDERS = ("agentjet", "continuous")


def prompts(lengths: list[int]) -> list[list[int]]:
    """Random prompts without a shared prefix, so that prefix caches do not help either side."""
    rng = np.random.default_rng(0)
    return [rng.integers(20, 40_000, length).tolist() for length in lengths]


def agentjet(model: str, threads: int, new_tokens: int) -> Callable[[list[list[int]]], None]:
    """Our sampler in process; a call samples a workload to its end."""
    from agentjet.compute.embedded.model import load_policy
    from agentjet.compute.embedded.sampler import Sampler
    from agentjet.config import ModelConfig
    from agentjet.types import SamplingParams

    policy = load_policy(ModelConfig.model_validate({"name": model, "dtype": "bfloat16", "threads": threads}))
    policy.end_tokens = frozenset()
    sampler = Sampler(policy, max_concurrent=64, cache_tokens=160_000)

    def sample(batch: list[list[int]]) -> None:
        sampler.invalidate()
        for i, prompt in enumerate(batch):
            sampler.submit(i, np.array(prompt, np.int32), SamplingParams(max_tokens=new_tokens, seed=i))
        while not sampler.is_idle:
            sampler.step()

    return sample


def continuous(model: str, threads: int, new_tokens: int) -> Callable[[list[list[int]]], None]:
    """The library's manager, with the settings that were fastest here."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    from agentjet.compute.embedded.model import resolve_model

    torch.set_num_threads(threads)
    policy = AutoModelForCausalLM.from_pretrained(
        resolve_model(model), dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()

    def sample(batch: list[list[int]]) -> None:
        blocks = sum(-(-(len(p) + new_tokens) // 16) + 1 for p in batch)
        settings = ContinuousBatchingConfig(
            page_size=16,
            num_blocks=blocks + 16,
            max_batch_tokens=512,
            return_logprobs=True,
            per_request_processors=True,
            auto_switch_to_flash=False,
        )
        generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=True, eos_token_id=-1, pad_token_id=0)
        with policy.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=settings
        ) as manager:
            for prompt in batch:
                manager.add_request(prompt, max_new_tokens=new_tokens)
            done = 0
            while done < len(batch):
                result = manager.get_result(timeout=60)
                if result is None:
                    raise RuntimeError("continuous batching gave no result within a minute")
                done += result.is_finished()

    return sample


def measure(contender: str, workload: str, model: str, threads: int, new_tokens: int) -> float:
    """Tokens per second, the better of two runs after a warm-up."""
    torch.set_num_threads(threads)
    sample = {"agentjet": agentjet, "continuous": continuous}[contender](model, threads, new_tokens)
    batch = prompts(WORKLOADS[workload])
    seconds = []
    for _ in range(3 if workload != "mixed" else 1):
        began = time.perf_counter()
        sample(batch)
        seconds.append(time.perf_counter() - began)
    return len(batch) * new_tokens / min(seconds[-2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--one", nargs=2, metavar=("CONTENDER", "WORKLOAD"), help="used by the bench itself")
    arguments = parser.parse_args()
    shared = (arguments.model, arguments.threads, arguments.new_tokens)
    if arguments.one:
        print(json.dumps(measure(*arguments.one, *shared)))
        return
    grid = Table("workload", *(f"{c} tokens/s" for c in CONTENDERS), "ratio")
    results: dict[str, Any] = {}
    for workload in arguments.workloads:
        speeds = {}
        for contender in CONTENDERS:
            command = [sys.executable, "-m", "bench.sampler", *sys.argv[1:], "--one", contender, workload]
            done = subprocess.run(command, capture_output=True, text=True)
            speeds[contender] = float(done.stdout.split()[-1]) if done.returncode == 0 else None
        ours, theirs = (speeds[c] for c in CONTENDERS)
        ratio = ours / theirs if ours and theirs else None
        results[workload] = {**speeds, "ratio": ratio}
        grid.add_row(
            workload, *(f"{s:.0f}" if s else "failed" for s in speeds.values()), f"{ratio:.2f}" if ratio else ""
        )
    Console(width=100).print(grid)
    print(json.dumps({"bench": "sampler", "workloads": results}))


if __name__ == "__main__":
    main()
