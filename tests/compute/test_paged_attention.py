"""The attention of sampling steps on CUDA, run on a CPU: it samples what the CPU's own plan samples.

In eager mode `flex_attention` evaluates the mask and ignores the tables of blocks. Compiled for a CPU it uses them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from agentjet.compute.embedded import attention
from agentjet.compute.embedded.attention import DecodeGraphs, PagedPlan, flat_forward
from agentjet.compute.embedded.cache import CacheRow, KeyValueCache
from agentjet.compute.embedded.policy import Policy
from agentjet.compute.embedded.sampler import ModelSampler
from agentjet.types import SamplingParams
from tests.compute.conftest import run, tokens

SIZE = 8


class WithoutGraphs(DecodeGraphs):
    """Computes the steps of one token a row under their plan, with padding."""

    def __init__(self, cache: KeyValueCache) -> None:
        self.steps = 0
        self._plan = PagedPlan(cache, SIZE, SIZE, cache.keys.shape[1])

    def hidden(self, policy: Policy, rows: Sequence[CacheRow]) -> Tensor:
        self.steps += 1
        self._plan.fill([(row, 1) for row in rows])
        return flat_forward(policy.decoder, self._plan.tokens, self._plan.positions, self._plan)[: len(rows)]

    def forget(self, policy: Policy) -> None:
        pass


def requests() -> dict[int, tuple[np.ndarray, SamplingParams]]:
    """Lengths around a block and a tile, and a prefix that three of them share until they differ."""
    lengths = (5, 100, 128, 131, 260)
    found = {i: (tokens(i, n), SamplingParams(max_tokens=6, seed=i)) for i, n in enumerate(lengths)}
    shared = tokens(9, 140)
    return found | {10 + i: (shared, SamplingParams(max_tokens=6, seed=i)) for i in range(3)}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    "compiled",
    [
        False,
        pytest.param(
            True,
            marks=[
                pytest.mark.thorough,
                pytest.mark.needs("compiler"),
            ],
        ),
    ],
)
def test_it_samples_what_the_plan_of_a_cpu_samples(
    policy: Policy, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(ModelSampler(policy, SIZE, 4096), requests())
    sampler = ModelSampler(policy, SIZE, 4096)
    sampler._cache._free = sampler._cache._free[::2]  # a heap still: the blocks of a row are not neighbours
    for stored in (sampler._cache.keys, sampler._cache.values):
        stored.zero_()  # In eager mode all blocks are read, not only those that were taken.
    graphs = WithoutGraphs(sampler._cache)
    sampler._graphs = graphs
    if compiled:
        monkeypatch.setattr(attention, "_paged_attention", torch.compile(attention._paged_attention))
    found = run(sampler, requests())
    assert graphs.steps >= 5
    for id, (chosen, logprobs) in wanted.items():
        assert found[id][0] == chosen
        assert found[id][1] == pytest.approx(logprobs, abs=1e-5)
