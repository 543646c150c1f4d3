"""The requests of agents get the recorded answers: 4 of `tests.locks`."""

from __future__ import annotations

import asyncio
import difflib
from pathlib import Path

import pytest

from tests.locks.transcripts import FOLDER, Scene, replay, scenes

SCENES = scenes()


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_the_answers_are_the_recorded_ones(scene: Scene, tmp_path: Path) -> None:
    recorded = scene.path.read_text(encoding="utf-8")
    present = asyncio.run(replay(scene, recorded, tmp_path))
    lines = difflib.unified_diff(recorded.splitlines(), present.splitlines(), "recorded", "present", n=1, lineterm="")
    assert present == recorded, "\n" + "\n".join(list(lines)[:60])


def test_each_transcript_is_replayed() -> None:
    assert {path.stem for path in FOLDER.glob("*.http")} == {scene.name for scene in SCENES}
