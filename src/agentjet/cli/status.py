"""`agentjet status`, `watch` and `job`: the state of a running server, and its job settings."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentjet.cli import Json, Token, TokenFile, Url, connect, one_line, print_text
from agentjet.errors import ConfigError, Later, Unreachable
from agentjet.types import DEFAULT_RUN

if TYPE_CHECKING:
    from agentjet.client import Swarm
    from agentjet.protocol import CodeVersionStatus, StatusResponse, TaskSetStatus

NUM_CODE_VERSIONS = 5
"""The newest ones are shown; `--json` has more."""
RECENT_SECONDS = 600
"""A client without episodes is shown for so long; `--json` has them all."""
SHOWN_METRICS = (
    "reward/mean",
    "episode/num_turns",
    "policy/entropy",
    "policy/kl",
    "policy/cross_entropy",
    "optim/grad_norm",
    "perf/tokens_per_second",
)
"""Metrics of the last step, of the batch and of each policy; `--json` has them all."""
CLEAR = "\x1b[H\x1b[J"
"""Moves a terminal's cursor to the top, and erases everything below it."""
Lines = list[tuple[str, str]]
"""Names and values."""
RESTART_HINT = (
    "The change survives a restart, unless the server is then started with other job settings than at its last start: "
    "put it into the settings file, too."
)

app = typer.Typer(name="job", no_args_is_help=True, help="Show and change the job settings of a running server.")


def status(url: Url = None, token: Token = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """Show the state of a server and the reason why training waits."""
    with connect(url, token, token_file) as swarm:
        now = swarm.status()
    if as_json:
        typer.echo(now.model_dump_json(indent=2))
        return
    for name, value in status_lines(now):
        typer.echo(f"{name:12} {value}")


def status_lines(status: StatusResponse) -> Lines:
    """A status as lines for people."""
    from agentjet.protocol import report_lines

    steps = f"{status.policy_version} of {status.max_steps}" if status.max_steps else str(status.policy_version)
    lines = [
        ("state", status.state),
        ("waiting for", status.waiting_for),
        *([("run", status.run)] if status.run != DEFAULT_RUN else []),
        ("policies", ", ".join(status.policies)) if status.policies else ("model", status.model),
        ("step", steps),
        *([("branched", f"from {status.branched_from}")] if status.branched_from else []),
        ("groups", f"{status.groups_complete} of {status.batch_size} complete, {status.groups_open} open"),
        ("episodes", _episodes(status)),
        ("calls", f"{status.calls_active} active"),
        ("clients", _clients(status)),
    ]
    newest = list(status.code_versions.items())[-NUM_CODE_VERSIONS:]
    lines += [("code" if i == 0 else "", _code(name, code)) for i, (name, code) in enumerate(reversed(newest))]
    sets = status.task_sets.items()
    lines += [("task sets" if i == 0 else "", _task_set(name, one)) for i, (name, one) in enumerate(sets)]
    if status.workers_hung:
        lines.append(("workers", f"{status.workers_started} started, {status.workers_hung} killed because they hung"))
    lines += [("unusable" if i == 0 else "", path) for i, path in enumerate(status.unusable_checkpoints)]
    if status.zero_variance is not None:
        lines += [("warning" if i == 0 else "", line) for i, line in enumerate(report_lines(status.zero_variance))]
    for owner in ("", *status.policies):
        start = f"{owner}/" if owner else ""
        metrics = [f"{n} {status.last_step[start + n]:.4g}" for n in SHOWN_METRICS if start + n in status.last_step]
        lines += [(f"  {owner}" if owner else "last step", ", ".join(metrics))] if metrics else []
    return [(name, one_line(value)) for name, value in lines]


def _episodes(status: StatusResponse) -> str:
    """Counts of episodes; those of dropped ones with their reasons."""
    parts = [f"{count} {name}" for name, count in status.episodes.items() if count]
    if status.dropped and parts and parts[-1].endswith(" dropped"):
        parts[-1] += f" ({', '.join(f'{count} {reason}' for reason, count in status.dropped.items())})"
    return ", ".join(parts) or "none yet"


def _clients(status: StatusResponse) -> str:
    """Clients that hold episodes or were seen recently; the others are counted."""
    shown = []
    for name, ago in status.clients.items():
        held = status.holding.get(name, 0)
        if held or ago <= RECENT_SECONDS:
            shown.append(f"{name} ({f'holds {held}, ' if held else ''}seen {ago:.0f} s ago)")
    if rest := len(status.clients) - len(shown):
        shown.append(f"{rest} seen over {RECENT_SECONDS // 60} minutes ago")
    return ", ".join(shown) or "none yet"


def _code(name: str, code: CodeVersionStatus) -> str:
    reward = "no reward yet" if code.reward_mean is None else f"reward {code.reward_mean:.4g} over {code.finished}"
    return f"{name}: {reward}{f', {code.aborted} not scored' if code.aborted else ''}"


def _task_set(name: str, one: TaskSetStatus) -> str:
    weight = "" if one.weight is None else f", weight {one.weight:g}"
    reward = "" if one.reward_mean is None else f", reward {one.reward_mean:.4g}"
    return f"{name}: share {one.share:.3g}{weight}{reward}, {one.groups_complete} complete, {one.groups_open} open"


def watch(
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    every: Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds between two requests.")] = 1.0,
) -> None:
    """Watch a server until Ctrl-C, also across restarts. A file or a pipe gets a text for each change."""
    with connect(url, token, token_file) as swarm, suppress(KeyboardInterrupt):
        reports, is_terminal = _reports(swarm, every), sys.stdout.isatty()
        for lines in reports if is_terminal else changes(reports):
            typer.echo((CLEAR if is_terminal else "") + "".join(f"{name:12} {value}\n" for name, value in lines))


def _reports(swarm: Swarm, every: float) -> Iterator[Lines]:
    """The status every `every` seconds, without end; after the first one also errors."""
    yield status_lines(swarm.status())
    while True:
        time.sleep(every)
        try:
            yield status_lines(swarm.status())
        except (Unreachable, Later) as error:
            yield [("error", one_line(str(error)))]


def changes(reports: Iterable[Lines]) -> Iterator[Lines]:
    """The reports that differ from the one before in more than the clients, whose ages change every second."""
    shown = None
    for lines in reports:
        facts = [line for line in lines if line[0] != "clients"]
        if facts != shown:
            yield lines
        shown = facts


@app.command("show")
def show_job(url: Url = None, token: Token = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """Print the job settings in force, and their revision."""
    with connect(url, token, token_file) as swarm:
        body = swarm.job()
    if as_json:
        typer.echo(body.model_dump_json(indent=2))
        return
    for key, value in flatten(body.job, "job."):
        print_text(f"{key} = {_json(value)}")
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
    """Change job settings of a running server; needs the admin token. A batch that is composed keeps its settings."""
    given: dict[str, Any] = {}
    for key, value in map(parse_setting, settings):
        if key in given:
            raise ConfigError(f"job.{key} = {value!r}: job.{key} is given twice; give it one value")
        given[key] = value
    with connect(url, token, token_file) as swarm:
        before, after = swarm.job(), swarm.change_job(given)
        version = swarm.status().policy_version if "max_steps" in given else 0
    if as_json:
        typer.echo(after.model_dump_json(indent=2))
        return
    old = dict(flatten(before.job, "job."))
    changed = [(key, value) for key, value in flatten(after.job, "job.") if old.get(key) != value]
    for key, value in changed:
        print_text(f"{key}: {_json(old.get(key))} -> {_json(value)}")
    typer.echo(f"revision {after.revision}" + ("" if changed else ": every setting had its value already"))
    if 0 < (end := after.job["max_steps"]) <= version:
        typer.echo(f"job.max_steps = {end} is reached at version {version}: raise it to continue training.")
    typer.echo(RESTART_HINT)


def parse_setting(setting: str) -> tuple[str, Any]:
    """Key without `job.`, and value of `KEY=VALUE`, as TOML if it is valid. Raises `ConfigError`."""
    from agentjet.config.loader import parse_value

    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{setting!r} is not of the form KEY=VALUE, such as optimizer.lr=1e-5")
    return key.strip().removeprefix("job."), parse_value(text)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted name. A table of weights is one value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and name != "task_weights":
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _json(value: Any) -> str:
    return one_line(json.dumps(value, ensure_ascii=False))
