"""The origin of a run: what the weights of its policies follow from, besides the batches of the journal.

It is recorded when a data dir is created and compared at every start, because from another origin the same
`policy_version` would be other weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from agentjet.config import ModelConfig
from agentjet.errors import ConfigError
from agentjet.types import SOLE_POLICY, ModelInfo, metrics_prefix

PolicyOrigin = Mapping[str, str | int]
"""Settings of a policy's model by name, and `model_weights`: the fingerprint of the weights under `model.name`."""
REPORTED = ("model.dtype", "model_weights")
"""Settings that a worker reports; the last ones in a comparison."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of each policy; of `policy` alone if the settings of the run name none."""

    policies: Mapping[str, PolicyOrigin] = field(default_factory=dict)
    branched_from: str = ""
    """`DATA_DIR@VERSION` at which a branch began."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads an origin. Earlier journals have one table with keys `POLICY/SETTING`, and the names with commas."""
        recorded = json.loads(text)
        if "policies" not in recorded or isinstance(recorded["policies"], str):
            branched_from, names = recorded.pop("branched_from", ""), recorded.pop("policies", "")
            policies: dict[str, dict[str, str | int]] = {}
            for key, value in recorded.items():
                policy, _, setting = key.rpartition("/")
                policies.setdefault(policy or SOLE_POLICY, {})[setting] = value
            for name in filter(None, names.split(",")):
                policies.setdefault(name, {})
            return cls(policies, branched_from)
        return cls(recorded["policies"], recorded.get("branched_from", ""))

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"), ensure_ascii=False)

    @property
    def named(self) -> tuple[str, ...]:
        """The policies that the settings named, sorted."""
        return tuple(sorted(named_policies(self.policies)))

    def of(self, policy: str) -> PolicyOrigin:
        return self.policies.get(policy, {})

    def with_policies(self, given: Mapping[str, PolicyOrigin]) -> Origin:
        """The same origin, in which `given` replaces or completes settings."""
        merged = {policy: {**self.of(policy), **given.get(policy, {})} for policy in {**self.policies, **given}}
        return Origin(merged, self.branched_from)

    def flattened(self) -> dict[str, str | int]:
        """Settings by `POLICY/SETTING`, for a comparison of runs."""
        flat: dict[str, str | int] = {"policies": ",".join(self.named)} if self.named else {}
        settings = [(policy, *setting) for policy, own in self.policies.items() for setting in own.items()]
        for policy, setting, value in sorted(settings, key=lambda each: each[1] in REPORTED):
            flat[f"{metrics_prefix(policy, self.named)}{setting}"] = value
        return flat | ({"branched_from": self.branched_from} if self.branched_from else {})


def of_settings(model: ModelConfig) -> PolicyOrigin:
    """The part of a policy's origin that is known before a worker runs."""
    origin: dict[str, str | int] = {"model.name": model.name, "model.lora.rank": model.lora.rank}
    if model.lora.rank:
        targets = sorted(map(str.strip, model.lora.target_modules.split(",")))
        origin |= {"model.lora.alpha": model.lora.alpha, "model.lora.target_modules": ",".join(targets)}
    if model.dtype != "auto":
        origin["model.dtype"] = model.dtype
    return origin


def of_worker(info: ModelInfo) -> PolicyOrigin:
    """The part of a policy's origin that a worker reports, before it loads or learns anything."""
    return {"model.dtype": info.dtype, **({"model_weights": info.weights} if info.weights else {})}


def named_policies(policies: Mapping[str, object]) -> tuple[str, ...]:
    """The policies that the settings name; none in a run with one policy without a name."""
    return () if policies.keys() == {SOLE_POLICY} else tuple(policies)


def check_policies(recorded: Origin, policies: Sequence[str], folder: Path) -> None:
    """Raises `ConfigError` if a run was created with other policies."""
    if {*policies} != {*recorded.named}:
        raise ConfigError(
            f"The run in {str(folder)!r} was created with {_named(recorded.named)}; the settings have "
            f"{_named(policies)}. The policies of a run cannot change: restore [policies], or use another run."
        )


def check(recorded: Origin, policy: str, given: PolicyOrigin, folder: Path) -> None:
    """Raises `ConfigError` for the first difference in the settings of a policy that both have."""
    before = recorded.of(policy)
    for setting in [setting for setting in given if setting in before and before[setting] != given[setting]]:
        named = f"{setting} = {before[setting]!r}"
        if setting == "model_weights":
            named += f" (the fingerprint of the weights under model.name = {before.get('model.name')!r})"
        named += f" for policy {policy!r}" if recorded.named else ""
        raise ConfigError(
            f"The run in {str(folder)!r} was created with {named}; {given[setting]!r} would change the meaning of its "
            "checkpoints. Restore the first one, or use a new run or a new server.data_dir, with an export of this "
            "policy (`agentjet export`) as model.name."
        )


def _named(policies: Sequence[str]) -> str:
    return f"the policies {', '.join(sorted(policies))}" if policies else "no named policies"
