"""The answer to "is it learning?": the trend of the training reward, and the newest held-out scores.

The slope is that of a least-squares line through the rewards of the newest steps. Its error is widened by the
correlation of neighbouring residuals. A rise or a fall is stated at `CERTAIN` standard deviations: one looks after
every step of a run, and a whole flat run must not show either one by chance. `python -m bench.alarms` measures that.

`find_fall` finds rewards that were higher and are all the same since some step, as after an update that broke the
policy. The health rule `reward` judges the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from math import exp, inf, log1p, prod, sqrt
from operator import itemgetter, mul
from statistics import median

from agentjet.errors import counted
from agentjet.protocol import Answer, EvaluationView, LearningView, newest_held_out

REWARD = "reward/mean"
WINDOW = 30
"""Newest steps that the trend is computed from."""
FEWEST = 8
"""Steps below which it is too early."""
BLOCK = 10
"""Steps whose mean is the beginning, and the end."""
CERTAIN = 4.5
"""Standard deviations from which a difference is stated. `bench.alarms` chose it."""
MOST_CORRELATED = 0.6
"""Highest correlation of neighbouring steps that widens the error. Higher ones are trends."""
CODE = re.compile(r"code/(.+)/reward_mean")
"""Metric of a step with episodes of a code version."""
ABSENT = 5
"""Steps without a code version after which its next step is a change. Clients may miss a few batches."""
ROUNDING = 1e-12
SCORES = (1, 2, 3)
"""Numbers of newest held-out scores whose mean is compared with that of as many earlier ones."""
ORDER: tuple[Answer, ...] = ("falls", "yes", "learned", "no")
"""The answer of a run with several policies is the first of these that one of them has."""

Steps = Sequence[Mapping[str, float]]


def learning(
    steps: Steps, evaluations: Sequence[EvaluationView] = (), first: Steps = (), policies: Sequence[str] = ()
) -> LearningView:
    """Returns the answer for the newest steps of a run, the newest last. `first` are the run's first steps.

    A rising training reward is not called learning if the held-out score fell clearly. Each policy that has its
    own rewards is judged alone.
    """
    fallen = held_out_fall(evaluations)
    steps, first, since = of_present_code(steps, first)
    found = {
        policy: _judge(_rewards(steps, metric), _rewards(first or steps, metric)[:BLOCK], fallen)
        for policy, metric in reward_metrics(steps, policies).items()
    }
    main = min(found.values(), key=lambda one: ORDER.index(one.answer) if one.answer in ORDER else len(ORDER))
    texts = [f"{policy}: {one.text}" if len(found) > 1 else one.text for policy, one in found.items()]
    return main.model_copy(update={"text": "; ".join(texts) + since})


def code_versions(step: Mapping[str, float | None]) -> set[str]:
    return {found[1] for name in step if (found := CODE.fullmatch(name)) and step[name] is not None}


def of_present_code(steps: Steps, first: Steps) -> tuple[Steps, Steps, str]:
    """Returns the steps since the newest change of the agent's code, comparable ones of `first`, and a phrase."""
    versions = list(map(_reward_code, steps))
    for start in range(len(steps) - 1, 0, -1):
        before = set().union(*versions[max(0, start - ABSENT) : start])
        if before and (new := versions[start] - before):
            names, num = ", ".join(sorted(new)), len(steps) - start
            return steps[start:], (), f". Since the agent's code changed to {names}: {counted(num, 'step')}"
    present = set().union(*versions)
    comparable = [step for step in first if _reward_code(step) <= present]
    if present <= set().union(*map(_reward_code, comparable)):
        return steps, comparable, ""
    return steps, (), f". Since the agent's code changed: {counted(len(steps), 'step')} or more"


def _reward_code(step: Mapping[str, float]) -> set[str]:
    """The code versions that a step's rewards come from. Clients may leave theirs out."""
    return (code_versions(step) or {"one without a name"}) if REWARD in step else set()


def reward_metrics(steps: Steps, policies: Sequence[str]) -> dict[str, str]:
    """Returns the metric of the rewards of each policy; of '' alone if the policies have the same rewards."""
    own = {policy: f"{policy}/{REWARD}" for policy in policies}
    if any(step.get(metric) != step.get(REWARD) for step in steps for metric in own.values()):
        return own
    return {"": REWARD}


def _rewards(steps: Steps, metric: str) -> tuple[float, ...]:
    return tuple(step[metric] for step in steps if metric in step)


def _judge(rewards: tuple[float, ...], early: tuple[float, ...], fallen: str) -> LearningView:
    num = min(len(rewards), WINDOW)
    if num < FEWEST:
        wanted = f"{num} of the {FEWEST} steps with rewards that a trend needs"
        return LearningView(answer="too_early", num_steps=num, text=f"Too early: {wanted}")
    slope, low, high = trend(rewards[-WINDOW:])
    late = rewards[-BLOCK:]
    shown = f"{slope:+.2g} a step ({low:+.2g} to {high:+.2g}) over the newest {num}"
    path = f"reward {_mean(early):.2g} at first, {_mean(late):.2g} now"
    answer: Answer = "no"
    text = f"Not certain: {shown}; {path}"
    if low > 0 and fallen:
        text = f"No: the training reward rises by {shown}, but {fallen}"
    elif low > 0:
        answer, text = "yes", f"Yes: {shown}; {path}"
    elif high < 0:
        answer, text = "falls", f"It falls: {shown}; {path}"
    elif len(late) == BLOCK and rise(early, late) >= CERTAIN:
        if fallen:
            text = f"No: {path}, but {fallen}"
        else:
            answer, text = "learned", f"It has learned: {path}. The newest {num} steps do not show a further rise"
    return LearningView(answer=answer, num_steps=num, slope=slope, low=low, high=high, text=text)


@lru_cache(maxsize=64)
def trend(rewards: tuple[float, ...]) -> tuple[float, float, float]:
    """Returns the slope per step of 3 rewards or more, and the ends of its interval at `CERTAIN` deviations."""
    num = len(rewards)
    times = [time - (num - 1) / 2 for time in range(num)]
    squares, mean = num * (num * num - 1) / 12, _mean(rewards)
    slope = sum(map(mul, times, rewards)) / squares
    residuals = [reward - mean - slope * time for reward, time in zip(rewards, times, strict=True)]
    total = sum(map(mul, residuals, residuals))
    if total <= ROUNDING * sum(map(mul, rewards, rewards)):
        slope = slope if abs(slope) > ROUNDING else 0.0
        return slope, slope, slope
    correlation = min(max(sum(map(mul, residuals[1:], residuals)) / total, 0.0), MOST_CORRELATED)
    error = sqrt(total / (num - 2) / squares * (1 + correlation) / (1 - correlation))
    width = _quantile(CERTAIN, num - 2) * error
    return slope, slope - width, slope + width


@lru_cache(maxsize=64)
def rise(early: tuple[float, ...], late: tuple[float, ...]) -> float:
    """Returns the standard deviations by which the mean of `late` is above that of `early`, both of 2 or more."""
    if min(len(early), len(late)) < 2:
        return 0.0
    difference = _mean(late) - _mean(early)
    error = sqrt(_variance(early) / len(early) + _variance(late) / len(late))
    if error <= ROUNDING:
        return inf if difference > ROUNDING else 0.0
    return _normal(difference / error, len(early) + len(late) - 2)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return sum([(value - mean) ** 2 for value in values]) / (len(values) - 1)


def _normal(t: float, freedom: int) -> float:
    """Returns the normal deviate of a Student's t (Wallace, Annals of Mathematical Statistics 30, 1959)."""
    scale = (8 * freedom + 1) / (8 * freedom + 3)
    return (1 if t >= 0 else -1) * scale * sqrt(freedom * log1p(t * t / freedom))


@lru_cache(maxsize=WINDOW)
def _quantile(deviations: float, freedom: int) -> float:
    """The inverse of `_normal`."""
    scale = (8 * freedom + 1) / (8 * freedom + 3)
    return sqrt(freedom * (exp((deviations / scale) ** 2 / freedom) - 1))


def held_out_fall(evaluations: Sequence[EvaluationView]) -> str:
    """A phrase if the newest held-out scores are clearly below as many earlier ones in a row, else ''.

    Compared are scores of the newest one's tasks, and of as many, without those that a rollback undid. Clearly: by
    `CERTAIN` standard errors, because the highest of many noisy scores is above their mean. A score between 0 and 1 has
    at most the error of a coin, 0.5 / sqrt(tasks). Other scores are not judged, because their errors are not recorded.
    """
    known = newest_held_out(evaluations)
    known = [one for one in known if one.num_tasks == known[-1].num_tasks]
    if len(known) < 2 or any(not 0 <= one.score <= 1 for one in known):
        return ""
    scores = [one.score for one in known]
    for num in SCORES:
        means = [sum(scores[i : i + num]) / num for i in range(len(scores) - 2 * num + 1)]
        if not means:
            break
        now, best = sum(scores[-num:]) / num, max(range(len(means)), key=means.__getitem__)
        if means[best] - now > CERTAIN * sqrt(0.5 / num / known[-1].num_tasks):
            return (
                f"the held-out score fell from {means[best]:.3g} at version {known[best + num - 1].policy_version} to "
                f"{now:.3g} at version {known[-1].policy_version}"
            )
    return ""


# ---- a fall of the rewards -------------------------------------------------------------------------------------------

COMPARED = 5
"""Steps before the fall whose answers and code versions are compared with those since."""
UNLIKELY = 1e-4
"""Probability below which chance is ruled out. It is small because one looks after every step of a run."""
CHANGES = (("completion/tokens", 2.0, "tokens an answer"), ("policy/entropy", 4.0, "nats of entropy a token"))
"""Metrics, and the ratio at which each shows a broken policy. Sound runs have at most half of it: see the
documentation."""

Step = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RewardFall:
    """Rewards that were higher before and are now all the same."""

    highest: float
    """The highest mean reward before the fall."""
    now: float
    last: int
    """Index of the last step before the fall."""
    num_steps: int
    """Steps since then."""
    other_answers: tuple[str, ...]
    """Phrases about answers that became unlike those before."""
    new_code: str
    """A phrase if the versions of the agent's code changed within the steps that are compared, else ''."""
    is_chance: bool
    """True if chance alone may have made the rewards equal."""

    @property
    def signs(self) -> tuple[str, ...]:
        return (*self.other_answers, self.new_code) if self.new_code else self.other_answers


def find_fall(steps: Sequence[Step], batch_size: int) -> RewardFall | None:
    """Returns the fall that the newest steps show, or None. `batch_size` is the number of groups of a step."""
    known = [(i, step) for i, step in enumerate(steps) if REWARD in step]
    if not known:
        return None
    now = known[-1][1][REWARD]
    equal = sum(1 for _ in takewhile(lambda one: _all_equal(one[1], now), reversed(known)))
    before, newest = [step for _, step in known[: len(known) - equal]], [step for _, step in known[-equal:]]
    best = max(before, key=itemgetter(REWARD), default=None)
    if not equal or best is None or best[REWARD] <= now:
        return None
    answers, code = tuple(_other_answers(before, newest)), _new_code(before[-COMPARED:][0], newest[0])
    is_chance = not answers and _chance(before, newest, batch_size) >= UNLIKELY
    return RewardFall(best[REWARD], now, known[len(before) - 1][0], equal, answers, code, is_chance)


def _all_equal(step: Step, value: float) -> bool:
    return step[REWARD] == value and step.get("reward/std") == 0.0


def _other_answers(before: Sequence[Step], newest: Sequence[Step]) -> Iterator[str]:
    for metric, ratio, noun in CHANGES:
        old, new = ([step[metric] for step in steps if step.get(metric)] for steps in (before[-COMPARED:], newest))
        if old and new and not 1 / ratio < median(new) / median(old) < ratio:
            yield f"{median(new):.3g} {noun} instead of {median(old):.3g}"


def _new_code(before: Step, after: Step) -> str:
    old, new = map(code_versions, (before, after))
    return f"the agent's code changed to {', '.join(sorted(new))}" if old and new and not old & new else ""


def _chance(before: Sequence[Step], newest: Sequence[Step], batch_size: int) -> float:
    """Probability that chance leaves groups with different rewards to the steps `before` (Fisher's exact test)."""
    earlier, total = batch_size * len(before), batch_size * (len(before) + len(newest))
    mixed = round(sum(batch_size * (1 - step.get("groups/zero_variance", 1.0)) for step in before))
    return prod((earlier - i) / (total - i) for i in range(mixed))
