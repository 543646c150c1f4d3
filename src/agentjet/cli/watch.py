"""`agentjet watch`: a server's status, kept up to date in the terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from agentjet.cli.options import Token, TokenFile, Url, connect
from agentjet.cli.printing import printable
from agentjet.cli.status import described
from agentjet.errors import Later, Unreachable

if TYPE_CHECKING:
    from rich.table import Table

    from agentjet.protocol import StatusResponse


def watch(
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    every: Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Watch a server until Ctrl-C; it may be restarted meanwhile."""
    from rich.live import Live

    with connect(url, token, token_file) as swarm, Live(_table(swarm.status()), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                try:
                    live.update(_table(swarm.status()), refresh=True)
                except (Unreachable, Later) as error:
                    live.console.print(printable(str(error)), markup=False)
        except KeyboardInterrupt:
            pass


def _table(status: StatusResponse) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in described(status):
        table.add_row(Text(name, style="bold"), Text(value))
    return table
