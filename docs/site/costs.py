"""The computed tables of `docs/costs.md`: `make docs` writes them, and a test compares them."""

from __future__ import annotations

from agentjet.compute.memory import (
    ALL_WEIGHTS,
    Learning,
    ModelSize,
    adapter_parameters,
    gathered_need,
    replica_need,
    sampling_rate,
    size_from_config,
)
from agentjet.config import SamplerLimits

MARK = "<!-- made by `make docs` -->"
SIZES = {
    "0.5B": (896, 24, 14, 2, 4_864, True),
    "1.5B": (1_536, 28, 12, 2, 8_960, True),
    "3B": (2_048, 36, 16, 2, 11_008, True),
    "7B": (3_584, 28, 28, 4, 18_944, False),
    "14B": (5_120, 48, 40, 8, 13_824, False),
    "32B": (5_120, 64, 40, 8, 27_648, False),
}
"""Hidden size, layers, heads, key heads, width of the MLP and tied embeddings of the Qwen2.5 models."""
RANK = 16
PEAK, UTILISATION, BANDWIDTH = 989e12, 0.52, 3.35e12
"""bfloat16 FLOP/s of an H100 (data sheet), the share that learning reached on an H200, and bytes a second."""
SAMPLER_SHARE = 0.5
"""Assumed share of the limit that a sampler reaches."""
BATCHES, EPISODES, GROUP, TURNS, PROMPT, CONTEXT, SAMPLED = 200, 64, 8, 8, 1_000, 300, 300
LEARNED = BATCHES * (EPISODES // GROUP * PROMPT + EPISODES * TURNS * (CONTEXT + SAMPLED))
"""Distinct tokens of the job: a group shares its prompt."""


def config(name: str) -> dict[str, int | bool]:
    hidden, layers, heads, kv_heads, inner, tied = SIZES[name]
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": 151_936,
        "tie_word_embeddings": tied,
    }


def gigabytes(num: float) -> str:
    return f"{num / 1e9:.3g} GB"


def hours(seconds: float) -> str:
    return f"{seconds / 3_600:.1f} h"


def memory_row(name: str, size: ModelSize) -> str:
    adapter = Learning(trained=adapter_parameters(size, config(name), RANK))
    whole, part = (gathered_need(size.num_parameters, how, ranks=1).total for how in (ALL_WEIGHTS, adapter))
    figures = (whole, part, 2 * size.num_parameters, 2 * 1_000 * size.cache_values)
    return f"| {name} | {' | '.join(map(gigabytes, figures))} |"


def time_row(name: str, size: ModelSize) -> str:
    learning = PEAK * UTILISATION / (6 * size.num_parameters)
    context = PROMPT + TURNS * (CONTEXT + SAMPLED) // 2
    need = replica_need(size, SamplerLimits(EPISODES, EPISODES * context))
    limit = sampling_rate(need, size, bandwidth=BANDWIDTH, arithmetic=PEAK, concurrent=EPISODES, context=context)
    sampling = SAMPLER_SHARE * limit
    sampled = BATCHES * EPISODES * TURNS * SAMPLED
    return (
        f"| {name} | {learning:,.0f} | {sampling:,.0f} | {hours(LEARNED / learning)} | {hours(sampled / sampling)} "
        f"| {hours(LEARNED / learning + sampled / sampling)} |"
    )


def tables() -> str:
    """Returns the computed tables, as Markdown."""
    sizes = {name: size_from_config(config(name)) for name in SIZES}
    return "\n".join(
        (
            "## Memory",
            "",
            f"Computed, as `agentjet doctor` does it for a folder. An adapter has rank {RANK} on all linear layers.",
            "",
            "| model | learn all weights | learn an adapter | sampler's copy of the weights | cache of 1,000 tokens |",
            "|---|---|---|---|---|",
            *(memory_row(name, size) for name, size in sizes.items()),
            "",
            "## Time",
            "",
            "Computed at the speed of one H100 that learns, then samples. It is time only: *Memory* shows which models "
            f"one GPU can hold, and which need an adapter or several GPUs. The job: {BATCHES} batches of {EPISODES} "
            f"episodes in groups of {GROUP}; {TURNS} turns, each with {CONTEXT} tokens of tool output and {SAMPLED} "
            f"sampled ones, after a prompt of {PROMPT:,} tokens. That is {LEARNED / 1e6:.0f} million tokens to learn, "
            "because groups share prompts. Time for tools, compiling and updates comes on top.",
            "",
            "| model | learned tokens a second | sampled tokens a second | learning | sampling | together |",
            "|---|---|---|---|---|---|",
            *(time_row(name, size) for name, size in sizes.items()),
            "",
        )
    )


if __name__ == "__main__":
    from pathlib import Path

    page = Path("docs/costs.md")
    page.write_text(page.read_text(encoding="utf-8").partition(MARK)[0] + f"{MARK}\n\n{tables()}", encoding="utf-8")
