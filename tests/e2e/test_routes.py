"""A mixture in bfloat16 on a real server: its routes reach the journal, are repeated, and repeated after a kill."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from agentjet.protocol.records import EpisodeQuery
from agentjet.swarm import Journal
from agentjet.timeline.routes import unpack
from agentjet.types import JOURNAL
from tests.compute.architectures import make_architecture
from tests.e2e.server import Server
from tests.recorded_data_dir import learn_batch

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SETTINGS = {"model__dtype": "bfloat16", "model__expert_routes": "on", "job__checkpoint_every": 2}


def test_routes_are_recorded_repeated_and_replayed(tmp_path: Path) -> None:
    folder = make_architecture(tmp_path / "model", "qwen3_moe", num_experts=8, num_experts_per_tok=3)
    with Server(folder, tmp_path / "data", **SETTINGS) as server:
        for _ in range(3):
            learn_batch(server)
        metrics = server.get("/steps")["metrics"]
        assert min(metrics["moe/routed"]) > 0.9 and metrics["moe/route_conflicts"] == [0, 0, 0]
        assert 0 <= min(metrics["moe/route_mismatch"]) <= max(metrics["moe/route_mismatch"]) < 0.1
        assert [value is not None for value in metrics["policy/mismatch_kl_own_routes"]] == [True, True, False]
        evaluated = server.begin(task_id="held out", mode="eval")
        server.ask(evaluated, "hello")
        server.kill()  # The newest checkpoint is that of version 2.
    with closing(Journal.open_read_only(server.folder / JOURNAL)) as journal:
        assert journal.calls(evaluated["episode_id"]) and not journal.routes(evaluated["episode_id"])
        for episode in journal.find_episodes(EpisodeQuery(limit=4, mode="train")).episodes:
            calls, packed = [call for call, *_ in journal.calls(episode.id)], journal.routes(episode.id)
            assert packed.keys() == {call.id for call in calls}
            for call in calls:
                [routes] = unpack(packed[call.id])
                assert routes.first == max(0, call.kept - 1)
                assert routes.stop == call.kept + len(call.suffix) + len(call.completion) - 1
                assert routes.choices.shape[1:] == (2, 3) and (np.sort(routes.choices) < 8).all()
                assert {routes.version} == {*call.versions}
    with Server(folder, tmp_path / "data", **SETTINGS) as server:
        server.until(lambda: server.get("/status")["policy_version"] == 3)
        assert server.get("/status")["replay_difference"] == "", "the replay has the fingerprint of the weights before"
        learn_batch(server)
