"""Pins the cocktail: several task sets in one batch, by `job.task_weights`.

1. shares follow the weights although one set is ten times slower, with small batches, spares, staleness and dropped
   groups; without weights they do not (so that the first could fail);
2. a set that left, or finishes nothing, delays no other; one that joins takes its place without costing others theirs;
3. a set without a weight, and one that has its share, are refused with a reason;
4. killing the server changes nothing, weights can be changed while training runs, and what is shown is so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest

from agentjet.errors import Conflict, Later
from agentjet.swarm import EpisodeRecord
from tests.swarm.world import LEASE, MAX_SECONDS, World

Make = Callable[..., World]


class Fleet:
    """A client for each task set, `slots` episodes at a time, that last `seconds[task_set]` each."""

    def __init__(self, world: World, seconds: Mapping[str, float], *, slots: int = 8, restarts: bool = False) -> None:
        self.world = world
        self.seconds = dict(seconds)
        self.slots = slots
        self.restarts = restarts
        self.working: dict[str, list[tuple[float, EpisodeRecord]]] = {name: [] for name in seconds}
        self.begun = dict.fromkeys(seconds, 0)
        self.batches: list[list[str]] = []
        """The task sets of each batch's groups."""

    def join(self, name: str, seconds: float) -> None:
        self.seconds[name], self.working[name], self.begun[name] = seconds, [], self.begun.get(name, 0)

    def leave(self, name: str) -> None:
        """As by a kill: what it was at stays behind."""
        del self.seconds[name], self.working[name]

    def run(self, batches: int, *, most_seconds: float = 1e5) -> list[list[str]]:
        """Until so many more batches were learned; returns them."""
        goal, end = len(self.batches) + batches, self.world.now + most_seconds
        known = len(self.batches)
        while len(self.batches) < goal:
            assert self.world.now < end, self.world.swarm.queries.waiting_for()
            self.tick()
        return self.batches[known:]

    def tick(self) -> None:
        self.work()
        if self.world.swarm.batches.ready():
            self.learn()

    def work(self) -> None:
        """A second of everybody's."""
        for name in self.working:
            self.begin(name)
        self.world.now += 1
        self.world.swarm.reap()
        for name, working in self.working.items():
            for ends, episode in [one for one in working if one[0] <= self.world.now]:
                working.remove((ends, episode))
                self.end(name, episode)

    def begin(self, name: str) -> None:
        while len(self.working[name]) < self.slots:
            group = f"{name}{self.begun[name] // self.world.job.group_size}"
            try:
                episode = self.world.begin(group, client_id=name, task_set=name)
            except Later:
                return
            self.begun[name] += 1
            self.world.call(episode, 7)
            self.working[name].append((self.world.now + self.seconds[name], episode))

    def end(self, name: str, episode: EpisodeRecord) -> None:
        with suppress(Conflict):  # surplus, or stale
            self.world.finish(episode, float(episode.seq % 3))

    def learn(self) -> None:
        batch = self.world.swarm.batches.compose()
        self.batches.append([self.world.swarm.episode(group[0]).task_set for group in batch.groups])
        if self.restarts:
            self.world.reopen()
        self.world.swarm.batches.learned(batch, {})
        if self.restarts:
            self.world.reopen()


def shares(batches: list[list[str]]) -> dict[str, float]:
    groups = [name for batch in batches for name in batch]
    return {name: groups.count(name) / len(groups) for name in sorted(set(groups))}


SLOW = {"fast": 1, "slow": 10}


@pytest.mark.parametrize(
    ("job", "weights"),
    [
        ({"batch_size": 3}, {"fast": 1.0, "slow": 1.0}),
        ({"batch_size": 4}, {"fast": 3.0, "slow": 1.0}),
        ({"batch_size": 2}, {"fast": 0.7, "slow": 0.3}),
        ({"batch_size": 1}, {"fast": 1.0, "slow": 2.0}),
        ({"batch_size": 4, "spare_groups": 2}, {"fast": 1.0, "slow": 1.0}),
        ({"batch_size": 3, "spare_episodes": 1}, {"fast": 2.0, "slow": 1.0}),
        ({"batch_size": 3, "max_staleness": 1, "spare_groups": 2}, {"fast": 1.0, "slow": 1.0}),
        ({"batch_size": 4, "recipe": {"drop_zero_variance": True}}, {"fast": 1.0, "slow": 1.0}),
    ],
    ids=str,
)
def test_shares_follow_the_weights_although_one_set_is_ten_times_slower(
    make_world: Make, job: dict[str, Any], weights: dict[str, float]
) -> None:
    fleet = Fleet(make_world(task_weights=weights, **job), SLOW)
    wanted = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    assert shares(fleet.run(40)) == pytest.approx(wanted, abs=0.05 * min(wanted.values()))


def test_without_weights_the_fast_set_crowds_out_the_slow_one(make_world: Make) -> None:
    fleet = Fleet(make_world(batch_size=4, max_staleness=2, spare_groups=4), SLOW)
    assert shares(fleet.run(40))["fast"] > 0.7


def test_three_sets_and_small_batches(make_world: Make) -> None:
    weights = {"a": 5.0, "b": 2.0, "c": 1.0}
    fleet = Fleet(make_world(batch_size=2, task_weights=weights), {"a": 1, "b": 3, "c": 10})
    assert shares(fleet.run(80)) == pytest.approx({"a": 0.625, "b": 0.25, "c": 0.125}, abs=0.006)


def test_a_killed_server_changes_nothing(make_world: Make) -> None:
    """The journal has the carry, and the sets that took part."""
    weights = {"fast": 2.0, "slow": 1.0}
    calm, killed = (
        Fleet(make_world(batch_size=2, task_weights=weights), SLOW, restarts=restarts).run(20)
        for restarts in (False, True)
    )
    assert calm == killed and len({tuple(sorted(batch)) for batch in calm}) == 2


def test_a_batch_that_is_set_aside_takes_nothing_with_it(make_world: Make) -> None:
    world = make_world(batch_size=1, task_weights={"a": 2.0, "b": 1.0})
    fleet = Fleet(world, {"a": 1, "b": 1})
    fleet.run(1)
    owed = dict(world.swarm.carry)
    while not world.swarm.batches.ready():
        fleet.work()
    batch = world.swarm.batches.compose()
    assert world.swarm.carry == batch.carry != owed
    world.swarm.batches.quarantine(batch, "it kills workers")
    assert world.swarm.carry == owed == world.reopen().carry


def test_a_set_that_left_holds_nobody_up_and_is_owed_nothing(make_world: Make) -> None:
    world = make_world(batch_size=4, task_weights={"fast": 1.0, "slow": 1.0})
    fleet = Fleet(world, SLOW)
    fleet.run(2)
    while not any(episode.status == "live" for _, episode in fleet.working["slow"]):
        fleet.tick()
    fleet.leave("slow")
    assert world.swarm.queries.waiting_for().startswith("rewards of task set 'slow' (")
    assert shares(fleet.run(3, most_seconds=2 * LEASE + 20)[1:]) == {"fast": 1.0}
    told = [event.body for event in world.journal.events() if event.kind == "task_set"]
    assert told[-1] == {"task_set": "slow", "state": "left"}
    fleet.join("slow", 10)
    fleet.run(1)
    assert shares(fleet.run(10)) == pytest.approx({"fast": 0.5, "slow": 0.5}, abs=0.051)  # MAX_CARRY groups of 40


def test_a_set_that_joins_costs_nobody_an_episode(make_world: Make) -> None:
    world = make_world(batch_size=4, task_weights={"*": 1.0})
    fleet = Fleet(world, {"a": 3})
    fleet.run(2)
    for _ in range(2):
        fleet.tick()
    fleet.join("b", 3)
    fleet.run(2)
    assert shares(fleet.run(8)) == pytest.approx({"a": 0.5, "b": 0.5}, abs=0.04)
    assert world.journal.outcomes()["dropped"] == 0


def test_a_set_that_finishes_nothing_is_passed_over_in_time(make_world: Make) -> None:
    """Its agents fail, one after the other, and it begins again each time: one batch waits that long, not for ever."""
    world = make_world(batch_size=2, task_weights={"good": 1.0, "broken": 1.0})
    fleet = Fleet(world, {"good": 1})
    stuck = world.begin("b", task_set="broken", client_id="broken")
    began = world.now
    while not world.swarm.policy_version:
        world.abort(stuck)
        try:
            stuck = world.begin("b", task_set="broken", client_id="broken")
        except Later as later:
            assert later.code == "task_set_full"
        fleet.tick()
        assert world.now < began + MAX_SECONDS + 2 * LEASE
    assert fleet.batches == [["good", "good"]]
    assert [event.body["state"] for event in world.journal.events(limit=10**6) if event.kind == "task_set"].count(
        "stalled"
    ) == 1
    world.play("b", 0, 1, task_set="broken", client_id="broken")  # it has another chance with the next batch
    assert sorted(fleet.run(1)[0]) == ["broken", "good"]


def test_a_set_without_a_weight_is_refused_by_name(make_world: Make) -> None:
    world = make_world(task_weights={"math": 2.0, "code": 1.0})
    for name, way_out in (("poetry", "job.task_weights.poetry"), ("", "job.task_weights.*")):
        with pytest.raises(Conflict, match="only for code, math") as refused:
            world.begin(task_set=name)
        assert refused.value.code == "task_set_unknown" and way_out in refused.value.message
    assert world.begin(task_set="poetry", mode="eval").status == "live"
    world.swarm.replace_job(world.job.model_copy(update={"task_weights": {"math": 2.0, "*": 1.0}}))
    assert world.begin(task_set="poetry").status == world.begin("h").status == "live"


def test_a_set_that_has_its_share_is_refused_in_words(make_world: Make) -> None:
    world = make_world(batch_size=4, task_weights={"a": 3.0, "b": 1.0})
    only = world.begin("b0", task_set="b")
    for number in range(3):
        world.begin(f"a{number}", task_set="a")
    with pytest.raises(Later) as full:
        world.begin("a3", task_set="a")
    assert full.value.code == "batch_full"
    world.abort(only)
    with pytest.raises(Later, match=r"'a' has its 3 of 4 groups, by job.task_weights; the rest is for 'b' \(0 of 1\)"):
        world.begin("a3", task_set="a")
    assert (
        world.begin("a0", task_set="a").group_id == world.swarm.queries.groups[0].id
    )  # a group's own members may come


def test_weights_can_change_while_training_runs(make_world: Make) -> None:
    world = make_world(batch_size=4, task_weights={"fast": 1.0, "slow": 1.0})
    fleet = Fleet(world, SLOW)
    fleet.run(3)
    fleet.tick()
    world.swarm.replace_job(world.job.model_copy(update={"task_weights": {"fast": 3.0, "slow": 1.0}}))
    fleet.run(2)
    assert shares(fleet.run(20)) == pytest.approx({"fast": 0.75, "slow": 0.25}, abs=0.02)
    world.swarm.replace_job(world.job.model_copy(update={"task_weights": {}}))
    fleet.run(5)
    assert world.journal.outcomes()["dropped"] == 0


def test_what_is_shown_of_task_sets(make_world: Make) -> None:
    world = make_world(batch_size=3, task_weights={"a": 2.0, "b": 1.0, "never": 1.0})
    assert world.swarm.queries.mixture.shares()["never"].share == 0
    world.play("a0", 0, 1, task_set="a")
    world.play("a1", 1, 1, task_set="a")
    first = world.begin("b0", task_set="b")
    assert world.swarm.queries.waiting_for() == (
        "rewards of task set 'b' (0 of 1 groups): 2 of 3 groups are complete, 1 open, 1 episode live"
    )
    one = world.swarm.queries.mixture.shares()["b"]
    assert (one.weight, one.groups_open, one.groups_complete, one.reward_mean) == (1.0, 1, 0, None)
    for episode in (first, world.begin("b0", task_set="b")):
        world.call(episode, 7)
        world.finish(episode, 0.25)
    batch = world.swarm.batches.compose()
    world.forest(batch)
    metrics = world.swarm.batches.learned(batch, {})
    assert (metrics["batch/share/a"], metrics["batch/share/b"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert (metrics["reward/a/mean"], metrics["reward/b/mean"]) == (0.75, 0.25)
    for _ in range(2):
        shown = world.swarm.queries.mixture.shares()
        assert (shown["a"].share, shown["a"].reward_mean) == (pytest.approx(2 / 3), 0.75)
        assert list(shown) == ["a", "b", "never"]
        world.reopen()


def test_without_names_there_is_nothing_to_show(world: World) -> None:
    world.play("a", 0, 1)
    assert world.swarm.queries.mixture.shares() == {}
