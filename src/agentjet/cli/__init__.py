"""Options that several commands share.

What others wrote (ids, names, reasons, sampled tokens), for people to read in a terminal, which obeys none of it.

Output for programs does not pass here: JSON has escapes of its own.
"""

from __future__ import annotations

import unicodedata
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


JOINERS = "\u200c\u200d"
"""Invisible, but letters and emoji are put together with them."""


def print_text(text: str) -> None:
    """Print a line, or several."""
    typer.echo(printable(text))


def printable(text: str, *, keep: str = "\n\t") -> str:
    """`text` with everything that could steer a terminal, or turn what stands there around, as Python would escape it;
    control characters in `keep` stay.
    """
    if text.isprintable():
        return text
    return "".join(c.encode("unicode_escape").decode() if _steers(c) and c not in keep else c for c in text)


def one_line(text: str) -> str:
    """The same within a line, which it cannot end."""
    return printable(text, keep="")


def _steers(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in JOINERS
