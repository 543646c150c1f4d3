"""Pins admission and the fate of groups:

1. only what the batch needs is admitted: batch_size groups, group_size live or finished members each;
2. a lost member frees its place, a group left empty frees its own;
3. a short group closes after its wait for members: it trains at min_group_size, else it is dropped with a reason;
4. zero-variance groups are dropped up to the cap; eval episodes are never counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from agentjet.errors import Later, RecipeError
from agentjet.protocol import status_of
from agentjet.recipes.baselines import Grpo
from agentjet.recipes.recipe import FinishedGroup
from tests.swarm.world import LEASE, World

Make = Callable[..., World]


def refused(world: World, group: str, **request: object) -> str:
    with pytest.raises(Later) as later:
        world.begin(group, **request)
    assert later.value.retry_after > 0 and status_of(later.value) == 429
    return later.value.code


def test_only_what_the_batch_needs_is_admitted(world: World) -> None:
    admitted = [world.begin(group) for group in ("a", "a", "b", "b")]
    assert refused(world, "a") == "group_full"
    assert refused(world, "c") == "batch_full"
    assert world.journal.outcomes()["live"] == len(admitted) == 4
    assert (world.swarm.queries.num_groups("open"), world.swarm.queries.num_groups("complete")) == (2, 0)


def test_a_refused_begin_leaves_no_trace(world: World) -> None:
    world.play("a", 0, 1)
    world.play("b", 0, 1)
    before = (world.journal.events(), world.journal.outcomes(), world.swarm.queries.groups)
    assert refused(world, "c", key="k") == "batch_full"
    assert (world.journal.events(), world.journal.outcomes(), world.swarm.queries.groups) == before
    world.swarm.batches.learned(world.swarm.batches.compose(), {})
    assert world.begin("c", key="k").status == "live"


def test_groups_are_named_by_the_task_unless_told_otherwise(world: World) -> None:
    plain = world.begin("", task_id="t1")
    other_set = world.begin("", task_id="t1", task_set="algebra")
    assert (plain.group, other_set.group) == ("t1", "algebra/t1")
    assert plain.group_id != other_set.group_id


def test_groups_are_namespaced_by_client(world: World) -> None:
    assert world.begin("a", client_id="x").group_id != world.begin("a", client_id="y").group_id


def test_a_lost_member_frees_its_place(world: World) -> None:
    first, lost = world.begin("a"), world.begin("a")
    world.abort(lost)
    substitute = world.begin("a")
    assert refused(world, "a") == "group_full"
    assert world.swarm.queries.groups[0].members == (first.id, substitute.id)


def test_an_expired_member_frees_its_place(world: World) -> None:
    first, lost = world.begin("a"), world.begin("a")
    world.now += LEASE - 1
    world.swarm.heartbeat(first.id)
    world.now += 1
    world.swarm.reap()
    assert world.begin("a").group_id == first.group_id
    assert world.swarm.episode(lost.id).status == "expired"


def test_a_group_left_by_everybody_frees_its_place_in_the_batch(world: World) -> None:
    for group in ("a", "b"):
        world.abort(world.begin(group))
    assert world.swarm.queries.groups == ()
    world.begin("c")


def test_a_complete_group_lets_a_new_one_of_its_name_begin(world: World) -> None:
    world.play("a", 0, 1)
    again = world.begin("a")
    assert [group.id for group in world.swarm.queries.groups] == [1, again.group_id] == [1, 2]


def test_a_short_group_closes_and_trains(make_world: Make) -> None:
    world = make_world(group_size=3, batch_size=1)
    kept = world.play("a", 0, 1)
    lost = world.begin("a")
    world.now += 10
    world.abort(lost)
    world.now += LEASE - 1
    world.swarm.reap()
    assert not world.swarm.batches.ready()
    world.now += 1
    world.swarm.reap()
    assert world.swarm.batches.ready() and world.swarm.queries.groups[0].reason == "short"
    assert world.swarm.batches.compose().episode_ids == tuple(episode.id for episode in kept)


def test_a_refill_in_time_keeps_a_short_group_open(make_world: Make) -> None:
    world = make_world(group_size=3, batch_size=1)
    members = world.play("a", 0, 1)
    world.now += LEASE - 1
    members.append(world.begin("a"))
    world.now += LEASE - 1
    world.call(members[2], 5)
    world.finish(members[2], 0.5)
    assert world.swarm.batches.compose().groups == (tuple(member.id for member in members),)


def test_an_expired_lease_delays_a_batch_no_longer_than_itself(make_world: Make) -> None:
    world = make_world(group_size=3, batch_size=1)
    world.begin("a")  # never heard of again
    world.play("a", 0, 1)
    world.now += LEASE
    world.swarm.reap()
    assert world.swarm.batches.ready()


def test_a_short_group_below_the_minimum_is_dropped_and_counted(make_world: Make) -> None:
    world = make_world(group_size=3, min_group_size=2)
    [alone] = world.play("a", 1)
    world.now += LEASE
    world.swarm.reap()
    assert world.swarm.episode(alone.id).dropped == "too_few"
    assert world.journal.outcomes() == {
        "live": 0, "finished": 1, "aborted": 0, "expired": 0, "not_needed": 0, "trained": 0, "waiting": 0, "dropped": 1,
    }  # fmt: skip
    assert world.journal.events()[-1].body["reason"] == "too_few"
    world.play("b", 0, 1, 1)
    world.play("c", 0, 1, 1)
    batch = world.swarm.batches.compose()
    world.forest(batch)
    metrics = world.swarm.batches.learned(batch, {})
    assert metrics["groups/dropped"] == metrics["groups/dropped_too_few"] == 1.0


def test_groups_that_never_spoke_are_dropped(world: World) -> None:
    members = [world.begin("a"), world.begin("a")]
    for episode in members:
        world.finish(episode, 1.0)
    assert world.swarm.queries.groups == ()
    assert world.swarm.episode(members[0].id).dropped == "no_tokens"


def test_zero_variance_groups_are_dropped_up_to_the_cap(make_world: Make) -> None:
    world = make_world(recipe={"drop_zero_variance": True, "max_dropped_groups": 2})
    for name in ("a", "b"):
        episodes = world.play(name, 1, 1)
        assert [world.swarm.episode(episode.id).dropped for episode in episodes] == ["zero_variance"] * 2
    world.play("c", 1, 1)
    world.play("d", 0, 1)
    assert [group.name for group in world.swarm.queries.groups] == ["c", "d"]
    batch = world.swarm.batches.compose()
    assert world.swarm.batches.learned(batch, {})["groups/dropped_zero_variance"] == 2.0
    world.play("e", 1, 1)
    assert world.swarm.queries.groups == ()  # the next batch has its own allowance


class DropsByTask(Grpo):
    smallest_group: ClassVar[int] = 1

    def accept(self, group: FinishedGroup) -> str:
        return group.task_id


def test_the_cap_counts_all_reasons_of_the_recipe_together(make_world: Make) -> None:
    world = make_world(group_size=1, recipe={"name": f"{__name__}:DropsByTask", "max_dropped_groups": 2})
    silent = world.begin("silent")
    world.finish(silent, 1.0)
    assert world.swarm.episode(silent.id).dropped == "no_tokens", "not a reason of the recipe"
    for reason in ("easy", "hard"):
        [episode] = world.play(reason, 1, task_id=reason)
        assert world.swarm.episode(episode.id).dropped == reason
    world.play("next", 1, task_id="odd")
    assert [group.name for group in world.swarm.queries.groups] == ["next"]


@pytest.mark.parametrize("reason", ["Too long a story", "too_few"])
def test_a_reason_of_a_recipe_is_a_short_name_of_its_own(make_world: Make, reason: str) -> None:
    world = make_world(group_size=1, recipe=f"{__name__}:DropsByTask")
    with pytest.raises(RecipeError, match=rf"DropsByTask' drops a group for the reason '{reason}'"):
        world.play("a", 1, task_id=reason)


def test_rewards_that_differ_for_a_role_are_no_zero_variance(make_world: Make) -> None:
    world = make_world(recipe={"drop_zero_variance": True})
    for critic in (0.0, 1.0):
        episode = world.begin("a")
        world.call(episode, 5, role="critic")
        world.finish(episode, 1.0, by_role={"critic": critic})
    assert world.swarm.queries.num_groups("complete") == 1


def test_rewards_that_differ_for_nothing_comparable_are_zero_variance(make_world: Make) -> None:
    world = make_world(recipe={"drop_zero_variance": True})
    for by_role in ({"critic": 0.5}, {}):
        episode = world.begin("a")
        world.call(episode, 5, role="critic")
        world.finish(episode, 1.0, by_role=by_role)
    assert world.swarm.episode(episode.id).dropped == "zero_variance"


def test_eval_episodes_are_never_counted_grouped_or_trained(make_world: Make) -> None:
    world = make_world(batch_size=1)
    for _ in range(5):
        episode = world.begin("a", mode="eval")
        assert episode.group_id is None
        world.call(episode, 5)
        world.finish(episode, 1.0)
    assert world.swarm.queries.groups == () and not world.swarm.batches.ready()
    world.play("a", 0, 1)
    world.swarm.batches.compose()
    assert world.begin("a", mode="eval").status == "live"
    assert world.journal.outcomes()["waiting"] == 2


def test_nothing_is_admitted_after_the_last_step(make_world: Make) -> None:
    world = make_world(batch_size=1, max_steps=1)
    world.play("a", 0, 1)
    world.swarm.batches.learned(world.swarm.batches.compose(), {})
    assert refused(world, "b") == "not_sampling"
    assert "job.max_steps = 1" in world.swarm.queries.waiting_for()
    assert world.begin("b", mode="eval").status == "live"


def test_it_says_what_it_waits_for(world: World) -> None:
    assert world.swarm.queries.waiting_for() == "clients, to begin training episodes"
    world.play("a", 0, 1)
    none_at_work = "clients, to begin training episodes: 1 of 2 groups are complete, 0 open, 0 episodes live"
    assert world.swarm.queries.waiting_for() == none_at_work
    world.begin("b")
    assert world.swarm.queries.waiting_for() == "rewards: 1 of 2 groups are complete, 1 open, 1 episode live"


def test_it_says_whose_refill_it_waits_for_and_how_long(make_world: Make) -> None:
    world = make_world(group_size=3)
    world.play("a", 0, 1, client_id="me")
    world.now += 10
    said = world.swarm.queries.waiting_for()
    assert said.startswith("a refill of group 'a' of client 'me', which has 2 of 3 episodes and closes in 90 s (")
    assert "lower job.lease_seconds to close it sooner" in said
    assert "0 of 2 groups are complete" in said
    world.play("b", 1, client_id="you")
    world.now += 1
    assert "group 'a' of client 'me' (and of 1 more), which has 2 of 3 episodes and closes in 89 s" in (
        world.swarm.queries.waiting_for()
    )
    world.begin("b", client_id="you")
    assert world.swarm.queries.waiting_for().startswith("rewards and a refill of group 'a' of client 'me', which")
    world.begin("a", client_id="me")
    assert world.swarm.queries.waiting_for().startswith("rewards: 0 of 2 groups are complete, 2 open, 2 episodes live")


def test_a_restart_grants_the_wait_for_a_refill_once_more_and_no_further(make_world: Make) -> None:
    world = make_world(group_size=3, batch_size=1)
    world.play("a", 0, 1)
    touched = world.now
    world.now += LEASE / 2
    world.reopen()
    for _ in range(5):
        world.now += LEASE / 4
        world.reopen().reap()
        assert not world.swarm.batches.ready()
    world.now = touched + 2 * LEASE
    world.reopen().reap()
    assert world.swarm.batches.ready() and world.swarm.queries.groups[0].reason == "short"
