"""`agentjet cluster`: the environment of the samplers, and the processes of a running server."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentjet.cli import Json, Token, TokenFile, Url, connect, print_text
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.protocol import ProcessView

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
    from agentjet.cli import sampler_venv
    from agentjet.config import ComputeConfig

    python = sampler_venv.sampler_interpreter(ComputeConfig())
    packages = sampler_venv.Packages.shipped(cuda=shutil.which("nvidia-smi") is not None)
    made = sampler_venv.install(python.parents[1], packages)
    print_text(f"{'Installed' if made else 'Installed already'}: {python}")


@app.command()
def status(url: Url = None, token: Token = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """Show the processes that host the weights of a run."""
    with connect(url, token, token_file) as swarm:
        found = swarm.cluster()
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    for line in _lines(found.processes):
        print_text(line)


@app.command()
def scale(
    settings: Annotated[list[str], typer.Argument(metavar="samplers=N", help="Such as samplers=6.")],
    policy: Annotated[str, typer.Option("--policy", metavar="NAME", help="The policy, if the run has several.")] = "",
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Change the number of sampler replicas while a run trains; needs the admin token."""
    samplers = _samplers(settings)
    with connect(url, token, token_file) as swarm:
        found = swarm.scale(samplers, policy=policy)
    for line in _lines(found.processes):
        print_text(line)
    typer.echo("A restart of the server begins with compute.samplers of its settings again.")


def _samplers(settings: list[str]) -> int:
    """The number in `samplers=N`. Raises `ConfigError`."""
    from agentjet.cli.status import parse_setting

    given: dict[str, Any] = dict(map(parse_setting, settings))
    number = given.pop("samplers", None)
    if given:
        raise ConfigError(f"{next(iter(given))!r} cannot be scaled: only samplers can, such as samplers=6")
    if type(number) is not int or number < 1:
        raise ConfigError(f"samplers = {number!r} must be a number from 1 on, such as samplers=6")
    return number


def _lines(processes: list[ProcessView]) -> list[str]:
    """A line for each process. The names of policies are shown if there are several."""
    several = len({process.policy for process in processes}) > 1
    rows = [
        (
            *([process.policy] if several else []),
            process.name,
            process.state,
            "" if process.version is None else f"version {process.version}",
            f"{process.completions} completions" if process.kind == "replica" else "",
            process.place,
        )
        for process in processes
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines or ["No process hosts weights of this run: its state is in `agentjet status`."]
