"""Runs on a server and in data dirs: `status`, `job`, `runs`, `compare`, `track` and `token`."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from agentjet.cli import Json, Run, Server, Token, TokenFile, aligned, folder_of, one_line, print_text, run_folder, show
from agentjet.errors import ConfigError, counted, nearest_name
from agentjet.types import DEFAULT_RUN, beginning

if TYPE_CHECKING:
    from agentjet.client import Swarm
    from agentjet.protocol import (
        CodeVersionStatus,
        ComparisonView,
        FrontView,
        HealthView,
        RunView,
        StatusResponse,
        StepList,
        TaskSetStatus,
    )
    from agentjet.trackers import TrackedStep

# ---- status ----------------------------------------------------------------------------------------------------------

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


def status(server: Server, as_json: Json = False) -> None:
    """Show the state of a server and the reason why training waits."""
    with server.connect() as swarm:
        now = swarm.status()
        health = None if as_json else swarm.health()
    show(now, as_json, lambda now: (f"{name:12} {value}" for name, value in status_lines(now, health)))


def status_lines(status: StatusResponse, health: HealthView | None = None) -> list[tuple[str, str]]:
    """A status as names and values for people, with the trend of the reward and the health rules that are not ok."""
    return [
        (name if i == 0 else "", one_line(value))
        for name, values in _status_rows(status, health)
        for i, value in enumerate([values] if isinstance(values, str) else values)
    ]


def _status_rows(status: StatusResponse, health: HealthView | None) -> Iterator[tuple[str, str | Sequence[str]]]:
    from agentjet.protocol import report_lines

    yield "state", status.state
    yield "waiting for", status.waiting_for
    yield "run", [status.run] if status.run != DEFAULT_RUN else []
    yield ("policies", ", ".join(status.policies)) if status.policies else ("model", status.model)
    yield "step", f"{status.policy_version}{f' of {status.ends_at_version}' if status.ends_at_version else ''}"
    yield "branched", [f"from {status.branched_from}"] if status.branched_from else []
    yield "groups", f"{status.groups_complete} of {status.batch_size} complete, {status.groups_open} open"
    yield "episodes", _episodes(status)
    yield "calls", f"{status.calls_active} active"
    yield "fronts", front_lines(status)
    yield "clients", clients_line(status)
    yield "code", code_lines(status, NUM_CODE_VERSIONS)
    yield "task sets", task_set_lines(status)
    hung = f"{status.workers_started} started, {status.workers_hung} killed because they hung"
    yield "workers", [hung] if status.workers_hung else []
    yield "abandoned", status.abandoned_hooks
    yield "unusable", status.unusable_checkpoints
    yield "warning", [] if status.zero_variance is None else report_lines(status.zero_variance)
    if health is not None:
        yield "learning", health.learning.text
        worth = [f"{rule.level}: {rule.text} ({rule.docs})" for rule in health.rules if rule.level != "ok"]
        yield "health", worth or f"ok: {len(health.rules)} rules"
    for owner in ("", *status.policies):
        start = f"{owner}/" if owner else ""
        metrics = [f"{n} {status.last_step[start + n]:.4g}" for n in SHOWN_METRICS if start + n in status.last_step]
        yield f"  {owner}" if owner else "last step", [", ".join(metrics)] if metrics else []


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


def code_lines(status: StatusResponse, num: int) -> list[str]:
    """The newest `num` code versions, the newest first."""

    def line(name: str, code: CodeVersionStatus) -> str:
        reward = "no reward yet" if code.reward_mean is None else f"reward {code.reward_mean:.4g} over {code.finished}"
        lost = f", {code.aborted} aborted" if code.aborted else ""
        return f"{name}: {reward}{lost}{f', {code.not_needed} not needed' if code.not_needed else ''}"

    return [line(name, code) for name, code in reversed(list(status.code_versions.items())[-num:])]


def task_set_lines(status: StatusResponse) -> list[str]:
    def line(name: str, one: TaskSetStatus) -> str:
        weight = "" if one.weight is None else f", weight {one.weight:g}"
        reward = "" if one.reward_mean is None else f", reward {one.reward_mean:.4g}"
        return f"{name}: share {one.share:.3g}{weight}{reward}, {one.groups_complete} complete, {one.groups_open} open"

    return [line(name, one) for name, one in status.task_sets.items()]


def front_lines(status: StatusResponse) -> list[str]:
    """A line for each process that answers calls; none if the server answers them."""

    def line(one: FrontView) -> str:
        begun = one.problem or f"{counted(one.calls, 'call')}, {one.load:.0%} of a core, lag {one.lag:.2g} s"
        ends = one.starts - 1
        return f"{one.front}: {begun}" + (f", {counted(ends, 'restart')}" if ends > 0 else "")

    return [line(one) for one in status.fronts]


# ---- job -------------------------------------------------------------------------------------------------------------

RESTART_HINT = (
    "The change survives a restart, unless the server is then started with other job settings than at its last start: "
    "put it into the settings file, too."
)
job_app = typer.Typer(name="job", no_args_is_help=True, help="Show and change the job settings of a running server.")


@job_app.command("show")
def show_job(server: Server, as_json: Json = False) -> None:
    """Print the job settings in force, and their revision."""
    from agentjet.protocol import flatten

    with server.connect() as swarm:
        body = swarm.job()
    settings = [f"{key} = {_json(value)}" for key, value in flatten(body.job, "job.")]
    show(body, as_json, lambda body: [*settings, f"revision {body.revision}"])


@job_app.command("set")
def set_job(
    settings: Annotated[
        list[str], Argument(metavar="KEY=VALUE...", help="Such as optimizer.lr=1e-5 or job.batch_size=4.")
    ],
    server: Server,
    as_json: Json = False,
) -> None:
    """Change job settings of a running server; needs the admin token. A batch that is composed keeps its settings."""
    from agentjet.protocol import flatten

    given: dict[str, Any] = {}
    for key, value in map(parse_setting, settings):
        if key in given:
            raise ConfigError(f"job.{key} = {value!r}: job.{key} is given twice; give it one value")
        given[key] = value
    with server.connect() as swarm:
        before, after = swarm.job(), swarm.change_job(given)
        version = swarm.status().policy_version if "max_steps" in given else 0
    old = dict(flatten(before.job, "job."))
    changed = [(key, value) for key, value in flatten(after.job, "job.") if old.get(key) != value]
    lines = [f"{key}: {_json(old.get(key))} -> {_json(value)}" for key, value in changed]
    lines.append(f"revision {after.revision}" + ("" if changed else ": every setting had its value already"))
    if 0 < (end := after.job["max_steps"]) <= version:
        lines.append(f"job.max_steps = {end} is reached at version {version}: raise it to continue training.")
    show(after, as_json, lambda _: [*lines, RESTART_HINT])


def parse_setting(setting: str) -> tuple[str, Any]:
    """Key without `job.`, and value of `KEY=VALUE`, as TOML if it is valid. Raises `ConfigError`."""
    from agentjet.config.loader import parse_value

    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{setting!r} is not of the form KEY=VALUE, such as optimizer.lr=1e-5")
    return key.strip().removeprefix("job."), parse_value(text)


def _json(value: Any) -> str:
    return one_line(json.dumps(value, ensure_ascii=False))


# ---- runs ------------------------------------------------------------------------------------------------------------

Name = Annotated[str, Argument(metavar="NAME", help="A lower-case letter or digit, then also `.`, `_`, `-`.")]
SECTIONS = ("policies", "job")
"""Sections of a settings file that a run has; the others belong to the server."""
runs_app = typer.Typer(
    name="runs", no_args_is_help=True, help="List, create and end the runs of a server; needs its admin token."
)


@runs_app.command("list")
def list_runs(server: Server, as_json: Json = False) -> None:
    """List the runs of a server, the default run first."""
    with server.connect() as swarm:
        found = swarm.runs()
    show(found, as_json, lambda found: aligned([run.name, _facts(run)] for run in found))


@runs_app.command("create")
def create_run(
    name: Name,
    server: Server,
    config: Annotated[
        Path | None,
        Option(
            "--config", "-c", help="Settings file (TOML) with sections policies.NAME and job; default: the server's."
        ),
    ] = None,
) -> None:
    """Create a run, open one that was ended, or change its job settings. Can be repeated."""
    settings = _settings(config)
    with server.connect() as swarm:
        made = swarm.start_run(name, **settings)
        address = swarm.of_run(name).url
    print_text(f"{name}: {_facts(made)}")
    typer.echo(
        "Its tokens are on the server's machine. There: agentjet token show client --data-dir DATA_DIR --run "
        f"{name}\nNext:\n  export AGENTJET_URL={address} AGENTJET_TOKEN=...\n  agentjet status"
    )


@runs_app.command("end")
def end_run(name: Name, server: Server) -> None:
    """Save a checkpoint of a run and close it. Its files remain: `agentjet runs create NAME` opens it again."""
    with server.connect() as swarm:
        print_text(f"{name}: {_facts(swarm.end_run(name))}")


def _facts(run: RunView) -> str:
    """A run as a line of text, without its name."""
    policies = f", policies {', '.join(run.policies)}" if run.policies else ""
    if not run.is_open:
        return f"not open{policies}{f': {run.reason}' if run.reason else ''}"
    reason = f" ({run.reason})" if run.reason else ""
    return f"{run.state}{reason}, policy version {run.policy_version}{policies}"


def _settings(path: Path | None) -> dict[str, Any]:
    """The sections of a settings file. Raises `ConfigError` for one that a run does not have."""
    from agentjet.config.loader import read_toml

    found = {} if path is None else read_toml(path)
    if foreign := [name for name in found if name not in SECTIONS]:
        near = nearest_name(foreign[0], SECTIONS)
        hint = f"did you mean [{near}]?" if near else "the settings of the server are not those of a run"
        raise ConfigError(f"{str(path)!r} has {foreign[0]!r}: a run has [policies.NAME] and [job] only; {hint}")
    return found


# ---- compare ---------------------------------------------------------------------------------------------------------


def compare(
    runs: Annotated[list[Path], Argument(metavar="RUN RUN...", help="Data dirs, or their folders runs/NAME.")],
    run: Run = DEFAULT_RUN,
    as_json: Json = False,
) -> None:
    """Compare runs: rewards, held-out scores, cost, and the settings that differ."""
    if len(runs) < 2:
        raise ConfigError(
            f"{str(runs[0])!r} is only one run: name another one beside it, such as agentjet compare "
            f"{runs[0]} OTHER_DATA_DIR, or two folders DATA_DIR/runs/NAME"
        )
    compared = read_runs(runs, run)
    _check_different(runs, run)
    figures = [one.figures for one in compared.runs]
    if as_json:
        found = [{"run": one.title, **one.figures} for one in compared.runs]
        typer.echo(json.dumps({"runs": found, "settings": compared.settings, "notes": compared.notes}, indent=2))
        return
    rows = [["", *map(str, runs)]]
    rows += [[name.replace("_", " "), *(_figure(one[name]) for one in figures)] for name in figures[0]]
    rows += [["settings that differ", *([""] * len(runs))]] if compared.settings else []
    rows += [[key, *map(_setting, values)] for key, values in compared.settings.items()]
    for line in (*aligned(rows, right=True), *compared.notes):
        print_text(line)


def _check_different(runs: list[Path], run: str) -> None:
    """Raises `ConfigError` for a run that is named twice."""
    seen: dict[Path, Path] = {}
    for path in runs:
        other = seen.setdefault(folder_of(path, run).resolve(), path)
        if other is not path:
            raise ConfigError(
                f"{str(other)!r} and {str(path)!r} are the same run: name two different ones; those of one data dir "
                "are its folders runs/NAME"
            )


def read_runs(paths: Sequence[Path], run: str = DEFAULT_RUN) -> ComparisonView:
    """The figures of runs and the settings that differ, from their folders or data dirs. Raises `ConfigError`."""
    from agentjet.server.collection import Collection
    from agentjet.server.read import RunReader

    async def read() -> ComparisonView:
        readers = {str(path): RunReader.at(folder_of(path, run), title=str(path)) for path in paths}
        collection = Collection(readers, {})
        try:
            for reader in readers.values():
                reader.check()
            return await collection.compare([*readers])
        finally:
            await collection.close()

    compared = asyncio.run(read())
    for one in compared.runs:
        if not one.figures["batches"] and not one.evaluations:
            raise ConfigError(
                f"{one.title!r} has no batch and no evaluation, so there is nothing to compare: name a data dir whose "
                "server has learned a batch, or recorded an evaluation (swarm.train, swarm.evaluate)"
            )
    return compared


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def _setting(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


# ---- track -----------------------------------------------------------------------------------------------------------

PATIENCE = 3600.0
"""Seconds after which a server that does not answer ends `track`."""


def track(
    source: Annotated[
        str | None,
        Argument(metavar="[URL|PATH]", help="A server, its ADDRESS/runs/NAME, or a data dir; default: AGENTJET_URL."),
    ] = None,
    to: Annotated[
        str,
        Option(
            "--to",
            metavar="KIND:TARGET",
            help="tensorboard:DIR, wandb:PROJECT, mlflow:URI, trackio:PROJECT, csv:FILE, jsonl:FILE or module:Class.",
        ),
    ] = "",
    name: Annotated[str, Option("--name", help="Name of the run in the tracker; default: made from the run.")] = "",
    once: Annotated[bool, Option("--once", help="End after the steps that a server has now.")] = False,
    every: Annotated[float, Option(min=0.1, max=86_400, help="Seconds between two looks for new steps.")] = 5.0,
    run: Run = DEFAULT_RUN,
    folder: Annotated[Path, Option("--cursors", help="Folder of the cursors.")] = Path("agentjet-track"),
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Copy the steps of a run to a tracker, each exactly once, also those before the start of this command.

    A server is followed until its job ends, across its restarts; if it is away for an hour, the command ends. A data
    dir is copied once, also that of a stopped run. The same command, started again, goes on where it was. Training does
    not depend on this process.
    """
    from agentjet.client import Retry
    from agentjet.client.threads import raise_on_signals
    from agentjet.trackers import FORMS, Follower, open_tracker

    if not to:
        raise ConfigError(f"--to is missing: give one of {FORMS}, or module:Class")
    tracker, pause = open_tracker(to), partial(time.sleep, every)
    follow = partial(Follower, tracker=tracker, name=name, folder=folder, say=print_text, pause=pause)
    with raise_on_signals(), suppress(KeyboardInterrupt):
        if source is not None and "://" not in source:
            follow(steps_of_folder(Path(source), run)).run(stay=False)
            return
        with Server(source, token, token_file).connect(retry=Retry(patience=PATIENCE)) as swarm:
            follow(steps_of_server(swarm)).run(stay=not once)


@dataclass(frozen=True)
class RunSource:
    """A `Source` of steps: a run that is read from a server or from its folder."""

    title: str
    settings: Callable[[], Mapping[str, Any]]
    read_steps: Callable[[int, int], StepList]
    read_status: Callable[[], StatusResponse]

    def steps(self, after: int, limit: int) -> list[TrackedStep]:
        from agentjet.trackers import TrackedStep

        found = self.read_steps(after, limit)
        return [
            TrackedStep(
                version, composed, {n: v for n, values in found.metrics.items() if (v := values[place]) is not None}
            )
            for place, (version, composed) in enumerate(zip(found.versions, found.times, strict=True))
        ]

    def progress(self) -> tuple[int, int]:
        status = self.read_status()
        return status.policy_version, status.max_steps


def steps_of_server(swarm: Swarm) -> RunSource:
    """Raises `Unreachable` or a `RequestError` if the first request fails."""
    from agentjet.protocol import flatten

    def settings() -> Mapping[str, Any]:
        status, body = swarm.status(), swarm.job()
        facts = {"model": status.model, "model_weights": status.model_weights, "run": status.run}
        return {**facts, **dict(flatten(body.job, "job."))}

    swarm.status()
    return RunSource(swarm.url, settings, swarm.steps, swarm.status)


def steps_of_folder(path: Path, run: str) -> RunSource:
    """The steps of a run's files, also while a server writes them. Raises `ConfigError` without a readable journal."""
    from agentjet.protocol import StepList
    from agentjet.server.read import RunReader

    reader = RunReader.at(folder_of(path, run))
    reader.check()
    return RunSource(
        str(path),
        lambda: asyncio.run(reader.settings()),
        lambda after, limit: StepList.model_validate_json(asyncio.run(reader.steps(after, limit))),
        lambda: asyncio.run(reader.status()),
    )


# ---- token -----------------------------------------------------------------------------------------------------------

DataDir = Annotated[Path, Option("--data-dir", help="The server's data dir.")]
DEFAULT_DATA_DIR = Path("agentjet-data")
token_app = typer.Typer(name="token", no_args_is_help=True, help="Show or replace the tokens of a run.")


@token_app.command("show")
def show_token(
    role: Annotated[Literal["client", "admin", "viewer"], Argument(help="Role of the token.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    run: Run = DEFAULT_RUN,
) -> None:
    """Print a token, and nothing else. The admin token of the default run opens every run of the server."""
    from agentjet.front.keys import SECRET_FILES, read_secret

    typer.echo(read_secret(_key_folder(data_dir, run) / SECRET_FILES[role]))


@token_app.command("rotate")
def rotate_token(
    role: Annotated[
        Literal["client", "admin", "viewer", "keys"],
        Argument(help="Role of the token; `keys` is the secret that signs episode keys."),
    ],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    run: Run = DEFAULT_RUN,
) -> None:
    """Replace a token by a new one; a running server uses it from its next request on.

    A new token leaves the keys of live episodes valid. New `keys` make all of them invalid at once, and no token.
    """
    from agentjet.front.keys import SECRET_FILES, replace_secret

    path = _key_folder(data_dir, run) / SECRET_FILES[role]
    if not path.exists():
        raise ConfigError(f"{path} does not exist: --data-dir must name the data dir of a server that has run")
    replace_secret(path)
    if role == "keys":
        typer.echo(f"{path} is new: all earlier episode keys are invalid.")
        return
    typer.echo(
        f"{path} is new; the earlier {role} token is invalid. To see the new one: agentjet token show {role} "
        f"--data-dir {shlex.quote(str(data_dir))} --run {run}"
    )
    if role == "client" and run == DEFAULT_RUN:
        typer.echo(
            "A server started with AGENTJET_TOKEN writes that token again at its next start: change it there, too."
        )


def _key_folder(data_dir: Path, run: str) -> Path:
    """The folder of a run's tokens; those of the default run are in the data dir."""
    return data_dir if run == DEFAULT_RUN else run_folder(data_dir, run)
