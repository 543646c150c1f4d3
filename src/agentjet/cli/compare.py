"""`agentjet compare`: rewards, held-out scores, cost and settings of runs, from their files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from agentjet.cli import Json, Run, one_line
from agentjet.cli.data_dir import JOURNAL, METRICS
from agentjet.cli.status import flatten
from agentjet.errors import ConfigError
from agentjet.types import DEFAULT_RUN

FINAL_STEPS = 5
"""The first and the final reward are means of this many batches: the reward of a single batch is mostly noise."""
PHASES = ("sample", "wait", "learn")

Figures = dict[str, float | None]


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Data dirs, or their folders runs/NAME.")],
    run: Run = DEFAULT_RUN,
    as_json: Json = False,
) -> None:
    """Compare runs: rewards, held-out scores, cost, and the settings that differ."""
    if len(runs) < 2:
        raise ConfigError(f"only one run, {str(runs[0])!r}: name two or more to compare")
    figures, settings = zip(*(read_run(path, run) for path in runs), strict=True)
    different = differing_settings(settings)
    if as_json:
        found = [{"run": str(path), **one} for path, one in zip(runs, figures, strict=True)]
        typer.echo(json.dumps({"runs": found, "settings": different}, indent=2))
        return
    lines = [["", *map(str, runs)]]
    lines += [[name.replace("_", " "), *(_figure(one[name]) for one in figures)] for name in figures[0]]
    lines += [["settings that differ", *([""] * len(runs))]] if different else []
    lines += [[key, *map(_setting, values)] for key, values in different.items()]
    lines = [[one_line(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        typer.echo("  ".join(cells).rstrip())


def read_run(path: Path, run: str = DEFAULT_RUN) -> tuple[Figures, dict[str, Any]]:
    """The figures of a run and its settings, from its folder or its data dir. Raises `ConfigError`.

    Batches that a rollback undid count for tokens and time, and not for rewards. Scores are None without evaluations.
    """
    from agentjet.swarm import Journal

    folder = path if (path / METRICS).exists() else path / "runs" / run
    steps = _steps(folder / METRICS)
    with closing(Journal.open_read_only(folder / JOURNAL)) as journal:
        try:
            held = journal.job_settings()
        except ConfigError:  # Figures can be compared without the package of the run's recipe.
            held = None
        origin = journal.origin
        evaluations, rollbacks = ([e.body for e in journal.events_of(kind)] for kind in ("evaluation", "rollback"))
    undone = {version for done in rollbacks for version in range(done["to"] + 1, done["policy_version"])}
    rewards = {
        version: step["reward/mean"]
        for version, step in steps.items()
        if "reward/mean" in step and version not in undone
    }
    evaluations = [one for one in evaluations if one["policy_version"] not in undone]
    scores = [one["score"] for one in evaluations]
    figures: Figures = {
        "policy_version": max(steps),
        "batches": len(steps),
        "undone_batches": len(undone & steps.keys()),
        f"reward_first_{FINAL_STEPS}": _mean(list(rewards.values())[:FINAL_STEPS]),
        f"reward_last_{FINAL_STEPS}": _mean(list(rewards.values())[-FINAL_STEPS:]),
        "reward_best": max(rewards.values(), default=None),
        "reward_best_version": max(rewards, key=rewards.__getitem__, default=None),
        "evaluations": len(scores),
        "score_first": scores[0] if scores else None,
        "score_last": scores[-1] if scores else None,
        "score_best": max(scores, default=None),
        "score_best_version": evaluations[scores.index(max(scores))]["policy_version"] if scores else None,
        "episodes": round(_sum(steps, "batch/episodes")),
        "sampled_tokens": round(_sum(steps, "batch/sampled_tokens")),
        "minutes": sum(_sum(steps, f"time/{phase}") for phase in PHASES) / 60,
    }
    job = flatten(held.job.model_dump(mode="json"), "job.") if held is not None else ()
    return figures, {**origin, **dict(job)}


def differing_settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The value in each run of the settings that differ, by name."""
    values = {key: [one.get(key) for one in settings] for key in dict.fromkeys(key for one in settings for key in one)}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def _steps(file: Path) -> dict[int, Mapping[str, Any]]:
    """The lines of a metrics file, by the policy version after the step."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        steps = [json.loads(line) for line in lines if line.endswith("\n")]  # The last line may be being written.
        if steps:
            return {step["step"]: step for step in steps}
    except FileNotFoundError:
        pass
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{str(file)!r} is damaged: {error!r}") from None
    raise ConfigError(f"{str(file)!r} has no batch: name a data dir whose server has learned one")


def _sum(steps: Mapping[int, Mapping[str, Any]], name: str) -> float:
    return math.fsum(step.get(name, 0.0) for step in steps.values())


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def _setting(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)
