"""`SubjectRunner` runs commits of a subject in NumPy. The subject's own files are executed, and judged by the product.

The agent plays each episode against a policy (`policy.py`), with its prompt, its arguments and its reward. Training is
GRPO with the job's rate, group, temperature, length limit, overrides, KL term and filter. What a campaign is told about
the episodes comes from `JudgedEpisodes`, as in a real trial; `Recorder` is the server and the arm that it asks. A run
depends on its files, its settings and its seed alone, and arms share their random numbers.
"""

from __future__ import annotations

import asyncio
import builtins
import math
import traceback
import types
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from agentjet.client.inputs import load_tasks
from agentjet.client.swarm_client import AsyncSwarm
from agentjet.errors import AgentJetError
from agentjet.research.arm_process import ArmAnswer, ArmClient, ArmFailed
from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.models import Message, Outcome, Subject, Trial, canonical
from agentjet.research.trial_process import HeldOutScore, JudgedEpisodes, NotScorable
from agentjet.types import Reward, Task
from bench.campaigns.policy import Policy, Sample
from tests.research.planted_failures import Adam
from tests.research.world import Launches

DEFAULTS: dict[str, Any] = {
    "job.optimizer.lr": 1e-3,
    "job.batch_size": 8,
    "job.group_size": 8,
    "job.temperature": 1.0,
    "job.max_tokens": 40,
    "job.recipe.kl_coef": 0.0,
    "job.recipe.drop_zero_variance": False,
    "job.sampling.override": (),
}
RATE = 120.0
"""Step of this policy per unit of the job's learning rate."""
RESAMPLED = 4
"""Most batches of groups that a filtered step may sample."""
EPISODES_FAIL = 0.5
"""Share of failed episodes above which the run counts as failed."""
NAMES = ("temperature", "max_tokens")
FORMS = (-1.5, 0.5, 1.5, -2.0)
"""First logits of bare, sentence, reasoned and list."""
SKILL = 0.6
FIRST_SEED = 1 << 40
FALL = 0.03


class Code:
    """A subject's Python files, executed. Imports among them are resolved; every run has its own modules."""

    def __init__(self, folder: Path) -> None:
        self._files = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
        self._modules: dict[str, dict[str, Any]] = {}

    def function(self, named: str) -> Callable[..., Any]:
        """Raises `ArmFailed` for code that cannot be loaded."""
        file, _, name = named.rpartition("/")[2].partition(":")
        try:
            found: Callable[..., Any] = self._module(file)[name]
        except Exception as error:  # the boundary: the subject's code
            raise ArmFailed(place_of(error)) from error
        return found

    def _module(self, file: str) -> dict[str, Any]:
        if file not in self._modules:
            space: dict[str, Any] = {"__name__": file.removesuffix(".py"), "__file__": file}
            space["__builtins__"] = {**vars(builtins), "__import__": self._import}
            self._modules[file] = space
            exec(compile(self._files[file], file, "exec"), space)
        return self._modules[file]

    def _import(self, name: str, *rest: Any) -> Any:
        if f"{name}.py" in self._files:
            module = types.ModuleType(name)
            vars(module).update(self._module(f"{name}.py"))
            return module
        return builtins.__import__(name, *rest)


def place_of(error: BaseException) -> str:
    """`file:line: Error: text`, of the innermost line of the subject's files."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/" not in frame.filename]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    return f"{where}{type(error).__name__}: {error}"


class WorldEpisode:
    """The episode that an agent gets: `chat(messages, **parameters) -> text`."""

    def __init__(self, policy: Policy, settings: Mapping[str, Any], draws: Sequence[float], mode: str) -> None:
        self._policy, self._draws = policy, draws
        self._temperature, self._max_tokens = settings["job.temperature"], settings["job.max_tokens"]
        self._overrides = settings["job.sampling.override"] if mode == "train" else ()
        self.mode, self.model = mode, "policy"
        self.samples: list[Sample] = []
        self.messages: list[dict[str, Any]] = []
        self.set: dict[str, Any] = {}

    def chat(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> str:
        self.set |= parameters
        used = {name: value for name, value in parameters.items() if name not in self._overrides}
        temperature, max_tokens = used.get("temperature", self._temperature), used.get("max_tokens", self._max_tokens)
        turn = 2 * len(self.samples) % len(self._draws)
        text = "\n".join(str(message["content"]) for message in messages)
        place = self._draws[turn : turn + 2]
        answer, sample = self._policy.sample(text, max(float(temperature), 0.02), int(max_tokens), place)
        self.samples.append(sample)
        self.messages = [*map(dict, messages), {"role": "assistant", "content": answer}]
        return answer


@dataclass
class Played:
    task: Task
    mode: str
    version: int
    messages: list[dict[str, Any]]
    reward: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    set: dict[str, Any] = field(default_factory=dict)


class Judging(JudgedEpisodes):
    """With conversations from memory."""

    recorder: Recorder

    async def _conversation(self, episode_id: str) -> list[Message]:
        return self.recorder.episodes[int(episode_id)].messages


@dataclass
class Recorder:
    """The server and the arm that `JudgedEpisodes` asks."""

    run: Run
    tasks: list[Task]
    episodes: list[Played] = field(default_factory=list)

    async def play(self, tasks: Sequence[Task], repeats: int, version: int, seed: int) -> ArmAnswer:
        """The agent's own reward does not count."""
        draws = np.random.default_rng([self.run.seed, 2, version]).random((repeats * len(tasks), 4)).tolist()
        pairs = [(task, number) for number in range(repeats) for task in tasks]
        for (task, _), draw in zip(pairs, draws, strict=True):
            episode = WorldEpisode(self.run.policy, self.run.settings, draw, "eval")
            try:
                self.run.agent(task, episode)
            except Exception as error:  # the boundary: the subject's code
                if not episode.samples:
                    raise ArmFailed(place_of(error)) from error
            self.episodes.append(Played(task, "eval", version, episode.messages))
        return ArmAnswer(plays=len(pairs))

    async def all_episodes(
        self, *, mode: str, min_version: int = 0, max_version: int = 1 << 30, **rest: object
    ) -> AsyncIterator[SimpleNamespace]:
        """The oldest first if they are those of an evaluation, else the newest."""
        numbers = range(len(self.episodes)) if mode == "eval" else reversed(range(len(self.episodes)))
        for number in numbers:
            played = self.episodes[number]
            if played.mode == mode and min_version <= played.version <= max_version:
                task = played.task
                yield SimpleNamespace(
                    episode_id=str(number), task_id=task.id, task_set=task.task_set, reward=played.reward
                )


class Run:
    """A training run: its curve, its signals, and its episodes."""

    def __init__(self, subject: Subject, extra: Mapping[str, Any], seed: int) -> None:
        self.subject, self.seed = subject, seed
        self.settings = {**DEFAULTS, **subject.settings, **extra}
        code = Code(Path(subject.readable[0]))
        self.agent = code.function(subject.agent)
        self.reward = code.function(subject.reward) if subject.reward else None
        self.policy = Policy(int(subject.model.rpartition("-")[2]), FORMS, SKILL)
        self.recorder = Recorder(self, load_tasks(subject.tasks, option="tasks"))
        self.held_out = subject.held_out_tasks()
        self.judging = Judging(subject, self.held_out, cast(AsyncSwarm, self.recorder), cast(ArmClient, self.recorder))
        self.judging.recorder = self.recorder
        self.adam, self.adam_forms = Adam(), Adam()
        self.scores: list[HeldOutScore] = []
        self.signals: dict[str, list[float | None]] = {}
        self.step, self.failed, self.error = 0, 0, ""

    async def go_on(self, share: float) -> None:
        """Trains up to a share of a full run, with evaluations on the way."""
        last = self.subject.steps_at(share)
        for mark in self.subject.evaluation_steps(share):
            while self.step < min(mark, last):
                self.train(self.step)
                self.step += 1
            self.scores.append(await self.judging.score(mark, self.seed))

    def train(self, step: int) -> None:
        settings = self.settings
        groups, size = int(settings["job.batch_size"]), int(settings["job.group_size"])
        rng = np.random.default_rng([self.seed, 1, step])
        filtered = bool(settings["job.recipe.drop_zero_variance"])
        chosen: list[list[Played]] = []
        seen: list[list[Played]] = []
        for _ in range(RESAMPLED if filtered else 1):
            picks = rng.integers(len(self.recorder.tasks), size=groups)
            draws = rng.random((groups, size, 4)).tolist()
            batch = [self.group(self.recorder.tasks[pick], draws[i], step) for i, pick in enumerate(picks)]
            seen += batch
            chosen += [group for group in batch if not filtered or varies(group)]
            if len(chosen) >= groups:
                break
        self.recorder.episodes += [played for group in seen for played in group]
        self.learn([group for group in chosen[:groups] if group], seen)

    def group(self, task: Task, draws: list[list[float]], step: int) -> list[Played]:
        group = []
        for draw in draws:
            episode = WorldEpisode(self.policy, self.settings, draw, "train")
            try:
                returned = self.agent(task, episode)
                paid = self.reward(task, episode.messages) if self.reward else returned
                value = float(paid.value if isinstance(paid, Reward) else paid)
            except Exception as error:  # the boundary: the subject's code
                self.failed += 1
                self.error = self.error or place_of(error)
                continue
            group.append(Played(task, "train", step, episode.messages, value, episode.samples, episode.set))
        return group

    def learn(self, chosen: list[list[Played]], seen: list[list[Played]]) -> None:
        samples: list[Sample] = []
        pushes: list[float] = []
        for group in chosen:
            rewards = np.array([played.reward for played in group])
            advantages = (rewards - rewards.mean()) * varies(group)
            advantages /= rewards.std() + 1e-6
            for played, advantage in zip(group, advantages, strict=True):
                samples += played.samples
                pushes += [float(advantage)] * len(played.samples)
        entropy = kl = 0.0
        if samples:
            weights, forms, entropy, kl = self.policy.gradient(
                samples, np.array(pushes) / len(samples), float(self.settings["job.recipe.kl_coef"])
            )
            if float((weights**2).sum() + (forms**2).sum()) > 1e-18:
                rate = RATE * float(self.settings["job.optimizer.lr"])
                self.policy.weights += rate * self.adam(weights)
                self.policy.forms += rate * self.adam_forms(forms)
                self.policy.moved()
        every = [played for group in seen for played in group]
        rewards = np.array([played.reward for played in every] or [0.0])
        calls = [sample for played in every for sample in played.samples]
        reported: dict[str, float] = {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "groups/zero_variance": float(np.mean([not varies(group) for group in seen])),
            "completion/tokens": float(np.mean([sample.tokens for sample in calls] or [0.0])),
            "completion/truncated": float(np.mean([sample.truncated for sample in calls] or [0.0])),
            "policy/entropy": entropy,
            "policy/kl": kl,
            "batch/episodes": float(len(every)),
        }
        for name in NAMES:
            job = self.settings[f"job.{name}"]
            reported[f"overridden/{name}"] = float(np.mean([p.set.get(name, job) != job for p in every] or [0.0]))
        for name, value in reported.items():
            self.signals.setdefault(name, []).append(value)

    async def outcome(self, trial: Trial) -> Outcome:
        episodes = sum(played.mode == "train" for played in self.recorder.episodes)
        if self.failed > EPISODES_FAIL * max(episodes + self.failed, 1):
            raise ArmFailed(self.error)
        signals = {name: tuple(values) for name, values in self.signals.items()}
        plain = {name: value for name, value in self.settings.items() if name.startswith("job.")}
        facts = {
            "tasks_held_out": float(len(self.held_out)),
            "tasks_shared": 0.0,
            "held_out_before": self.scores[0].mean,
            "held_out_after": self.scores[-1].mean,
            "held_out_error": math.hypot(self.scores[0].error, self.scores[-1].error),
        }
        curve = tuple(score.mean for score in self.scores)
        ended = Outcome(trial.id, "completed", curve[-1], curve, signals, plain, facts)
        return await self.judging.with_training(ended)


def varies(group: Sequence[Played]) -> bool:
    rewards = [played.reward for played in group]
    return bool(rewards) and max(rewards) - min(rewards) > 1e-9


class Inline(ThreadPoolExecutor):
    """Runs what it is given at once: handing a judge's call to a thread takes longer than the call."""

    def submit(self, act: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(act(*args, **named))
        except Exception as error:  # the boundary: the subject's judge
            done.set_exception(error)
        return done


@dataclass
class SubjectRunner(Launches):
    """A `TrialRunner`. The arm of a trial is a commit."""

    repo: SubjectRepo
    truth_seeds: int = 4
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def collect(self, key: str) -> Outcome:
        return self.run(self.trial(key))

    def run(self, trial: Trial) -> Outcome:
        known = canonical([trial.arm, trial.seed, trial.fidelity, dict(trial.setting)])
        if known not in self.outcomes:
            self.outcomes[known] = asyncio.run(self.trained(trial))
        return replace(self.outcomes[known], trial=trial.id)

    async def trained(self, trial: Trial) -> Outcome:
        asyncio.get_running_loop().set_default_executor(Inline())
        try:
            run = Run(self.repo.subject_of(trial), trial.setting, trial.seed)
            await run.go_on(trial.fidelity)
            return await run.outcome(trial)
        except (ArmFailed, NotScorable, AgentJetError) as error:
            return Outcome(trial.id, "arm_failed", note=str(error))

    def truths(self, commit: str) -> list[Outcome]:
        """Outcomes of a commit with seeds that no campaign draws."""
        return [
            self.run(Trial("truth", commit, {}, FIRST_SEED + number, "confirm")) for number in range(self.truth_seeds)
        ]

    def truth(self, commit: str) -> float:
        """True score of a commit. 0 if it cannot run."""
        return fmean(run.score or 0.0 for run in self.truths(commit))

    def falls(self, commit: str) -> bool:
        """True if the true score falls from its best during a run."""
        curve = np.mean([run.curve for run in self.truths(commit)], axis=0)
        return bool(curve.max() - curve[-1] > FALL)
