"""Diagnoses of runs: the rules, and `diagnose`, which applies them to the trials of a study.

A rule has a symptom that lasts, a probe that rules out other causes, and a meaning. A trial gets at most one cause: the
first rule in `RULES` that holds. Rules on settings and tasks come first, because they explain symptoms in the learning.

Thresholds are the same for all studies. They were chosen on planted failures (`bench.researching.planted`) and are
scored with other seeds. A diagnosis does not change a run's score. Only a run whose environment or server died has no
score and is repeated.
"""

from __future__ import annotations

import numpy as np

from agentjet.research import run_signals
from agentjet.research.launcher import TrialLauncher
from agentjet.research.models import Diagnosis
from agentjet.research.probes import SLOWER, Case, Need, Probes, Rule, duplicate_runs
from agentjet.research.run_signals import CLEAR, Observation, Signals, holds_since, last, opening

# ---- settings, tasks and weights -----------------------------------------------------------------------------------

MISMATCH = 0.01
"""Divergence per token between sampler and learner. Rounding causes a thousandth of it."""


def not_taken_up(case: Case) -> Observation | None:
    answer = case.settings
    if answer is None:
        return None
    wrong = {name: value for name, value in case.trial.setting.items() if answer.get(name) != value}
    text = "; ".join(
        f"{name} = {value!r} was requested, but the server had {answer.get(name)!r}" for name, value in wrong.items()
    )
    return Observation(text, {"settings not taken up": float(len(wrong))}) if wrong else None


def asked_server(case: Case, symptom: Observation) -> Observation:
    return Observation("the server reported its settings in effect")


def shared_tasks(case: Case) -> Observation | None:
    counts = case.ask("tasks")
    if counts is None or not counts["shared"]:
        return None
    text = f"{counts['shared']:.0f} of the {counts['held_out']:.0f} held-out tasks are also trained on"
    return Observation(text, {name: counts[name] for name in ("shared", "held_out", "train")})


def compared_tasks(case: Case, symptom: Observation) -> Observation:
    return Observation("the tasks of training and of evaluation were compared")


def diverging_sampler(case: Case) -> Observation | None:
    reported = last(case.signals["policy/mismatch_kl"])
    reported = reported[np.isfinite(reported)]
    if not len(reported) or np.median(reported) < MISMATCH:
        return None
    level = float(np.median(reported))
    return Observation(f"sampler and learner differ by {level:.3g} nats a token", {"policy/mismatch_kl": level})


def unchanged_sampler(case: Case, symptom: Observation) -> Observation | None:
    counts = case.ask("weights")
    if counts is None or counts["sampler"] >= counts["learner"] / 2:
        return None
    text = (
        f"hashes of the weights, before and after each of the last {counts['steps']:.0f} steps: "
        f"the learner's changed in {counts['learner']:.0f}, the sampler's in {counts['sampler']:.0f}"
    )
    return Observation(text, {f"weights/{name}": counts[name] for name in ("steps", "learner", "sampler")})


IGNORED = Rule(
    "ignored_setting",
    not_taken_up,
    asked_server,
    "the run did not use the setting of its arm, so the comparison is void. Correct the name or the value",
    asks=("settings", ""),
)
LEAK = Rule(
    "leak",
    shared_tasks,
    compared_tasks,
    "the score measures memorised tasks, not solved ones. Hold out other tasks",
    asks=("tasks", "shared"),
)
STALE = Rule(
    "stale_weights",
    diverging_sampler,
    unchanged_sampler,
    "an old policy produced the rewarded answers: the run measures the transport of weights, not the setting",
    asks=("weights", "sampler"),
)


# ---- learning -------------------------------------------------------------------------------------------------------

EQUAL = 0.8
"""Share of groups without variance, over the first third of a run, that leaves hardly any gradient."""
PEERS = 4
"""Members of the smallest usual group. Independent tries agree no more often in larger groups."""
MORE_ALIKE = 0.3
"""Agreement beyond chance that marks members as copies of one answer."""
CERTAIN = 0.25
"""Entropy in nats per token below which a policy hardly varies."""
SKIPPED = 0.5
"""Share of the last steps whose gradient was not finite."""
SURE = 3.0
"""Standard errors of a held-out difference."""
PASS_LOST = 0.08
"""Loss of pass@k that counts as unlearned answers."""
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
    """Share of groups whose members earned the same. None if enough groups gave a gradient from the start."""
    shares = opening(signals["groups/zero_variance"])
    if not len(shares) or shares[0] < HALF or shares.mean() < EQUAL:
        return None
    return float(shares.mean())


def of_one_kind(case: Case, *, best: bool) -> Observation | None:
    """Tests if groups agree because nearly every answer earns the lowest reward, or the highest if `best`."""
    rewards = case.opening("reward/mean")
    usual = float(np.median(rewards))
    above, below = float(rewards.max()) - usual, usual - float(rewards.min())
    is_best = below > above or (below == above and usual >= HALF)
    if is_best != best or not agree_by_chance(case):
        return None
    found = case.ask("held_out")
    if found is None:
        return Observation("the runner cannot report held-out scores", {"reward/mean": usual})
    if not best and abs(found["after"] - found["before"]) > SURE * found["error"]:
        return None
    words = f"the usual reward is {usual:.3g}; held out, {found['before']:.3g} became {found['after']:.3g}"
    return Observation(words, {"reward/mean": usual, **found})


def agree_by_chance(case: Case) -> bool:
    """True if independent tries would agree about as often, given their success rate."""
    share = float(case.opening("groups/zero_variance").mean())
    product = min(0.25, float(np.mean(case.opening("reward/std") ** 2)))  # p (1 - p) of rewards of 0 and 1
    chance = 0.5 + float(np.sqrt(0.25 - product))
    return share - (chance**PEERS + (1 - chance) ** PEERS) < MORE_ALIKE


def too_hard(case: Case, symptom: Observation) -> Observation | None:
    return of_one_kind(case, best=False)


def too_easy(case: Case, symptom: Observation) -> Observation | None:
    return of_one_kind(case, best=True)


def one_answer(case: Case, symptom: Observation) -> Observation | None:
    """Groups differ from each other but their members do not: the policy hardly varied before training."""
    entropy = case.opening("policy/entropy")
    certain = float(np.median(entropy)) if len(entropy) else 0.0
    if agree_by_chance(case) or certain > CERTAIN:
        return None
    words = f"groups differ from each other, their members do not; the entropy of the trained tokens is {certain:.3g}"
    return Observation(words, {"policy/entropy": certain})


# ---- steps ----------------------------------------------------------------------------------------------------------


def skipped_steps(case: Case) -> Observation | None:
    skipped = case.signals["optim/skipped_steps"] > 0
    if not len(skipped) or np.mean(last(skipped.astype(float))) < SKIPPED:
        return None
    share, step = float(np.mean(last(skipped.astype(float)))), int(np.argmax(skipped))
    return Observation(
        f"{share:.0%} of the last steps had a gradient that was not finite", {"optim/skipped_steps": share}, step
    )


def skipped_again(case: Case, symptom: Observation) -> Observation | None:
    slower = case.slower
    if isinstance(slower, str):
        return Observation(f"an eighth of the learning rate was not tried: {slower}")
    again = skipped_steps(slower)
    return again and Observation("an eighth of the learning rate: the same again", again.numbers, again.step)


def unlearned(case: Case) -> Observation | None:
    """Symptom: the policy scores lower than before training, or finds less in several tries."""
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
    """True if several tries find fewer answers than before."""
    return found.get("pass_before", 0.0) - found.get("pass_after", 0.0) > PASS_LOST


def onset(case: Case) -> int:
    """First step from which half of the reward or of the entropy is gone, or answers are half as long again."""
    steps = [len(case.signals["reward/mean"])]
    for name, sense in (("policy/entropy", -1), ("reward/mean", -1), ("completion/tokens", 1)):
        values = case.signals[name]
        reported = np.flatnonzero(np.isfinite(values))
        if len(reported):
            begin = values[reported[0]]
            since = holds_since(sense * (values[reported] - begin) > HALF * begin)
            steps += [] if since is None else [int(reported[since])]
    return min(steps)


def sound_when_slower(case: Case, symptom: Observation) -> Observation | None:
    """Compares with the slower run. Later symptoms cannot appear in it, because it covers only an eighth of the
    progress.
    """
    ours = case.ask("held_out")
    if ours is None or symptom.step is None or symptom.step > SLOWER * len(case.signals["reward/mean"]):
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


def falls_when_slower(case: Case, symptom: Observation) -> Observation | None:
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


def certain_too_early(case: Case, symptom: Observation) -> Observation | None:
    entropy = case.change("policy/entropy")
    found = case.ask("held_out")
    if entropy is None or found is None or entropy.late > HALF * entropy.early or not entropy.fell:
        return None
    if not variety_lost(found):
        return None
    words = f"the entropy fell from {entropy}, and several tries find less than before the training"
    return Observation(
        words, {"policy/entropy early": entropy.early, "policy/entropy late": entropy.late}, symptom.step
    )


TOO_HARD = Rule(
    "too_hard",
    equal_groups,
    too_hard,
    "almost no episode succeeds, so the setting was not tested. Use easier tasks or larger groups",
)
TOO_EASY = Rule(
    "too_easy",
    equal_groups,
    too_easy,
    "nearly every episode succeeds, so the setting was not tested. Use harder tasks",
)
NO_EXPLORATION = Rule(
    "no_exploration",
    equal_groups,
    one_answer,
    "a group is one answer repeated. Raise the temperature; the agent may set it itself",
)
NOT_A_NUMBER = Rule(
    "not_a_number",
    skipped_steps,
    skipped_again,
    "these steps learned nothing, at any learning rate: check the data and the loss",
)
STEP_TOO_LARGE = Rule(
    "step_too_large",
    unlearned,
    sound_when_slower,
    "too large steps broke the policy, not the setting: compare at a lower learning rate",
    asks=("held_out", "after"),
)
WRONG_SIGN = Rule(
    "wrong_sign",
    unlearned,
    falls_when_slower,
    "the policy learns the opposite at any learning rate: check the sign of the reward and of the advantages",
    asks=("held_out", "after"),
)
ENTROPY_COLLAPSE = Rule(
    "entropy_collapse",
    unlearned,
    certain_too_early,
    "the policy lost variety and finds fewer answers. A higher clip_high or a KL term preserves variety",
    asks=("held_out", "pass_after"),
)


# ---- rewards --------------------------------------------------------------------------------------------------------

LONGER = 2.0
"""Factor by which answers become longer."""
RELATED = 0.3
"""Correlation of the length with the reward beyond the held-out grade."""
APART = 0.1
"""Smallest gap between training and held-out reward, of rewards from 0 to 1, that is reported."""


def rewards_of_run(case: Case) -> Observation | None:
    """Holds for any run with rewards, because a drifting judge can hide what the policy lost."""
    rewards = case.change("reward/mean")
    if rewards is None:
        return None
    return Observation(
        f"the mean reward went from {rewards}", {"reward/mean early": rewards.early, "reward/mean late": rewards.late}
    )


def graded_otherwise(case: Case, symptom: Observation) -> Observation | None:
    found = case.ask("regrade")
    if found is None:
        return None
    moved = found["again_first"] - found["paid_first"]
    if abs(moved) < max(CLEAR * found["error"], APART):
        return None
    words = f"the first samples graded again: {found['again_first']:.3g}; training paid {found['paid_first']:.3g}"
    return Observation(words, found)


def longer_answers(case: Case) -> Observation | None:
    length = case.change("completion/tokens")
    if length is None or not length.rose or length.late < LONGER * length.early:
        return None
    words = f"answers went from {length} tokens"
    numbers = {"completion/tokens early": length.early, "completion/tokens late": length.late}
    cut = case.change("completion/truncated")
    if cut is not None:
        words += f", and the share of truncated ones from {cut.early:.0%} to {cut.late:.0%}"
        numbers["completion/truncated"] = cut.late
    return Observation(words, numbers)


def risen_reward(case: Case) -> Observation | None:
    rewards = case.change("reward/mean")
    return rewards_of_run(case) if rewards is not None and rewards.rose else None


def paid_for_more(case: Case, symptom: Observation) -> Observation | None:
    """Training pays more for the last samples than for the first ones; the held-out evaluator pays less of a gain."""
    found, held = case.ask("regrade"), case.ask("held_out")
    if found is None:
        return None
    paid, worth = found["paid_last"] - found["paid_first"], found["held_last"] - found["held_first"]
    if paid - worth < max(CLEAR * found["error"], APART):
        return None
    words = (
        f"the same samples by the held-out evaluator: {found['held_first']:.3g} to {found['held_last']:.3g}; training "
        f"paid {found['paid_first']:.3g} to {found['paid_last']:.3g}"
    )
    if held is not None:
        words += f"; held out, {held['before']:.3g} became {held['after']:.3g}"
    return Observation(words, found)


def paid_for_length(case: Case, symptom: Observation) -> Observation | None:
    tried = paid_for_more(case, symptom)
    if tried is None or tried.numbers["length_last"] < RELATED:
        return None
    words = f"{tried.words}; the excess reward correlates with the length, r = {tried.numbers['length_last']:.2f}"
    return Observation(words, tried.numbers)


DRIFTING_JUDGE = Rule(
    "drifting_judge",
    rewards_of_run,
    graded_otherwise,
    "rewards of different steps are not comparable, because the judge changed. Pin its version and its prompt",
    asks=("regrade", "again_first"),
)
LENGTH_EXPLOSION = Rule(
    "length_explosion",
    longer_answers,
    paid_for_length,
    "the reward pays for length. Reward the result only, or compare at equal length",
    asks=("regrade", "held_last"),
)
REWARD_HACKING = Rule(
    "reward_hacking",
    risen_reward,
    paid_for_more,
    "the policy earns the training reward without solving the tasks, so its gains are not real. Fix the grader",
    asks=("regrade", "held_last"),
)


# ---- the diagnosis of a study ---------------------------------------------------------------------------------------

RULES: tuple[Rule, ...] = (
    IGNORED,
    LEAK,
    STALE,
    NOT_A_NUMBER,
    DRIFTING_JUDGE,
    TOO_HARD,
    TOO_EASY,
    NO_EXPLORATION,
    LENGTH_EXPLOSION,
    REWARD_HACKING,
    STEP_TOO_LARGE,
    WRONG_SIGN,
    ENTROPY_COLLAPSE,
)


def causes_needing(need: Need) -> str:
    """Lists the causes that need this answer, for messages."""
    return ", ".join(rule.cause.replace("_", " ") for rule in RULES if rule.asks == need)


def diagnose(launcher: TrialLauncher) -> None:
    """Records the diagnoses that the journal lacks. Lost runs are diagnosed at any length, other causes in full runs
    only.
    """
    trials = sorted(
        (trial for trial in launcher.log.trials.values() if trial.phase != "probe"),
        key=lambda trial: trial.phase != "confirm",  # confirming trials first, while there is budget for probes
    )
    for trial in trials:
        for outcome in launcher.log.outcomes[trial.id]:
            write(launcher, run_signals.lost_run_diagnosis(outcome))
    ended = [(trial, launcher.log.outcomes[trial.id][-1]) for trial in trials if trial.fidelity == 1.0]
    full = [(trial, outcome) for trial, outcome in ended if outcome.signals and outcome.end != "infra_failed"]
    same = {diagnosis.trial: diagnosis for diagnosis in duplicate_runs(full)}
    probes = Probes(launcher)
    for trial, outcome in full:
        write(launcher, apply_rules(Case(trial, outcome, probes)) or same.get(trial.id))


def write(launcher: TrialLauncher, diagnosis: Diagnosis | None) -> None:
    if diagnosis is not None and diagnosis not in launcher.log.diagnoses.get(diagnosis.trial, []):
        launcher.log.append("diagnosis", diagnosis.to_json())


def apply_rules(case: Case) -> Diagnosis | None:
    """Returns the diagnosis of the first rule that holds."""
    for rule in RULES:
        symptom = rule.symptom(case)
        tried = symptom and rule.probe(case, symptom)
        if symptom and tried:
            return Diagnosis(
                case.trial.id,
                rule.cause,
                symptom.words,
                tried=tried.words,
                meaning=rule.meaning,
                step=symptom.step,
                evidence={**symptom.numbers, **tried.numbers},
            )
    return None
