"""`agentjet open`: opens the page of a run in the browser."""

from __future__ import annotations

import os
import re
import socket
import sys
import webbrowser
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlencode, urlsplit

import typer

from agentjet.cli import Token, TokenFile, Url, connect
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.client import Swarm

MEANING = (
    "What the session may do: viewer reads; client also saves, exports and aborts; admin also changes the job. "
    "It needs the token of that role."
)
Role = Annotated[Literal["viewer", "client", "admin"], typer.Option("--role", help=MEANING)]
VIEWS = ("episodes", "groups", "batches", "swarm", "studies", "compare", "runs")
"""Beginnings of the paths of the page."""
View = Annotated[str, typer.Argument(metavar="VIEW", help="View to open, such as `episodes` or `batches/3`.")]


def open_page(
    view: View = "",
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    role: Role = "viewer",
    only_print: Annotated[bool, typer.Option("--print", help="Print the address and open nothing.")] = False,
) -> None:
    """Open the page of a run in the browser: is it learning, is it healthy, what does it wait for.

    The address contains a code that opens one session within a minute. The session ends after 12 hours.
    """
    from agentjet.client.connection import LOOPBACK

    check_view(view)
    with connect(url, token, token_file) as swarm:
        address = page_address(swarm, role, view)
        server = swarm.url
    typer.echo(f"{address}\nThis address opens one session, within 60 seconds. For another one, run the command again.")
    if only_print:
        return
    if has_browser(os.environ):
        webbrowser.open(address)
    elif urlsplit(server).hostname in LOOPBACK:
        typer.echo(f"To open it on another machine, first run there: {tunnel_command(server)}")


def check_view(view: str) -> None:
    """Raises `ConfigError` for a view that the page does not have."""
    name = re.split(r"[/?]", view.strip("#").strip("/"), maxsplit=1)[0]
    if name and name not in VIEWS:
        raise ConfigError(f"{view!r} is not a view: give one of {', '.join(VIEWS)}, or nothing for the Overview")


def page_address(swarm: Swarm, role: Literal["viewer", "client", "admin"], view: str) -> str:
    """Returns the address that opens one session of the page."""
    code = swarm.session_code(role).code
    path = view.strip("#").strip("/")
    server = swarm.url.partition("/runs/")[0]  # The code names the run.
    return f"{server}/#" + urlencode({"code": code, **({"to": f"/{path}"} if path else {})})


def has_browser(environ: Mapping[str, str]) -> bool:
    """True if a browser that this process starts is visible to its user."""
    if "SSH_CONNECTION" in environ:
        return False
    return sys.platform in ("darwin", "win32") or "DISPLAY" in environ or "WAYLAND_DISPLAY" in environ


def tunnel_command(server: str) -> str:
    """Returns the command that forwards the port of a server on loopback to another machine."""
    port = urlsplit(server).port or 80
    return f"ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}"
