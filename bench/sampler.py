"""The embedded sampler against `transformers`' continuous batching: `python -m bench.sampler`.

Same model, weights, prompts, machine and number of sampled tokens; each contender is a separate process. The `mixed`
workload runs 32 requests of 2,000 tokens of context beside 32 short ones. Prints a table, then one JSON object as the
last line; `ratio` is our tokens per second over the library's.

`--host` measures our sampler alone, in CPU seconds of one thread, so that other programs do not count:

* `host_us_row`: microseconds of a step of 512 rows per row, the shortest of 60 steps, with a model that computes
  nothing and the tables of CUDA; `_replay` without the content of a step's graph, above all the choice of tokens, which
  CUDA replays and a CPU computes; `_cpu` with the tables of a CPU, `_worker` with the worker's part, `_ends` if
  completions of 200 tokens on average and of prompts of 100 end and start;
* `restricted_cost`: a step of 64 completions with `top_p = 0.9`, divided by one without;
* `beside_prompt`: tokens per second of short calls beside a prompt of 8,000 tokens, divided by their own alone;
  `beside_sum`: the same plus the ratio of the prompt's speed.

`--replica` measures a vLLM replica with its connection, in turn with vLLM's own API and the same settings, on one core,
by the CPU seconds of all processes of each: `sampler_efficiency` is the quotient of their cheapest batches of 64
completions. vLLM's own API computes in one more process and waits for it in a loop, which costs a second core where one
is free: compare on a busy machine, too. It needs the sampler's environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import psutil
import torch

from bench.machine import ROOT, bounded, environment, grid, last_json, report, run_contender

if TYPE_CHECKING:
    from agentjet.compute.sampler import ModelSampler

SHORT, LONG = 40, 2000
WORKLOADS = {"8": [SHORT] * 8, "32": [SHORT] * 32, "64": [SHORT] * 64, "mixed": [LONG, SHORT] * 32}
CONTENDERS = ("agentjet", "continuous")


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random prompts without a shared prefix, so that prefix caches do not help either side."""
    rng = np.random.default_rng(seed)
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


# ---- our sampler alone -----------------------------------------------------------------------------------------------

ROWS, CONTEXT, VOCABULARY = 512, 4096, 32
CALLS, CALL_TOKENS, LONG_PROMPT = 8, 16, 8000
BOUNDS_BELOW, BOUNDS_ABOVE = {"beside_prompt": 0.5, "beside_sum": 0.9}, {"host_us_row": 1.5, "restricted_cost": 1.2}


class _Nothing(torch.nn.Module):
    """A decoder that computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=torch.zeros(*input_ids.shape, 1))


class _Policy(SimpleNamespace):
    """A policy by its attributes; a key of dictionaries."""

    __hash__ = object.__hash__


def idle_sampler(*, paged: bool) -> ModelSampler:
    """A sampler of 512 rows over a model without computation."""
    from agentjet.compute.policy import KeySizes
    from agentjet.compute.sampler import ModelSampler
    from agentjet.types import ModelInfo

    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))
    policy: Any = _Policy(
        info=ModelInfo("idle", "", "", CONTEXT, (0,)),
        decoder=_Nothing(),
        cache_shape={0: KeySizes(1, 8, 8)},
        state_shape={},
        dtype=torch.float32,
        device=torch.device("cpu"),
        vocabulary=VOCABULARY,
        end_tokens=frozenset(),
        mixable_layers={},
        records_routes=False,
        adapts_head=False,
        head=lambda hidden: logits[: len(hidden)],
        sampled_from=lambda: (),
    )
    return ModelSampler(policy, ROWS, CONTEXT * ROWS, graphs=paged)


def host_microseconds(*, paged: bool, ends: bool = False, worker: bool = False, replay: bool = False) -> float:
    """CPU microseconds of a step per row: the shortest of 60 steps, because other programs slow the processor down.

    With `worker`, tokens become pieces of one token. With `replay`, graphs compute nothing: all tokens are those of the
    step before.
    """
    from agentjet.compute.decode_graphs import DecodeGraph
    from agentjet.compute.rank import Rank
    from agentjet.types import PolicyId, SamplingParams

    sampler, rng, ids = idle_sampler(paged=paged), np.random.default_rng(0), count()
    rank = Rank(lambda message: None)
    hosted: Any = SimpleNamespace(sampler=sampler, policy=sampler.policy, version=0)
    rank.policies[PolicyId()] = hosted

    def submit() -> None:
        id, most = next(ids), int(rng.integers(1, 400)) if ends else CONTEXT // 2
        prompt = rng.integers(0, VOCABULARY, 100 if ends else 300).astype(np.int32)
        rank.handle("sample", PolicyId(), id, prompt, SamplingParams(max_tokens=most, seed=id))

    def step() -> int:
        if worker:
            rank.sample_step()
            return ROWS
        new = sampler.step()
        for one in new if ends else ():
            if one.finish_reason:
                submit()
        return len([*new]) if ends else ROWS

    for _ in range(ROWS):
        submit()
    while not ends and len(sampler.step()) < ROWS:
        pass
    for _ in range(150 * ends):
        step()
    found = []
    with patch.object(DecodeGraph, "_compute") if replay else nullcontext():
        for _ in range(60):
            began = time.process_time()
            num_tokens = step()
            found.append((time.process_time() - began) / num_tokens)
    return 1e6 * min(found)


def texts(model: str, lengths: list[int]) -> list[np.ndarray]:
    """Prompts of real text, from this project's documentation, each from another place."""
    from tokenizers import Tokenizer

    from agentjet.compute.model import locate_model

    tokenizer = Tokenizer.from_file(str(Path(locate_model(model)) / "tokenizer.json"))
    pages = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    tokens = np.array(tokenizer.encode(pages).ids, np.int32)
    starts = np.random.default_rng(0).integers(0, len(tokens) - max(lengths), len(lengths))
    return [tokens[start : start + length] for start, length in zip(starts.tolist(), lengths, strict=True)]


def restricted_cost(model: str) -> float:
    """CPU seconds of a step of 64 completions with `top_p = 0.9`, divided by one without: medians of 10 in turn."""
    from agentjet.types import SamplingParams

    found: dict[float, list[float]] = {1.0: [], 0.9: []}
    samplers = {}
    shared = our_sampler(model, 1, max_concurrent=64, cache_tokens=32_768)
    for top_p in found:
        samplers[top_p] = sampler = type(shared)(shared.policy, 64, 32_768)
        for i, prompt in enumerate(texts(model, [SHORT] * 64)):
            sampler.submit(i, prompt, SamplingParams(max_tokens=99, seed=i, top_p=top_p))
        while len(sampler.step()) < 64:
            pass
    for _ in range(10):
        for top_p, sampler in samplers.items():
            began = time.process_time()
            sampler.step()
            found[top_p].append(time.process_time() - began)
    return statistics.median(found[0.9]) / statistics.median(found[1.0])


def beside_prompt(model: str) -> dict[str, float]:
    """Rates of short calls and of a long prompt, together and each alone, per CPU second."""
    from agentjet.types import SamplingParams

    sampler, ids = our_sampler(model, 1, max_concurrent=64, cache_tokens=32_768), count()
    short = iter(texts(model, [SHORT] * 4000))
    (long,) = texts(model, [LONG_PROMPT])

    def run(calls: int, *, prompt: bool, seconds: float = np.inf) -> tuple[float, float]:
        """Tokens of short calls per second, and of the prompt; until the prompt ends or the seconds have passed."""
        sampler.invalidate()
        num_tokens, sampled = 0, -1
        if prompt:
            sampler.submit(sampled, long, SamplingParams(max_tokens=1))
        running = {next(ids): 0 for _ in range(calls)}
        for id in running:
            sampler.submit(id, next(short), SamplingParams(max_tokens=CALL_TOKENS, seed=id))
        began = time.process_time()
        while time.process_time() - began < seconds:
            new = [*sampler.step()]
            num_tokens += sum(one.id >= 0 for one in new)
            if any(one.id < 0 for one in new):
                break
            for one in new:
                if one.finish_reason:
                    del running[one.id]
                    running[id := next(ids)] = 0
                    sampler.submit(id, next(short), SamplingParams(max_tokens=CALL_TOKENS, seed=id))
        spent = time.process_time() - began
        for id in running:
            sampler.cancel(id)
        return num_tokens / spent, LONG_PROMPT / spent

    run(CALLS, prompt=False, seconds=3)
    alone, prompt_alone = run(CALLS, prompt=False, seconds=15)[0], run(0, prompt=True)[1]
    calls, prompt = run(CALLS, prompt=True)
    return {"beside_prompt": calls / alone, "beside_sum": calls / alone + prompt / prompt_alone}


def measure_host(model: str, *, quick: bool) -> dict[str, float]:
    """The figures of `--host`; only those without a model if `quick`."""
    from agentjet.compute.rank import make_deterministic

    torch.set_num_threads(1)
    make_deterministic()
    figures = {
        "host_us_row": host_microseconds(paged=True),
        "host_us_row_replay": host_microseconds(paged=True, replay=True),
        "host_us_row_cpu": host_microseconds(paged=False),
        "host_us_row_worker": host_microseconds(paged=True, worker=True),
        "host_us_row_ends": host_microseconds(paged=True, ends=True),
    }
    return figures if quick else {**figures, "restricted_cost": restricted_cost(model), **beside_prompt(model)}


# ---- a replica against vLLM's own API --------------------------------------------------------------------------------

REPLICA_TOKENS = 48


@contextmanager
def own_api(python: str, job: dict[str, Any]) -> Iterator[tuple[int, Callable[[list[list[int]]], None]]]:
    """Starts vLLM's own API. Yields its process, and a function that samples a batch of prompts."""
    answers, written = os.pipe()
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    with (
        subprocess.Popen(
            [python, "-m", "bench.scaling.own_api", json.dumps({**job, "answers": written})],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            env={**os.environ, "PYTHONPATH": paths},
            pass_fds=[written],
            text=True,
        ) as process,
        os.fdopen(answers) as lines,
    ):
        os.close(written)

        def sample(batch: list[list[int]]) -> None:
            assert process.stdin is not None
            print(json.dumps(batch), file=process.stdin, flush=True)
            assert lines.readline() == "done\n"

        yield process.pid, sample


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and of those below it."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in family)


def replica_speed(batches: int) -> dict[str, float]:
    """Tokens per CPU second of a replica and of vLLM's own API, in the best batch of each; one more comes first.

    The batches are in turn. The replica's seconds contain those of this process, which has its connection.
    """
    from agentjet.compute.policy import resolve_dtype
    from agentjet.types import SamplingParams
    from tests.cluster.local_replica import Completed, Wanted, running, sampler_python

    python = sampler_python()
    if python is None:
        sys.exit("--replica needs vLLM: agentjet cluster install, or set AGENTJET_SAMPLER_PYTHON")
    params = SamplingParams(max_tokens=REPLICA_TOKENS, piece_tokens=16)
    found: dict[str, list[float]] = {"replica": [], "vllm": []}
    dtype = str(resolve_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    with running(python, dtype) as world:
        job: dict[str, Any] = {
            "model": world.model.model_dump(mode="json"),
            "sampler": world.sampler.model_dump(mode="json"),
            "info": dataclasses.asdict(world.policy.info),
            "new_tokens": REPLICA_TOKENS,
        }
        num_rows = world.sampler.limits.max_concurrent

        def sample(batch: list[list[int]]) -> None:
            wanted = {i: Wanted(prompt, params) for i, prompt in enumerate(batch)}
            done: dict[int, Completed] = world.replica.sample(wanted)
            assert all(len(one.tokens) == REPLICA_TOKENS for one in done.values())

        with own_api(python, job) as (pid, sample_alone):
            sides: dict[str, tuple[Callable[[], float], Callable[[list[list[int]]], None]]] = {
                "replica": (lambda: cpu_seconds(world.replica.process.pid) + time.process_time(), sample),
                "vllm": (lambda: cpu_seconds(pid), sample_alone),
            }
            for number in range(batches + 1):
                batch = np.random.default_rng(number).integers(20, 40_000, (num_rows, SHORT)).tolist()
                for name, (spent, run) in sides.items():
                    before = spent()
                    run(batch)
                    found[name].append(spent() - before)
    total = num_rows * REPLICA_TOKENS
    rates = {f"{name}_tokens_cpu_s": total / min(seconds[1:]) for name, seconds in found.items()}
    return {**rates, "sampler_efficiency": rates["replica_tokens_cpu_s"] / rates["vllm_tokens_cpu_s"]}


# ---- the comparison --------------------------------------------------------------------------------------------------


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
    parser.add_argument("--host", action="store_true", help="measure our sampler alone")
    parser.add_argument("--quick", action="store_true", help="with --host: without a model")
    parser.add_argument("--replica", action="store_true", help="measure a vLLM replica against vLLM's own API")
    parser.add_argument("--batches", type=int, default=6, help="with --replica: batches that count")
    parser.add_argument("--one", nargs=2, metavar=("CONTENDER", "WORKLOAD"), help="used by the bench itself")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one, arguments.model, arguments.threads, arguments.new_tokens)))
        return
    if arguments.host:
        figures = measure_host(arguments.model, quick=arguments.quick)
        report("sampler", figures, bounded(figures, BOUNDS_BELOW, BOUNDS_ABOVE), machine=False)
        return
    if arguments.replica:
        torch.set_num_threads(1)
        speeds = replica_speed(arguments.batches)
        report("sampler", speeds, bounded(speeds, {"sampler_efficiency": 1.0}, {}), machine=False)
        return
    found = {name: compare(arguments, name) for name in arguments.workloads}
    report("sampler", {"workloads": found}, grid(found), machine=False)


if __name__ == "__main__":
    main()
