"""One trial in a separate process: `python -m agentjet.research.trial_process`, with a `TrialOrder` on standard input.

The process has the arm's agent trained on a swarm server up to the trial's last step, scores the held-out tasks on the
way and at the end, and writes the outcome to a file. It is the judge's process: the arm's code runs in another one
(`arm_process`). It ends when its standard input closes.

The held-out tasks are played by the evaluator, an agent. If the subject is `judged`, the arm's agent plays them as it
would be deployed, and the evaluator scores the conversations that the server recorded (`JudgedEpisodes`).

Each measurement is on disk at once (`RunRecord`), so that a resumed run measures nothing twice.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import platform
import re
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from agentjet.client.agent_source import file_and_function, load_function, one_line
from agentjet.client.swarm_client import AsyncSwarm
from agentjet.client.threads import exit_with_parent
from agentjet.config.loader import leaves
from agentjet.errors import AgentJetError, ConfigError
from agentjet.research import arm_process
from agentjet.research.arm_process import ArmClient, ArmFailed, ArmOrder, conversation, place_of
from agentjet.research.diagnosis import FAILED, PLAYS, Signals, last, lost_episode_facts
from agentjet.research.journal import write_whole
from agentjet.research.models import (
    UNSEEN,
    Address,
    End,
    Judge,
    Message,
    Outcome,
    Record,
    Subject,
    Transcript,
    Trial,
    Value,
    canonical,
    hash_of,
    shortened,
)
from agentjet.types import Task

# ---- judged episodes -------------------------------------------------------------------------------------------------

MAX_JUDGED = 32
"""Newest training episodes that the judge scores, for comparison with the training reward."""
MAX_EXTREME = 16
"""Best and worst paid training episodes of the whole run that it scores beside these, of tasks that were paid unequally
if there are any.
"""
MAX_COUNTED = 4000
"""Maximum training episodes that are counted by task."""
MAX_TRIED = 16
"""Maximum tasks on which it is tried whether the value of a key is the answer."""
MAX_PARTS = 8
"""Maximum parts of a list that are tried as answers, and maximum tasks under which a conversation is tried."""
FEWEST_SWAPPED = 4
"""Fewest swapped conversations that tell of the judge."""
AS_GOOD = 0.9
"""Share of the pay of the hidden values from which a conversation counts as well paid."""
TOLD_APART = 0.2
"""Least difference of two scores that is more than the noise of a judge."""
APART = 0.5
"""Least difference of two scores of which one accepts an answer and the other does not."""
SHOWN = 0.75
"""Share of the words of an input from which a prompt shows it."""
TELLS = 0.75
"""Mean pay from which the value of a key counts as the answer."""
OVER = 1e-6
"""Share of the scale that rounding may go beyond it."""
NAMES = ("id", "task_set")
"""Keys of a task that name it."""


class NotScorable(AgentJetError):
    """The run cannot be scored."""


class OffScale(ConfigError):
    """A score is outside of the declared scale."""


class TaskJudge:
    """The evaluator of a judged subject. Its scores here are shares of its scale: 0 is `worst`, 1 is `best`."""

    def __init__(self, subject: Subject) -> None:
        """Raises `ConfigError` for an evaluator that cannot be loaded."""
        self._subject = subject
        self._judge: Judge = load_function(subject.evaluator, option="subject.evaluator")

    def score(self, task: Task, messages: Sequence[Message]) -> float:
        """Raises `ConfigError` for a judge that fails, and `OffScale`."""
        subject, named = self._subject, f"subject.evaluator = {self._subject.evaluator!r}"
        try:
            score = float(self._judge(task, messages))
        except Exception as error:  # the boundary: the user's judge may raise anything
            text = f"{named} failed at task {task.id!r}: {one_line(error)}{place_of(error)}"
            raise ConfigError(f"{text}. The judge is fixed: correct it and start with another --out") from error
        if not math.isfinite(score):
            raise ConfigError(f"{named}: score = {score} of task {task.id!r}")
        share = (score - subject.worst) / (subject.best - subject.worst)
        if not -OVER <= share <= 1 + OVER:
            raise OffScale(
                f"{named}: score = {score:g} of task {task.id!r} is outside of worst = {subject.worst:g} to best = "
                f"{subject.best:g}: declare the judge's scale in subject.toml (best, worst), and start with another "
                "--out"
            )
        return share

    def pay(self, task: Task, value: Any) -> float:
        """Mean score of a value, or of its parts, as the answer. A failing judge pays 0. Raises `OffScale`."""
        parts = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
        if parts is not None:
            return statistics.fmean(self.pay(task, part) for part in parts[:MAX_PARTS]) if parts else 0.0
        try:
            return self.score(task, [{"role": "user", "content": ""}, {"role": "assistant", "content": str(value)}])
        except OffScale:
            raise
        except ConfigError:
            return 0.0

    def telling_keys(self, tasks: Sequence[Task], known: Iterable[str] = ()) -> list[str]:
        """Keys that hold the answer, besides those `known` and those declared: the judge pays their values for their
        own tasks, and not those of other tasks. Keys in `shown` are inputs, also where the input is the answer.
        """
        rows = [task for task in tasks if isinstance(task.payload, dict)]
        keys = {key for task in rows for key in task.payload}
        found = []
        for key in sorted(keys - {*NAMES, *known, *self._subject.hidden, *self._subject.shown}):
            holders = [task for task in rows if key in task.payload][:MAX_TRIED]
            others: dict[int, Any] = {}
            for number, task in enumerate(holders):
                for other in holders[number + 1 :] + holders[:number]:
                    if other.payload[key] != task.payload[key]:
                        others.setdefault(number, other.payload[key])
            own = statistics.fmean(self.pay(task, task.payload[key]) for task in holders)
            if others and own > TELLS:
                paid = statistics.fmean(self.pay(holders[number], value) for number, value in others.items())
                found += [key] if paid < own / 2 else []
        return found


class JudgedEpisodes:
    """The evaluator of a judged subject scores the conversations that the server recorded.

    The arm's agent plays the held-out tasks as it would be deployed, and what it returns does not count. At the end the
    judge also scores the newest training episodes, for comparison with the reward that was paid.

    Facts of such an outcome, beside those of `agentjet.research.diagnosis`:

    * `swapped`: pay of well paid held-out conversations under tasks with other answers, relative to that under theirs.
    * `training_reward`, `judged_reward`: means of the training episodes that were compared, the newest and extremes.
    * `rejected`, `overpaid`: shares of these episodes that training paid against the judge's order (`paid_facts`).
    * `unseen.KEY`: share of these episodes in which no prompt had the value of an input (`_unseen`).
    """

    def __init__(self, subject: Subject, held_out: Sequence[Task], swarm: AsyncSwarm, arm: ArmClient) -> None:
        """Raises `ConfigError` for an evaluator that cannot be loaded."""
        self._subject, self._held_out, self._swarm, self._arm = subject, held_out, swarm, arm
        self._judge = TaskJudge(subject)
        self._played: list[tuple[Task, list[Message], float]] = []
        """Held-out tasks of the newest evaluation, with a conversation of each and its score."""

    async def score(self, version: int, seed: int) -> HeldOutScore:
        """Has the agent play the held-out tasks, `repeats` times each. Raises `NotScorable` and `ArmFailed`."""
        subject = self._subject
        ended = await self._arm.play(
            subject.as_deployed(self._held_out, self._arm.tasks), subject.repeats, version, seed
        )
        found: dict[tuple[str, str], list[str]] = {}
        async for episode in self._swarm.all_episodes(
            status="finished", mode="eval", sort="oldest", min_version=version, max_version=version
        ):
            found.setdefault((episode.task_set, episode.task_id), []).append(episode.episode_id)
        rewards, played = [], []
        for task in self._held_out:
            of_task = found.get((task.task_set, task.id), [])[: subject.repeats]
            if len(of_task) < subject.repeats:
                raise NotScorable(f"held-out task {task.id!r} was not played: {ended.reason or 'no episode ended'}")
            heard = [await self._conversation(episode) for episode in of_task]
            if not all(heard):
                raise ArmFailed(f"held-out task {task.id!r}: the agent made no call of the model")
            rewards.append([await asyncio.to_thread(self._judge.score, task, messages) for messages in heard])
            played.append((task, heard[0], rewards[-1][0]))
        self._played = played
        return scoring(rewards, ended.plays)

    def _swapped(self) -> dict[str, float]:
        """Scores well paid conversations under tasks with other hidden values, for which the judge rejects theirs.
        In a sound exact match many tasks may have equal answers, and a graded judge pays answers that are near. If the
        judge takes the values for all tasks alike, any other task serves.
        """
        payloads = [task.payload if isinstance(task.payload, dict) else {} for task in self._held_out]
        hidden = [{key: payload[key] for key in self._subject.hidden if key in payload} for payload in payloads]
        own, swapped = [], []
        for place, (task, messages, score) in enumerate(self._played):
            order = [*range(place + 1, len(hidden)), *range(place)]
            others = [
                self._held_out[number]
                for number in order
                if hidden[place]
                and hidden[place].keys() == hidden[number].keys()
                and all(value != hidden[number][key] for key, value in hidden[place].items())
            ][:MAX_PARTS]
            references = [*hidden[place].values()]
            due = [self._judge.pay(task, value) for value in references]
            if not others or score < max(0.5, AS_GOOD * max(due)):
                continue
            paid = [[self._judge.pay(other, value) for value in references] for other in others]
            apart = next((n for n, pays in enumerate(paid) if max(pays) < APART), None)
            if apart is None and not all(pay >= full for pays in paid for pay, full in zip(pays, due, strict=True)):
                continue
            with suppress(ConfigError):
                swapped.append(self._judge.score(others[apart or 0], messages))
                own.append(score)
        return {"swapped": math.fsum(swapped) / math.fsum(own)} if len(own) >= FEWEST_SWAPPED else {}

    async def with_training(self, outcome: Outcome) -> Outcome:
        """The outcome with rewards by task, transcripts, and facts about the training episodes."""
        by_task: dict[str, tuple[float, float, int]] = {}
        tasks = {(task.task_set, task.id): task for task in self._arm.tasks}
        held_out = {key for task in self._held_out if isinstance(task.payload, dict) for key in task.payload}
        telling = {*await asyncio.to_thread(self._judge.telling_keys, self._arm.tasks, held_out), *self._subject.hidden}
        listed: list[tuple[float, str, Task | None]] = []
        async for episode in self._swarm.all_episodes(status="finished", mode="train"):
            assert episode.reward is not None, "a finished episode has a reward"
            reward = episode.reward
            least, most, number = by_task.get(episode.task_id, (reward, reward, 0))
            by_task[episode.task_id] = min(least, reward), max(most, reward), number + 1
            listed.append((reward, episode.episode_id, tasks.get((episode.task_set, episode.task_id))))
            if len(listed) >= MAX_COUNTED:
                break
        earlier = listed[MAX_JUDGED:][::-1]  # the oldest vary most: of those that are paid the least, they come first
        uneven = [one for one in earlier if one[2] and by_task[one[2].id][0] < by_task[one[2].id][1]]
        ranked = sorted(uneven or earlier, key=lambda one: one[0])
        extreme = ranked if len(ranked) <= 2 * MAX_EXTREME else ranked[:MAX_EXTREME] + ranked[-MAX_EXTREME:]
        newest = await self._compared(listed[:MAX_JUDGED], telling)
        compared = newest + await self._compared(extreme, telling)
        found = [episode for _, episode in newest]
        facts = await asyncio.to_thread(self._swapped)
        facts |= paid_facts([(one.reward, one.judged) for _, one in compared if one.judged is not None])
        facts |= self._unseen(compared)
        return replace(outcome, facts={**outcome.facts, **facts}, transcripts=chosen(found), by_task=by_task)

    async def _compared(
        self, episodes: Iterable[tuple[float, str, Task | None]], telling: Container[str]
    ) -> list[tuple[Task, Transcript]]:
        """Training episodes that made a call, with the judge's scores."""
        found = []
        for reward, episode, task in episodes:
            if task and (messages := await self._conversation(episode)):
                judged = None
                with suppress(ConfigError):  # a judge may need what training tasks lack
                    judged = await asyncio.to_thread(self._judge.score, task, messages)
                shown = without(task.payload, telling)
                found.append((task, Transcript("best", shown, tuple(messages), reward, judged)))
        return found

    async def _conversation(self, episode_id: str) -> list[Message]:
        return conversation(await self._swarm.episode_tree(episode_id))

    def _unseen(self, episodes: Sequence[tuple[Task, Transcript]]) -> dict[str, float]:
        """Declared inputs that prompts lack. The agent may show one in another form. So it counts only if tasks with
        other values of it had equal prompts, or if no file beside the agent's names it.

        Other keys of a task may be answers, tests or metadata, so that no prompt may show them.
        """
        files = Path(file_and_function(self._subject.agent)[0]).parent.glob("*.py")
        code = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
        asked = [
            (task.payload, "\n".join(str(one["content"]) for one in episode.messages if one.get("role") != "assistant"))
            for task, episode in episodes
            if isinstance(task.payload, dict)
        ]
        found = {}
        for key in self._subject.shown:
            values = [(payload[key], prompt) for payload, prompt in asked if key in payload]
            different = {(canonical(value), prompt) for value, prompt in values}
            is_equal = len(different) > len({prompt for _, prompt in different})
            lacking = [not shows(prompt, value) for value, prompt in values]
            if any(lacking) and (is_equal or not re.search(rf"""["']{re.escape(key)}["']""", code)):
                found[f"{UNSEEN}{key}"] = statistics.fmean(lacking)
        return found


def shows(prompt: str, value: Any) -> bool:
    """True if a prompt has most words of a value, or all of them in a row."""
    said, words = words_of(prompt), words_of(value)
    return "".join(words) in "".join(said) or sum(word in said for word in words) >= SHOWN * len(words)


def words_of(value: Any) -> list[str]:
    """The words of a text, of a number, or of all parts of a list or an object."""
    parts = [*value.values()] if isinstance(value, dict) else value
    if isinstance(parts, list | tuple):
        return [word for part in parts for word in words_of(part)]
    return re.findall(r"\w+", str(value).casefold())


def without(payload: Any, keys: Container[str]) -> Any:
    """A training task's payload without these keys."""
    return {key: value for key, value in payload.items() if key not in keys} if isinstance(payload, dict) else payload


def paid_facts(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Facts about rewards of training, and the judge's scores of the same episodes.

    Rewards may have another scale than the judge, more steps or fewer. So only their order counts. An answer is
    rejected if training pays it no more than one that the judge scores clearly lower, and less than one that the judge
    scores no higher. The other way round it is overpaid. Rewards that are all equal teach nothing. If the judge's
    scores differ, such rewards reject all answers above its lowest score, or overpay if they are as high as its best.
    """
    if not pairs:
        return {}
    rewards, judged = (np.array(values) for values in zip(*pairs, strict=True))
    against = (judged[:, None] >= judged + APART - OVER) & (rewards[:, None] <= rewards)
    inverted = (judged[:, None] >= judged - OVER) & (rewards[:, None] < rewards)
    rejected, overpaid = (against.any(axis) & inverted.any(axis) for axis in (1, 0))
    if not np.ptp(rewards):
        pays = rewards[0] >= judged.max()
        rejected = (judged > judged.min() + OVER) & (np.ptp(judged) >= TOLD_APART) & (not pays)
        overpaid = against.any(0) & pays
    return {
        "training_reward": float(rewards.mean()),
        "judged_reward": float(judged.mean()),
        "rejected": float(rejected.mean()),
        "overpaid": float(overpaid.mean()),
    }


def chosen(episodes: Sequence[Transcript]) -> tuple[Transcript, ...]:
    """The episodes with the highest, the median and the lowest reward; none twice."""
    ranked = sorted(episodes, key=lambda one: -one.reward)
    places = {"best": ranked[:1], "median": ranked[len(ranked) // 2 :][:1] if len(ranked) > 2 else []}
    places["worst"] = ranked[1:][-1:]
    return tuple(replace(one, place=place) for place, found in places.items() for one in found)  # type: ignore[arg-type]


# ---- the process -----------------------------------------------------------------------------------------------------

WRONG_STUDY = 3
"""Exit code for an error that would affect every trial. The study stops until it is fixed."""
MAX_LISTED_EPISODES = 1000
"""Maximum listed episodes when looking for those that an earlier process left live."""


@dataclass(frozen=True)
class TrialOrder(Record):
    """The task of a trial process. `run` is the folder of the run, `answer` the file for the outcome."""

    trial: Trial
    subject: Subject
    address: Address
    run: str
    answer: str
    unsafe: bool = False
    """Run the arm without a sandbox where none can be made."""


class HeldOutScore(NamedTuple):
    """Mean over the held-out tasks, its standard error, the lowest reward; and episodes with repeats, and failures."""

    mean: float
    error: float
    least: float
    plays: int
    failed: int


def scoring(rewards_by_task: Sequence[Sequence[float]], plays: int) -> HeldOutScore:
    """The score from the rewards of the episodes that count, among so many."""
    means = [statistics.fmean(rewards) for rewards in rewards_by_task]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    failed = plays - sum(map(len, rewards_by_task))
    return HeldOutScore(statistics.fmean(means), error, min(map(min, rewards_by_task)), plays, failed)


class RunRecord:
    """Held-out scores and metrics by step (the policy version), in the file `path`."""

    def __init__(self, path: Path) -> None:
        """Reads the file, if there is one."""
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"scorings": {}, "metrics": {}}
        self.path = path
        self.scorings = {int(step): HeldOutScore(*scoring) for step, scoring in content["scorings"].items()}
        self.metrics: dict[int, dict[str, float]] = {int(step): each for step, each in content["metrics"].items()}

    def reset(self) -> None:
        """Clears the record if the run restarts at the base model, because its measurements are of other weights."""
        if self.metrics:
            self.scorings, self.metrics = {}, {}
            self._write()

    def add_score(self, step: int, scoring: HeldOutScore) -> None:
        self.scorings[step] = scoring
        self._write()

    def add_metrics(self, metrics: Mapping[int, Mapping[str, float]]) -> None:
        """Stores the metrics of some steps and replaces known ones."""
        self.metrics |= {step: dict(of_step) for step, of_step in metrics.items()}
        self._write()

    def curve(self, end: int) -> tuple[float, ...]:
        """Held-out scores up to the step `end`, in order."""
        return tuple(scoring.mean for step, scoring in sorted(self.scorings.items()) if step <= end)

    def floor(self, declared: float) -> float:
        """Score of a diverged run: its lowest reward, at most `declared`, so that rewards below 0 make none pay."""
        return min([declared, *(scoring.least for scoring in self.scorings.values())])

    def is_broken(self) -> bool:
        """True if the newest step left weights that are not finite, or was skipped because its gradients were not."""
        newest = self.metrics[max(self.metrics)] if self.metrics else {}
        return newest.get("weights/finite") == 0 or newest.get("optim/skipped_steps", 0.0) > 0

    def signals(self, end: int) -> dict[str, tuple[float | None, ...]]:
        """By metric, its value at each step from 1 to `end`; None without a finite number."""
        counts = {step: {PLAYS: score.plays, FAILED: score.failed} for step, score in self.scorings.items()}
        steps = [self.metrics.get(step, {}) | counts.get(step, {}) for step in range(1, end + 1)]
        names = sorted({name for of_step in steps for name in of_step})
        values = {name: [of_step.get(name) for of_step in steps] for name in names}
        return {
            name: tuple(x if x is not None and math.isfinite(x) else None for x in of_name)
            for name, of_name in values.items()
        }

    def _write(self) -> None:
        write_whole(self.path, json.dumps({"scorings": self.scorings, "metrics": self.metrics}))


class TrialProcess:
    def __init__(self, order: TrialOrder, swarm: AsyncSwarm, arm: ArmClient) -> None:
        """Raises `ConfigError` for code of the judge that cannot be loaded."""
        self._trial, self._subject, self._swarm, self._arm = order.trial, order.subject, swarm, arm
        subject = order.subject
        self._held_out = subject.held_out_tasks()
        self._judged = JudgedEpisodes(subject, self._held_out, swarm, arm) if subject.judged else None
        self._evaluator = None if subject.judged else subject.load_evaluator()
        self._floor = (subject.floor - subject.worst) / (subject.best - subject.worst)
        self._record = RunRecord(Path(order.run) / "record.json")
        self._lost: Counter[str] = Counter()
        """Reasons of training episodes that did not come back."""

    async def run(self) -> Outcome:
        """Returns the outcome, continuing the run from its present step. A failure of the policy is a result."""
        evaluation_steps = self._subject.evaluation_steps(self._trial.fidelity)
        try:
            await self._abort_leftovers()
            if not (await self._swarm.status()).policy_version:
                self._record.reset()
            for mark in evaluation_steps:
                await self._train(mark)
                await self._score(mark)
        except ConfigError:
            raise
        except (AgentJetError, TimeoutError) as error:
            why = str(error) or f"no end within subject.patience = {self._subject.patience:g} s"
            with suppress(AgentJetError):  # a diverged policy fails its calls
                await self._catch_up()
            if self._record.is_broken():
                return self._outcome("diverged", self._record.floor(self._floor), shortened(why))
            own = self._judged is not None and isinstance(error, ArmFailed)
            return self._outcome("arm_failed" if own else "infra_failed", None, shortened(why))
        end: End = "diverged" if self._record.is_broken() else "completed"
        return self._outcome(end, self._record.scorings[evaluation_steps[-1]].mean)

    def _outcome(self, end: End, score: float | None, note: str = "") -> Outcome:
        last = self._subject.steps_at(self._trial.fidelity)
        curve, signals = self._record.curve(last), self._record.signals(last)
        if not note and self._lost and lost_episode_facts(Signals(signals)):
            note = shortened(f"the reason of most: {self._lost.most_common(1)[0][0]}")
        return Outcome(self._trial.id, end, score=score, curve=curve, signals=signals, note=note)

    async def _abort_leftovers(self) -> None:
        """Aborts episodes that an earlier process of this run left live."""
        for episode in (await self._swarm.episodes(MAX_LISTED_EPISODES)).episodes:
            if episode.status == "live":
                await self._swarm.abort(
                    episode.episode_id, "not needed: its client ended; the trial goes on in another process"
                )

    async def _train(self, mark: int) -> None:
        """Trains up to a step, unless the run has reached it."""
        version = (await self._swarm.status()).policy_version
        if version < mark:
            async with asyncio.timeout(self._subject.patience):
                await self._arm.train(mark - version, self._seed(version))
        await self._catch_up()

    def _seed(self, version: int) -> int:
        """Seeds the tasks and the answers from a policy version on. Trials of equal seed and setting are equal runs."""
        return int(hash_of([self._trial.seed, version])[:8], 16)

    async def _catch_up(self) -> None:
        """Fetches the metrics of the steps that were trained."""
        status = await self._swarm.status()
        missing = set(range(1, status.policy_version + 1)) - self._record.metrics.keys()
        if not missing:
            return
        found, self._lost = {}, Counter()
        async with aclosing(self._swarm.events()) as events:
            async for event in events:
                if event.kind == "episode" and event.body["status"] in ("aborted", "expired"):
                    self._lost[event.body["reason"]] += 1
                if event.kind == "step" and event.body["policy_version"] in missing:
                    found[event.body["policy_version"]] = event.body["metrics"]
                if event.seq >= status.last_event:
                    break
        self._record.add_metrics(found)

    async def _score(self, mark: int) -> None:
        """Plays the held-out tasks at a step. Raises `NotScorable` if all tries of an episode fail."""
        if mark in self._record.scorings:
            return
        async with asyncio.timeout(self._subject.patience):
            if self._judged is not None:
                self._record.add_score(mark, await self._judged.score(mark, self._seed(mark)))
                return
            assert self._evaluator is not None
            report = await self._swarm.evaluate(
                self._evaluator,
                self._held_out,
                repeats=self._subject.repeats,
                concurrency=self._subject.concurrency,
                progress=False,
                at_version=mark,
                seed=self._seed(mark),
            )
        missing = len(report.results) - len(report.finished)
        if missing:
            reason = report.errors.most_common(1)[0][0]
            raise NotScorable(f"{missing} of {len(report.results)} held-out episodes failed: {reason}")
        plays = len(report.results) + report.num_repeated
        self._record.add_score(mark, scoring(list(report.by_task.values()), plays))

    async def with_facts(self, outcome: Outcome) -> Outcome:
        """The outcome with the settings of the server's job and with facts. A lost run has none."""
        if outcome.score is None:
            return outcome
        known, last = self._record.scorings, self._subject.steps_at(self._trial.fidelity)
        train, held_out = ({(task.task_set, task.id) for task in tasks} for tasks in (self._arm.tasks, self._held_out))
        facts = {"tasks_held_out": float(len(held_out)), "tasks_shared": float(len(train & held_out))}
        if {0, last} <= known.keys():
            facts |= {"held_out_before": known[0].mean, "held_out_after": known[last].mean}
            facts["held_out_error"] = math.hypot(known[0].error, known[last].error)
        facts |= weight_changes(Signals(outcome.signals))
        settings: dict[str, Value] = {}
        for name, value in leaves((await self._swarm.job()).job, "job."):
            is_list = isinstance(value, list) and all(isinstance(one, str) for one in value)
            if is_list or isinstance(value, bool | int | float | str):
                settings[name] = tuple(value) if is_list else value
        outcome = replace(outcome, settings=settings, facts=facts)
        return outcome if self._judged is None else await self._judged.with_training(outcome)


def weight_changes(signals: Signals) -> dict[str, float]:
    """Facts about the last steps in which the learner's weights changed. Empty if none did, or none was checked."""
    sides = np.array([last(signals[f"weights/{side}"]) for side in ("learner", "sampler")])
    learner, sampler = map(float, sides[:, np.isfinite(sides).all(0)].sum(1))
    return {"learner_changes": learner, "sampler_changes": sampler / learner} if learner else {}


async def machine_of(swarm: AsyncSwarm) -> dict[str, str]:
    """The server's version, hardware and base weights, and libraries of this process, which a local server shares."""
    status = await swarm.status()
    return {
        "AgentJet": status.version,
        "Python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers") if find_spec(name)},
        "hardware": status.machine,
        "base weights": status.model_weights,
    }


async def carry_out(order: TrialOrder) -> None:
    """Writes the outcome to a file. Raises `ConfigError`."""
    subject = order.subject
    subject.check_code()
    home = Path(order.run) / "home"
    arm_order = ArmOrder.of(subject, order.address, home, arm=order.trial.arm, unsafe=order.unsafe)
    async with AsyncSwarm(order.address.url, order.address.token) as swarm:
        try:
            async with arm_process.started(arm_order) as arm:
                work = TrialProcess(order, swarm, arm)
                outcome = await work.with_facts(await work.run())
                if outcome.score is not None:
                    outcome = replace(outcome, machine=await machine_of(swarm))
        except ArmFailed as error:
            if not subject.judged:
                raise ConfigError(str(error)) from None
            outcome = Outcome(order.trial.id, "arm_failed", note=shortened(str(error)))
    write_whole(Path(order.answer), canonical(outcome.to_json()))


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell script may begin with it ignored
    order = TrialOrder.from_json(json.loads(sys.stdin.buffer.readline()))
    exit_with_parent(signal.SIGINT)  # live episodes are aborted on exit
    try:
        with Path(order.run, "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # one process per run; another may just be ending
            asyncio.run(carry_out(order))
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(WRONG_STUDY) from None


if __name__ == "__main__":
    main()
