"""TextArena: `textarena:TicTacToe-v0`. A task is a seed.

The policy plays one seat, or all of them. Each player sees a new message once, so its conversation only grows.
If the game lists the valid actions in its last message, they are an enumeration.
"""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from agentjet.environments.kind import EnvironmentFailed, EnvironmentTask, Kind
from agentjet.environments.model import ContextFull, Model
from agentjet.errors import ConfigError, did_you_mean
from agentjet.types import Reward

ENDLESS = 100
MOST_PLAYERS = 15
LIST = re.compile(
    r"^.*\b(?:valid|available|legal)\s+(?:moves|actions|targets)\b[^:\n]*:(.*)$", re.IGNORECASE | re.MULTILINE
)
ACTION = re.compile(r"\[[^\[\]\n]+\]")
PLACEHOLDER = re.compile(r"<|\b(?:is|are) an?\b|\b(?:integers?|numbers?)\b", re.IGNORECASE)
"""A sign that an action of the list has a variable in it, such as `[bet X]`."""


class TextArena(Kind):
    """A game of TextArena."""

    requires: ClassVar[str] = "textarena>=0.7,<0.8"
    about: ClassVar[str] = "ID of a game of TextArena, such as TicTacToe-v0"

    opponent: Literal["random", "self"] = "random"
    """The other players: a random choice among the valid actions, or the policy in roles `player_0`, `player_1`, ..."""
    players: int | None = Field(None, ge=1, le=MOST_PLAYERS)
    """Number of players; default: the fewest that the game accepts."""
    actions: Literal["listed", "free"] | tuple[str, ...] = "listed"
    """Valid actions: those that the game lists, any text, or these. Any text, too, where the game lists none."""
    reward_range: tuple[float, float] = (-1.0, 1.0)
    """Range of the game's rewards. A reward outside of it is a failure."""
    make: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `textarena.make`."""
    seed: int = Field(0, ge=0)
    """Seed of the first task; the others follow."""

    def tasks(self) -> Iterator[EnvironmentTask]:
        players = self._players()
        for seed in itertools.islice(itertools.count(self.seed), self.num_tasks or ENDLESS):
            yield EnvironmentTask(f"seed-{seed}", {"seed": seed, "players": players, "seat": seed % players})

    def _players(self) -> int:
        """The number of players. Raises `ConfigError` if the game cannot be played as it is set."""
        error: Exception | None = None
        for players in [self.players] if self.players else range(1, MOST_PLAYERS + 1):
            match = TextArenaMatch(self, self.seed)
            try:
                match.reset(players)
                _, text = match.observation()
            except Exception as refusal:  # Games refuse a number of players with any type of error.
                error = error or refusal
                continue
            if players > 1 and self.opponent == "random" and not self.valid(text):
                raise ConfigError(
                    f"opponent = 'random': {self.target} does not list the valid actions, among which a random player "
                    "chooses: give them with actions, or set opponent = 'self'"
                )
            return players
        number = f"with {self.players} players" if self.players else f"with 1 to {MOST_PLAYERS} players"
        raise ConfigError(f"{self.target} does not start {number}: {error}") from error

    def valid(self, text: str) -> Sequence[str]:
        """The valid actions after a message; empty: any text."""
        if not isinstance(self.actions, str):
            return self.actions
        lists = LIST.findall(text) if self.actions == "listed" else []
        if not lists or PLACEHOLDER.search(ACTION.sub("", lists[-1])):
            return ()
        return list(dict.fromkeys(ACTION.findall(lists[-1])))

    def play(self, task: EnvironmentTask, model: Model) -> Reward:
        """Plays a game. In self-play the reward is 1 if no invalid move ended it, and each role has its own."""
        players, seed = task.payload["players"], task.payload["seed"]
        is_self = self.opponent == "self" and players > 1
        seats = range(players) if is_self else [task.payload["seat"]]
        match, chance = TextArenaMatch(self, seed), random.Random(f"opponents {seed}")
        match.reset(players)
        messages = {
            seat: [{"role": "system", "content": self.system_prompt}] * bool(self.system_prompt) for seat in seats
        }
        turns = dict.fromkeys(seats, 0)
        most = min(self.max_turns, model.max_turns or self.max_turns)
        while not match.is_over:
            seat, text = match.observation()
            actions = self.valid(text)
            if seat not in messages:
                match.step(self._random(actions, chance, seat))
                continue
            if sum(turns.values()) == most:
                break
            messages[seat].append({"role": "user", "content": text})
            speaker = replace(model, name=f"{model.name}@{role(seat)}") if is_self else model
            try:
                answer = speaker.act(messages[seat], actions)
            except ContextFull:
                if not turns[seat]:
                    raise  # The first message alone is too long: this player did nothing.
                break
            messages[seat].append(answer.message)
            turns[seat] += 1
            match.step(str(answer.action))
        return self._reward(match, turns, is_self)

    def _random(self, actions: Sequence[str], chance: random.Random, seat: int) -> str:
        if not actions:
            raise EnvironmentFailed(
                f"{self.target} lists no valid actions for player {seat}, among which a random player chooses: give "
                "them with actions, or set opponent = 'self'"
            )
        return chance.choice(actions)

    def _reward(self, match: TextArenaMatch, turns: Mapping[int, int], is_self: bool) -> Reward:
        rewards = match.rewards(self.reward_range) if match.is_over else {}
        # The server knows no role that made no call.
        by_turn = {role(seat): [0.0] * (n - 1) + [rewards.get(seat, 0.0)] for seat, n in turns.items() if n}
        invalid = [bool(match.facts.get(seat, {}).get("invalid_move")) for seat in turns]
        metrics = {"turns": sum(turns.values()), "completed": match.is_over, "invalid": any(invalid)}
        why = next((str(fact["reason"]) for fact in match.facts.values() if fact.get("reason")), "")
        why = why or ("" if match.is_over else "the game was not played to its end")
        if is_self:
            by_role = {name: values[-1] for name, values in by_turn.items()}
            return Reward(match.is_over and not any(invalid), by_role, metrics, by_turn, text=why)
        [seat] = turns
        return Reward(rewards.get(seat, 0.0), metrics=metrics, by_turn=by_turn.get(role(seat), ()), text=why)


def role(seat: int) -> str:
    return f"player_{seat}"


class TextArenaMatch:
    """A game of the library."""

    def __init__(self, kind: TextArena, seed: int) -> None:
        """Raises `ConfigError` for an unknown game, or one that this machine cannot play."""
        self._kind, self._seed = kind, seed
        random.seed(seed)  # Some games draw before they seed Python's generator themselves.
        self._env = self._game = _made(kind.target, kind.make)
        while hasattr(self._game, "env"):  # Observation wrappers repeat old messages.
            self._game = self._game.env
        self.is_over = False
        self.facts: Mapping[int, Mapping[str, Any]] = {}

    def reset(self, players: int) -> None:
        random.seed(self._seed)
        self._env.reset(num_players=players, seed=self._seed)

    def observation(self) -> tuple[int, str]:
        """The player whose turn it is, and the messages since its last turn, without its own."""
        seat, messages = self._game.get_observation()
        return int(seat), "\n".join(str(text) for sender, text, *_ in messages if sender != seat)

    def step(self, action: str) -> None:
        self.is_over, _ = self._env.step(action=action)
        if self.is_over:
            self._rewards, self.facts = self._env.close()

    def rewards(self, span: tuple[float, float]) -> dict[int, float]:
        """The rewards by player. Raises `EnvironmentFailed` if there is none, or one is out of range."""
        if not self._rewards:
            raise EnvironmentFailed(f"{self._kind.target} ended without a reward")
        least, most = span
        for seat, reward in self._rewards.items():
            if not least <= reward <= most:
                raise EnvironmentFailed(
                    f"{self._kind.target} gave player {seat} the reward {reward}, outside of {least:g} to {most:g}: "
                    "set reward_range if the game's range is another"
                )
        return {int(seat): float(reward) for seat, reward in self._rewards.items()}


def _made(target: str, arguments: Mapping[str, Any]) -> Any:
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    if target not in ENV_REGISTRY:
        way_out = did_you_mean(target, list(ENV_REGISTRY), "textarena.pprint_registry_detailed() prints all")
        raise ConfigError(f"TextArena has no game {target!r}; {way_out}")
    try:
        return textarena.make(target, **arguments)
    except LookupError as error:
        if "NLTK" not in str(error):
            raise
        raise ConfigError(
            f"{target} needs word lists of NLTK, which are not on this machine and could not be downloaded: "
            "python -m nltk.downloader words averaged_perceptron_tagger_eng"
        ) from None
    except SyntaxError as error:
        version = ".".join(map(str, sys.version_info[:2]))
        raise ConfigError(f"{target} cannot be imported by Python {version}, a newer one may: {error}") from None
    except (ImportError, OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{target} cannot be made: {error}") from error
