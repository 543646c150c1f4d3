"""Groups of a plug-in's recipe whose hook `accept` is called outside the swarm.

1. An end is recorded at once. The group is `closing` until the answer, and counts once in the statistics of its task.
2. A closing group survives restarts, takes its place, and no request or `reap` changes it.
3. An answer to a group that has ended since changes nothing.
4. A new group needs an answer to its own question.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import Field

from agentjet.errors import Later
from agentjet.protocol import BeginRequest, CloseGroupsRequest, GroupName
from agentjet.recipes.baselines import Grpo
from agentjet.recipes.recipe import FinishedGroup
from agentjet.recipes.rollout import Rollout
from agentjet.swarm.groups import AnsweredRollout, RolloutNeeded, RolloutQuestion
from tests.swarm.world import LEASE, World

Make = Callable[..., World]
NAME = f"{__name__}:Picky"


class Picky(Grpo):
    """Drops groups for the reason that its parameter names."""

    name: str = NAME
    drops: str = Field("")

    def accept(self, group: FinishedGroup) -> str:
        return self.drops


@pytest.fixture
def deferring(make_world: Make) -> Make:
    def make(drops: str = "", **job: Any) -> World:
        world = make_world(recipe={"name": NAME, "drops": drops}, **job)
        world.swarm.defers_hooks = True
        return world

    return make


def reopen(world: World) -> None:
    world.reopen()
    world.swarm.defers_hooks = True


def question(world: World, group: str, **request: Any) -> RolloutQuestion:
    with pytest.raises(RolloutNeeded) as needed:
        world.begin(group, **request)
    return needed.value.question


def begin(world: World, group: str, **request: Any) -> Any:
    asked = question(world, group, **request)
    return begin_with(world, group, AnsweredRollout(asked, asked.answer()), **request)


def begin_with(world: World, group: str, answer: AnsweredRollout, **request: Any) -> Any:
    return world.swarm.begin(BeginRequest(task_id="t", group=group, **request), rollout=answer)


def play(world: World, group: str, *rewards: float) -> list[str]:
    first = begin(world, group)
    members = [first, *(world.begin(group) for _ in rewards[1:])]
    for episode, reward in zip(members, rewards, strict=True):
        world.call(episode, 7, 8)
        assert world.finish(episode, reward).status == "finished"
    return [episode.id for episode in members]


def states(world: World) -> list[str]:
    return [group.state for group in world.swarm.queries.groups]


def decide(world: World) -> None:
    found = world.swarm.undecided()
    assert found is not None
    world.swarm.decide(found, found.answer())


def test_a_closing_group_survives_everything_but_its_answer(deferring: Make) -> None:
    world = deferring(batch_size=1)
    members = play(world, "a", 1, 0)
    client = world.swarm.queries.groups[0].client_id
    for _ in range(2):
        assert states(world) == ["closing"] and not world.swarm.batches.ready()
        assert world.journal.outcomes()["waiting"] == 2
        with pytest.raises(Later) as refused:
            world.begin("b")
        assert refused.value.code == "batch_full"
        request = CloseGroupsRequest(client_id=client, groups=[GroupName(group="a")], not_needed=True)
        assert [*world.swarm.close_groups(request)][-1] == 0, "it is not open"
        world.now += 10 * LEASE
        assert world.swarm.reap() == []
        reopen(world)
    assert "`accept` of the recipe: 0 of 1 groups are complete, 0 open" in world.swarm.queries.waiting_for()
    decide(world)
    assert world.swarm.undecided() is None and states(world) == ["complete"]
    assert world.swarm.batches.compose().episode_ids == tuple(members)
    assert world.journal.task("", "t").num_groups == 1


def test_a_dropped_group_is_counted_once(deferring: Make) -> None:
    world = deferring("dull", batch_size=1)
    [first, _] = play(world, "a", 1, 1)
    found = world.swarm.undecided()
    assert found is not None
    for _ in range(2):
        world.swarm.decide(found, found.answer())
    assert world.swarm.episode(first).dropped == "dull" and states(world) == []
    assert world.journal.counts("dropped") == {"dull": 2}
    assert world.journal.task("", "t").num_groups == 1


def test_no_more_than_the_limit_are_dropped(deferring: Make) -> None:
    world = deferring("dull", batch_size=1)
    for group in range(10):
        play(world, str(group), 1, 1)
        decide(world)
        assert states(world) == []
    play(world, "last", 1, 1)
    decide(world)
    assert states(world) == ["complete"]


def test_groups_are_decided_and_trained_in_the_order_they_ended(deferring: Make) -> None:
    world = deferring(batch_size=2)
    a, b = begin(world, "a"), begin(world, "b")
    others = [world.begin("b"), world.begin("a")]
    for episode in (b, others[0], a, others[1]):
        world.now += 1
        world.call(episode, 7)
        world.finish(episode, 1.0)
    first = world.swarm.undecided()
    assert first is not None and first.group.name == "b"
    decide(world)
    decide(world)
    assert world.swarm.batches.compose().groups == ((b.id, others[0].id), (a.id, others[1].id))


def test_an_answer_for_a_group_that_was_dropped_meanwhile_changes_nothing(deferring: Make) -> None:
    world = deferring(batch_size=1, spare_groups=1)
    play(world, "late", 1, 0)
    late = world.swarm.undecided()
    world.now += 1
    play(world, "early", 1, 0)
    assert late is not None
    closing = next(group for group in world.swarm.queries.groups if group.name == "early")
    world.swarm.decide(late._replace(group=closing), "")
    world.swarm.batches.compose()
    assert world.swarm.undecided() is None, "surplus"
    world.swarm.decide(late, "")
    assert states(world) == [] and world.journal.counts("dropped") == {"surplus": 2}


def test_an_expired_episode_does_not_wait_for_the_recipe(deferring: Make) -> None:
    world = deferring(group_size=3, min_group_size=2)
    first = begin(world, "a")
    members = [first, *(world.begin("a") for _ in range(2))]
    for episode in members[:2]:
        world.call(episode, 7)
        world.finish(episode, 1.0)
    client = first.client_id
    assert [*world.swarm.close_groups(CloseGroupsRequest(client_id=client, groups=[GroupName(group="a")]))][-1] == 1
    world.now += LEASE
    assert [episode.id for episode in world.swarm.reap()] == [members[2].id]
    assert states(world) == ["closing"] and world.swarm.queries.groups[0].reason == "short"


def test_an_answer_to_another_question_is_not_taken(deferring: Make) -> None:
    world = deferring()
    asked = question(world, "a")
    wrong = AnsweredRollout(asked._replace(version=5), Rollout(2, 0.5))
    with pytest.raises(RolloutNeeded) as again:
        begin_with(world, "a", wrong)
    assert again.value.question == asked and states(world) == []
    assert begin_with(world, "a", AnsweredRollout(asked, Rollout(2, 0.5))).temperature == 0.5
