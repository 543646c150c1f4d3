"""The `agentjet` program. Command modules import heavy libraries inside functions, so that `--help` is quick."""

from __future__ import annotations

import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperOption

from agentjet import __version__
from agentjet.cli import (
    Json,
    Override,
    aligned,
    checkpoints,
    env,
    episodes,
    load_example,
    look,
    machine,
    print_text,
    printable,
    research,
    run,
    runs,
    serve,
    sft,
    watch,
    with_options,
)
from agentjet.errors import AgentJetError, ConfigError, install_extra

if TYPE_CHECKING:
    from agentjet.recipes.recipe import Component, Recipe

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


# ---- recipes ---------------------------------------------------------------------------------------------------------

recipes_app = typer.Typer(
    name="recipes", help="List the algorithms of training; show the formula and parameters of one; check yours."
)


@recipes_app.callback(invoke_without_command=True)
def recipes(context: typer.Context, as_json: Json = False) -> None:
    """List the built-in recipes by families, the first ones to take, and those of installed packages."""
    import json

    from agentjet.recipes import registry

    if context.invoked_subcommand is not None:
        return
    rows = []
    for name in (*registry.BUILT_IN, *registry.installed()):
        try:
            recipe = registry.find(name)
            meaning, label = summary(recipe).partition(": ")[2], confidence(recipe)
        except ValueError as error:  # An installed package is broken; the others work.
            meaning, label = f"unusable: {error}", ""
        rows.append({"name": name, "family": registry.BUILT_IN.get(name, ""), "meaning": meaning, "confidence": label})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    typer.echo("Begin with one of these; * is the default:")
    uses = [(_marked(name), f"for {use}; leave it for {leave}") for name, (use, leave) in registry.FIRST.items()]
    families = {**registry.families(), "": "of installed packages"}
    lines = aligned([*uses, *((_marked(row["name"]), row["meaning"]) for row in rows)])
    for line in lines[: len(uses)]:
        print_text(line)
    for row, line in zip(rows, lines[len(uses) :], strict=True):
        if meaning := families.pop(row["family"], ""):
            print_text(f"\n{row['family'] or 'others'}: {meaning}")
        print_text(line)
    typer.echo(
        "\nagentjet recipes show NAME prints formula, source and parameters; docs/which-recipe.md has more reasons"
    )


def _marked(name: str) -> str:
    from agentjet.recipes.registry import DEFAULT

    return f"{'*' if name == DEFAULT else ' '} {name}"


@recipes_app.command("show")
def show_recipe(name: Annotated[str, Argument(metavar="NAME", help="A recipe, or package.module:Class.")]) -> None:
    """Show a recipe: formula, source, when to use it, cost, and parameters with their defaults."""
    from agentjet.recipes import registry

    try:
        recipe = registry.find(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    print_text(cleandoc(recipe.__doc__ or ""))
    typer.echo(f'\n[job.recipe]\nname = "{name}"')
    shared = list(parameters(registry.find(registry.DEFAULT)))
    found = sorted(parameters(recipe), key=lambda one: one in shared)  # First what makes this recipe different.
    for parameter, default, kind, meaning in found:
        print_text(f"{f'{parameter} = {default}':<30} # {kind}. {meaning}")


@recipes_app.command("check")
def check_recipe(
    name: Annotated[
        str,
        Argument(metavar="RECIPE", help="FILE.py:CLASS, package.module:CLASS or a name; CLASS may be a PolicyLoss."),
    ],
    parameter: Annotated[
        list[str] | None,
        Option("--set", metavar="PARAMETER=VALUE", help="Set a parameter of the recipe; can be repeated."),
    ] = None,
    hook_timeout: Annotated[
        float | None, Option(min=0.001, help="Seconds that a call may take; default: that of server.hook_timeout.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a recipe without a server and a model: run all its hooks on small batches.

    Prints what the recipe makes of a group of episodes, and one line for each hook: shapes, finite numbers, gradients,
    equal results for equal input, time. A PolicyLoss is checked within `grpo`. Exit code 1 if something is wrong.
    """
    import json
    from dataclasses import asdict

    from agentjet.config.loader import parse_config, parse_overrides
    from agentjet.recipes.check import check
    from agentjet.recipes.hooks import HOOK_SECONDS

    path = _import_path(name)
    prefix = "job.recipe.loss" if _is_loss(path) else "job.recipe"
    settings: dict[str, Any] = {f"{prefix}.name": path, "job.group_size": 64}  # No smallest group is refused.
    for key, value in parse_overrides(parameter or []):
        settings[f"{prefix}.{key.removeprefix('job.recipe.')}"] = value
    report = check(parse_config(settings).job.recipe, hook_timeout or HOOK_SECONDS)
    if as_json:
        typer.echo(json.dumps({"ok": report.ok, **asdict(report)}, indent=2))
    else:
        print_text(str(report))
    if not report.ok:
        raise typer.Exit(1)


def _import_path(name: str) -> str:
    """Returns a name of `recipes check` for a server. The folder of a file becomes one from which modules come."""
    file, _, kind = name.rpartition(":")
    path = Path(file or name)
    if path.suffix != ".py":
        return name
    if not path.is_file():
        raise ConfigError(f"{str(path)!r}: there is no such file")
    if not file:
        raise ConfigError(f"{name!r} names no class: write {name}:CLASS")
    sys.path.insert(0, str(path.parent.resolve()))
    known = sys.modules.get(path.stem)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() != path.resolve():
        raise ConfigError(f"{file!r} has the name of another module, {path.stem}: rename the file")
    return f"{path.stem}:{kind}"


def _is_loss(path: str) -> bool:
    """True for the import path of a `PolicyLoss`. The errors of others come with the recipe."""
    from agentjet.recipes import registry
    from agentjet.recipes.losses import PolicyLoss

    try:
        return ":" in path and bool(registry.load(path, PolicyLoss))
    except ValueError:
        return False


def summary(recipe: type[Recipe]) -> str:
    return cleandoc(recipe.__doc__ or recipe.__name__).partition("\n")[0]


def confidence(recipe: type[Recipe]) -> str:
    """Returns what is known about a recipe's equality with its source: the label in its description, '' without one."""
    label = re.search(r"Confidence:\s+(equal\s+to|after|inspired\s+by)\b", recipe.__doc__ or "")
    return " ".join(label[1].split()) if label else ""


def parameters(
    component: type[Component], prefix: str = "", default: Component | None = None
) -> Iterator[tuple[str, str, str, str]]:
    """Yields name, default, type and meaning of each parameter. Those of an inner part have its name in front.
    `default` is the part with its values in the recipe.
    """
    from agentjet.config.loader import toml, type_of
    from agentjet.recipes.recipe import Component

    for name, field in component.parameters():
        meaning = " ".join((field.description or "").split())
        if isinstance(field.default, Component):
            yield f"{prefix}{name}.name", toml(field.default.name), "text", meaning
            yield from parameters(type(field.default), f"{prefix}{name}.", field.default)
        else:
            value = field.default if default is None else getattr(default, name)
            yield f"{prefix}{name}", toml(value), type_of(field), meaning


def recipes_reference() -> str:
    """Returns the part of `docs/recipes.md` about every built-in recipe."""
    from agentjet.recipes import registry

    found = {name: registry.find(name) for name in registry.built_in()}
    shared = list(parameters(found["grpo"]))
    parts = []
    for chapter, meaning in registry.families().items():
        lines = [f"**{chapter}**: {meaning}", "", "| recipe | in one line | confidence |", "|---|---|---|"]
        for name in registry.CHAPTERS[chapter].split():
            link = f"[`{name}`](#{name}){', the default' if name == registry.DEFAULT else ''}"
            lines.append(f"| {link} | {summary(found[name]).partition(': ')[2]} | {confidence(found[name])} |")
        parts.append("\n".join(lines))
    for name, recipe in found.items():
        own = shared if name == "grpo" else [one for one in parameters(recipe) if one not in shared]
        table = ["| parameter | type | default | meaning |", "|---|---|---|---|"]
        table += [f"| `{one}` | {kind} | `{default}` | {meaning} |" for one, default, kind, meaning in own]
        more = "" if name == "grpo" else _inherited(recipe, [one for one, *_ in own])
        body = f"```\n{cleandoc(recipe.__doc__ or '')}\n```"
        parts.append(
            "\n\n".join([f"### {name}", body, *(["\n".join(table)] if own else []), *([more] if more else [])])
        )
    return "\n\n".join(parts) + "\n"


def _inherited(recipe: type[Recipe], own: list[str]) -> str:
    rest = [f"`{name}`" for name, *_ in parameters(recipe) if name not in own]
    return f"As in `grpo`: {', '.join(rest)}." if rest else ""


# ---- the program -----------------------------------------------------------------------------------------------------

for command in (
    serve.serve,
    demo,
    run.run,
    sft.sft,
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
    env.app,
    checkpoints.app,
    machine.cluster_app,
    recipes_app,
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
