"""An invalid file, request or record is refused with the place, the value and what is expected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentjet.errors import ConfigError
from agentjet.research.models import Arm
from agentjet.research.plan import read_space

ARMS = "[arms.a]\n[arms.b]\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[arms.a]\n", "arms = {'a': {}}: dictionary should have at least 2 items"),
        ("sesoi = nan\n" + ARMS, "sesoi = nan: input should be a finite number"),
        ("looks = 3\n" + ARMS, "looks = 3: input should be a valid tuple"),
        ("looks = [4, 8.5]\n" + ARMS, "looks.1 = 8.5: input should be a valid integer"),
        (ARMS + "[arms.'*']\n", "= '*': string should match pattern"),
        (ARMS + "[arms.c]\nagent = 3\n", "arms.c.agent = 3: input should be a valid string"),
        (ARMS + "[arms.c]\nagnet = '3'\n", "arms.c.agnet: unknown key; did you mean agent?"),
        (
            ARMS + "[arms.c]\nchanges = { 'job.x' = [1] }\n",
            "arms.c.changes.job.x = [1]: it must be text, a number, true or",
        ),
        (ARMS + "[[hypotheses]]\narm = 'a'\n", "hypotheses.0.against: is required"),
    ],
)
def test_a_file_is_refused_with_key_and_value(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "space.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_space(path)


def test_a_record_that_was_edited_is_refused_with_key_and_value() -> None:
    with pytest.raises(ConfigError, match=r"Arm: nuisance\.0\.values: is required"):
        Arm.from_json({"name": "a", "nuisance": [{"name": "lr"}]})
    with pytest.raises(ConfigError, match=r"Arm: changes\.lr = \[1\]: it must be text, a number, true or false"):
        Arm.from_json({"name": "a", "changes": {"lr": [1]}})
