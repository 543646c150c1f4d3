"""`agentjet checkpoints`: what a server has saved, and saving now."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated

import typer

from agentjet.cli.options import Json, Token, TokenFile, Url, connect


def checkpoints(
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    create: Annotated[bool, typer.Option("--create", help="Save one of the present policy first.")] = False,
    as_json: Json = False,
) -> None:
    """List a server's checkpoints, oldest first."""
    with connect(url, token, token_file) as swarm:
        if create:
            swarm.checkpoint()
        found = swarm.checkpoints()
    if as_json:
        typer.echo(json.dumps([info.model_dump() for info in found], indent=2))
    elif not found:
        typer.echo("none yet; `agentjet checkpoints --create` saves one")
    else:
        for info in found:
            typer.echo(
                f"step {info.policy_version:6}  {datetime.fromtimestamp(info.created):%Y-%m-%d %H:%M:%S}  {info.path}"
            )
