"""The files of `examples/cluster` parse, and their commands and settings exist."""

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
from agentjet.config import load_config
from tests.setting_names import setting_names

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"


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
