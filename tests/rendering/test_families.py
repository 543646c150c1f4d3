"""The table of model families: each template of ours renders the strings that its entry states.

An oracle is the real template, in a package that may be installed: TRL's `chat_templates` or `mistral-common`. It
renders the same strings from the same conversations. `tests/templates/families.json` explains its fields in `about`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from agentjet.rendering import Renderer
from tests import tiny
from tests.rendering.families import (
    ENTRIES,
    FAMILIES,
    MISTRAL,
    USER,
    behind_user,
    by_mistral,
    cases_of_mistral,
    differences_of_trl,
    model_info,
    read,
    render,
    tools_of,
    written,
)


@pytest.mark.parametrize("name", ENTRIES)
def test_ours_render_the_strings_of_the_table(name: str) -> None:
    entry = ENTRIES[name]
    source = tiny.template(name)
    for case, text in entry["renders"].items():
        assert behind_user(source, case, eos=entry["eos"], followed=name == "nemotron_nano2") == text, case
    assert entry["declaration"] in render(source, USER, prompt=False, eos=entry["eos"])
    if entry["broken_call"]:
        assert entry["broken_call"] != entry["renders"]["two_calls"]


def test_every_family_has_a_template() -> None:
    assert {family["template"] for family in FAMILIES.values()} == set(ENTRIES)
    with_tools = [name for name, family in FAMILIES.items() if ENTRIES[family["template"]]["syntax"]]
    assert len(with_tools) == 45


def test_a_family_whose_calls_are_not_read_is_counted(tmp_path: Path) -> None:
    """The comparison would see a wrong call, a missing one, and a parser that differs between pieces and whole."""
    renderer = Renderer(model_info(tmp_path, "qwen2_5"))
    assert tools_of(renderer) == "work"
    silent = Renderer(dataclasses.replace(renderer.model, tool_format="mistral"))
    assert tools_of(silent) == "silent"
    refused = Renderer(dataclasses.replace(renderer.model, tool_format=""))
    assert tools_of(refused) == "refused"
    one = written("qwen2_5", "one_call")
    assert one is not None and read(renderer, one, tools=True).is_whole
    assert read(renderer, one, tools=False).message.content == one


@pytest.mark.thorough
@pytest.mark.needs("trl")
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family["source"].startswith("TRL ")])
def test_trl_renders_the_strings_of_the_table(family: str) -> None:
    assert differences_of_trl(family) == []


@pytest.mark.thorough
@pytest.mark.needs("mistral-common")
@pytest.mark.parametrize(
    ("family", "case"), [(family, case) for family in MISTRAL for case in cases_of_mistral(family)]
)
def test_mistral_common_writes_the_calls_of_the_table(family: str, case: str, tmp_path: Path) -> None:
    assert by_mistral(family, case, tmp_path) == ENTRIES[FAMILIES[family]["template"]]["renders"][case]
