"""`agentjet token`: the secrets of a data dir, shown and replaced. Works on the files; no server is asked."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from agentjet.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Show or replace the tokens of a server.")

DataDir = Annotated[Path, typer.Option("--data-dir", help="The server's data dir.")]
HERE = Path("agentjet-data")


@app.command()
def show(
    role: Annotated[Literal["client", "admin", "viewer"], typer.Argument(help="Whose token.")],
    data_dir: DataDir = HERE,
) -> None:
    """Print a token, and nothing else."""
    from agentjet.server.tokens import FILES, read_secret

    typer.echo(read_secret(data_dir / FILES[role]))


@app.command()
def rotate(
    role: Annotated[
        Literal["client", "admin", "viewer", "keys"],
        typer.Argument(help="Whose token; `keys` is the secret that episode keys are signed with."),
    ],
    data_dir: DataDir = HERE,
) -> None:
    """Replace a token by a new one; a running server knows it from its next request on.

    Tokens leave the keys of live episodes valid; `keys` ends every one of them at once, and no token.
    """
    from agentjet.server.tokens import FILES, replace_secret

    path = data_dir / FILES[role]
    if not path.exists():
        raise ConfigError(f"{path} is not there: --data-dir must name the data dir of a server that has run")
    replace_secret(path)
    if role == "keys":
        typer.echo(f"{path} is new: every episode key given out so far is void.")
        return
    place = "" if data_dir == HERE else f" --data-dir {shlex.quote(str(data_dir))}"
    typer.echo(f"{path} is new; the {role} token it held is void. To see it: agentjet token show {role}{place}")
    if role == "client":
        typer.echo(
            "A server started with AGENTJET_TOKEN puts that token back when it starts again: change it there, too."
        )
