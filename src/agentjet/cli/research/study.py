"""`agentjet research new`, `status` and `report`: plan and inspect a study."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.research.journal import StudyLog
    from agentjet.research.subject import Subject


Local = Annotated[int, typer.Option("--local", min=1, help="Servers to start on this machine, side by side.")]
Servers = Annotated[
    list[str] | None,
    typer.Option("--server", metavar="URL", help="Run trials on this server instead of starting any; can be repeated."),
]
AdminTokenFiles = Annotated[
    list[Path] | None,
    typer.Option("--admin-token-file", help="`admin-token` in that server's data dir; one for each --server."),
]


def new(
    topic: Annotated[str, typer.Argument(help='Title of the study, such as "Does a KL penalty help?".')],
    agent: Annotated[str, typer.Option(help="FILE.py:FUNCTION or package.module:function, called with task, episode.")],
    tasks: Annotated[str, typer.Option(help="Training tasks: FILE.jsonl, or a function that returns them.")],
    held_out: Annotated[str, typer.Option("--held-out", help="Held-out tasks for scoring, in the same form.")],
    space: Annotated[Path, typer.Option(help="Arms, knobs and claims (TOML).")],
    out: Annotated[Path, typer.Option(help="Folder of the study.")],
    budget: Annotated[float, typer.Option(help="Full runs that the study may cost.")],
    model: Annotated[str, typer.Option(help="Hugging Face id, local folder, or smollm2-135m.")] = "smollm2-135m",
    evaluator: Annotated[str, typer.Option(help="Agent that plays the held-out tasks; default: the agent.")] = "",
    steps: Annotated[int, typer.Option(min=1, max=1_000_000, help="Batches of a full run.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="Episodes per held-out task in an evaluation.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at the same time.")] = 32,
    base: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.SETTING=VALUE", help="A setting of every run; can be repeated."),
    ] = None,
    floor: Annotated[float, typer.Option(help="Score of a diverged run whose policy cannot answer.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed from which all seeds of the study are derived.")] = 0,
) -> None:
    """Plan a study: question, arms, claims, what each arm tunes, seeds, looks and budget. Nothing is run.

    Read plan.md in the folder, then run it with `agentjet research run FOLDER`.
    """
    from agentjet.research.journal import StudyFolder
    from agentjet.research.plan import plan, read_space
    from agentjet.research.report import plan_page
    from agentjet.research.subject import Subject

    if not topic.strip():
        raise ConfigError("the title is empty: give the question, such as 'Does a KL penalty help?'")
    files = StudyFolder(out)
    files.check_new()
    subject = fixed(
        Subject(
            model=model,
            agent=agent,
            tasks=tasks,
            held_out=held_out,
            evaluator=evaluator,
            settings=overrides_of(base or []),
            steps=steps,
            evaluations=min(4, steps),
            repeats=repeats,
            concurrency=concurrency,
            floor=floor,
        )
    )
    study = plan(topic, budget=budget, subject=subject, space=read_space(space), folder=space.parent, seed=seed)
    page = plan_page(study)
    files.write(study, page)
    typer.echo(page)
    typer.echo(f"The plan is {out / 'plan.md'}. Run it with: agentjet research run {shlex.quote(str(out))}")


def fixed(subject: Subject) -> Subject:
    """Returns the subject with the hash of its code. Raises `ConfigError` for an error that every trial would have."""
    from agentjet.config.loader import check_model_name

    check_model_name(subject.model, "--model")
    shared = {task.id for task in subject.training_tasks()} & {task.id for task in subject.held_out_tasks()}
    if shared:
        raise ConfigError(
            f"{len(shared)} held-out tasks are also training tasks, such as {min(shared)!r}: a score on them is "
            "meaningless; remove them from one of the two"
        )
    subject.load_arm_agent("")
    subject.load_evaluator()
    return subject.with_hashes()


def overrides_of(overrides: list[str]) -> dict[str, Any]:
    """Parses `section.setting=value` without checks against other settings. Raises `ConfigError`."""
    from agentjet.config.loader import parse_value

    found = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"--set {override!r} is not of the form section.setting=value, such as job.batch_size=4")
        found[name.strip()] = parse_value(text)
    return found


# ---- status and report ----------------------------------------------------------------------------------------------


def status(folder: Path, as_json: bool) -> None:
    """Prints the progress of a study, its spending and its findings so far."""
    from agentjet.research.journal import StudyFolder

    files = StudyFolder(folder)
    study, log = files.study(), files.log()
    found = summary(log)
    if as_json:
        typer.echo(json.dumps({"study": study.id, "topic": study.topic, **found}, indent=2))
        return
    typer.echo(f"{study.topic}  (study {study.id})")
    for name, value in found.items():
        if name != "findings":
            typer.echo(f"{name:12} {plain(value)}")
    for finding in found.get("findings", []):
        typer.echo(f"{finding['verdict'].replace('_', ' '):24} {finding['claim']}: {finding['reason']}")


def plain(content: object) -> str:
    """Formats journal content as text. Nested mappings are listed with their names."""
    if isinstance(content, Mapping):
        nested = any(isinstance(value, Mapping) for value in content.values())
        parts = [f"{name}{': ' if nested else ' = '}{plain(value)}" for name, value in content.items()]
        return ("; " if nested else ", ").join(parts)
    if isinstance(content, list | tuple):
        return ", ".join(map(plain, content))
    return f"{content:.4g}" if isinstance(content, float) else str(content)


def time_left(log: StudyLog, spent: float, left: float) -> str:
    """Time for `left` full runs at the pace of the `spent` ones; empty before the first outcome."""
    launches, ends = log.of("intent"), log.of("outcome")
    if not (ends and spent):
        return ""
    minutes = round(left * (ends[-1].at - launches[0].at) / spent / 60)
    return f"at most {minutes // 60} h {minutes % 60} min, at the pace so far"


def summary(log: StudyLog) -> dict[str, Any]:
    """Summary for `status --json`."""
    from agentjet.research.report.view import StudyView

    if log.study is None:
        return {"stage": "planned"}
    view = StudyView(log)
    finished = view.stage == "finished"
    left = "" if finished else time_left(log, view.spent, log.study.budget - view.spent)
    return {
        "stage": view.stage,
        "trials": dict(Counter(launched.end for launched in view.launched)),
        "spent": round(view.spent, 2),
        "launched": round(view.spending.total - view.spent, 2),
        "budget": log.study.budget,
        **({"time left": left} if left else {}),
        "findings": [
            {"claim": h.claim, **view.findings[h.id].to_json()} for h in log.study.hypotheses if h.id in view.findings
        ],
    }


def report(folder: Path, check: Path | None) -> None:
    """Writes report.html, report.md and facts.json from a study's journal, finished or not; or checks one of them."""
    from agentjet.research.journal import StudyFolder
    from agentjet.research.report import build
    from agentjet.research.report import check as compared

    log = StudyFolder(folder).log()
    if check is None:
        typer.echo(build(log, folder))
        return
    problems = compared(check, log)
    if problems:
        raise ConfigError("\n".join([f"{check} differs from the journal:", *problems]))
    typer.echo(f"{check} agrees with the journal")
