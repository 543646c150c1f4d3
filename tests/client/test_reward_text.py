"""The text of a reward reaches the server by every way, and everyone who reads the episode.

Against the real application over a scripted worker. One that is too long is cut by a client, and refused over HTTP.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import warnings
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentjet.cli.program import reward_source
from agentjet.client import AsyncSwarm, Command
from agentjet.client.episode import checked_reward, finish_body
from agentjet.errors import InvalidRequest
from agentjet.types import MAX_REWARD_TEXT, Reward, Task
from tests.client.test_evaluation import client
from tests.server.serving import Served, serving

TEXT = 'expected "30",\ngot <b>31</b> – ☂'
PRINTS = "import json, sys; print(json.dumps({'reward': 0, 'text': sys.argv[1]}))"


async def returned(served: Served, swarm: AsyncSwarm) -> None:
    report = await swarm.evaluate(lambda task, episode: Reward(0.0, text=TEXT), [Task("t")], progress=False)
    assert [result.reward_text for result in report.results] == [TEXT]


async def printed(served: Served, swarm: AsyncSwarm) -> None:
    judge, _ = reward_source("stdout")
    await swarm.evaluate(Command([sys.executable, "-c", PRINTS, TEXT], judge), [Task("t")], progress=False)


async def of_the_handle(served: Served, swarm: AsyncSwarm) -> None:
    async with swarm.episode("t", mode="eval") as episode:
        await episode.finish(Reward(0.0, text=TEXT))


async def of_another_process(served: Served, swarm: AsyncSwarm) -> None:
    episode = await swarm.begin("t", mode="eval")
    await swarm.finish(episode.id, Reward(0.0, text=TEXT))


async def over_http(served: Served, swarm: AsyncSwarm) -> None:
    path = f"/swarm/v1/episodes/{(await served.begin(mode='eval'))['episode_id']}/finish"
    too_long = await served.http.post(path, json={"reward": 0, "text": "x" * (MAX_REWARD_TEXT + 1)})
    assert too_long.status_code == 422 and "text" in too_long.text
    assert (await served.http.post(path, json={"reward": 0, "text": TEXT})).json()["reward_text"] == TEXT
    again = await served.http.post(path, json={"reward": 0, "text": TEXT})
    assert (again.status_code, again.json()["reward_text"]) == (200, TEXT)
    other = await served.http.post(path, json={"reward": 0, "text": "expected 31"})
    assert (other.status_code, other.json()["code"]) == (409, "episode_finished")


@pytest.mark.parametrize("way", [returned, printed, of_the_handle, of_another_process, over_http])
def test_the_text_is_read_where_the_reward_is(
    way: Callable[[Served, AsyncSwarm], Awaitable[None]], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "data") as served, client(served.url) as swarm:
            await way(served, swarm)
            [listed] = (await swarm.episodes()).episodes
            assert (listed.reward, listed.reward_text) == (0.0, TEXT)
            assert (await swarm.episode_tree(listed.episode_id)).reward_text == TEXT
            found = [(await swarm.episodes(text=text)).episodes for text in (TEXT[3:20], "31</b> – ☂", "expected 30")]
            assert found == [[listed], [listed], []]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("given", "policies", "sent"),
    [
        (Reward(0.0), (), ""),
        (1.0, (), ""),
        (Reward(0.0, text="broken \ud800"), (), "broken ?"),
        (
            {"planner": Reward(0.0, text="no plan"), "coder": 1.0, "judge": Reward(1.0, text="fair")},
            ("planner", "coder", "judge"),
            "planner: no plan\njudge: fair",
        ),
    ],
)
def test_the_text_that_is_sent(given: float | Reward | Mapping[str, Any], policies: tuple[str, ...], sent: str) -> None:
    assert finish_body(checked_reward(given, policies)).text == sent


def test_a_long_text_is_cut_and_this_is_printed_once_for_the_line_that_made_it() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        rewards = [Reward(0.0, text=letter * (MAX_REWARD_TEXT + number)) for number, letter in enumerate("abcd")]
        texts = [finish_body(checked_reward(reward)).text for reward in rewards]
    assert texts == [letter * MAX_REWARD_TEXT for letter in "abcd"]
    [one] = shown
    assert str(one.message) == "the text of a reward is cut to its first 10000 characters"
    assert (one.filename, one.lineno) == (__file__, line)


def test_texts_that_are_too_long_together_show_their_cut() -> None:
    long, short = Reward(0.0, text="x" * MAX_REWARD_TEXT), Reward(0.0, text="short")
    both = checked_reward({"one": long, "two": long, "three": short}, ("one", "two", "three")).text
    first, second, third = both.split("\n")
    assert first.startswith("one: xxx") and first.endswith("x…") and second == first.replace("one", "two")
    assert third == "three: short" and 6_000 < len(both) <= MAX_REWARD_TEXT


@pytest.mark.parametrize("wrong", [30, None, b"30", ["30"]])
def test_another_value_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^text is .*: give the reason for the reward as text"):
        Reward(0.0, text=wrong)
