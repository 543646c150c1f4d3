"""1. A literal number is refused, in digits of any script and as a word; so is an unknown reference.
2. A claim needs the matching verdict of every finding in its sentence, and a word for exploratory ones.
3. Narration has no markup, is recorded only if it is clean, and is plain text in the report.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from agentjet.errors import ConfigError
from agentjet.research.journal import StudyLog
from agentjet.research.report import build, check, facts_of, narrate
from agentjet.research.report.document import lint, lint_narration
from agentjet.research.scheduler import conduct
from tests.research.reported import RICH, Told, rich_book

FACTS = facts_of(rich_book())  # F1 supported, F2 refuted, F3 equivalent, F4 inconclusive, F5 supported and exploratory


@pytest.mark.parametrize(
    "prose",
    [
        "{{F1.arm}} scores higher than {{F1.against}}, by {{F1.estimate}} with {{ F1.seeds }} seeds.",
        "{{F2.arm}} scores lower: {{F2.estimate}}. Then {{F3.arm}} is equivalent to {{F3.against}}.",
        "For {{F3.claim}} there is no difference that would matter.",
        "{{F4.claim}} stays open, since {{F4.interval}} is wide; {{ledger.total}} runs were spent.",
        "“{{F1.arm}}” (at {{F1.setting_of_arm}}), {{F1.against}}'s rival: {{F1.low}}, {{F1.high}}.",
        "In an exploratory reading, {{F5.arm}} is better than {{F5.against}}.",
    ],
)
def test_what_may_be_said(prose: str) -> None:
    assert lint_narration(prose, FACTS) == []


@pytest.mark.parametrize(
    ("prose", "problem"),
    [
        ("It took 12 seeds of {{F1.arm}}.", "'12' is a numeral"),
        ("It took {{F1.seeds}}0 seeds.", "'0' is a numeral"),
        ("It took ٣ seeds.", "is a numeral"),
        ("About ½ of them, or x².", "'½' is a numeral"),
        ("It took twelve seeds.", "'twelve' is a number"),
        ("Twenty-one seeds.", "'twenty-one' is a number"),
        ("It doubled.", "'doubled' is a number"),
        ("A sixfold gain.", "'sixfold' is a number"),
        ("A several-fold rise.", "'several-fold' is a number"),
        ("A hundredfold rise.", "'hundredfold' is a number"),
        ("It came to quadruple.", "'quadruple' is a number"),
        ("A fifth of them.", "'fifth' is a number"),
        ("One in a gross fell to nil.", "'nil' is a number"),
        ("A score of times.", "'score of times' is a number"),
        ("By an order\nof magnitude.", "is a number and no reference"),
        ("By x{{F1.low}}e{{F1.seeds}}.", "forms another number"),
        ("By {{F1.low}}{{F1.seeds}}.", "forms another number"),
        ("By {{F1.low}}.{{F1.seeds}}.", "forms another number"),
        ("By −{{F1.low}}.", "forms another number"),
        ("By {{F1.low}}%.", "forms another number"),
        ("The gain is {{F1.delta}}.", "{{F1.delta}} is not a fact"),
        ("See {{F9.estimate}}.", "{{F9.estimate}} is not a fact"),
        ("See {{F1}}.", "a reference is written"),
        ("See {{ F1.estimate | upper }}.", "a reference is written"),
    ],
)
def test_numbers_that_are_no_references(prose: str, problem: str) -> None:
    assert any(problem in said for said in lint(prose, FACTS)), lint(prose, FACTS)


@pytest.mark.parametrize(
    ("prose", "problem"),
    [
        ("{{F4.arm}} is better than {{F4.against}}.", "needs a verdict of 'supported', and F4 is 'inconclusive'"),
        ("{{F2.arm}} is better than {{F2.against}}.", "needs a verdict of 'supported', and F2 is 'refuted'"),
        ("{{F1.arm}} is worse than {{F1.against}}.", "needs a verdict of 'refuted', and F1 is 'supported'"),
        ("{{F4.arm}} hurts.", "needs a verdict of 'refuted', and F4 is 'inconclusive'"),
        ("{{F4.arm}} tops {{F4.against}}.", "needs a verdict of 'supported', and F4 is 'inconclusive'"),
        ("{{F4.arm}} is preferable.", "needs a verdict of 'supported', and F4 is 'inconclusive'"),
        ("It works, and the others do not.", "'works' is a claim that refers to no finding"),
        ("{{F4.arm}} is on par with {{F4.against}}.", "needs a verdict of 'practically_equivalent'"),
        ("{{F4.arm}} makes no difference.", "needs a verdict of 'practically_equivalent', and F4 is 'inconclusive'"),
        ("{{F1.arm}} is as good as {{F1.against}}.", "needs a verdict of 'practically_equivalent'"),
        ("{{F1.arm}} beats {{F4.arm}}.", "F4 is 'inconclusive'"),
        ("This proves {{F1.claim}}.", "'proves' is stronger than any verdict"),
        ("{{F1.claim}}: clearly so.", "'clearly' is stronger"),
        ("{{F1.arm}} is\nsignificantly higher.", "'significantly' is stronger"),
        ("It improves the model.", "'improves' is a claim that refers to no finding"),
        ("{{F1.estimate}} was seen. So it is better.", "'better' is a claim that refers to no finding"),
        ("{{F5.arm}} is better than {{F5.against}}.", "which is exploratory"),
        ("{{F1.against}} is better than {{F1.arm}}.", "'better' is about F1.against: name F1.arm first"),
        ("{{F2.against}} scores lower.", "'lower' is about F2.against"),
        ("{{A3.name}} is better by {{F1.estimate}}.", "'better' names an arm by itself"),
    ],
)
def test_claims_stronger_than_their_verdict(prose: str, problem: str) -> None:
    assert any(problem in said for said in lint(prose, FACTS)), lint(prose, FACTS)


def test_an_open_claim_permits_nothing() -> None:
    log = StudyLog()
    log.open_study(RICH)
    [problem] = lint("{{F1.arm}} is better.", facts_of(log))
    assert "F1 is 'open'" in problem


@pytest.mark.parametrize("markup", ["<b>x</b>", "[x](http://x)", "| a |", "# x", "`x`", "*x*", "- x", "{% x %}"])
def test_narration_brings_no_markup(markup: str) -> None:
    assert any("plain sentences" in problem for problem in lint_narration(f"Well.\n{markup}", FACTS))


def test_narration_is_refused_or_stands_in_the_report(tmp_path: Path) -> None:
    log = StudyLog()
    conduct(RICH, log, Told())
    with pytest.raises(ConfigError, match=r"the narration is refused: '3.2' is a numeral.*'proves' is stronger"):
        narrate(log, "This proves a gain of 3.2 for {{F1.arm}}.")
    assert "narration" not in log.decisions
    narrate(log, 'We saw that "{{F1.arm}}" scores higher & by {{F1.estimate}}.')
    page = build(log, tmp_path)
    estimate = facts_of(log).known["F1.estimate"]
    assert f'title="F1.estimate = {estimate.value}">{estimate.text}</data>' in page.read_text(encoding="utf-8")
    assert "scores higher &amp; by" in page.read_text(encoding="utf-8")
    written = page.with_suffix(".md").read_text(encoding="utf-8")
    assert f'We saw that "b \\*bold\\*" scores higher & by {estimate.text}.' in written
    assert check(page, log) == []


def test_a_journal_with_narration_that_was_not_linted_makes_no_report(tmp_path: Path) -> None:
    log = StudyLog()
    conduct(RICH, log, Told())
    log.decide("narration", "It gained 40.")
    with pytest.raises(ConfigError, match=r"the journal's narration is refused: '40\.' is a numeral"):
        build(log, tmp_path)
