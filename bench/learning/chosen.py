"""The recipes that are measured, with the parameters that the small worlds need, and whether rewards rose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentjet.recipes import registry
from agentjet.recipes.recipe import Recipe
from agentjet.recipes.registry import make_recipe

TEACHER = "TEACHER"
"""In parameters: the folder of a model that earns more reward."""
PARAMETERS: dict[str, dict[str, Any]] = {
    "distill": {"teacher": TEACHER},
    "pass_rate": {"retest": 1},  # The worlds have few tasks, which are all passed or failed at some time.
    "rapo_pruning": {"retest": 1},
    "rft": {"threshold": 0.5},  # The worlds' rewards are shares: few episodes reach 1.
    "staged": {"stages": ["early", "late"], "ends": [8]},
}
"""By recipe, where its defaults are for other rewards or lengths than those of the worlds."""
LONGER = {"digirl": 3}
"""How many times the batches of the other recipes a served run has: its critic of single steps must learn first."""
EXCUSED: dict[str, str] = {}
"""Why a recipe need not learn in these worlds, by name."""
Z = 1.96
"""Half the width of the interval, in standard errors: 95%."""


def names() -> list[str]:
    """Returns all recipes that are registered: the built-in ones and those of installed packages."""
    return sorted({*registry.built_in(), *registry.installed()})


def settings(name: str, teacher: Path | None = None, **more: object) -> dict[str, Any]:
    """Returns the section `[job.recipe]` of a recipe in these worlds."""
    own = {key: str(teacher) if value == TEACHER else value for key, value in PARAMETERS.get(name, {}).items()}
    return {"name": name, **own, **more}


def chosen(name: str, teacher: Path | None = None, **more: object) -> Recipe:
    return make_recipe(settings(name, teacher, **more))


def rise(batches: Sequence[Sequence[float]], share: float = 0.25) -> dict[str, float]:
    """Returns the mean reward of the first and of the last batches, and the interval's half-width of the difference.

    `share` is the share of the batches at either end.
    """
    count = max(1, round(share * len(batches)))
    first, last = (np.concatenate([np.asarray(b, float) for b in part]) for part in (batches[:count], batches[-count:]))
    error = np.sqrt(first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last))
    return {
        "first": round(float(first.mean()), 4),
        "last": round(float(last.mean()), 4),
        "interval": round(float(Z * error), 4),
    }


def has_risen(found: dict[str, float]) -> bool:
    """True if the reward rose by more than the interval."""
    return found["last"] - found["first"] > found["interval"]
