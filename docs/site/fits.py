"""What fits on which GPU: `python -m bench.fits` prints the table of docs/cluster.md.

Every cell is computed by `compute/memory.py`, as in `agentjet doctor`. No model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentjet.cli.machine import GB
from agentjet.compute.memory import (
    REPLICA_USABLE,
    USABLE,
    ModelSize,
    fewest_ranks,
    rank_need,
    replica_need,
    sampling_rate,
    size_from_config,
)
from agentjet.config import SamplerLimits

CONCURRENT, CONTEXT = 64, 1_000
LIMITS = SamplerLimits(CONCURRENT, 65_536)
MOST_PARALLEL = 8
"""GPUs of one machine, which a replica cannot exceed."""
ESTIMATED = "(e)"
HEADER = (
    "| model | GPU | embedded: one GPU | ranks, at least | memory of a rank | GPUs of a replica | memory of each | "
    "tokens/s of a replica |\n|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's bytes of memory, the bytes that it reads in a second, and its bfloat16 FLOP/s (data sheets)."""

    name: str
    memory: int
    bandwidth: float
    arithmetic: float


GPUS = (
    Gpu("24 GB", 24 * GB, 1.0e12, 165e12),
    Gpu("80 GB", 80 * GB, 3.35e12, 989e12),
    Gpu("141 GB", 141 * GB, 4.8e12, 989e12),
)


def _model(
    hidden: int, layers: int, inner: int, heads: int, kv_heads: int, vocabulary: int, *, tied: bool = False
) -> ModelSize:
    return size_from_config(
        {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocabulary,
            "tie_word_embeddings": tied,
        }
    )


MODELS = {
    "SmolLM2-135M": _model(576, 30, 1536, 9, 3, 49_152, tied=True),
    "Qwen2.5-1.5B": _model(1536, 28, 8960, 12, 2, 151_936, tied=True),
    "Llama-3.1-8B": _model(4096, 32, 14_336, 32, 8, 128_256),
    "Qwen2.5-32B": _model(5120, 64, 27_648, 40, 8, 152_064),
    "Llama-3.1-70B": _model(8192, 80, 28_672, 64, 8, 128_256),
}


def table() -> str:
    """Returns the table in Markdown: all weights learn in bfloat16."""
    return "\n".join([HEADER, *(_row(name, size, gpu) for name, size in MODELS.items() for gpu in GPUS)])


def _row(name: str, size: ModelSize, gpu: Gpu) -> str:
    worker = rank_need(size, ranks=1, sharding="gathered").total + replica_need(size, LIMITS).cache
    fits = "fits" if worker <= USABLE * gpu.memory else "no"
    cells = [name, gpu.name, f"{fits}, {_gigabytes(worker)}", *_learner(size, gpu), *_sampler(size, gpu)]
    return f"| {' | '.join(cells)} |"


def _learner(size: ModelSize, gpu: Gpu) -> list[str]:
    """The fewest ranks, and the memory of each."""
    if rank_need(size, ranks=1, sharding="gathered").total <= USABLE * gpu.memory:
        return ["1, gathered", _gigabytes(rank_need(size, ranks=1, sharding="gathered").total)]
    ranks = fewest_ranks(size, gpu.memory, sharding="sharded")
    if ranks is None:
        return ["none", "-"]
    return [f"{ranks}, sharded", _gigabytes(rank_need(size, ranks=ranks, sharding="sharded").total)]


def _sampler(size: ModelSize, gpu: Gpu) -> list[str]:
    """The fewest GPUs of a replica, the memory of each, and an upper bound of its tokens a second."""
    count = 1
    while (need := replica_need(size, LIMITS, tensor_parallel=count)).total > (REPLICA_USABLE * gpu.memory):
        count *= 2
        if count > MOST_PARALLEL:
            return ["none", "-", "-"]
    whole = replica_need(size, LIMITS)
    rate = sampling_rate(
        whole,
        size,
        bandwidth=count * gpu.bandwidth,
        arithmetic=count * gpu.arithmetic,
        concurrent=CONCURRENT,
        context=CONTEXT,
    )
    return [str(count), _gigabytes(need.total), f"{round(rate, -2 if rate < 10_000 else -3):,.0f} {ESTIMATED}"]


def _gigabytes(count: int) -> str:
    return f"{count / GB:.1f} GB {ESTIMATED}"


if __name__ == "__main__":
    print(table())
