"""`agentjet serve`: the options, and nothing heavy until they are read. The process itself is in `server_process`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def serve(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Settings file (TOML).")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.SETTING=VALUE", help="Override a setting; can be repeated."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Hugging Face id, local folder, or smollm2-135m. Short for --set model.name=…")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of the journal, the checkpoints and the tokens; an existing one is carried on."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on; any but a loopback one needs TLS (server.tls_cert) or --insecure."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow plain HTTP on an address that is no loopback one.")
    ] = False,
    end_with_input: Annotated[
        bool,
        typer.Option("--end-with-input", help="End when standard input does: with whoever started the server."),
    ] = False,
) -> None:
    """Serve a model for agents to use, and train it with the rewards they send back.

    Ctrl-C saves a checkpoint and ends the server; the same command carries on from there.
    """
    from agentjet.cli.server_process import run
    from agentjet.config import load_config

    overrides = list(set_ or ())
    for key, value in (
        ("model.name", model),
        ("server.data_dir", None if data_dir is None else str(data_dir)),
        ("server.port", port),
        ("server.host", host),
    ):
        if value is not None:
            overrides.append(f"{key}={json.dumps(value)}")
    if insecure:
        overrides.append("server.insecure=true")
    run(load_config(config, overrides), ends_with_input=end_with_input)
