"""The plans of CUDA: `FlexPlan`'s tile table agrees with the forest's mask, and its attention with `ForestPlan`'s.

A sampler under `PagedPlan` samples as under the plan of a CPU. In eager mode `flex_attention` evaluates the mask and
ignores the tables, so the tile table has a test without attention. Compiled for a CPU it uses them, in the forward pass
only. Tests that need a CUDA device run where one exists.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from agentjet.compute import cached_attention
from agentjet.compute import sampler as sampler_module
from agentjet.compute.attention import (
    PLAIN,
    TILE,
    AttentionKind,
    FlexPlan,
    ForestPlan,
    LayerCall,
    compiled_flex,
    forest_mask,
    forest_plan,
    tile_mask,
)
from agentjet.compute.cache import KeyValueCache
from agentjet.compute.cached_attention import PagedPlan, Spans, paged_inputs
from agentjet.compute.policy import Policy
from agentjet.compute.sampler import ModelSampler
from agentjet.timeline.forest import Forest, build_forest, call_row
from agentjet.types import SamplingParams
from tests.compute.conftest import check_same, run, tokens

CPU = torch.device("cpu")
cuda = pytest.mark.needs("cuda")


def a_forest(seed: int) -> Forest:
    """Long runs and many small branches, over several tiles, with a ragged end."""
    rng = np.random.default_rng(seed)
    trunks = [tokens(seed + i, int(rng.integers(20, 400))) for i in range(2)]
    rows = []
    for i in range(12):
        branch = np.concatenate([trunks[i % 2], tokens(50 + i % 5, int(rng.integers(1, 90))), tokens(90 + i, 30)])
        rows.append(call_row(branch, np.zeros(5, np.float32), np.zeros(5, np.int32), 1.0, 1.0, i))
    return build_forest(rows)


def tensors(forest: Forest, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(forest.num_nodes, heads, 16) for heads in (4, 2, 2)]
    query, key, value = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    return query, key, value


KINDS = [PLAIN, AttentionKind(window=70), AttentionKind(chunk=90), AttentionKind(window=150, cap=2.0)]
SINKS = torch.linspace(-2.0, 2.0, 4)


def plainly(forest: Forest, qkv: tuple[Tensor, Tensor, Tensor], kind: AttentionKind, sinks: Tensor | None) -> Tensor:
    """Returns the definition: a softmax over each node's path, with a mask of all pairs."""
    query, key, value = (x.transpose(0, 1) for x in qkv)
    nodes, depth = np.arange(forest.num_nodes), forest.depth
    seen = (nodes <= nodes[:, None]) & (nodes[:, None] < forest.end)
    seen &= depth >= np.array([kind.lowest(int(d)) for d in depth])[:, None]
    scores = query @ key.repeat_interleave(2, 0).mT * 0.3
    scores = scores if not kind.cap else kind.cap * torch.tanh(scores / kind.cap)
    scores = scores.masked_fill(~torch.from_numpy(seen), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(nodes), 1)], -1)
    return (scores.softmax(-1)[..., : len(nodes)] @ value.repeat_interleave(2, 0)).transpose(0, 1)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_forest_plan_computes_the_definition_and_its_gradients(kind: AttentionKind, sinks: Tensor | None) -> None:
    """Values are narrower than keys, as in MLA."""
    forest = a_forest(0)
    query, key, value = tensors(forest, CPU)
    given = query.double(), key.double(), value[..., :10].double()
    last = None if sinks is None else sinks.double()
    results = []
    for is_ours in (True, False):
        q, k, v = (x.clone().requires_grad_() for x in given)
        sink = None if last is None else last.clone().requires_grad_()
        if is_ours:
            out = ForestPlan(forest).attend(LayerCall(0, q, k, v, 0.3, kind, sink))
        else:
            out = plainly(forest, (q, k, v), kind, sink)
        (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        results.append([out, *(x.grad for x in (q, k, v, sink) if x is not None)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_it_attends_as_the_forest_plan_does(seed: int, kind: AttentionKind, sinks: Tensor | None) -> None:
    forest = a_forest(seed)
    assert forest.num_nodes % TILE and forest.num_nodes > 3 * TILE
    query, key, value = tensors(forest, CPU)
    ours = FlexPlan(forest, CPU).attend(LayerCall(0, query, key, value, 0.3, kind, sinks))
    theirs = ForestPlan(forest).attend(LayerCall(0, query, key, value, 0.3, kind, sinks))
    assert ours.shape == theirs.shape
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_tile_table_is_that_of_the_mask(seed: int, kind: AttentionKind) -> None:
    forest = a_forest(seed)
    length = forest.num_nodes // TILE * TILE
    end = np.minimum(forest.end[:length], length).astype(np.int32)
    depth = forest.depth[:length]
    table = tile_mask(end, CPU, depth, kind)
    mask = forest_mask(torch.from_numpy(end), torch.from_numpy(depth), kind)
    reference = create_block_mask(mask, None, None, length, length, device="cpu", BLOCK_SIZE=TILE)
    assert kind != PLAIN or torch.equal(table.to_dense(), reference.to_dense())
    assert (table.to_dense() >= reference.to_dense()).all() and not table.to_dense().all()
    nodes = torch.arange(length)
    none = torch.zeros((), dtype=torch.long)
    visible = mask(none, none, nodes[:, None], nodes[None, :]).view(length // TILE, TILE, length // TILE, TILE)
    whole = visible.all(3).all(1)
    assert table.full_kv_num_blocks is not None and table.full_kv_indices is not None
    for i, (count, order) in enumerate(zip(table.full_kv_num_blocks[0, 0], table.full_kv_indices[0, 0], strict=True)):
        ours, theirs = set(order[:count].tolist()), set(whole[i].nonzero()[:, 0].tolist())
        assert ours <= theirs if kind != PLAIN else ours == theirs
    assert kind != PLAIN or (whole.any() and not whole.all())


def test_a_cpu_keeps_the_forest_plan() -> None:
    assert isinstance(forest_plan(a_forest(0), CPU), ForestPlan)


@pytest.mark.thorough
@pytest.mark.needs("compiler")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_compiled_it_attends_by_its_table(kind: AttentionKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sinks: a kernel of a CPU returns no log-sum-exps."""
    for seed in range(2):
        forest = a_forest(seed)
        query, key, value = tensors(forest, CPU)
        plan = FlexPlan(forest, CPU)
        monkeypatch.setattr(plan, "_flex", compiled_flex())
        with torch.no_grad():
            ours = plan.attend(LayerCall(0, query, key, value, 0.3, kind))
        assert torch.allclose(ours, ForestPlan(forest).attend(LayerCall(0, query, key, value, 0.3, kind)), atol=1e-5)


@pytest.mark.gpu
@cuda
def test_on_cuda_output_and_gradients_are_those_of_the_forest_plan() -> None:
    device = torch.device("cuda")
    forest = a_forest(1)
    found = []
    for plan, place in ((forest_plan(forest, device), device), (ForestPlan(forest), CPU)):
        inputs = [tensor.requires_grad_() for tensor in tensors(forest, place)]
        out = plan.attend(LayerCall(0, *inputs, 0.3))
        (out * torch.linspace(-1, 1, out.numel(), device=place).view_as(out)).sum().backward()
        found.append([tensor.cpu() for tensor in (out.detach(), *(tensor.grad for tensor in inputs))])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3)


SIZE = 8


def in_pages(spans: Spans, cache: KeyValueCache) -> tuple[Tensor, Tensor, PagedPlan]:
    """The inputs of a step on CUDA."""
    for row, count in spans:
        cache.extend(row, row.filled + count)
    return paged_inputs(spans, cache)


def requests() -> dict[int, tuple[np.ndarray, SamplingParams]]:
    """Lengths around a block and a tile, and a prefix that three of them share until they differ."""
    lengths = (5, 100, 128, 131, 260)
    found = {i: (tokens(i, n), SamplingParams(max_tokens=6, seed=i)) for i, n in enumerate(lengths)}
    shared = tokens(9, 140)
    return found | {10 + i: (shared, SamplingParams(max_tokens=6, seed=i)) for i in range(3)}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=[pytest.mark.thorough, pytest.mark.needs("compiler")])]
)
def test_it_samples_what_the_plan_of_a_cpu_samples(
    policy: Policy, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(ModelSampler(policy, SIZE, 4096), requests())
    sampler = ModelSampler(policy, SIZE, 4096, graphs=True)
    sampler._cache._free = sampler._cache._free[::2]  # a heap still: the blocks of a row are not neighbours
    for stored in sampler._cache.stored:
        stored.zero_()  # In eager mode all blocks are read, not only those that were taken.
    monkeypatch.setattr(sampler_module, "step_inputs", in_pages)
    assert sampler._graphs is not None
    if compiled:
        sampler._graphs._width = sampler._cache.num_blocks  # The compiler for CPUs takes tables of all blocks only.
        monkeypatch.setattr(cached_attention, "_paged_attention", torch.compile(cached_attention._paged_attention))
    found = run(sampler, requests())
    assert sampler._graphs.of(policy, SIZE) is not None
    check_same(found, wanted, 1e-5)
