"""The files of a data dir: the check of a new one, the folder of a run, `agentjet token` and `agentjet compare`.

These commands read and write files; they send no request to a server.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from agentjet.cli import Json, Run, one_line
from agentjet.errors import ConfigError
from agentjet.protocol import check_run_name
from agentjet.types import DEFAULT_RUN

JOURNAL = "journal.sqlite"
PREPARED = frozenset(
    {
        f"{JOURNAL}.lock",
        "token",
        "admin-token",
        "viewer-token",
        "checkpoints",  # copied from another run, for the policy to start from
        "runs",
        "logs",
        "serve.log",  # written by `ChildServer`
        "lost+found",  # made by a file system
    }
)
"""Files that may exist before the journal: put there on purpose, or left by a server that failed to start."""
NUM_SHOWN = 3


def check_data_dir(folder: Path) -> None:
    """Raises `ConfigError` for a folder with other files, unless it has a journal: that of the default run, or of an
    older AgentJet directly in it. `checkpoints/` alone is allowed.
    """
    run = folder / "runs" / DEFAULT_RUN
    if not folder.is_dir() or (folder / JOURNAL).exists() or (run / JOURNAL).exists():
        return
    try:
        foreign = sorted(path.name for path in folder.iterdir() if path.name not in PREPARED)
    except OSError as error:
        raise ConfigError(f"server.data_dir = {str(folder)!r} cannot be read: {error.strerror}") from None
    for place in (folder, run):
        if (place / METRICS).exists() and (place / "checkpoints").is_dir():
            raise ConfigError(
                f"server.data_dir = {str(folder)!r} has checkpoints and no {JOURNAL}. Restore the journal; or move "
                "only checkpoints/ to runs/default/ of a new server.data_dir, which starts at the newest good one"
            )
    if foreign:
        shown = ", ".join(foreign[:NUM_SHOWN]) + (", …" if len(foreign) > NUM_SHOWN else "")
        raise ConfigError(
            f"server.data_dir = {str(folder)!r} is not a data dir of AgentJet (it has no {JOURNAL}) and not empty "
            f"({shown}): give an empty folder, or one that does not exist yet"
        )


def run_folder(data_dir: Path, run: str) -> Path:
    """The folder of a run in a data dir. Raises `ConfigError`, and `InvalidRequest` for a wrong name."""
    check_run_name(run)
    folder = data_dir / "runs" / run
    if (folder / JOURNAL).is_file():
        return folder
    if (data_dir / JOURNAL).is_file():
        raise ConfigError(
            f"{str(data_dir)!r} is the data dir of an older AgentJet: start its server once (agentjet serve --data-dir "
            f"{shlex.quote(str(data_dir))}), which moves its files to runs/{DEFAULT_RUN}"
        )
    if found := sorted(path.parent.name for path in data_dir.glob(f"runs/*/{JOURNAL}")):
        raise ConfigError(f"{str(data_dir)!r} has no run {run!r}; its runs are {', '.join(found)} (--run NAME)")
    raise ConfigError(f"{str(data_dir)!r} is not a data dir of AgentJet: it has no runs/{run}/{JOURNAL}")


app = typer.Typer(no_args_is_help=True, help="Show or replace the tokens of a run.")

DataDir = Annotated[Path, typer.Option("--data-dir", help="The server's data dir.")]
DEFAULT_DATA_DIR = Path("agentjet-data")


@app.command()
def show(
    role: Annotated[Literal["client", "admin", "viewer"], typer.Argument(help="Role of the token.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    run: Run = DEFAULT_RUN,
) -> None:
    """Print a token, and nothing else. The admin token of the default run opens every run of the server."""
    from agentjet.server.auth import SECRET_FILES, read_secret

    typer.echo(read_secret(_key_folder(data_dir, run) / SECRET_FILES[role]))


@app.command()
def rotate(
    role: Annotated[
        Literal["client", "admin", "viewer", "keys"],
        typer.Argument(help="Role of the token; `keys` is the secret that signs episode keys."),
    ],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    run: Run = DEFAULT_RUN,
) -> None:
    """Replace a token by a new one; a running server uses it from its next request on.

    A new token leaves the keys of live episodes valid. New `keys` make all of them invalid at once, and no token.
    """
    from agentjet.server.auth import SECRET_FILES, replace_secret

    path = _key_folder(data_dir, run) / SECRET_FILES[role]
    if not path.exists():
        raise ConfigError(f"{path} does not exist: --data-dir must name the data dir of a server that has run")
    replace_secret(path)
    if role == "keys":
        typer.echo(f"{path} is new: all earlier episode keys are invalid.")
        return
    place = "" if data_dir == DEFAULT_DATA_DIR else f" --data-dir {shlex.quote(str(data_dir))}"
    place += "" if run == DEFAULT_RUN else f" --run {run}"
    typer.echo(
        f"{path} is new; the earlier {role} token is invalid. To see the new one: agentjet token show {role}{place}"
    )
    if role == "client" and run == DEFAULT_RUN:
        typer.echo(
            "A server started with AGENTJET_TOKEN writes that token again at its next start: change it there, too."
        )


def _key_folder(data_dir: Path, run: str) -> Path:
    """The folder of a run's tokens; those of the default run are in the data dir."""
    check_run_name(run)
    return data_dir if run == DEFAULT_RUN else data_dir / "runs" / run


FINAL_STEPS = 5
"""The final reward is the mean of this many batches: the reward of a single batch is mostly noise."""
METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run's files in figures. Scores are None without evaluations; settings are empty without a journal."""

    name: str
    version: int
    steps: int
    undone: int | None
    """Batches that a rollback undid. They count for tokens and time, and not for rewards. None for a metrics file
    alone, which does not record rollbacks."""
    reward_first: float | None
    reward_final: float | None
    reward_best: float | None
    reward_best_version: int | None
    evaluations: int
    score_first: float | None
    score_final: float | None
    score_best: float | None
    score_best_version: int | None
    episodes: int
    sampled_tokens: int
    minutes: float
    """Seconds of sampling, waiting and learning, over 60."""
    settings: Mapping[str, Any] = field(default_factory=dict)


ROWS = {
    "version": "policy version",
    "steps": "batches learned",
    "undone": "  of them undone",
    "reward_first": f"reward, first {FINAL_STEPS} batches",
    "reward_final": f"reward, last {FINAL_STEPS} batches",
    "reward_best": "reward, best batch",
    "reward_best_version": "  at version",
    "evaluations": "held-out evaluations",
    "score_first": "held-out score, first",
    "score_final": "held-out score, last",
    "score_best": "held-out score, best",
    "score_best_version": "  at version",
    "episodes": "episodes trained",
    "sampled_tokens": "tokens sampled",
    "minutes": "minutes",
}


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN RUN...", help="Data dirs, their folders runs/NAME, or metrics.jsonl files."),
    ],
    run: Run = DEFAULT_RUN,
    as_json: Json = False,
) -> None:
    """Compare runs: rewards, held-out scores, cost, and the settings that differ."""
    if len(runs) < 2:
        raise ConfigError(f"only one run, {str(runs[0])!r}: name two or more to compare")
    found = [read_run(path, run) for path in runs]
    different = differing_settings([run.settings for run in found])
    if as_json:
        figures = [{"run": run.name, **{name: getattr(run, name) for name in ROWS}} for run in found]
        typer.echo(json.dumps({"runs": figures, "settings": different}, indent=2))
        return
    lines = [["", *(run.name for run in found)]]
    lines += [[words, *(_figure(getattr(run, name)) for run in found)] for name, words in ROWS.items()]
    lines += [["", *([""] * len(found))], ["settings that differ", *([""] * len(found))]] if different else []
    lines += [[key, *map(_setting, values)] for key, values in different.items()]
    lines = [[one_line(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        typer.echo("  ".join(cells).rstrip())
    without = [run.name for run in found if not run.settings]
    if without:
        typer.echo(f"\nno settings for {', '.join(without)}: only the journal of a data dir has them")


def read_run(path: Path, run: str = DEFAULT_RUN) -> RunSummary:
    """Reads a run from its folder, its data dir or a metrics file. Raises `ConfigError`."""
    folder = path if (path / METRICS).exists() else path / "runs" / run
    steps = _steps(folder / METRICS if path.is_dir() else path)
    recorded = _journal_facts(folder) if path.is_dir() else _JournalFacts()
    undone = {version for version in steps if recorded.was_undone(version)}
    rewards = {
        version: line["reward/mean"]
        for version, line in steps.items()
        if "reward/mean" in line and version not in undone
    }
    evaluations = [one for one in recorded.evaluations if not recorded.was_undone(one["policy_version"])]
    scores = {evaluation["policy_version"]: evaluation["score"] for evaluation in evaluations}
    values, held_out = list(rewards.values()), [evaluation["score"] for evaluation in evaluations]
    return RunSummary(
        name=str(path),
        version=max(steps),
        steps=len(steps),
        undone=len(undone) if path.is_dir() else None,
        reward_first=_mean(values[:FINAL_STEPS]),
        reward_final=_mean(values[-FINAL_STEPS:]),
        reward_best=max(values, default=None),
        reward_best_version=max(rewards, key=lambda version: rewards[version], default=None),
        evaluations=len(evaluations),
        score_first=held_out[0] if held_out else None,
        score_final=held_out[-1] if held_out else None,
        score_best=max(held_out, default=None),
        score_best_version=max(scores, key=lambda version: scores[version], default=None),
        episodes=round(_sum(steps, "batch/episodes")),
        sampled_tokens=round(_sum(steps, "batch/sampled_tokens")),
        minutes=sum(_sum(steps, f"time/{phase}") for phase in ("sample", "wait", "learn")) / 60,
        settings=recorded.settings,
    )


def differing_settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The value in each run of the settings that differ, by name. Runs without known settings do not count."""
    known = [one for one in settings if one]
    keys = dict.fromkeys(key for one in known for key in one)
    return {
        key: [one.get(key) for one in settings]
        for key in keys
        if any(one.get(key) != known[0].get(key) for one in known)
    }


def _steps(file: Path) -> dict[int, Mapping[str, Any]]:
    """The lines of a metrics file, by the policy version after the step."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ConfigError(
            f"{str(file)!r} does not exist: name a data dir whose server has learned a batch, or a {METRICS}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}") from None
    steps: dict[int, Mapping[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            step = json.loads(line)
            steps[step["step"]] = step
        except (ValueError, LookupError, TypeError):
            if number < len(lines):  # The last line may be being written.
                raise ConfigError(f"{str(file)!r}, line {number}: expected one JSON object with a 'step'") from None
    if not steps:
        raise ConfigError(f"{str(file)!r} has no batch: its server has learned nothing yet")
    return steps


@dataclass(frozen=True, slots=True)
class _JournalFacts:
    """Facts that the journal of a data dir adds to its metrics file."""

    evaluations: Sequence[Mapping[str, Any]] = ()
    rollbacks: Sequence[Mapping[str, int]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The job settings, and the origin of the policy."""

    def was_undone(self, version: int) -> bool:
        return any(done["to"] < version < done["policy_version"] for done in self.rollbacks)


def _journal_facts(folder: Path) -> _JournalFacts:
    from agentjet.cli.status import flatten
    from agentjet.swarm import Journal

    journal = Journal.open_read_only(folder / JOURNAL)
    try:
        held = journal.job_settings()
        job = dict(flatten(held.job.model_dump(mode="json"), "job.")) if held is not None else {}
        evaluations, rollbacks = ([e.body for e in journal.events_of(kind)] for kind in ("evaluation", "rollback"))
        return _JournalFacts(evaluations, rollbacks, {**journal.origin, **job})
    finally:
        journal.close()


def _sum(steps: Mapping[int, Mapping[str, Any]], name: str) -> float:
    return math.fsum(line.get(name, 0.0) for line in steps.values())


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def _setting(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)
