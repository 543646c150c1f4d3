"""`agentjet job`: the job settings of a running server, shown and changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from agentjet.cli.options import Json, Token, TokenFile, Url, connect
from agentjet.cli.printing import one_line, say
from agentjet.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Show and change the job settings of a running server.")

KEPT = (
    "The change survives a restart, unless the server is then started with other job settings than at its last start: "
    "put it into the settings file, too."
)


@app.command("show")
def show_job(url: Url = None, token: Token = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """Print the job settings in force, and their revision."""
    with connect(url, token, token_file) as swarm:
        body = swarm.job()
    if as_json:
        typer.echo(body.model_dump_json(indent=2))
        return
    for key, value in flat(body.job, "job."):
        say(f"{key} = {one_line(shown(value))}")
    typer.echo(f"revision {body.revision}")


@app.command("set")
def set_job(
    settings: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="Such as optimizer.lr=1e-5 or job.batch_size=4.")
    ],
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Change job settings of a running server; takes the admin token. A batch that is composed keeps its settings."""
    changes: dict[str, Any] = {}
    for key, value in map(parsed, settings):
        if key.removeprefix("job.") in [known.removeprefix("job.") for known in changes]:
            raise ConfigError(f"{key} = {value!r}: {key} is given twice: give it one value")
        changes[key] = value
    with connect(url, token, token_file) as swarm:
        before, after = swarm.job(), swarm.change_job(changes)
    if as_json:
        typer.echo(after.model_dump_json(indent=2))
        return
    old = dict(flat(before.job, "job."))
    changed = [(key, value) for key, value in flat(after.job, "job.") if old.get(key) != value]
    for key, value in changed:
        say(f"{key}: {one_line(shown(old.get(key)))} -> {one_line(shown(value))}")
    typer.echo(f"revision {after.revision}" + ("" if changed else ": every setting had its value already"))
    typer.echo(KEPT)


def parsed(setting: str) -> tuple[str, Any]:
    """`KEY=VALUE` as key and value, which is TOML where it can be. Raises `ConfigError`."""
    from agentjet.config.load import parse_value

    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{setting!r} is not of the form KEY=VALUE, such as optimizer.lr=1e-5")
    return key.strip(), parse_value(text)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted name. A table of weights is one value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and name != "task_weights":
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def shown(value: Any) -> str:
    """A setting's value as JSON."""
    return json.dumps(value, ensure_ascii=False)
