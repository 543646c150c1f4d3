"""An invalid file, request or record is refused with the place, the value and what is expected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentjet.errors import ConfigError
from agentjet.research.models import REQUEST, Arm, Refused, parse
from agentjet.research.planner.plan import read_space

ARMS = "[arms.a]\n[arms.b]\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[arms.a]\n", "arms = {'a': {}}: it must be 2 items or more, not 1"),
        ("arms = 'x'\n", "arms = 'x': it must be names with their values"),
        ("sesoi = nan\n" + ARMS, "sesoi = nan: it must be a number that is finite"),
        ("looks = 3\n" + ARMS, "looks = 3: it must be a list"),
        ("looks = [4, 8.5]\n" + ARMS, "looks.1 = 8.5: it must be a whole number"),
        (ARMS + "[arms.'*']\n", "arms: '*' must be a name of up to 40 letters"),
        (ARMS + "[arms.c]\nagent = 3\n", "arms.c.agent = 3: it must be text"),
        (
            ARMS + "[arms.c]\nchanges = { 'job.x' = [1] }\n",
            "arms.c.changes.job.x = [1]: it must be text, a number, true or",
        ),
        (
            ARMS + "[knobs.x]\nlow = 1\nhigh = 2\nscale = 'cubic'\n",
            "knobs.x.scale = 'cubic': it must be 'log' or 'linear'",
        ),
        (ARMS + "[[hypotheses]]\narm = 'a'\n", "hypotheses.0.against: is required"),
    ],
)
def test_a_file_is_refused_in_our_words(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "space.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_space(path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ([1], "[1]: it must be names with their values"),
        ({}, "{}: it must be an action with a kind"),
        ({"kind": "x"}, "it must be an action with a kind, one of 'add_arm', "),
        ({"kind": "cap", "runs": 0}, "cap.runs = 0: it must be above 0"),
        ({"kind": "cap", "runs": 1, "score": 2}, "cap.score: unknown key"),
        (
            {"kind": "add_arm", "arm": "b", "against": "a", "changes": {"A": 1}},
            "add_arm.changes: 'A' must be the name of a",
        ),
        ({"kind": "veto", "arm": "a" * 99}, "...: it must be a name of up to 40 letters"),
        (
            {"kind": "add_arm", "arm": "b", "against": "a", "why": "x" * 301},
            "it must be text of at most 300 characters",
        ),
    ],
)
def test_a_request_is_refused_in_our_words(fields: object, said: str) -> None:
    with pytest.raises(Refused, match=re.escape(said)):
        parse(REQUEST, fields)


def test_a_record_that_was_edited_is_refused_in_our_words() -> None:
    with pytest.raises(ConfigError, match=r"Arm: nuisance\.0\.values: is required"):
        Arm.from_json({"name": "a", "nuisance": [{"name": "lr"}]})
    with pytest.raises(ConfigError, match=r"Arm: changes\.lr = \[1\]: it must be text, a number, true or false"):
        Arm.from_json({"name": "a", "changes": {"lr": [1]}})
