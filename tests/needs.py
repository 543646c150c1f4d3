"""What some tests need beside `make setup`: a program, a package or a device.

A test without it is skipped, and the reason has the command that gives it. `AGENTJET_REQUIRE=ray,browser` names what
must be there: such a test fails instead. No other module of the tests may skip for a missing thing
(`tests/test_needs.py`), so a run of the tests says by name what it left out.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

REQUIRE = "AGENTJET_REQUIRE"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NODE_EXAMPLE = Path(__file__).parents[1] / "examples" / "black_box_node"


def has_packages(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


def has_program(*names: str) -> bool:
    return any(map(shutil.which, names))


def has_cuda() -> bool:
    import torch  # Most tests import none of these.

    return torch.cuda.is_available()


def has_bubblewrap() -> bool:
    from agentjet import sandbox

    return not sandbox.missing()


def has_docker() -> bool:
    from agentjet.environments.kinds.harbor_machines import container_program

    return bool(container_program())


def has_vllm() -> bool:
    from tests.cluster.local_replica import sampler_python

    return sampler_python() is not None


NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "bitsandbytes": (partial(has_packages, "bitsandbytes"), "bitsandbytes: pip install -e '.[bitsandbytes]'"),
    "browser": (partial(has_program, *BROWSERS), "Chromium: apt-get install chromium"),
    "bubblewrap": (has_bubblewrap, "a machine with sandboxes: apt-get install bubblewrap"),
    "compiler": (partial(has_program, "g++"), "a C++ compiler: apt-get install g++"),
    "cpu": (lambda: True, "a CPU"),
    "cuda": (has_cuda, "a CUDA device"),
    "docker": (has_docker, "docker or podman that works: apt-get install podman"),
    "gymnasium": (partial(has_packages, "gymnasium"), "Gymnasium: pip install gymnasium"),
    "inspect": (partial(has_packages, "inspect_ai"), "inspect: pip install inspect-ai"),
    "ipykernel": (
        partial(has_packages, "ipykernel", "jupyter_client"),
        "a kernel of Jupyter: pip install ipykernel",
    ),
    "mcp": (partial(has_packages, "mcp"), "the SDK of MCP: pip install mcp"),
    "mistral-common": (
        partial(has_packages, "mistral_common", "jsonschema"),
        "its oracle: pip install mistral-common jsonschema",
    ),
    "mlflow": (partial(has_packages, "mlflow", "sqlalchemy", "alembic"), "MLflow: pip install -e '.[mlflow]'"),
    "nginx": (partial(has_program, "nginx"), "nginx: apt-get install nginx"),
    "node": (partial(has_program, "node"), "Node: apt-get install nodejs"),
    "npm-openai": (
        (NODE_EXAMPLE / "node_modules" / "openai").is_dir,
        "npm's openai: npm install in examples/black_box_node",
    ),
    "openenv": (partial(has_packages, "openenv"), "OpenEnv: pip install openenv"),
    "openssl": (partial(has_program, "openssl"), "the program openssl: apt-get install openssl"),
    "ray": (partial(has_packages, "ray"), "Ray: make ray"),
    "reasoning-gym": (partial(has_packages, "reasoning_gym"), "reasoning-gym: pip install reasoning-gym"),
    "scienceworld": (
        lambda: has_packages("scienceworld") and has_program("java"),
        "ScienceWorld: pip install scienceworld, and apt-get install default-jre-headless",
    ),
    "tensorboard": (partial(has_packages, "tensorboard"), "TensorBoard: pip install tensorboard"),
    "textarena": (partial(has_packages, "textarena"), "TextArena: pip install textarena"),
    "trackio": (partial(has_packages, "trackio"), "Trackio: pip install -e '.[trackio]'"),
    "trl": (partial(has_packages, "trl"), "TRL: pip install trl"),
    "verifiers": (partial(has_packages, "verifiers", "renderers", "transformers"), "verifiers: pip install verifiers"),
    "vllm": (has_vllm, "vLLM: agentjet cluster install, or set AGENTJET_SAMPLER_PYTHON"),
    "wandb": (partial(has_packages, "wandb"), "Weights & Biases: pip install -e '.[wandb]'"),
}
"""By name, a check and the sentence of the skipped test."""


def need(name: str) -> None:
    """Skips the test, or the module that is being imported, if the machine lacks what `name` stands for."""
    is_there, sentence = NEEDS[name]
    if is_there():
        return
    if name in required():
        pytest.fail(f"{REQUIRE} names {name!r}; the test needs {sentence}", pytrace=False)
    pytest.skip(f"needs {sentence}", allow_module_level=True)


def required() -> set[str]:
    """Returns the names in `AGENTJET_REQUIRE`. Raises `UsageError` for a name that is not in `NEEDS`."""
    names = {name for name in os.environ.get(REQUIRE, "").split(",") if name}
    if unknown := names - NEEDS.keys():
        raise pytest.UsageError(f"{REQUIRE}: {', '.join(sorted(unknown))}: the names are {', '.join(NEEDS)}")
    return names
