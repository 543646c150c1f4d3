"""Scores of given tokens: those of a plain pass of the model, and of what the sampler reports."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from agentjet.compute.embedded.distributions import HEAD_POSITIONS, score
from agentjet.compute.embedded.policy import Policy
from agentjet.types import SamplingParams
from tests.compute.conftest import run, sampler_of, tokens


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


def test_scores_of_sampled_tokens_are_what_was_reported(policy: Policy) -> None:
    prompt = tokens(4, 12)
    sampled, reported = run(sampler_of(policy), {0: (prompt, SamplingParams(max_tokens=8, seed=1))})[0]
    scores = score(policy, np.concatenate([prompt, np.asarray(sampled, np.int32)]), 0)
    assert [one.logprob for one in scores[-len(sampled) :]] == pytest.approx(reported, abs=1e-4)
    assert all(one.likeliest == () for one in scores)
