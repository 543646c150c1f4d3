"""One policy plays both sides of a TextArena game. Each side is an agent role with a separate conversation and its own
reward: a win of `player_0` is a loss of `player_1`.

In the evaluation one side is a player that picks a legal move at random.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import openai
import textarena
from openai.types.chat import ChatCompletionMessageParam

from agentjet.client import Episode
from agentjet.types import Reward, Task

GAME = "TicTacToe-v0-raw"
"""`-raw`: observations as they come, so that each player's conversation only ever grows."""
MAX_TOKENS = 8

Player = Callable[[str], str]
"""Takes the text since the player's last move; returns its move."""

# A new client costs 17 ms, a copy of one for another episode nothing. The server is on this machine: no proxy is asked.
OPENAI = openai.OpenAI(
    base_url="http://127.0.0.1",
    api_key="each episode has its own",
    http_client=openai.DefaultHttpxClient(trust_env=False),
)


@dataclass(frozen=True)
class Result:
    """The result of a game: 1 for the winner, -1 for the loser, 0 for both in a draw. A side that makes two illegal
    moves in a row loses."""

    by_player: tuple[float, float]
    illegal: tuple[bool, bool]
    """True for the side whose illegal move ended the game."""
    num_moves: int
    """Illegal ones included."""


def play(players: Sequence[Player]) -> Result:
    """One game; `players[0]` begins."""
    game = textarena.make(GAME)
    game.reset(num_players=2)
    num_moves, over = 0, False
    while not over:
        turn, observation = game.get_observation()
        over, _ = game.step(action=players[turn]("\n".join(text for sender, text, _ in observation if sender != turn)))
        num_moves += 1
    results, facts = game.close()
    return Result((results[0], results[1]), (facts[0]["invalid_move"], facts[1]["invalid_move"]), num_moves)


class Policy:
    """The model as one side of a game, under the agent role of that side."""

    def __init__(self, episode: Episode, number: int) -> None:
        self.role = f"player_{number}"
        self._model = f"{episode.model}@{self.role}"
        self._llm = OPENAI.with_options(base_url=episode.base_url, api_key=episode.api_key)
        self._messages: list[ChatCompletionMessageParam] = []

    def __call__(self, seen: str) -> str:
        self._messages.append({"role": "user", "content": seen})
        completion = self._llm.chat.completions.create(
            model=self._model, messages=self._messages, max_completion_tokens=MAX_TOKENS
        )
        move = completion.choices[0].message.content or ""
        self._messages.append({"role": "assistant", "content": move})
        return move


class RandomPlayer:
    """Picks one of the legal moves that the game lists last."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def __call__(self, seen: str) -> str:
        return self._random.choice(re.findall(r"\[\d\]", seen.rpartition("Available Moves:")[2]))


def self_play(task: Task, episode: Episode) -> Reward:
    """The agent that is trained: a game of the policy against itself, each side rewarded by its own result.

    The episode's own reward trains neither side: over both sides the results of a game add up to 0. So it is 1 if the
    game was played to its end, and 0 if illegal moves ended it.
    """
    sides = Policy(episode, 0), Policy(episode, 1)
    result = play(sides)
    return Reward(
        float(not any(result.illegal)),
        by_role={side.role: value for side, value in zip(sides, result.by_player, strict=True)},
        metrics={"moves": float(result.num_moves), "first_wins": float(result.by_player[0] > 0)},
    )


def against_random(task: Task, episode: Episode) -> Reward:
    """The agent that is evaluated: a game against a random player. 1 for a win, 1/2 for a draw, 0 for a loss."""
    side = int(task.payload)
    players: list[Player] = [RandomPlayer(task.id), RandomPlayer(task.id)]
    players[side] = Policy(episode, side)
    result = play(players)
    return Reward((1 + result.by_player[side]) / 2, metrics={"illegal": float(result.illegal[side])})


def games(count: int) -> list[Task]:
    """Tasks for `count` games. The policy's side in an evaluation (`payload`) alternates. The game always starts the
    same way; only the sampled moves differ."""
    return [Task(f"{GAME}/{number}", task_set="self_play", payload=number % 2) for number in range(count)]
