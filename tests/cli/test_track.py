"""`agentjet track`.

1. A server and a data dir give the same steps and the same run; a run that crashed, too.
2. Wrong sources and targets are one sentence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentjet.cli.runs import steps_of_folder, steps_of_server
from agentjet.client import Swarm
from agentjet.errors import ConfigError, Unauthorized, Unreachable
from agentjet.trackers import id_of_run
from tests.cli.test_commands import run
from tests.server.serving import VIEWER, Served, in_thread, serving


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_server_and_its_files_give_the_same_steps(tmp_path: Path) -> None:
    with in_thread(serving(tmp_path / "data")) as (served, loop):
        at = [served.url, "--token", VIEWER, "--once"]
        with pytest.raises(ConfigError, match="has no step yet, so there is nothing to track"):
            run("track", *at, "--to", f"jsonl:{tmp_path / 'early.jsonl'}")
        for _ in range(3):
            loop.run(served.run.batch())
        assert "run mine, written up to step 0" in run(
            "track", *at, "--to", f"jsonl:{tmp_path / 'a.jsonl'}", "--name", "mine"
        )
        loop.run(served.run.batch())
        shown = run("track", *at, "--to", f"jsonl:{tmp_path / 'a.jsonl'}")
        assert shown.splitlines()[-1].endswith("a.jsonl has all steps up to 4") and "written up to step 3" in shown
        beside = run("track", str(tmp_path / "data"), "--to", f"jsonl:{tmp_path / 'beside.jsonl'}")
        with Swarm(served.url, VIEWER) as swarm:
            live = steps_of_server(swarm)
            run_id, settings = id_of_run(live.steps(0, 1)[0]), live.settings()
            assert live.progress() == (4, 0)
        assert f"agentjet-{run_id}" in beside
    run("track", str(tmp_path / "data"), "--to", f"jsonl:{tmp_path / 'after.jsonl'}")
    files = steps_of_folder(tmp_path / "data" / "runs" / "default", "default")
    assert id_of_run(files.steps(0, 1)[0]) == run_id and files.progress() == (4, 0)
    assert files.settings()["job.group_size"] == settings["job.group_size"]
    held = [rows(tmp_path / f"{name}.jsonl") for name in ("a", "beside", "after")]
    assert [row["step"] for row in held[0]] == [1, 2, 3, 4] and held[0] == held[1] == held[2]


def test_wrong_sources(served: Served, tmp_path: Path) -> None:
    to = ["--to", f"jsonl:{tmp_path / 'x'}"]
    with pytest.raises(ConfigError, match="is not a data dir of AgentJet"):
        run("track", str(tmp_path / "nowhere"), *to)
    with pytest.raises(Unreachable, match="no answer from"):
        run("track", "http://127.0.0.1:9", *to)
    with pytest.raises(Unauthorized, match="AGENTJET_TOKEN"):
        run("track", served.url, "--token", "wrong", *to)
    with pytest.raises(ConfigError, match=r"--to is missing: give one of tensorboard:DIR"):
        run("track", served.url, "--token", VIEWER)
