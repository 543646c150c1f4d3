"""A fall of the rewards: they were higher, and since some step all are the same, as after an update that broke the
policy.

`find_fall` reads only the metrics of steps. The health rule `reward` judges the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import prod
from operator import itemgetter
from statistics import median

from agentjet.gateway.learning import REWARD, code_versions

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
        """Phrases about what changed with the rewards."""
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
