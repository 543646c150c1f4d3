"""What is wrong before anything is learned: settings, tasks and weights that are not what the study thinks.

Learning that goes wrong: nothing to learn from, broken numbers, steps too large, the wrong direction, no variety.

Rewards that say something else than the metric: a judge that changes, answers that grow for pay, a hacked grader.
"""

from __future__ import annotations

import numpy as np

from agentjet.research.probes import SLOWER, Case, Rule
from agentjet.research.run_signals import CLEAR, Observation, Signals, holds_since, last, opening

MISMATCH = 0.01
"""Divergence per token between the policy that sampled and the one that learns: rounding makes a thousandth of it."""


def not_taken_up(case: Case) -> Observation | None:
    answer = case.settings
    if answer is None:
        return None
    wrong = {name: value for name, value in case.trial.setting.items() if answer.get(name) != value}
    said = "; ".join(
        f"{name} = {value!r} was asked for, and the server had {answer.get(name)!r}" for name, value in wrong.items()
    )
    return Observation(said, {"settings not taken up": float(len(wrong))}) if wrong else None


def asked_server(case: Case, sign: Observation) -> Observation:
    return Observation("the server was asked for the settings it had in effect")


def shared_tasks(case: Case) -> Observation | None:
    counts = case.ask("tasks")
    if counts is None or not counts["shared"]:
        return None
    said = f"{counts['shared']:.0f} of the {counts['held_out']:.0f} held-out tasks are also trained on"
    return Observation(said, {name: counts[name] for name in ("shared", "held_out", "train")})


def compared_tasks(case: Case, sign: Observation) -> Observation:
    return Observation("the tasks of training and of evaluation were compared")


def diverging_sampler(case: Case) -> Observation | None:
    reported = last(case.signals["policy/mismatch_kl"])
    reported = reported[np.isfinite(reported)]
    if not len(reported) or np.median(reported) < MISMATCH:
        return None
    level = float(np.median(reported))
    return Observation(f"sampler and learner differ by {level:.3g} nats a token", {"policy/mismatch_kl": level})


def unchanged_sampler(case: Case, sign: Observation) -> Observation | None:
    counts = case.ask("weights")
    if counts is None or counts["sampler"] >= counts["learner"] / 2:
        return None
    said = (
        f"hashes of the weights, before and after each of the last {counts['steps']:.0f} steps: "
        f"the learner's changed in {counts['learner']:.0f}, the sampler's in {counts['sampler']:.0f}"
    )
    return Observation(said, {f"weights/{name}": counts[name] for name in ("steps", "learner", "sampler")})


IGNORED = Rule(
    "ignored_setting",
    not_taken_up,
    asked_server,
    "the run is not of the setting it stands for: whatever was compared, it was not this. Mend the name or the value",
    asks=("settings", ""),
)
LEAK = Rule(
    "leak",
    shared_tasks,
    compared_tasks,
    "the score says how well tasks were remembered, not how well they are solved. Hold other tasks out",
    asks=("tasks", "shared"),
)
STALE = Rule(
    "stale_weights",
    diverging_sampler,
    unchanged_sampler,
    "what is rewarded was said by a policy of long ago: the run measures the transport of weights, not the setting",
    asks=("weights", "sampler"),
)


EQUAL = 0.8
"""Part of the groups without variance, over the first third of a run, from which on there is hardly a gradient."""
PEERS = 4
"""Members of the smallest group that is usual: independent tries agree no more often in larger ones."""
MORE_ALIKE = 0.3
"""By how much more than by chance members agree where they are one answer said several times."""
CERTAIN = 0.25
"""Nats a token below which a policy hardly chooses any more."""
SKIPPED = 0.5
"""Part of the last steps whose gradient was no number."""
SURE = 3.0
"""Standard errors of a held-out difference."""
PASS_LOST = 0.08
"""Loss of pass@k beyond which answers were unlearned that the untrained policy still found."""
HALF = 0.5


# ---- groups without variance --------------------------------------------------------------------------------------


def equal_groups(case: Case) -> Observation | None:
    share = share_equal(case.signals)
    return (
        None
        if share is None
        else Observation(f"the members of {share:.0%} of the groups earn the same", {"groups/zero_variance": share}, 0)
    )


def share_equal(signals: Signals) -> float | None:
    """The part of the groups whose members earned the same, where from the start on that left hardly a gradient."""
    shares = opening(signals["groups/zero_variance"])
    if not len(shares) or shares[0] < HALF or shares.mean() < EQUAL:
        return None
    return float(shares.mean())


def of_one_kind(case: Case, *, best: bool) -> Observation | None:
    """Whether the groups agree because nearly every answer earns the least there is, or the most."""
    rewards = case.opening("reward/mean")
    usual = float(np.median(rewards))
    above, below = float(rewards.max()) - usual, usual - float(rewards.min())
    is_best = below > above or (below == above and usual >= HALF)
    if is_best != best or not agree_by_chance(case):
        return None
    found = case.ask("held_out")
    if found is None:
        return Observation("whether it learned all the same cannot be asked", {"reward/mean": usual})
    if not best and abs(found["after"] - found["before"]) > SURE * found["error"]:
        return None
    words = f"the usual reward is {usual:.3g}; held out, {found['before']:.3g} became {found['after']:.3g}"
    return Observation(words, {"reward/mean": usual, **found})


def agree_by_chance(case: Case) -> bool:
    """Whether independent tries would agree about as often, given how often they earn something."""
    share = float(case.opening("groups/zero_variance").mean())
    product = min(0.25, float(np.mean(case.opening("reward/std") ** 2)))  # p (1 - p) of rewards of 0 and 1
    chance = 0.5 + float(np.sqrt(0.25 - product))
    return share - (chance**PEERS + (1 - chance) ** PEERS) < MORE_ALIKE


def too_hard(case: Case, sign: Observation) -> Observation | None:
    return of_one_kind(case, best=False)


def too_easy(case: Case, sign: Observation) -> Observation | None:
    return of_one_kind(case, best=True)


def one_answer(case: Case, sign: Observation) -> Observation | None:
    """Groups differ from each other and their members do not: a policy that was certain before it learned."""
    entropy = case.opening("policy/entropy")
    certain = float(np.median(entropy)) if len(entropy) else 0.0
    if agree_by_chance(case) or certain > CERTAIN:
        return None
    words = f"groups differ from each other, their members do not; the entropy of what is learned from is {certain:.3g}"
    return Observation(words, {"policy/entropy": certain})


# ---- steps ----------------------------------------------------------------------------------------------------------


def skipped_steps(case: Case) -> Observation | None:
    skipped = case.signals["optim/skipped_steps"] > 0
    if not len(skipped) or np.mean(last(skipped.astype(float))) < SKIPPED:
        return None
    share, step = float(np.mean(last(skipped.astype(float)))), int(np.argmax(skipped))
    return Observation(
        f"{share:.0%} of the last steps had a gradient that is no number", {"optim/skipped_steps": share}, step
    )


def skipped_again(case: Case, sign: Observation) -> Observation | None:
    slower = case.slower
    if isinstance(slower, str):
        return Observation(f"an eighth of the learning rate was not tried: {slower}")
    again = skipped_steps(slower)
    return again and Observation("an eighth of the learning rate: the same again", again.numbers, again.step)


def unlearned(case: Case) -> Observation | None:
    """The policy does worse than before it was trained, or finds less in several tries."""
    found = case.ask("held_out")
    if found is None:
        return None
    words = f"held out, {found['before']:.3g} became {found['after']:.3g}"
    if variety_lost(found):
        words += f", and pass@k {found['pass_before']:.3g} became {found['pass_after']:.3g}"
    elif found["before"] - found["after"] < SURE * found["error"] and case.outcome.end != "diverged":
        return None
    return Observation(words, found, onset(case))


def variety_lost(found: dict[str, float]) -> bool:
    """Whether several tries no longer find what they found before."""
    return found.get("pass_before", 0.0) - found.get("pass_after", 0.0) > PASS_LOST


def onset(case: Case) -> int:
    """The first step from which on half of the reward or of the entropy is gone, or answers are half as long again."""
    steps = [len(case.signals["reward/mean"])]
    for name, sense in (("policy/entropy", -1), ("reward/mean", -1), ("completion/tokens", 1)):
        values = case.signals[name]
        reported = np.flatnonzero(np.isfinite(values))
        if len(reported):
            begin = values[reported[0]]
            since = holds_since(sense * (values[reported] - begin) > HALF * begin)
            steps += [] if since is None else [int(reported[since])]
    return min(steps)


def sound_when_slower(case: Case, sign: Observation) -> Observation | None:
    """What came later than after an eighth of the run would have had no time to come in the slower run."""
    ours = case.ask("held_out")
    if ours is None or sign.step is None or sign.step > SLOWER * len(case.signals["reward/mean"]):
        return None
    slower = case.slower
    if isinstance(slower, str):
        return Observation(f"an eighth of the learning rate was not tried, so this is only likely: {slower}")
    theirs, rewards = slower.ask("held_out"), slower.change("reward/mean")
    if theirs is None or (rewards is not None and rewards.fell):
        return None
    better = theirs["after"] - ours["after"] > SURE * ours["error"]
    varied = theirs.get("pass_after", 0.0) - ours.get("pass_after", 0.0) > PASS_LOST
    unharmed = theirs["before"] - theirs["after"] < SURE * theirs["error"]
    return at_an_eighth(theirs) if unharmed and (better or varied) else None


def falls_when_slower(case: Case, sign: Observation) -> Observation | None:
    ours, rewards = case.ask("held_out"), case.change("reward/mean")
    if ours is None or ours["before"] - ours["after"] < SURE * ours["error"] or rewards is None or not rewards.fell:
        return None
    slower = case.slower
    if isinstance(slower, str):
        return None
    theirs, falling = slower.ask("held_out"), slower.change("reward/mean")
    if theirs is None or falling is None or not falling.fell:
        return None
    tried = at_an_eighth(theirs)
    words = f"{tried.words}; the mean reward of training fell from {falling}, as it did from {rewards}"
    return Observation(words, tried.numbers)


def at_an_eighth(theirs: dict[str, float]) -> Observation:
    words = f"an eighth of the learning rate: held out, {theirs['before']:.3g} became {theirs['after']:.3g}"
    return Observation(words, {f"slower, {name}": value for name, value in theirs.items()})


def certain_too_early(case: Case, sign: Observation) -> Observation | None:
    entropy = case.change("policy/entropy")
    found = case.ask("held_out")
    if entropy is None or found is None or entropy.late > HALF * entropy.early or not entropy.fell:
        return None
    if not variety_lost(found):
        return None
    words = f"the entropy fell from {entropy}, and several tries find less than before the training"
    return Observation(words, {"policy/entropy early": entropy.early, "policy/entropy late": entropy.late}, sign.step)


TOO_HARD = Rule(
    "too_hard",
    equal_groups,
    too_hard,
    "nobody succeeds, so there is nothing to compare: the setting was not tested. Take easier tasks, or larger groups",
)
TOO_EASY = Rule(
    "too_easy",
    equal_groups,
    too_easy,
    "nearly everybody succeeds, so there is nothing to compare: the setting was not tested. Take harder tasks",
)
NO_EXPLORATION = Rule(
    "no_exploration",
    equal_groups,
    one_answer,
    "a group is one answer said several times. Raise the temperature, which the agent may have written down",
)
NOT_A_NUMBER = Rule(
    "not_a_number",
    skipped_steps,
    skipped_again,
    "nothing was learned in these steps, whatever the learning rate: look at the data and at the loss",
)
STEP_TOO_LARGE = Rule(
    "step_too_large",
    unlearned,
    sound_when_slower,
    "the steps broke the policy, not the setting: compare at a lower learning rate",
    asks=("held_out", "after"),
)
WRONG_SIGN = Rule(
    "wrong_sign",
    unlearned,
    falls_when_slower,
    "the policy learns the opposite, at any rate: look at the sign of the reward and of the advantages",
    asks=("held_out", "after"),
)
ENTROPY_COLLAPSE = Rule(
    "entropy_collapse",
    unlearned,
    certain_too_early,
    "the policy became certain of less than it could do. A higher clip_high or a KL term keeps variety",
    asks=("held_out", "pass_after"),
)


LONGER = 2.0
"""Times as many tokens as in the beginning."""
RELATED = 0.3
"""Correlation of the length with what is paid beyond the held-out grade."""
APART = 0.1
"""Of a reward between 0 and 1: less between what is paid and what is held out is not worth a word."""


def rewards_of_run(case: Case) -> Observation | None:
    """Any run that was rewarded: what a judge adds may just hide what the policy lost."""
    rewards = case.change("reward/mean")
    if rewards is None:
        return None
    return Observation(
        f"the mean reward went from {rewards}", {"reward/mean early": rewards.early, "reward/mean late": rewards.late}
    )


def graded_otherwise(case: Case, sign: Observation) -> Observation | None:
    found = case.ask("regrade")
    if found is None:
        return None
    moved = found["again_first"] - found["paid_first"]
    if abs(moved) < max(CLEAR * found["error"], APART):
        return None
    words = f"the first samples graded again: {found['again_first']:.3g}, where {found['paid_first']:.3g} was paid"
    return Observation(words, found)


def longer_answers(case: Case) -> Observation | None:
    length = case.change("completion/tokens")
    if length is None or not length.rose or length.late < LONGER * length.early:
        return None
    words = f"answers went from {length} tokens"
    numbers = {"completion/tokens early": length.early, "completion/tokens late": length.late}
    cut = case.change("completion/truncated")
    if cut is not None:
        words += f", and of them {cut.late:.0%} are cut off, where it was {cut.early:.0%}"
        numbers["completion/truncated"] = cut.late
    return Observation(words, numbers)


def risen_reward(case: Case) -> Observation | None:
    rewards = case.change("reward/mean")
    return rewards_of_run(case) if rewards is not None and rewards.rose else None


def paid_for_more(case: Case, sign: Observation) -> Observation | None:
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
    return Observation(words, found)


def paid_for_length(case: Case, sign: Observation) -> Observation | None:
    tried = paid_for_more(case, sign)
    if tried is None or tried.numbers["length_last"] < RELATED:
        return None
    words = f"{tried.words}; what is paid beyond that goes with the length, r = {tried.numbers['length_last']:.2f}"
    return Observation(words, tried.numbers)


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
