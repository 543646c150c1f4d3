"""`agentjet recipes`: the algorithms that a server of this installation can run, with formulas and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument

from agentjet.cli import print_text
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.recipes.recipe import Component, Recipe

app = typer.Typer(name="recipes", help="List the algorithms of training; show the formula and parameters of one.")


@app.callback(invoke_without_command=True)
def recipes(context: typer.Context) -> None:
    """List the built-in recipes and those of installed packages."""
    from agentjet.recipes import registry

    if context.invoked_subcommand is not None:
        return
    names = [*registry.built_in(), *registry.installed()]
    for name in names:
        try:
            meaning = summary(registry.find(name)).partition(": ")[2]
        except ValueError as error:  # An installed package is broken; the others work.
            meaning = f"unusable: {error}"
        print_text(f"{name:<{max(map(len, names))}}  {meaning}")
    typer.echo("agentjet recipes show NAME prints formula, source and parameters; docs/recipes.md has all")


@app.command()
def show(name: Annotated[str, Argument(metavar="NAME", help="A recipe, or package.module:Class.")]) -> None:
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


def summary(recipe: type[Recipe]) -> str:
    """Returns the first line of a recipe's description."""
    return cleandoc(recipe.__doc__ or recipe.__name__).partition("\n")[0]


def parameters(component: type[Component], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yields name, default, type and meaning of each parameter. Those of an inner part have its name in front."""
    from agentjet.config.reference import toml, type_of
    from agentjet.recipes.recipe import Component

    for name, field in component.parameters():
        meaning = " ".join((field.description or "").split())
        if isinstance(field.default, Component):
            yield f"{prefix}{name}.name", toml(field.default.name), "text", meaning
            yield from parameters(type(field.default), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", toml(field.default), type_of(field), meaning


def recipes_reference() -> str:
    """Returns the part of `docs/recipes.md` about every built-in recipe."""
    from agentjet.recipes import registry

    found = {name: registry.find(name) for name in registry.built_in()}
    shared = list(parameters(found["grpo"]))
    lines = ["| recipe | in one line |", "|---|---|"]
    lines += [f"| [`{name}`](#{name}) | {summary(recipe).partition(': ')[2]} |" for name, recipe in found.items()]
    parts = ["\n".join(lines)]
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
