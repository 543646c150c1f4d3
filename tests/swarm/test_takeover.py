"""A process that begins under the name of an earlier one takes its places over. Pinned here:

1. the live episodes that the earlier one left are aborted, counted as replaced and never scored; its short groups
   close; the new one has room at once, in the same request;
2. finished episodes, other clients, and episodes whose process is not named stay as they are;
3. a request that is repeated has one effect, whichever process repeats it;
4. a process that was replaced is refused from then on, also after a restart of the server.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentjet.errors import Conflict, Later
from tests.swarm.world import World


def named(instance_id: str, client_id: str = "trainer") -> dict[str, str]:
    return {"client_id": client_id, "instance_id": instance_id}


def test_a_successor_has_the_places_of_a_killed_client_at_once(world: World) -> None:
    left = [world.begin(group, **named("killed")) for group in "aabb"]
    world.call(left[0], 7)
    world.finish(left[0], 1.0)
    with pytest.raises(Later):
        world.begin("c", client_id="another")
    world.reopen()
    successor = world.begin("c", **named("new"))
    ends = [world.swarm.episode(episode.id) for episode in left]
    assert [end.status for end in ends] == ["finished", "aborted", "aborted", "aborted"]
    assert {end.reason.partition(":")[0] for end in ends[1:]} == {"replaced"}
    assert {end.reward for end in ends[1:]} == {None} and ends[0].dropped == "too_few"
    assert [group.members for group in world.swarm.queries.groups] == [(successor.id,)]
    assert world.journal.outcomes()["live"] == 1
    world.call(successor, 7)
    world.finish(successor, 1.0)
    world.play("c", 0.0, **named("new"))
    world.play("d", 0.0, 1.0, **named("new"))
    batch = world.swarm.batches.compose()
    assert world.swarm.batches.learned(batch, {})["episodes/replaced"] == 3


def test_what_is_not_left_behind_stays(make_world: Callable[..., World]) -> None:
    world = make_world(batch_size=5)
    mine = world.begin("a", **named("killed"))
    kept = [
        world.begin("b", client_id="trainer"),
        world.begin("c", **named("killed", client_id="another")),
        world.begin("d", **named("killed")),
    ]
    world.call(kept[2], 7)
    world.finish(kept[2], 1.0)
    world.begin("a", mode="eval", **named("new"))
    statuses = [world.swarm.episode(episode.id).status for episode in [mine, *kept]]
    assert statuses == ["aborted", "live", "live", "finished"]


def test_a_repeated_request_has_one_effect(world: World) -> None:
    first = world.begin("a", key="k", **named("killed"))
    second = world.begin("a", key="l", **named("new"))
    assert world.begin("a", key="l", **named("new")) == second
    assert world.begin("a", key="k", **named("killed")).id == first.id, "an answer that was lost before the takeover"
    assert world.begin("a", key="k", **named("new")).id == first.id
    assert world.journal.outcomes() == world.journal.outcomes() | {"live": 1, "not_needed": 1}


def test_a_replaced_process_is_refused(world: World) -> None:
    old = world.begin("a", **named("old"))
    new = world.begin("a", **named("new"))
    with pytest.raises(Conflict, match=r"aborted \(replaced: another process of this client"):
        world.finish(old, 1.0)
    for _ in range(2):
        with pytest.raises(Conflict, match="different names") as refused:
            world.begin("a", **named("old"))
        assert refused.value.code == "client_replaced"
        world.reopen()
    assert world.swarm.episode(new.id).status == "live"
