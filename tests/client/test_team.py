"""Teams against two real servers in this process, over scripted workers.

1. Both servers learn from the same episodes, each from its member's rewards. 2. Begin is all or none, and so is every
end. 3. Rewards are checked before anything is sent.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentjet.client import AsyncSwarm, AsyncTeam, Retry, Swarm, Team, TeamEpisode
from agentjet.client.threads import LoopThread
from agentjet.errors import Conflict, InvalidRequest, Later
from agentjet.types import Reward, Task
from tests.client.teams import MEMBERS, TASKS, Both, agent, both, run
from tests.server.serving import TOKEN, Served, serving

# ---- 1. both learn ------------------------------------------------------------------------------------------------


def test_both_servers_learn_from_the_same_episodes_each_from_its_own_rewards(tmp_path: Path) -> None:
    async def scenario(servers: Both) -> None:
        async with servers.team() as team:
            report = await team.train(agent, TASKS, steps=2, concurrency=8, progress=False)
        assert {member: [step.policy_version for step in steps] for member, steps in report.steps.items()} == {
            "planner": [1, 2],
            "coder": [1, 2],
        }
        assert report.num_aborted == report.num_expired == 0
        ends = servers.episodes("finished")
        pairs = {episode.team: episode for episode in ends["planner"]}
        assert len(pairs) == len(ends["coder"]) == len(report.finished) >= 8
        for part in ends["coder"]:
            pair = pairs[part.team]
            assert (part.group, part.task_id) == (pair.group, pair.task_id)
            assert (pair.reward, part.reward) in ((0.0, 1.0), (1.0, 0.0))
            assert (pair.group_id is None, pair.num_calls, part.num_calls) == (False, 1, 1)
        assert not any(sum(map(len, servers.episodes(status).values())) for status in ("live", "prepared"))

    run(scenario, tmp_path)


def test_an_evaluation_over_both_trains_nothing(tmp_path: Path) -> None:
    async def scenario(servers: Both) -> None:
        async with servers.team() as team:
            report = await team.evaluate(agent, TASKS[:2], repeats=2, progress=False)
        assert report.mean_reward == 0.5 and len(report.finished) == 4
        assert report.finished[0].by_role == {"planner": 0.0, "coder": 1.0}
        for episodes in servers.episodes("finished").values():
            assert [episode.mode for episode in episodes] == ["eval"] * 4

    run(scenario, tmp_path)


def test_different_group_sizes_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            serving(tmp_path / "one" / "data") as one,
            serving(tmp_path / "two" / "data", job={"group_size": 4}) as two,
            Both({"planner": one, "coder": two}).team() as team,
        ):
            with pytest.raises(InvalidRequest, match="different group_size"):
                await team.train(agent, TASKS, steps=1, progress=False)

    asyncio.run(scenario())


def test_a_team_of_one_or_of_one_server_is_refused() -> None:
    one, again = AsyncSwarm("http://127.0.0.1:1", TOKEN), AsyncSwarm("http://127.0.0.1:1", TOKEN)
    with pytest.raises(ValueError, match="at least two members"):
        AsyncTeam({"planner": one})
    with pytest.raises(ValueError, match="policy@ROLE"):
        AsyncTeam({"planner": one, "coder": again})
    with pytest.raises(ValueError, match="no name of a member"):
        AsyncTeam({"a/b": one, "coder": AsyncSwarm("http://127.0.0.1:2", TOKEN)})


# ---- 2. all or none -----------------------------------------------------------------------------------------------


async def fill(served: Served) -> list[str]:
    """Somebody else takes every place; returns the episodes."""
    begun = []
    for number in range(4):
        answer = await served.begin(task_id=f"x{number // 2}", client_id="else")
        begun.append(answer["episode_id"])
    return begun


def test_without_room_on_one_server_nothing_is_held_on_the_other(tmp_path: Path) -> None:
    async def scenario(servers: Both) -> None:
        await fill(servers.other)
        async with servers.team() as team:
            with pytest.raises(Later):
                await team.begin("t", wait=0.0)
        (given_back,) = servers.episodes()[servers.names[0]]
        assert given_back.status == "aborted" and given_back.reason.startswith("not needed: another server")

    run(scenario, tmp_path)


def test_it_begins_when_there_is_room_on_both(tmp_path: Path) -> None:
    async def scenario(servers: Both) -> None:
        taken = await fill(servers.other)
        async with servers.team(retry=Retry(first_delay=0.001, longest_delay=0.01)) as team:
            beginning = asyncio.create_task(team.begin("t", group="g", wait=60.0))
            await servers.anchor.run.until(lambda: servers.episodes("live")[servers.names[0]] != [])
            for episode_id in taken:
                await servers.other.http.post(f"/swarm/v1/episodes/{episode_id}/abort", json={})
            episode = await beginning
            assert servers.statuses(episode.team) == ["live", "live"]
            await episode.abort("enough")
            assert servers.statuses(episode.team) == ["aborted", "aborted"]

    run(scenario, tmp_path)


def test_an_exception_and_leaving_without_a_reward_abort_everywhere(tmp_path: Path) -> None:
    async def scenario(servers: Both) -> None:
        async with servers.team() as team:
            with pytest.raises(RuntimeError):
                async with team.episode("t"):
                    raise RuntimeError("broken")
        assert servers.statuses() == ["aborted", "aborted"]
        assert {episode.reason for (episode,) in servers.episodes().values()} == {"RuntimeError: broken"}

    run(scenario, tmp_path)


def test_when_one_part_ended_the_heartbeat_ends_the_other_for_the_same_reason(tmp_path: Path) -> None:
    async def scenario(servers: Both) -> None:
        async with servers.team() as team:
            episode = await team.begin("t")
            lost = episode[servers.names[1]].id
            await servers.other.http.post(f"/swarm/v1/episodes/{lost}/abort", json={"reason": "surplus: enough"})
            with pytest.raises(Conflict):
                await episode.heartbeat()
            assert (episode.status, episode.reason) == ("aborted", "surplus: enough")
        (anchored,) = servers.episodes()[servers.names[0]]
        assert (anchored.status, anchored.reason) == ("aborted", f"surplus: enough (the part of {servers.names[1]})")

    run(scenario, tmp_path)


@pytest.mark.parametrize("ended", [0, 1])
def test_a_part_that_ended_takes_the_reward_of_all(tmp_path: Path, ended: int) -> None:
    async def scenario(servers: Both) -> None:
        async with servers.team() as team:
            episode = await team.begin("t")
            server = list(servers.servers.values())[ended]
            await server.http.post(f"/swarm/v1/episodes/{episode[servers.names[ended]].id}/abort", json={})
            with pytest.raises(Conflict):
                await episode.finish(1.0)
            assert episode.reward is None and episode.status == "aborted"
        assert servers.statuses() == ["aborted", "aborted"]

    run(scenario, tmp_path)


# ---- 3. rewards ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "shares", "value"),
    [
        (1.0, {"planner": Reward(1.0), "coder": Reward(1.0)}, 1.0),
        ({"planner": 1.0, "coder": 0.5}, {"planner": Reward(1.0), "coder": Reward(0.5)}, 0.75),
        (Reward(0.0, {"coder": 1.0}), {"planner": Reward(0.0), "coder": Reward(1.0)}, 0.5),
        (
            {"planner": 0.0, "coder": Reward(1.0, {"critic": -1.0}, {"lines": 3.0})},
            {"planner": Reward(0.0, {}, {"lines": 3.0}), "coder": Reward(1.0, {"critic": -1.0}, {"lines": 3.0})},
            0.5,
        ),
        (
            Reward(1.0, {"coder/critic": 0.0}),
            {"planner": Reward(1.0), "coder": Reward(1.0, {"critic": 0.0})},
            1.0,
        ),
    ],
)
def test_rewards_of_members(tmp_path: Path, returned: Any, shares: dict[str, Reward], value: float) -> None:
    async def scenario(servers: Both) -> None:
        async with servers.team() as team:
            episode = await team.begin("t")
            await episode.finish(episode.checked(returned))
            assert episode.reward is not None and episode.reward.value == value
        for member, (part,) in servers.episodes().items():
            assert Reward(part.reward or 0.0, part.by_role, part.metrics) == shares[member]

    run(scenario, tmp_path)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({"planner": 1.0}, "no reward for 'coder'"),
        ({"planner": 1.0, "coder": 1.0, "critic": 1.0}, "'critic', who is not in the team"),
        (Reward(1.0, {"critic": 1.0}), "'critic', who is not in the team"),
        ({"planner": 1.0, "coder": float("nan")}, "finite"),
        ("good", "good"),
    ],
)
def test_wrong_rewards_are_refused_before_anything_is_sent(tmp_path: Path, returned: Any, said: str) -> None:
    async def scenario(servers: Both) -> None:
        async with servers.team() as team:
            episode = await team.begin("t")
            with pytest.raises(InvalidRequest, match=said):
                await episode.finish(returned)
            assert servers.statuses() == ["live", "live"] == [episode.status] * 2

    run(scenario, tmp_path)


def test_the_synchronous_team(tmp_path: Path) -> None:
    loop = LoopThread()
    context = both(tmp_path)
    servers = loop.run(context.__aenter__())

    def plain(task: Task, episode: TeamEpisode) -> float:
        with httpx.Client(verify=False, trust_env=False) as http:
            for part in episode.values():
                body = {"model": part.model, "messages": [{"role": "user", "content": task.id}]}
                headers = {"Authorization": f"Bearer {part.api_key}"}
                http.post(f"{part.base_url}/chat/completions", json=body, headers=headers).raise_for_status()
        return float(len(task.id))

    swarms = {member: Swarm(served.url, TOKEN) for member, served in servers.servers.items()}
    with Team(swarms) as team:
        with team.episode("t", mode="eval") as episode:
            assert set(episode) == set(MEMBERS) and episode.task_id == "t"
            episode.heartbeat()
            episode.finish({"planner": 1.0, "coder": 0.0})
        assert servers.statuses() == ["finished", "finished"]
        report = team.train(plain, TASKS, steps=1, concurrency=4, progress=False)
        assert [len(steps) for steps in report.steps.values()] == [1, 1] and team.recover() == 0
        assert team.evaluate(plain, TASKS[:1], progress=False).mean_reward == 2.0
    for swarm in swarms.values():
        swarm.close()
    loop.run(context.__aexit__(None, None, None))
    loop.stop()
