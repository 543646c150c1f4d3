"""Pins of the head: the vocabulary is multiplied out once for each distribution, and nothing else changes.

1. losses, metrics and the weights after three batches are those of a head for every target, in float64 to 1e-12;
2. a row of logits is computed for each distinct (position, temperature, set), however targets are cut into chunks;
3. scores of given tokens are those of a plain pass, as what the sampler reports is (`test_sampler.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from agentjet.compute import learner as learner_module
from agentjet.compute import passes
from agentjet.compute.learner import PolicyLearner
from agentjet.compute.passes import HEAD_POSITIONS, score
from agentjet.compute.policy import Policy
from agentjet.config import JobConfig, OptimizerConfig
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.forest import Forest, build_forest, call_row, decode_set, encode_set
from tests.compute.baseline import Double, relative
from tests.compute.conftest import make_policy, sampled_rows, tokens
from tests.compute.direct import learn_directly


def head_of_every_target(
    policy: Policy, hidden: Tensor, rows: Tensor, forest: Forest, names: Sequence[str] = (), top_k: int = 0
) -> Iterator[tuple[np.ndarray, dict[str, Tensor]]]:
    """The vocabulary multiplied out for one target after the other."""
    for target, (node, number) in enumerate(zip(forest.node.tolist(), forest["support"].tolist(), strict=True)):
        logits = policy.head(hidden[rows[target]]) / float(forest["temperature"][target])
        if number >= 0:
            outside = torch.from_numpy(~decode_set(forest.sets[number], len(logits)))
            logits = logits.masked_fill(outside, -torch.inf)
        logp = logits.log_softmax(-1)
        yield np.array([target]), {"proximal": logp[int(forest.tokens[node])][None]}


def batch(policy: Policy, seed: int) -> Forest:
    """Repeats that sampled the same tokens, at two temperatures, some chosen among sets."""
    rows = sampled_rows(policy, seed=seed, groups=2)
    rows += [row.with_columns(advantage=-0.5, sequence=row["sequence"] + 100) for row in rows[1:]]
    rows += [row.with_columns(temperature=0.7, sequence=row["sequence"] + 200) for row in rows[::4]]
    everything = np.ones(policy.vocabulary, bool)
    for i in range(0, len(rows), 3):
        few = everything.copy()
        few[tokens(i, 40)] = False
        few[rows[i].tokens] = True
        rows[i] = dataclasses.replace(rows[i], support=tuple(encode_set(few) for _ in rows[i]["logprob"]))
    return build_forest(rows)


def distinct(forest: Forest) -> int:
    keys = zip(forest.parent[forest.node].tolist(), forest["temperature"], forest["support"], strict=True)
    return len(set(keys))


@pytest.fixture
def every_target(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after whose call learners multiply out the vocabulary for every target."""

    def start() -> None:
        for module in (learner_module, passes):
            monkeypatch.setattr(module, "chunks", head_of_every_target)

    return start


def learned(folder: Path, job: JobConfig) -> tuple[Tensor, list[dict[str, float]]]:
    """All weights, in one row, after three batches in float64; and the metrics of each."""
    policy = make_policy(folder)
    batches = [batch(policy, seed) for seed in range(3)]
    policy.model.double()
    with Double():
        learner = PolicyLearner(policy)
        metrics = [learn_directly(learner, forest, job, version) for version, forest in enumerate(batches)]
    return torch.cat([p.detach().flatten() for p in policy.trainable().values()]), metrics


@pytest.mark.parametrize("loss", ["clip", "gspo"])
def test_weights_and_metrics_are_those_of_a_head_for_every_target(
    tiny_folder: Path, loss: str, monkeypatch: pytest.MonkeyPatch, every_target: Callable[[], None]
) -> None:
    monkeypatch.setattr(passes, "HEAD_ROWS", 17)
    recipe = make_recipe({"loss": loss, "kl_coef": 0.1, "mini_batches": 2})
    job = JobConfig(recipe=recipe, optimizer=OptimizerConfig(lr=1e-3), micro_batch_tokens=120)
    weights, metrics = learned(tiny_folder, job)
    every_target()
    wanted, wanted_metrics = learned(tiny_folder, job)
    assert relative(weights, wanted) <= 1e-12
    for ours, theirs in zip(metrics, wanted_metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)


def test_a_row_of_logits_is_computed_once_for_each_distribution(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy(tiny_folder)
    forest = batch(policy, 1)
    with monkeypatch.context() as every_target:
        every_target.setattr(passes, "chunks", head_of_every_target)
        expected = PolicyLearner(policy).logprobs(forest)
    computed: list[int] = []
    head = policy.head

    def counted(hidden: Tensor) -> Tensor:
        computed.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(policy, "head", counted)
    for rows in (512, 7):
        monkeypatch.setattr(passes, "HEAD_ROWS", rows)
        assert torch.allclose(PolicyLearner(policy).logprobs(forest), expected, atol=1e-5)
        assert sum(computed) == distinct(forest) < 0.8 * forest.num_targets and max(computed) <= rows
        computed.clear()


def test_a_token_outside_its_set_is_refused(tiny_folder: Path) -> None:
    policy = make_policy(tiny_folder)
    prompt = tokens(1, 5)
    few = np.zeros(policy.vocabulary, bool)
    few[:5] = True
    row = call_row(prompt, np.zeros(1, np.float32), np.zeros(1, np.int32), 1.0, 1.0, 0, (encode_set(few),))
    other = dataclasses.replace(row, tokens=np.append(prompt[:-1], np.int32(3))).with_columns(sequence=1)
    PolicyLearner(policy).logprobs(build_forest([other]))
    with pytest.raises(AssertionError, match="is not in its set"):
        PolicyLearner(policy).logprobs(build_forest([other, row]))


def test_scores_are_those_of_a_plain_pass(policy: Policy) -> None:
    text = tokens(3, HEAD_POSITIONS + 40)
    with torch.inference_mode(), policy.attention("eager"):
        logits = cast(Any, policy.model)(input_ids=torch.from_numpy(text.astype(np.int64))[None]).logits[0].float()
    wanted = logits.log_softmax(-1)
    scores = score(policy, text, 3)
    assert len(scores) == len(text) - 1
    for at, one in enumerate(scores):
        assert one.logprob == pytest.approx(float(wanted[at, text[at + 1]]), abs=1e-4)
        values, ids = wanted[at].topk(3)
        assert [id for id, _ in one.likeliest] == ids.tolist()
        assert [value for _, value in one.likeliest] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["tiny", "mistral"])
def test_a_text_of_one_token_has_no_scores(folder_of: Callable[[str], Path], kind: str) -> None:
    assert score(make_policy(folder_of(kind)), tokens(1, 1), 2) == []
