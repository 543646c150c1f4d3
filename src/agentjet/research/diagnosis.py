"""Diagnoses of the runs of a study: the facts of a run, and the causes that hold in it (`diagnosis.toml`).

A row of that table, or of `campaign/remedies.toml`, is a sign: conditions on facts, which are numbers by name. A fact
that is not known fulfils no condition.

A trial gets at most one cause. A diagnosis does not change a run's score, and no verdict depends on it. Only a run
whose environment or server died has no score and is repeated.

`Outcome.facts` has what a runner reports beside the signals, as far as it is known:

* `tasks_held_out`, `tasks_shared`: held-out tasks, and those of them that are also trained on.
* `held_out_before`, `held_out_after`, `held_out_error`: the metric before and after training, and the standard error of
  their difference.
* `learner_changes`, `sampler_changes`: steps of the last third in which the hash of the weights changed, and the share
  of these in which the sampler's changed too.
"""

from __future__ import annotations

import operator
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files as package_files
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import field_validator

from agentjet.research.journal import StudyLog
from agentjet.research.models import Declared, Diagnosis, Outcome, Trial, canonical, of_server

# ---- signals ---------------------------------------------------------------------------------------------------------

PLAYS = "held_out/plays"
FAILED = "held_out/failed"
MANY_FAILED = 0.1
"""Above this share of failed episodes the verdict carries a note, because the score may come from a selection."""
Floats = NDArray[np.float64]
FEWEST = 3
"""Minimum steps that a symptom lasts."""


class Signals(dict[str, Floats]):
    """Arrays (T,) by name: NaN for a step without a value, empty for a signal that was never reported."""

    def __init__(self, reported: Mapping[str, Sequence[float | None]]) -> None:
        super().__init__(
            (name, np.array([np.nan if value is None else value for value in values], np.float64))
            for name, values in reported.items()
        )

    def __missing__(self, name: str) -> Floats:
        return np.empty(0)


def opening(values: Floats) -> Floats:
    """Finite values in the first third of the run."""
    values = values[: len(values) // 3]
    return values[np.isfinite(values)]


def last(values: Floats) -> Floats:
    """The last third."""
    return values[-max(FEWEST, len(values) // 3) :]


def holds_since(holds: NDArray[np.bool_]) -> int | None:
    """First step from which the condition holds to the end. None if that is shorter than a ninth of the run."""
    broken = np.flatnonzero(~holds)
    begin = int(broken[-1]) + 1 if len(broken) else 0
    return begin if len(holds) - begin >= max(FEWEST, len(holds) // 9) else None


class HeldOutCounts(NamedTuple):
    """Number of held-out episodes, and of those that failed."""

    num: int = 0
    failed: int = 0

    @property
    def share(self) -> float:
        return self.failed / self.num if self.num else 0.0


def held_out_counts(outcomes: Iterable[Outcome]) -> HeldOutCounts:
    """Counts of the last evaluations, which are the scores."""
    ended = list(outcomes)
    num, failed = (
        sum(int((outcome.signals.get(name) or (0,))[-1] or 0) for outcome in ended) for name in (PLAYS, FAILED)
    )
    return HeldOutCounts(num, failed)


# ---- causes ----------------------------------------------------------------------------------------------------------

OPERATORS: Mapping[str, Callable[[float, float], bool]] = {">": operator.gt, "<": operator.lt}
Facts = Mapping[str, float]


class SignRule(Declared):
    """A row of a table of signs, which documents the fields."""

    cause: str
    when: tuple[tuple[str, Literal[">", "<"], float], ...]
    meaning: str
    seen: str = ""
    noisy: bool = False

    @field_validator("when", mode="before")
    @classmethod
    def _parsed(cls, texts: Sequence[str]) -> list[list[str]]:
        """Each is `NAME > NUMBER` or `NAME < NUMBER`."""
        return [text.split() for text in texts]

    def holds(self, facts: Facts) -> bool:
        """True if all conditions hold."""
        return all(name in facts and OPERATORS[sense](facts[name], number) for name, sense, number in self.when)

    def evidence(self, facts: Facts) -> dict[str, float]:
        """The facts in its conditions."""
        return {name: facts[name] for name, _, _ in self.when}


def toml_of(package: str, name: str) -> dict[str, Any]:
    """The content of a table that is part of a package."""
    return tomllib.loads(package_files(package).joinpath(name).read_text(encoding="utf-8"))


RULES = tuple(map(SignRule.model_validate, toml_of("agentjet.research", "diagnosis.toml")["sign"]))
PEERS = 4
"""Members of the smallest usual group. Independent tries agree no more often in larger groups."""
TIMED = ("time/", "perf/")
"""Signals that differ between equal runs."""
TELLING = 8
"""Distinct numbers that two runs must share to count as equal."""


DEAD = "dead_environment"
SERVER = "server_lost"
DEAD_RULES = tuple(rule for rule in RULES if rule.cause == DEAD)


def diagnose(log: StudyLog) -> None:
    """Records the diagnoses that the journal lacks. Short runs get one only if they were lost."""
    ended = [(trial, outcome) for trial in log.trials.values() for outcome in log.outcomes[trial.id]]
    full = [(t, o) for t, o in ended if t.fidelity == 1.0 and o.signals and o.score is not None]
    equal = equal_runs(full)
    found: list[Diagnosis | None] = [
        lost_run_diagnosis(outcome) for _, outcome in ended if outcome.end == "infra_failed"
    ]
    found += [diagnosis_of(trial, outcome) or equal.get(trial.id) for trial, outcome in full]
    for diagnosis in found:
        if diagnosis is not None and diagnosis not in log.diagnoses.get(diagnosis.trial, []):
            log.entry("diagnosis", diagnosis.to_json())


def first_of(rules: Sequence[SignRule], trial: str, facts: Facts, ignored: str = "") -> Diagnosis | None:
    """The first cause that holds."""
    rule = next((rule for rule in rules if rule.holds(facts)), None)
    if rule is None:
        return None
    return Diagnosis(trial, rule.cause, rule.seen.format(**facts, settings=ignored), rule.meaning, rule.evidence(facts))


def diagnosis_of(trial: Trial, outcome: Outcome) -> Diagnosis | None:
    """The diagnosis of a full run with a score."""
    ignored = "; ".join(
        f"{name} = {value!r} was requested, but the server had {outcome.settings.get(name)!r}"
        for name, value in ignored_settings(trial, outcome).items()
    )
    return first_of(RULES, trial.id, facts_of(trial, outcome), ignored)


def ignored_settings(trial: Trial, outcome: Outcome) -> dict[str, object]:
    asked = of_server(trial.setting)
    return {name: value for name, value in asked.items() if outcome.settings.get(name) != value}


def facts_of(trial: Trial, outcome: Outcome) -> dict[str, float]:
    """The facts of a run that are known."""
    signals, found = Signals(outcome.signals), dict(outcome.facts)
    if outcome.settings:
        found["settings_ignored"] = float(len(ignored_settings(trial, outcome)))
    mismatch = last(signals["policy/mismatch_kl"])
    if np.isfinite(mismatch).any():
        found["mismatch_kl"] = float(np.nanmedian(mismatch))
    skipped = last(signals["optim/skipped_steps"])
    if len(skipped):
        found["skipped_steps"] = float(np.mean(skipped > 0))
    if "held_out_error" in found:
        gain = found["held_out_after"] - found["held_out_before"]
        found["held_out_gain"] = gain / max(found["held_out_error"], 1e-9)
    return found | equal_group_facts(signals)


def equal_group_facts(signals: Signals) -> dict[str, float]:
    """Facts of the first third about groups whose members earn the same, so that they give no gradient."""
    equal, rewards, spread, entropy = (
        opening(signals[name]) for name in ("groups/zero_variance", "reward/mean", "reward/std", "policy/entropy")
    )
    if not len(equal) or not len(rewards) or not len(spread):
        return {}
    usual = float(np.median(rewards))
    above, below = float(rewards.max()) - usual, usual - float(rewards.min())
    return {
        "equal_groups_first": float(equal[0]),
        "equal_groups": float(equal.mean()),
        "agreement_beyond_chance": float(equal.mean()) - agreement_by_chance(spread),
        "usual_is_best": float(below > above or (below == above and usual >= 0.5)),
        "entropy": float(np.median(entropy)) if len(entropy) else 0.0,
    }


def agreement_by_chance(spread: Floats) -> float:
    """Share of groups that agree if their members succeed or fail independently, given the deviation of rewards."""
    product = min(0.25, float(np.mean(spread**2)))  # p (1 - p) of rewards of 0 and 1
    chance = 0.5 + float(np.sqrt(0.25 - product))
    return chance**PEERS + (1 - chance) ** PEERS


def had_nothing_to_learn(outcome: Outcome) -> bool:
    """True if hardly any group gave a gradient from the start."""
    facts = equal_group_facts(Signals(outcome.signals))
    return facts.get("equal_groups_first", 0.0) >= 0.5 and facts["equal_groups"] >= 0.8


# ---- equal runs -----------------------------------------------------------------------------------------------------


def equal_runs(runs: Iterable[tuple[Trial, Outcome]]) -> dict[str, Diagnosis]:
    """By trial, a diagnosis of each run whose numbers all equal those of an earlier one."""
    seen: dict[str, Trial] = {}
    found = {}
    for trial, outcome in runs:
        reported = {name: values for name, values in outcome.signals.items() if not name.startswith(TIMED)}
        if len({value for values in reported.values() for value in values}) < TELLING:
            continue
        other = seen.setdefault(canonical([reported, trial.fidelity]), trial)
        if other is not trial:
            found[trial.id] = equal_run(trial, other)
    return found


def equal_run(trial: Trial, other: Trial) -> Diagnosis:
    """The diagnosis of a run whose numbers are those of another trial, with another seed or another setting."""
    names = sorted(n for n in {*trial.setting, *other.setting} if trial.setting.get(n) != other.setting.get(n))
    if trial.seed != other.seed:
        cause, differ = "duplicated_seed", f"of seed {other.seed}, and this one has {trial.seed}"
        meaning = "two seeds gave the same run, so the verdict is too certain. Check how seeds are set"
    else:
        cause, differ = "no_op", f"of {other.arm!r}; they differ in {names}"
        meaning = "the two arms are equal: the setting in which they differ is not used, and was not tested"
    return Diagnosis(trial.id, cause, f"every number of the run is that of trial {other.id} {differ}", meaning)


# ---- lost runs ------------------------------------------------------------------------------------------------------

LOST_SHARE = 0.5
"""Share of lost episodes that marks a dead environment; a flaky one loses a few."""
JUMP = 5.0
"""Standard errors by which a step's mean reward falls at once."""
UNEVEN = 0.5
"""Share of the mean length. If lengths of answers vary by more between steps, the policy has changed."""


def with_dead_environment(outcome: Outcome) -> Outcome:
    """Returns the outcome, as `infra_failed` if its environment died during the run."""
    dead = first_of(DEAD_RULES, outcome.trial, environment_facts(Signals(outcome.signals)))
    if dead is None or outcome.score is None:
        return outcome
    note = "; ".join(filter(None, [f"{DEAD}: {dead.seen}", outcome.note]))
    return replace(outcome, end="infra_failed", score=None, curve=(), note=note)


def lost_run_diagnosis(outcome: Outcome) -> Diagnosis:
    """The diagnosis of a run that the infrastructure lost."""
    steps = max(map(len, outcome.signals.values()), default=0)
    return first_of(DEAD_RULES, outcome.trial, environment_facts(Signals(outcome.signals))) or Diagnosis(
        outcome.trial,
        SERVER,
        f"the run ended after {steps} steps: {outcome.note or 'no reason was given'}",
        "the run is not a result about its setting. Check the server's log",
    )


def environment_facts(signals: Signals) -> dict[str, float]:
    """Facts about a dead environment; none if it lives."""
    return lost_episode_facts(signals) | equal_reward_facts(signals)


def lost_episode_facts(signals: Signals) -> dict[str, float]:
    """Facts if many started episodes never end, up to the end of the run."""
    came, gone = signals["batch/episodes"], signals["episodes/expired"] + signals["episodes/aborted"]
    if not len(came) or len(came) != len(gone):
        return {}
    share = np.nan_to_num(gone / np.maximum(gone + came, 1))
    step = holds_since(share >= LOST_SHARE)
    return {} if step is None else {"lost_since": float(step), "lost_episodes": float(share[step:].mean())}


def equal_reward_facts(signals: Signals) -> dict[str, float]:
    """Facts if every episode earns the same from one step to the next, while the policy's answers stay as long as
    before. A ruined policy also earns nothing, but its answers change.
    """
    rewards, spread, length = (signals[name] for name in ("reward/mean", "reward/std", "completion/tokens"))
    episodes = signals["batch/episodes"]
    if not len(rewards) or not len(rewards) == len(spread) == len(length) == len(episodes):
        return {}
    step = holds_since((spread == 0) & (rewards == rewards[-1]))
    if step is None or step < FEWEST:
        return {}
    fall, error = rewards[step - 1] - rewards[step], spread[step - 1] / np.sqrt(episodes[step - 1])
    around = length[step - FEWEST : step + FEWEST]
    if fall <= JUMP * error or np.ptp(around) > UNEVEN * around.mean():
        return {}
    return {"equal_since": float(step), "reward_before": float(rewards[step - 1]), "reward_since": float(rewards[step])}
