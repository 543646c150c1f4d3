"""A model of 0.5 or 1.4 billion random weights on one device: `python -m bench.large`.

Samples and learns as `bench.ours` does. The last line is one JSON object: tokens a second, peak memory, and what
`agentjet doctor` estimates for both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from agentjet.compute.memory import model_size, rank_need, replica_need, sampling_rate
from agentjet.config import SamplerConfig
from bench import ours
from bench.machine import copy_bandwidth, product_rate
from bench.random_model import SIZES, make_model
from bench.workload import Workload

VOCABULARY = 49_152
CONCURRENT = 64
PROMPT = 40  # About the tokens of a prompt


def measure(folder: Path, workload: Workload) -> dict[str, Any]:
    """Measured figures of a step, beside the estimates of `agentjet doctor`."""
    step = ours.run(workload, "bfloat16")
    size = model_size(folder)
    learner = rank_need(size, ranks=1, sharding="gathered")
    sampler = replica_need(size, cache_tokens=SamplerConfig().limits.cache_tokens)
    bandwidth = copy_bandwidth()
    bound = sampling_rate(
        sampler,
        size,
        bandwidth=bandwidth,
        arithmetic=product_rate(),
        concurrent=CONCURRENT,
        context=PROMPT + workload.new_tokens // 2,
    )
    return {
        "parameters": size.num_parameters,
        "sampled_tokens_s": round(step["sampled_tokens"] / step["sampling_s"], 1),
        "sampled_tokens_s_bound": round(bound, 1),
        "learned_tokens_s": round(step["forest_tokens"] / step["learning_s"], 1),
        "peak_gb": round(step["peak_mb"] * 2**20 / 1e9, 2),
        "estimated_gb_without_activations": round((learner.total + sampler.cache) / 1e9, 2),
        "bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "step": step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*SIZES], default="1.4B")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        folder = make_model(Path(path), VOCABULARY, size=arguments.size)
        workload = Workload(str(folder), new_tokens=arguments.new_tokens, steps=2, threads=arguments.threads)
        figures = measure(folder, workload)
    print(json.dumps({"bench": "large", "size": arguments.size, **figures}))


if __name__ == "__main__":
    main()
