"""Losses, gradients and weights of 20 recorded batches, compared with `locks.json`, bit by bit.

The numbers were recorded by version 0.1 plus plain words, before operations replaced the method `learn`. The batches
cover every loss, aggregation, correction and advantage, KL terms, epochs, mini-batches, micro-batches, temperatures and
sets. Only `learn_batch` may change with the interface of the learner.

Rounding depends on the processor and on the version of torch. Where they are those of the recording, every digest must
be equal. Elsewhere losses must agree within a tolerance, and a replay must be equal bit by bit.

`python -m tests.compute.test_locks` records again. A change that needs this changes the training of every user.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentjet.compute.learner import PolicyLearner
from agentjet.compute.policy import Policy
from agentjet.compute.rank import make_deterministic
from agentjet.config import JobConfig, OptimizerConfig
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.batch import Facts, TrainingBatch
from agentjet.timeline.forest import Row, build_forest, call_row, encode_set
from tests.compute.architectures import make_architecture
from tests.compute.conftest import make_policy
from tests.compute.direct import learn_directly
from tests.tiny import make_model, tokenizer

LOCKS = Path(__file__).with_name("locks.json")
VOCABULARY = tokenizer().get_vocab_size()
KINDS = ("full", "lora", "bfloat16", "rows")
METRICS = (
    "policy/entropy",
    "policy/kl",
    "policy/clip_fraction",
    "policy/mismatch_kl",
    "policy/correction_mean",
    "policy/correction_dropped",
    "optim/grad_norm",
    "optim/lr",
    "optim/steps",
    "forest/tokens_computed",
)
RECIPES: tuple[dict[str, Any], ...] = (
    {},
    {"name": "dr_grpo", "aggregation": "sequence_mean"},
    {"name": "rloo", "aggregation": "constant", "constant": 12.0},
    {"loss": {"dual_clip": 3.0, "clip_low": 0.1, "clip_high": 0.3}},
    {"kl_coef": 0.1},
    {"correction": "tis"},
    {"correction": "icepop", "correction_high": 2.0},
    {"correction": "mis"},
    {"epochs": 2, "mini_batches": 2},
    {"correction": "mis", "kl_coef": 0.05, "mini_batches": 3},
    {"name": "gspo", "mini_batches": 1},
    {"name": "gspo", "mini_batches": 1, "aggregation": "token_mean"},
    {"name": "gspo", "mini_batches": 1, "aggregation": "constant", "constant": 8.0},
    {"name": "gspo", "mini_batches": 1, "kl_coef": 0.1, "loss": {"clip_low": 0.2, "clip_high": 0.2}},
    {"name": "rloo", "loss": "gspo", "correction": "tis"},
    {"name": "gspo", "correction": "mis", "mini_batches": 2},
    {"name": "cispo", "loss": {"clip_low": 0.2}},
    {"name": "cispo", "loss": {"clip_low": 0.2}, "aggregation": "sequence_mean"},
    {"name": "cispo", "loss": {"clip_low": 0.2}, "kl_coef": 0.1, "correction": "icepop", "correction_high": 2.0},
    {"name": "cispo", "loss": {"clip_low": 0.2}, "aggregation": "constant", "constant": 12.0, "epochs": 2},
)


@dataclass(frozen=True)
class Call:
    """Prompt and completion [T], and the facts of the completion [S]."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    temperature: float
    sets: tuple[bytes, ...]


@dataclass(frozen=True)
class Episode:
    reward: float
    calls: tuple[Call, ...]


def recorded_batch(number: int) -> list[list[Episode]]:
    """The groups of a batch: 3 groups of 4 episodes of 2 calls, the second of which continues the first."""
    rng = np.random.default_rng([7, number])
    system = np.random.default_rng(7).integers(5, 200, 6)
    groups = []
    for group in range(3):
        task = rng.integers(5, 200, 5 + group)
        members = []
        for member in range(4):
            history = np.concatenate([system, task])
            shift = rng.normal(scale=0.02)
            calls = []
            for _ in range(2):
                call = _recorded_call(rng, history, shift, with_sets=(group + member) % 4 == 3)
                calls.append(call)
                history = np.concatenate([call.tokens, rng.integers(5, 200, 3)])
            reward = 0.5 if (number % 3, group) == (1, 1) else round(float(rng.random()), 2)
            members.append(Episode(reward, tuple(calls)))
        groups.append(members)
    return groups


def _recorded_call(rng: np.random.Generator, history: np.ndarray, shift: float, *, with_sets: bool) -> Call:
    count = int(rng.integers(2, 7))
    # Few distinct first tokens, so that completions of one prompt share some nodes.
    completion = np.concatenate([rng.integers(5, 7, 1), rng.integers(5, 200, count - 1)])
    sets: tuple[bytes, ...] = ()
    size = VOCABULARY
    if with_sets:
        size = 40
        sets = tuple(_recorded_set(rng, int(token), size) for token in completion)
    logprobs = np.minimum(-math.log(size) + shift + rng.normal(scale=0.15, size=count), -1e-3)
    return Call(
        np.concatenate([history, completion]).astype(np.int32),
        logprobs.astype(np.float32),
        rng.integers(0, 3, count).astype(np.int32),
        0.7 if with_sets else 1.0,
        sets,
    )


def _recorded_set(rng: np.random.Generator, token: int, size: int) -> bytes:
    members = np.zeros(VOCABULARY, bool)
    members[rng.choice(VOCABULARY, size, replace=False)] = True
    members[token] = True
    return encode_set(members)


def other_facts(episodes: int, calls: int) -> dict[str, Any]:
    """The facts that the recorded recipes do not read."""
    return {
        "call_rewards": np.full(calls, np.nan),
        "call_truncated": np.zeros(calls, bool),
        "tasks": (("", "t"),) * episodes,
        "seconds": np.ones(episodes),
        "metrics": {},
        "code_versions": ("",) * episodes,
    }


def training_batch(groups: list[list[Episode]], number: int) -> TrainingBatch:
    """The forest and the facts of a recorded batch."""
    episodes = [episode for members in groups for episode in members]
    rows: list[Row] = []
    call_episode, call_turn = [], []
    for index, episode in enumerate(episodes):
        for turn, call in enumerate(episode.calls):
            rows.append(
                call_row(
                    *(call.tokens, call.logprobs, call.versions, None, call.temperature, index, call.sets),
                    call=len(rows),
                )
            )
            call_episode.append(index)
            call_turn.append(turn)
    facts = Facts(
        groups=np.repeat(np.arange(len(groups)), [len(members) for members in groups]).astype(np.int32),
        rewards=np.array([episode.reward for episode in episodes]),
        roles=("",),
        role_rewards=np.full((len(episodes), 1), np.nan),
        spoke=np.ones((len(episodes), 1), bool),
        call_episode=np.array(call_episode, np.int32),
        call_role=np.zeros(len(rows), np.int32),
        call_turn=np.array(call_turn, np.int32),
        **other_facts(len(episodes), len(rows)),
    )
    return TrainingBatch(number, build_forest(rows), facts)


def learn_batch(learner: PolicyLearner, groups: list[list[Episode]], job: JobConfig, number: int) -> dict[str, float]:
    """Train on a recorded batch; returns the metrics. The only part that depends on the learner's interface."""
    batch = training_batch(groups, number)
    return learn_directly(learner, batch.forest, job, number, batch.facts)


def settings(number: int) -> JobConfig:
    return JobConfig(
        recipe=make_recipe(RECIPES[number]),
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=3, weight_decay=0.01),
        micro_batch_tokens=40 if number % 2 else 100_000,
        seed=5,
    )


def policy_of(kind: str, folder: Path) -> Policy:
    make = make_architecture(folder, "mamba") if kind == "rows" else make_model(folder)
    dtype, rank = "bfloat16" if kind == "bfloat16" else "float32", 4 if kind == "lora" else 0
    policy = make_policy(make, dtype=dtype, rank=rank)
    policy.learns_forests &= kind != "rows"  # Mamba learned rows when this was recorded.
    return policy


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


@contextmanager
def recorded_losses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The losses whose `backward` is called inside, in order."""
    losses: list[float] = []
    original = Tensor.backward

    def backward(self: Tensor, *arguments: Any, **options: Any) -> None:
        if self.dim() == 0:
            losses.append(float(self.detach()))
        original(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "backward", backward)
        yield losses


def train(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Learn the 20 batches, one after the other; returns what is locked of each."""
    policy = policy_of(kind, folder)
    learner = PolicyLearner(policy)
    gradients: list[str] = []
    learner._optimizer.parts[0][0].register_step_pre_hook(
        lambda *_: gradients.append(digest(m.grad for m in learner.masters() if m.grad is not None))
    )
    records = []
    for number in range(len(RECIPES)):
        gradients.clear()
        with recorded_losses(monkeypatch) as losses:
            metrics = learn_batch(learner, recorded_batch(number), settings(number), number)
        records.append(
            {
                "loss": math.fsum(losses),
                "losses": hashlib.sha256(" ".join(loss.hex() for loss in losses).encode()).hexdigest()[:16],
                "metrics": {name: metrics[name] for name in METRICS if name in metrics},
                "gradients": list(gradients),
                "weights": digest([*learner.masters(), *policy.trainable().values()]),
            }
        )
    return records


def machine() -> str:
    """The processor and the version of torch, on which the rounding depends."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].partition(":")[2].strip() if names else platform.processor()
    return f"{processor}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("full", "lora") else pytest.mark.thorough) for kind in KINDS]
)
def test_learning_is_bit_equal_to_the_recording(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_deterministic()
    recorded = json.loads(LOCKS.read_text())
    found = train(kind, tmp_path / "model", monkeypatch)
    if machine() != recorded["machine"]:
        assert train(kind, tmp_path / "again", monkeypatch) == found, "a replay differs"
    expected = recorded["batches"][kind]
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-2, abs=2e-4), number
    if machine() == recorded["machine"]:
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            # Metrics are means, which may be summed in another order.
            assert ours.pop("metrics") == pytest.approx(theirs.pop("metrics"), rel=1e-9), number
            assert ours == theirs, f"batch {number}: {RECIPES[number]}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    make_deterministic()
    with tempfile.TemporaryDirectory() as scratch:
        batches = {kind: train(kind, Path(scratch) / kind, pytest.MonkeyPatch()) for kind in KINDS}
    lines = {kind: ",\n".join(json.dumps(record) for record in records) for kind, records in batches.items()}
    text = ",\n".join(f'"{kind}": [\n{records}\n]' for kind, records in lines.items())
    LOCKS.write_text(f'{{"machine": {json.dumps(machine())}, "batches": {{\n{text}\n}}}}\n')
