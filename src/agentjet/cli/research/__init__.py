"""`agentjet research`: the commands, and the study of `agentjet research demo`, whose answers are known.

The functions of the commands import what they need, so that `agentjet --help` is fast.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentjet.cli import example, load_example
from agentjet.cli.research.study import (
    Folder,
    Llm,
    LlmKeyFile,
    LlmModel,
    Local,
    fixed,
    llm_endpoint,
    new,
    report,
    status,
    steer,
)
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.research.journal import StudyFolder
    from agentjet.research.planner.plan import Plan
    from agentjet.research.subject import Subject


def run(
    folder: Folder,
    local: Local = 2,
    server: Annotated[
        list[str] | None,
        typer.Option(
            "--server", metavar="URL", help="Run trials on this server instead of starting any; can be repeated."
        ),
    ] = None,
    admin_token_file: Annotated[
        list[Path] | None,
        typer.Option("--admin-token-file", help="`admin-token` in that server's data dir; one for each --server."),
    ] = None,
    llm: Llm = None,
    llm_model: LlmModel = "",
    llm_key_file: LlmKeyFile = None,
) -> None:
    """Run a study, or continue one that was interrupted or killed. Ctrl-C stops it; the same command continues.

    Servers are started on this machine, one per trial; or each trial is a run on a server of --server, beside others.
    At the end the report is in the folder.
    """
    from agentjet.cli.research.execution import carry_out, local_slots, shared_slots

    shared = shared_slots(server or [], admin_token_file or [], folder)
    endpoint = llm_endpoint(llm, llm_model, llm_key_file)
    for slot in shared:
        slot.check()
    carry_out(folder, shared or local_slots(local), endpoint)


DEFAULT_OUT = Path("research-demo")
TOPIC = "Can a model of random weights learn to answer in digits, and does a wider clip help it?"


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the study; an interrupted one is continued.")] = (DEFAULT_OUT),
    seed: Annotated[
        int | None, typer.Option(help="Seed from which all seeds of the study are derived; default 0.")
    ] = None,
    local: Local = 2,
) -> None:
    """Run a whole study through real servers: two claims about training a tiny model, one true and one without effect.

    A model of random weights is rewarded for digits. A learning rate of 1e-2 clearly beats one of 1e-5. A wider clip
    cannot help: on-policy, with one optimiser step per batch, no ratio reaches the clip. So that claim ends as
    practically equivalent, or as inconclusive if the scores spread widely.
    """
    from agentjet.cli.research.execution import carry_out, local_slots
    from agentjet.research.journal import StudyFolder

    began = time.monotonic()
    files = StudyFolder(out)
    if (out / "study.json").exists():
        check_same(files, seed)
    else:
        check_empty(files)
        files.make()
        load_example("digits", "random_model").make_random_model(out / "model")
        plan = demo_plan(out / "model", seed or 0)
        files.write(plan.study, plan.to_markdown())
    carry_out(out, local_slots(local))
    typer.echo(f"{time.monotonic() - began:.0f} s in all")


def check_same(files: StudyFolder, seed: int | None) -> None:
    """Raises `ConfigError` if the folder holds another study."""
    study = files.study()
    if study.topic != TOPIC or study.subject is None or not study.subject.agent.startswith(digits_agent()):
        raise ConfigError(
            f"--out {files.path} holds another study ({study.topic!r}), not the demo: choose another folder, or "
            f"continue that study: agentjet research run {shlex.quote(str(files.path))}"
        )
    if seed not in (None, study.seed):
        raise ConfigError(
            f"--seed {seed}: --out {files.path} holds the demo with seed {study.seed}: choose another folder, or omit "
            "--seed to continue it"
        )


def check_empty(files: StudyFolder) -> None:
    """Raises `ConfigError` if the demo would overwrite something."""
    files.check_new()
    for name in ("model", "plan.md"):
        if (files.path / name).exists():
            raise ConfigError(
                f"--out {files.path} already has a {name}, which the demo would overwrite: choose another folder, or "
                "delete it"
            )


def demo_plan(model: Path, seed: int) -> Plan:
    """Plans the two claims with their expectations."""
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
            Arm("wider clip", {"job.recipe.loss.clip_high": 0.28}),
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
    name="research",
    help="Plan a study that compares ways to train a policy, run it on swarm servers, and report its conclusions.",
    no_args_is_help=True,
)
app.command()(new)
app.command()(run)
app.command()(status)
app.command(context_settings={"ignore_unknown_options": True})(
    steer
)  # so that `cap -1` is refused as a value, not as an option
app.command()(report)
app.command()(demo)
