"""A world that takes milliseconds a step: NumPy plays it, and the learner of the product learns a table of logits.

The policy has one row of logits for each preceding token. An episode has one to three turns. A turn shows an
observation, and the answer has two tokens. The right first token belongs to the observation, the right second one to
the first. The reward of a turn is the share of right tokens; that of the episode is the mean of its turns.
`PolicyLearner` calls the hooks of the recipe, so no formula is copied. Shapes: V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agentjet.compute.embedded.distributions import Teacher
from agentjet.compute.embedded.learner import PolicyLearner
from agentjet.compute.embedded.passes import Pass
from agentjet.compute.embedded.policy import Policy
from agentjet.config import JobConfig
from agentjet.config.job import OptimizerConfig
from agentjet.recipes import hooks
from agentjet.recipes.recipe import FinishedGroup, Recipe
from agentjet.timeline.batch import Facts
from agentjet.timeline.forest import Forest, Row, build_forest, call_row

ACTIONS, OBSERVATIONS = 4, 6
VOCABULARY = ACTIONS + OBSERVATIONS
"""Tokens 0 to 3 are actions, the others observations."""
GROUPS, GROUP_SIZE, MAX_TURNS = 4, 8, 3
MAX_DROPS = 40
RATE = 0.05


class TablePolicy:
    """What `PolicyLearner` needs of a policy, over a table [V, V]."""

    has_adapters = False
    config = SimpleNamespace(hidden_size=VOCABULARY)
    device = torch.device("cpu")
    dtype = torch.float32
    offloads_optimizer = False
    vocabulary = VOCABULARY

    def __init__(self) -> None:
        self.table = nn.Parameter(torch.zeros(VOCABULARY, VOCABULARY))
        self.model = nn.ParameterDict({"table": self.table})

    def trainable(self) -> dict[str, nn.Parameter]:
        return {"table": self.table}

    def original_weights(self) -> dict[str, Tensor]:
        return {"table": torch.zeros_like(self.table)}

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states are logits."""
        return hidden


class TablePass(Pass):
    """Looks up the row of each target's preceding token."""

    def __init__(self, policy: TablePolicy) -> None:
        self._policy = policy

    def pieces(self, forest: Forest, max_tokens: int) -> Sequence[tuple[Forest, NDArray[np.int64]]]:
        return [(forest, np.arange(forest.num_targets))]

    def hidden(self, forest: Forest) -> tuple[Tensor, Tensor]:
        before, rows = np.unique(forest.tokens[forest.parent[forest.node]], return_inverse=True)
        return self._policy.table[torch.from_numpy(before.astype(np.int64))], torch.from_numpy(rows.astype(np.int64))


class TableLearner(PolicyLearner):
    def _make_pass(self) -> Pass:
        return TablePass(cast(TablePolicy, self.policy))


@dataclass
class Played:
    """An episode: the tokens, log-probabilities and reward of each turn."""

    prompts: list[list[int]]
    answers: list[list[int]]
    logprobs: list[list[float]]
    rewards: list[float]
    seconds: float

    @property
    def reward(self) -> float:
        return float(np.mean(self.rewards))


class TableTeacher:
    """A teacher that mostly gives the right tokens."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def logprobs(self, forest: Forest, max_tokens: int) -> NDArray[np.float32]:
        rows = RIGHT[forest.tokens[forest.parent[forest.node]]]
        found = rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
        return found[np.arange(forest.num_targets), forest.tokens[forest.node]].astype(np.float32)


def right(before: int) -> int:
    """Returns the right token after an observation or an action."""
    return (before * 3 + 1) % ACTIONS


RIGHT = np.array([[3.0 * (token == right(before)) for token in range(VOCABULARY)] for before in range(VOCABULARY)])
"""The logits of the teacher and of demonstrations."""


def play(table: NDArray[np.float64], rng: np.random.Generator, first: int) -> Played:
    """Plays an episode that begins with the observation `first`."""
    episode = Played([], [], [], [], float(rng.integers(1, 5)))
    context: list[int] = []
    for _ in range(rng.integers(1, MAX_TURNS + 1)):
        context = [*context, int(ACTIONS + rng.integers(OBSERVATIONS)) if context else first]
        answer: list[int] = []
        logprobs: list[float] = []
        for before in (context[-1], None):
            row = table[answer[0] if before is None else before]
            logps = row - np.logaddexp.reduce(row)
            answer.append(int(rng.choice(VOCABULARY, p=np.exp(logps))))
            logprobs.append(float(logps[answer[-1]]))
        hits = [answer[0] == right(context[-1]), answer[1] == right(answer[0])]
        episode.prompts.append(context)
        episode.answers.append(answer)
        episode.logprobs.append(logprobs)
        episode.rewards.append(float(np.mean(hits)))
        context = context + answer
    return episode


def groups(recipe: Recipe, table: NDArray[np.float64], rng: np.random.Generator) -> Iterator[list[Played]]:
    """Yields the groups of a batch that the recipe accepts."""
    dropped = 0
    for _ in range(GROUPS):
        while True:
            first = int(ACTIONS + rng.integers(OBSERVATIONS))
            group = [play(table, rng, first) for _ in range(GROUP_SIZE)]
            rewards = [one.reward for one in group]
            finished = FinishedGroup(
                "t",
                "",
                rewards,
                [{"env_seconds": one.seconds} for one in group],
                [sum(map(len, one.answers)) for one in group],
                is_uniform=len(set(rewards)) == 1,
            )
            if dropped >= MAX_DROPS or not hooks.accept(recipe, finished, frozenset()):
                break
            dropped += 1
        yield group


def facts_of(batch: Sequence[Sequence[Played]]) -> tuple[Forest, Facts]:
    """Returns the forest and the facts of the groups of a batch."""
    episodes = [(number, one) for number, group in enumerate(batch) for one in group]
    calls = [(e, turn, one) for e, (_, one) in enumerate(episodes) for turn in range(len(one.answers))]
    rows: list[Row] = [
        call_row(
            np.array([*one.prompts[turn], *one.answers[turn]], np.int32),
            np.array(one.logprobs[turn], np.float32),
            np.zeros(len(one.answers[turn]), np.int32),
            None,
            1.0,
            e,
            call=number,
        )
        for number, (e, turn, one) in enumerate(calls)
    ]
    facts = Facts(
        groups=np.array([group for group, _ in episodes], np.int32),
        rewards=np.array([one.reward for _, one in episodes]),
        roles=("",),
        role_rewards=np.full((len(episodes), 1), np.nan),
        spoke=np.ones((len(episodes), 1), bool),
        call_episode=np.array([e for e, _, _ in calls], np.int32),
        call_role=np.zeros(len(calls), np.int32),
        call_turn=np.array([turn for _, turn, _ in calls], np.int32),
        call_rewards=np.array([one.rewards[turn] for _, turn, one in calls]),
        call_truncated=np.zeros(len(calls), bool),
        tasks=tuple(("", f"t{group}") for group, _ in episodes),
        seconds=np.array([one.seconds for _, one in episodes]),
        metrics={"env_seconds": np.array([one.seconds for _, one in episodes])},
        code_versions=("",) * len(episodes),
    )
    return build_forest(rows), facts


def train(recipe: Recipe, steps: int, seed: int = 0) -> tuple[list[list[float]], bytes]:
    """Trains a table. Returns the rewards of each batch, and the bytes of the last table.

    A recipe that learns from given answers gets those of the right table.
    """
    policy, rng = TablePolicy(), np.random.default_rng(seed)
    learner = TableLearner(cast(Policy, policy))
    learner._teacher = cast(Teacher, TableTeacher(recipe.teacher_folder))
    job = JobConfig(
        recipe=recipe, batch_size=GROUPS, group_size=GROUP_SIZE, seed=seed, optimizer=OptimizerConfig(lr=RATE)
    )
    rewards: list[list[float]] = []
    for version in range(steps):
        table: NDArray[Any] = policy.table.detach().double().numpy()
        batch = list(groups(recipe, table, rng))
        rewards.append([one.reward for group in batch for one in group])
        if recipe.only_given:
            batch = list(groups(recipe, RIGHT, rng))
        forest, facts = facts_of(batch)
        learner.learn(forest, job, version, facts)
    return rewards, policy.table.detach().numpy().tobytes()
