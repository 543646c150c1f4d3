"""`docs/environments.md` names every setting of every kind, and the installed packages that each needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentjet.environments import Kind, kinds
from agentjet.environments.registry import KINDS, find

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")

FOLDER = Path(kinds.__file__).parent


def section(name: str) -> str:
    return PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]


def test_the_settings_of_every_kind() -> None:
    rows = section("Settings of every kind")
    for name, field in Kind.model_fields.items():
        if name != "target":
            assert f"| `{name}` |" in rows and " ".join((field.description or "").split()) in rows, name


@pytest.mark.parametrize(
    "name", [name for name, path in KINDS.items() if (FOLDER / f"{path.split(':')[0]}.py").exists()]
)
def test_the_settings_of_a_kind(name: str) -> None:
    kind, text = find(name), section(name)
    own = kind.model_fields.keys() - Kind.model_fields.keys()
    assert [setting for setting in own if f"`{setting}`" not in text] == []
    assert [setting for setting, field in kind.model_fields.items() if not field.description] == []
    assert not kind.requires or f"pip install '{kind.requires}'" in text
