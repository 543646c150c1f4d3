"""`agentjet run` trains a program as the agent, `agentjet eval` scores.

A reward of a program that cannot be read aborts the episode: it is not 0.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, ValidationError
from typer import Argument, Option

from agentjet.cli import Json, Override, Server, Token, TokenFile, example, load_example, printable
from agentjet.cli.env import SPLITS, Environments, split_of
from agentjet.errors import AgentJetError, ConfigError
from agentjet.types import Reward

if TYPE_CHECKING:
    from agentjet.client import Agent, Command, Estimate, EvalReport, Result, Swarm, TrainReport
    from agentjet.client.agent_source import AgentSource, AgentVersion, CodeFolder, Stamp
    from agentjet.client.command import Score
    from agentjet.sandbox import Limits
    from agentjet.types import Task

STEPS = 20


def run(
    server: Server,
    environments: Environments,
    command: Annotated[
        list[str] | None,
        Argument(
            metavar="-- COMMAND...",
            help="The program and its arguments, after `--`; no shell is involved. {task} becomes the task's row as "
            "JSON, {task.key} one value of it, {here} the present folder.",
        ),
    ] = None,
    task_file: Annotated[Path | None, Option("--task-file", help="Tasks of the program: a JSON object a line.")] = None,
    reward: Annotated[
        str | None,
        Option(
            help="FILE.py:FUNCTION, called with the row and the result; `stdout`: its last line, a number or "
            '{"reward": number}; `file:NAME`: the same from a file in the working directory; `exit-code`: 1 for '
            "0, else 0."
        ),
    ] = None,
    steps: Annotated[int | None, Option(min=1, help="Batches to learn; default: 20.")] = None,
    concurrency: Annotated[
        int | None,
        Option(min=1, help="Processes at the same time; default: 16, or the `processes` of the environments."),
    ] = None,
    timeout: Annotated[
        float | None,
        Option(min=0.001, help="Seconds after which a process is ended and its episode aborted; default: 600."),
    ] = None,
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
    sandbox: Annotated[
        bool,
        Option(
            "--sandbox",
            help="Show the program its own files, a working directory and the model only; needs bubblewrap.",
        ),
    ] = False,
    memory: Annotated[
        float | None,
        Option(min=0.05, max=2**20, metavar="GIB", help="With --sandbox: memory of a program; default: 4."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a program, or environments, as the agent, and train the server's policy on the rewards.

    A program (COMMAND, --task-file and --reward) runs once an episode. An environment (--env) has all three.

    The program finds the model in OPENAI_BASE_URL and OPENAI_API_KEY (ANTHROPIC_...: likewise), its task also in
    AGENTJET_TASK. It runs in a fresh working directory, with a fresh HOME. Each of these aborts the episode: an exit
    code other than 0, a signal, a time-out, a request that the server refused. With --reward exit-code, 1 to 124 score
    0 instead. The result for --reward FILE.py:FUNCTION has stdout, stderr, exit_code, seconds and folder.
    """
    from agentjet.client.threads import raise_on_signals

    if watch and (only_eval or code_version is not None):
        raise ConfigError(f"--watch and {'--eval' if only_eval else '--code-version'} exclude each other")
    if only_eval and steps is not None:
        raise ConfigError("--steps and --eval exclude each other: an evaluation does not learn")
    if repeats is not None and not only_eval:
        raise ConfigError("--repeats is for --eval: training visits tasks in groups of job.group_size")
    program_options = {
        "a command": command,
        "--task-file": task_file,
        "--reward": reward,
        "--timeout": timeout,
        "--watch": watch,
        "--source": source,
        "--score-refused": score_refused,
        "--shared-home": shared_home,
        "--sandbox": sandbox,
        "--memory": memory,
    }
    environments.check(program_options)
    limits = sandbox_limits(memory, shared_home=shared_home) if sandbox else None
    if memory is not None and not sandbox:
        raise ConfigError(f"--memory {memory:g} is a limit of the sandbox: give --sandbox, too")
    with ExitStack() as stack:
        code: AgentSource | None = None
        if environments.env:
            mixed = environments.load(stack)
            agent: Agent = mixed.agent
            tasks = split_of(mixed, "held_out" if only_eval else "train")
            concurrency = concurrency or sum(mixed.agent.capacity.values())
        else:
            agent, code, tasks = _program(
                stack,
                command or [],
                task_file,
                reward,
                source or [],
                watch=watch,
                timeout=timeout or 600.0,
                score_refused=score_refused,
                shared_home=shared_home,
                sandbox=limits,
            )
        if code is not None and as_json:
            typer.echo(code.described(), err=True)  # else training shows it beside its steps
        swarm = stack.enter_context(server.connect())
        stack.enter_context(raise_on_signals())
        shared: dict[str, Any] = {"concurrency": concurrency or 16, "progress": not as_json}
        shared |= {"code_version": code_version}
        report: TrainReport | EvalReport
        if only_eval:
            report = swarm.evaluate(agent, tasks, repeats=repeats or 1, **shared)
        else:
            report = swarm.train(agent, tasks, steps=steps or STEPS, seed=seed, reload=code or False, **shared)
    typer.echo(json_text(run_document(report)) if as_json else printable(str(report)))


def _program(
    stack: ExitStack,
    command: list[str],
    task_file: Path | None,
    reward: str | None,
    source: list[Path],
    **options: Any,
) -> tuple[Agent, AgentSource | None, list[Task]]:
    """The program as an agent, the source of its newer versions, and its tasks. Raises `ConfigError`."""
    from agentjet.client.inputs import read_tasks

    for name, value in (("a command after `--`", command), ("--task-file", task_file), ("--reward", reward)):
        if not value:
            raise ConfigError(f"{name} is missing: give a command, --task-file and --reward, or --env for environments")
    assert task_file is not None and reward is not None
    here = Path.cwd()
    tasks = read_tasks(task_file)
    program = CommandLine(tuple(command), here, check_source(source, here))
    agent, code = _agent(stack, program, tasks, reward, **options)
    return agent, code, tasks


def _agent(
    stack: ExitStack, program: CommandLine, tasks: list[Task], reward: str, watch: bool, **options: Any
) -> tuple[Agent, AgentSource | None]:
    """The agent, and with `watch` the source of its newer versions.

    Raises `ConfigError` for an error that every episode would have.
    """
    from agentjet.client import Command
    from agentjet.client.agent_source import ModuleSource, code_version_of
    from agentjet.client.inputs import check_commands

    score, is_function = reward_source(reward)
    version = program.version(code_version_of(score) if is_function else "")
    options |= {"any_exit_code": reward == EXIT_CODE, "code_version": version}
    if options["sandbox"] is not None:
        from agentjet.sandbox import Sandbox

        options |= {"readable": program.readable(), "variables": _moved_python_path({})}
        with tempfile.TemporaryDirectory() as folder:
            Sandbox(folder=Path(folder), readable=options["readable"]).check()
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


def sandbox_limits(memory: float | None, *, shared_home: bool) -> Limits:
    """The limits of `--sandbox`. Raises `ConfigError` where sandboxes do not work."""
    from agentjet.sandbox import Limits, missing

    if reason := missing():
        raise ConfigError(f"--sandbox: {reason}")
    if shared_home:
        raise ConfigError("--sandbox and --shared-home exclude each other: a sandbox does not show the home")
    return Limits() if memory is None else Limits(memory=int(memory * 2**30))


def json_text(document: dict[str, Any]) -> str:
    """A document as text; NaN becomes null."""
    from pydantic import TypeAdapter

    return TypeAdapter(dict[str, Any]).dump_json(document, indent=2).decode()


def run_document(report: TrainReport | EvalReport) -> dict[str, Any]:
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
    environments: Environments,
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
    split: Annotated[
        str | None, Option(metavar="|".join(SPLITS), help="Tasks of --env; default: those that are held out.")
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

    Without --agent and --env the tasks are the demo's 500 held-out sums, and the score is the share of right first
    answers.
    A model folder (such as the demo's) or a model name gets a temporary server. With --repeats the interval is over
    tasks, not answers.
    """
    if wrong := [k for k in pass_at or () if not 1 <= k <= repeats]:
        raise ConfigError(f"--pass-at {wrong[0]} needs --repeats {max(1, wrong[0])} at least; it is {repeats}")
    if at_version not in (None, "newest") and not at_version.isdecimal():
        raise ConfigError(f"--at-version {at_version!r}: give a policy version, or newest")
    environments.check({"--agent": agent, "--task-file": task_file})
    if split is not None and not environments.env:
        raise ConfigError(f"--split {split}: it is for --env")
    player: Agent
    with ExitStack() as stack:
        if environments.env:
            mixed = environments.load(stack)
            player, chosen = mixed.agent, split_of(mixed, split or SPLITS[0])
            concurrency = min(concurrency, sum(mixed.agent.capacity.values()))
        else:
            player, chosen = named_agent(agent, task_file)
        if tasks is not None and tasks > len(chosen):
            of = f" of the split {split or SPLITS[0]}" if environments.env else ""
            raise ConfigError(f"--tasks {tasks}: there are {len(chosen)} tasks{of}")
        is_default = agent is None and not environments.env
        settings = example("arithmetic") / "job.toml" if is_default else None
        swarm = stack.enter_context(_served(Server(target, token, token_file), settings, override or []))
        if is_default and (policies := swarm.status().policies):
            raise ConfigError(
                f"{target} has the policies {', '.join(policies)}, and the default agent asks one model: give --agent "
                "and --task-file, and name a policy as `model` in the agent's requests"
            )
        report = evaluate_all(
            swarm,
            player,
            chosen[:tasks],
            repeats=repeats,
            concurrency=concurrency,
            progress=not as_json,
            temperature=temperature,
            at_version=int(at_version) if at_version and at_version.isdecimal() else at_version,
        )
    metrics = {name: report.metric_at_k(name) for name in report.metrics}
    chances = {f"pass@{k}": report.pass_at(k) for k in pass_at or ()}
    if as_json:
        typer.echo(json_text({"target": target, **eval_document(report, metrics | chances)}))
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


def named_agent(agent: str | None, task_file: str | None) -> tuple[Agent, list[Task]]:
    """The agent to score, and its tasks. Raises `ConfigError`."""
    if agent is None:
        if task_file is not None:
            raise ConfigError("--task-file is for --agent: the default agent has its own tasks")
        sums = load_example("arithmetic", "agent")
        return sums.FirstAnswer(), sums.held_out_tasks()
    from agentjet.client.inputs import load_agent, load_tasks

    if task_file is None:
        raise ConfigError("--agent needs --task-file: FILE.jsonl, or FILE.py:FUNCTION")
    return load_agent(agent, option="--agent"), load_tasks(task_file, option="--task-file")


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


# ---- the program of `agentjet run`: its files, its code versions, and its reward -------------------------------------

SCRIPTS = frozenset(
    (
        *(".py", ".js", ".mjs", ".cjs", ".ts", ".tsx", ".sh", ".bash"),
        *(".rb", ".pl", ".php", ".lua", ".r", ".R", ".jl", ".go"),
    )
)
"""Endings of files that a program begins with: their folders have its other files."""
VARIABLE = re.compile(r"[A-Za-z_]\w*=")
PYTHON_PATH = "PYTHONPATH"
NAMED = "named by the command, --source or PYTHONPATH"
"""The reason for watching a folder or file."""
REWARD_FORMS = "FILE.py:FUNCTION, stdout, exit-code or file:NAME"
MAX_REWARD_BYTES = 2**20
"""Longest file of a reward."""
EXIT_CODE = "exit-code"
"""The reward that also scores exit codes from 1 to 124."""


@dataclass(frozen=True)
class CommandLine:
    """A command line as given in the folder `here`. `{here}` in it becomes that folder."""

    arguments: tuple[str, ...]
    here: Path
    more: tuple[Path, ...] = ()
    """Files and folders of `--source`, absolute."""

    def files(self) -> list[Path]:
        """The present files of the program: those in the command line and those of `--source`."""
        named = [path for path in self._paths() if path.is_file()]
        return list(dict.fromkeys(itertools.chain(named, *(_below(path) for path in self.more))))

    def watched(self) -> list[CodeFolder]:
        """The folders that the program runs from: `here`, if a word or `--source` leads there; those of scripts
        elsewhere, and of PYTHONPATH. Another file elsewhere is watched alone."""
        from agentjet.client.agent_source import CodeFolder

        is_here = any("{here}" in word for word in self.arguments)
        folders: dict[Path, CodeFolder] = {}
        data: set[Path] = set()
        for path in [*self._paths(), *self.more, *_python_path(os.environ.get(PYTHON_PATH, ""))]:
            if path.is_relative_to(self.here):
                is_here = True
            elif path.is_dir():
                folders[path] = CodeFolder(path, why=NAMED)
            elif path.suffix in SCRIPTS or os.access(path, os.X_OK):
                folders[path.parent] = CodeFolder(path.parent, why=f"the folder of {path.name}")
            else:
                data.add(path)
        if is_here:
            folders[self.here] = CodeFolder(self.here, why="the present folder")
        outer = [root for root in folders if not any(above in folders for above in root.parents)]
        alone: dict[Path, set[Path]] = {}
        for path in data:
            if not any(above in folders for above in path.parents):
                alone.setdefault(path.parent, set()).add(path)
        own = [CodeFolder(root, frozenset(files), NAMED) for root, files in sorted(alone.items())]
        return [folders[root] for root in sorted(outer)] + own

    def readable(self, copies: Mapping[Path, Path] | None = None) -> tuple[Path, ...]:
        """The paths that a sandbox must show: the watched folders, their copies, its interpreter."""
        from agentjet.sandbox import programs

        watched = self.watched()
        named = [path for folder in watched for path in (sorted(folder.only) if folder.only else (folder.root,))]
        program = self._path(self.arguments[0], is_first=True) or self.arguments[0]
        return (*named, *(copies or {}).values(), *programs(str(program)))

    def moved(self, copies: Mapping[Path, Path]) -> list[str]:
        """The command line for any working directory: paths are absolute. `copies` has folders by their originals."""
        here = copies.get(self.here, self.here)
        moved = [self._moved_word(word, index, copies) for index, word in enumerate(self.arguments)]
        return [word.replace("{here}", str(here)) for word in moved]

    def version(self, reward_version: str, contents: Mapping[str, bytes] | None = None) -> str:
        """The code version, a hash of the program's name, the words that are not files, the reward's version, and the
        contents of the files: those of `files` by default."""
        from agentjet.client.agent_source import hash_of

        if contents is None:
            contents = {os.path.relpath(file, self.here): file.read_bytes() for file in self.files()}
        program, *rest = self.arguments
        words = [word for index, word in enumerate(rest, 1) if not self._paths_in(word, index)]
        facts = {"--": "\0".join([Path(program).name, *words]).encode(), "--reward": reward_version.encode()}
        return hash_of({**contents, **facts})

    def _paths(self) -> list[Path]:
        """The files and folders in the words that the author may have written."""
        return [
            path
            for index, word in enumerate(self.arguments)
            for path, _ in self._paths_in(word, index)
            if self._is_own(path, is_first=index == 0)
        ]

    def _is_own(self, path: Path, *, is_first: bool) -> bool:
        """False for an interpreter, also one that is given by a link or by its place in a virtual environment."""
        from agentjet.client.agent_source import has_environment, is_installed

        target, is_here = path.resolve(), path.is_relative_to(self.here)
        if is_first and path.suffix not in SCRIPTS and not target.is_relative_to(self.here.resolve()):
            return False
        if is_here and has_environment(folder for folder in path.parents if folder.is_relative_to(self.here)):
            return False
        return is_here or not is_installed(path)

    def _paths_in(self, word: str, index: int) -> list[tuple[Path, str]]:
        """The files and folders in a word, with the text that names each. Also in `--option=path` and `NAME=path:path`,
        as `env` sets variables."""
        is_option, is_variable = word.startswith("-"), VARIABLE.match(word)
        value = word.partition("=")[2] if is_option or is_variable else word
        names = value.split(os.pathsep) if is_variable else [value]
        return [(path, name) for name in names if (path := self._path(name, is_first=index == 0)) is not None]

    def _path(self, name: str, *, is_first: bool) -> Path | None:
        if not name or (is_first and os.sep not in name):  # the program is found through PATH
            return None
        path = Path(os.path.normpath(self.here / name))
        try:
            # A single word can have any meaning: it is not a path only because a folder has the same name.
            return path if path.exists() and (os.sep in name or path.is_file()) else None
        except (OSError, ValueError):  # too long for a name, or with a null byte
            return None

    def _moved_word(self, word: str, index: int, copies: Mapping[Path, Path]) -> str:
        found = self._paths_in(word, index)
        if not found:
            return word
        option, separator, value = word.rpartition("=") if "=" in word and found[0][1] != word else ("", "", word)
        texts = {text: str(moved_path(path, copies)) for path, text in found}
        names = value.split(os.pathsep) if VARIABLE.match(word) else [value]
        return f"{option}{separator}{os.pathsep.join(texts.get(name, name) for name in names)}"


def moved_path(path: Path, copies: Mapping[Path, Path]) -> Path:
    """The path in the copy of a folder that it is in; else the path itself."""
    for original, copy in copies.items():
        if path.is_relative_to(original):
            moved = copy / path.relative_to(original)
            return moved if os.path.lexists(moved) else path
    return path


@dataclass
class CommandSource:
    """The `AgentSource` of a command. Each version runs from a copy of the program's folders below `copies`.

    So an edit does not change an episode that has begun, and an older version can be used again. A reward function is
    loaded again with each version.
    """

    line: CommandLine
    command: Command
    reward_source: AgentSource | None
    copies: Path
    num_copies: int = 0

    def __post_init__(self) -> None:
        self._folders = self.line.watched()
        if not self._folders:
            raise ConfigError(
                "--watch: the command line names no file or folder of yours, so there is nothing to watch: name the "
                "program's folder with --source"
            )

    def stamp(self) -> Stamp:
        stamps = [folder.listing().stamp for folder in self._folders]
        return (*itertools.chain(*stamps), *(self.reward_source.stamp() if self.reward_source is not None else ()))

    def described(self) -> str:
        return "\n".join(folder.described() for folder in self._folders)

    def load(self) -> AgentVersion:
        """Copies the present files. Raises the errors of the files, or of the reward's."""
        from agentjet.client.agent_source import AgentVersion, hash_of

        score = AgentVersion("", self.command.score)
        if self.reward_source is not None:
            score = self.reward_source.load()
        place = self.copies / str(self.num_copies)
        self.num_copies += 1
        copied: dict[Path, Path] = {}
        contents: dict[str, bytes] = {}
        files = dict(score.files)
        stamps: list[Stamp] = []
        for number, folder in enumerate(self._folders):
            copied[folder.root], listing = folder.copy(place / str(number))
            names = [path.relative_to(folder.root) for path in listing.files]
            stamps.append(listing.stamp)
            read = {name: (copied[folder.root] / name).read_bytes() for name in names}
            contents |= {f"{number}/{name}": content for name, content in read.items()}
            files |= {folder.root / name: hash_of({"": content}) for name, content in read.items()}
        version = self.line.version(score.code_version, contents)
        command = replace(
            self.command,
            arguments=self.line.moved(copied),
            score=score.agent,
            code_version=version,
            variables=_moved_python_path(copied),
            copies={str(copy): str(original) for original, copy in copied.items()},
            readable=self.line.readable(copied) if self.command.sandbox is not None else (),
        )
        return AgentVersion(version, command, (*itertools.chain(*stamps), *score.stamp), files, score.activate)


def _python_path(value: str) -> list[Path]:
    """The folders of the author in a PYTHONPATH."""
    from agentjet.client.agent_source import OURS, is_installed

    paths = [Path(name) for name in value.split(os.pathsep) if os.path.isabs(name)]
    return [path for path in paths if path.is_dir() and not is_installed(path) and not OURS.is_relative_to(path)]


def _moved_python_path(copies: Mapping[Path, Path]) -> dict[str, str]:
    value = os.environ.get(PYTHON_PATH, "")
    own = {str(path): str(moved_path(path, copies)) for path in _python_path(value)}
    return {PYTHON_PATH: os.pathsep.join(own.get(name, name) for name in value.split(os.pathsep))} if own else {}


def check_source(paths: Sequence[Path], here: Path) -> tuple[Path, ...]:
    """The paths of `--source`, absolute. Raises `ConfigError` for a missing one."""
    for path in paths:
        if not (here / path).exists():
            raise ConfigError(f"--source {path}: no such file or folder")
    return tuple(Path(os.path.normpath(here / path)) for path in paths)


def _below(path: Path) -> Iterator[Path]:
    from agentjet.client.agent_source import SKIPPED

    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


class NoReward(Exception):
    """The program ended well, but its output or file has no valid reward."""


def reward_source(text: str) -> tuple[Score, bool]:
    """The function that computes the reward of a `--reward` option, and whether its author wrote it. Raises
    `ConfigError`."""
    from agentjet.client.agent_source import load_function

    if text == "stdout":
        return lambda task, result: from_stdout(result), False
    if text == EXIT_CODE:
        return lambda task, result: float(result.exit_code == 0), False
    kind, separator, name = text.rpartition(":")
    if kind == "file" and name:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigError(f"--reward {text}: the file must lie in the command's working directory")
        return lambda task, result: from_file(result.folder, name), False
    if separator and kind.endswith(".py"):
        return load_function(text, option="--reward"), True
    raise ConfigError(f"--reward {text}: expected {REWARD_FORMS}")


def from_stdout(result: Result) -> Reward | dict[str, Reward]:
    """The reward in the last line that is not empty."""
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    if not lines:
        raise NoReward("stdout is empty: its last line must be the reward")
    return _parse_reward(lines[-1], "the last line of stdout")


def from_file(folder: Path, name: str) -> Reward | dict[str, Reward]:
    """The reward in a whole file that the command wrote into its working directory."""
    try:
        content = _read_own_file(folder, name)
    except OSError as error:
        raise NoReward(f"the file {name} of the reward: {error.strerror}") from None
    return _parse_reward(content.decode(errors="replace"), f"the file {name}")


def _read_own_file(folder: Path, name: str) -> bytes:
    """Returns the content of a regular file below `folder`. Follows no link. Raises `NoReward` and `OSError`."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # Opening a FIFO would block.
    *folders, last = Path(name).parts
    with ExitStack() as opened:
        place: int | None = None
        for part in (str(folder), *folders):
            place = os.open(part, flags | os.O_DIRECTORY, dir_fd=place)
            opened.callback(os.close, place)
        found = os.open(last, flags, dir_fd=place)
        opened.callback(os.close, found)
        status = os.fstat(found)
        # A second hard link may be a file of someone else, whose content must not reach the journal.
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise NoReward(f"the file {name} of the reward is not a regular file with one name: write a plain file")
        content = opened.enter_context(os.fdopen(os.dup(found), "rb")).read(MAX_REWARD_BYTES + 1)
    if len(content) > MAX_REWARD_BYTES:
        raise NoReward(f"the file {name} of the reward has more than {MAX_REWARD_BYTES} bytes: write only the reward")
    return content


class _PrintedReward(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    reward: float
    by_role: dict[str, float] = {}
    by_turn: list[float] | dict[str, list[float]] = []
    by_call: dict[str, float] = {}
    metrics: dict[str, float] = {}
    text: str = ""


def _parse_reward(text: str, place: str) -> Reward | dict[str, Reward]:
    """The reward of an episode, or one for each policy of the run by name."""
    try:
        found = json.loads(text, parse_int=float)  # an integer of 400 digits becomes infinite, and is refused later
    except (ValueError, RecursionError):
        found = None
    try:
        if isinstance(found, dict) and found and "reward" not in found:
            return {policy: _checked_reward(one) for policy, one in found.items()}
        return _checked_reward(found)
    except ValidationError as error:
        detail = error.errors()[0]
    why = f" ({'.'.join(map(str, detail['loc']))}: {detail['msg']})" if detail["loc"] else ""
    raise NoReward(
        f'{place} is {text.strip()[:100]!r}: expected a number or {{"reward": number}}, which may have by_role, '
        f"metrics and text, or one of them by policy{why}"
    )


def _checked_reward(found: Any) -> Reward:
    printed = _PrintedReward.model_validate({"reward": found} if isinstance(found, float) else found)
    return Reward(
        printed.reward, printed.by_role, printed.metrics, printed.by_turn or (), printed.by_call, printed.text
    )
