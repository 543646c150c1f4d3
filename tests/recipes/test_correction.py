"""Corrections against hand arithmetic, on ratios of 0.4, 0.9, 1.1 and 3."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentjet.recipes.losses import corrected, importance_ratio, vetoed
from agentjet.recipes.registry import make_recipe
from tests.recipes.batches import make_batch, recipe_of

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
    found, counted = corrected(name, importance_ratio(PROXIMAL, BEHAVIOUR), low, high)
    assert found.tolist() == pytest.approx(weight, rel=1e-5)
    assert counted.tolist() == [bool(c) for c in counts]


def test_far_apart_is_finite() -> None:
    far = np.array([-1000.0, 0.0], np.float32)
    rho = importance_ratio(far, far[::-1].copy())
    weight, _ = corrected("mis", rho, 0.5, 2.0)
    assert np.isfinite(weight).all() and weight.tolist() == [0, 0]


def test_bounds_that_exclude_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"correction_low = 1\.5 and correction_high = 2\.0 must lie"):
        make_recipe({"correction": "mis", "correction_low": 1.5})


@pytest.mark.parametrize(
    ("parameters", "bounds"),
    [
        ({"correction": "icepop"}, (0.5, 5.0)),  # arXiv 2510.18855
        ({"correction": "icepop", "correction_high": 2.0}, (0.5, 2.0)),
        ({"correction": "mis"}, (0.5, 2.0)),
        ({"correction": "tis"}, (0.5, 2.0)),
    ],
)
def test_bounds_are_as_published(parameters: dict[str, Any], bounds: tuple[float, float]) -> None:
    recipe = make_recipe(parameters)
    again = make_recipe(recipe.model_dump())
    for one in (recipe, again):
        assert (one.correction_low, one.correction_high) == bounds  # type: ignore[attr-defined]


@pytest.mark.parametrize(("level", "expected"), [("sequence", 1.188), ("geometric", 1.044009)])
def test_levels_above_tokens(level: Any, expected: float) -> None:
    """The product 0.4 x 0.9 x 1.1 x 3, and its fourth root; the other sequence has one token of ratio 3."""
    behaviour, proximal = np.append(BEHAVIOUR, BEHAVIOUR[3]), np.append(PROXIMAL, PROXIMAL[3])
    rho = importance_ratio(proximal, behaviour, np.array([0, 0, 0, 0, 1], np.int32), level)
    assert rho.tolist() == pytest.approx([expected] * 4 + [3.0], rel=1e-5)
    far = np.full(3, 15.0, np.float32)
    assert np.isfinite(importance_ratio(far, -far, np.zeros(3, np.int32), level)).all()


def test_a_veto_is_about_sequences() -> None:
    assert vetoed(RHO, np.array([0, 0, 1, 1], np.int32), 0.5).tolist() == [True, True, False, False]


def of_batch(**parameters: object) -> tuple[list[float], dict[str, float]]:
    """The advantages of two episodes of two tokens, whose ratios are 0.4, 0.9 and 1.1, 3."""
    batch = make_batch([[1, 0]])
    proximal = (batch.forest["logprob"] + np.log(RHO)).astype(np.float32)
    forest, metrics = recipe_of("rloo", **parameters).columns(batch, {"proximal": proximal})
    return forest["advantage"].tolist(), metrics


def test_corrections_of_a_batch() -> None:
    """Products 0.36 and 3.3, geometric means 0.6 and 1.816590."""
    found, _ = of_batch(correction="tis", correction_level="sequence")
    assert found == pytest.approx([0.36, 0.36, -2, -2])
    found, _ = of_batch(correction="icepop", correction_level="sequence", correction_high=4.0)
    assert found == pytest.approx([0, 0, -3.3, -3.3])
    found, _ = of_batch(correction="mis", correction_level="geometric", correction_low=0.7)
    assert found == pytest.approx([-1.816590] * 2)
    found, metrics = of_batch(correction="tis", correction_veto=0.5)
    assert found == pytest.approx([-1.1, -2.0]) and metrics["policy/correction_dropped"] == 0.5
    found, _ = of_batch(correction="tis", correction_high=1.0)  # DART
    assert found == pytest.approx([0.4, 0.9, -1, -1])


def test_a_veto_needs_a_correction() -> None:
    with pytest.raises(ValueError, match=r"correction_veto = 0\.1 needs a correction"):
        make_recipe({"correction_veto": 0.1})
    with pytest.raises(ValueError, match=r"correction_high = 1\.0 must lie"):
        make_recipe({"correction": "mis", "correction_high": 1.0})
