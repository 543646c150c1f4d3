"""Teams against two real servers in this process, over scripted workers.

1. Both servers learn from the same episodes, each from its member's rewards. 2. Begin is all or none, and so is every
end: whoever dies, and whenever, both journals tell the same in the end. 3. Recovery carries out what the anchor
decided, once, and leaves alone what still lives. 4. Rewards are checked before anything is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentjet.client import AsyncSwarm, AsyncTeam, AsyncTeamEpisode, Retry, Team, TeamEpisode
from agentjet.client.synchronous import Swarm
from agentjet.client.threads import LoopThread
from agentjet.errors import Conflict, InvalidRequest, Later, Unreachable
from agentjet.swarm.records import Episode
from agentjet.types import Reward, Task
from tests.server.serving import TOKEN, Served, serving

TASKS = [Task(f"t{number}") for number in range(6)]
QUICK = Retry(patience=0.0, first_patience=0.0, first_delay=0.001, longest_delay=0.01)
MEMBERS = ("planner", "coder")


@dataclass
class Wire(httpx.AsyncHTTPTransport):
    """The way to one server. A request for which `cut` is true breaks it for good: before the request when `early`,
    else after the server has carried it out.
    """

    cut: Callable[[httpx.Request], bool] = lambda request: False
    early: bool = True
    is_down: bool = False
    before: Callable[[httpx.Request], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        super().__init__(verify=False, trust_env=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        cut = self.cut(request)
        if self.before is not None:
            await self.before(request)
        self.is_down = self.is_down or (cut and self.early)
        if self.is_down:
            raise httpx.ConnectError("cut", request=request)
        response = await super().handle_async_request(request)
        if cut:
            self.is_down = True
            await response.aread()
            raise httpx.ReadError("cut", request=request)
        return response


def at(verb: str) -> Callable[[httpx.Request], bool]:
    return lambda request: request.url.path.endswith(f"/{verb}")


@dataclass
class Both:
    """Two servers, the anchor's first."""

    servers: dict[str, Served]

    def team(self, wires: dict[str, Wire] | None = None, retry: Retry = QUICK) -> AsyncTeam:
        """A new client of both."""
        wires = wires or {}
        return AsyncTeam(
            {
                member: AsyncSwarm(served.url, TOKEN, client_id="team", retry=retry, transport=wires.get(member))
                for member, served in self.servers.items()
            }
        )

    @property
    def anchor(self) -> Served:
        return next(iter(self.servers.values()))

    @property
    def other(self) -> Served:
        return list(self.servers.values())[1]

    @property
    def names(self) -> tuple[str, str]:
        first, second = self.servers
        return first, second

    def episodes(self, status: Any = None) -> dict[str, list[Episode]]:
        return {
            member: served.run.gateway.swarm.recent_episodes(1000, status=status)
            for member, served in self.servers.items()
        }

    def statuses(self, team: str = "") -> list[str]:
        """Of a team's episode, or the only one: its status on the anchor and on the other server."""
        chosen = [[part for part in parts if team in ("", part.team)] for parts in self.episodes().values()]
        (first,), (second,) = chosen
        assert first.team == second.team
        return [first.status, second.status]


@asynccontextmanager
async def both(folder: Path, **job: Any) -> AsyncIterator[Both]:
    async with (
        serving(folder / "one" / "data", job=job) as one,
        serving(folder / "two" / "data", job=job) as two,
    ):
        ordered = sorted([one, two], key=lambda served: served.url)
        yield Both(dict(zip(MEMBERS, ordered, strict=True)))


def run(scenario: Callable[[Both], Any], folder: Path, **job: Any) -> None:
    async def scene() -> None:
        async with both(folder, **job) as servers:
            await scenario(servers)

    asyncio.run(scene())


async def say(episode: AsyncTeamEpisode, *members: str) -> None:
    async with httpx.AsyncClient(verify=False, trust_env=False) as http:
        for member in members or tuple(episode):
            part = episode[member]
            answer = await http.post(
                f"{part.base_url}/chat/completions",
                json={"model": part.model, "messages": [{"role": "user", "content": member}]},
                headers={"Authorization": f"Bearer {part.api_key}"},
            )
            answer.raise_for_status()


async def agent(task: Task, episode: AsyncTeamEpisode) -> dict[str, float]:
    await say(episode)
    value = float(TASKS.index(task) % 2)
    return {"planner": value, "coder": 1.0 - value}


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
        (given_back,) = servers.episodes()[team.anchor]
        assert given_back.status == "aborted" and given_back.reason.startswith("not needed: another server")

    run(scenario, tmp_path)


def test_it_begins_when_there_is_room_on_both(tmp_path: Path) -> None:
    async def scenario(servers: Both) -> None:
        taken = await fill(servers.other)
        async with servers.team(retry=Retry(first_delay=0.001, longest_delay=0.01)) as team:
            beginning = asyncio.create_task(team.begin("t", group="g", wait=60.0))
            await servers.anchor.run.until(lambda: servers.episodes("live")[team.anchor] != [])
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


# ---- 3. recovery --------------------------------------------------------------------------------------------------


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
    """The client does not know that it was heard; neither its abort nor anybody's undoes what was decided."""

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
            team.anchor = servers.names[1]
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


# ---- 4. rewards ---------------------------------------------------------------------------------------------------


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
