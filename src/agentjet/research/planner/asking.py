"""Which settings of an arm are tried, where its knobs have too many combinations to try them all.

Optuna proposes and forgets: each time its sampler is made anew from the scores that came back and a seed of the event,
so there is no second record beside the journal, and a study that is resumed is proposed the same. It knows the knobs
as positions on their ladders of values, so that a range and a list are the same to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod

from agentjet.research.models import Arm, Setting, Study, canonical

WHOLE = 16
"""Up to so many combinations, all of them are candidates."""
FIRST = 8
"""Candidates that are drawn before anything is known."""
ROUNDS, EACH = 4, 4
"""Times that more are proposed from the scores so far, and how many: on a smooth hill of three knobs the best of these
24 is half as far from the top as the best of 24 drawn at random."""


def is_searched(arm: Arm) -> bool:
    """Whether the arm's knobs have more combinations than are tried."""
    return prod(len(knob.values) for knob in arm.nuisance) > WHOLE


def proposed(study: Study, arm: Arm, known: Sequence[tuple[Setting, float]]) -> list[Setting]:
    """The next candidates, all different and none of them known. The same arguments give the same ones.

    `known` are the candidates so far with their scores, higher is better; minus infinity is that of a lost run.
    """
    import optuna

    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        knob.name: optuna.distributions.IntDistribution(0, len(knob.values) - 1) for knob in arm.nuisance
    }
    sampler = optuna.samplers.TPESampler(seed=event_seed(study, arm, len(known)), n_startup_trials=FIRST)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search = optuna.create_study(direction="maximize", sampler=sampler)
    for setting, score in known:
        if score > float("-inf"):
            positions = {knob.name: knob.values.index(float(setting[knob.name])) for knob in arm.nuisance}
            search.add_trial(optuna.trial.create_trial(value=score, params=positions, distributions=distributions))
    seen = {canonical(dict(setting)) for setting, _ in known}
    found: list[Setting] = []
    wanted = EACH if known else FIRST
    for _ in range(20 * wanted):  # a sampler may say the same again
        positions = search.ask(distributions).params
        setting = {**arm.changes, **{knob.name: knob.values[positions[knob.name]] for knob in arm.nuisance}}
        if canonical(setting) not in seen:
            seen.add(canonical(setting))
            found.append(setting)
        if len(found) == wanted:
            break
    return found


def event_seed(study: Study, arm: Arm, num_known: int) -> int:
    """32 bits. Arms that tune the same knobs begin with the same candidates."""
    knobs = [knob.to_json() for knob in arm.nuisance]
    name = canonical([study.id, "asking", knobs, num_known])
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
