"""`agentjet`: the commands, each in a module of its own that imports what it needs when it runs: `--help` is quick."""

from __future__ import annotations

import sys

import typer

from agentjet.cli import printable
from agentjet.cli.checkpoints import app as checkpoints
from agentjet.cli.checkpoints import export
from agentjet.cli.data_dir import app as token
from agentjet.cli.data_dir import compare
from agentjet.cli.demo import demo
from agentjet.cli.episodes import app as episodes
from agentjet.cli.eval import evaluate
from agentjet.cli.research import app as research
from agentjet.cli.run import run
from agentjet.cli.serve import serve
from agentjet.cli.status import app as job
from agentjet.cli.status import status, watch
from agentjet.errors import AgentJetError

app = typer.Typer(
    name="agentjet",
    help="Reinforcement learning for the language models inside agents, as a swarm.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(demo)
app.command()(run)
app.command("eval")(evaluate)
app.command()(status)
app.command()(watch)
app.add_typer(job, name="job")
app.add_typer(episodes, name="episodes")
app.add_typer(checkpoints, name="checkpoints")
app.command()(compare)
app.add_typer(token, name="token")
app.command()(export)
app.add_typer(research, name="research")


@app.callback()
def agentjet() -> None:
    """Reinforcement learning for the language models inside agents, as a swarm."""


def main() -> None:
    """The console script: what is wrong with a setting or a request is a sentence, not a traceback."""
    try:
        app()
    except AgentJetError as error:
        print(f"agentjet: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        said = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"agentjet: {printable(said)}", file=sys.stderr)
        raise SystemExit(2) from None
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "agentjet":
            raise
        needed = "pip install 'agentjet[server,demo,research]'"
        print(f"agentjet: this command needs the package {error.name!r}: {needed}", file=sys.stderr)
        raise SystemExit(2) from None
