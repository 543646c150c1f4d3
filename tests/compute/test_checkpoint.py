"""What is written into a checkpoint can be read by whom the umask lets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentjet.compute.embedded.checkpoint import write_atomically


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_the_umask_counts(tmp_path: Path, umask: int, mode: int) -> None:
    def write(folder: Path) -> None:
        save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")

    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "step_000001", write)
    finally:
        os.umask(before)
    files = sorted((tmp_path / "step_000001").iterdir())
    assert [file.name for file in files] == ["config.json", "model.safetensors"]
    assert [file.stat().st_mode & 0o777 for file in files] == [mode, mode]
