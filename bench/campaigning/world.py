"""`SubjectRunner`: runs commits of a subject in NumPy. The subject's own files are executed.

`agent.py` plays each episode against a policy (`policy.py`), with its prompt, its arguments and its reward; `judge.py`
scores; tasks and settings are those of the files. Training is GRPO with the job's rate, group, temperature, length
limit, KL term and filter. A run depends on its files, its settings and its seed alone, and arms share their random
numbers. Launches are kept as files, so that a launch outlives its process; a second launch of a key is an error.
"""

from __future__ import annotations

import builtins
import json
import math
import tomllib
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.models import Outcome, Transcript, Trial
from agentjet.research.records import canonical
from agentjet.types import Reward, Task
from bench.campaigning.policy import Floats, Policy, Sample
from bench.researching.failing import Adam

DEFAULTS: dict[str, Any] = {
    "job.optimizer.lr": 1e-3,
    "job.batch_size": 8,
    "job.group_size": 8,
    "job.temperature": 1.0,
    "job.max_tokens": 40,
    "job.recipe.name": "grpo",
    "job.recipe.kl_coef": 0.0,
    "job.recipe.drop_zero_variance": False,
}
RATE = 120.0
"""Step of this policy per unit of the job's learning rate."""
RESAMPLED = 4
"""Most batches of groups that a filtered step may sample."""
KEPT = 5
"""First and last steps whose episodes are judged."""
EPISODES_FAIL = 0.5
"""Share of failed episodes above which the run counts as failed."""


@dataclass(frozen=True)
class Start:
    """The start of the policy: the model `world:SEED` of a subject."""

    seed: int = 0
    forms: tuple[float, float, float, float] = (-1.5, 0.5, 1.5, -2.0)
    """Logits of bare, sentence, reasoned and list."""
    skill: float = 0.6


class AgentError(Exception):
    """The subject's own code failed."""


class Code:
    """A subject's Python files, executed. Imports among them are resolved; every run has its own modules."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files, self._modules = files, {}  # type: ignore[var-annotated]

    def function(self, named: str) -> Callable[..., Any]:
        file, _, name = named.partition(":")
        module = self._module(file)
        if name not in module:
            raise AgentError(f"{named}: there is no function {name!r} in {file}")
        found: Callable[..., Any] = module[name]
        return found

    def _module(self, file: str) -> dict[str, Any]:
        if file not in self._modules:
            if file not in self._files:
                raise AgentError(f"{file}: no such file")
            space: dict[str, Any] = {"__name__": file.removesuffix(".py"), "__file__": file}
            space["__builtins__"] = {**vars(builtins), "__import__": self._import}
            self._modules[file] = space
            try:
                exec(compile(self._files[file], file, "exec"), space)
            except Exception as error:
                raise AgentError(place_of(error)) from error
        found: dict[str, Any] = self._modules[file]
        return found

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
        self._policy, self._settings, self._draws = policy, settings, draws
        self.mode, self.model = mode, "policy"
        self.samples: list[Sample] = []
        self.messages: list[dict[str, Any]] = []
        self.set: dict[str, Any] = {}

    def chat(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> str:
        self.set |= parameters
        temperature = float(parameters.get("temperature", self._settings["job.temperature"]))
        max_tokens = int(parameters.get("max_tokens", self._settings["job.max_tokens"]))
        turn = 2 * len(self.samples) % len(self._draws)
        text = "\n".join(str(message["content"]) for message in messages)
        answer, sample = self._policy.sample(text, max(temperature, 0.02), max_tokens, self._draws[turn : turn + 2])
        self.samples.append(sample)
        self.messages = [*map(dict, messages), {"role": "assistant", "content": answer}]
        return answer


@dataclass
class Played:
    task: Task
    samples: list[Sample]
    messages: list[dict[str, Any]]
    reward: float
    set: dict[str, Any]


@dataclass
class World:
    """One subject's files and the judge, ready to run."""

    files: Mapping[str, str]
    """Files of the commit."""
    judge: Callable[[Task, Sequence[Mapping[str, Any]]], float]
    held_out: Sequence[Task]
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a trial, on top of the commit's."""

    def __post_init__(self) -> None:
        subject = tomllib.loads(self.files["subject.toml"])
        self.steps, self.evaluations = int(subject.get("steps", 40)), int(subject.get("evaluations", 4))
        self.repeats = int(subject.get("repeats", 1))
        self.hidden = frozenset(subject.get("hidden", ()))
        self.settings = {**DEFAULTS, **flat(subject.get("settings", {})), **self.extra}
        self.start = Start(int(subject["model"].rpartition(":")[2]))
        code = Code(self.files)
        self.agent = code.function(subject["agent"])
        self.reward = code.function(subject["reward"]) if "reward" in subject else None
        self.tasks = read_tasks(self.files, code, subject["tasks"])

    def play(self, task: Task, policy: Policy, draws: Sequence[float]) -> Played:
        """A training episode. Raises the agent's own error."""
        episode = WorldEpisode(policy, self.settings, draws, "train")
        returned = self.agent(task, episode)
        paid = self.reward(task, episode.messages) if self.reward else returned
        value = float(paid.value if isinstance(paid, Reward) else paid)
        return Played(task, episode.samples, episode.messages, value, episode.set)

    def shown(self, task: Task) -> dict[str, Any]:
        """The payload without the keys that only the judge sees."""
        return {key: value for key, value in task.payload.items() if key not in self.hidden}

    def play_held_out(self, task: Task, policy: Policy, draws: Sequence[float]) -> list[dict[str, Any]]:
        """The agent gets the task without the hidden keys; its own reward does not count. Returns the messages."""
        episode = WorldEpisode(policy, self.settings, draws, "eval")
        try:
            self.agent(replace(task, payload=self.shown(task)), episode)
        except Exception as error:
            if not episode.samples:
                raise AgentError(place_of(error)) from error
        return episode.messages


def read_tasks(files: Mapping[str, str], code: Code, named: str) -> list[Task]:
    if named.endswith(".jsonl"):
        rows = [json.loads(line) for line in files[named].splitlines() if line.strip()]
        return [Task(str(row.get("id", number)), payload=row) for number, row in enumerate(rows)]
    found: list[Task] = code.function(named)()
    return found


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


@dataclass
class Run:
    """A training run: its curve, its signals, and its last episodes."""

    world: World
    seed: int
    share: float
    curve: list[float] = field(default_factory=list)
    signals: dict[str, list[float | None]] = field(default_factory=dict)
    early: list[Played] = field(default_factory=list)
    late: list[Played] = field(default_factory=list)
    by_task: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    swapped: float = 0.0
    failed: int = 0
    error: str = ""

    def __post_init__(self) -> None:
        world = self.world
        self.policy = Policy(world.start.seed, world.start.forms, world.start.skill)
        self.adam, self.adam_forms = Adam(), Adam()
        self.last = max(1, round(world.steps * self.share))
        spaced = {round(world.steps * number / world.evaluations) for number in range(world.evaluations + 1)}
        marks = {mark for mark in spaced if mark < self.last} | {self.last}
        for step in range(self.last):
            if step in marks:
                self.curve.append(self.evaluated(step))
            self.step(step)
        self.curve.append(self.evaluated(self.last))

    def evaluated(self, step: int) -> float:
        """The judge's mean over the held-out tasks."""
        world = self.world
        draws = np.random.default_rng([self.seed, 2, step]).random((world.repeats * len(world.held_out), 4)).tolist()
        pairs = [(task, number) for number in range(world.repeats) for task in world.held_out]
        talks = [world.play_held_out(task, self.policy, draw) for (task, _), draw in zip(pairs, draws, strict=True)]
        judged = [world.judge(task, talk) for (task, _), talk in zip(pairs, talks, strict=True)]
        if step == self.last:
            everything = " ".join(sorted({str(talk[-1]["content"]) for talk in talks}))
            wrong = [
                talks[1:] + talks[:1],
                [[*talk[:-1], {"role": "assistant", "content": everything}] for talk in talks],
            ]
            paid = [[world.judge(task, talk) for (task, _), talk in zip(pairs, each, strict=True)] for each in wrong]
            self.swapped = max(map(float, np.mean(paid, axis=1)))
        return float(np.mean(judged))

    def step(self, step: int) -> None:
        world, settings = self.world, self.world.settings
        groups, size = int(settings["job.batch_size"]), int(settings["job.group_size"])
        rng = np.random.default_rng([self.seed, 1, step])
        filtered = bool(settings["job.recipe.drop_zero_variance"])
        chosen: list[list[Played]] = []
        seen: list[list[Played]] = []
        for _ in range(RESAMPLED if filtered else 1):
            picks = rng.integers(len(world.tasks), size=groups)
            draws = rng.random((groups, size, 4)).tolist()
            batch = [self.group(world.tasks[pick], draws[i]) for i, pick in enumerate(picks)]
            seen += batch
            chosen += [group for group in batch if not filtered or spread([played.reward for played in group])]
            if len(chosen) >= groups:
                break
        chosen = chosen[:groups]
        self.learn(step, chosen, seen)

    def group(self, task: Task, draws: list[list[float]]) -> list[Played]:
        group = []
        for draw in draws:
            try:
                group.append(self.world.play(task, self.policy, draw))
            except Exception as error:  # the subject's code
                self.failed += 1
                self.error = self.error or place_of(error)
        rewards = [played.reward for played in group]
        if rewards:
            least, most, number = self.by_task.get(task.id, (math.inf, -math.inf, 0))
            self.by_task[task.id] = min(least, *rewards), max(most, *rewards), number + len(rewards)
        return group

    def learn(self, step: int, chosen: list[list[Played]], seen: list[list[Played]]) -> None:
        settings = self.world.settings
        samples: list[Sample] = []
        pushes: list[float] = []
        normalised = settings["job.recipe.name"] != "dr_grpo"
        for group in chosen:
            rewards = np.array([played.reward for played in group])
            if not len(rewards):
                continue
            advantages = rewards - rewards.mean()
            if normalised:
                advantages = advantages / (rewards.std() + 1e-6) if spread(rewards) else 0.0 * advantages
            for played, advantage in zip(group, advantages, strict=True):
                for sample in played.samples:
                    samples.append(sample)
                    pushes.append(float(advantage))
        norm = entropy = kl = 0.0
        if samples:
            weights, forms, entropy, kl = self.policy.gradient(
                samples, np.array(pushes) / len(samples), float(settings["job.recipe.kl_coef"])
            )
            norm = float(np.sqrt((weights**2).sum() + (forms**2).sum()))
            if norm > 1e-9:
                rate = RATE * float(settings["job.optimizer.lr"])
                self.policy.weights += rate * self.adam(weights)
                self.policy.forms += rate * self.adam_forms(forms)
                self.policy.moved()
        for kept, holds in ((self.early, step < KEPT), (self.late, step >= self.last - KEPT)):
            if holds:
                kept += [played for group in seen for played in group]
        self.report(seen, norm, entropy, kl)

    def report(self, seen: list[list[Played]], norm: float, entropy: float, kl: float) -> None:
        every = [played for group in seen for played in group]
        rewards = [played.reward for played in every] or [0.0]
        samples = [sample for played in every for sample in played.samples]
        settings = self.world.settings
        reported: dict[str, float] = {
            "reward/mean": float(np.mean(rewards)),
            "reward/std": float(np.std(rewards)),
            "groups/zero_variance": float(np.mean([not spread([p.reward for p in group]) for group in seen])),
            "completion/tokens": float(np.mean([sample.tokens for sample in samples] or [0.0])),
            "completion/truncated": float(np.mean([sample.truncated for sample in samples] or [0.0])),
            "policy/entropy": entropy,
            "policy/kl": kl,
            "optim/grad_norm": norm,
            "optim/lr": float(settings["job.optimizer.lr"]),
            "batch/episodes": float(len(every)),
        }
        for name in ("temperature", "max_tokens"):
            job = settings[f"job.{name}"]
            reported[f"overridden/{name}"] = float(np.mean([p.set.get(name, job) != job for p in every] or [0.0]))
        for name, value in reported.items():
            self.signals.setdefault(name, []).append(value)

    def outcome(self, trial: Trial) -> Outcome:
        """Facts and transcripts are those of a judged subject."""
        tried = sum(number for _, _, number in self.by_task.values()) + self.failed
        if self.failed > EPISODES_FAIL * max(tried, 1):
            return Outcome(trial.id, "arm_failed", note=self.error)
        world = self.world
        judged = [world.judge(played.task, played.messages) for played in self.late]
        paid = [played.reward for played in self.late]
        first = [(world.judge(played.task, played.messages), played.reward) for played in self.early]
        both = [*first, *zip(judged, paid, strict=True)]
        ranked = sorted(range(len(paid)), key=lambda i: paid[i])
        places = (("worst", ranked[0]), ("median", ranked[len(ranked) // 2]), ("best", ranked[-1]))
        held = {canonical(task.payload) for task in world.held_out}
        return Outcome(
            trial.id,
            "completed",
            score=self.curve[-1],
            curve=tuple(self.curve),
            signals={name: tuple(values) for name, values in self.signals.items()},
            settings=world.settings,
            facts={
                "training_reward": float(np.mean(paid)),
                "judged_reward": float(np.mean(judged)),
                "rejected": float(np.mean([j > p for j, p in both])),
                "overpaid": float(np.mean([j < p for j, p in both])),
                "swapped": self.swapped,
                "tasks_shared": float(sum(canonical(task.payload) in held for task in world.tasks)),
            },
            transcripts=tuple(
                Transcript(place, world.shown(self.late[i].task), tuple(self.late[i].messages), paid[i], judged[i])  # type: ignore[arg-type]
                for place, i in places
            ),
            by_task=self.by_task,
        )


def spread(rewards: Sequence[float] | Floats) -> bool:
    return len(rewards) > 0 and max(rewards) - min(rewards) > 1e-9


class SubjectRunner:
    """A `TrialRunner` in memory, or with a folder that outlives the process. The arm of a trial is a commit."""

    def __init__(self, repo: SubjectRepo, judge_files: Mapping[str, str], folder: Path | None = None) -> None:
        self._repo, self._folder = repo, folder
        named = tomllib.loads(judge_files["subject.toml"])
        code = Code(judge_files)
        self.judge = code.function(named["evaluator"])
        self.held_out = read_tasks(judge_files, code, named["held_out"])
        self.launched: dict[str, Trial] = {}
        self._ended: dict[str, Outcome] = {}
        if folder:
            for path in folder.glob("*.trial"):
                self.launched[path.stem] = Trial.from_json(json.loads(path.read_text(encoding="utf-8")))

    def has(self, key: str) -> bool:
        return name_of(key) in self.launched

    def launch(self, key: str, trial: Trial) -> None:
        name = name_of(key)
        assert name not in self.launched, f"{key} is launched twice"
        if self._folder:
            with (self._folder / f"{name}.trial").open("x", encoding="utf-8") as file:
                file.write(canonical(trial.to_json()))
        self.launched[name] = trial

    def collect(self, key: str) -> Outcome:
        return self.run(self.launched[name_of(key)])

    def run(self, trial: Trial) -> Outcome:
        known = canonical([trial.arm, trial.seed, trial.fidelity, dict(trial.setting)])
        if known not in self._ended:
            try:
                world = World(self._repo.files(trial.arm), self.judge, self.held_out, trial.setting)
                self._ended[known] = Run(world, trial.seed, trial.fidelity).outcome(trial)
            except AgentError as error:
                self._ended[known] = Outcome(trial.id, "arm_failed", note=str(error))
        return replace(self._ended[known], trial=trial.id)


def name_of(key: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in key)
