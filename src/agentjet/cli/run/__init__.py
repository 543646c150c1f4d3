"""`agentjet run`: train a server's policy inside any program, in any language, without a line of it changed."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentjet.cli import Json, Token, TokenFile, Url, connect, printable
from agentjet.errors import AgentJetError, ConfigError

if TYPE_CHECKING:
    from agentjet.cli.run.source import CommandSource
    from agentjet.client import Command, EvalReport, TrainReport
    from agentjet.client.agent_source import AgentSource
    from agentjet.types import Task


STEPS = 20
CALL = (
    "the program must ask the model at OPENAI_BASE_URL with OPENAI_API_KEY (ANTHROPIC_...: likewise), and read its "
    "streams to their end"
)
MEND = "mend the program, or its --reward; a --task-file of one line with --eval tries it on one task"


def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            help="The program and its arguments, after `--`; no shell is involved. {task} becomes the task's row as "
            "JSON, {task.key} one value of it, {here} the present folder.",
        ),
    ],
    task_file: Annotated[Path, typer.Option("--task-file", help="Tasks: a JSON object a line.")],
    reward: Annotated[
        str,
        typer.Option(
            help="FILE.py:FUNCTION, called with the row and the result; `stdout`: its last line, a number or "
            '{"reward": number}; `file:NAME`: the same from a file in the working directory; `exit-code`: 1 for '
            "0, else 0."
        ),
    ],
    steps: Annotated[int | None, typer.Option(min=1, help="Batches to learn; default: 20.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Processes at the same time.")] = 16,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds after which a process is ended and its episode aborted.")
    ] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of the tasks' order.")] = 0,
    only_eval: Annotated[bool, typer.Option("--eval", help="Evaluate instead: each task once, nothing learned.")] = (
        False
    ),
    repeats: Annotated[int | None, typer.Option(min=1, help="With --eval: how often each task; default: once.")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Take up edits of the program while training goes on.")
    ] = False,
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--source", help="A file or folder of the program beside those the command names; can be repeated."
        ),
    ] = None,
    code_version: Annotated[
        str | None, typer.Option(help="Name of the program's version; default: a hash of its files.")
    ] = None,
    score_refused: Annotated[
        bool, typer.Option("--score-refused", help="Score episodes in which the server refused a request, too.")
    ] = False,
    shared_home: Annotated[
        bool, typer.Option("--shared-home", help="Leave HOME, the XDG folders and TMPDIR of the programs as they are.")
    ] = False,
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Run a program on tasks as the agent, one process an episode, and train the server's policy on its rewards.

    The program finds the model in OPENAI_BASE_URL and OPENAI_API_KEY (ANTHROPIC_...: likewise), its task also in
    AGENTJET_TASK. It runs in a fresh working directory, with a HOME of its episode. An exit code other than 0, a
    signal, a time-out or a request that the server refused aborts the episode; with --reward exit-code, 1 to 124 score
    0 instead. Of --reward FILE.py:FUNCTION the result has stdout, stderr, exit_code, seconds and folder.
    """
    from agentjet.cli.run.source import CommandSource, check_source
    from agentjet.client import AgentFailing
    from agentjet.client.inputs import read_tasks
    from agentjet.client.threads import raise_on_signals

    if watch and (only_eval or code_version is not None):
        raise ConfigError(f"--watch and {'--eval' if only_eval else '--code-version'} exclude each other")
    if only_eval and steps is not None:
        raise ConfigError("--steps and --eval exclude each other: an evaluation learns nothing")
    if repeats is not None and not only_eval:
        raise ConfigError("--repeats is for --eval: training visits tasks in groups of job.group_size")
    here = Path.cwd()
    tasks = read_tasks(task_file)
    program = CommandSource(tuple(command), here, check_source(source or [], here))
    with ExitStack() as stack:
        options: dict[str, Any] = {"timeout": timeout, "score_refused": score_refused, "shared_home": shared_home}
        agent, code = _agent(stack, program, tasks, reward, options, watch)
        swarm = stack.enter_context(connect(url, token, token_file))
        stack.enter_context(raise_on_signals())
        report: TrainReport | EvalReport
        try:
            if only_eval:
                report = swarm.evaluate(
                    agent,
                    tasks,
                    repeats=repeats or 1,
                    concurrency=concurrency,
                    progress=not as_json,
                    code_version=code_version,
                )
            else:
                report = swarm.train(
                    agent,
                    tasks,
                    steps=steps or STEPS,
                    concurrency=concurrency,
                    seed=seed,
                    progress=not as_json,
                    reload=code or False,
                    code_version=code_version,
                )
        except AgentFailing as failing:  # Its own way out is for those who write Python.
            raise AgentJetError(f"{failing.fact}: {CALL if failing.is_silent else MEND}") from None
    typer.echo(json.dumps(as_document(report), indent=2) if as_json else printable(str(report)))


def _agent(
    stack: ExitStack, program: CommandSource, tasks: list[Task], reward: str, options: dict[str, Any], watch: bool
) -> tuple[Command, AgentSource | None]:
    """The agent, and with `watch` where newer versions of it come from. Raises `ConfigError` for whatever would fail in
    every episode."""
    from agentjet.cli.run.rewards import reward_source
    from agentjet.cli.run.source import CommandCode
    from agentjet.client import Command
    from agentjet.client.agent_source import ModuleSource, code_version_of

    scored = reward_source(reward)
    command = Command(program.resolved(), scored.score, any_exit_code=scored.any_exit_code, **options)
    _check_program(program, command)
    for task in tasks:
        command.filled(task)
    if not watch:
        version = program.version(code_version_of(scored.score) if scored.is_function else "")
        return command.changed(command.arguments, scored.score, version), None
    if not program.files():
        raise ConfigError("--watch: the command names no file of its own; name what to watch with --source")
    copies = stack.enter_context(tempfile.TemporaryDirectory(prefix="agentjet-code-", ignore_cleanup_errors=True))
    code = CommandCode(program, command, ModuleSource(scored.score) if scored.is_function else None, Path(copies))
    first = code.load().agent
    assert isinstance(first, Command)
    return first, code


def _check_program(program: CommandSource, command: Command) -> None:
    word = command.arguments[0]
    if shutil.which(word) is None:
        raise ConfigError(f"the command {program.arguments[0]!r} was not found, or may not be executed")


def as_document(report: TrainReport | EvalReport) -> dict[str, Any]:
    """A report for programs; what there was none of is null."""
    from agentjet.client import TrainReport

    shared: dict[str, Any] = {
        "finished": len(report.finished),
        "aborted": report.num_aborted,
        "expired": report.num_expired,
        "mean_reward": report.mean_reward,
        "errors": dict(report.errors.most_common(20)),
        "code_versions": {version: dataclasses.asdict(code) for version, code in report.by_code_version.items()},
        "seconds": round(report.seconds, 3),
    }
    if isinstance(report, TrainReport):
        shared |= {
            "steps": len(report.steps),
            "rewards": list(report.rewards),
            "not_needed": report.num_not_needed,
            "code_changes": [dataclasses.asdict(change) for change in report.code_changes],
        }
    else:
        mean = report.mean_at_k
        shared |= {
            "policy_versions": list(report.policy_versions),
            "tasks": mean.num_tasks,
            "mean_at_k": {"k": report.repeats, "value": mean.value, "interval": [mean.low, mean.high]},
        }
    return {key: _without_nan(value) for key, value in shared.items()}


def _without_nan(value: Any) -> Any:
    """NaN is no JSON."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    return [_without_nan(inner) for inner in value] if isinstance(value, list) else value
