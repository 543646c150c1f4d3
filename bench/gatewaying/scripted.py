"""A model that is a script: a `Compute` in the gateway's own process that always samples the same twenty tokens.

Its cost is negligible, so the bench measures the gateway. The tokenizer is a real one (byte-level BPE without merges,
so a token is a byte) in a real folder, with a real chat template. Nothing is learned: the bench never fills a batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentjet.compute.protocol import EMBEDDED, Capabilities, LossSpec, Outputs
from agentjet.config import ComputeConfig, ModelConfig, OptimizerConfig
from agentjet.errors import WorkerDied
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import (
    CheckpointStamp,
    ModelInfo,
    Op,
    PolicyId,
    ProcessStatus,
    Sampled,
    SamplerBounds,
    SamplersStatus,
    SamplingParams,
    TokenScore,
)

MODEL = "scripted"
ANSWER = "Look at row 42 next"
"""Nineteen tokens, and the one that ends a turn."""
CONTEXT_LENGTH = 16_384
END = "<|im_end|>"
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def make_model_info(folder: Path) -> ModelInfo:
    """Write the tokenizer into `folder`, which is made; returns the card that a worker would send."""
    special = ("<|endoftext|>", "<|im_start|>", END)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate((*special, *letters))}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return ModelInfo(
        name=MODEL,
        tokenizer_path=str(folder),
        chat_template=TEMPLATE,
        context_length=CONTEXT_LENGTH,
        end_tokens=(special.index(END),),
        eos_token=END,
    )


def answer_tokens(card: ModelInfo) -> tuple[int, ...]:
    """The script in the tokens of the card's tokenizer, with the token that ends the turn."""
    made = Tokenizer.from_file(f"{card.tokenizer_path}/tokenizer.json")
    return (*made.encode(ANSWER, add_special_tokens=False).ids, card.end_tokens[0])


class ScriptedCompute:
    """See `compute.protocol.Compute`. A completion takes `seconds`, its tokens evenly spread over them."""

    def __init__(self, card: ModelInfo, seconds: float) -> None:
        self._card = card
        self._answer = answer_tokens(card)
        self._seconds = seconds

    def capabilities(self, settings: ComputeConfig) -> Capabilities:
        return Capabilities()

    async def add(
        self, policy: PolicyId, model: ModelConfig, *, worker: str = "", settings: ComputeConfig = EMBEDDED
    ) -> ModelInfo:
        return self._card

    async def remove(self, policy: PolicyId) -> None:
        return

    async def sample(
        self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Sampled]:
        """Every piece has its own due time, counted from the start, so that late ones do not add up."""
        loop = asyncio.get_running_loop()
        began, answer = loop.time(), self._answer
        for start in range(0, len(answer), params.piece_tokens):
            piece = answer[start : start + params.piece_tokens]
            done = start + len(piece)
            await asyncio.sleep(max(0.0, began + self._seconds * done / len(answer) - loop.time()))
            yield Sampled(piece, (-0.5,) * len(piece), 0, "stop" if done == len(answer) else None)

    async def score(self, policy: PolicyId, token_ids: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        raise AssertionError("the bench asks for no scores")

    async def load_batch(self, policy: PolicyId, batch: TrainingBatch) -> None:
        raise AssertionError("the bench fills no batch")

    async def forward_backward(self, op: Op, batch_id: int, loss: LossSpec) -> Outputs:
        raise AssertionError("the bench fills no batch")

    async def optim_step(self, op: Op, optimizer: OptimizerConfig) -> dict[str, float]:
        raise AssertionError("the bench fills no batch")

    async def publish(
        self, policy: PolicyId, version: int, *, to_samplers: bool = True, in_turns: bool = False
    ) -> Mapping[str, float]:
        return {}  # Of version 0, when the policy is up.

    async def save(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        raise AssertionError("nothing was learned, so nothing is saved")

    async def load(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        raise AssertionError("a fresh data dir has no checkpoints")

    async def export(self, policy: PolicyId, path: Path, *, adapter: bool = False) -> None:
        raise AssertionError("nobody asks for an export")

    def processes(self, policy: PolicyId) -> list[ProcessStatus]:
        return []

    def samplers(self, policy: PolicyId) -> SamplersStatus | None:
        return None

    async def scale(self, policy: PolicyId, bounds: SamplerBounds) -> None:
        raise AssertionError("the bench scales nothing")

    async def close(self) -> None:
        return

    async def died(self, policies: Sequence[PolicyId]) -> WorkerDied:
        """Never."""
        never: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        return await never
