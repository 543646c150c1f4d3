"""The models that people train: their tools, their reasoning, their trees: `python -m bench.models`.

* `families`: each family of `tests/templates/families.json` writes calls and reasoning in its own syntax, token by
  token. `tools_work` counts those whose calls are read, in parallel and streamed; `silent` those whose tools the server
  offers and whose calls it does not read. `oracle_rows` are families that a real template or library agrees with, of
  those that are installed (TRL, mistral-common).
* `trees`: architectures of `tests/compute/architectures.py`, tiny and in float32. Errors are those of the tree against
  one row per call by the model itself. `noisy_architectures` are those of which two ways to compute the rows differ by
  more than 1e-6: one by one, padded together, and in float64. Their worst error stands beside that difference.
  `recompute` counts tokens of a batch of 12 turns in micro-batches, of architectures that learn on trees.
* `speed`: CPU seconds of a learning step on 12 turns of 8 completions, one row per call over the tree.
* `sampling`: CPU seconds of 64 completions of a hybrid, one after the other over all at once.
* `routes`: choices of experts that differ in bfloat16 between sampling and learning: the worst of `bench.routes`.

Prints tables, then one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from agentjet.compute.learner import PolicyLearner
from agentjet.compute.passes import pass_of
from agentjet.rendering import Renderer
from agentjet.timeline import build_forest
from agentjet.types import SamplingParams
from bench.machine import bounded, environment, grid, last_json, report, run_contender
from bench.merge_layouts import OWN, SHORT, Run, measure, turns
from bench.random_model import KINDS, make_kind
from bench.routes import figures
from bench.sampler import our_sampler
from tests.compute.architectures import EVERY, make_architecture
from tests.compute.baseline import Baseline, Double, episodes, in_double, learner_gradient, policy_gradient, relative
from tests.compute.conftest import make_policy
from tests.rendering.families import (
    ENTRIES,
    FAMILIES,
    model_info,
    oracle_agrees,
    separates_reasoning,
    tools_of,
)

LEAST = {"trees_learn": 60, "trees_sample": 60, "oracle_rows": 20, "hybrid_sampling": 6}
LEAST |= {f"speedup_{kind}": 4 for kind in ("window", "hybrid", "mla", "moe")}
MOST = {
    "silent": 0,
    "route_mismatch": 0,
    "grad_rel_err": 1e-6,
    "noisy_grad_rel_err": 5e-5,
    "logprob_err": 1e-5,
    "recompute": 1.02,
}
Found = tuple[dict[str, Any], list[Table]]


# ---- families --------------------------------------------------------------------------------------------------------


def families() -> Found:
    with tempfile.TemporaryDirectory() as folder:
        renderers = {name: Renderer(model_info(Path(folder) / name, name)) for name in ENTRIES}
        read = {name: (tools_of(one), separates_reasoning(one)) for name, one in renderers.items()}
        oracles = {family: oracle_agrees(family, Path(folder)) for family in FAMILIES}
    rows = {}
    for family, about in FAMILIES.items():
        tools, reasoning = read[about["template"]]
        rows[family] = {"tools": tools, "reasoning": reasoning, "oracle agrees": oracles[family]}
    tools = [row["tools"] for row in rows.values() if row["tools"] != "none"]
    compared = [agrees for agrees in oracles.values() if agrees is not None]
    figures = {
        "tools_work": tools.count("work"),
        "families": len(tools),
        "silent": tools.count("silent"),
        "reasoning_works": sum(row["reasoning"] is True for row in rows.values()),
        "reasoning_families": sum(row["reasoning"] is not None for row in rows.values()),
        "oracle_rows": sum(compared) if compared else None,
    }
    return figures, [grid(rows)]


# ---- trees -----------------------------------------------------------------------------------------------------------


def tree(kind: str) -> dict[str, Any]:
    """Returns what an architecture shares, and the errors of its tree; of rows it has no errors."""
    with tempfile.TemporaryDirectory() as folder:
        policy = make_policy(make_architecture(Path(folder) / "model", kind))
    batch = build_forest(turns(SHORT.shrunk(5), 12, vocabulary=policy.vocabulary))
    way = pass_of(policy)
    computed = sum(way.num_computed(piece) for piece, _ in way.pieces(batch, 512))
    found = {"learn": policy.learns_forests, "sample": policy.info.shares_prefixes}
    found |= {"recompute": computed / batch.num_nodes}
    if not policy.learns_forests:
        return found
    rows, recipe = episodes(policy), policy_gradient()
    forest = build_forest(rows)
    rowwise, together = (Baseline(policy, rows, None, together=together) for together in (False, True))
    gradient = rowwise.gradient(recipe)
    found |= {
        "grad_rel_err": relative(learner_gradient(policy, forest, recipe, None), gradient),
        "of_rows": relative(together.gradient(recipe), gradient),
        "logprob_err": float((PolicyLearner(policy).logprobs(forest) - rowwise.logprobs).abs().max()),
    }
    if found["grad_rel_err"] > MOST["grad_rel_err"]:
        in_double(policy)
        with Double():
            exact = Baseline(policy, rows, None).gradient(recipe)
        found["of_rows"] = max(found["of_rows"], relative(gradient, exact))
    return found


def trees() -> Found:
    torch.set_num_threads(1)
    rows = {kind: tree(kind) for kind in EVERY}
    learned = [row for row in rows.values() if row["learn"]]
    # Where the rows themselves differ by more than the bound, the tree cannot be closer to them.
    noisy = [row for row in learned if row["of_rows"] > MOST["grad_rel_err"]]
    noisiest = max(noisy, key=lambda row: row["grad_rel_err"], default={})
    figures = {
        "architectures": len(rows),
        "trees_learn": len(learned),
        "trees_sample": sum(row["sample"] for row in rows.values()),
        "grad_rel_err": max(row["grad_rel_err"] for row in learned if row not in noisy),
        "noisy_architectures": len(noisy),
        "noisy_grad_rel_err": noisiest.get("grad_rel_err"),
        "noisy_of_rows": noisiest.get("of_rows"),
        "logprob_err": max(row["logprob_err"] for row in learned),
        "recompute": max(row["recompute"] for row in learned),
    }
    return figures, [grid(rows, "learn", "sample", "recompute", "grad_rel_err", "of_rows", "logprob_err")]


# ---- speed -----------------------------------------------------------------------------------------------------------

VOCABULARY = 2000
PROMPTS, REPEATS, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 40, 12


def step(kind: str, mode: str) -> float:
    """CPU seconds of a learning step."""
    with tempfile.TemporaryDirectory() as folder:
        make_kind(Path(folder), kind, VOCABULARY)
        rows = turns(SHORT, 12, vocabulary=VOCABULARY)
        return min(measure(mode, rows, Path(folder), Run(threads=1, steps=1 if mode == OWN else 2)).cpu_seconds)


def sampled(at_once: str) -> float:
    """CPU seconds of all completions of the hybrid, after a first one."""
    with tempfile.TemporaryDirectory() as folder:
        make_kind(Path(folder), "hybrid of SmolLM2's size", 49_152)
        sampler = our_sampler(folder, 1, max_concurrent=64, cache_tokens=65_536)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(20, 40_000, PROMPT_TOKENS).astype(np.int32) for _ in range(PROMPTS) for _ in range(REPEATS)]
    prompts = [prompts[i - i % REPEATS] for i in range(len(prompts))]

    def sample(numbers: range, new_tokens: int = NEW_TOKENS) -> None:
        for i in numbers:
            sampler.submit(i, prompts[i], SamplingParams(max_tokens=new_tokens, seed=i))
        while not sampler.is_idle:
            sampler.step()

    sample(range(1), 2)
    sampler.invalidate()
    began = time.process_time()
    for numbers in [range(len(prompts))] if at_once else [range(i, i + 1) for i in range(len(prompts))]:
        sample(numbers)
    return time.process_time() - began


CHILDREN: dict[str, Callable[..., float]] = {"step": step, "sampled": sampled}


def child(*arguments: str) -> float:
    """A figure of a process of its own, on one thread."""
    done = run_contender(" ".join(arguments), ["bench.models", "--child", *arguments], environment(1))
    if done.failed:
        raise SystemExit(f"{arguments} failed:\n{done.errors[-3000:]}")
    return float(last_json(done.output))


def speed() -> Found:
    rows: dict[str, dict[str, float]] = {}
    for kind in [kind for kind in KINDS if "size" not in kind]:
        calls, forest = (child("step", kind, mode) for mode in (OWN, "forest"))
        rows[kind] = {"one row per call, CPU s": calls, "tree, CPU s": forest, "speed-up": calls / forest}
    return {f"speedup_{kind}": round(row["speed-up"], 2) for kind, row in rows.items()}, [grid(rows)]


def sampling() -> Found:
    alone, batched = (child("sampled", at_once) for at_once in ("", "all"))
    figures = {"hybrid_alone_s": round(alone, 1), "hybrid_batched_s": round(batched, 1)}
    return {**figures, "hybrid_sampling": round(alone / batched, 2)}, []


PARTS = {"families": families, "trees": trees, "speed": speed, "sampling": sampling, "routes": lambda: (figures(), [])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--child", nargs="+", metavar="WORD", help="used by the bench itself")
    arguments = parser.parse_args()
    if arguments.child:
        name, *words = arguments.child
        print(json.dumps(CHILDREN[name](*words)))
        return
    found: dict[str, Any] = {}
    tables: list[Table] = []
    for part in arguments.only:
        more, shown = PARTS[part]()
        found |= more
        tables += shown
    least = {
        **LEAST,
        "tools_work": found.get("families", 0) - 1,
        "reasoning_works": found.get("reasoning_families", 0),
    }
    report("models", found, *tables, bounded(found, least, MOST))


if __name__ == "__main__":
    main()
