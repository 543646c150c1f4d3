"""1. A verdict agrees if the grid does not exclude it; an open claim agrees if the grid leaves more than one verdict.
2. Grids have eight seeds or more of each level of their topic.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentjet.research.models import Arm, Hypothesis, Metric, Study, Verdict
from bench.published import FOLDER, compared, topics

ALL = ["supported", "refuted", "practically_equivalent"]


@pytest.mark.parametrize(
    ("metric", "a", "b", "right"),
    [
        ("score", [0.1, 0.2, 0.1, 0.2], [0.8, 0.9, 0.8, 0.9], ["supported"]),
        ("score", [0.8, 0.9, 0.8, 0.9], [0.1, 0.2, 0.1, 0.2], ["refuted"]),
        ("score", [0.80, 0.81, 0.80, 0.81], [0.81, 0.80, 0.81, 0.80], ["practically_equivalent"]),
        ("score", [0.5, 0.6, 0.5, 0.6], [0.6, 0.7, 0.6, 0.7], ["supported", "practically_equivalent"]),
        ("score", [0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0], ALL),
        ("seconds", [10.0, 11.0, 10.0, 11.0], [30.0, 33.0, 30.0, 33.0], ["supported"]),
    ],
)
def test_a_verdict_agrees_with_a_grid_that_does_not_exclude_it(
    metric: Metric, a: list[float], b: list[float], right: list[Verdict]
) -> None:
    claim = Hypothesis("b is more than a", "b", "a", metric=metric)
    study = Study("t", "score", 0.05, (Arm("a"), Arm("b")), (claim,), budget=8.0)
    levels = [{str(seed): {"score": value, "seconds": value} for seed, value in enumerate(values)} for values in (a, b)]
    verdicts: list[Any] = [*ALL, "inconclusive"]
    agree = [verdict for verdict in verdicts if compared(study, claim, verdict, levels)["agrees"]]
    assert agree == (right if len(right) == 1 else [*right, "inconclusive"])


@pytest.mark.parametrize("topic", topics(), ids=lambda topic: topic["name"])
def test_a_grid_has_the_levels_of_its_topic(topic: dict[str, Any]) -> None:
    grid = json.loads((FOLDER / f"{topic['name']}.json").read_text())
    assert (grid["topic"], [*grid["levels"]]) == (topic["line"], [*topic["levels"]])
    assert grid["commit"] and grid["date"] and topic["name"] in grid["command"]
    assert all(len(runs) >= 8 for runs in grid["levels"].values())
