"""`agentjet run` trains a program as the agent, `agentjet sft` trains on conversations, `agentjet eval` scores."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from agentjet.cli import Json, Override, Policy, Server, Token, TokenFile, example, load_example, print_text, printable
from agentjet.errors import AgentJetError, ConfigError

if TYPE_CHECKING:
    from agentjet.cli.program import CommandLine
    from agentjet.client import Agent, Estimate, EvalReport, Swarm, TrainReport
    from agentjet.client.agent_source import AgentSource
    from agentjet.types import Task

STEPS = 20


def run(
    server: Server,
    command: Annotated[
        list[str],
        Argument(
            metavar="-- COMMAND...",
            help="The program and its arguments, after `--`; no shell is involved. {task} becomes the task's row as "
            "JSON, {task.key} one value of it, {here} the present folder.",
        ),
    ],
    task_file: Annotated[Path, Option("--task-file", help="Tasks: a JSON object a line.")],
    reward: Annotated[
        str,
        Option(
            help="FILE.py:FUNCTION, called with the row and the result; `stdout`: its last line, a number or "
            '{"reward": number}; `file:NAME`: the same from a file in the working directory; `exit-code`: 1 for '
            "0, else 0."
        ),
    ],
    steps: Annotated[int | None, Option(min=1, help="Batches to learn; default: 20.")] = None,
    concurrency: Annotated[int, Option(min=1, help="Processes at the same time.")] = 16,
    timeout: Annotated[
        float, Option(min=0.001, help="Seconds after which a process is ended and its episode aborted.")
    ] = 600.0,
    seed: Annotated[int, Option(help="Seed of the tasks' order.")] = 0,
    only_eval: Annotated[bool, Option("--eval", help="Evaluate instead: each task once, nothing learned.")] = (False),
    repeats: Annotated[int | None, Option(min=1, help="With --eval: how often each task; default: once.")] = None,
    watch: Annotated[
        bool, Option("--watch", help="Use edits of the program, its helpers and its data during training.")
    ] = False,
    source: Annotated[
        list[Path] | None,
        Option("--source", help="Another file or folder of the program, beside those of the command; can be repeated."),
    ] = None,
    code_version: Annotated[
        str | None, Option(help="Name of the program's version; default: a hash of its files.")
    ] = None,
    score_refused: Annotated[
        bool, Option("--score-refused", help="Score episodes in which the server refused a request, too.")
    ] = False,
    shared_home: Annotated[
        bool, Option("--shared-home", help="Leave HOME, the XDG folders and TMPDIR of the programs as they are.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a program on tasks as the agent, one process an episode, and train the server's policy on its rewards.

    The program finds the model in OPENAI_BASE_URL and OPENAI_API_KEY (ANTHROPIC_...: likewise), its task also in
    AGENTJET_TASK. It runs in a fresh working directory, with a fresh HOME. Each of these aborts the episode: an exit
    code other than 0, a signal, a time-out, a request that the server refused. With --reward exit-code, 1 to 124 score
    0 instead. The result for --reward FILE.py:FUNCTION has stdout, stderr, exit_code, seconds and folder.
    """
    from agentjet.cli.program import CommandLine, check_source
    from agentjet.client.inputs import read_tasks
    from agentjet.client.threads import raise_on_signals

    if watch and (only_eval or code_version is not None):
        raise ConfigError(f"--watch and {'--eval' if only_eval else '--code-version'} exclude each other")
    if only_eval and steps is not None:
        raise ConfigError("--steps and --eval exclude each other: an evaluation does not learn")
    if repeats is not None and not only_eval:
        raise ConfigError("--repeats is for --eval: training visits tasks in groups of job.group_size")
    here = Path.cwd()
    tasks = read_tasks(task_file)
    program = CommandLine(tuple(command), here, check_source(source or [], here))
    with ExitStack() as stack:
        agent, code = _agent(
            stack, program, tasks, reward, watch, timeout=timeout, score_refused=score_refused, shared_home=shared_home
        )
        if code is not None and as_json:
            typer.echo(code.described(), err=True)  # else training shows it beside its steps
        swarm = stack.enter_context(server.connect())
        stack.enter_context(raise_on_signals())
        shared: dict[str, Any] = {"concurrency": concurrency, "progress": not as_json, "code_version": code_version}
        report: TrainReport | EvalReport
        if only_eval:
            report = swarm.evaluate(agent, tasks, repeats=repeats or 1, **shared)
        else:
            report = swarm.train(agent, tasks, steps=steps or STEPS, seed=seed, reload=code or False, **shared)
    typer.echo(_json(run_document(report)) if as_json else printable(str(report)))


def _agent(
    stack: ExitStack, program: CommandLine, tasks: list[Task], reward: str, watch: bool, **options: Any
) -> tuple[Agent, AgentSource | None]:
    """The agent, and with `watch` the source of its newer versions.

    Raises `ConfigError` for an error that every episode would have.
    """
    from agentjet.cli.program import EXIT_CODE, CommandSource, reward_source
    from agentjet.client import Command
    from agentjet.client.agent_source import ModuleSource, code_version_of
    from agentjet.client.inputs import check_commands

    score, is_function = reward_source(reward)
    version = program.version(code_version_of(score) if is_function else "")
    options |= {"any_exit_code": reward == EXIT_CODE, "code_version": version}
    command = Command(program.moved({}), score, **options)
    if shutil.which(command.arguments[0]) is None:
        raise ConfigError(f"the command {program.arguments[0]!r} is missing or not executable")
    check_commands(command, tasks)
    if not watch:
        return command, None
    module = ModuleSource(score) if is_function else None
    if module is not None:
        stack.callback(module.close)
    copies = stack.enter_context(tempfile.TemporaryDirectory(prefix="agentjet-code-", ignore_cleanup_errors=True))
    return command, CommandSource(program, command, module, Path(copies))


def _json(document: dict[str, Any]) -> str:
    """A document as text; NaN becomes null."""
    from pydantic import TypeAdapter

    return TypeAdapter(dict[str, Any]).dump_json(document, indent=2).decode()


def run_document(report: TrainReport | EvalReport) -> dict[str, Any]:
    """The report as a JSON document."""
    from agentjet.client import TrainReport

    shared: dict[str, Any] = {
        "finished": len(report.finished),
        "aborted": report.num_aborted,
        "expired": report.num_expired,
        "mean_reward": report.mean_reward,
        "errors": dict(report.errors.most_common(20)),
        "code_versions": report.by_code_version,
        "seconds": round(report.seconds, 3),
    }
    if isinstance(report, TrainReport):
        shared |= {
            "steps": len(report.steps),
            "rewards": list(report.rewards),
            "not_needed": report.num_not_needed,
            "groups_dropped": report.groups_dropped,
            "code_changes": report.code_changes,
        }
    else:
        shared |= eval_document(report, {})
    return shared


def evaluate(
    target: Annotated[
        str, Argument(metavar="MODEL_OR_URL", help="A model folder or name, or the address of a running server.")
    ],
    agent: Annotated[
        str | None,
        Option(metavar="FILE.py:FUNCTION", help="The agent to score; default: one answer to each held-out sum."),
    ] = None,
    task_file: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Tasks of --agent: FILE.jsonl, an object a line, or FILE.py:FUNCTION, which returns them.",
        ),
    ] = None,
    tasks: Annotated[int | None, Option(min=1, help="Number of tasks; default: all.")] = None,
    repeats: Annotated[int, Option(min=1, help="Episodes of each task.")] = 1,
    pass_at: Annotated[
        list[int] | None, Option(metavar="K", help="Also the chance that one of K answers is right; can be repeated.")
    ] = None,
    temperature: Annotated[
        float | None, Option(min=0, help="Sampling temperature of every call, 0: greedy; default: the agent's.")
    ] = None,
    concurrency: Annotated[int, Option(min=1, help="Episodes at the same time.")] = 64,
    at_version: Annotated[
        str | None,
        Option(metavar="N|newest", help="Policy version that answers throughout: learning waits. Default: any."),
    ] = None,
    token: Token = None,
    token_file: TokenFile = None,
    override: Override = None,
    as_json: Json = False,
) -> None:
    """Score a model with an agent: the mean reward over tasks, with a 95 % interval.

    Without --agent the tasks are the demo's 500 held-out sums, and the score is the share of right first answers.
    A model folder (such as the demo's) or a model name gets a temporary server. With --repeats the interval is over
    tasks, not answers.
    """
    if wrong := [k for k in pass_at or () if not 1 <= k <= repeats]:
        raise ConfigError(f"--pass-at {wrong[0]} needs --repeats {max(1, wrong[0])} at least; it is {repeats}")
    if at_version not in (None, "newest") and not at_version.isdecimal():
        raise ConfigError(f"--at-version {at_version!r}: give a policy version, or newest")
    player, chosen = _agent_and_tasks(agent, task_file, tasks)
    settings = None if agent else example("arithmetic") / "job.toml"
    with _served(Server(target, token, token_file), settings, override or []) as swarm:
        if agent is None and (policies := swarm.status().policies):
            raise ConfigError(
                f"{target} has the policies {', '.join(policies)}, and the default agent asks one model: give --agent "
                "and --task-file, and name a policy as `model` in the agent's requests"
            )
        report = evaluate_all(
            swarm,
            player,
            chosen,
            repeats=repeats,
            concurrency=concurrency,
            progress=not as_json,
            temperature=temperature,
            at_version=int(at_version) if at_version and at_version.isdecimal() else at_version,
        )
    metrics = {name: report.metric_at_k(name) for name in report.metrics}
    chances = {f"pass@{k}": report.pass_at(k) for k in pass_at or ()}
    if as_json:
        typer.echo(_json({"target": target, **eval_document(report, metrics | chances)}))
        return
    lines = [f"{target}: {report}", *(f"  {name}: {value}" for name, value in (metrics | chances).items())]
    typer.echo(printable("\n".join(lines)))


def evaluate_all(swarm: Swarm, agent: Agent, tasks: Sequence[Task], **options: Any) -> EvalReport:
    """`Swarm.evaluate`. Raises `AgentJetError` if an episode did not finish: a score has no gaps."""
    report = swarm.evaluate(agent, tasks, **options)
    missing = len(report.results) - len(report.finished)
    if missing:
        raise AgentJetError(
            f"{missing} of {len(report.results)} episodes did not finish: {report.errors.most_common(1)[0][0]}"
        )
    return report


def eval_document(report: EvalReport, figures: dict[str, Estimate]) -> dict[str, Any]:
    """The report as JSON: each figure as NAME and NAME_interval, unless the document uses the name."""
    estimates = figures | {"success": report.mean_at_k}
    return {
        **{name: value.value for name, value in estimates.items()},
        **{f"{name}_interval": [value.low, value.high] for name, value in estimates.items()},
        "tasks": report.mean_at_k.num_tasks,
        "repeats": report.repeats,
        "policy_version": report.policy_versions[1],
        "seconds": round(report.seconds, 3),
    }


def _agent_and_tasks(agent: str | None, task_file: str | None, num_tasks: int | None) -> tuple[Agent, list[Task]]:
    """The agent to score, and its tasks. Raises `ConfigError`."""
    if agent is None:
        if task_file is not None:
            raise ConfigError("--task-file is for --agent: the default agent has its own tasks")
        sums = load_example("arithmetic", "agent")
        player, tasks = sums.FirstAnswer(), sums.held_out_tasks()
    else:
        from agentjet.research.subject import load_agent, load_tasks

        if task_file is None:
            raise ConfigError("--agent needs --task-file: FILE.jsonl, or FILE.py:FUNCTION")
        player, tasks = load_agent(agent, option="--agent"), load_tasks(task_file, option="--task-file")
    if num_tasks is not None and num_tasks > len(tasks):
        raise ConfigError(f"--tasks {num_tasks}: there are {len(tasks)} tasks")
    return player, tasks[:num_tasks]


@contextmanager
def _served(server: Server, settings: Path | None, overrides: list[str]) -> Iterator[Swarm]:
    """A client of the server at the URL, or of a new server for the model that stands in its place."""
    target = server.url or ""
    if target.startswith(("http://", "https://")):
        if overrides:
            raise ConfigError("--set is for a server that eval starts; none is started here")
        with server.connect() as swarm:
            yield swarm
        return
    from agentjet.cli.serve import ChildServer
    from agentjet.client.threads import raise_on_signals
    from agentjet.config.loader import check_model_name

    check_model_name(target, "an address begins with http://, and as a model")
    name = str(Path(target).resolve()) if Path(target).is_dir() else target
    with (
        tempfile.TemporaryDirectory(prefix="agentjet-eval-") as folder,
        raise_on_signals(),
        ChildServer(settings, [f"model.name={json.dumps(name)}", *overrides], Path(folder)) as child,
        child.connect() as swarm,
    ):
        yield swarm


def sft(
    server: Server,
    file: Annotated[
        Path,
        Argument(
            metavar="FILE.jsonl",
            help="A conversation a line: messages in OpenAI's chat format, tool calls included, and perhaps tools.",
        ),
    ],
    epochs: Annotated[int, Option(min=1, help="Passes over the file.")] = 1,
    batch_size: Annotated[int, Option(min=1, help="Conversations in a batch: one optimiser step.")] = 16,
    lr: Annotated[float | None, Option(help="Constant learning rate; default: that of the job.")] = None,
    policy: Policy = "",
    seed: Annotated[int, Option(help="Seed of the order of the conversations.")] = 0,
    as_json: Json = False,
) -> None:
    """Train the server's policy on the assistant messages of conversations (supervised fine-tuning).

    Every conversation is checked before the first batch. A message with "weight": 0 is context only.
    """
    from agentjet.client.training import read_demonstrations

    if lr is not None and not 0 < lr < math.inf:
        raise ConfigError(f"--lr {lr}: give a number above 0")
    found, ignored = read_demonstrations(file)
    if ignored and not as_json:
        print_text(f"ignored keys: {', '.join(sorted(map(str, ignored)))}")
    options = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "policy": policy, "seed": seed}
    with server.connect() as swarm:
        report = swarm.sft(found, progress=not as_json, **options)  # type: ignore[arg-type]
    first, last, version = report.losses[0], report.losses[-1], report.steps[-1].policy_version
    if as_json:
        facts = {"batches": len(report.steps), "policy_version": version, "first_loss": first, "last_loss": last}
        counts = {"demonstrations": report.num_demonstrations, "answers": report.num_answers}
        typer.echo(_json({**facts, **counts, "tokens": report.num_tokens, "losses": report.losses}))
    else:
        typer.echo(f"policy version {version}: cross-entropy {first:.3f} in the first batch, {last:.3f} in the last")
