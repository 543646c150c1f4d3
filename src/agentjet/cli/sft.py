"""`agentjet sft` trains on given answers: conversations, preferences, or the answers of a teacher."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from agentjet.cli import Json, Policy, Server, print_text
from agentjet.cli.env import Environments, split_of
from agentjet.cli.run import json_text, named_agent
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.client import Agent, Collected, Swarm


@dataclass(frozen=True)
class TeacherOptions:
    """The options that name a stronger model, and the episodes that it is asked for."""

    teacher: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="Collect the answers of this OpenAI-compatible endpoint, such as https://api.example.com/v1; its key "
            "is in AGENTJET_TEACHER_KEY.",
        ),
    ] = None
    teacher_model: Annotated[str, Option(metavar="NAME", help="The model that the endpoint is asked for.")] = ""
    agent: Annotated[str | None, Option(metavar="FILE.py:FUNCTION", help="The agent that runs with the teacher.")] = (
        None
    )
    task_file: Annotated[
        str | None,
        Option(metavar="FILE", help="Tasks of --agent: FILE.jsonl, or FILE.py:FUNCTION, which returns them."),
    ] = None
    keep: Annotated[
        float | None, Option(metavar="R", help="Smallest reward of an episode that is learned; default: 1.")
    ] = None
    repeats: Annotated[int | None, Option(min=1, help="Episodes of each task with the teacher; default: once.")] = None
    concurrency: Annotated[
        int | None, Option(min=1, help="Episodes with the teacher at the same time; default: 16.")
    ] = None
    collected: Annotated[
        Path | None,
        Option(
            metavar="FILE.jsonl",
            help="The file that the kept episodes become; one that is there is continued. Default: collected.jsonl.",
        ),
    ] = None

    def check(self, file: Path | None, recipe: str, environments: Environments) -> None:
        """Raises `ConfigError` for options that lack one or exclude each other."""
        own = {f"--{one.name.replace('_', '-')}": getattr(self, one.name) for one in fields(self)}
        given = [name for name, value in {**own, "--env": environments.env}.items() if value not in (None, "", [])]
        if self.teacher is None:
            if given:
                raise ConfigError(f"{given[0]} is for --teacher URL, which is missing")
            if file is None:
                raise ConfigError("give FILE.jsonl, or --teacher URL to collect one")
            return
        if file is not None:
            raise ConfigError(
                f"{file} and --teacher exclude each other: the file of collected episodes is that of --collected"
            )
        if recipe not in ("", "sft"):
            raise ConfigError(f"--recipe {recipe}: the answers of a teacher are learned with sft")
        if not self.teacher.startswith(("http://", "https://")):
            raise ConfigError(f"--teacher {self.teacher!r} is not a URL: give one such as https://api.example.com/v1")
        if not self.teacher_model:
            raise ConfigError(f"--teacher {self.teacher}: also give the model's name (--teacher-model)")
        environments.check({"--agent": self.agent, "--task-file": self.task_file})
        if not environments.env and (self.agent is None or self.task_file is None):
            raise ConfigError("--teacher needs --agent and --task-file, or --env")

    def collect(self, swarm: Swarm, environments: Environments, *, progress: bool) -> Collected:
        """Raises as `Swarm.collect` does."""
        from agentjet.client import Endpoint
        from agentjet.client.teacher import TEACHER_KEY_VARIABLE

        assert self.teacher is not None, "check() has passed"
        key = os.environ.get(TEACHER_KEY_VARIABLE, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"{TEACHER_KEY_VARIABLE} has a character that a header cannot carry")
        endpoint = Endpoint(self.teacher, self.teacher_model, key or "none")
        agent: Agent
        with ExitStack() as stack:
            if environments.env:
                mixed = environments.load(stack)
                agent, tasks = mixed.agent, split_of(mixed, "train")
            else:
                agent, tasks = named_agent(self.agent, self.task_file)
            swarm.status()  # The teacher may cost money: the server that learns must be there.
            options = {"keep": self.keep, "repeats": self.repeats, "concurrency": self.concurrency}
            chosen: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
            file = self.collected or Path("collected.jsonl")
            collected = swarm.collect(agent, tasks, endpoint, file, progress=progress, **chosen)
        if progress:
            if collected.report is not None:
                print_text(f"the teacher: {collected.report}")
            print_text(str(collected))
        return collected


def sft(
    server: Server,
    teacher: TeacherOptions,
    environments: Environments,
    file: Annotated[
        Path | None,
        Argument(
            metavar="FILE.jsonl",
            help="A conversation a line: messages in OpenAI's chat format, tool calls included, and perhaps tools. "
            "With --recipe dpo or kto: preferences.",
        ),
    ] = None,
    epochs: Annotated[int, Option(min=1, help="Passes over the file.")] = 1,
    batch_size: Annotated[int, Option(min=1, help="Conversations in a batch: one optimiser step.")] = 16,
    lr: Annotated[float | None, Option(help="Constant learning rate; default: that of the job.")] = None,
    policy: Policy = "",
    seed: Annotated[int, Option(help="Seed of the order of the conversations.")] = 0,
    recipe: Annotated[
        str,
        Option(
            metavar="sft|dpo|kto",
            help="dpo: a line has messages (the prompt), chosen and rejected. kto: messages, completion and label.",
        ),
    ] = "",
    parameters: Annotated[
        list[str] | None,
        Option("--set", metavar="PARAMETER=VALUE", help="A parameter of --recipe, such as beta=0.2; can be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train the server's policy on the assistant messages of conversations (supervised fine-tuning), or on preferences.

    Every line is checked before the first batch. A message with "weight": 0 is context only.

    Without FILE, and with --teacher: first --agent, or --env, runs with a stronger model instead of the policy. Its
    episodes with a reward of at least --keep become the file. The command can be interrupted, and repeated.
    """
    from agentjet.client.demonstrations import read_demonstrations, recipe_name
    from agentjet.config.loader import parse_overrides

    if lr is not None and not 0 < lr < math.inf:
        raise ConfigError(f"--lr {lr}: give a number above 0")
    if parameters and not recipe:
        raise ConfigError(f"--set {parameters[0]}: it is a parameter of --recipe, such as dpo")
    teacher.check(file, recipe, environments)
    named = {"name": recipe, **dict(parse_overrides(parameters))} if parameters else recipe
    options = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "policy": policy, "seed": seed, "recipe": named}
    examples, ignored = ([], set[str]()) if file is None else read_demonstrations(file, recipe_name(recipe))
    if ignored and not as_json:
        print_text(f"ignored keys: {', '.join(sorted(map(str, ignored)))}")
    with server.connect() as swarm:
        if file is None:
            examples = teacher.collect(swarm, environments, progress=not as_json).demonstrations
        report = swarm.sft(examples, progress=not as_json, **options)  # type: ignore[arg-type]
    first, last, version = report.losses[0], report.losses[-1], report.steps[-1].policy_version
    if as_json:
        facts = {"batches": len(report.steps), "policy_version": version, "first_loss": first, "last_loss": last}
        counts = {"demonstrations": report.num_demonstrations, "answers": report.num_answers}
        accuracies = {"accuracies": report.accuracies} if "accuracy" in report.ends else {}
        typer.echo(json_text({**facts, **counts, "tokens": report.num_tokens, "losses": report.losses, **accuracies}))
        return
    shown = (
        f"{name} {one:.3f} in the first batch, {other:.3f} in the last" for name, (one, other) in report.ends.items()
    )
    typer.echo(f"policy version {version}: {'; '.join(shown)}")
