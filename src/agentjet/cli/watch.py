"""`agentjet watch`: a server's status, kept up to date in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from agentjet.cli.options import Token, TokenFile, Url, connect
from agentjet.cli.printing import printable, say
from agentjet.cli.status import described
from agentjet.errors import Later, Unreachable

if TYPE_CHECKING:
    from rich.table import Table

    from agentjet.client import Swarm
    from agentjet.protocol import StatusResponse


def watch(
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    every: Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Watch a server until Ctrl-C; it may be restarted meanwhile. A file or a pipe gets a text for each change."""
    from rich.live import Live

    with connect(url, token, token_file) as swarm, suppress(KeyboardInterrupt):
        if not sys.stdout.isatty():
            for frame in frames(_looks(swarm, every, say)):
                say(frame)
            return
        with Live(auto_refresh=False) as live:
            for status in _looks(swarm, every, lambda text: live.console.print(printable(text), markup=False)):
                live.update(_table(status), refresh=True)


def frames(looks: Iterable[StatusResponse]) -> Iterator[str]:
    """For files and pipes: a text for each look that differs from the one before in more than its clients."""
    shown: list[tuple[str, str]] = []
    for status in looks:
        lines = described(status)
        facts = [line for line in lines if line[0] != "clients"]
        if facts != shown:
            shown = facts
            yield "".join(f"{name:12} {value}\n" for name, value in lines)


def _looks(swarm: Swarm, every: float, tell: Callable[[str], None]) -> Iterator[StatusResponse]:
    """The status now and again, without end; `tell` is given what fails after the first look."""
    yield swarm.status()
    while True:
        time.sleep(every)
        try:
            yield swarm.status()
        except (Unreachable, Later) as error:
            tell(str(error))


def _table(status: StatusResponse) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in described(status):
        table.add_row(Text(name, style="bold"), Text(value))
    return table
