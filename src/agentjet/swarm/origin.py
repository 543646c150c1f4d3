"""The origin of a policy: what its weights follow from besides the batches of the journal.

Recorded when a data dir begins, compared whenever it is taken up again: from another origin the same `policy_version`
would be other weights. Keys are settings, but for `model_weights`, the fingerprint of what is under `model.name`, and
`branched_from`, the data dir and the policy version that a branch began at.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentjet.config import ModelConfig
from agentjet.errors import ConfigError
from agentjet.types import ModelCard

Origin = Mapping[str, str | int]

BRANCHED_FROM = "branched_from"
FREE = ("model.device", "model.threads")
"""Change the weights by rounding only, and with the machine: said, not refused."""


def of_settings(model: ModelConfig) -> Origin:
    """What is known before the worker is up."""
    origin: dict[str, str | int] = {"model.name": model.name, "model.lora.rank": model.lora.rank}
    if model.lora.rank:
        origin["model.lora.alpha"] = model.lora.alpha
        origin["model.lora.target_modules"] = ",".join(sorted(map(str.strip, model.lora.target_modules.split(","))))
    if model.dtype != "auto":
        origin["model.dtype"] = model.dtype
    return origin


def of_worker(card: ModelCard) -> Origin:
    """What only the worker knows, before it has loaded or learned anything."""
    origin: dict[str, str | int] = {"model.dtype": card.dtype, "model.device": card.device}
    if card.weights:
        origin["model_weights"] = card.weights
    if card.threads:
        origin["model.threads"] = card.threads
    return origin


def changes(recorded: Origin, given: Origin, data_dir: Path) -> list[str]:
    """What differs and may, in words. Raises `ConfigError` for the first thing that may not."""
    differing = [key for key in given if key in recorded and recorded[key] != given[key]]
    for key in differing:
        if key not in FREE:
            named = f"{key} = {recorded[key]!r}"
            if key == "model_weights":
                named += f" (the fingerprint of the weights under model.name = {recorded.get('model.name')!r})"
            raise ConfigError(
                f"server.data_dir = {str(data_dir)!r} was created with {named}; {given[key]!r} would change the "
                "meaning of its checkpoints. Restore the first one, or use a new server.data_dir, with an export of "
                "this policy (`agentjet export`) as model.name."
            )
    return [
        f"{key} was {recorded[key]!r} and is {given[key]!r}: batches that are learned again after a crash may come to "
        "weights that differ by rounding"
        for key in differing
    ]
