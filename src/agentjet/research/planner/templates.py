"""A template for each kind of question: its arms, its claims, and what every arm tunes first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from agentjet.errors import ConfigError
from agentjet.research.models import Arm, Setting, Sign, Value
from agentjet.research.planner.priors import base_value, knob, priors, rounded
from agentjet.research.planner.topics import Mention, ParsedTopic


@dataclass(frozen=True)
class Claim:
    """The claim that `arm` scores higher than `against`, with the expectation."""

    arm: str
    against: str
    sign: Sign
    """Sign of the expected difference. A claim with "-" is turned into one with "+"."""
    why: str = ""
    reference: str = ""
    confirmatory: bool = True


@dataclass
class PlanDraft:
    """Arms, claims and notes that a template made of a question."""

    arms: list[Arm] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def tune(self, names: list[str], base: Setting) -> None:
        """Adds knobs to every arm, except for settings that the arm sets."""
        self.arms = [
            Arm(arm.name, arm.changes, tuple(knob(name, base) for name in names if name not in arm.changes), arm.code)
            for arm in self.arms
        ]


REMEDIES: tuple[tuple[str, Setting, str], ...] = (
    (
        "higher clip",
        {"job.recipe.loss.clip_high": 0.28},
        "unlikely tokens may rise: against a collapse of the entropy",
    ),
    (
        "kl penalty",
        {"job.recipe.kl_coef": 0.02},
        "holds on to the starting policy: against drift and hacked rewards",
    ),
    ("corrected", {"job.recipe.correction": "tis"}, "against samples that are not the learner's own"),
    ("refilled groups", {"job.recipe.drop_zero_variance": True}, "against batches that teach nothing"),
)
"""Remedies for failing training, besides a third of the learning rate."""


def draft_plan(understood: ParsedTopic, base: Setting) -> PlanDraft:
    """Applies the template. `base` holds the settings that are not defaults. Raises `ConfigError` if nothing can be
    compared.
    """
    makers = {
        "sweep": sweep,
        "ablation": ablation,
        "a_against_b": a_against_b,
        "scaling": scaling,
        "diagnosis": diagnosis,
        "reward_shaping": reward_shaping,
    }
    conditions, notes = conditions_of(understood, base)
    found = makers[understood.kind](understood, {**base, **conditions})
    found.notes += notes
    for name, value in conditions.items():
        varies = any(arm.changes.get(name, value) != value for arm in found.arms)
        found.notes.append(f"{name} = {value} in all arms{', except where an arm sets it' if varies else ''}")
    found.arms = [
        replace(
            arm,
            changes={**conditions, **arm.changes},
            nuisance=tuple(knob for knob in arm.nuisance if knob.name not in conditions),
        )
        for arm in found.arms
    ]
    return found


def conditions_of(understood: ParsedTopic, base: Setting) -> tuple[dict[str, Value], list[str]]:
    """Returns the settings given for all arms, and a note for each one with an unclear value."""
    given: dict[str, list[Value]] = {}
    for mention in understood.mentions:
        if mention.given:
            given.setdefault(mention.setting, []).extend(
                [without_it(mention.setting)] if mention.absent else values_of(mention, base)
            )
    for name, values in given.items():
        prior = priors()[name]
        if not values and (prior.switch or prior.on is not None):
            values.append(with_it(name, base))
    plain = {name: values[0] for name, values in given.items() if len(set(values)) == 1}
    return plain, [beside(name, ", ".join(understood.settings) or "a remedy") for name in given if name not in plain]


def values_of(mention: Mention, base: Setting) -> list[Value]:
    """Returns the values that a mention names. Raises `ConfigError` for a multiple that the setting cannot have."""
    prior, name = priors()[mention.setting], mention.setting
    values: list[Value] = [mention.choice] if mention.choice else []
    for amount in mention.amounts:
        assert amount.value is not None, "malformed numbers are refused by the parser"
        value = amount.value
        if amount.is_multiple:
            if not prior.is_number:
                raise ConfigError(f"{name}: it cannot be multiplied by {value:g}; name the values to compare")
            value = rounded(value * number(base_value(name, base)), 3)
        if reason := prior.refusal(name, value):
            raise ConfigError(reason)
        values.append(prior.typed(value))
    return values


def options_of(understood: ParsedTopic, base: Setting) -> dict[str, list[Value]]:
    """By setting in question, the named values."""
    options: dict[str, list[Value]] = {name: [] for name in understood.settings}
    for mention in understood.asked:
        options[mention.setting] += values_of(mention, base)
    return options


def sweep(understood: ParsedTopic, base: Setting) -> PlanDraft:
    """Compares the present values with tuned ones."""
    names = understood.settings
    fixed = {name: base_value(name, base) for name in names}
    tuned = Arm("tuned", {}, tuple(knob(name, base) for name in names))
    claim = Claim("tuned", "present", "+", "the best of several values is chosen, and judged on fresh seeds")
    return PlanDraft([Arm("present", fixed), tuned], [claim])


def ablation(understood: ParsedTopic, base: Setting) -> PlanDraft:
    """Compares all parts with all but one."""
    options = options_of(understood, base)
    names = list(options)
    for name, values in options.items():
        if len(values) > 1:
            raise ConfigError(f"{name}: an ablation takes one value away, and {len(values)} are named; name one")
    whole = {name: values[0] if values else with_it(name, base) for name, values in options.items()}
    everything = Arm("all", whole)
    found = PlanDraft([everything])
    for name in names:
        part = Arm(f"no {priors()[name].says[0]}", {**whole, name: without_it(name)})
        found.arms.append(part)
        found.claims.append(claim_of(name, everything, part))
    found.tune(tuned_with(names), base)
    return found


def a_against_b(understood: ParsedTopic, base: Setting) -> PlanDraft:
    """Compares the named values. A single one is compared with the present value, a part with its absence."""
    options = options_of(understood, base)
    if understood.rivals and len(options) > 1 and all(len(values) < 2 for values in options.values()):
        return part_against_part(options, base)
    name, values = max(options.items(), key=lambda item: len(item[1]))
    prior = priors()[name]
    found = PlanDraft(notes=not_varied(options, name))
    if not values and (prior.switch or prior.off is not None):
        part = Arm(f"with {prior.says[0]}", {name: with_it(name, base)})
        found.arms = [part, Arm("without", {name: without_it(name)})]
        found.claims = [claim_of(name, *found.arms)]
    else:
        found.arms = arms_of(name, compared(name, values, base), base, found)
        first, *others = found.arms
        found.claims = [claim_of(name, *((other, first) if prior.is_number else (first, other))) for other in others]
    found.tune(tuned_with([name]), base)
    return found


def compared(name: str, values: list[Value], base: Setting) -> list[Value]:
    """Returns at least two values, numbers in rising order. Adds the present value or all choices if too few are
    named.
    """
    prior = priors()[name]
    present = base_value(name, base)
    if len(values) > 1 and len(set(values)) == 1:
        raise ConfigError(f"{name}: {values[0]} and {values[1]} are equal; name two values, such as '{example(name)}'")
    if values == [present] and not prior.choices:
        raise ConfigError(f"{name}: {present} is its present value; name another one, such as '{example(name)}'")
    if not values:
        values = [*prior.choices]
    elif values == [present]:
        values += [choice for choice in prior.choices if choice != present][:1]
    elif len(values) == 1:
        values.append(present)
    if len(set(values)) < 2:
        raise ConfigError(f"{name}: name the values to compare, such as '{example(name)}'")
    return sorted(set(values), key=number) if prior.is_number else list(dict.fromkeys(values))


def part_against_part(options: dict[str, list[Value]], base: Setting) -> PlanDraft:
    """Compares several alternatives, each without the others."""
    found = PlanDraft()
    for name, values in options.items():
        off = {other: without_it(other) for other in options if other != name}
        found.arms.append(Arm(priors()[name].says[0], {name: values[0] if values else with_it(name, base), **off}))
    first, *others = found.arms
    found.claims = [Claim(first.name, other.name, "?") for other in others]
    found.tune(tuned_with(list(options)), base)
    return found


def scaling(understood: ParsedTopic, base: Setting) -> PlanDraft:
    """Compares each value with the next smaller one."""
    name = understood.settings[0]
    prior = priors()[name]
    found = PlanDraft(notes=not_varied(understood.settings, name))
    found.arms = arms_of(name, [prior.typed(value) for value in prior.tried(base_value(name, base))], base, found)
    found.claims = [claim_of(name, more, less) for less, more in pairwise(found.arms)]
    found.tune(tuned_with([name]), base)
    return found


def arms_of(name: str, values: list[Value], base: Setting, found: PlanDraft) -> list[Arm]:
    """Returns an arm per value, at an equal number of samples. Raises `ConfigError`."""
    arms = []
    for value in values:
        changes: dict[str, Value] = {name: value, **{span: base_value(span, base) for span in priors()[name].spans}}
        for held in priors()[name].hold:
            share = number(base_value(held, base)) * number(base_value(name, base)) / number(value)
            changes[held] = int(share)
            if share != int(share) or share < 1:
                found.notes.append(f"{name} = {value} is left out: {held} would have to be {share:g}")
                break
        else:
            arms.append(Arm(value if isinstance(value, str) else f"{value:g}", changes))
    if len(arms) < 2:
        reason = "; ".join(found.notes) or "one value alone"
        raise ConfigError(f"{name}: {reason}: name two that can be compared, such as '{example(name)}'")
    return arms


def diagnosis(understood: ParsedTopic, base: Setting) -> PlanDraft:
    """Compares the present settings with single remedies. Nothing is tuned, because the learning rate is a remedy."""
    rate = number(base_value("job.optimizer.lr", base))
    lower = {"job.optimizer.lr": float(f"{rate / 3:.2g}")}
    remedies = (("lower rate", lower, "most runs that go wrong step too far"), *REMEDIES)
    found = PlanDraft([Arm("as it is")])
    for label, changes, why in remedies:
        if any(base_value(name, base) != value for name, value in changes.items()):
            found.arms.append(Arm(label, changes))
            found.claims.append(Claim(label, "as it is", "?", why))
    return found


def reward_shaping(understood: ParsedTopic, base: Setting) -> PlanDraft:
    raise ConfigError(
        "the agent returns the reward, so no setting of the server changes it: name the agent of each arm in a "
        "file, --space space.toml; all arms are scored by the same evaluator"
    )


# ---- parts ----------------------------------------------------------------------------------------------------------


def with_it(name: str, base: Setting) -> Value:
    """Returns the value that turns the setting on: the present one, unless it is off."""
    prior, present = priors()[name], base_value(name, base)
    if prior.switch:
        return True
    if prior.on is None:
        raise ConfigError(
            f"{name} is neither present nor absent; name the values to compare, such as '{example(name)}'"
        )
    return present if present != prior.off else prior.typed(prior.on)


def without_it(name: str) -> Value:
    prior = priors()[name]
    if prior.switch:
        return False
    if prior.off is None:
        raise ConfigError(f"{name}: it cannot be turned off; name the values to compare, such as '{example(name)}'")
    return prior.typed(prior.off)


def example(name: str) -> str:
    prior = priors()[name]
    tried = prior.tried(base_value(name, {})) or (prior.off, prior.on)
    options = list(prior.choices) or [f"{number(value):g}" for value in tried if value is not None]
    return f"{prior.says[0]}: {options[0]} vs {options[1]}"


def claim_of(name: str, more: Arm, less: Arm) -> Claim:
    """Returns the expectation for the first arm, which has the setting or more of it."""
    prior = priors()[name]
    if prior.sign == "-":
        more, less = less, more
    return Claim(more.name, less.name, "+" if prior.sign == "-" else prior.sign, prior.why, prior.reference)


def not_varied(names: Iterable[str], name: str) -> list[str]:
    """Notes for mentioned settings that the plan does not compare."""
    return [beside(other, name) for other in names if other != name]


def beside(other: str, name: str) -> str:
    return (
        f"{other} is not varied, because one setting is compared at a time, here {name}; set it for all arms with "
        "--set, or name the arms in a file, --space space.toml"
    )


def tuned_with(names: list[str]) -> list[str]:
    return list(dict.fromkeys(tuned for name in names for tuned in priors()[name].tune))


def number(value: Value) -> float:
    assert not isinstance(value, str)
    return float(value)
