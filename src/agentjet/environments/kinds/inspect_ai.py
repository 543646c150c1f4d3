"""inspect: `inspect:my_tasks.py@arith`, or a task of an installed package, such as `inspect:inspect_evals/gsm8k`.

An episode is an eval of one sample. Evals follow each other in a process, because inspect allows one at a time. Scores
become numbers as inspect makes them. An error, or a sample without a score, aborts the episode.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import chdir
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from pydantic import Field

from agentjet.environments.kind import EnvironmentFailed, EnvironmentTask, Kind
from agentjet.environments.model import READ_SECONDS, Model
from agentjet.errors import ConfigError
from agentjet.types import Reward, shown

if TYPE_CHECKING:
    from inspect_ai import Task
    from inspect_ai.dataset import Sample
    from inspect_ai.log import EvalSample

WORDS = {"c", "i", "p", "n", "yes", "no", "true", "false"}
"""Texts that inspect takes for numbers."""
LOGS = "logs"
"""In the folder of the process."""


class Inspect(Kind):
    """Samples of an inspect task, with its solver and scorers."""

    requires: ClassVar[str] = "inspect-ai>=0.3.285,<0.4"
    about: ClassVar[str] = "file and task of inspect, such as my_tasks.py@arith, or package/task"

    task_args: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of the task."""
    scorer: str = ""
    """Score that is the reward; the others are metrics. Default: the first one."""
    tool_sandbox: str = ""
    """Sandbox of the task's tools instead of the task's own, such as `local`, which isolates nothing."""

    @cached_property
    def _task(self) -> Task:
        """The task of the target. Raises `ConfigError`."""
        # inspect writes traces there, which outlive the process otherwise.
        os.environ["XDG_DATA_HOME"] = str(Path.cwd() / "inspect")
        from inspect_ai._eval.loader import load_tasks, resolve_task_args

        file, at, name = self.target.partition("@")
        path = Path(os.environ.get("AGENTJET_CALLER", "")).absolute() / file
        if file.endswith(".py") and not path.is_file():
            raise ConfigError(f"there is no file {path}: give FILE.py@TASK, or package/task")
        try:
            if path.is_file():
                with chdir(path.parent):  # Patterns of files must be relative.
                    tasks = load_tasks([f"{path.name}{at}{name}"], dict(self.task_args))
            else:
                tasks = load_tasks([self.target], dict(self.task_args))
        except (Exception, SystemExit) as error:  # The boundary: the user's file may raise anything.
            raise ConfigError(f"the task {self.target!r} cannot be loaded: {type(error).__name__}: {error}") from error
        if len(tasks) != 1:
            names = ", ".join(task.name for task in tasks) or "none"
            raise ConfigError(f"{self.target!r} names {len(tasks)} tasks ({names}): give one, such as {file}@TASK")
        if unused := sorted(set(self.task_args) - set(resolve_task_args(tasks[0]))):
            raise ConfigError(f"task_args.{unused[0]}: the task {self.target!r} has no such argument: leave it out")
        return tasks[0]

    @cached_property
    def _samples(self) -> dict[str, Sample]:
        return {_id(sample): sample for sample in self._task.dataset}

    def tasks(self) -> Iterator[EnvironmentTask]:
        if not self.target:
            raise ConfigError("the target is empty: give FILE.py@TASK, or package/task")
        if not self._task.scorer:
            raise ConfigError(f"the task {self.target!r} has no scorer: give it one, because scores are the rewards")
        for sample in self._task.dataset:
            self._check_sandbox(sample)
            yield EnvironmentTask(_id(sample), {"input": _shown(sample)})

    def _check_sandbox(self, sample: Sample) -> None:
        spec = sample.sandbox or self._task.sandbox
        name = self.tool_sandbox or (spec.type if spec is not None else "")
        if name == "docker" and shutil.which("docker") is None:
            raise ConfigError(
                f"sample {_id(sample)} of {self.target} needs inspect's sandbox docker, and there is no docker: "
                "install Docker Engine, or set tool_sandbox = local, which isolates nothing"
            )

    def play(self, task: EnvironmentTask, model: Model) -> Reward:
        try:
            return self._reward(self._played(self._evaluated(task, model)))
        finally:
            shutil.rmtree(LOGS, ignore_errors=True)  # The log reads its samples from there.

    def _reward(self, played: EvalSample) -> Reward:
        # inspect also counts the turn that it refused.
        turns = (played.turn_count or 0) - (played.limit is not None and played.limit.type == "turn")
        values = {name: _number(name, value) for name, value in _values(played).items()}
        chosen = self.scorer or next(iter(values))
        if chosen not in values:
            raise ConfigError(f"scorer = {chosen!r}: the sample has the scores {', '.join(values)}; give one of them")
        name = chosen.partition("/")[0]
        metrics = {f"score/{name}": value for name, value in values.items()} | {"turns": turns}
        score = (played.scores or {})[name]
        return Reward(values[chosen], metrics=metrics, text=score.explanation or score.reason or "")

    def _evaluated(self, task: EnvironmentTask, model: Model) -> Any:
        """The log of an eval of one sample."""
        from inspect_ai import eval
        from inspect_ai.dataset import MemoryDataset
        from inspect_ai.model import GenerateConfig, get_model

        sample = self._samples.get(task.id)
        if sample is None:
            raise EnvironmentFailed(f"the sample {task.id!r} is not in the data set any more: begin the run again")
        single = copy.copy(self._task)
        single.dataset = MemoryDataset([sample], name=self._task.dataset.name)
        config = GenerateConfig(max_tokens=model.max_tokens, temperature=model.temperature, cache=False)
        policy = get_model(
            f"openai-api/agentjet/{model.name}",
            base_url=model.base_url,
            api_key=model.api_key,
            config=config.merge(GenerateConfig(system_message=self.system_prompt or None)),
            client_timeout=READ_SECONDS,
            memoize=False,
        )
        most = min(self.max_turns, model.max_turns or self.max_turns, self._task.turn_limit or self.max_turns)
        grader = get_model("mockllm/model", custom_outputs=_no_grader, memoize=False)
        [log] = eval(
            single,
            model=policy,
            # A grader without a model would be the policy: it would learn to grade itself well.
            model_roles={"grader": grader} | dict(self._task.model_roles or {}),
            sandbox=self.tool_sandbox or None,
            turn_limit=most,
            epochs=1,
            fail_on_error=True,
            retry_on_error=0,
            display="none",
            log_level="warning",
            log_dir=LOGS,
            log_realtime=False,
            ctl_server=False,
        )
        return log

    def _played(self, log: Any) -> EvalSample:
        """The sample of a log. Raises `EnvironmentFailed` unless inspect scored it."""
        [played] = log.samples or [None]
        error = (played.error if played is not None else None) or log.error
        if error is not None or played is None:
            raise EnvironmentFailed(f"inspect: {error.message if error is not None else log.status}")
        if not played.scores:
            limit = f"; it ended at the limit of {played.limit.type}: {played.limit.limit:g}" if played.limit else ""
            raise EnvironmentFailed(f"inspect gave the sample no score{limit}")
        return played


def _no_grader(*_: object) -> NoReturn:
    raise EnvironmentFailed(
        "a scorer asks for a grader, and the task names none: the policy must not grade itself. Give the scorer a "
        'model, such as model_graded_fact(model="openai-api/judge/NAME") with JUDGE_BASE_URL and JUDGE_API_KEY'
    )


def _id(sample: Sample) -> str:
    """The id of a sample, or a hash of its input and target."""
    if sample.id is not None:
        return str(sample.id)
    content = json.dumps([_shown(sample), sample.target, sample.choices], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def _shown(sample: Sample) -> Any:
    if isinstance(sample.input, str):
        return sample.input
    return [message.model_dump(mode="json", include={"role", "content"}) for message in sample.input]


def _values(played: EvalSample) -> dict[str, Any]:
    """The scores by name; those of a score with several values are `NAME/KEY`."""
    values: dict[str, Any] = {}
    for name, score in (played.scores or {}).items():
        if isinstance(score.value, Mapping):
            values |= {f"{name}/{key}": value for key, value in score.value.items()}
        elif isinstance(score.value, list | tuple):
            values |= {f"{name}/{place}": value for place, value in enumerate(score.value)}
        else:
            values[name] = score.value
    return values


def _number(name: str, value: Any) -> float:
    """The value as inspect converts it. Raises `EnvironmentFailed` for what is not a number: inspect takes it for 0."""
    from inspect_ai.scorer import value_to_float

    try:
        number = value_to_float()(value) if str(value).lower() in WORDS else float(value)
    except (TypeError, ValueError):
        raise EnvironmentFailed(f"the score {name} is {shown(value)}: give a number, or C, I, P or N") from None
    if not isfinite(number):
        raise EnvironmentFailed(f"the score {name} is {number}: inspect did not score the sample")
    return number
