"""TextArena's games through the pool of processes, against a scripted model.

1. Tasks are seeds with the same ids in every process. 2. A game with one player, one against a random player, and
self-play with a role for each side. 3. Games that cannot be played are an error with the way out.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from agentjet import environments
from agentjet.cli.env import turns
from agentjet.errors import AgentJetError, ConfigError
from tests.environments.test_training import client
from tests.fakes import saying
from tests.needs import need
from tests.server.serving import Served, serving

need("textarena")
pytestmark = pytest.mark.anyio


def a_move(prompt: str) -> str:
    """One of the moves that the game lists last, chosen by the prompt."""
    listed = re.findall(
        r"\[[^\[\]\n]+\]", re.split(r"Available (?:Moves|Actions):", prompt)[-1].partition("<|im_end|>")[0]
    )
    return f'"{random.Random(zlib.crc32(prompt.encode())).choice(listed)}"'


def test_tasks_are_the_same_in_each_process() -> None:
    listings = []
    for _ in range(2):
        with environments.load("textarena:TicTacToe-v0", num_tasks=20, seed=5) as game:
            listings.append([(task.id, dict(task.payload)) for task in [*game.tasks, *game.held_out]])
            assert 0 < len(game.held_out) < 10
    assert listings[0] == listings[1]
    assert ("seed-5", {"seed": 5, "players": 2, "seat": 1}) in listings[0]


@pytest.mark.parametrize(
    ("game", "settings", "values"),
    [
        ("FrozenLake-v0", {"max_turns": 5}, (0.0, 1.0)),
        ("TicTacToe-v0", {}, (-1.0, 1.0)),
        ("TicTacToe-v0-raw", {"actions": tuple(f"[{square}]" for square in range(9))}, (-1.0, 1.0)),
    ],
)
async def test_a_seat_is_played(
    game: str, settings: dict[str, Any], values: tuple[float, float], tmp_path: Path
) -> None:
    with environments.load(f"textarena:{game}", num_tasks=4, processes=2, held_out=0, **settings) as environment:
        async with serving(tmp_path / "data", saying(a_move)) as served, client(served) as swarm:
            report = await swarm.evaluate(environment.agent, environment.tasks, progress=False)
            texts = {str(asked.params.grammar) for asked in served.run.compute.asked}
    assert report.num_aborted == 0, report.errors
    assert all(values[0] <= result.reward <= values[1] for result in report.finished if result.reward is not None)
    assert all('"enum": [' in text for text in texts), "actions are enforced"
    assert report.mean_metric("turns") >= 1
    assert report.mean_metric("completed") == 1.0 or game == "FrozenLake-v0", "five moves seldom reach its goal"


async def test_both_sides_are_the_policy_in_roles(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"opponent": "self", "num_tasks": 2, "held_out": 0, "processes": 1}
    with environments.load("textarena:TicTacToe-v0", **settings) as environment:
        served: Served

        def a_later_move(prompt: str) -> str:
            served.run.clock.advance(1)
            return a_move(prompt)

        async with serving(tmp_path / "data", saying(a_later_move)) as served, client(served) as swarm:
            async with swarm.episode(environment.tasks[0].id) as episode:
                played = await environment.play(environment.tasks[0], episode, with_actions=True)
                reward = played.reward
                await episode.finish(reward)
            shown = list(turns(await swarm.episode_tree(episode.id), played))
    assert [turn["role"] for turn in shown[:4]] == ["player_0", "player_1"] * 2, "in the order of the game"
    assert all(json.loads(turn["answer"]["content"]) in turn["actions"] for turn in shown), "its own actions"
    assert sum(reward.by_role.values()) == 0.0 and reward.value == 1.0
    assert isinstance(reward.by_turn, dict)
    assert {name: turns[-1] for name, turns in reward.by_turn.items()} == reward.by_role
    assert reward.metrics == {"turns": 9.0, "completed": 1.0, "invalid": 0.0} or reward.text


async def test_invalid_moves_end_the_game_by_its_own_rule(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"actions": "free", "opponent": "self", "num_tasks": 1, "held_out": 0}
    with environments.load("textarena:TicTacToe-v0", **settings) as environment:
        async with serving(tmp_path / "data", saying(lambda prompt: "Hello.")) as served, client(served) as swarm:
            report = await swarm.evaluate(environment.agent, environment.tasks, progress=False)
    [result] = report.finished
    assert (result.reward, report.mean_metric("invalid"), report.mean_metric("turns")) == (0.0, 1.0, 2.0)


async def test_a_reward_out_of_range_is_a_failure(tmp_path: Path) -> None:
    reason = "outside of -0.5 to 0.5: set reward_range if the game's range is another"
    settings: dict[str, Any] = {"reward_range": (-0.5, 0.5), "num_tasks": 1, "held_out": 0}
    with environments.load("textarena:TicTacToe-v0", opponent="self", **settings) as environment:
        async with serving(tmp_path / "data", saying(lambda prompt: '"[0]"')) as served, client(served) as swarm:
            with pytest.raises(AgentJetError, match=reason):
                await swarm.evaluate(environment.agent, environment.tasks, progress=False)


@pytest.mark.parametrize(
    ("game", "settings", "error"),
    [
        ("TicTacTo-v0", {}, "TextArena has no game 'TicTacTo-v0'; did you mean 'TicTacToe-v0'?"),
        ("TicTacToe-v0", {"players": 3}, "TicTacToe-v0 does not start with 3 players: "),
        ("TicTacToe-v0", {"players": 0}, "players = 0: Input should be greater than or equal to 1"),
        ("TicTacToe-v0", {"opponent": "gpt"}, "opponent = 'gpt': Input should be 'random' or 'self'"),
        ("TicTacToe-v0", {"make": {"size": 4}}, "TicTacToe-v0 cannot be made: .*unexpected keyword argument 'size'"),
        ("IndianPoker-v0", {}, "IndianPoker-v0 does not list the valid actions, among which a random player chooses"),
    ],
)
def test_a_game_that_cannot_be_played(game: str, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        environments.load(f"textarena:{game}", **settings)


def test_a_game_without_its_word_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "NLTK_DATA"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # No network.
    with pytest.raises(ConfigError, match=r"Wordle-v0 needs word lists of NLTK, .*-m nltk.downloader words"):
        environments.load("textarena:Wordle-v0")
