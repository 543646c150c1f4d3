"""`agentjet research`: a question planned, run on swarm servers, steered and reported. A module for each command."""

from __future__ import annotations

import typer

from agentjet.cli.research.demo import demo
from agentjet.cli.research.looking import report, status
from agentjet.cli.research.new import new
from agentjet.cli.research.run import run
from agentjet.cli.research.steer import steer

app = typer.Typer(
    help="Plan a study of how a policy is best trained, run it on swarm servers, and report what can be concluded.",
    no_args_is_help=True,
)
app.command()(new)
app.command()(run)
app.command()(status)
app.command(context_settings={"ignore_unknown_options": True})(steer)  # `cap -1` is a value, and a wrong one
app.command()(report)
app.command()(demo)
