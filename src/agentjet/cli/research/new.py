"""`agentjet research new`: from a topic to a plan that a person can read, before anything is run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentjet.cli.research.advice import AgentCli, Llm, LlmKeyFile, LlmModel, advised, voice_of, workshop_of
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.research.subject import Subject


def new(
    topic: Annotated[str, typer.Argument(help='The question, such as "does a kl penalty help?".')],
    agent: Annotated[str, typer.Option(help="FILE.py:FUNCTION or package.module:function, called with task, episode.")],
    tasks: Annotated[str, typer.Option(help="FILE.jsonl, or a function that returns tasks: what is trained on.")],
    held_out: Annotated[str, typer.Option("--held-out", help="The same: what is scored, and never trained on.")],
    out: Annotated[Path, typer.Option(help="Folder of the study.")],
    budget: Annotated[str, typer.Option(help='Full runs ("60"), or time ("4h", with --run-minutes).')],
    run_minutes: Annotated[
        float | None, typer.Option(min=0.01, help="What a full run takes, for a budget in time.")
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="How many run at the same time, for a budget in time.")] = 2,
    model: Annotated[str, typer.Option(help="Hugging Face id, local folder, or smollm2-135m.")] = "smollm2-135m",
    evaluator: Annotated[str, typer.Option(help="What plays the held-out tasks; default: the agent.")] = "",
    steps: Annotated[int, typer.Option(min=1, max=1_000_000, help="Batches of a full run.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="Episodes of each held-out task in a scoring.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at the same time.")] = 32,
    base: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.SETTING=VALUE", help="A setting of every run; can be repeated."),
    ] = None,
    space: Annotated[Path | None, typer.Option(help="Arms, knobs and claims (TOML), in place of the topic's.")] = None,
    sesoi: Annotated[
        float | None, typer.Option(help="Smallest difference of scores that matters, above 0; default 0.02.")
    ] = None,
    floor: Annotated[
        float, typer.Option(help="Lowest score there is: what a run that diverged gets once it answers no more.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Where all seeds of the study come from.")] = 0,
    llm: Llm = None,
    llm_model: LlmModel = "",
    llm_key_file: LlmKeyFile = None,
    agent_cli: AgentCli = None,
) -> None:
    """Plan a study: question, arms, claims, what each arm tunes, seeds, looks and budget. Nothing is run.

    Read plan.md in the folder; `agentjet research run FOLDER` does what it says. No language model is needed; what one
    proposes is held against the plan's rules, and the journal has every word of it.
    """
    from agentjet.research.folder import StudyFolder
    from agentjet.research.planner.offline import plan
    from agentjet.research.planner.space import read_space
    from agentjet.research.subject import Subject

    files, voice, workshop = StudyFolder(out), voice_of(llm, llm_model, llm_key_file), workshop_of(agent_cli)
    files.check_new()
    subject = fixed(
        Subject(
            model=model,
            agent=agent,
            tasks=tasks,
            held_out=held_out,
            evaluator=evaluator,
            settings=settings(base or []),
            steps=steps,
            evaluations=min(4, steps),
            repeats=repeats,
            concurrency=concurrency,
            floor=floor,
        )
    )
    made = plan(
        topic,
        budget=budget,
        subject=subject,
        space=None if space is None else read_space(space),
        folder=Path() if space is None else space.parent,
        sesoi=sesoi,
        run_seconds=None if run_minutes is None else 60 * run_minutes,
        servers=servers,
        seed=seed,
    )
    files.make()
    made = advised(made, out, voice, workshop)
    files.write(made.study, made.to_markdown())
    typer.echo(made.to_markdown())
    typer.echo(f"The plan is {out / 'plan.md'}. Run it with: agentjet research run {shlex.quote(str(out))}")


def fixed(subject: Subject) -> Subject:
    """With the hash of its code. Raises `ConfigError` for what every trial would fail with."""
    check_model(subject.model)
    shared = {task.id for task in subject.training_tasks()} & {task.id for task in subject.held_out_tasks()}
    if shared:
        raise ConfigError(
            f"{len(shared)} held-out tasks are trained on, too, such as {min(shared)!r}: a score on them says nothing; "
            "take them out of one of the two"
        )
    subject.player("")
    subject.judge()
    return subject.hashed()


def check_model(name: str) -> None:
    """Raises `ConfigError` for what no server could load. Whether the hub has an id is not asked."""
    from agentjet.config.schema import ModelConfig

    bundled = ModelConfig().name
    if Path(name).is_dir() or name == bundled or re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return
    raise ConfigError(
        f"--model {name!r} is neither a folder here, nor a Hugging Face id (owner/name), nor the bundled {bundled!r}"
    )


def settings(overrides: list[str]) -> dict[str, Any]:
    """`section.setting=value`, checked as far as that goes without the other settings. Raises `ConfigError`."""
    from agentjet.config.load import parse_value

    found = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"--set {override!r} is not of the form section.setting=value, such as job.batch_size=4")
        found[name.strip()] = parse_value(text)
    return found
