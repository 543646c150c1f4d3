"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.client import Swarm

Url = Annotated[
    str | None, typer.Option("--url", help="The server's address; default: AGENTJET_URL, then port 8400 here.")
]
Token = Annotated[str | None, typer.Option("--token", help="The server's token; default: AGENTJET_TOKEN.")]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="File with the token: `token` in the server's data dir.")
]
Override = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.SETTING=VALUE", help="Override a setting of the server; can be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")]


def connect(url: str | None, token: str | None, token_file: Path | None, *, client_id: str | None = None) -> Swarm:
    """A client of the server that the options name. Raises `ConfigError` when the token file cannot be read."""
    from agentjet.client import Swarm

    if token_file is not None:
        if token is not None:
            raise ConfigError("--token and --token-file exclude each other")
        try:
            token = token_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"--token-file {token_file}: {error.strerror}") from None
    return Swarm(url, token, client_id=client_id, instance_id="")  # Each command is a process of its own.
