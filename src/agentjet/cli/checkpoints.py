"""`agentjet checkpoints`: what a server has saved, names for it, and going back or branching from it."""

from __future__ import annotations

import json
import shlex
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentjet.cli.options import Json, Token, TokenFile, Url, connect
from agentjet.cli.printing import say
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.protocol import CheckpointInfo

app = typer.Typer(no_args_is_help=True, help="List, save and name checkpoints; go back to one, branch from one.")

Version = Annotated[int, typer.Argument(metavar="VERSION", min=0, help="Policy version of the checkpoint.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="A letter, then letters, digits, dots, dashes, underscores.")]


@app.command("list")
def list_checkpoints(url: Url = None, token: Token = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """List a server's checkpoints, oldest first, with their tags and held-out scores."""
    with connect(url, token, token_file) as swarm:
        found = swarm.checkpoints()
    if as_json:
        typer.echo(json.dumps([info.model_dump() for info in found], indent=2))
    elif not found:
        typer.echo("none yet; `agentjet checkpoints create` saves one")
    else:
        for info in found:
            say(described(info))


@app.command("create")
def create_checkpoint(url: Url = None, token: Token = None, token_file: TokenFile = None) -> None:
    """Save a checkpoint of the present policy, between two batches."""
    with connect(url, token, token_file) as swarm:
        say(described(swarm.checkpoint()))


@app.command("tag")
def tag_checkpoint(
    version: Version, name: Name, url: Url = None, token: Token = None, token_file: TokenFile = None
) -> None:
    """Name a checkpoint. It is kept until the tag is removed."""
    with connect(url, token, token_file) as swarm:
        swarm.tag(version, name)
    say(f"policy version {version} is {name}; it is kept until: agentjet checkpoints untag {name}")


@app.command("untag")
def untag_checkpoint(name: Name, url: Url = None, token: Token = None, token_file: TokenFile = None) -> None:
    """Remove the name of a checkpoint. Later checkpoints may then push it out."""
    with connect(url, token, token_file) as swarm:
        swarm.untag(name)
    say(f"the tag {name} is removed")


@app.command("rollback")
def roll_back_to(
    version: Annotated[str, typer.Argument(metavar="VERSION", help="Policy version or tag of a checkpoint.")],
    data_dir: Annotated[Path, typer.Option("--data-dir", help="The data dir of a stopped server.")],
) -> None:
    """Take a stopped server's policy back to a checkpoint; the batches learned since are undone.

    The policy gets a new version number, with the weights of the old one.
    """
    from agentjet.cli.lineage import roll_back

    done, job = roll_back(data_dir, version)
    typer.echo(
        f"Policy version {done.policy_version} has the weights of version {done.to}. Undone: {done.batches} batches.\n"
        f"Dropped as rolled_back: {done.trained} trained episodes and {done.waiting} that waited; {done.live} live "
        f"ones are aborted."
    )
    for name, end in (("max_steps", job.max_steps), ("optimizer.total_steps", job.optimizer.total_steps)):
        if 0 < end <= done.policy_version:
            typer.echo(f"job.{name} = {end} is reached at version {done.policy_version}: raise it to train on.")
    typer.echo(f"Go on with: agentjet serve --data-dir {shlex.quote(str(data_dir))}")


@app.command("branch")
def branch_from(
    source: Annotated[
        str, typer.Argument(metavar="DATA_DIR@VERSION", help="A data dir, and the version or tag of its checkpoint.")
    ],
    data_dir: Annotated[Path, typer.Argument(metavar="NEW", help="The data dir to make.")],
) -> None:
    """Begin a new data dir at a checkpoint of another one, which is only read."""
    from agentjet.cli.lineage import branch

    old, at, version = source.rpartition("@")
    if not at or not old or not version:
        raise ConfigError(f"{source!r} is not of the form DATA_DIR@VERSION, such as agentjet-data@40")
    began = branch(Path(old), version, data_dir)
    typer.echo(
        f"{data_dir} begins at policy version {began} of {old}.\n"
        f"Go on with the same model settings: agentjet serve --data-dir {shlex.quote(str(data_dir))}"
    )


def described(info: CheckpointInfo) -> str:
    """A checkpoint as a line."""
    line = f"step {info.policy_version:6}  {datetime.fromtimestamp(info.created):%Y-%m-%d %H:%M:%S}  {info.path}"
    line += "" if info.score is None else f"  score {info.score:.4g}"
    return line + (f"  [{', '.join(info.tags)}]" if info.tags else "")
