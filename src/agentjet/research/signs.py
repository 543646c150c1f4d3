"""Signs: conditions on the facts of a run. A row of `diagnosis.toml` or of `campaign/remedies.toml` is a sign.

Facts are numbers by name. A fact that is not known fulfils no condition.
"""

from __future__ import annotations

import operator
import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files as package_files
from typing import Any

from pydantic import BaseModel, ConfigDict

OPERATORS: Mapping[str, Callable[[float, float], bool]] = {">": operator.gt, "<": operator.lt}
Facts = Mapping[str, float]


class SignRule(BaseModel):
    """A row of a table of signs, which documents the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cause: str
    when: tuple[str, ...]
    meaning: str
    seen: str = ""
    noisy: bool = False

    def holds(self, facts: Facts) -> bool:
        """True if all conditions hold: each is `NAME > NUMBER` or `NAME < NUMBER`."""
        conditions = [text.split() for text in self.when]
        return all(name in facts and OPERATORS[sense](facts[name], float(number)) for name, sense, number in conditions)

    def evidence(self, facts: Facts) -> dict[str, float]:
        """The facts in its conditions."""
        return {name: facts[name] for name in (text.split()[0] for text in self.when)}


def toml_of(package: str, name: str) -> dict[str, Any]:
    """The content of a table that is part of a package."""
    return tomllib.loads(package_files(package).joinpath(name).read_text(encoding="utf-8"))
