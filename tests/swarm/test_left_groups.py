"""1. A group that its client left closes with its last live member, and is trained or dropped by its size. 2. The
request has one effect, also repeated and after a restart. 3. A later group of the same name is another one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentjet.protocol import CloseGroupsRequest, GroupName
from tests.swarm.world import World

Make = Callable[..., World]


def leave(
    world: World, *groups: str, key: str | None = None, client: str = "anonymous", not_needed: bool = False
) -> int:
    names = [GroupName(group=group) for group in groups]
    request = CloseGroupsRequest(client_id=client, groups=names, not_needed=not_needed)
    *_, num_waiting = world.swarm.close_groups(request, idempotency_key=key)
    return num_waiting


def test_each_group_is_closed_in_a_slice_of_its_own(make_world: Make) -> None:
    """Another member may finish its group between two slices."""
    world = make_world(batch_size=3, group_size=2)
    first, other, second, _ = (world.begin(name) for name in "abbc")
    for episode in (other, second):
        world.call(episode, 7)
    world.finish(other, 0.0)
    names = [GroupName(group=name) for name in "abc"]
    slices = world.swarm.close_groups(CloseGroupsRequest(groups=names, not_needed=True))
    assert [next(slices), next(slices)] == [0, 0]  # The key, and the first group.
    world.finish(second, 1.0)
    assert [*slices] == [0, 0, 0]
    assert world.swarm.episode(first.id).status == "aborted" and world.swarm.episode(second.id).status == "finished"
    assert [group.state for group in world.swarm.queries.groups] == ["complete"]


@pytest.mark.parametrize(
    ("recipe", "trained"), [("grpo", False), ("rft", True)], ids=["compares members", "takes each alone"]
)
def test_the_recipe_decides_the_smallest_group_by_default(make_world: Make, recipe: str, trained: bool) -> None:
    world = make_world(group_size=3, recipe=recipe)
    alone = world.begin()
    world.call(alone, 7)
    world.finish(alone, 1.0)
    leave(world, "g")
    [group] = world.swarm.queries.groups or [None]
    assert (group is not None and group.state == "complete") is trained
    assert world.swarm.episode(alone.id).dropped == ("" if trained else "too_few")


@pytest.mark.parametrize(
    ("num_finished", "ends", "state", "reason"),
    [
        (3, "aborted before", "complete", "short"),
        (2, "aborted after", "complete", "short"),
        (2, "expired after", "complete", "short"),
        (2, "finished after", "complete", "short"),
        (1, "aborted before", "dropped", "too_few"),
        (1, "aborted after", "dropped", "too_few"),
        (0, "aborted after", "dropped", "no_members"),
    ],
)
def test_a_left_group_closes_with_its_last_live_member(
    make_world: Make, num_finished: int, ends: str, state: str, reason: str
) -> None:
    world = make_world(group_size=4, min_group_size=2)
    members = [world.begin() for _ in range(num_finished + 1)]
    for number, member in enumerate(members[:-1]):
        world.call(member, 7)
        world.finish(member, float(number))
    world.call(members[-1], 7)
    events: list[tuple[str, str]] = []
    world.swarm.on_event = lambda event: (
        events.append((event.body["state"], event.body["reason"])) if event.kind == "group" else None
    )
    if ends == "aborted before":
        world.abort(members[-1])
        assert not events, "without the request the group waits for a refill"
        assert leave(world, "g") == 0
    else:
        assert leave(world, "g") == 1
        assert not events, "a live member is waited for"
        if ends == "expired after":
            world.now += 100.0
            world.swarm.reap()
        else:
            world.abort(members[-1]) if ends == "aborted after" else world.finish(members[-1], 9.0)
    assert events == [(state, reason)]


def test_a_repeated_request_has_one_effect(make_world: Make) -> None:
    world = make_world(group_size=3, recipe="rft")
    world.finish(world.begin(), 1.0)
    assert leave(world, "g", key="k") == 0
    world.reopen()
    later = world.begin()
    assert leave(world, "g", key="k") == 0
    world.abort(later)
    assert world.begin().group_id == 3, "the later group was open until its only member was lost"
    assert leave(world, "g") == 1, "another request is about the later group"


def test_a_left_group_takes_no_member_and_survives_a_restart(make_world: Make) -> None:
    world = make_world(group_size=3, recipe="rft")
    first = world.begin()
    world.call(first, 7)
    leave(world, "g")
    second = world.begin()
    assert second.group_id != first.group_id
    world.reopen()
    world.finish(first, 1.0)
    assert world.swarm.groups[1].state == "complete"
    assert world.swarm.groups[2].state == "open"


def test_only_the_groups_of_the_client_are_closed_and_unknown_ones_are_no_error(make_world: Make) -> None:
    world = make_world(group_size=3, recipe="rft")
    world.begin(client_id="other")
    assert leave(world, "g", "never begun") == 0
    assert [group.is_left for group in world.swarm.groups.values()] == [False]


def test_groups_that_are_not_needed_are_dropped_as_surplus(make_world: Make) -> None:
    world = make_world(group_size=3, recipe="rft")
    first, second = world.begin(), world.begin()
    world.finish(first, 1.0)
    assert leave(world, "g", not_needed=True) == 0
    assert world.swarm.episode(first.id).dropped == "surplus"
    assert world.swarm.episode(second.id).not_needed
    assert not world.swarm.groups
