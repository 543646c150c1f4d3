"""A file of a user that is nested too deeply is refused by its name, as any other invalid file: a parser raises
`RecursionError` for it, which is not a `ValueError`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentjet.client.inputs import read_tasks
from agentjet.compute.cluster.memory import model_size
from agentjet.config.loader import read_toml
from agentjet.errors import ConfigError
from agentjet.research.campaign.coding_agent import reasons
from agentjet.research.campaign.subject_file import read_subject
from agentjet.research.journal import StudyFolder
from agentjet.research.plan import read_space
from agentjet.trackers.files import JsonlSink
from agentjet.trackers.sink import Run
from tests.cli.test_doctor import LAPTOP, lines, settings

JSON = "[" * 100_000
TOML = f"value = {JSON}"
RUN = Run("a-run", "one", {})


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("tasks.jsonl", JSON, read_tasks),
        ("serve.toml", TOML, read_toml),
        ("space.toml", TOML, read_space),
        ("subject.toml", TOML, read_subject),
        ("study.json", JSON, lambda path: StudyFolder(path.parent).study()),
        ("config.json", JSON, lambda path: model_size(path.parent)),
        ("metrics.jsonl", f"{JSON}\n", lambda path: JsonlSink(str(path)).begin(RUN)),
    ],
    ids=["tasks", "settings", "space", "subject", "study", "model", "metrics"],
)
def test_a_file_that_is_nested_too_deeply_is_named(
    name: str, content: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=name):
        read(path)


def test_the_reasons_of_a_coding_agent_are_left_out_if_they_are_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "reasons.json"
    path.write_text(JSON)
    assert reasons(path)["name"] == "a patch of the coding agent"


def test_doctor_reports_a_model_that_is_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(JSON)
    assert "config.json cannot be read" in lines(settings(tmp_path), LAPTOP)
