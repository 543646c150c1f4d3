"""Pins who gets the next place of a batch:

1. a client alone opens groups as long as there is a place, and never more;
2. no client that waits starves, whatever the others do and in any order;
3. clients that want more than there is get equal shares, however often they ask;
4. groups without progress do not count against other clients, and live on. No episode that finished is lost uncounted;
5. a client that waits no more, or cannot use a place, keeps nobody from it;
6. the status names who waits and who holds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from agentjet.errors import Conflict, Later
from agentjet.protocol import BeginRequest
from agentjet.protocol.base import status_of
from agentjet.swarm import EpisodeRecord
from tests.swarm.world import LEASE, MAX_SECONDS, World

Make = Callable[..., World]
ONE_EACH = {"recipe": "rft", "group_size": 1}


def opens(world: World, client: str, *groups: str, **request: object) -> list[EpisodeRecord]:
    """The episodes of the groups that the client was allowed to open."""
    begun = []
    for group in groups:
        try:
            begun.append(world.begin(group, client_id=client, **request))
        except Later as later:
            assert status_of(later) == 429 and later.retry_after <= 1.0
    return begun


def finish(world: World, *episodes: EpisodeRecord) -> None:
    for episode in episodes:
        world.call(episode, 7)
        world.finish(episode, 1.0)


def learn(world: World) -> None:
    world.swarm.batches.learned(world.swarm.batches.compose(), {})


def wait(world: World, seconds: float, *alive: EpisodeRecord) -> None:
    """Let time pass, as a server does, while these episodes are kept alive by heartbeats."""
    for _ in range(10):
        world.now += seconds / 10
        for episode in alive:
            world.swarm.heartbeat(episode.id)
        world.swarm.reap()
        world.swarm.places.refresh()


# ---- several clients that want places all the time -----------------------------------------------------------------


@dataclass
class Simulated:
    """A client that always wants more groups than the batch has places."""

    name: str
    polls: int
    """Number of times that it asks in half a second."""
    duration: int
    """Half seconds that an episode takes."""
    end: str = "finish"
    """How its episodes end: `finish`; `fail` (after a call); `hold` (no call, no end); `replace` (each is aborted after
    a call, once another member of its group has begun)."""
    task_set: str = ""
    num_opened: int = 0
    num_finished: int = 0
    running: dict[str, int] = field(default_factory=dict)


class Market:
    """Clients of one run, in steps of half a second. They are served in random order."""

    def __init__(self, world: World, clients: list[Simulated], seed: int) -> None:
        self.world = world
        self.clients = clients
        self.random = random.Random(seed)

    def step(self) -> None:
        world = self.world
        world.now += 0.5
        world.swarm.reap()
        world.swarm.places.refresh()
        requests = [client for client in self.clients for _ in range(client.polls)]
        self.random.shuffle(requests)
        for client in requests:
            self.ask(client)
        for client in self.clients:
            for episode_id, left in list(client.running.items()):
                self.work(client, world.swarm.episode(episode_id), left)
        if world.swarm.batches.ready():
            learn(world)

    def ask(self, client: Simulated) -> None:
        while begun := opens(self.world, client.name, f"{client.num_opened}", task_set=client.task_set):
            client.num_opened += 1
            client.running[begun[0].id] = client.duration

    def work(self, client: Simulated, episode: EpisodeRecord, left: int) -> None:
        world = self.world
        if episode.ended is not None:
            del client.running[episode.id]
        elif left or client.end == "hold":
            client.running[episode.id] -= 1
            world.swarm.heartbeat(episode.id)
        elif client.end == "finish":
            finish(world, episode)
            client.num_finished += 1
        elif client.end == "fail":
            world.call(episode, 7)
            world.abort(episode)
        else:
            world.call(episode, 7)
            other = world.begin(episode.group, client_id=client.name, task_set=client.task_set)
            client.running[other.id] = client.duration
            world.abort(episode)


PHASES = (Phase.explicit, Phase.generate)  # A smaller failing market is no easier to read, and takes minutes to find.
ENDS = ["finish", "fail", "hold", "replace"]
GREEDY = st.tuples(st.sampled_from(ENDS), st.integers(1, 5), st.integers(0, 6))


@settings(max_examples=6, deadline=None, derandomize=True, phases=PHASES)
@given(
    others=st.lists(GREEDY, min_size=1, max_size=4),
    sets=st.booleans(),
    batch_size=st.integers(1, 4),
    staleness=st.integers(0, 1),
    duration=st.integers(0, 4),
    seed=st.integers(0, 1000),
)
@example(others=[("fail", 1, 2), ("fail", 5, 4)], sets=False, batch_size=2, staleness=0, duration=2, seed=172)
def test_no_honest_client_starves(
    others: list[tuple[str, int, int]], sets: bool, batch_size: int, staleness: int, duration: int, seed: int
) -> None:
    """It finishes groups in every period of the longest silence, and batches are learned."""
    lease, most = 5.0, 10.0
    job = {**ONE_EACH, "spare_episodes": 1, "lease_seconds": lease, "max_episode_seconds": most}
    names = ["x", "y"] if sets else [""]
    with TemporaryDirectory() as folder:
        weights = {"x": 1.0, "y": 2.0} if sets else {}
        world = World(Path(folder), batch_size=batch_size, max_staleness=staleness, task_weights=weights, **job)
        honest = [Simulated(f"honest{name}", 1, duration, task_set=name) for name in names]
        greedy = [Simulated(f"g{i}", n, t, end, names[i % len(names)]) for i, (end, n, t) in enumerate(others)]
        market = Market(world, greedy + honest, seed)
        for client in market.clients:  # The honest ones come last, and find no place.
            market.ask(client)
        for _ in range(2):
            before = world.swarm.policy_version, [client.num_finished for client in honest]
            for _ in range(int(4 * (most + lease)) + 3 * batch_size * (duration + 6) * (1 + len(others))):
                market.step()
            assert world.swarm.policy_version > before[0], world.swarm.queries.waiting_for()
            assert all(client.num_finished > n for client, n in zip(honest, before[1], strict=True))
        counts = world.journal.outcomes()
        assert counts["finished"] == counts["trained"] + counts["waiting"] + counts["dropped"]
        assert counts["dropped"] == sum(world.journal.counts("dropped").values())
        assert world.journal.counts("dropped").keys() <= {"surplus", "stale", "stalled"}
        world.close()


@settings(max_examples=8, deadline=None, derandomize=True, phases=PHASES)
@given(
    clients=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=2, max_size=6),
    batch_size=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_clients_that_want_more_get_equal_shares(clients: list[tuple[int, int]], batch_size: int, seed: int) -> None:
    """With more clients than places they come one after another. Otherwise each has its share of every batch."""
    with TemporaryDirectory() as folder:
        world = World(Path(folder), batch_size=batch_size, **ONE_EACH)
        simulated = [Simulated(f"c{i}", *one) for i, one in enumerate(clients)]
        market = Market(world, simulated, seed)
        for _ in range(10):  # Once all clients are known.
            market.step()
        before = world.swarm.policy_version, [client.num_opened for client in simulated]
        while (num_batches := world.swarm.policy_version - before[0]) < 12:
            market.step()
        opened = [client.num_opened - n for client, n in zip(simulated, before[1], strict=True)]
        if batch_size >= len(clients):
            assert min(opened) >= (batch_size // len(clients)) * (num_batches - 1), opened
        else:
            assert max(opened) - min(opened) <= 2, opened
        world.close()


@settings(max_examples=8, deadline=None, derandomize=True, phases=PHASES)
@given(
    polls=st.integers(1, 4),
    duration=st.integers(0, 300),
    batch_size=st.integers(1, 5),
    staleness=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_a_client_alone_gets_every_place_at_once(
    polls: int, duration: int, batch_size: int, staleness: int, seed: int
) -> None:
    with TemporaryDirectory() as folder:
        world = World(Path(folder), batch_size=batch_size, max_staleness=staleness, **ONE_EACH)
        market = Market(world, [Simulated("alone", polls, duration)], seed)
        for _ in range(30):
            market.ask(market.clients[0])
            assert len(world.swarm.queries.groups) == world.swarm.num_places
            market.step()
        assert world.swarm.queries.places_left >= 0
        world.close()


# ---- groups without progress ---------------------------------------------------------------------------------------


def test_a_silent_client_delays_another_one_by_one_lease(make_world: Make) -> None:
    world = make_world(batch_size=4, **ONE_EACH)
    greedy = opens(world, "greedy", *"abcd")
    assert len(greedy) == 4 and not opens(world, "other", *"abcd")
    wait(world, LEASE * 0.9, *greedy)
    assert not opens(world, "other", *"abcd"), "it may be busy"
    wait(world, LEASE * 0.1, *greedy)
    assert not opens(world, "greedy", "e"), "its silent groups count against itself"
    begun = opens(world, "other", *"abcd")
    assert len(begun) == 4
    assert all(world.swarm.episode(episode.id).status == "live" for episode in greedy), "lent, not taken away"
    world.call(greedy[0], 7)
    wait(world, 1.0, *greedy, *begun)
    assert world.swarm.places.holders()["greedy"].num_silent == 3, "a call ends it"
    world.abort(begun[0])
    assert not opens(world, "other", "e"), "so the batch has its groups again"
    finish(world, *begun[1:], greedy[0])
    learn(world)
    assert world.swarm.policy_version == 1


def test_a_silent_client_delays_no_further_batch(make_world: Make) -> None:
    """It begins again whenever it can. The others wait for it once, until it makes a call."""
    world = make_world(batch_size=4, **ONE_EACH)
    greedy = opens(world, "greedy", *"abcd")
    opens(world, "other", "a")
    wait(world, LEASE, *greedy)
    for version in range(1, 4):
        begun = opens(world, "other", *"abcd")
        assert len(begun) == 4, "no further lease"
        opens(world, "greedy", *"abcd")
        finish(world, *begun)
        learn(world)
        assert world.swarm.policy_version == version
        greedy = opens(world, "greedy", *"abcd")
        wait(world, 1.0, *greedy)
    assert len(greedy) == 4
    world.call(greedy[0], 7)
    wait(world, 1.0, *greedy)
    assert world.swarm.places.holders()["greedy"].num_silent == 0, "a call ends it"
    assert not opens(world, "other", *"abcd")


@pytest.mark.parametrize(("staleness", "status", "dropped"), [(0, "aborted", {}), (1, "finished", {"stale": 4})])
def test_lent_places_make_no_token_too_old(
    make_world: Make, staleness: int, status: str, dropped: dict[str, int]
) -> None:
    """Twice as many groups as there are places are complete: those above the limit of age are dropped and counted."""
    world = make_world(batch_size=2, max_staleness=staleness, **ONE_EACH)
    num_places = world.swarm.num_places
    late = opens(world, "late", *"abcd"[:num_places])
    wait(world, LEASE, *late)
    begun = opens(world, "other", *"abcd")
    assert len(late) == len(begun) == num_places
    finish(world, *begun[:2])
    if not staleness:
        learn(world)
        assert {world.swarm.episode(one.id).status for one in late} == {status}
        assert all(world.swarm.episode(one.id).not_needed for one in late)
        return
    finish(world, *begun[2:], *late)
    for _ in range(2):
        learn(world)
    assert not world.swarm.batches.ready() and not world.swarm.queries.groups
    assert world.journal.counts("dropped") == dropped and world.journal.outcomes()["trained"] == 4


def test_a_slow_tool_of_a_group_with_a_finished_episode_is_waited_for(make_world: Make) -> None:
    world = make_world(group_size=2, batch_size=1)
    first, slow = (world.begin("a", client_id="slow") for _ in range(2))
    finish(world, first)
    wait(world, LEASE * 3, slow)
    assert not opens(world, "other", "a"), "an episode that finished would be lost"


@pytest.mark.parametrize(("calls", "seconds"), [(False, LEASE), (True, MAX_SECONDS + LEASE)])
def test_a_group_that_replaces_members_for_ever_counts_no_more(make_world: Make, calls: bool, seconds: float) -> None:
    world = make_world(group_size=2, batch_size=1)
    hanging, waited = world.begin("a", client_id="greedy"), 0.0
    while not opens(world, "other", "a"):
        assert waited < seconds
        wait(world, LEASE / 2, hanging)
        waited += LEASE / 2
        other = world.begin("a", client_id="greedy")
        world.abort(hanging)
        hanging = other
        if calls:
            world.call(hanging, 7)
    assert waited >= seconds and world.swarm.episode(hanging.id).status == "live"


# ---- shares --------------------------------------------------------------------------------------------------------


def test_a_client_whose_episodes_fail_gives_its_places_up(make_world: Make) -> None:
    """It begins again before the other one asks, each time. Its lost groups count."""
    world = make_world(batch_size=4, **ONE_EACH)
    failing, begun = opens(world, "failing", *"abcd"), opens(world, "other", *"abcd")
    for attempt in range(20):
        for episode in failing:
            world.abort(episode)
        failing = opens(world, "failing", *(f"{attempt}{name}" for name in "abcd"))
        begun += opens(world, "other", *"abcd"[len(begun) :])
    assert len(begun) == 4 and not failing
    finish(world, *begun)
    learn(world)


@pytest.mark.parametrize("how", ["asks no more", "disconnects"])
def test_a_client_that_waits_no_more_keeps_nobody_from_a_place(make_world: Make, how: str) -> None:
    world = make_world(batch_size=2, **ONE_EACH)
    held = opens(world, "a", *"12")
    request = BeginRequest(task_id="t", group="x", client_id="b")
    with pytest.raises(Later) as refusal:
        world.swarm.begin(request)
    if how == "disconnects":
        with world.swarm.places.held(request, refusal.value):
            wait(world, 30.0, *held)
            world.abort(held.pop())
            assert not opens(world, "a", "3"), "b waits as long as the server holds its request"
    else:
        world.abort(held.pop())
        wait(world, 2.9, *held)
        assert not opens(world, "a", "3")
        wait(world, 0.2, *held)
    assert opens(world, "a", "3")


def test_a_client_waits_while_a_batch_is_learned(make_world: Make) -> None:
    world = make_world(batch_size=2, **ONE_EACH)
    finish(world, *opens(world, "a", *"12"))
    batch = world.swarm.batches.compose()
    for _ in range(5):
        wait(world, 1.0)
        assert not opens(world, "b", "x") and not opens(world, "a", "3")
    world.swarm.batches.learned(batch, {})
    assert len(opens(world, "a", *"34")) == 1 and opens(world, "b", "x")


def test_the_sets_of_a_mixture_do_not_wait_for_each_other(make_world: Make) -> None:
    world = make_world(batch_size=4, task_weights={"x": 1, "y": 1}, **ONE_EACH)
    opens(world, "b", "0", task_set="y")
    silent = opens(world, "a", *"1234", task_set="x")
    assert len(silent) == 2
    assert not opens(world, "b", "5", task_set="x"), "the set has its share"
    with pytest.raises(Conflict):
        world.begin("5", client_id="b", task_set="x", unless_full=True)
    assert opens(world, "c", "6", task_set="y"), "the waiting client wants a place of its set only"
    wait(world, LEASE, *silent)
    assert opens(world, "b", *"56", task_set="x"), "silent groups do not count in their set"


def test_the_sets_of_a_mixture_share_each_their_own_places(make_world: Make) -> None:
    world = make_world(batch_size=4, task_weights={"x": 1, "y": 1}, **ONE_EACH)
    opens(world, "c", *"12", task_set="y")
    held = opens(world, "a", *"12", task_set="x")
    assert not opens(world, "b", "1", task_set="x")
    world.abort(held[0])
    with pytest.raises(Conflict, match=r"'b'.* its share of 1") as refusal:
        world.begin("3", client_id="a", task_set="x", unless_full=True)
    assert refusal.value.code == "task_set_full"
    assert opens(world, "b", "1", task_set="x")


def test_lent_places_keep_the_weights_of_the_sets(make_world: Make) -> None:
    """A silent client of one set takes no places of the other one, also when it comes back late."""
    world = make_world(batch_size=4, task_weights={"x": 1, "y": 1}, **ONE_EACH)
    others = opens(world, "c", *"12", task_set="y")
    silent = opens(world, "a", *"12", task_set="x")
    wait(world, LEASE, *silent, *others)
    for other in others:
        world.call(other, 7)
    finish(world, *opens(world, "b", *"123", task_set="x"), *silent)
    assert not world.swarm.batches.ready(), "four groups of x are complete; the batch has two of y"
    finish(world, *others)
    batch = world.swarm.batches.compose()
    assert sorted(world.swarm.episode(one).task_set for one in batch.episode_ids) == ["x", "x", "y", "y"]


def test_the_status_names_who_waits_and_who_holds(make_world: Make) -> None:
    world = make_world(batch_size=2, **ONE_EACH)
    held = opens(world, "greedy", *"12")
    opens(world, "greedy", "3")
    assert "wait" not in world.swarm.queries.waiting_for(), "it waits for itself"
    opens(world, "other", "1")
    text = "; client 'other' waits for a place, 'greedy' holds 2 open groups"
    assert world.swarm.queries.waiting_for().endswith(text)
    wait(world, LEASE, *held)
    opens(world, "other", "1", "2", "3")
    opens(world, "third", "1")
    waiting = text.replace("waits", "and 1 more wait") + " (2 silent, so others may open as many)"
    assert waiting in world.swarm.queries.waiting_for()
    shown = {name: (one.num_open, one.num_silent, one.waits) for name, one in world.swarm.places.holders().items()}
    assert shown == {"greedy": (2, 2, False), "other": (2, 0, True), "third": (0, 0, True)}
