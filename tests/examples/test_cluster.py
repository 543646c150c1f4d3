"""The files of `examples/cluster` parse, and their commands and settings exist. The how-to's table is computed."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from agentjet.cli.main import app
from agentjet.compute.cluster.memory import fewest_ranks, rank_need, replica_need, sampling_rate, size_from_config
from agentjet.config import load_config
from tests.cluster.test_memory import LLAMA_8B, SMOLLM2
from tests.setting_names import setting_names

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"
GB = 10**9
H100_BANDWIDTH = 3.35e12
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": SMOLLM2,
    "Qwen2.5-1.5B": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "vocab_size": 151936,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": LLAMA_8B,
    "Qwen2.5-32B": {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "vocab_size": 152064,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 27648,
    },
    "Llama-3.1-70B": {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "vocab_size": 128256,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
    },
}
"""Sizes as in the models' `config.json`."""


def launch_texts() -> list[tuple[str, str]]:
    return [
        ("slurm.sh", (FOLDER / "slurm.sh").read_text()),
        ("skypilot.yaml", yaml.safe_load((FOLDER / "skypilot.yaml").read_text())["run"]),
        ("kuberay.yaml", yaml.safe_load((FOLDER / "kuberay.yaml").read_text())["spec"]["entrypoint"]),
    ]


@pytest.mark.parametrize("name", ["one_machine.toml", "two_machines.toml"])
def test_settings_load(name: str) -> None:
    config = load_config(FOLDER / name)
    assert config.compute.backend == "cluster" and tomllib.loads((FOLDER / name).read_text())["compute"]


@pytest.mark.parametrize(("name", "text"), launch_texts(), ids=lambda value: value[:12])
def test_commands_and_settings_exist(name: str, text: str) -> None:
    [command] = re.findall(r"agentjet serve [^']*", text.replace("\\\n", " "))
    words = shlex.split(re.sub(r"\$\([^)]*\)", "HOST", command.splitlines()[0]), comments=True)
    group: Any = typer.main.get_command(app)
    context = group.commands["serve"].make_context("serve", words[2:])
    assert {one.split("=")[0] for one in context.params["override"]} <= set(setting_names())
    config = context.params["config"]
    assert config == Path("/shared/job.toml") or (ROOT / config).is_file()


@pytest.mark.parametrize("name", ["slurm.sh", "skypilot.yaml"])
def test_shell_scripts_parse(name: str) -> None:
    text = dict(launch_texts())[name]
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_job_of_kuberay_is_complete() -> None:
    found = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayJob")
    cluster = found["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    for pod in pods:
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        for container in pod["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            assert "/shared" in {mount["mountPath"] for mount in container["volumeMounts"]}
    constraint = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert constraint is not None and cluster["rayVersion"] == constraint[1]


def row(model: str) -> str:
    """The row of the table: full weights in bfloat16 on GPUs of 80 GB, 65,536 tokens of cache."""
    size = size_from_config(MODELS[model])
    mode = "gathered" if (ranks := fewest_ranks(size, 80 * GB, sharding="gathered")) else "sharded"
    ranks = ranks or fewest_ranks(size, 80 * GB, sharding="sharded")
    assert ranks is not None
    parallel = next(
        n for n in (1, 2, 4, 8) if replica_need(size, cache_tokens=65536, tensor_parallel=n).total < 72 * GB
    )
    rank = rank_need(size, ranks=ranks, sharding="gathered" if mode == "gathered" else "sharded")
    replica = replica_need(size, cache_tokens=65536, tensor_parallel=parallel)
    rate = sampling_rate(replica, size, bandwidth=H100_BANDWIDTH, concurrent=64, context=1000 // parallel)
    return (
        f"| {model} | {ranks}, {mode} | {rank.total / GB:.1f} GB (e) | {parallel} | {replica.total / GB:.1f} GB (e) "
        f"| {round(rate, -3):,.0f} (e) |"
    )


def test_the_table_of_the_how_to_is_computed() -> None:
    page = (ROOT / "docs" / "cluster-howto.md").read_text()
    assert [model for model in MODELS if row(model) not in page] == []


if __name__ == "__main__":
    print("\n".join(map(row, MODELS)))
