"""The `agentjet` program. Command modules import heavy libraries inside functions, so that `--help` is quick."""

from __future__ import annotations

import sqlite3
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperOption

from agentjet import __version__
from agentjet.cli import (
    Override,
    checkpoints,
    episodes,
    load_example,
    look,
    machine,
    printable,
    recipes,
    research,
    run,
    runs,
    serve,
    watch,
    with_options,
)
from agentjet.errors import AgentJetError, ConfigError, install_extra

SUMMARY = "Reinforcement learning for the language models inside agents, as a swarm."
app = typer.Typer(
    name="agentjet", help=SUMMARY, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


class OneValueCommand(TyperCommand):
    """A command that refuses an option with one value if it is given twice: the first value would be lost."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        parameters = self.make_parser(ctx).parse_args(args=list(args))[2]
        for parameter, count in Counter(parameters).items():
            has_one_value = isinstance(parameter, TyperOption) and not (parameter.multiple or parameter.is_flag)
            if count > 1 and has_one_value:
                name = max(parameter.opts, key=len)
                raise ConfigError(f"{name} is given {count} times and has one value: give it once")
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback(help=SUMMARY)
def options(
    version: Annotated[
        bool, Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """The options before a command."""


def demo(
    seed: Annotated[int, Option(help="Seed of the tasks' order, of sampling and of the learner.")] = 0,
    out: Annotated[Path, Option(help="Folder of the results; an earlier demo's are replaced.")] = Path("agentjet-demo"),
    steps: Annotated[int | None, Option(min=1, help="Batches to learn; default: as tuned.")] = None,
    model: Annotated[str | None, Option(help="Another model: a Hugging Face id or a local folder.")] = None,
    tasks: Annotated[int, Option(min=1, max=500, help="Held-out sums of each evaluation.")] = 500,
    override: Override = None,
) -> None:
    """Train a small language model to add, with an agent on OpenAI's SDK (`examples/arithmetic`).

    Starts a server on this machine, evaluates the model on held-out sums, trains it, and evaluates it again. Writes
    reward.png, report.html, result.json and the trained model (a Hugging Face folder) into the output folder.
    """
    run_demo = load_example("arithmetic", "demo").Demo(seed, out, steps, model, tasks, override or []).run
    try:
        run_demo()
    except KeyboardInterrupt:
        typer.echo(f"interrupted; the server has ended and saved a checkpoint in {out / 'server'}", err=True)
        raise typer.Exit(130) from None


for command in (
    serve.serve,
    demo,
    run.run,
    run.sft,
    runs.status,
    watch.watch,
    runs.compare,
    look.look,
    checkpoints.export,
    checkpoints.merge,
    runs.track,
    machine.doctor,
):
    app.command()(command)
app.command("eval")(run.evaluate)
app.command("open")(look.open_page)
for group in (
    runs.job_app,
    runs.runs_app,
    episodes.app,
    checkpoints.app,
    machine.cluster_app,
    recipes.app,
    runs.token_app,
    research.app,
):
    app.add_typer(group)


def _complete(group: typer.Typer) -> None:
    """Gives the commands their shared options, and refuses options that are given twice."""
    for known in group.registered_commands:
        known.cls = OneValueCommand
        if known.callback is not None:
            known.callback = with_options(known.callback)
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            _complete(inner.typer_instance)


_complete(app)


def main() -> None:
    """The console script. Errors of settings, requests and files are one sentence and exit code 2."""
    try:
        app()
    except AgentJetError as error:
        _fail(str(error))
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        raise SystemExit(130) from None  # Ctrl-C during a query: see `database.connect`.
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "agentjet":
            raise
        _fail(f"this command needs the package {error.name!r}: {install_extra('server', 'demo', 'research')}")


def _fail(message: str) -> None:
    print(f"agentjet: {printable(message)}", file=sys.stderr)
    raise SystemExit(2)
