"""`agentjet checkpoints`: what a server has saved, names for it, and going back or branching from it.

`agentjet export`: the trained model as a folder that `transformers` and vLLM load, or its adapter for `peft`.
"""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentjet.cli import Json, Token, TokenFile, Url, connect, print_text
from agentjet.errors import CheckpointError, ConfigError

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
            print_text(checkpoint_line(info))


@app.command("create")
def create_checkpoint(url: Url = None, token: Token = None, token_file: TokenFile = None) -> None:
    """Save a checkpoint of the present policy, between two batches."""
    with connect(url, token, token_file) as swarm:
        print_text(checkpoint_line(swarm.checkpoint()))


@app.command("tag")
def tag_checkpoint(
    version: Version, name: Name, url: Url = None, token: Token = None, token_file: TokenFile = None
) -> None:
    """Name a checkpoint. It is kept until the tag is removed."""
    with connect(url, token, token_file) as swarm:
        swarm.tag(version, name)
    print_text(f"policy version {version} is {name}; it is kept until: agentjet checkpoints untag {name}")


@app.command("untag")
def untag_checkpoint(name: Name, url: Url = None, token: Token = None, token_file: TokenFile = None) -> None:
    """Remove the name of a checkpoint. Later checkpoints may then push it out."""
    with connect(url, token, token_file) as swarm:
        swarm.untag(name)
    print_text(f"the tag {name} is removed")


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


def checkpoint_line(info: CheckpointInfo) -> str:
    """A checkpoint as a line."""
    line = f"step {info.policy_version:6}  {datetime.fromtimestamp(info.created):%Y-%m-%d %H:%M:%S}  {info.path}"
    line += "" if info.score is None else f"  score {info.score:.4g}"
    return line + (f"  [{', '.join(info.tags)}]" if info.tags else "")


def export(
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint folder; then no server is asked.")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The LoRA adapter alone, as a PEFT folder, instead of the whole model.")
    ] = False,
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Write a policy as a Hugging Face folder: the present one of a running server, or that of a checkpoint."""
    if out.exists():
        raise ConfigError(f"{out} exists: give the name of a folder that does not")
    if checkpoint is not None:
        source, what = _saved(checkpoint, adapter), str(checkpoint)
    else:
        with connect(url, token, token_file) as swarm:
            made = swarm.export(adapter=adapter)
        source, what = Path(made.path), f"policy version {made.policy_version}"
        if not source.is_dir():
            raise ConfigError(f"{what} was written on the server's machine, in {source}: fetch it from there")
    _copy(source, out)
    if adapter:
        typer.echo(
            f"the adapter of {what} is in {out}; load it with: PeftModel.from_pretrained(base_model, {str(out)!r})"
        )
    else:
        typer.echo(f"{what} is in {out}; score it with: agentjet eval {shlex.quote(str(out))}")


def _saved(checkpoint: Path, adapter: bool) -> Path:
    """The folder in a checkpoint that holds the model, or the adapter. Raises `CheckpointError`."""
    source = checkpoint / "policy"
    has_adapter, has_model = (source / "adapter_config.json").is_file(), (source / "config.json").is_file()
    if not has_adapter and not has_model:
        raise CheckpointError(
            f"{checkpoint} is not a whole checkpoint: it has neither policy/config.json nor policy/adapter_config.json"
        )
    if adapter and not has_adapter:
        raise CheckpointError(
            f"{checkpoint} holds all weights (model.lora.rank = 0), so it has no adapter: export it without --adapter"
        )
    if has_adapter and not adapter:
        raise CheckpointError(
            f"{checkpoint} holds a LoRA adapter, which a server has to merge: export it with --adapter, or start a "
            "server on this data dir, then run `agentjet export` without --checkpoint"
        )
    from agentjet.compute.embedded.checkpoint import verified_state  # Needs the extra `server`.

    verified_state(checkpoint)
    return source


def _copy(source: Path, out: Path) -> None:
    """Copy a folder under a name that nothing else has, then rename it, so that `out` is whole if it is there."""
    unfinished = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        shutil.copytree(source, unfinished, dirs_exist_ok=True)
        unfinished.rename(out)
    except OSError as error:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise ConfigError(f"{out} cannot be written: {error}") from None
