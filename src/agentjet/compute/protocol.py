"""The interface between the gateway and the weights. A backend is one class with these methods. No torch.

Invariants of a backend:

* A prefix cache never outlives the weights that filled it.
* Reported log-probabilities are those of the sampled distribution. The set of the distribution is reported with them.
* `learn` computes log-probabilities over that set again. So softmax, entropy and KL terms are of the restricted policy.
* A token whose log-probability is not finite is never reported: its completion fails with `ComputeError`.
* `learn(batch_id, ...)` is idempotent: batch n takes policy version n to n + 1, once. A repeated batch returns its
  metrics again and changes nothing.
* A bad request never disturbs another.
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
    """A backend: samples from, trains, saves and loads one policy."""

    async def start(self, *, dtype: str = "") -> ModelInfo:
        """Start or restart the worker on the configured model, with the weights of version 0.

        `dtype` is the type of an existing policy. It applies if `model.dtype` is `auto`. Raises `ConfigError` if the
        model cannot be loaded, and `WorkerDied` if the worker ends during the start.
        """
        ...

    def sample(self, token_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Sampled]:
        """Stream a completion of `token_ids`; closing the iterator cancels it.

        Raises:

        * `OutOfCache` if prompt and completion exceed the cache;
        * `GrammarError` if the grammar of `params` allows no next token;
        * `WorkerDied` if the worker ends.
        """
        ...

    async def score(self, token_ids: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        """Returns the log-probability of each token except the first, given those before it. Samples nothing.

        Raises `ComputeError` for token ids outside the vocabulary, `WorkerDied` if the worker ends.
        """
        ...

    async def learn(self, batch_id: int, forest: Forest, job: JobConfig) -> dict[str, float]:
        """Train the policy on a batch; returns metrics. See the idempotency rule above."""
        ...

    async def save(self, path: Path) -> CheckpointStamp:
        """Write a checkpoint folder (`policy/`, `trainer.pt`, `state.json`) atomically; raises `CheckpointError`."""
        ...

    async def load(self, path: Path) -> CheckpointStamp:
        """Verify a checkpoint folder, then restore weights and optimiser from it.

        Raises `CheckpointError` for a damaged checkpoint, `ConfigError` for one made with other settings.
        """
        ...

    async def export(self, path: Path, *, adapter: bool = False) -> None:
        """Write the policy as a Hugging Face folder (LoRA merged), or its `adapter` as a PEFT folder, atomically."""
        ...

    async def close(self) -> None:
        """Stop the worker and wait for its end. Idempotent."""
        ...

    async def died(self) -> WorkerDied:
        """Wait until the worker ends unexpectedly; returns the reason.

        The backend kills a worker that hangs: `WorkerHung`.
        """
        ...
