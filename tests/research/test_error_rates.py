"""1. The simulation's rule is the researcher's.
2. `docs/research.md` says what is simulated, and no report says less.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from agentjet.research.campaign.campaign import Campaign
from agentjet.research.campaign.runs import Budget, Question
from agentjet.research.report import FIFTH, SIMULATED
from agentjet.research.statistics import nominal_level, read
from bench.error_rates import (
    ALPHA,
    CLAIMS,
    INTERESTS,
    LOOKS,
    UNEQUAL,
    MemoryNotebook,
    Simulated,
    called,
    conducted,
    draw,
    looked_at,
    main,
    single,
    worst,
)

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
    result = main(["--studies", "500", "--campaigns", "1"])
    assert set(result["single"]) == {f"{unequal:g}" for unequal in UNEQUAL}
    assert capsys.readouterr().out.splitlines()[-1].startswith('{"studies": 500')


def test_a_campaign_seldom_claims_what_is_not_there() -> None:
    """`python -m bench.error_rates` has 1,000 of each. When each study spent alpha, three of these claimed a gain."""
    claims = [conducted(Simulated("spread 0.2"), seed)[0] for seed in range(20)]
    assert not [found for found in claims if "supported" in found]
    assert conducted(Simulated("spread 0.1", 0.3, 1), 0)[1] == 1


def test_earlier_seeds_of_the_base_show_its_spread() -> None:
    """Seeds that learn or do not: four of each arm may agree by chance, and Welch's test is then sure."""
    world = Simulated("bimodal")
    question = Question("t", Budget(runs=200.0), seed=2)
    notebook, whole = MemoryNotebook(), cast(Any, world)
    Campaign(question, notebook, whole, whole, [whole], whole, lambda _: None).run()
    studies = [entry.content["study"] for entry in notebook.of("study")]
    assert len(studies) > 2 and "spread" not in studies[0] and all(study["spread"] > 0.1 for study in studies[1:])
    assert [study["alpha"] for study in studies] == [question.alpha_of(k) for k in range(1, len(studies) + 1)]
    a, b = [0.8, 0.81, 0.79, 0.8], [0.2, 0.21, 0.2, 0.19]
    levels = {"sesoi": 0.05, "difference_level": 0.0066, "equivalence_level": None}
    assert [read(a, b, **levels, spread=spread).verdict for spread in (0.0, 0.3)] == ["supported", "inconclusive"]


def test_shares_of_alpha_add_up() -> None:
    question = Question("t", Budget(runs=60.0))
    for share_of in (question.alpha_of, question.alpha_of_topic):
        shares = [share_of(number) for number in range(1, 10_000)]
        assert sum(shares) == pytest.approx(question.alpha, rel=1e-3) and sum(shares) <= question.alpha
