"""Rewards that say something else than the metric: a judge that changes, answers that grow for pay, a hacked grader."""

from __future__ import annotations

from agentjet.research.diagnosis.case import Case, Rule
from agentjet.research.diagnosis.signs import CLEAR, Told

LONGER = 2.0
"""Times as many tokens as in the beginning."""
RELATED = 0.3
"""Correlation of the length with what is paid beyond the held-out grade."""
APART = 0.1
"""Of a reward between 0 and 1: less between what is paid and what is held out is not worth a word."""


def rewards_of_run(case: Case) -> Told | None:
    """Any run that was rewarded: what a judge adds may just hide what the policy lost."""
    rewards = case.change("reward/mean")
    if rewards is None:
        return None
    return Told(
        f"the mean reward went from {rewards}", {"reward/mean early": rewards.early, "reward/mean late": rewards.late}
    )


def graded_otherwise(case: Case, sign: Told) -> Told | None:
    found = case.ask("regrade")
    if found is None:
        return None
    moved = found["again_first"] - found["paid_first"]
    if abs(moved) < max(CLEAR * found["error"], APART):
        return None
    words = f"the first samples graded again: {found['again_first']:.3g}, where {found['paid_first']:.3g} was paid"
    return Told(words, found)


def longer_answers(case: Case) -> Told | None:
    length = case.change("completion/tokens")
    if length is None or not length.rose or length.late < LONGER * length.early:
        return None
    words = f"answers went from {length} tokens"
    numbers = {"completion/tokens early": length.early, "completion/tokens late": length.late}
    cut = case.change("completion/truncated")
    if cut is not None:
        words += f", and of them {cut.late:.0%} are cut off, where it was {cut.early:.0%}"
        numbers["completion/truncated"] = cut.late
    return Told(words, numbers)


def risen_reward(case: Case) -> Told | None:
    rewards = case.change("reward/mean")
    return rewards_of_run(case) if rewards is not None and rewards.rose else None


def paid_for_more(case: Case, sign: Told) -> Told | None:
    """Training pays more for the last samples than for the first ones, and the held-out evaluator does not as much."""
    found, held = case.ask("regrade"), case.ask("held_out")
    if found is None:
        return None
    paid, worth = found["paid_last"] - found["paid_first"], found["held_last"] - found["held_first"]
    if paid - worth < max(CLEAR * found["error"], APART):
        return None
    words = (
        f"the same samples by the held-out evaluator: {found['held_first']:.3g} to {found['held_last']:.3g}, where "
        f"{found['paid_first']:.3g} to {found['paid_last']:.3g} was paid"
    )
    if held is not None:
        words += f"; held out, {held['before']:.3g} became {held['after']:.3g}"
    return Told(words, found)


def paid_for_length(case: Case, sign: Told) -> Told | None:
    tried = paid_for_more(case, sign)
    if tried is None or tried.numbers["length_last"] < RELATED:
        return None
    words = f"{tried.words}; what is paid beyond that goes with the length, r = {tried.numbers['length_last']:.2f}"
    return Told(words, tried.numbers)


DRIFTING_JUDGE = Rule(
    "drifting_judge",
    rewards_of_run,
    graded_otherwise,
    "rewards of different steps cannot be compared: part of the curve is the judge's. Pin its version and its prompt",
    asks=("regrade", "again_first"),
)
LENGTH_EXPLOSION = Rule(
    "length_explosion",
    longer_answers,
    paid_for_length,
    "length itself is paid. Pay for the result only, or compare at equal length",
    asks=("regrade", "held_last"),
)
REWARD_HACKING = Rule(
    "reward_hacking",
    risen_reward,
    paid_for_more,
    "the training reward is earned without what it stands for: its gains are no gains. Mend the grader",
    asks=("regrade", "held_last"),
)
