"""The embedded sampler against `transformers`' continuous batching: `python -m bench.sampler`.

Same model, weights, prompts, machine and number of sampled tokens; each contender is a separate process. The `mixed`
workload runs 32 requests of 2,000 tokens of context beside 32 short ones. Prints a table, then one JSON object as the
last line; `ratio` is our tokens per second over the library's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.machine import environment, grid, last_json, report, run_contender

if TYPE_CHECKING:
    from agentjet.compute.sampler import ModelSampler

SHORT, LONG = 40, 2000
WORKLOADS = {"8": [SHORT] * 8, "32": [SHORT] * 32, "64": [SHORT] * 64, "mixed": [LONG, SHORT] * 32}
CONTENDERS = ("agentjet", "continuous")


def prompts(lengths: list[int]) -> list[list[int]]:
    """Random prompts without a shared prefix, so that prefix caches do not help either side."""
    rng = np.random.default_rng(0)
    return [rng.integers(20, 40_000, length).tolist() for length in lengths]


def our_sampler(model: str, threads: int, *, max_concurrent: int, cache_tokens: int) -> ModelSampler:
    """The served sampler. Its policy never ends by itself."""
    from agentjet.compute.model import load_policy
    from agentjet.compute.rank import make_deterministic
    from agentjet.compute.sampler import ModelSampler
    from agentjet.config import ModelConfig

    make_deterministic()
    policy = load_policy(ModelConfig.model_validate({"name": model, "dtype": "bfloat16", "threads": threads}))
    policy.end_tokens = frozenset()
    return ModelSampler(policy, max_concurrent, cache_tokens)


def agentjet(model: str, threads: int, new_tokens: int) -> Callable[[list[list[int]]], None]:
    """Our sampler in process; a call samples a workload to its end."""
    from agentjet.types import SamplingParams

    sampler = our_sampler(model, threads, max_concurrent=64, cache_tokens=160_000)

    def sample(batch: list[list[int]]) -> None:
        sampler.invalidate()
        for i, prompt in enumerate(batch):
            sampler.submit(i, np.array(prompt, np.int32), SamplingParams(max_tokens=new_tokens, seed=i))
        while not sampler.is_idle:
            sampler.step()

    return sample


def continuous(model: str, threads: int, new_tokens: int) -> Callable[[list[list[int]]], None]:
    """The library's manager: on a GPU with its own choice of pages, graphs and kernels, else with the fastest here."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    from agentjet.compute.model import locate_model
    from agentjet.compute.policy import resolve_device

    torch.set_num_threads(threads)
    device = resolve_device("auto")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        locate_model(model), dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    policy = loaded.to(device).eval()

    def sample(batch: list[list[int]]) -> None:
        blocks = sum(-(-(len(p) + new_tokens) // 16) + 1 for p in batch)
        fastest = {"page_size": 16, "num_blocks": blocks + 16, "max_batch_tokens": 512, "auto_switch_to_flash": False}
        settings = ContinuousBatchingConfig(
            return_logprobs=True, per_request_processors=True, **({} if device.type == "cuda" else fastest)
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
    for _ in range(3 if workload != "mixed" or torch.cuda.is_available() else 1):
        began = time.perf_counter()
        sample(batch)
        seconds.append(time.perf_counter() - began)
    return len(batch) * new_tokens / min(seconds[-2:])


def child(arguments: argparse.Namespace, name: str, *one: str) -> Any:
    """The result of a child process; None where it failed."""
    settings = {"--model": arguments.model, "--threads": arguments.threads, "--new-tokens": arguments.new_tokens}
    command = ["bench.sampler", *(str(part) for pair in settings.items() for part in pair), "--one", *one]
    done = run_contender(name, command, environment(arguments.threads))
    if done.failed:
        print(f"{name} failed: {done.failed}", file=sys.stderr)
        return None
    return last_json(done.output)


def compare(arguments: argparse.Namespace, workload: str) -> dict[str, Any]:
    """Tokens per second of both contenders, and their ratio."""
    speeds = {c: child(arguments, f"{c} on {workload}", c, workload) for c in CONTENDERS}
    ours, theirs = (speeds[c] for c in CONTENDERS)
    return {**speeds, "ratio": ours / theirs if ours and theirs else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--one", nargs=2, metavar=("CONTENDER", "WORKLOAD"), help="used by the bench itself")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one, arguments.model, arguments.threads, arguments.new_tokens)))
        return
    found = {name: compare(arguments, name) for name in arguments.workloads}
    report("sampler", {"workloads": found}, grid(found), machine=False)


if __name__ == "__main__":
    main()
