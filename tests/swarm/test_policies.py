"""Pins runs with named policies:

1. an episode is one fact for all its policies: it counts for all of them or for none;
2. the facts, forests and metrics of a policy are those of a run in which only its calls exist;
3. rewards name every policy or none, and a group without variance has none for any policy;
4. a batch whose operations were half applied is learned again from the same bytes;
5. the policies are part of a journal's origin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentjet.compute.protocol import body_digest
from agentjet.config import ModelConfig
from agentjet.errors import ConfigError, InvalidRequest
from agentjet.protocol import status_of
from agentjet.swarm import Batch, Journal
from agentjet.swarm.facts import is_uniform
from agentjet.types import ModelInfo
from tests.swarm.test_origin import CARD
from tests.swarm.world import World

NAMES = ("planner", "coder")
REWARDS: tuple[dict[str, float], ...] = (
    {"planner": 1.0, "coder": 0.0, "coder/critic": 0.25},
    {"planner": 0.0, "coder": 0.5, "coder/critic": 0.75},
)


@pytest.fixture
def world(tmp_path: Path) -> Any:
    world = World(tmp_path, policies=NAMES, batch_size=1)
    yield world
    world.close()


def played(world: World, roles: tuple[str, ...], rewards: list[dict[str, Any]]) -> Batch:
    """A batch of one group. In each episode the roles take turns, and one answer is lost and asked for again."""
    for number, reward in enumerate(rewards):
        episode = world.begin()
        for turn, role in enumerate(("planner", "coder", "coder/critic")):
            if role not in roles or (number, role) == (1, "coder/critic"):
                continue
            first = world.call(episode, 5 + number, 7 + turn, role=role)
            lost = world.call(episode, 9, parent=first, kept=4, role=role)
            world.call(episode, 6, parent=first, kept=4, role=role, retry_of=lost.id, finish_reason="length")
            world.swarm.undelivered(episode.id, [lost.id])
        world.finish(episode, **reward)
    return world.swarm.batches.compose()


def test_the_facts_and_the_forest_of_a_policy_are_those_of_a_run_of_its_own(tmp_path: Path) -> None:
    together = World(tmp_path / "both", policies=NAMES, batch_size=1)
    batch = played(together, ("planner", "coder", "coder/critic"), [{"reward": 9.0, "by_role": r} for r in REWARDS])
    found = together.swarm.batches.training_batches(batch)
    metrics = together.swarm.batches.learned(batch, {})
    assert [*found] == [*NAMES]
    for policy, roles in (("planner", ("planner",)), ("coder", ("coder", "coder/critic"))):
        alone = World(tmp_path / policy, batch_size=1)
        by_role = [{role: r[role] for role in roles if role != policy} for r in REWARDS]
        own = played(alone, roles, [{"reward": r[policy], "by_role": b} for r, b in zip(REWARDS, by_role, strict=True)])
        assert body_digest(found[policy]) == body_digest(alone.training(own))
        expected = {
            name: value
            for name, value in alone.swarm.batches.learned(own, {}).items()
            if name.startswith("forest/") or name == "reward/mean"
        }
        assert {
            name.removeprefix(f"{policy}/"): metrics[name] for name in metrics if name.startswith(policy)
        } == expected
        alone.close()
    assert (metrics["reward/mean"], metrics["episode/timelines"], metrics["batch/staleness_max"]) == (9.0, 2.5, 0.0)
    together.close()


def test_an_episode_is_one_fact_for_all_its_policies(world: World) -> None:
    episode, other = world.begin(), world.begin()
    for one in (episode, other):
        for policy in NAMES:
            world.call(one, 7, 8, role=policy)
    with pytest.raises(ZeroDivisionError), world.swarm.transaction():
        world.finish(episode, 0.5, by_role={"planner": 1.0, "coder": 0.0})
        raise ZeroDivisionError
    assert world.reopen().episode(episode.id).status == "live"
    world.finish(episode, 0.5, by_role={"planner": 1.0, "coder": 0.0})
    world.abort(other)
    world.finish(world.begin(), 0.0)
    training = world.swarm.batches.training_batches(world.swarm.batches.compose())
    for policy, rewards in (("planner", [1.0, 0.0]), ("coder", [0.0, 0.0])):
        facts = training[policy].facts
        assert facts is not None and facts.rewards.tolist() == rewards
        assert (facts.roles, facts.call_episode.tolist()) == ((policy,), [0]), "the aborted one trains no policy"


@pytest.mark.parametrize(
    ("by_role", "param", "sentence"),
    [
        ({"planner": 1.0}, "coder", "has no reward for policy 'coder': give one for each of planner, coder"),
        ({"coder/critic": 1.0}, "planner", "has no reward for policy 'planner'"),
        ({"planer": 1.0, "coder": 1.0}, "planer", "no policy 'planer'. Did you mean 'planner'"),
        ({"planner": 1.0, "codr/critic": 1.0}, "codr/critic", "no policy 'codr'. Did you mean 'coder'"),
        ({"": 1.0}, "", "The policies are planner, coder"),
        ({"planner": 1.0, "coder": 1.0, "coder/": 1.0}, "coder/", "has no role after the slash"),
    ],
)
def test_rewards_name_every_policy_or_none(world: World, by_role: dict[str, float], param: str, sentence: str) -> None:
    episode = world.begin()
    with pytest.raises(InvalidRequest, match=sentence) as refused:
        world.finish(episode, 1.0, by_role=by_role)
    assert (refused.value.code, status_of(refused.value), refused.value.param) == ("invalid_reward", 422, param)
    assert world.swarm.episode(episode.id).status == "live"
    world.finish(episode, 1.0)


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ([(1.0, {"planner": 1.0, "coder": 0.5}), (0.0, {"planner": 1.0, "coder": 0.5})], True),
        ([(1.0, {"planner": 1.0, "coder": 0.5}), (1.0, {"planner": 0.5, "coder": 1.0})], False),
        ([(0.5, {"planner": 0.5, "coder": 0.5}), (0.5, {})], True),
        ([(0.5, {"planner": 0.5, "coder": 0.0}), (0.5, {})], False),
        ([(0.0, {"planner": 0.5, "coder": 0.5, "coder/a": 1.0}), (0.5, {"planner": 0.5, "coder": 0.5})], True),
        ([(0.0, {"planner": 0, "coder": 0, "coder/a": 1.0}), (0, {"planner": 0, "coder": 0, "coder/a": 0.0})], False),
    ],
)
def test_a_group_without_variance_has_none_for_any_policy(
    world: World, rewards: list[tuple[float, dict[str, float]]], equal: bool
) -> None:
    members = [world.finish(world.begin(), reward, by_role=by_role) for reward, by_role in rewards]
    assert is_uniform(world.journal, members, NAMES, of_turns=False) is equal


def test_a_role_without_a_reward_is_left_out_of_its_policy_alone(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A policy that an episode names no reward for gets the reward of the episode. It is not left out."""
    batch = played(
        world, ("planner", "coder"), [{"reward": 1.0, "by_role": {}}, {"reward": 0.5, "by_role": REWARDS[1]}]
    )
    world.swarm.batches.training_batches(batch)
    assert (
        "reward/roles_left_out" not in str(world.swarm.batches.learned(batch, {}))
        and "have no reward" not in caplog.text
    )
    first, second = world.begin(), world.begin()
    for episode, by_role in ((first, REWARDS[0]), (second, {"planner": 0.0, "coder": 0.5})):
        world.call(episode, 7, role="coder/critic")
        world.finish(episode, 0.0, by_role=by_role)
    batch = world.swarm.batches.compose()
    world.swarm.batches.training_batches(batch)
    metrics = world.swarm.batches.learned(batch, {})
    assert f"1 roles have no reward, such as 'coder/critic' of {second.id}" in caplog.text
    assert [name for name in metrics if "left_out" in name] == ["coder/reward/roles_left_out"]


def test_a_reward_of_a_role_without_calls_is_named(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2):
        episode = world.begin()
        world.call(episode, 7, role="planner")
        world.call(episode, 7, role="coder/critic")
        world.finish(episode, 0.0, by_role={"planner": number, "coder": 0.5, "coder/critc": 1.0})
    batch = world.swarm.batches.compose()
    world.swarm.batches.training_batches(batch)
    assert world.swarm.batches.learned(batch, {})["reward/roles_without_calls"] == 1
    assert "rewards for 'coder/critc'" in caplog.text and "'coder/critic', 'planner'" in caplog.text


def test_a_batch_that_was_half_applied_is_learned_again_from_the_same_bytes(world: World) -> None:
    batch = played(world, NAMES, [{"reward": 0.0, "by_role": by_role} for by_role in REWARDS])
    wires = [body_digest(training) for training in world.swarm.batches.training_batches(batch).values()]
    applied = [("planner", 0, "forward_backward"), ("planner", 1, "optim_step"), ("coder", 0, "forward_backward")]
    for _ in range(2):
        for policy, number, kind in applied:
            world.swarm.batches.record_operation(policy, number, kind, batch)  # type: ignore[arg-type]
        world.reopen()
        assert world.swarm.batches.resume(None) == [batch] == [world.swarm.pending]
        assert [body_digest(training) for training in world.swarm.batches.training_batches(batch).values()] == wires
        assert world.journal.operations("planner") == [(0, "forward_backward", 0), (1, "optim_step", 0)]
        assert world.journal.operations("coder") == [(0, "forward_backward", 0)]
    world.swarm.batches.record_operation("coder", 1, "optim_step", batch)
    world.swarm.batches.learned(batch, {})
    assert world.swarm.policy_version == 1 and len(world.journal.operations("coder")) == 2


# ---- origin ------------------------------------------------------------------------------------------------

MODELS = {"planner": ModelConfig(name="small"), "coder": ModelConfig(name="large")}
CARDS = {"planner": CARD, "coder": ModelInfo("large", "", "", 64, (), dtype="float32", weights="c3")}


def begun(folder: Path, models: dict[str, ModelConfig]) -> Path:
    """A journal of one episode, whose workers have been up."""
    world = World(folder, policies=NAMES if len(models) > 1 else ())
    world.close()
    world.journal = Journal.open(world.path, models=models)
    for policy in models:
        world.journal.check_origin(policy, {"model.dtype": CARDS.get(policy, CARD).dtype, "model_weights": policy})
    world.journal.record_origin()
    world.close()
    world.open()
    world.begin()
    world.close()
    return world.path


def test_a_policy_keeps_its_own_origin(tmp_path: Path) -> None:
    path = begun(tmp_path, MODELS)
    world = World(tmp_path, policies=NAMES)
    assert [world.journal.origin.of(name)["model.dtype"] for name in NAMES] == ["bfloat16", "float32"]
    assert world.journal.origin.named == ("coder", "planner")
    assert world.journal.origin.of("coder")["model.name"] == "large"
    with pytest.raises(
        ConfigError, match=r"model_weights = 'coder' \(.* under model\.name = 'large'\) for policy 'coder'; 'c3' would"
    ):
        world.swarm.check_origin("coder", CARDS["coder"])
    world.close()
    with pytest.raises(ConfigError, match=r"model\.name = 'small' for policy 'planner'; 'large' would"):
        Journal.open(path, models={**MODELS, "planner": MODELS["coder"]})
    Journal.open(path, models=dict(reversed(MODELS.items()))).close()


@pytest.mark.parametrize(
    ("was", "now", "sentence"),
    [
        (MODELS, {"planner": MODELS["planner"]}, "the policies coder, planner; the settings have the policies planner"),
        (MODELS, {"policy": ModelConfig(name="small")}, "the policies coder, planner; the settings have no named"),
        (
            {"policy": ModelConfig(name="small")},
            MODELS,
            "no named policies; the settings have the policies coder, planner",
        ),
    ],
)
def test_other_policies_are_refused(
    tmp_path: Path, was: dict[str, ModelConfig], now: dict[str, ModelConfig], sentence: str
) -> None:
    path = begun(tmp_path, was)
    with pytest.raises(ConfigError, match=f"was created with {sentence}"):
        Journal.open(path, models=now)
    Journal.open(path, models=was).close()
