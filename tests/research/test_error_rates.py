"""1. The simulation's rule is the researcher's.
2. `docs/research.md` says what is simulated, and no report says less.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from agentjet.research.report import FIFTH, SIMULATED
from agentjet.research.statistics import nominal_level, read
from bench.error_rates import ALPHA, CLAIMS, INTERESTS, LOOKS, UNEQUAL, called, draw, looked_at, main, single, worst

DOC = Path(__file__).parents[2] / "docs" / "research.md"
SCORES = draw(20_000, seed=1)
"""Other draws than those of the page."""


@pytest.mark.parametrize("unequal", [1.0, 5.0])
def test_the_rule_is_the_researchers(unequal: float) -> None:
    scores = SCORES[:, :300]
    level = nominal_level(LOOKS, 2 * ALPHA)
    found = called(looked_at(scores, unequal, LOOKS), effect=0.9, sesoi=0.2, level=level)
    narrow = np.sqrt(2 / (1 + unequal**2))
    expected = [
        any(
            read(
                list(a[:seeds] * unequal * narrow + 0.9),
                list(b[:seeds] * narrow),
                sesoi=0.2,
                difference_level=level,
                equivalence_level=None,
            ).verdict
            in ("supported", "refuted")
            for seeds in LOOKS
        )
        for a, b in zip(*scores, strict=True)
    ]
    assert found.tolist() == expected
    assert 50 < sum(expected) < 250


def test_the_page_says_what_is_simulated() -> None:
    """To its last digit and the chance of a simulation this small."""
    rows = re.findall(r"^\| (?:equal|(\d+) times apart) \|(.*)\|$", DOC.read_text(encoding="utf-8"), re.MULTILINE)
    written = {float(factor or 1): [cell.strip() for cell in cells.split("|")] for factor, cells in rows}
    rates = single(SCORES)
    assert list(written) == list(UNEQUAL)
    for unequal, cells in written.items():
        assert len(cells) == len(INTERESTS)
        for cell, simulated in zip(cells, rates[unequal], strict=True):
            for said, rate in zip(cell.split(", "), simulated, strict=True):
                assert float(said) == pytest.approx(rate, abs=0.0005 + 3 * np.sqrt(rate / SCORES.shape[1]))


def test_no_report_says_less_than_is_simulated() -> None:
    assert SIMULATED["alpha"] == ALPHA and max(CLAIMS) == SIMULATED["claims"]
    # Chances of ten claims are sums of ten, each a few in a thousand of these studies.
    slack = 3 * np.sqrt(SIMULATED["claims"] * SIMULATED["fine"] / SCORES.shape[1])
    assert ALPHA < worst(SCORES, FIFTH, (1.0,)) * ALPHA <= SIMULATED["even"] + slack
    assert SIMULATED["even"] < worst(SCORES, FIFTH, UNEQUAL) * ALPHA <= SIMULATED["uneven"] + slack
    assert SIMULATED["uneven"] < worst(SCORES, INTERESTS[0], UNEQUAL) * ALPHA <= SIMULATED["fine"] + slack


def test_it_prints_a_table_and_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    result = main(["--studies", "500"])
    assert set(result["single"]) == {f"{unequal:g}" for unequal in UNEQUAL}
    assert capsys.readouterr().out.splitlines()[-1].startswith('{"studies": 500')
