"""Gymnasium, the real package: its tasks, action spaces as schemas, an episode of each kind of space, and bad input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from agentjet import environments
from agentjet.environments import ContextFull, EnvironmentFailed, EnvironmentTask
from agentjet.environments.kinds.gymnasium import Gymnasium, schema_of, value_of
from agentjet.environments.model import ModelAnswer
from agentjet.errors import ConfigError
from tests.needs import need

need("gymnasium")


class Scripted:
    """A model that takes the given actions in turn."""

    max_turns = 0

    def __init__(self, actions: list[Any]) -> None:
        self.actions, self.asked = actions, list[tuple[str, Any, Any]]()

    def act(self, messages: Any, actions: Any = (), schema: Mapping[str, Any] | None = None) -> ModelAnswer:
        self.asked.append((messages[-1]["content"], [*actions], schema))
        if not self.actions:
            raise ContextFull("the context is full")
        action = self.actions.pop(0)
        return ModelAnswer({"role": "assistant", "content": json.dumps(action)}, action)


def play(name: str, actions: list[Any], **settings: Any) -> tuple[Any, Scripted]:
    model = Scripted(actions)
    return Gymnasium(target=name, **settings).play(EnvironmentTask("seed-3", {"seed": 3}), model), model  # type: ignore[arg-type]


def test_tasks_are_seeds_and_stay_the_same() -> None:
    listed = [Gymnasium(target="FrozenLake-v1", num_tasks=20, seed=5).listed() for _ in range(2)]
    assert listed[0] == listed[1] and {task.split for task in listed[0]} == {"train", "held_out"}
    assert [task.id for task in listed[0]] == [f"seed-{seed}" for seed in range(5, 25)]
    assert [task.id for task in Gymnasium(target="FrozenLake-v1", num_tasks=30, seed=5).listed()][:20] == [
        task.id for task in listed[0]
    ]


def test_discrete_actions_have_names_and_text() -> None:
    make = {"is_slippery": False}
    reward, model = play("FrozenLake-v1", ["down", "down", "right", "right", "down", "right"], make=make)
    assert (reward.value, reward.by_turn, reward.metrics["completed"]) == (1.0, (0.0,) * 5 + (1.0,), 1.0)
    text, actions, schema = model.asked[0]
    assert "[S]FFF" in text and text.endswith("Actions: left, down, right, up") and schema is None
    assert actions == ["left", "down", "right", "up"]
    named, _ = play("FrozenLake-v1", ["S"] * 2, make=make, action_names=["W", "S", "E", "N"])
    assert named.metrics["turns"] == 2, "the full context ended it"
    numbered, model = play("Acrobot-v1", ["0", "2"])
    assert model.asked[0][1] == ["0", "1", "2"] and numbered.value == -2.0


def test_the_time_limit_of_the_environment_ends_an_episode() -> None:
    reward, _ = play("MountainCar-v0", ["wait"] * 9, make={"max_episode_steps": 3})
    assert reward.metrics == {"truncated": 1.0, "turns": 3.0, "completed": 1.0}
    assert play("MountainCar-v0", ["wait"] * 9, max_turns=2)[0].metrics["completed"] == 0.0


def test_a_continuous_action_is_enforced_by_a_schema() -> None:
    reward, model = play("Pendulum-v1", [[2.0], [-0.5]])
    number = {"type": "number", "minimum": -2.0, "maximum": 2.0, "multipleOf": 0.01}
    assert model.asked[0][2] == {
        "type": "array",
        "prefixItems": [number],
        "items": False,
        "minItems": 1,
        "maxItems": 1,
    }
    assert len(reward.by_turn) == 2 and reward.value < 0


def test_each_space_has_a_schema_and_values_of_it() -> None:
    import numpy as np
    from gymnasium import spaces
    from llguidance import LLMatcher

    space = spaces.Dict(
        {
            "move": spaces.MultiDiscrete([2, 3]),
            "on": spaces.MultiBinary(2),
            "pair": spaces.Tuple([spaces.Discrete(3, start=-1), spaces.Box(-1, np.inf, (1, 2))]),
            "whole": spaces.Box(0, 7, (2,), np.int64),
        }
    )
    schema = schema_of(space, 3)
    assert schema["properties"]["pair"]["prefixItems"][0] == {"type": "integer", "minimum": -1, "maximum": 1}
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema)) == ""
    action = {"move": [1, 2], "on": [0, 1], "pair": [-1, [[0.125, 9.0]]], "whole": [7, 0]}
    assert space.contains(value_of(space, action))


@pytest.mark.parametrize(
    ("name", "settings", "error"),
    [
        ("FrozenLke-v1", {}, "gymnasium:FrozenLke-v1: unknown ID; did you mean 'FrozenLake-v1'?"),
        ("", {}, "unknown ID; there are CartPole-v0"),
        ("FrozenLake-v1", {"action_names": ["a", "b"]}, "FrozenLake-v1 has 4 actions: give 4 names"),
        ("FrozenLake-v1", {"action_names": ["a", "a", "b", "c"]}, "FrozenLake-v1 has 4 actions: give 4 names"),
        ("Pendulum-v1", {"action_names": ["a"]}, "Pendulum-v1 has no discrete actions"),
        ("FrozenLake-v1", {"make": {"slippery": False}}, "unexpected keyword argument 'slippery'"),
    ],
)
def test_wrong_settings_are_named_before_the_first_episode(name: str, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        environments.load(f"gymnasium:{name}", **settings)


def test_a_space_without_a_schema_and_a_reward_outside_of_its_range() -> None:
    from gymnasium import spaces

    with pytest.raises(ConfigError, match="the action space Graph has no JSON schema: wrap the environment"):
        schema_of(spaces.Graph(spaces.Discrete(2), None), 2)
    import gymnasium

    class Generous(gymnasium.Env[int, int]):
        action_space = observation_space = spaces.Discrete(2)
        reward_range = (0.0, 1.0)

        def reset(self, **_: Any) -> tuple[int, dict[str, Any]]:
            return 0, {}

        def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
            return 0, 7.0, True, False, {}

    gymnasium.register("Generous-v0", Generous)
    with pytest.raises(EnvironmentFailed, match=r"the reward 7.0 is outside of \(0.0, 1.0\)"):
        play("Generous-v0", ["1"])
