"""A user's file may do anything when it is imported: it is said in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentjet.client.loading import load_function
from agentjet.errors import ConfigError


def test_a_file_that_ends_the_program(tmp_path: Path) -> None:
    file = tmp_path / "ends.py"
    file.write_text("import sys\nsys.exit('no key')\n")
    with pytest.raises(ConfigError, match=r"--reward .*ends.py: importing it ends the program \(SystemExit: no key\)"):
        load_function(f"{file}:reward", option="--reward")
