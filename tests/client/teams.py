"""Two real servers in the test's process, over scripted workers, and teams on them whose wires can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from agentjet.client import AsyncSwarm, AsyncTeam, AsyncTeamEpisode, Retry
from agentjet.swarm.state import Episode
from agentjet.types import Task
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
            member: served.run.gateway.swarm.queries.recent_episodes(1000, status=status)
            for member, served in self.servers.items()
        }

    def statuses(self, team: str = "") -> list[str]:
        """The status of a team's episode, or of the only one: on the anchor and on the other server."""
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
