"""The only line between the gateway and the weights. A backend is one class with these verbs.

Imports no torch: the gateway process uses this module. Invariants a backend must keep:

* a prefix cache never outlives the weights that filled it;
* reported log-probabilities are those of the distribution sampled from, and the set it was over is reported with them;
* `learn` recomputes them over that set: the softmax, and with it entropy and KL terms, is of the policy restricted to
  it;
* a token whose log-probability is not finite is never reported: its completion fails with `ComputeError`;
* `learn(batch_id, ...)` is idempotent: batch n takes policy version n to n + 1, once; a batch already learned returns
  its metrics again and changes nothing;
* one bad request never disturbs another.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Protocol

from agentjet.config import JobConfig
from agentjet.errors import WorkerDied
from agentjet.timeline.forest import Forest
from agentjet.types import CheckpointStamp, ModelInfo, Sampled, SamplingParams, TokenScore


class Compute(Protocol):
    """A backend: samples from, teaches, saves and loads one policy."""

    async def start(self, *, dtype: str = "") -> ModelInfo:
        """Start (or restart) the worker on the configured model; version 0 weights unless `load` follows.

        A policy keeps the `dtype` it was begun with, where there is one and `model.dtype` leaves it open. Raises
        `ConfigError` when the model cannot be had and `WorkerDied` when the worker ends while loading.
        """
        ...

    def sample(self, token_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Sampled]:
        """Stream a completion of `token_ids`; closing the iterator cancels it.

        Raises `OutOfCache` when prompt and completion cannot fit, `GrammarError` when the grammar of `params` cannot be
        followed (any further), `WorkerDied` when the worker ends meanwhile.
        """
        ...

    async def score(self, token_ids: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        """The log-probability of each token but the first, given those before it. Nothing is sampled.

        Raises `ComputeError` when the tokens are not of this model, `WorkerDied` when the worker ends.
        """
        ...

    async def learn(self, batch_id: int, forest: Forest, job: JobConfig) -> dict[str, float]:
        """Optimise the policy on a batch; returns metrics under the field's names. See the idempotency rule above."""
        ...

    async def save(self, path: Path) -> CheckpointStamp:
        """Write a checkpoint folder (`policy/`, `trainer.pt`, `state.json`) atomically; raises `CheckpointError`."""
        ...

    async def load(self, path: Path) -> CheckpointStamp:
        """Verify a checkpoint folder, then restore weights and optimiser from it.

        Raises `CheckpointError` for every damage, `ConfigError` when it was made under other settings.
        """
        ...

    async def export(self, path: Path, *, adapter: bool = False) -> None:
        """Write the policy as a plain Hugging Face folder (LoRA merged), or its `adapter` alone as a PEFT folder,
        atomically.
        """
        ...

    async def close(self) -> None:
        """Stop the worker and wait for it; idempotent."""
        ...

    async def died(self) -> WorkerDied:
        """Wait until the worker ends without having been asked to; returns why.

        A worker that hangs is ended by its backend: `WorkerHung`.
        """
        ...
