"""1. A game's result is given by player, and illegal moves lose. 2. Against a real server: both sides are separate
conversations, each trained on its own result; the other side's moves are context, not trained. 3. The whole run,
shortened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest

from agentjet import Swarm
from examples.textarena_self_play.agent import RandomPlayer, against_random, games, play, self_play
from examples.textarena_self_play.train import main
from tests.fakes import saying
from tests.server.serving import TOKEN, Served, in_thread, serving
from tests.tiny import make_model, set_options


def moves(*numbers: int) -> Iterator[str]:
    return iter(f"[{number}]" for number in numbers)


def test_the_side_with_three_in_a_row_wins() -> None:
    first, second = moves(0, 1, 2), moves(3, 4)
    result = play([lambda seen: next(first), lambda seen: next(second)])
    assert (result.by_player, result.illegal, result.num_moves) == ((1, -1), (False, False), 5)


def test_two_illegal_moves_in_a_row_lose() -> None:
    first, second = moves(0), moves(0, 9)
    result = play([lambda seen: next(first), lambda seen: next(second)])
    assert (result.by_player, result.illegal, result.num_moves) == ((1, -1), (False, True), 3)


def test_a_full_board_is_a_draw() -> None:
    first, second = moves(4, 2, 3, 7, 8), moves(0, 6, 5, 1)
    result = play([lambda seen: next(first), lambda seen: next(second)])
    assert (result.by_player, result.num_moves) == ((0, 0), 9)


def test_the_random_player_makes_legal_moves_only() -> None:
    for seed in range(30):
        assert play([RandomPlayer(f"{seed}/0"), RandomPlayer(f"{seed}/1")]).illegal == (False, False)


def first_free(prompt: str) -> str:
    """The lowest square that is free: the side that begins wins with 0, 2, 4, 6."""
    return re.findall(r"\[\d\]", prompt.rpartition("Available Moves:")[2])[0]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with in_thread(serving(tmp_path / "data", saying(first_free), job={"batch_size": 1, "group_size": 2})) as (
        served,
        _,
    ):
        yield served


def test_each_side_is_trained_on_its_own_moves_and_its_own_result(served: Served) -> None:
    with Swarm(served.url, TOKEN) as swarm:
        with swarm.episode("game") as episode:
            reward = self_play(games(1)[0], episode)
            episode.finish(reward)
        assert reward.value == 1.0
        assert reward.by_role == {"player_0": 1.0, "player_1": -1.0}
        calls = swarm.episode_tree(episode.id).calls
    trained: dict[str, str] = {"player_0": "", "player_1": ""}
    for call in calls:
        trained[call.role] += "".join(text for text, mask in zip(call.texts, call.mask, strict=True) if mask)
    assert trained == {
        "player_0": "[0]<|im_end|>[2]<|im_end|>[4]<|im_end|>[6]<|im_end|>",
        "player_1": "[1]<|im_end|>[3]<|im_end|>[5]<|im_end|>",
    }
    for role, num_moves in (("player_0", 4), ("player_1", 3)):  # two timelines: each move goes on from the side's last
        moves = [call for call in calls if call.role == role]
        assert [call.parent for call in moves] == [None, *(call.call_id for call in moves[:-1])]
        assert [call.kept for call in moves] == [0, *accumulate(len(call.tokens) for call in moves[:-1])]
        assert len(moves) == num_moves
        assert not any(call.orphan for call in moves) and not any(call.fork for call in moves[1:])
    assert served.run.gateway.swarm.episode(episode.id).by_role == reward.by_role


@pytest.mark.parametrize("side", [0, 1])
def test_the_evaluation_plays_both_sides_and_speaks_for_one(served: Served, side: int) -> None:
    with Swarm(served.url, TOKEN) as swarm, swarm.episode("game", mode="eval") as episode:
        reward = against_random(games(2)[side], episode)
        assert reward.value in (0.0, 0.5, 1.0) and reward.metrics == {"illegal": 0.0}
        assert {call.role for call in swarm.episode_tree(episode.id).calls} == {f"player_{side}"}


@pytest.mark.thorough
@pytest.mark.e2e
def test_the_run_shortened(tmp_path: Path) -> None:
    sets = set_options(make_model(tmp_path / "model"), max_steps=2, batch_size=2, group_size=2)
    out = tmp_path / "out"
    result = main(["--out", str(out), "--games", "4", *sets])
    assert json.loads((out / "result.json").read_text()) == result
    assert (result["batches"], result["aborted"], result["after"]["games"]) == (2, 0, 4)
    assert result["episodes"] >= 8
    assert result["before"]["illegal"] == 1.0  # random letters are no moves
