"""`agentjet export`: the trained model as a folder that `transformers` and vLLM load."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from agentjet.cli.options import Token, TokenFile, Url, connect
from agentjet.errors import CheckpointError, ConfigError


def export(
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="A checkpoint folder; then no server is asked.", exists=True, file_okay=False)
    ] = None,
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Write a policy as a Hugging Face folder: the present one of a running server, or that of a checkpoint."""
    if out.exists():
        raise ConfigError(f"{out} exists: give the name of a folder that does not")
    if checkpoint is not None:
        source = checkpoint / "policy"
        if (source / "adapter_config.json").exists():
            raise CheckpointError(
                f"{checkpoint} holds LoRA adapters, which a server has to merge: start one on this data dir, then "
                "run `agentjet export` without --checkpoint"
            )
        if not (source / "config.json").is_file():
            raise CheckpointError(f"{checkpoint} is not a whole checkpoint: it has no policy/config.json")
        from agentjet.compute.embedded.digests import verified_state  # Needs the extra `server`.

        verified_state(checkpoint)
        what = str(checkpoint)
    else:
        with connect(url, token, token_file) as swarm:
            made = swarm.export()
        source, what = Path(made.path), f"policy version {made.policy_version}"
        if not source.is_dir():
            raise ConfigError(f"{what} was written on the server's machine, in {source}: fetch it from there")
    _copy(source, out)
    typer.echo(f"{what} is in {out}; score it with: agentjet eval {shlex.quote(str(out))}")


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
