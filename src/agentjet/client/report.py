"""Results of runs and episodes: the display and the reports of `train` and `evaluate`, their estimates, their form in a
notebook (HTML with a curve), and episodes as a data set.

The tasks of an evaluation are the sample: repeats of one task are not independent. So intervals resample tasks, with
all their repeats (cluster bootstrap). If every task's value is 0 or 1, resampling is too narrow near 0 and 1: there the
interval is Wilson's.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, Literal

from agentjet.errors import counted, did_you_mean
from agentjet.protocol import REPORTED_BATCHES, EpisodeTree, batches_without_variance, remaining

WIDTH, HEIGHT, MARGIN = 420, 120, 6
"""Pixels of a curve."""
MOST_POINTS = 400
"""Points of a curve: means of neighbours, if there are more values."""


def first_line(report: object) -> str:
    """The short text of a report, for `repr`."""
    return f"<{type(report).__name__}: {str(report).partition(chr(10))[0]}>"


def html_of(text: str, table: Mapping[str, object], curve: Sequence[float], label: str) -> str:
    """The lines of `text`, a table, and a curve of `curve` with its `label`."""
    rows = "".join(
        f"<tr><th align='left'>{escape(name)}</th><td align='right'>{escape(str(value))}</td></tr>"
        for name, value in table.items()
    )
    return f"<div><pre>{escape(text)}</pre><table>{rows}</table>{svg_of(curve, label)}</div>"


def svg_of(values: Sequence[float], label: str) -> str:
    """A curve over the numbers of `values`; empty for fewer than two finite ones."""
    width = max(1, math.ceil(len(values) / MOST_POINTS))
    chunks = [[v for v in values[i : i + width] if math.isfinite(v)] for i in range(0, len(values), width)]
    points = [(number, sum(chunk) / len(chunk)) for number, chunk in enumerate(chunks) if chunk]
    if len(points) < 2:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    x_scale, y_scale = (WIDTH - 2 * MARGIN) / (len(chunks) - 1), (HEIGHT - 2 * MARGIN) / ((high - low) or 1.0)
    path = " ".join(f"{MARGIN + x * x_scale:.1f},{HEIGHT - MARGIN - (y - low) * y_scale:.1f}" for x, y in points)
    caption = f"{label}: {points[0][1]:.3f} to {points[-1][1]:.3f}, lowest {low:.3f}, highest {high:.3f}"
    return (
        f"<svg width='{WIDTH}' height='{HEIGHT}' role='img' aria-label='{escape(caption, quote=True)}'>"
        f"<polyline points='{path}' fill='none' stroke='#2a6fdb' stroke-width='1.5'/></svg><div>{escape(caption)}</div>"
    )


RESAMPLES = 2000
SEED = 0
"""Seed of the resampling: equal values give an equal interval."""
DROPPED = "groups/dropped_"
"""Beginning of a step's metrics with the groups dropped for one reason."""
NUM_ERRORS_SHOWN = 3
"""Kinds of failures that a display shows."""
LEARNED_AFTER = " (a batch that was complete by then is learned all the same, after this report)"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `num_tasks` tasks and its 95 % interval, from `low` to `high`; NaN if there is none."""

    value: float
    low: float
    high: float
    num_tasks: int

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:.3f}"
        return f"{self.value:.3f} (95 % interval {self.low:.3f} to {self.high:.3f})"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value a task. The interval is Wilson's if all values are 0 or 1, else the percentile bootstrap
    over tasks (Efron 1979). A single other value has no interval."""
    if not values:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean, count = math.fsum(values) / len(values), len(values)
    if all(value in (0.0, 1.0) for value in values):
        return Estimate(mean, *wilson_interval(sum(values), count), count)
    if count == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    draw = random.Random(SEED)
    means = sorted(math.fsum(draw.choices(values, k=count)) / count for _ in range(RESAMPLES))
    cut = round(0.025 * RESAMPLES)
    return Estimate(mean, means[cut], means[-1 - cut], count)


def pass_at_k(num_right: int, num_tries: int, k: int) -> float:
    """The chance that one of `k` attempts is right, if `num_right` of `num_tries` were: 1 - C(n-c, k) / C(n, k).

    Unbiased, unlike 1 - (1 - c/n)^k (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1).
    Raises `ValueError` for fewer than `k` attempts.
    """
    if not 1 <= k <= num_tries:
        raise ValueError(f"pass@{k} needs k >= 1 and at least {k} attempts at a task; there are {num_tries}")
    return 1.0 - math.comb(num_tries - num_right, k) / math.comb(num_tries, k)


def wilson_interval(successes: float, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927), 95 % by default; (0, 1) without trials.

    Unlike the normal approximation it stays inside [0, 1] and has a width at 0 and 1.
    """
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


Outcome = Literal["finished", "aborted", "expired", "not_needed"]
"""`not_needed`: aborted without a failure, because the run had its steps or the server's batch was full."""


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """The end of one episode. `reward` is None unless it finished; `error` is the reason otherwise."""

    task_id: str
    task_set: str
    outcome: Outcome
    policy_version: int
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    where: str = ""
    """File and line in the agent where `error` was raised, if the agent raised it."""
    code_version: str = ""
    """Version of the agent's source that ran it."""
    by_role: Mapping[str, float] = field(default_factory=dict)
    """Its rewards by role, or by policy and role."""
    policies: tuple[str, ...] = ()
    """The policies that the run names."""
    num_calls: int = 0
    """Calls that the server recorded."""
    reward_text: str = ""
    """The text of its `Reward`."""


@dataclass(frozen=True, slots=True)
class CodeChange:
    """An edit of the agent during training, and its fate.

    * "loaded": code version `to` replaced `before`; `why` names the files that differ.
    * "not loaded": `before` stayed, because of `why`.
    * "rolled back": `before` failed its first episodes, and `to` replaced it.
    """

    kind: Literal["loaded", "not loaded", "rolled back"]
    before: str
    to: str
    why: str = ""

    def __str__(self) -> str:
        fates = {
            "loaded": f"code {self.to} took the place of {self.before}",
            "not loaded": f"an edit of code {self.before} was not loaded",
            "rolled back": f"code {self.before} rolled back to {self.to}",
        }
        return f"{fates[self.kind]}: {self.why}" if self.why else fates[self.kind]


@dataclass(frozen=True, slots=True)
class CodeVersionResult:
    """Episodes of one version of the agent's source. `mean_reward` is NaN if none finished."""

    num_finished: int
    num_failed: int
    mean_reward: float


@dataclass(frozen=True, slots=True)
class Step:
    """One batch: the policy version it led to, and the server's metrics of it."""

    policy_version: int
    metrics: Mapping[str, float]


GIVEN = {"policy/cross_entropy": "cross-entropy", "dpo/loss": "loss", "kto/loss": "loss"}
"""The losses of given answers by their metric. That of a policy has its name in front."""
ACCURACIES = ("dpo/accuracy", "kto/accuracy")


def given_loss(metrics: Mapping[str, float]) -> float:
    """The loss of a batch of demonstrations, of whichever policy has it; NaN for another batch."""
    return next((value for name, value in metrics.items() if name.endswith(tuple(GIVEN))), math.nan)


def accuracy_of(metrics: Mapping[str, float]) -> float:
    """The part of the preferences that the policy has, of `dpo` and `kto`; NaN for another batch."""
    return next((value for name, value in metrics.items() if name.endswith(ACCURACIES)), math.nan)


def given_text(metrics: Mapping[str, float]) -> str:
    """The loss of a batch of demonstrations with its name, and the accuracy; empty for another batch."""
    names = {**GIVEN, **dict.fromkeys(ACCURACIES, "accuracy")}
    shown = {names[end]: value for end in names for name, value in metrics.items() if name.endswith(end)}
    return "  ".join(f"{name} {value:.3f}" for name, value in shown.items())


class Progress:
    """Display of `train`, `sft` and `evaluate`. Prints at most `num_lines` lines for `total` steps or episodes, each
    kind of failure once, and messages."""

    def __init__(self, title: str, total: int, *, wanted: bool, num_lines: int = 100) -> None:
        """Prints nothing unless `wanted`."""
        self.policies: tuple[str, ...] = ()
        """The policies that the run names. Their rewards are shown, too."""
        self._title = title
        self._total = total
        self._wanted = wanted
        self._every = max(1, total // num_lines)
        self._started = time.monotonic()
        self._done = 0
        self._failures: Counter[str] = Counter()

    def step(self, metrics: Mapping[str, float], note: str = "") -> None:
        names = {"reward": "reward/mean"} | {policy: f"{policy}/reward/mean" for policy in self.policies}
        parts = [f"{name} {metrics[metric]:.3f}" for name, metric in names.items() if metric in metrics]
        parts += filter(None, [given_text(metrics)])
        # The first batch's time includes the server's idle time before this client began.
        if self._done and "perf/tokens_per_second" in metrics:
            parts.append(f"{metrics['perf/tokens_per_second']:.0f} tokens/s")
        self._advance("  ".join([*parts, *filter(None, [note])]))

    def episode(self, result: EpisodeResult, *, counts: bool = False) -> None:
        """An episode ended. `counts`: the display counts episodes, not steps."""
        if result.outcome in ("aborted", "expired"):
            self._failures[result.error] += 1
            if self._failures[result.error] == 1 and len(self._failures) <= NUM_ERRORS_SHOWN:
                where = f" ({result.where})" if result.where else ""
                self.notify(f"episode of task {result.task_id!r} {result.outcome}: {result.error}{where}")
        if counts:
            self._advance("")

    def notify(self, text: str) -> None:
        if self._wanted:
            print(text, flush=True)

    def _advance(self, text: str) -> None:
        self._done += 1
        if self._done % self._every and self._done != self._total:
            return
        failed = f"  {self._failures.total()} failed" if self._failures else ""
        left = remaining(time.monotonic() - self._started, self._done, self._total)
        rest = f"  {left}" if self._done < self._total else ""
        self.notify(f"{self._title} {self._done}/{self._total}  {text}".rstrip() + failed + rest)


@dataclass(frozen=True, repr=False)
class _Report:
    """Counts over episodes."""

    results: tuple[EpisodeResult, ...]

    def __repr__(self) -> str:
        return first_line(self)

    @property
    def finished(self) -> tuple[EpisodeResult, ...]:
        return tuple(result for result in self.results if result.outcome == "finished")

    @property
    def num_aborted(self) -> int:
        """Episodes whose agent failed. They are in no mean."""
        return sum(result.outcome == "aborted" for result in self.results)

    @property
    def num_expired(self) -> int:
        """Episodes whose lease expired."""
        return sum(result.outcome == "expired" for result in self.results)

    @property
    def errors(self) -> Counter[str]:
        """Reasons of unfinished episodes, and their counts."""
        return Counter(result.error for result in self.results if result.outcome in ("aborted", "expired"))

    @property
    def mean_reward(self) -> float:
        """Over finished episodes; NaN without any."""
        return _mean([result.reward for result in self.finished if result.reward is not None])

    @property
    def by_code_version(self) -> dict[str, CodeVersionResult]:
        """By version of the agent's source, in the order in which their first episodes ended."""
        found = {}
        for version in dict.fromkeys(result.code_version for result in self.results):
            results = [result for result in self.results if result.code_version == version]
            rewards = [result.reward for result in results if result.reward is not None]
            failed = sum(result.outcome in ("aborted", "expired") for result in results)
            found[version] = CodeVersionResult(len(rewards), failed, _mean(rewards))
        return found

    def mean_metric(self, name: str) -> float:
        """Over finished episodes with that metric; NaN without any."""
        return _mean([result.metrics[name] for result in self.finished if name in result.metrics])


@dataclass(frozen=True, repr=False)
class TrainReport(_Report):
    """The result of `train`: the steps, and this client's episodes."""

    steps: tuple[Step, ...]
    seconds: float
    code_changes: tuple[CodeChange, ...] = ()
    """Edits of the agent during the run, in order, with `reload`."""
    evaluations: tuple[Evaluation, ...] = ()
    """Scores on the held-out tasks, in order, from before the first batch to the end, with `eval_every`."""
    stopped_early: bool = False
    """True if the run ended before its steps because `stop_after` evaluations brought no new best score."""

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the highest score, the earliest of equal ones; None without evaluations."""
        return best_of(self.evaluations)

    @property
    def rewards(self) -> tuple[float, ...]:
        """Mean reward of each batch, over the episodes of all clients."""
        return tuple(step.metrics.get("reward/mean", math.nan) for step in self.steps)

    def rewards_of(self, policy: str) -> tuple[float, ...]:
        """The same of one policy. Raises `ValueError` for a policy that the run does not name."""
        if self.steps and not any(f"{policy}/reward/mean" in step.metrics for step in self.steps):
            raise ValueError(f"no step has the metric '{policy}/reward/mean': the run names no policy {policy!r}")
        return tuple(step.metrics.get(f"{policy}/reward/mean", math.nan) for step in self.steps)

    @property
    def num_not_needed(self) -> int:
        """Episodes that were live when the last batch was learned, or that the server ended as surplus or stale. They
        did not fail."""
        return sum(result.outcome == "not_needed" for result in self.results)

    @property
    def groups_dropped(self) -> dict[str, int]:
        """Groups of all clients that were dropped while the batches of these steps were filled, by reason, such as
        `no_tokens`. Their finished episodes were not trained."""
        counts: Counter[str] = Counter()
        for step in self.steps:
            for name, count in step.metrics.items():
                if name.startswith(DROPPED):
                    counts[name.removeprefix(DROPPED)] += round(count)
        return {reason: count for reason, count in counts.most_common() if count}

    def __str__(self) -> str:
        own, total = len(self.finished), round(sum(step.metrics.get("batch/episodes", 0.0) for step in self.steps))
        shared, whose = f" with {counted(total, 'episode')} of all clients", f"{own} of this client"
        if total <= own:
            shared, whose = "", counted(own, "episode")
        lines = [
            f"{counted(len(self.steps), 'step')} in {self.seconds:.0f} s{shared}, {whose} finished, "
            f"{self.num_aborted} aborted, {self.num_expired} expired, {self.num_not_needed} not needed"
        ]
        if dropped := self.groups_dropped:
            num, reasons = sum(dropped.values()), ", ".join(f"{count} {reason}" for reason, count in dropped.items())
            lines.append(f"{counted(num, 'group')} dropped, which trained nothing ({reasons})")
        empty = [batches_without_variance([step.metrics]) for step in self.steps]
        if sum(empty) >= REPORTED_BATCHES:
            lines.append(f"{sum(empty)} of these steps could teach nothing: in every group all rewards were equal")
        if self.evaluations:
            scores = ", ".join(f"{e.policy_version}: {e.score:.3f}" for e in self.evaluations)
            best = "" if self.best is None else f"; best: version {self.best.policy_version}"
            early = f", stopped early: no new best score{LEARNED_AFTER}" if self.stopped_early else ""
            lines.append(f"held-out score by version: {scores}{best}{early}")
        for change in self.code_changes:
            lines.append(str(change))
        for version, code in self.by_code_version.items() if self.code_changes else ():
            mean = f"mean reward {code.mean_reward:.3f}" if code.num_finished else "none scored"
            lines.append(f"code {version}: {code.num_finished} finished, {code.num_failed} failed, {mean}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The report in a notebook: its text, figures, and the curve of the reward."""
        table = {"steps": len(self.steps), "mean reward of the episodes": f"{self.mean_reward:.3f}"}
        dropped = {f"groups dropped: {reason}": count for reason, count in self.groups_dropped.items()}
        return html_of(str(self), {**table, **dropped, **_failures(self)}, self.rewards, "mean reward of each batch")


@dataclass(frozen=True, repr=False)
class EvalReport(_Report):
    """The result of `evaluate`. `results` are in the order of the tasks, repeats of a task together."""

    seconds: float
    num_repeated: int = 0
    """Failed episodes that were attempted again. The means cover episodes that did not fail."""

    @property
    def policy_versions(self) -> tuple[int, int]:
        """The lowest and the highest version that began an episode. They differ if the policy learned during the
        evaluation."""
        versions = [result.policy_version for result in self.results]
        return min(versions), max(versions)

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that the run names."""
        return self.finished[0].policies if self.finished else ()

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics of its episodes, sorted."""
        return sorted({metric for result in self.finished for metric in result.metrics})

    def of_policy(self, policy: str) -> EvalReport:
        """This report with the rewards of one policy. Raises `ValueError` for a policy that the run does not name."""
        if self.finished and policy not in self.policies:
            known = ", ".join(self.policies) or "none: its rewards are those of one model"
            way_out = did_you_mean(policy, self.policies, f"its policies are: {known}")
            raise ValueError(f"the run names no policy {policy!r}; {way_out}")
        results = [replace(result, reward=result.by_role.get(policy, result.reward)) for result in self.results]
        return replace(self, results=tuple(results))

    @property
    def by_task(self) -> dict[tuple[str, str], tuple[float, ...]]:
        """Rewards of the finished repeats, by task set and task id; empty for a task without any."""
        rewards: dict[tuple[str, str], tuple[float, ...]] = {}
        for result in self.results:
            known = rewards.setdefault((result.task_set, result.task_id), ())
            if result.reward is not None:
                rewards[result.task_set, result.task_id] = (*known, result.reward)
        return rewards

    @property
    def repeats(self) -> int:
        """The k of `mean_at_k`: the largest number of finished repeats of a task."""
        return max(map(len, self.by_task.values()), default=0)

    @property
    def mean_at_k(self) -> Estimate:
        """The mean over tasks of the mean over their finished repeats. `num_tasks` leaves out tasks without any. The
        interval of a single task is over its repeats."""
        tasks = [rewards for rewards in self.by_task.values() if rewards]
        if len(tasks) == 1:
            return replace(estimate(tasks[0]), num_tasks=1)
        return estimate([math.fsum(rewards) / len(rewards) for rewards in tasks])

    @property
    def by_task_set(self) -> dict[str, Estimate]:
        """`mean_at_k` of each task set, in the order of the tasks."""
        found = {}
        for name in dict.fromkeys(result.task_set for result in self.results):
            own = tuple(result for result in self.results if result.task_set == name)
            found[name] = replace(self, results=own).mean_at_k
        return found

    def metric_at_k(self, name: str) -> Estimate:
        """The same of a metric, over the finished repeats that have it. Raises `ValueError` if there are finished
        repeats, but none has it."""
        if self.finished and name not in self.metrics:
            way_out = did_you_mean(name, self.metrics, f"there are: {', '.join(self.metrics) or 'none'}")
            raise ValueError(f"no episode has the metric {name!r}; {way_out}")
        measured = [replace(result, reward=result.metrics.get(name)) for result in self.finished]
        return replace(self, results=tuple(measured)).mean_at_k

    def pass_at(self, k: int, *, right: float = 1.0) -> Estimate:
        """The chance that one of `k` attempts at a task is right (`pass_at_k`), over tasks. An attempt is right if its
        reward is at least `right`.

        Raises `ValueError` if a task has fewer than `k` finished repeats: evaluate with more repeats, or fix the
        failures.
        """
        chances = []
        for (_, task_id), rewards in self.by_task.items():
            if not 1 <= k <= len(rewards):
                raise ValueError(f"pass@{k} of task {task_id!r}: it has {len(rewards)} finished repeats")
            chances.append(pass_at_k(sum(reward >= right for reward in rewards), len(rewards), k))
        return estimate(chances)

    def __str__(self) -> str:
        unfinished = self.num_aborted + self.num_expired
        mean = self.mean_at_k
        tasks, episodes = counted(mean.num_tasks, "task"), counted(len(self.finished), "episode")
        lines = [f"mean@{self.repeats} {mean} over {tasks}, {episodes} finished, {unfinished} not"]
        if len(self.by_task_set) > 1:
            lines += [f"  {name or '(no task set)'}: {one}" for name, one in self.by_task_set.items()]
        lines += [f"  reward of {policy}: {self.of_policy(policy).mean_at_k}" for policy in self.policies]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The report in a notebook: its text, figures, and the rewards of the tasks in order."""
        rewards = sorted(math.fsum(found) / len(found) for found in self.by_task.values() if found)
        metrics = {name: self.metric_at_k(name) for name in self.metrics}
        return html_of(str(self), {**metrics, **_failures(self)}, rewards, "mean reward of each task, sorted")


def _failures(report: _Report) -> dict[str, object]:
    return {error.partition("\n")[0][:120]: count for error, count in report.errors.most_common(NUM_ERRORS_SHOWN)}


@dataclass(frozen=True)
class Evaluation:
    """A policy version's evaluation on held-out tasks during a training run."""

    policy_version: int
    report: EvalReport

    @property
    def score(self) -> float:
        """Mean over tasks of the mean reward over their repeats; NaN if no episode finished."""
        return self.report.mean_at_k.value


def best_of(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """The evaluation with the highest score, the earliest of equal ones; None if none has a score."""
    scored = [evaluation for evaluation in evaluations if not math.isnan(evaluation.score)]
    return max(scored, key=lambda evaluation: evaluation.score, default=None)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def rows(episode: EpisodeTree) -> list[dict[str, Any]]:
    """One row for each conversation of the episode, in the order of their last calls; none if its calls are not kept.

    A conversation ends with a call whose answer no later call sends back. Answers that did not reach the agent are left
    out. Messages have OpenAI's chat format, which `transformers` chat templates and `trl` read. Every row has the same
    keys and types; `tools` is JSON text, since schemas differ.
    """
    calls = {call.call_id: call for call in episode.calls}
    continued = {call.after for call in episode.calls}
    names = ("episode_id", "task_id", "task_set", "group", "mode", "status", "trained_in", "client_id", "code_version")
    shared = {name: getattr(episode, name) for name in (*names, "metrics", "reward_text")}
    found = []
    timelines: Counter[str] = Counter()
    for call in episode.calls:
        if call.orphan or call.call_id in continued:
            continue
        path = [call]  # of the conversation, first to last
        while (before := path[0].after) is not None:
            path.insert(0, calls[before])
        rewards, policy = episode.by_role, call.role.partition("/")[0]
        own = {
            "role": call.role,
            "timeline": timelines[call.role],
            "reward": rewards.get(call.role, rewards.get(policy, episode.reward)),
            "policy_versions": sorted({v for one in path for v in one.versions if v is not None}),
            "messages": [_chat(message) for one in path for message in (*one.messages, one.response)],
            "tools": json.dumps(path[0].tools, ensure_ascii=False),
        }
        found.append(shared | own)
        timelines[call.role] += 1
    return found


def _chat(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's chat format; reasoning is `reasoning_content`."""
    chat: dict[str, Any] = {"role": message["role"], "content": message["content"]}
    if message.get("reasoning"):
        chat["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        chat["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in message["tool_calls"]
        ]
    return chat | {key: message[key] for key in ("tool_call_id", "name") if message.get(key)}
