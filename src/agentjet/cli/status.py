"""`agentjet status`: one look at a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from agentjet.cli.options import Json, Token, TokenFile, Url, connect
from agentjet.cli.printing import one_line

if TYPE_CHECKING:
    from agentjet.protocol import CodeVersionStatus, StatusResponse, TaskSetStatus


def status(url: Url = None, token: Token = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """Show what a server is doing and what training waits for."""
    with connect(url, token, token_file) as swarm:
        now = swarm.status()
    if as_json:
        typer.echo(now.model_dump_json(indent=2))
        return
    for name, value in described(now):
        typer.echo(f"{name:12} {value}")


def described(status: StatusResponse) -> list[tuple[str, str]]:
    """A status as lines for people: name and value."""
    from agentjet.protocol import report_lines

    steps = f"{status.policy_version} of {status.max_steps}" if status.max_steps else str(status.policy_version)
    lines = [
        ("state", status.state),
        ("waiting for", status.waiting_for),
        ("model", status.model),
        ("step", steps),
        *([("branched", f"from {status.branched_from}")] if status.branched_from else []),
        ("groups", f"{status.groups_complete} of {status.batch_size} complete, {status.groups_open} open"),
        ("episodes", ", ".join(f"{count} {name}" for name, count in status.episodes.items() if count) or "none yet"),
        ("calls", f"{status.calls_active} active"),
        ("clients", _clients(status)),
    ]
    newest = list(status.code_versions.items())[-CODE_VERSIONS_SHOWN:]
    lines += [("code" if i == 0 else "", _code(name, code)) for i, (name, code) in enumerate(reversed(newest))]
    sets = status.task_sets.items()
    lines += [("task sets" if i == 0 else "", _task_set(name, one)) for i, (name, one) in enumerate(sets)]
    if status.workers_hung:
        lines.append(("workers", f"{status.workers_started} started, {status.workers_hung} killed because they hung"))
    lines += [("unusable" if i == 0 else "", path) for i, path in enumerate(status.unusable_checkpoints)]
    if status.zero_variance is not None:
        lines += [("warning" if i == 0 else "", line) for i, line in enumerate(report_lines(status.zero_variance))]
    metrics = [f"{name} {value:.4g}" for name, value in status.last_step.items() if name in SHOWN]
    lines += [("last step", ", ".join(metrics))] if metrics else []
    return [(name, one_line(value)) for name, value in lines]


def _clients(status: StatusResponse) -> str:
    """Those that hold episodes or were seen lately; the others are counted."""
    recent = [name for name, ago in status.clients.items() if ago <= RECENT_SECONDS or status.holding.get(name)]
    rest = len(status.clients) - len(recent)
    counted = [f"{rest} seen over {RECENT_SECONDS // 60} minutes ago"] if rest else []
    return ", ".join([*(_client(status, name) for name in recent), *counted]) or "none yet"


def _client(status: StatusResponse, name: str) -> str:
    held = status.holding.get(name, 0)
    return f"{name} ({f'holds {held}, ' if held else ''}seen {status.clients[name]:.0f} s ago)"


def _code(name: str, code: CodeVersionStatus) -> str:
    reward = "no reward yet" if code.reward_mean is None else f"reward {code.reward_mean:.4g} over {code.finished}"
    return f"{name}: {reward}{f', {code.aborted} not scored' if code.aborted else ''}"


def _task_set(name: str, one: TaskSetStatus) -> str:
    weight = "" if one.weight is None else f", weight {one.weight:g}"
    reward = "" if one.reward_mean is None else f", reward {one.reward_mean:.4g}"
    return f"{name}: share {one.share:.3g}{weight}{reward}, {one.groups_complete} complete, {one.groups_open} open"


CODE_VERSIONS_SHOWN = 5
"""Newest first; `--json` has more."""
RECENT_SECONDS = 600
"""A client that holds nothing is shown for so long; `--json` has them all."""
SHOWN = ("reward/mean", "episode/num_turns", "policy/entropy", "policy/kl", "optim/grad_norm", "perf/tokens_per_second")
"""Metrics of the last step that are shown; `--json` has them all."""
