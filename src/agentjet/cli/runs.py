"""`agentjet runs`: list, create and end the runs of a server. Needs the server's admin token."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentjet.cli import Json, Token, TokenFile, Url, connect, print_text
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.protocol import RunView

app = typer.Typer(
    name="runs", no_args_is_help=True, help="List, create and end the runs of a server; needs its admin token."
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A lower-case letter or digit, then also `.`, `_`, `-`.")]
SECTIONS = ("policies", "job")
"""Sections of a settings file that a run has; the others belong to the server."""


@app.command("list")
def list_runs(url: Url = None, token: Token = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """List the runs of a server, the default run first."""
    with connect(url, token, token_file) as swarm:
        found = swarm.runs()
    if as_json:
        typer.echo(json.dumps([run.model_dump(mode="json") for run in found], indent=2))
        return
    width = max(len(run.name) for run in found)
    for run in found:
        print_text(f"{run.name:{width}}  {_facts(run)}")


@app.command("create")
def create_run(
    name: Name,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", help="Settings file (TOML) with sections policies.NAME and job; default: the server's."
        ),
    ] = None,
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Create a run, open one that was ended, or change its job settings. Can be repeated."""
    settings = _settings(config)
    with connect(url, token, token_file) as swarm:
        made = swarm.start_run(name, **settings)
        address = swarm.of_run(name).url
    print_text(f"{name}: {_facts(made)}")
    typer.echo(
        "Its tokens are on the server's machine. There: agentjet token show client --data-dir DATA_DIR --run "
        f"{name}\nNext:\n  export AGENTJET_URL={address} AGENTJET_TOKEN=...\n  agentjet status"
    )


@app.command("end")
def end_run(name: Name, url: Url = None, token: Token = None, token_file: TokenFile = None) -> None:
    """Save a checkpoint of a run and close it. Its files remain: `agentjet runs create NAME` opens it again."""
    with connect(url, token, token_file) as swarm:
        print_text(f"{name}: {_facts(swarm.end_run(name))}")


def _facts(run: RunView) -> str:
    """A run as a line of text, without its name."""
    policies = f", policies {', '.join(run.policies)}" if run.policies else ""
    if not run.is_open:
        return f"not open{policies}{f': {run.reason}' if run.reason else ''}"
    reason = f" ({run.reason})" if run.reason else ""
    return f"{run.state}{reason}, policy version {run.policy_version}{policies}"


def _settings(path: Path | None) -> dict[str, Any]:
    """The sections of a settings file. Raises `ConfigError` for one that a run does not have."""
    from agentjet.config.loader import read_toml

    found = {} if path is None else read_toml(path)
    if foreign := [name for name in found if name not in SECTIONS]:
        near = get_close_matches(foreign[0], SECTIONS, n=1)
        hint = f"did you mean [{near[0]}]?" if near else "the settings of the server are not those of a run"
        raise ConfigError(f"{str(path)!r} has {foreign[0]!r}: a run has [policies.NAME] and [job] only; {hint}")
    return found
