"""Corrections against hand arithmetic, on ratios of 0.4, 0.9, 1.1 and 3."""

from __future__ import annotations

import numpy as np
import pytest

from agentjet.recipes.losses import CORRECTIONS, importance_ratio
from agentjet.recipes.registry import make_recipe

RHO = np.array([0.4, 0.9, 1.1, 3.0])
BEHAVIOUR = np.array([-1.0, -2.0, -0.5, -3.0], np.float32)
PROXIMAL = (BEHAVIOUR + np.log(RHO)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "low", "high", "weight", "counts"),
    [
        ("tis", 0.5, 2.0, [0.4, 0.9, 1.1, 2.0], [1, 1, 1, 1]),
        ("icepop", 0.5, 5.0, [0, 0.9, 1.1, 3], [1, 1, 1, 1]),
        ("mis", 0.5, 2.0, [0, 0.9, 1.1, 0], [0, 1, 1, 0]),
    ],
)
def test_corrections(name: str, low: float, high: float, weight: list[float], counts: list[int]) -> None:
    found, counted = CORRECTIONS[name](importance_ratio(PROXIMAL, BEHAVIOUR), low, high)
    assert found.tolist() == pytest.approx(weight, rel=1e-5)
    assert counted.tolist() == [bool(c) for c in counts]


def test_far_apart_is_finite() -> None:
    far = np.array([-1000.0, 0.0], np.float32)
    rho = importance_ratio(far, far[::-1].copy())
    weight, _ = CORRECTIONS["mis"](rho, 0.5, 2.0)
    assert np.isfinite(weight).all() and weight.tolist() == [0, 0]


def test_bounds_that_exclude_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"correction_low = 1\.5 and correction_high = 2\.0 must lie"):
        make_recipe({"correction": "icepop", "correction_low": 1.5})
