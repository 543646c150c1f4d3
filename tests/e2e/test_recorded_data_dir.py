"""A data dir that an earlier AgentJet wrote, opened by real processes: it replays, learns and goes on."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from agentjet.compute.checkpoint import verified_state
from agentjet.swarm import Journal
from agentjet.types import JOURNAL
from tests.e2e.server import Server
from tests.recorded_data_dir import DATA, MODEL, SETTINGS, finish, learn_batch, unpack

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack(tmp_path)
    monkeypatch.chdir(tmp_path)
    with Server(MODEL, DATA, **SETTINGS, job__max_episode_seconds=1e10) as server:
        server.until(lambda: server.get("/status")["policy_version"] == 4)  # It had been pending.
        [live] = server.get("/episodes?status=live")["episodes"]
        tree = server.get(f"/episodes/{live['episode_id']}")
        assert len(tree["calls"]) == 3
        finish(server, live, 0.0)
        server.until(lambda: server.get("/status")["groups_complete"] == 1)
        for member in range(2):
            episode = server.begin(task_id="next")
            server.ask(episode, "hello")
            server.post(f"/episodes/{episode['episode_id']}/finish", reward=member, by_turn={"": [member]})
        server.until(lambda: server.get("/status")["policy_version"] == 5)
        learn_batch(server)
        assert server.interrupt() == 0
    with closing(Journal.open(server.folder / JOURNAL)) as journal:  # Its added columns are there now.
        state = verified_state(server.folder / "checkpoints" / "step_000006")
        assert journal.read_state().policy_version == state["policy_version"] == 6
        assert journal.checkpoint_digest(6) == state["digest"]
