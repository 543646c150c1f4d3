"""Whole runs of a team. 1. Evaluations with members at a version, or played by somebody else's model.
2. Spare episodes: what is surplus on one server is on all. 3. A server whose job is over while another still learns.
4. Task sets without room.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from agentjet.client import AsyncTeamEpisode, Endpoint
from agentjet.errors import Conflict
from agentjet.types import Task
from tests.client.teams import TASKS, Both, Wire, agent, run, say

STRANGER = Endpoint("http://127.0.0.1:2/v1", "theirs", "their-key")


def test_a_member_is_played_by_another_model(tmp_path: Path) -> None:
    async def mixed(task: Task, episode: AsyncTeamEpisode) -> dict[str, float]:
        assert (episode["coder"].base_url, episode["coder"].api_key) == (STRANGER.base_url, STRANGER.api_key)
        await say(episode, "planner")
        return {"planner": 1.0, "coder": 0.0}

    async def scenario(servers: Both) -> None:
        async with servers.team() as team:
            report = await team.evaluate(mixed, TASKS[:2], endpoint={"coder": STRANGER}, progress=False)
            assert [result.by_role for result in report.finished] == [{"planner": 1.0, "coder": 0.0}] * 2
            counts = {member: len(episodes) for member, episodes in servers.episodes().items()}
            assert counts == {"planner": 2, "coder": 0}

            async def nobody_of_ours(task: Task, episode: AsyncTeamEpisode) -> float:
                assert {part.model for part in episode.values()} == {"theirs"}
                return 0.5

            report = await team.evaluate(nobody_of_ours, TASKS, endpoint=STRANGER, progress=False)
            assert report.mean_reward == 0.5 and len(report.finished) == len(TASKS)
            assert {member: len(episodes) for member, episodes in servers.episodes().items()} == counts

    run(scenario, tmp_path)


def test_members_are_evaluated_at_versions_of_their_own(tmp_path: Path) -> None:
    async def scenario(servers: Both) -> None:
        await servers.other.run.batch()
        async with servers.team() as team:
            report = await team.evaluate(agent, TASKS[:2], at_version={"planner": 0, "coder": 1}, progress=False)
            assert len(report.finished) == 2
            assert len((await team.evaluate(agent, TASKS[:2], at_version="newest", progress=False)).finished) == 2
            with pytest.raises(Conflict) as gone:
                await team.evaluate(agent, TASKS[:2], at_version=1, progress=False)
            assert gone.value.code == "version_gone"
        pins = {
            m: {part.at_version for part in parts if part.mode == "eval"} for m, parts in servers.episodes().items()
        }
        assert pins == {"planner": {0}, "coder": {1}}
        assert servers.episodes("live") == {"planner": [], "coder": []}

    run(scenario, tmp_path)


def test_what_cannot_be_evaluated_so_is_refused(tmp_path: Path) -> None:
    async def scenario(servers: Both) -> None:
        async with servers.team() as team:
            with pytest.raises(ValueError, match="at_version names 'critic'; it can be given for: planner, coder"):
                await team.evaluate(agent, TASKS, at_version={"critic": 1})
            with pytest.raises(ValueError, match="at_version names 'coder'; it can be given for: planner"):
                await team.evaluate(agent, TASKS, at_version={"coder": 1}, endpoint={"coder": STRANGER})
            with pytest.raises(ValueError, match="no member plays with one"):
                await team.evaluate(agent, TASKS, at_version="newest", endpoint=STRANGER)

    run(scenario, tmp_path)


def test_spare_episodes_are_surplus_on_all_servers_or_on_none(tmp_path: Path) -> None:
    async def scenario(servers: Both) -> None:
        async with servers.team() as team:
            report = await team.train(agent, TASKS, steps=3, concurrency=6, progress=False)
        assert [len(steps) for steps in report.steps.values()] == [3, 3]
        assert report.num_aborted == report.num_expired == 0
        planner, coder = ({part.team: part for part in parts} for parts in servers.episodes().values())
        assert planner.keys() >= coder.keys(), "of a begin that found no room on the second, the first has a part"
        finished = {name for name, part in planner.items() if part.status == "finished"}
        assert finished == {name for name, part in coder.items() if part.status == "finished"}
        groups = {name: {planner[team].group for team in finished} for name in ("planner", "coder")}
        assert groups["planner"] == groups["coder"]
        spare = [group for group in groups["planner"] if sum(part.group == group for part in coder.values()) > 2]
        assert spare, "no spare episode was ever begun on both"

    run(scenario, tmp_path, spare_episodes=1)


@pytest.mark.thorough
def test_a_server_that_has_learned_its_last_batch_plays_on_for_the_others(tmp_path: Path) -> None:
    """Another client makes the anchor learn a batch, so that the anchor reaches its `max_steps` before the other
    server."""

    async def scenario(servers: Both) -> None:
        wire, begins = Wire(), []

        async def overtake(request: httpx.Request) -> None:
            if request.method == "POST" and request.url.path.endswith("/episodes") and not begins:
                begins.append(request)
                await servers.anchor.run.batch()

        wire.before = overtake
        async with servers.team({servers.names[0]: wire}) as team:
            report = await team.train(agent, TASKS, steps=2, concurrency=4, progress=False)
        assert {member: len(steps) for member, steps in report.steps.items()} == {"planner": 2, "coder": 2}
        ended = {member: {p.team: p.mode for p in parts} for member, parts in servers.episodes("finished").items()}
        played_on = {name for name, mode in ended["planner"].items() if mode == "eval"}
        assert played_on and {ended["coder"][name] for name in played_on} == {"train"}
        assert not servers.episodes("prepared")["coder"]

    run(scenario, tmp_path, max_steps=2)


def test_a_task_set_without_room_on_one_server_is_passed_over(tmp_path: Path) -> None:
    tasks = [Task(f"many{number}", "many") for number in range(8)] + [Task("one", "one")]

    async def length(task: Task, episode: AsyncTeamEpisode) -> float:
        await say(episode)
        return float(len(episode.task_id))

    async def scenario(servers: Both) -> None:
        async with servers.team() as team:
            report = await team.train(length, tasks, steps=4, concurrency=4, progress=False)
        for member in servers.names:
            shares = [step.metrics.get("batch/share/one", 0.0) for step in report.steps[member]]
            assert sum(shares) >= 1.5, "of the first batch it may have none: it had not been asked for"

    run(scenario, tmp_path, task_weights={"many": 1.0, "one": 1.0})
