"""One contender of `bench.gpu`: `python -m bench.contenders NAME MODEL`. The last line is one JSON object.

Each is a process, so that neither the memory nor the compiled code of another one counts:

* `ceilings`: bytes a second of a copy, and operations a second of a product of bfloat16 matrices;
* `sampler`: the embedded sampler with `--rows` completions at a time, and what fills a step on the GPU, with compiled
  decoder layers (`compile_seconds` is null if none are compiled) and without them;
* `vllm`: vLLM's own API, with its defaults (`alone`), as a replica uses it, or as that with a seed a request; to be run
  by the interpreter of the samplers;
* `learn`: steps of our learner, or of `transformers` with packed rows, alone, with Liger's kernels, or compiled. Rows
  share no prefix, so that all compute the same tokens;
* `replica`: a replica with vLLM: seconds of a publish, log-probabilities beside the learner's, tokens a second.

A contender on a slow path ends with exit code 1 and a sentence, and one without its library with exit code 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from agentjet.config import ComputeConfig, JobConfig, ModelConfig, SamplerConfig
from agentjet.types import ModelInfo, SamplingParams
from bench.machine import copy_bandwidth, peak_memory, product_rate, require_fast_path, synchronise
from bench.sampler import SHORT, our_sampler, prompts

if TYPE_CHECKING:
    from agentjet.compute.sampler import ModelSampler

Figures = dict[str, Any]
Step = Callable[[int], object]
Result = TypeVar("Result")
CONTEXT, VOCABULARY = 1024, 40_000
PEAKS = {"H100": 989e12, "H200": 989e12}  # bfloat16 FLOP/s without sparsity, by NVIDIA's data sheets
REPLICA_ONLY = ("logprobs_mode", "max_logprobs", "async_scheduling")  # Settings that vLLM alone would not have
KERNELS = {"attention": ("flex", "attention"), "products": ("gemm", "nvjet", "cutlass", "xmma")}  # By parts of names


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def config(given: argparse.Namespace) -> ModelConfig:
    threads = 1 if given.small else 8
    return ModelConfig.model_validate(
        {"name": given.model, "dtype": "bfloat16", "threads": threads, "context_length": CONTEXT}
    )


def sampler_config(given: argparse.Namespace) -> SamplerConfig:
    rows = max(given.rows)
    return SamplerConfig(max_concurrent=rows, cache_tokens=max(4 * CONTEXT, rows * (SHORT + given.new + 128)))


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds of some work, with that of the GPU, and its result."""
    synchronise()
    began = time.perf_counter()
    result = work()
    synchronise()
    return time.perf_counter() - began, result


def ceilings(given: argparse.Namespace) -> Figures:
    name = torch.cuda.get_device_name() if device() == "cuda" else "cpu"
    return {"device": name, "copy_tb_s": copy_bandwidth() / 1e12, "product_tflop_s": product_rate() / 1e12}


# ---- sampling --------------------------------------------------------------------------------------------------------


def sampler(given: argparse.Namespace) -> Figures:
    """With compiled decoder layers, and at `uncompiled` without them."""
    from agentjet.compute import decode_graphs

    rows, cache_tokens = given.rows[0], int(sampler_config(given).cache_tokens)
    ours = our_sampler(given.model, config(given).threads, max_concurrent=rows, cache_tokens=cache_tokens)
    figures = sampler_figures(given, ours)
    graph = ours._graphs.of(ours.policy, rows) if ours._graphs is not None else None
    compiled = {"compile_seconds": graph.compile_seconds if graph is not None else None}
    decode_graphs.compiler_of = lambda device: None
    plain = type(ours)(ours.policy, rows, cache_tokens)
    return {"rows": rows, **compiled, **figures, "uncompiled": sampler_figures(given, plain)}


def sampler_figures(given: argparse.Namespace, ours: ModelSampler) -> Figures:
    rows, ids, seconds = given.rows[0], itertools.count(), []

    def submit(seed: int) -> None:
        ours.invalidate()
        for prompt in prompts([SHORT] * rows, seed):
            id = next(ids)
            ours.submit(id, np.array(prompt, np.int32), SamplingParams(max_tokens=given.new, seed=id))

    def drain() -> None:
        while not ours.is_idle:
            ours.step()

    for seed in range(3):
        submit(seed)
        seconds.append(timed(drain)[0])
    require_fast_path(ours.policy, ours)
    submit(3)
    while not ours.is_idle and len(ours.step()) < rows:  # Prompts
        pass
    step = timed(lambda: [ours.step() for _ in range(10)])[0] / 10
    kernels = step_kernels(ours) if device() == "cuda" else {}
    return {"tokens_s": rows * given.new / min(seconds[1:]), "step_ms": 1000 * step, **kernels}


def step_kernels(ours: ModelSampler, steps: int = 5) -> Figures:
    """Milliseconds of the GPU in a step, by kind of kernel, and the number of kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            ours.step()
        synchronise()
    events = recorded.key_averages()

    def milliseconds(*parts: str) -> float:
        return sum(e.self_device_time_total for e in events if any(p in e.key.lower() for p in parts)) / 1000 / steps

    kinds = {f"{kind}_ms": milliseconds(*parts) for kind, parts in KERNELS.items()}
    return {"gpu_ms": milliseconds(""), **kinds, "kernels": sum(e.count for e in events) / steps}


def vllm(given: argparse.Namespace) -> Figures:
    needs("vllm", "run it by the interpreter of the samplers (`agentjet cluster install`)")
    from agentjet.compute.vllm.engine import engine_settings, set_environment

    set_environment(config(given), ComputeConfig())
    from vllm import LLM
    from vllm import SamplingParams as EngineParams
    from vllm.inputs import tokens_input

    info = ModelInfo("large", given.model, "", CONTEXT, (), dtype="bfloat16")
    settings = engine_settings(config(given), info, sampler_config(given).limits, ComputeConfig())
    alone = given.how == "alone"
    engine = LLM(**{key: value for key, value in settings.items() if not (alone and key in REPLICA_ONLY)})
    rates = {}
    for rows in given.rows:
        seconds = []
        for run in range(3):
            wanted = [
                EngineParams(
                    max_tokens=given.new,
                    seed=i if given.how == "seeds" else None,
                    logprobs=None if alone else 0,
                    detokenize=False,
                    ignore_eos=True,
                )
                for i in range(rows)
            ]
            inputs = [tokens_input(prompt) for prompt in prompts([SHORT] * rows, run)]
            taken, outputs = timed(partial(engine.generate, inputs, wanted, use_tqdm=False))
            seconds.append(taken)
            assert all(len(one.outputs[0].token_ids) == given.new for one in outputs)
        rates[str(rows)] = rows * given.new / min(seconds[1:])
    return {"how": given.how, "tokens_s": rates}


# ---- learning --------------------------------------------------------------------------------------------------------


def learn(given: argparse.Namespace) -> Figures:
    """MFU is 6 x parameters x tokens a second over the peak of the device (Chowdhery et al. 2022, appendix B, without
    attention)."""
    num_rows, length, steps = (4, 64, 1) if given.small else (32, 1024, 4)
    tokens = np.random.default_rng(0).integers(20, VOCABULARY, (num_rows, length)).astype(np.int32)
    step, figures = (our_step if given.how == "ours" else packed_step)(given, tokens)
    seconds = [timed(partial(step, number))[0] for number in range(2 + steps)]
    rate = tokens.size / statistics.median(seconds[2:])  # The first two compile and allocate.
    name = torch.cuda.get_device_name() if device() == "cuda" else ""
    peak = next((flops for card, flops in PEAKS.items() if card in name), None)
    mfu = peak and 6 * figures["parameters"] * rate / peak
    return {"how": given.how, "tokens_s": rate, "mfu": mfu, "peak_gb": peak_memory() / 1e9, **figures}


def our_step(given: argparse.Namespace, tokens: np.ndarray) -> tuple[Step, Figures]:
    from agentjet.compute.learner import PolicyLearner
    from agentjet.compute.memory import model_size, rank_need
    from agentjet.compute.model import load_policy
    from agentjet.compute.rank import make_deterministic
    from agentjet.timeline.forest import build_forest, call_row
    from tests.compute.direct import learn_directly

    make_deterministic()
    policy = load_policy(config(given))
    require_fast_path(policy)
    num = tokens.shape[1] - 1
    logprobs, versions = np.full(num, -10.8, np.float32), np.zeros(num, np.int32)
    forest = build_forest(
        [call_row(row, logprobs, versions, (-1.0) ** i, 1.0, sequence=i) for i, row in enumerate(tokens)]
    )
    learner, job = PolicyLearner(policy), JobConfig(micro_batch_tokens=given.micro)
    size = model_size(Path(given.model))
    estimate = rank_need(size, ranks=1, sharding="gathered").total / 1e9
    figures = {"parameters": size.num_parameters, "estimated_gb_without_activations": estimate}
    return lambda number: learn_directly(learner, forest, job, number), figures


def packed_step(given: argparse.Namespace, tokens: np.ndarray) -> tuple[Step, Figures]:
    """A step of `transformers`: full rows without padding, masters in float32, weights in bfloat16, as ours."""
    from transformers import AutoModelForCausalLM

    if given.how == "liger":
        needs("liger_kernel", "pip install liger-kernel")
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = loaded.to(device()).train()
    if given.how == "compiled":
        for layer in model.model.layers:
            layer.compile(dynamic=False, backend="aot_eager" if given.small else "inductor")
    weights = list(model.parameters())
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-6, fused=True)
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device())

    def step(number: int) -> None:
        for part in ids.split(max(1, given.micro // ids.shape[1])):
            loss = model(input_ids=part, labels=part, use_cache=False).loss
            (loss * len(part) / len(ids)).backward()
            for weight, master in zip(weights, masters, strict=True):
                master.grad = weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
                weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)

    return step, {"parameters": model.num_parameters()}


# ---- a replica -------------------------------------------------------------------------------------------------------


def replica(given: argparse.Namespace) -> Figures:
    from agentjet.compute.model import load_policy
    from tests.cluster.local_replica import LocalReplica

    policy = load_policy(config(given))
    require_fast_path(policy)
    with tempfile.TemporaryDirectory() as folder, LocalReplica(given.python, log := Path(folder) / "log") as running:
        try:
            return replica_figures(given, policy, running)
        finally:
            print(log.read_text()[-6000:], file=sys.stderr)


def replica_figures(given: argparse.Namespace, policy: Any, running: Any) -> Figures:
    """Seconds of three publishes, each written and then adopted; differences of log-probabilities; tokens a second."""
    from transformers import AutoModelForCausalLM

    from agentjet.compute.passes import score
    from tests.cluster.local_replica import POLICY, Wanted

    info, compute = dataclasses.replace(policy.info, end_tokens=()), ComputeConfig(colocated=given.colocated)
    running.load(config(given), info, sampler_config(given), compute)
    loaded: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16)
    published, publishes = loaded.to(device()).eval(), []  # Without AgentJet's attention
    for version in range(3):
        if given.colocated and version:
            running.do(running.peer.ask("suspend", POLICY))
        written, publication = timed(partial(running.publish, published, version))
        publishes.append({"written_s": written, "adopted_s": timed(partial(running.adopt, publication))[0]})

    def sample(rows: int, seed: int, **options: Any) -> tuple[float, dict[int, Any]]:
        params = SamplingParams(max_tokens=given.new, piece_tokens=16, **options)
        texts = enumerate(prompts([SHORT] * rows, seed))
        wanted = {i: Wanted(prompt, dataclasses.replace(params, seed=i)) for i, prompt in texts}
        return timed(partial(running.sample, wanted))

    _, found = sample(8, 0)
    differences = np.concatenate(
        [
            np.array([one.logprob for one in score(policy, tokens, 0)][-given.new :]) - found[i].logprobs
            for i, prompt in enumerate(prompts([SHORT] * 8))
            for tokens in [np.array([*prompt, *found[i].tokens], np.int32)]
        ]
    )
    rates = {str(rows): rows * given.new / min(sample(rows, run)[0] for run in range(3)) for rows in given.rows}
    restricted = given.rows[0] * given.new / sample(given.rows[0], 0, top_p=0.95)[0]
    return {
        "publishes": publishes,
        "logprob_err": float(np.abs(differences).max()),
        "mismatch_kl": float((np.exp(differences) - differences - 1).mean()),
        "tokens_s": rates,
        "restricted_tokens_s": restricted,
    }


def needs(package: str, way_out: str) -> None:
    """Ends the process with exit code 2 if a package is missing."""
    if importlib.util.find_spec(package) is None:
        print(f"This contender needs {package}: {way_out}.", file=sys.stderr)
        raise SystemExit(2)


CONTENDERS = {contender.__name__: contender for contender in (ceilings, sampler, vllm, learn, replica)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("model", nargs="?", default="", help="a folder of `bench.random_model`")
    parser.add_argument("--rows", type=int, nargs="+", default=[64], help="completions at a time")
    parser.add_argument("--how", default="ours", help="of vllm: alone, replica, seeds; of learn: ours, packed, ...")
    parser.add_argument("--micro", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--python", default="", help="the interpreter of the samplers")
    parser.add_argument("--colocated", action="store_true", help="the replica is suspended before each publish")
    parser.add_argument("--small", action="store_true", help="in miniature")
    given = parser.parse_args()
    given.new = 16 if given.small else 128
    if given.small:
        given.rows, given.micro = [max(2, rows // 64) for rows in given.rows], given.micro // 64
    print(json.dumps({"bench": given.name, **CONTENDERS[given.name](given)}))


if __name__ == "__main__":  # vLLM's processes import this module again.
    main()
