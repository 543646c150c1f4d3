"""The client of a team's episode dies, or a server is away, during its finish. Recovery carries out the anchor's
decision once, undoes nothing, and leaves live episodes alone."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from agentjet.client import AsyncTeamEpisode
from agentjet.errors import Conflict, Unreachable
from tests.client.teams import TASKS, Both, Wire, agent, at, run, say


async def crash(servers: Both, wires: dict[str, Wire]) -> AsyncTeamEpisode:
    """A client that dies while it finishes an episode: from some request on nothing leaves it."""
    async with servers.team(wires) as team:
        episode = await team.begin("t", group="g")
        await say(episode)
        with suppress(Unreachable):
            await episode.finish({"planner": 1.0, "coder": 0.25})
        return episode


def test_a_client_that_dies_between_promise_and_decision_scores_nothing(tmp_path: Path) -> None:
    async def scenario(servers: Both) -> None:
        await crash(servers, {servers.names[0]: Wire(at("finish"))})
        assert servers.statuses() == ["live", "prepared"]
        async with servers.team() as team:
            assert await team.recover() == 0, "its client may live"
            assert servers.statuses() == ["live", "prepared"]
            servers.anchor.run.clock.advance(servers.anchor.run.gateway.swarm.job.lease_seconds + 1)
            servers.anchor.run.gateway.swarm.reap()
            assert await team.recover() == 1
            assert servers.statuses() == ["expired", "aborted"]
            assert await team.recover() == 0

    run(scenario, tmp_path)


def test_a_decision_whose_answer_was_lost_is_carried_out(tmp_path: Path) -> None:
    """The client does not get the answer. Neither its abort nor another client's undoes the decision."""

    async def scenario(servers: Both) -> None:
        wire = Wire(at("finish"), early=False)
        episode = await crash(servers, {servers.names[0]: wire})
        assert episode.reward is None and servers.statuses() == ["finished", "prepared"]
        async with servers.team() as team:
            assert await team.recover() == 1
            assert servers.statuses() == ["finished", "finished"]
            assert await team.recover() == 0
        (second,) = servers.episodes()[servers.names[1]]
        assert second.reward == 0.25

    run(scenario, tmp_path)


def test_a_client_that_could_not_hear_the_decision_does_not_abort_what_it_decided(tmp_path: Path) -> None:
    async def scenario(servers: Both) -> None:
        wire = Wire(at("finish"), early=False)
        async with servers.team({servers.names[0]: wire}) as team:
            episode = await team.begin("t")
            with pytest.raises(Unreachable):
                await episode.finish(1.0)
            with pytest.raises(Unreachable):
                await episode.abort("giving up")
            assert servers.statuses() == ["finished", "prepared"]
            wire.is_down, wire.cut = False, lambda request: False
            with pytest.raises(Conflict) as refused:
                await episode.abort("giving up")
            assert refused.value.code == "episode_finished"
            assert servers.statuses() == ["finished", "prepared"]
            assert await team.recover() == 1
        assert servers.statuses() == ["finished", "finished"]

    run(scenario, tmp_path)


def test_a_server_away_after_the_decision_hears_of_it_when_it_is_back(tmp_path: Path) -> None:
    async def scenario(servers: Both) -> None:
        wire = Wire(at("finish"))
        async with servers.team({servers.names[1]: wire}) as team:
            episode = await team.begin("t")
            await episode.finish(1.0)
            assert episode.reward is not None and list(episode.unsettled) == [servers.names[1]]
            assert servers.statuses() == ["finished", "prepared"]
            wire.is_down, wire.cut = False, lambda request: False
            assert await team.recover() == 1
        assert servers.statuses() == ["finished", "finished"]

    run(scenario, tmp_path)


def test_what_is_just_being_finished_here_is_not_recovered(tmp_path: Path) -> None:
    async def scenario(servers: Both) -> None:
        recovered: list[int] = []
        wire = Wire()
        async with servers.team({servers.names[1]: wire}) as team:

            async def recover(request: httpx.Request) -> None:
                if at("finish")(request) and not recovered:
                    recovered.append(-1)
                    recovered.append(await team.recover())

            wire.before = recover
            await (await team.begin("t")).finish(1.0)
            assert recovered == [-1, 0]
        assert servers.statuses() == ["finished", "finished"]

    run(scenario, tmp_path)


def test_a_server_that_moved_is_recovered_all_the_same(tmp_path: Path) -> None:
    """The order of the addresses is another one then: whom to ask is in the team's id."""

    async def scenario(servers: Both) -> None:
        await crash(servers, {servers.names[0]: Wire(at("finish"), early=False)})
        async with servers.team() as team:
            team._connections = dict(reversed(team._connections.items()))
            assert await team.recover() == 1
        assert servers.statuses() == ["finished", "finished"]

    run(scenario, tmp_path)


def test_parts_of_other_teams_are_nobodys_business(tmp_path: Path) -> None:
    async def scenario(servers: Both) -> None:
        begun = await servers.other.begin(team="somebody/else")
        body = {"reward": 1.0}
        await servers.other.http.post(f"/swarm/v1/episodes/{begun['episode_id']}/prepare", json=body)
        async with servers.team() as team:
            assert await team.recover() == 0
        assert [episode.status for episode in servers.episodes()[servers.names[1]]] == ["prepared"]

    run(scenario, tmp_path)


def test_a_run_settles_what_an_earlier_client_left(tmp_path: Path) -> None:
    async def scenario(servers: Both) -> None:
        await crash(servers, {servers.names[0]: Wire(at("finish"), early=False)})
        async with servers.team() as team:
            await team.train(agent, TASKS, steps=1, concurrency=8, progress=False)
        teams = [{part.team for part in parts} for parts in servers.episodes("finished").values()]
        assert teams[0] == teams[1]

    run(scenario, tmp_path)
