"""An interpreter without AgentJet imports the server's copy, and nothing else of the server's environment."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import agentjet
from agentjet.compute.cluster.backend import REPLICA_PATH

PROGRAM = """
import multiprocessing, sys

def found():
    import agentjet.types
    return agentjet.__file__

if __name__ == "__main__":
    assert not any(name.startswith("agentjet") for name in sys.modules)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(found(), pool.apply(found))
    try:
        import torch
    except ModuleNotFoundError as error:
        print(error.name)
"""


def test_a_bare_interpreter_finds_the_servers_copy(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(REPLICA_PATH)}
    done = subprocess.run(
        [tmp_path / "bare" / "bin" / "python", tmp_path / "program.py"], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == [agentjet.__file__, agentjet.__file__, "torch"], done.stderr
