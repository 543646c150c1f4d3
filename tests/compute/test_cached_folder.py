"""A broken folder of the cache is made again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentjet.compute.embedded.policy import cached_folder

BREAK: dict[str, Callable[[Path], object]] = {
    "a file is missing": lambda folder: (folder / "weights").unlink(),
    "a file is short": lambda folder: (folder / "weights").write_text("w"),
    "all files are missing": lambda folder: [file.unlink() for file in folder.iterdir()],
}


@pytest.mark.parametrize("how", BREAK)
def test_a_broken_folder_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    written = []

    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text("whole")
        (folder / "tokenizer").write_text("whole")
        written.append(folder)

    folder = cached_folder("model", write)
    assert cached_folder("model", write) == folder and len(written) == 1
    BREAK[how](folder)
    assert cached_folder("model", write) == folder and len(written) == 2
    assert (folder / "weights").read_text() == "whole"
    assert [file.name for file in folder.parent.iterdir()] == ["model"]
