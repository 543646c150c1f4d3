"""Two real servers and a team on them: whichever is killed and started again, in the middle of the run, nothing that
was finished is lost. Counted from both journals.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import openai
import pytest

from agentjet import Swarm, Task, Team
from agentjet.client import Retry, TeamEpisode
from agentjet.swarm import Journal
from agentjet.swarm.store import Store
from tests.e2e.server import Server
from tests.tiny import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

STEPS = 4
MEMBERS = ("describer", "guesser")


def agent(llm: openai.OpenAI, task: Task, episode: TeamEpisode) -> dict[str, float]:
    rewards = {}
    for member, part in episode.items():
        client = llm.with_options(base_url=part.base_url, api_key=part.api_key)
        said = client.chat.completions.create(model=part.model, messages=[{"role": "user", "content": task.id}])
        rewards[member] = float(len(said.choices[0].message.content or "") % 5)
    return rewards


class Pair:
    """A server a member; one that is killed comes back at its address, on its data dir."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_model(folder / "model")
        self.servers = {member: Server(self.model, folder / member) for member in MEMBERS}

    def swarms(self) -> dict[str, Swarm]:
        return {member: Swarm(server.url, server.token, retry=Retry()) for member, server in self.servers.items()}

    def kill_and_restart(self, member: str) -> None:
        server = self.servers[member]
        port = server.url.rpartition(":")[2]
        server.kill()
        self.servers[member] = Server(self.model, self.folder / member, "--port", port)

    def finished(self) -> dict[str, dict[str, tuple[str, float]]]:
        """By member: what its journal has of the finished parts, by the team's episode: its group and its reward."""
        return {member: finished_parts(self.folder / member / "journal.sqlite") for member in MEMBERS}

    def close(self) -> None:
        for server in self.servers.values():
            server.__exit__()


def finished_parts(path: Path) -> dict[str, tuple[str, float]]:
    with closing(Journal.open_read_only(path)) as journal:
        finished = Store(journal, time.time).recent_episodes(10_000, status="finished")
    return {episode.team: (episode.group, episode.reward or 0.0) for episode in finished}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_server_loses_no_finished_episode(tmp_path: Path, victim: int) -> None:
    """`victim` 0 is the anchor, which decides."""
    pair = Pair(tmp_path)
    http = openai.DefaultHttpxClient(trust_env=False)
    llm = openai.OpenAI(base_url="http://127.0.0.1", api_key="-", max_retries=8, http_client=http)
    told: dict[str, Mapping[str, float]] = {}

    def watched(task: Task, episode: TeamEpisode) -> dict[str, float]:
        told[episode.team] = agent(llm, task, episode)
        return dict(told[episode.team])

    try:
        by_address = sorted(MEMBERS, key=lambda member: pair.servers[member].url)
        swarms = pair.swarms()
        with Team(swarms) as team:
            tasks = [Task(f"t{number}") for number in range(8)]

            def kill() -> None:
                pair.servers[MEMBERS[0]].until(lambda: len(told) >= 6)
                pair.kill_and_restart(by_address[victim])

            killer = threading.Thread(target=kill)
            killer.start()
            report = team.train(watched, tasks, steps=STEPS, concurrency=4, seed=1, progress=False)
            killer.join()
            team.recover()
        for swarm in swarms.values():
            swarm.close()
        assert {member: len(steps) for member, steps in report.steps.items()} == dict.fromkeys(MEMBERS, STEPS)
        parts = pair.finished()
        assert parts["describer"].keys() == parts["guesser"].keys()
        assert len(parts["describer"]) == len(report.finished) >= STEPS * 4
        for team_id in parts["describer"]:
            describer, guesser = parts["describer"][team_id], parts["guesser"][team_id]
            assert describer[0] == guesser[0]
            assert {"describer": describer[1], "guesser": guesser[1]} == told[team_id]
        for member in MEMBERS:
            counts = pair.servers[member].get("/status")["episodes"]
            assert counts["finished"] == counts["trained"] + counts["waiting"] + counts["dropped"]
            assert (counts["prepared"], counts["dropped"]) == (0, 0), counts
    finally:
        llm.close()
        pair.close()
