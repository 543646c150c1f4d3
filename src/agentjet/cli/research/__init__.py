"""`agentjet research demo`: a whole study on this machine, whose answers are known.

`agentjet research`: a question planned, run on swarm servers, steered and reported. A module for each command.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentjet.cli import example
from agentjet.cli.research.run import Local, run
from agentjet.cli.research.study import new, report, status, steer

if TYPE_CHECKING:
    from agentjet.research.journal import StudyFolder
    from agentjet.research.planner.plan import Plan
    from agentjet.research.subject import Subject


DEFAULT_OUT = Path("research-demo")
TOPIC = "Can a model of random weights learn to answer in digits, and does a wider clip help it?"


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the study; one that was interrupted is gone on with.")] = (
        DEFAULT_OUT
    ),
    seed: Annotated[int | None, typer.Option(help="Where all seeds of the study come from; default 0.")] = None,
    local: Local = 2,
) -> None:
    """Do a whole study through real servers: two claims about training a tiny model, one true and one that is nothing.

    A model of random weights is rewarded for digits. That a learning rate of 1e-2 beats one of 1e-5 is plain. That a
    wider clip helps cannot be: on-policy, with one optimiser step a batch, no ratio ever reaches the clip: that
    ends as practically equivalent, or, where the scores happen to spread widely, as inconclusive.
    """
    from agentjet.cli.research.run import carry_out, local_places
    from agentjet.research.journal import StudyFolder

    began = time.monotonic()
    files = StudyFolder(out)
    if (out / "study.json").exists():
        check_same(files, seed)
    else:
        check_empty(files)
        files.make()
        from agentjet.compute.embedded.model import make_random_model

        make_random_model(out / "model")
        plan = demo_plan(out / "model", seed or 0)
        files.write(plan.study, plan.to_markdown())
    carry_out(out, local_places(local))
    typer.echo(f"{time.monotonic() - began:.0f} s in all")


def check_same(files: StudyFolder, seed: int | None) -> None:
    """Raises `ConfigError` where the study in the folder is not the one that was asked for."""
    from agentjet.errors import ConfigError

    study = files.study()
    if study.topic != TOPIC or study.subject is None or not study.subject.agent.startswith(digits_agent()):
        raise ConfigError(
            f"--out {files.path} holds another study ({study.topic!r}), not the demo: give another folder, or go on "
            f"with that one: agentjet research run {shlex.quote(str(files.path))}"
        )
    if seed not in (None, study.seed):
        raise ConfigError(
            f"--seed {seed}: --out {files.path} holds the demo with seed {study.seed}: give another folder, or leave "
            "--seed out to go on with it"
        )


def check_empty(files: StudyFolder) -> None:
    """Raises `ConfigError` where the demo would write over something."""
    from agentjet.errors import ConfigError

    files.check_new()
    for name in ("model", "plan.md"):
        if (files.path / name).exists():
            raise ConfigError(
                f"--out {files.path} has a {name} already, and the demo would write over it: give another folder, or "
                "delete that"
            )


def demo_plan(model: Path, seed: int) -> Plan:
    """Two claims, and what is expected of them."""
    from agentjet.research.models import Arm, Study
    from agentjet.research.planner.plan import Plan, hypothesis
    from agentjet.research.planner.templates import Claim
    from agentjet.research.scheduler import estimate_cost

    subject = digits(model)
    claims = (
        Claim("rate 1e-2", "rate 1e-5", "+", "the small rate moves the weights by next to nothing in so few steps"),
        Claim("wider clip", "rate 1e-2", "0", "no ratio reaches the clip on-policy, with one step a batch"),
    )
    study = Study(
        topic=TOPIC,
        metric="share of digits in the answers to held-out tasks, at the last step",
        sesoi=0.15,
        arms=(
            Arm("rate 1e-2"),
            Arm("rate 1e-5", {"job.optimizer.lr": 1e-5}),
            Arm("wider clip", {"job.algorithm.clip_high": 0.28}),
        ),
        hypotheses=tuple(hypothesis(claim) for claim in claims),
        budget=30.0,
        reserve=0.9,
        evaluator=subject.code,
        seed=seed,
        subject=subject,
    )
    return Plan(study, None, (), (), estimate_cost(study))


def digits_agent() -> str:
    """The file of `examples/digits` as a prefix of its functions."""
    return f"{example('digits') / 'agent.py'}:"


def digits(model: Path) -> Subject:
    from agentjet.cli.research.study import fixed
    from agentjet.research.models import Subject

    return fixed(
        Subject(
            model=str(model),
            agent=f"{digits_agent()}agent",
            tasks=f"{digits_agent()}training_tasks",
            held_out=f"{digits_agent()}held_out_tasks",
            settings={
                "model.device": "cpu",
                "model.dtype": "float32",
                "sampler.cache_tokens": 16384,
                "job.batch_size": 2,
                "job.group_size": 8,
                "job.max_tokens": 12,
                "job.checkpoint_every": 0,
                "job.optimizer.lr": 1e-2,
            },
            steps=24,
            evaluations=4,
            concurrency=16,
        )
    )


app = typer.Typer(
    help="Plan a study of how a policy is best trained, run it on swarm servers, and report what can be concluded.",
    no_args_is_help=True,
)
app.command()(new)
app.command()(run)
app.command()(status)
app.command(context_settings={"ignore_unknown_options": True})(steer)  # `cap -1` is a value, and a wrong one
app.command()(report)
app.command()(demo)
