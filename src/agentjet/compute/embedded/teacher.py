"""`Teacher`: a frozen model beside a policy, whose log-probabilities a recipe reads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agentjet.compute.embedded.distributions import measured
from agentjet.compute.embedded.model import load_policy
from agentjet.compute.embedded.passes import pass_of
from agentjet.compute.embedded.policy import Policy
from agentjet.config import ModelConfig
from agentjet.timeline.forest import Forest


class Teacher:
    """The model of a folder, on the device and in the type of the policy. It is loaded with the first batch."""

    def __init__(self, folder: str, policy: Policy) -> None:
        """Raises `ConfigError` if the model cannot be loaded."""
        self.folder = folder
        settings = {"name": folder, "device": policy.device.type, "dtype": policy.info.dtype}
        self._policy = load_policy(ModelConfig.model_validate(settings))
        self._policy.model.requires_grad_(False)
        self._pass = pass_of(self._policy)

    def logprobs(self, forest: Forest, max_tokens: int) -> NDArray[np.float32]:
        """Returns the log-probabilities [M] of the targets, over the sets and at the temperatures of sampling."""
        found = np.zeros(forest.num_targets, np.float32)
        for piece, targets in self._pass.pieces(forest, max_tokens):
            logp = measured(self._policy, self._pass, piece, ["proximal"])["proximal"]
            found[targets] = logp.float().cpu().numpy()
        return found
