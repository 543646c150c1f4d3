"""`agentjet run` trains a program as the agent; `agentjet eval` scores a model with an agent."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentjet.cli import Json, Override, Token, TokenFile, Url, connect, example, load_example, printable
from agentjet.errors import AgentJetError, ConfigError

if TYPE_CHECKING:
    from agentjet.cli.program import CommandLine
    from agentjet.client import Agent, Command, Endpoint, Estimate, EvalReport, Swarm, TrainReport
    from agentjet.client.agent_source import AgentSource
    from agentjet.types import Task

STEPS = 20
NO_CALLS_HINT = (
    "the program must call the model at OPENAI_BASE_URL with OPENAI_API_KEY (ANTHROPIC_...: likewise), and read its "
    "streams to their end"
)
FAILING_HINT = "correct the program, or its --reward; a --task-file of one line with --eval tries it on one task"


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
    watch: Annotated[bool, typer.Option("--watch", help="Use edits of the program during training.")] = False,
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--source", help="Another file or folder of the program, beside those in the command; can be repeated."
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
    AGENTJET_TASK. It runs in a fresh working directory, with a fresh HOME. Each of these aborts the episode: an exit
    code other than 0, a signal, a time-out, a request that the server refused. With --reward exit-code, 1 to 124 score
    0 instead. The result for --reward FILE.py:FUNCTION has stdout, stderr, exit_code, seconds and folder.
    """
    from agentjet.cli.program import CommandLine, check_source
    from agentjet.client import AgentFailing
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
        except AgentFailing as failing:  # Its own message is about Python agents.
            raise AgentJetError(f"{failing.fact}: {NO_CALLS_HINT if failing.is_silent else FAILING_HINT}") from None
    typer.echo(json.dumps(run_document(report), indent=2) if as_json else printable(str(report)))


def _agent(
    stack: ExitStack, program: CommandLine, tasks: list[Task], reward: str, options: dict[str, Any], watch: bool
) -> tuple[Command, AgentSource | None]:
    """The agent, and with `watch` the source of its newer versions.

    Raises `ConfigError` for an error that every episode would have.
    """
    from agentjet.cli.program import CommandSource, reward_source
    from agentjet.client import Command
    from agentjet.client.agent_source import ModuleSource, code_version_of

    scored = reward_source(reward)
    command = Command(program.resolved(), scored.score, any_exit_code=scored.any_exit_code, **options)
    if shutil.which(command.arguments[0]) is None:
        raise ConfigError(f"the command {program.arguments[0]!r} is missing or not executable")
    for task in tasks:
        command.filled(task)
    if not watch:
        version = program.version(code_version_of(scored.score) if scored.is_function else "")
        return command.changed(command.arguments, scored.score, version), None
    if not program.files():
        raise ConfigError("--watch: the command line has no file to watch: name one with --source")
    copies = stack.enter_context(tempfile.TemporaryDirectory(prefix="agentjet-code-", ignore_cleanup_errors=True))
    code = CommandSource(program, command, ModuleSource(scored.score) if scored.is_function else None, Path(copies))
    first = code.load().agent
    assert isinstance(first, Command)
    return first, code


def run_document(report: TrainReport | EvalReport) -> dict[str, Any]:
    """The report as JSON; a missing value is null."""
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
    """`value` with null for NaN, which JSON does not have."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    return [_without_nan(inner) for inner in value] if isinstance(value, list) else value


def evaluate(
    target: Annotated[
        str | None,
        typer.Argument(metavar="MODEL_OR_URL", help="A model folder or name, or the address of a running server."),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FUNCTION", help="The agent to score; default: one answer to each held-out sum."),
    ] = None,
    task_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Tasks of --agent: FILE.jsonl, an object a line, or FILE.py:FUNCTION, which returns them.",
        ),
    ] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Number of tasks; default: all.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Episodes of each task.")] = 1,
    pass_at: Annotated[
        str, typer.Option(metavar="K,K,...", help="Also the chance that one of K answers is right; K up to --repeats.")
    ] = "",
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sampling temperature of the default agent; default: 1.")
    ] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Temperature 0: the default agent samples the likeliest token.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the default agent's sampling; default: 0.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at the same time.")] = 64,
    at_version: Annotated[
        str | None,
        typer.Option(
            metavar="N|newest",
            help="Policy version that answers throughout: learning waits. Default: any.",
        ),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask any OpenAI-compatible endpoint instead: http://.../v1.")
    ] = None,
    endpoint_model: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name there.")] = None,
    endpoint_key_file: Annotated[Path | None, typer.Option(help="File with the endpoint's API key.")] = None,
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
    outside = _endpoint(endpoint, endpoint_model, endpoint_key_file)
    if (target is None) == (outside is None):
        raise ConfigError("name what to score: MODEL_OR_URL, or --endpoint with --endpoint-model")
    at_k, version = _pass_at(pass_at, repeats), _at_version(at_version, outside)
    sampling = {"temperature": 0.0 if greedy else temperature, "seed": seed}
    player, chosen, answers = _agent_and_tasks(
        agent, task_file, tasks, {key: value for key, value in sampling.items() if value is not None}
    )
    settings = None if agent else example("arithmetic") / "job.toml"
    with _server(target, token, token_file, settings, override or []) as swarm:
        report = evaluate_all(
            swarm,
            player,
            chosen,
            repeats=repeats,
            concurrency=concurrency,
            progress=not as_json,
            at_version=version,
            endpoint=outside,
        )
    name = target or f"{endpoint_model} at {endpoint}"
    metrics = {m: report.metric_at_k(m) for m in sorted({m for result in report.finished for m in result.metrics})}
    chances = {str(k): report.pass_at(k) for k in at_k}
    if as_json:
        document = {"target": name, **eval_document(report, metrics, chances)}
        if answers is not None:
            document["answers"] = answers
        typer.echo(json.dumps(_without_nan(document), indent=2))
        return
    lines = [f"{name}: {report}", *(f"  {metric}: {value}" for metric, value in metrics.items())]
    typer.echo(printable("\n".join([*lines, *(f"  pass@{k}: {chance}" for k, chance in chances.items())])))


def evaluate_all(swarm: Swarm, agent: Agent, tasks: Sequence[Task], **options: Any) -> EvalReport:
    """`Swarm.evaluate`. Raises `AgentJetError` if an episode did not finish: a score has no gaps."""
    report = swarm.evaluate(agent, tasks, **options)
    missing = len(report.results) - len(report.finished)
    if missing:
        raise AgentJetError(
            f"{missing} of {len(report.results)} episodes did not finish: {report.errors.most_common(1)[0][0]}"
        )
    return report


def eval_document(
    report: EvalReport, metrics: Mapping[str, Estimate], chances: Mapping[str, Estimate]
) -> dict[str, Any]:
    """The report as JSON: each metric of the agent as NAME and NAME_interval, unless the document uses the name."""
    mean = report.mean_at_k
    return {
        **{name: value.value for name, value in metrics.items()},
        **{f"{name}_interval": [value.low, value.high] for name, value in metrics.items()},
        "tasks": mean.num_tasks,
        "repeats": report.repeats,
        "success": mean.value,
        "success_interval": [mean.low, mean.high],
        "pass_at": {k: {"value": chance.value, "interval": [chance.low, chance.high]} for k, chance in chances.items()},
        "policy_version": report.policy_versions[1],
        "seconds": round(report.seconds, 3),
    }


def _agent_and_tasks(
    agent: str | None, task_file: str | None, num_tasks: int | None, sampling: dict[str, Any]
) -> tuple[Agent, list[Task], dict[str, str] | None]:
    """The agent to score, its tasks, and the answers that the default agent records. Raises `ConfigError`."""
    answers = None
    if agent is None:
        if task_file is not None:
            raise ConfigError("--task-file is for --agent: the default agent has its own tasks")
        sums = load_example("arithmetic", "agent")
        player, tasks = sums.FirstAnswer(**sampling), sums.held_out_tasks()
        answers = player.answers
    else:
        from agentjet.research.subject import load_agent, load_tasks

        if sampling:
            raise ConfigError(f"--temperature, --greedy and --seed are for the default agent: set them in {agent}")
        if task_file is None:
            raise ConfigError("--agent needs --task-file: FILE.jsonl, or FILE.py:FUNCTION")
        player, tasks = load_agent(agent, option="--agent"), load_tasks(task_file, option="--task-file")
    if num_tasks is not None and num_tasks > len(tasks):
        raise ConfigError(f"--tasks {num_tasks}: there are {len(tasks)} tasks")
    return player, tasks[:num_tasks], answers


def _endpoint(url: str | None, model: str | None, key_file: Path | None) -> Endpoint | None:
    from agentjet.client import Endpoint

    if url is None:
        if model is not None or key_file is not None:
            raise ConfigError("--endpoint-model and --endpoint-key-file are for an --endpoint")
        return None
    if not url.startswith(("http://", "https://")) or model is None:
        raise ConfigError("--endpoint is an address (http://.../v1), and needs --endpoint-model")
    if key_file is None:
        return Endpoint(url, model)
    try:
        return Endpoint(url, model, key_file.read_text(encoding="utf-8").strip())
    except OSError as error:
        raise ConfigError(f"--endpoint-key-file {key_file}: {error.strerror}") from None


def _pass_at(text: str, repeats: int) -> tuple[int, ...]:
    try:
        wanted = tuple(int(k) for k in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(f"--pass-at {text!r}: give numbers with commas between them, such as 1,4") from None
    if wrong := [k for k in wanted if not 1 <= k <= repeats]:
        raise ConfigError(f"--pass-at {wrong[0]} needs --repeats {max(1, wrong[0])} at least; it is {repeats}")
    return wanted


def _at_version(text: str | None, outside: Endpoint | None) -> int | Literal["newest"] | None:
    if text is None:
        return None
    if outside is not None:
        raise ConfigError("--at-version is for the policy of a server: an endpoint has no versions")
    if text == "newest":
        return "newest"
    if not text.isdecimal():
        raise ConfigError(f"--at-version {text!r}: give a policy version, or newest")
    return int(text)


@contextmanager
def _server(
    target: str | None, token: str | None, token_file: Path | None, settings: Path | None, overrides: list[str]
) -> Iterator[Swarm]:
    """A client of the server at `target`, or of a new server for the model `target`. Without a target any server: the
    calls go to an endpoint."""
    if target is None or target.startswith(("http://", "https://")):
        if overrides:
            raise ConfigError("--set is for a server that eval starts; none is started here")
        with connect(target, token, token_file) as swarm:
            yield swarm
        return
    from agentjet.cli.serve import ChildServer
    from agentjet.client.threads import raise_on_signals

    if "/" in target and target.count("/") != 1 and not Path(target).is_dir():
        raise ConfigError(f"{target!r} is neither a folder nor an address (http://...)")
    name = str(Path(target).resolve()) if Path(target).is_dir() else target
    with (
        tempfile.TemporaryDirectory(prefix="agentjet-eval-") as folder,
        raise_on_signals(),
        ChildServer(settings, [f"model.name={json.dumps(name)}", *overrides], Path(folder)) as server,
        server.connect() as swarm,
    ):
        yield swarm
