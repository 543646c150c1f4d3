"""The embedded sampler against `transformers`' continuous batching: `python -m bench.sampler`.

Same model, weights, prompts, machine and number of sampled tokens; each contender is a separate process. The `mixed`
workload runs 32 requests of 2,000 tokens of context beside 32 short ones. Prints a table, then one JSON object as the
last line; `ratio` is our tokens per second over the library's.

`mixed_arrivals` runs our sampler alone. Each short call that ends is replaced by another, with a long prompt among
every sixteen, in a cache that finished calls fill. `mixed_ratio` is its throughput over that of the same requests
sorted by length, all present at the start, in an idle cache.
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
    from agentjet.compute.embedded.sampler import ModelSampler

SHORT, LONG = 40, 2000
WORKLOADS = {"8": [SHORT] * 8, "32": [SHORT] * 32, "64": [SHORT] * 64, "mixed": [LONG, SHORT] * 32}
CONTENDERS = ("agentjet", "continuous")
ARRIVALS = "mixed_arrivals"
IN_FLIGHT = 16
ARRIVALS_CACHE = 8192  # Half of what the short calls of `mixed_arrivals` leave behind, at one block of the cache each


def prompts(lengths: list[int]) -> list[list[int]]:
    """Random prompts without a shared prefix, so that prefix caches do not help either side."""
    rng = np.random.default_rng(0)
    return [rng.integers(20, 40_000, length).tolist() for length in lengths]


def our_sampler(model: str, threads: int, *, max_concurrent: int, cache_tokens: int) -> ModelSampler:
    """The served sampler. Its policy never ends by itself."""
    from agentjet.compute.embedded.model import load_policy
    from agentjet.compute.embedded.sampler import ModelSampler
    from agentjet.compute.embedded.worker import make_deterministic
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

    from agentjet.compute.embedded.model import locate_model
    from agentjet.compute.embedded.policy import resolve_device

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


def lengths_in_order_of_arrival(num_short: int, short: int, long: int) -> list[int]:
    """One long prompt among every sixteen short ones."""
    return [length for i in range(1, num_short + 1) for length in ([short, long] if i % 16 == 8 else [short])]


def sample_arrivals(sampler: ModelSampler, batch: list[list[int]], new_tokens: int, in_flight: int) -> None:
    """Sample a workload in its order, with at most so many requests under way."""
    from agentjet.types import SamplingParams

    coming = list(enumerate(batch))[::-1]
    under_way = 0
    while coming or under_way:
        while coming and under_way < in_flight:
            i, prompt = coming.pop()
            sampler.submit(i, np.array(prompt, np.int32), SamplingParams(max_tokens=new_tokens, seed=i))
            under_way += 1
        under_way -= sum(new.finish_reason is not None for new in sampler.step())


def mixed_arrivals(model: str, threads: int, new_tokens: int, num_short: int) -> dict[str, float]:
    """Tokens per second of both orders, the better of two runs of each, taken in turn."""
    sampler = our_sampler(model, threads, max_concurrent=IN_FLIGHT, cache_tokens=ARRIVALS_CACHE)
    arriving = prompts(lengths_in_order_of_arrival(num_short, SHORT, 600))
    sample_arrivals(sampler, arriving[:IN_FLIGHT], new_tokens, IN_FLIGHT)
    orders = {"arriving": (arriving, IN_FLIGHT), "sorted": (sorted(arriving, key=len), len(arriving))}
    seconds = dict.fromkeys(orders, float("inf"))
    for _ in range(2):
        for name, (batch, in_flight) in orders.items():
            sampler.invalidate()
            began = time.perf_counter()
            sample_arrivals(sampler, batch, new_tokens, in_flight)
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    return {f"{name}_tokens_s": len(arriving) * new_tokens / taken for name, taken in seconds.items()}


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
    settings["--short-calls"] = arguments.short_calls
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
    names = [*WORKLOADS, ARRIVALS]
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--short-calls", type=int, default=128, help=f"of {ARRIVALS}")
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--one", nargs=2, metavar=("CONTENDER", "WORKLOAD"), help="used by the bench itself")
    arguments = parser.parse_args()
    shared = (arguments.model, arguments.threads, arguments.new_tokens)
    if arguments.one:
        is_ours_alone = arguments.one[1] == ARRIVALS
        found = mixed_arrivals(*shared, arguments.short_calls) if is_ours_alone else measure(*arguments.one, *shared)
        print(json.dumps(found))
        return
    figures: dict[str, Any] = {}
    if ARRIVALS in arguments.workloads:
        speeds = child(arguments, ARRIVALS, "agentjet", ARRIVALS)
        figures["mixed_ratio"] = round(speeds["arriving_tokens_s"] / speeds["sorted_tokens_s"], 3) if speeds else None
        figures[ARRIVALS] = speeds
        print(f"{ARRIVALS}: {figures['mixed_ratio']} of the throughput of the same requests sorted ({speeds})")
    figures["workloads"] = {name: compare(arguments, name) for name in arguments.workloads if name != ARRIVALS}
    report("sampler", figures, grid(figures["workloads"]), machine=False)


if __name__ == "__main__":
    main()
