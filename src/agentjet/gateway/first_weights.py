"""First weights of a policy that begins from a checkpoint of another run: `model.name = "RUN@VERSION"`.

At the first start, the policy of the checkpoint is written into the folder `start/` of the new run as a whole model,
with its adapter merged. From then on this folder is the model of version 0, and the other run is not needed. The
optimiser begins without moments.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from agentjet.compute.protocol import Compute
from agentjet.config import ComputeConfig, LoraConfig, ModelConfig
from agentjet.errors import CheckpointError, ConfigError
from agentjet.gateway.checkpoints import CheckpointStore, policy_folders
from agentjet.swarm import Journal
from agentjet.swarm.origin import of_policy, policies_of
from agentjet.types import JOURNAL, SOLE_POLICY, CheckpointName, PolicyId

FOLDER = "start"


def whole_model(run_folder: Path, name: str) -> Path | None:
    """Returns the folder with the first weights of a model in a run; None if `name` is not that of a checkpoint."""
    if CheckpointName.parse(name) is None or Path(name).is_dir():
        return None
    return run_folder / FOLDER / name


def resolved(run_folder: Path, model: ModelConfig) -> ModelConfig:
    """Returns settings whose `name` is a model for backends."""
    folder = whole_model(run_folder, model.name)
    return model if folder is None else model.model_copy(update={"name": str(folder)})


def check(run_folder: Path, model: ModelConfig) -> None:
    """Raises `ConfigError` if the model is a checkpoint that is neither written yet nor available."""
    folder = whole_model(run_folder, model.name)
    if folder is not None and not folder.exists():
        find_source(run_folder, model)


async def write(
    run_folder: Path, policy: PolicyId, model: ModelConfig, compute: Compute, *, worker: str, settings: ComputeConfig
) -> None:
    """Writes the first weights of a policy if its model is a checkpoint and they are missing. Atomic.

    Raises `ConfigError`, and `CheckpointError` for a damaged checkpoint.
    """
    folder = whole_model(run_folder, model.name)
    if folder is None or folder.exists():
        return
    checkpoint, trained = find_source(run_folder, model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    await compute.add(policy, trained, worker=worker, settings=settings)
    await compute.load(policy, checkpoint)
    await compute.export(policy, folder)
    await compute.remove(policy)


def find_source(run_folder: Path, model: ModelConfig) -> tuple[Path, ModelConfig]:
    """Returns the checkpoint of the policy that a model names, and the model settings that it was trained with.

    Raises `ConfigError` with the existing runs, policies or versions.
    """
    wanted = CheckpointName.parse(model.name)
    assert wanted is not None
    start, runs = f"model.name = {model.name!r}", run_folder.parent
    folder = runs / wanted.run
    if folder == run_folder or not (folder / JOURNAL).is_file():
        known = sorted({path.parent.name for path in runs.glob(f"*/{JOURNAL}")} - {run_folder.name})
        raise ConfigError(
            f"{start}: this data dir has no other run {wanted.run!r}; others are {', '.join(known) or 'none'}. For a "
            "run of another data dir, export its policy (agentjet export) and give the folder as model.name"
        )
    with closing(Journal.open_read_only(folder / JOURNAL)) as journal:
        origin = journal.origin
    policies = policies_of(origin)
    policy = wanted.policy or SOLE_POLICY
    if policy not in (policies or (SOLE_POLICY,)):
        names = (
            " or ".join(f"{wanted.run}/{one}@{wanted.version}" for one in policies) or f"{wanted.run}@{wanted.version}"
        )
        raise ConfigError(f"{start}: the run {wanted.run!r} has no such policy; give {names}")
    try:
        store = CheckpointStore(folder)
        checkpoint = policy_folders(store.path(store.find(wanted.version)))[policy]
    except CheckpointError as error:
        raise ConfigError(f"{start}: {error}") from None
    own = of_policy(origin, policy)
    lora = {key: own[f"model.lora.{key}"] for key in ("rank", "alpha", "target_modules") if f"model.lora.{key}" in own}
    settings = {"name": own["model.name"], "dtype": own["model.dtype"], "lora": LoraConfig.model_validate(lora)}
    return checkpoint, resolved(folder, model.model_copy(update=settings))
