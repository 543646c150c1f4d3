"""`agentjet merge`: one model from several policies with a common base."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from agentjet.cli import new_path, print_text
from agentjet.cli.progress import progress
from agentjet.errors import ConfigError


def merge(
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER...", help="Exports, adapters, or folders `policy` of checkpoints, from one base model."
        ),
    ],
    base: Annotated[
        str, typer.Option(metavar="MODEL", help="The base model, as in model.name; default: that of the adapters.")
    ] = "",
    rescale: Annotated[
        float,
        typer.Option(min=1, help="RAM+: largest factor for weights that one model alone changed, such as 1.2. 1: RAM."),
    ] = 1.0,
) -> None:
    """Merge policies that were trained from one base model into a Hugging Face folder (RAM).

    A weight that several models changed gets the mean of their changes. A weight that a single model changed keeps its
    change whole, where averaging would shrink it.
    """
    from agentjet.compute.merging import merge_folders

    if len(folders) < 2:
        raise ConfigError(f"{folders[0]} alone: give two or more folders to merge")
    for folder in folders:
        if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
            raise ConfigError(f"{folder} is not the folder of a model or an adapter: it has no config.json")
    with new_path(out) as unfinished, progress(f"merging {len(folders)} models"):
        shares = merge_folders(unfinished, folders, base, rescale)
    for folder, found in zip(folders, shares, strict=True):
        total = max(1, found.shared + found.unique)
        print_text(f"{folder}: {found.shared + found.unique} weights changed, {found.unique / total:.0%} by it alone")
    typer.echo(f"the merged model is in {out}; score it with: agentjet eval {shlex.quote(str(out))}")
