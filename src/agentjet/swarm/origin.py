"""The origin of a run: what the weights of its policies follow from, besides the batches of the journal.

It is recorded when a data dir is created and compared at every start, because from another origin the same
`policy_version` would be other weights. Keys are settings, except `model_weights` (the fingerprint of the weights under
`model.name`), `policies` (the policies that the settings name, sorted) and `branched_from` (the data dir and the policy
version that a branch began at). Keys about a named policy have `POLICY/` in front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agentjet.config import ModelConfig
from agentjet.errors import ConfigError
from agentjet.types import SOLE_POLICY, ModelInfo, metrics_prefix

Origin = Mapping[str, str | int]
BRANCHED_FROM = "branched_from"
POLICIES = "policies"


def of_settings(models: Mapping[str, ModelConfig]) -> Origin:
    """The part of an origin that is known before a worker runs. `models` are those of the policies by name."""
    policies = named_policies(models)
    origin: dict[str, str | int] = {POLICIES: ",".join(sorted(policies))} if policies else {}
    for policy, model in models.items():
        prefix = metrics_prefix(policy, policies)
        origin |= {f"{prefix}model.name": model.name, f"{prefix}model.lora.rank": model.lora.rank}
        if model.lora.rank:
            targets = sorted(map(str.strip, model.lora.target_modules.split(",")))
            origin |= {f"{prefix}model.lora.alpha": model.lora.alpha}
            origin |= {f"{prefix}model.lora.target_modules": ",".join(targets)}
        if model.dtype != "auto":
            origin[f"{prefix}model.dtype"] = model.dtype
    return origin


def of_worker(info: ModelInfo, prefix: str) -> Origin:
    """The part of a policy's origin that a worker reports, before it loads or learns anything."""
    weights = {f"{prefix}model_weights": info.weights} if info.weights else {}
    return {f"{prefix}model.dtype": info.dtype, **weights}


def named_policies(models: Mapping[str, ModelConfig]) -> tuple[str, ...]:
    """The policies that the settings name; none in a run with one policy without a name."""
    return () if models.keys() == {SOLE_POLICY} else tuple(models)


def policies_of(origin: Origin) -> tuple[str, ...]:
    """The policies that the settings named when the origin was recorded, sorted."""
    return tuple(filter(None, str(origin.get(POLICIES, "")).split(",")))


def of_policy(origin: Origin, policy: str) -> Origin:
    """The origin of a policy, without the policy's name in its keys."""
    prefix = metrics_prefix(policy, policies_of(origin))
    return {key.removeprefix(prefix): value for key, value in origin.items() if key.startswith(prefix)}


def check_policies(recorded: Origin, policies: Sequence[str], folder: Path) -> None:
    """Raises `ConfigError` if a run was created with other policies."""
    before = policies_of(recorded)
    if {*policies} != {*before}:
        raise ConfigError(
            f"The run in {str(folder)!r} was created with {_named(before)}; the settings have {_named(policies)}. The "
            "policies of a run cannot change: restore [policies], or use another run."
        )


def check(recorded: Origin, given: Origin, folder: Path) -> None:
    """Raises `ConfigError` for the first difference in the keys that both have."""
    for key in [key for key in given if key in recorded and recorded[key] != given[key]]:
        policy, slash, setting = key.rpartition("/")
        named = f"{setting} = {recorded[key]!r}"
        if setting == "model_weights":
            name = recorded.get(f"{policy}{slash}model.name")
            named += f" (the fingerprint of the weights under model.name = {name!r})"
        named += f" for policy {policy!r}" if policy else ""
        raise ConfigError(
            f"The run in {str(folder)!r} was created with {named}; {given[key]!r} would change the meaning of its "
            "checkpoints. Restore the first one, or use a new run or a new server.data_dir, with an export of this "
            "policy (`agentjet export`) as model.name."
        )


def _named(policies: Sequence[str]) -> str:
    return f"the policies {', '.join(sorted(policies))}" if policies else "no named policies"
