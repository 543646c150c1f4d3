"""The attention of sampling steps. Pinned here:

1. both plans compute the definition for windows, chunks, caps, sinks, and keys and values of different widths, wherever
   a prompt is cut and in whatever blocks a row lies; a table of blocks that is too short would show;
2. models of each kind of attention sample what one row per call gives, beyond their windows, and compute each token in
   its context once;
3. a plan that is wrong beyond a window is not used, and the log has the layer and the difference.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from agentjet.compute import cached_attention, sampler
from agentjet.compute.attention import PLAIN, AttentionKind, LayerCall
from agentjet.compute.cache import BLOCK, CacheRow, KeyValueCache
from agentjet.compute.cached_attention import PagedPlan, StepPlan, paged_inputs, step_inputs
from agentjet.compute.policy import KeySizes
from agentjet.compute.sampler import ModelSampler
from agentjet.timeline.forest import call_row
from agentjet.types import SamplingParams
from tests.compute.architectures import ATTENTION, make_architecture
from tests.compute.baseline import row_logprobs
from tests.compute.conftest import make_endless, make_policy, run, tokens
from tests.compute.every_architecture import make_any

CPU = torch.device("cpu")
HEADS, KEY_HEADS, WIDTH, NARROW = 6, 2, 16, 10
KINDS = [
    PLAIN,
    AttentionKind(window=70),
    AttentionKind(window=200),
    AttentionKind(chunk=150),
    AttentionKind(window=40, chunk=60),
    AttentionKind(window=150, cap=2.0),
    AttentionKind(cap=2.0),
]
SINKS = torch.linspace(-2.0, 2.0, HEADS)
LENGTHS = (500, 3, 129, 300)
STEPS: list[list[tuple[int, int]]] = [
    [(0, 400), (1, 2), (2, 100)],
    [(0, 1), (1, 1), (2, 1)],
    [(2, 1), (0, 60), (3, 299)],
    [(0, 1), (2, 1), (3, 1)],
]
"""Numbers of tokens by row: prompts that are cut, single tokens, and both."""


def by_the_table(*given: Any, block_mask: BlockMask, **settings: Any) -> Any:
    """`flex_attention` that reads the blocks of the table only, as it does when it is compiled."""
    listed = block_mask.to_dense()

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return block_mask.mask_mod(batch, head, query, key) & (listed[batch, 0, query // BLOCK, key // BLOCK] != 0)

    table = BlockMask.from_kv_blocks(
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=block_mask.seq_lengths,
        compute_q_blocks=False,
    )
    return flex_attention(*given, block_mask=table, **settings)


def defined(qkv: tuple[Tensor, Tensor, Tensor], start: int, kind: AttentionKind, sinks: Tensor | None) -> Tensor:
    """Returns a softmax over what the last tokens of a row see; `start` is the first of them."""
    query, key, value = (x.transpose(0, 1) for x in qkv)
    positions = np.arange(key.shape[1])
    own = positions[start:]
    seen = positions <= own[:, None]
    seen &= positions >= np.array([kind.lowest(int(at)) for at in own])[:, None]
    scores = query @ key.repeat_interleave(HEADS // KEY_HEADS, 0).mT * 0.3
    scores = kind.cap * torch.tanh(scores / kind.cap) if kind.cap else scores
    scores = scores.masked_fill(~torch.from_numpy(seen), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(own), 1)], -1)
    share = scores.softmax(-1)[..., : len(positions)]
    return (share @ value.repeat_interleave(HEADS // KEY_HEADS, 0)).transpose(0, 1)


def paged_by_row(rows: list[CacheRow], cache: KeyValueCache) -> PagedPlan:
    """The plan of a graph, with rows of padding."""
    plan = PagedPlan(cache, 8, 8, cache.num_blocks)
    plan.fill([(row, 1) for row in rows])
    return plan


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("plan_of", [StepPlan, PagedPlan], ids=["cpu", "cuda"])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_step_computes_the_definition(
    kind: AttentionKind, sinks: Tensor | None, plan_of: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_attention, "flex_attention", by_the_table)
    cache = KeyValueCache({5: KeySizes(KEY_HEADS, WIDTH, NARROW)}, 16 * BLOCK, torch.float32, CPU)
    for stored in cache.stored:
        stored.zero_()  # In eager mode all blocks are read.
    generator = torch.Generator().manual_seed(0)
    rows, tensors = [], []
    for number, length in enumerate(LENGTHS):
        row = CacheRow(np.full(length, number, np.int32))
        cache.extend(row, BLOCK)  # The blocks of a row are not neighbours.
        rows.append(row)
        shapes = (length, HEADS, WIDTH), (length, KEY_HEADS, WIDTH), (length, KEY_HEADS, NARROW)
        tensors.append([torch.randn(shape, generator=generator) for shape in shapes])
    for step in STEPS:
        spans = [(rows[number], count) for number, count in step]
        for row, count in spans:
            cache.extend(row, row.filled + count)
        if plan_of is StepPlan:
            plan: StepPlan | PagedPlan = step_inputs(spans, cache)[2]
        elif all(count == 1 for _, count in spans):
            plan = paged_by_row([row for row, _ in spans], cache)
        else:
            plan = paged_inputs(spans, cache)[2]
        inputs = [
            torch.cat([tensors[n][i][rows[n].filled : rows[n].filled + count] for n, count in step]) for i in range(3)
        ]
        num_tokens = len(inputs[0])
        padding = plan.tokens.shape[0] - num_tokens if isinstance(plan, PagedPlan) else 0
        inputs = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) for x in inputs]
        found = plan.attend(LayerCall(5, inputs[0], inputs[1], inputs[2], 0.3, kind, sinks))[:num_tokens]
        for (number, count), own in zip(step, torch.split(found, [count for _, count in step]), strict=True):
            row, (query, key, value) = rows[number], tensors[number]
            stop = row.filled + count
            wanted = defined((query[row.filled : stop], key[:stop], value[:stop]), row.filled, kind, sinks)
            assert torch.allclose(own, wanted, atol=1e-5)
            row.filled = stop


OTHERS = ("cohere2", "deepseek_v2", "exaone4", "glm4_moe_lite", "longcat_flash", "mimo_v2_flash", "ministral", "olmo3")
"""More models of these kinds: those that `every_architecture` makes."""
WIDE = {"mistral": {"sliding_window": 150}, "gemma3_window": {"sliding_window": 70}}
"""Windows that end within a block."""


@pytest.mark.parametrize("kind", [*ATTENTION, *(pytest.param(kind, marks=pytest.mark.thorough) for kind in OTHERS)])
def test_it_samples_what_one_row_per_call_gives(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several steps that branch within and behind a prefix longer than the window, and repeats."""
    monkeypatch.setattr(sampler, "PROMPT_TOKENS", 70)
    if kind in ATTENTION:
        folder = make_architecture(tmp_path / kind, kind, **WIDE.get(kind, {}))
    else:
        folder = make_any(tmp_path / kind, "AutoModelForCausalLM", kind)
    policy = make_endless(folder, context_length=400)
    shared = tokens(9, 260)
    prompts = [np.concatenate([shared[: 40 * number], tokens(number, 5 * number + 3)]) for number in range(1, 7)]
    requests = {
        10 * number + seed: (prompt, SamplingParams(max_tokens=8, seed=seed))
        for number, prompt in enumerate([*prompts, shared])
        for seed in range(2)
    }
    ours = ModelSampler(policy, 16, 8192)
    found = run(ours, requests)
    contexts = set()
    for id, (prompt, _) in requests.items():
        chosen, logprobs = found[id]
        full = np.concatenate([prompt, np.array(chosen, np.int32)])
        contexts |= {full[: n + 1].tobytes() for n in range(len(full) - 1)}
        count = len(chosen)
        row = call_row(full, np.zeros(count, np.float32), np.zeros(count, np.int32), 1.0, 1.0, 0)
        with torch.no_grad():
            assert logprobs == pytest.approx(row_logprobs(policy, row).tolist(), abs=1e-5)
    assert ours.num_computed == len(contexts) < 0.5 * sum(len(prompt) + 7 for prompt, _ in requests.values())


@pytest.mark.parametrize("error", [1, -1])
def test_a_plan_that_is_wrong_beyond_a_window_is_not_used(
    folder_of: Callable[[str], Path], error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attend = StepPlan.attend

    def shifted(plan: StepPlan, call: LayerCall) -> Tensor:
        kind = replace(call.kind, window=call.kind.window + error) if call.kind.window else call.kind
        return attend(plan, replace(call, kind=kind))

    monkeypatch.setattr(StepPlan, "attend", shifted)
    with caplog.at_level(logging.WARNING, "agentjet"):
        policy = make_policy(folder_of("gemma3_window"))
    assert policy.learns_forests and not policy.info.shares_prefixes
    reason = r"not in sampling \(layer 0 with a window of 8: beyond it, a step's attention differs by 0\.\d+\)"
    assert re.search(reason, caplog.text)
