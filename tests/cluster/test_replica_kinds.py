"""Replicas of other architectures with a real vLLM engine on a CPU: each agrees with its learner, or is refused.

A replica that agrees has the learner's log-probabilities of a probe and of tokens that it sampled, also after its
weights have changed. Another one ends with a reason: vLLM's own, or the difference of the probe.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentjet.compute.learner import PolicyLearner
from agentjet.compute.model import load_policy
from agentjet.compute.weights import probe_failure
from agentjet.config import ComputeConfig, SamplerConfig
from agentjet.errors import AgentJetError
from agentjet.timeline.forest import build_forest, call_row
from agentjet.types import SamplingParams
from tests.cluster.local_replica import LocalReplica, Wanted, sampler_python
from tests.compute.architectures import make_architecture
from tests.compute.conftest import model_config, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.thorough, pytest.mark.slow, pytest.mark.needs("vllm")]

WIDE = {"hidden_size": 64, "head_dim": 32}  # The CPU's attention needs heads of at least 32
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "mistral": (WIDE, ""),
    "gemma3_window": (WIDE, ""),
    "gemma2": (WIDE, ""),
    "falcon_h1": (WIDE, ""),
    "mixtral": (WIDE, ""),
}
"""By architecture: settings, and the reason of its refusal; empty if it agrees."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_replica_agrees_with_its_learner_or_is_refused(kind: str, tmp_path: Path) -> None:
    settings, reason = KINDS[kind]
    folder = make_architecture(tmp_path / "model", kind, **settings)
    config = model_config(folder, context_length=256)
    policy = load_policy(config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    python = sampler_python()
    assert python is not None
    with LocalReplica(python, tmp_path / "log") as replica:
        try:
            replica.load(config, policy.info, SamplerConfig(max_concurrent=8, cache_tokens=4096), ComputeConfig())
            refused = changed_weights(replica, model) or differs(replica, policy)
        except AgentJetError as error:
            refused = str(error)
    assert re.search(reason, refused) if reason else not refused, refused


def changed_weights(replica: LocalReplica, model: Any) -> str:
    """Publishes other weights and then the model's own; returns the reason why the replica would be refused."""
    weights = {name: one.clone() for name, one in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.1
    first = replica.publish(model, 0)
    model.load_state_dict(weights)
    second = replica.publish(model, 1)
    return probe_failure(first, replica.adopt(first)) or probe_failure(second, replica.adopt(second), first)


def differs(replica: LocalReplica, policy: Any) -> str:
    """Returns the difference between the log-probabilities of a completion and those of the learner, above 1e-4."""
    prompt = tokens(1, 40)
    found = replica.sample(Wanted(prompt.tolist(), SamplingParams(max_tokens=60, seed=1)))
    sampled = np.array(found.logprobs, np.float32)
    row = np.concatenate([prompt, np.array(found.tokens, np.int32)])
    forest = build_forest([call_row(row, sampled, np.zeros(len(sampled), np.int32), 1.0, 1.0, 0)])
    worst = float(np.abs(PolicyLearner(policy).logprobs(forest).numpy() - sampled).max())
    return f"its tokens differ from the learner's by {worst:.2g}" if worst > 1e-4 else ""
