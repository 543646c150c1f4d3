"""`agentjet export`: the trained model as a folder that `transformers` and vLLM load, or its adapter for `peft`."""

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
    from agentjet.compute.embedded.digests import verified_state  # Needs the extra `server`.

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
