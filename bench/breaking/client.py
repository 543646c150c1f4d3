"""A client process: `python -m bench.breaking.client SETTINGS`. Agents with OpenAI's SDK, some of which raise or hang.

Groups run one after the other, each as `Swarm.train` would run it: the members side by side, and a member whose agent
failed is begun again. Everything is written into a `Book`. Orders arrive as lines on standard input: `hang silent`,
`hang busy`, `stop`. At the end of the input the process ends at once, as if it were killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError

from agentjet import AsyncSwarm
from agentjet.client import AsyncEpisode
from agentjet.errors import AgentJetError, Conflict, Later
from bench.breaking.audit import Book

TRIES = 3
REWARDS = (0.25, 0.5, 0.75, 1.0)  # Never 0: a 0 in the journal was put there by somebody else
Score = float | dict[str, float]  # The reward of an episode; in a run with policies that of each


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The settings that a client reads from its command line."""

    url: str
    token: str
    client_id: str
    book: str
    seed: str
    group_size: int
    lease_seconds: float
    max_retries: int = 2  # OpenAI's own default

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class ToolCrashed(Exception):
    """Raised by an agent of this bench: the environment's fault, not the policy's."""


class ChaosClient:
    """Runs until it is ordered to stop, or is killed."""

    def __init__(self, settings: ClientSettings, swarm: AsyncSwarm, llm: AsyncOpenAI) -> None:
        self._settings = settings
        self._swarm = swarm
        self._llm = llm
        self._book = Book(Path(settings.book))
        self._dice = random.Random(settings.seed)
        self._hangs: list[str] = []
        self._stopping = False

    async def run(self) -> None:
        orders = asyncio.create_task(self._listen())
        num_groups = 0
        while not self._stopping:
            num_groups += 1
            group = f"{self._settings.seed}/{num_groups}"
            await asyncio.gather(*(self._member(group) for _ in range(self._settings.group_size)))
        orders.cancel()

    async def _listen(self) -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            verb, _, how = line.decode().strip().partition(" ")
            if verb == "hang":
                self._hangs.append(how)
            elif verb == "stop":
                self._stopping = True
        os._exit(1)  # The bench is gone.

    async def _member(self, group: str) -> None:
        """One member of a group, begun again if its agent fails."""
        for _ in range(TRIES):
            while not self._stopping:
                try:
                    if await self._attempt(group):
                        return
                    break
                except Later:  # No room in this batch.
                    continue
                except AgentJetError as error:
                    print(f"{self._settings.client_id}: {type(error).__name__}: {error}", file=sys.stderr)
                    await asyncio.sleep(0.2)

    async def _attempt(self, group: str) -> bool:
        """True if the episode is over for this client; False if its agent raised."""
        episode: AsyncEpisode | None = None
        try:
            async with self._swarm.episode(group.rpartition("/")[0], group=group, wait=2.0) as episode:
                self._book.note("begun", episode.id)
                try:
                    reward = await self._agent(episode)
                except Exception as error:
                    self._book.note("failed", episode.id, error=type(error).__name__)
                    raise
                await self._finish(episode, reward)
                return True
        except AgentJetError:
            if episode is None:
                raise
            return True  # It ended otherwise: expired, or the server could not be reached.
        except Exception:  # The agent's own failure, which the context made an abort of: that is what is counted.
            if episode is not None and episode.status == "aborted":
                self._book.note("aborted", episode.id)
            return False

    async def _finish(self, episode: AsyncEpisode, reward: Score) -> None:
        self._book.note("scoring", episode.id, reward=reward)
        try:
            await episode.finish(reward)
        except Conflict as error:
            self._book.note("refused", episode.id, code=error.code)
            raise
        self._book.note("finished", episode.id, reward=reward)

    async def _agent(self, episode: AsyncEpisode) -> Score:
        """A few turns; sometimes the agent raises in between. The reward does not depend on the completions.

        In a run with policies, a turn is a call of each policy in its own conversation, one after the other.
        """
        dice = random.Random(self._dice.random())
        hang = self._hangs.pop() if self._hangs else ""
        start = {"role": "user", "content": f"Say something about {dice.randrange(100)}."}
        talks: dict[str, list[Any]] = {policy: [start] for policy in episode.policies or ("policy",)}
        llm = self._llm.with_options(base_url=episode.base_url, api_key=episode.api_key)
        for turn in range(dice.choice((1, 2, 2, 3))):
            for policy, messages in talks.items():
                how = dice.choice(("plain", "plain", "streamed", "wide"))
                try:
                    await self._ask(llm, episode, policy, messages, how)
                except (OpenAIError, httpx.TransportError) as error:  # Later failures of a stream are not wrapped.
                    self._book.note("call failed", episode.id, how=how, error=f"{type(error).__name__}: {error}")
                    raise
                messages.append({"role": "user", "content": "And then?"})
            if hang:
                await self._hang(episode, hang)
                return 1.0  # Much too late.
            if dice.random() < 0.08:
                raise ToolCrashed(f"after turn {turn}")
            await asyncio.sleep(0.3 * dice.random())
        rewards = {policy: dice.choice(REWARDS) for policy in talks}
        return rewards if episode.policies else rewards["policy"]

    async def _ask(self, llm: AsyncOpenAI, episode: AsyncEpisode, policy: str, messages: list[Any], how: str) -> None:
        """One call, plain, streamed, or for many completions at once."""
        create = llm.chat.completions.create
        if how == "streamed":
            call_text = ""
            async for chunk in await create(model=policy, messages=messages, stream=True):
                if chunk.choices:
                    call_text += chunk.choices[0].delta.content or ""
        else:
            wide: dict[str, Any] = {"n": 8, "max_tokens": 24} if how == "wide" else {}
            answer = await create(model=policy, messages=messages, **wide)
            call_text = answer.choices[0].message.content or ""
            self._book.note("call", episode.id, call=answer.id.removeprefix("chatcmpl-"), text=call_text)
        messages.append({"role": "assistant", "content": call_text})

    async def _hang(self, episode: AsyncEpisode, how: str) -> None:
        """Until long after the lease; `busy` with heartbeats, until the server has had enough of them."""
        self._book.note("hung", episode.id)
        episode._heartbeats.cancel()  # The whole process hangs, so that its thread sends none.
        until = time.monotonic() + 2 * self._settings.lease_seconds + 1
        while time.monotonic() < until or how == "busy":
            await asyncio.sleep(0.5)
            if how == "busy":
                await episode.heartbeat()  # Raises once the episode is over.
                self._book.note("hung", episode.id, how=how)


async def main(settings: ClientSettings) -> None:
    async with (
        AsyncSwarm(settings.url, settings.token, client_id=settings.client_id) as swarm,
        AsyncOpenAI(
            base_url=settings.url,
            api_key="-",
            max_retries=settings.max_retries,
            http_client=DefaultAsyncHttpxClient(trust_env=False),
        ) as llm,
    ):
        await ChaosClient(settings, swarm, llm).run()


if __name__ == "__main__":
    asyncio.run(main(ClientSettings(**json.loads(sys.argv[1]))))
