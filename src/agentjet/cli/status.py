"""`agentjet status` and `job`: the state of a running server, and its job settings."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentjet.cli import Json, Token, TokenFile, Url, connect, one_line, print_text
from agentjet.errors import ConfigError
from agentjet.types import DEFAULT_RUN, beginning

if TYPE_CHECKING:
    from agentjet.protocol import CodeVersionStatus, HealthView, StatusResponse, TaskSetStatus

NUM_CODE_VERSIONS = 5
"""The newest ones are shown; `--json` has more."""
NUM_CLIENTS = 4
"""The clients that are shown by name; `--json` has them all."""
MAX_CLIENT_NAME = 40
"""Characters of a client's name."""
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
        health = None if as_json else swarm.health()
    if health is None:
        typer.echo(now.model_dump_json(indent=2))
        return
    for name, value in status_lines(now, health):
        typer.echo(f"{name:12} {value}")


def status_lines(status: StatusResponse, health: HealthView | None = None) -> Lines:
    """A status as lines for people, with the trend of the reward and the health rules that are not ok."""
    from agentjet.protocol import report_lines

    end = f" of {status.ends_at_version}" if status.ends_at_version else ""
    lines = [
        ("state", status.state),
        ("waiting for", status.waiting_for),
        *([("run", status.run)] if status.run != DEFAULT_RUN else []),
        ("policies", ", ".join(status.policies)) if status.policies else ("model", status.model),
        ("step", f"{status.policy_version}{end}"),
        *([("branched", f"from {status.branched_from}")] if status.branched_from else []),
        ("groups", f"{status.groups_complete} of {status.batch_size} complete, {status.groups_open} open"),
        ("episodes", _episodes(status)),
        ("calls", f"{status.calls_active} active"),
        ("clients", clients_line(status)),
    ]
    newest = list(status.code_versions.items())[-NUM_CODE_VERSIONS:]
    lines += [("code" if i == 0 else "", code_line(name, code)) for i, (name, code) in enumerate(reversed(newest))]
    sets = status.task_sets.items()
    lines += [("task sets" if i == 0 else "", task_set_line(name, one)) for i, (name, one) in enumerate(sets)]
    if status.workers_hung:
        lines.append(("workers", f"{status.workers_started} started, {status.workers_hung} killed because they hung"))
    lines += [("abandoned" if i == 0 else "", sentence) for i, sentence in enumerate(status.abandoned_hooks)]
    lines += [("unusable" if i == 0 else "", path) for i, path in enumerate(status.unusable_checkpoints)]
    if status.zero_variance is not None:
        lines += [("warning" if i == 0 else "", line) for i, line in enumerate(report_lines(status.zero_variance))]
    if health is not None:
        lines += [("learning", health.learning.text)]
        worth = [rule for rule in health.rules if rule.level != "ok"]
        lines += [
            ("health" if i == 0 else "", f"{rule.level}: {rule.text} ({rule.docs})") for i, rule in enumerate(worth)
        ]
        lines += [] if worth else [("health", f"ok: {len(health.rules)} rules")]
    for owner in ("", *status.policies):
        start = f"{owner}/" if owner else ""
        metrics = [f"{n} {status.last_step[start + n]:.4g}" for n in SHOWN_METRICS if start + n in status.last_step]
        lines += [(f"  {owner}" if owner else "last step", ", ".join(metrics))] if metrics else []
    return [(name, one_line(value)) for name, value in lines]


def _episodes(status: StatusResponse) -> str:
    """Counts of episodes; those of dropped ones with their reasons."""
    parts = [f"{count} {name.replace('_', ' ')}" for name, count in status.episodes.items() if count]
    if status.dropped and parts and parts[-1].endswith(" dropped"):
        parts[-1] += f" ({', '.join(f'{count} {reason}' for reason, count in status.dropped.items())})"
    return ", ".join(parts) or "none yet"


def clients_line(status: StatusResponse) -> str:
    """The first clients that hold episodes or were seen recently, in this order; the others are counted."""
    from agentjet.client.agent_source import named

    shown, holding = [], status.holding
    for name, ago in sorted(status.clients.items(), key=lambda client: (-holding.get(client[0], 0), client[1])):
        held = holding.get(name, 0)
        if held or ago <= RECENT_SECONDS:
            shown.append(
                f"{beginning(name, MAX_CLIENT_NAME)} ({f'holds {held}, ' if held else ''}seen {ago:.0f} s ago)"
            )
    line = named(shown, NUM_CLIENTS)
    if rest := len(status.clients) - len(shown):
        line += f"{', ' * bool(line)}{rest} seen over {RECENT_SECONDS // 60} minutes ago"
    return line or "none yet"


def code_line(name: str, code: CodeVersionStatus) -> str:
    reward = "no reward yet" if code.reward_mean is None else f"reward {code.reward_mean:.4g} over {code.finished}"
    lost = f", {code.aborted} aborted" if code.aborted else ""
    return f"{name}: {reward}{lost}{f', {code.not_needed} not needed' if code.not_needed else ''}"


def task_set_line(name: str, one: TaskSetStatus) -> str:
    weight = "" if one.weight is None else f", weight {one.weight:g}"
    reward = "" if one.reward_mean is None else f", reward {one.reward_mean:.4g}"
    return f"{name}: share {one.share:.3g}{weight}{reward}, {one.groups_complete} complete, {one.groups_open} open"


@app.command("show")
def show_job(url: Url = None, token: Token = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """Print the job settings in force, and their revision."""
    from agentjet.protocol import flatten

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
    from agentjet.protocol import flatten

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


def _json(value: Any) -> str:
    return one_line(json.dumps(value, ensure_ascii=False))
