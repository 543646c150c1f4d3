"""1. A plan goes to JSON and comes back equal, with the same id. The id is that of its content.
2. An invalid study or record is refused at once, with the name of the field.
3. A shortened note keeps the event and its cause: the beginning and the end.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from agentjet.errors import ConfigError
from agentjet.research.models import Arm, Finding, Hypothesis, Knob, Outcome, Study, Trial, shortened
from tests.research.world import STUDY


@pytest.mark.parametrize(
    "record",
    [
        STUDY,
        STUDY.arms[1],
        replace(STUDY, hypotheses=(Hypothesis("c", "b", "a", sign="-", why="it costs more"),)),
        Trial(STUDY.id, "b", {"lr": 1.0, "on": True, "steps": 3, "mode": "x"}, 7, "confirm", 1 / 3),
        Outcome("t", "diverged", score=-1.5, curve=(1.0, -1.5)),
        Outcome("t", "infra_failed", note="lost"),
        Finding("h", "supported", "look", estimate=1.0, settings={"a": {"lr": 2.0}}, trials=("t",)),
    ],
)
def test_json_and_back(record: Any) -> None:
    back = type(record).from_json(json.loads(json.dumps(record.to_json())))
    assert back == record
    assert back.id == record.id


def test_an_id_is_the_contents() -> None:
    assert STUDY.id == "7c9dbfb075fb73d3"
    assert Hypothesis("c", "b", "a").id == "7a04c511a195fcce", "as before there were expectations"
    assert replace(STUDY, seed=1).id != STUDY.id
    assert Arm("a", {"x": 1, "y": 2}).id == Arm("a", {"y": 2, "x": 1}).id
    assert Arm("a", {"x": 1}).id != Arm("a", {"x": True}).id


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"arms": (Arm("a"), Arm("a"))}, "two arms have the same name"),
        ({"hypotheses": (Hypothesis("", "a", "c"),)}, "'c' is not an arm"),
        ({"hypotheses": (Hypothesis("", "a", "a"),)}, "compared with itself"),
        ({"sesoi": 0.0}, "sesoi = 0"),
        ({"alpha": 0.7}, "alpha = 0.7"),
        ({"looks": (3, 8)}, "looks = "),
        ({"looks": (8, 4)}, "looks = "),
        ({"rungs": (0.5,)}, "rungs = "),
        ({"reserve": 1.0}, "reserve = 1"),
        ({"budget": 0.0}, "budget = 0"),
        ({"arms": (Arm("a", nuisance=(Knob("lr", ()),)), Arm("b"))}, "'lr' has no values"),
        ({"arms": (Arm("a", nuisance=(Knob("lr", (1.0,) * 17),)), Arm("b"))}, "17 combinations .* at most 16"),
    ],
)
def test_what_cannot_be_judged_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        replace(STUDY, **change)


def test_fields_nobody_knows_are_refused() -> None:
    with pytest.raises(ConfigError, match="winner"):
        Study.from_json({**STUDY.to_json(), "winner": "b"})
    with pytest.raises(ConfigError, match=r"arms\.0\.name"):
        Study.from_json({**STUDY.to_json(), "arms": [{"name": 3}]})
    with pytest.raises(ConfigError, match=r"Arm: nuisance\.0\.values: is required"):
        Arm.from_json({"name": "a", "nuisance": [{"name": "lr"}]})
    with pytest.raises(ConfigError, match=r"Arm: changes\.lr = \[1\]: it must be text, a number, true or false"):
        Arm.from_json({"name": "a", "changes": {"lr": [1]}})


def test_a_run_has_a_score_and_a_lost_one_has_none() -> None:
    with pytest.raises(ConfigError, match="infra_failed"):
        Outcome("t", "infra_failed", score=0.0)
    with pytest.raises(ConfigError, match="diverged"):
        Outcome("t", "diverged")
    with pytest.raises(ConfigError, match="is not finite"):
        Outcome("t", "diverged", score=float("nan"))


def test_a_long_note_keeps_its_beginning_and_its_cause() -> None:
    log = "the server ended with exit code 1. The end of its log:\n" + "    loading\n" * 300 + "    no such model"
    cut = shortened(log)
    assert len(cut) <= 2000 and " ... " in cut
    assert cut.startswith("the server ended with exit code 1. The end") and cut.endswith("no such model")
    assert shortened("short") == "short"
