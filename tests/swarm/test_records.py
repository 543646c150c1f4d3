"""Records of a run.

1. Every filter of episodes finds those that match, alone and together, and counts them.
2. In every order, the pages together are the whole list, once each.
3. A wrong `before` is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest

from agentjet.errors import InvalidRequest, NotFound
from agentjet.protocol import EpisodeQuery
from agentjet.swarm import EpisodeRecord
from agentjet.types import EpisodeOrder, Message, NewContext
from tests.swarm.world import World


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world(max_staleness=4)


def found(world: World, **query: Any) -> list[EpisodeRecord]:
    return list(world.journal.find_episodes(EpisodeQuery(**query)).episodes)


def played(world: World) -> dict[str, EpisodeRecord]:
    """Episodes that differ in everything that can be asked for, by name."""
    low, high = world.begin("g1"), world.begin("g1")
    world.call(low, 5), world.call(high, 5, 6, 7)
    world.finish(low, 0.0), world.finish(high, 1.0)
    world.play("g2", 0.25, 0.75)
    batch = world.swarm.batches.compose()
    world.swarm.batches.learned(batch, {})
    lost = world.begin("g3", task_id="hard", task_set="math", client_id="me", code_version="v2")
    world.abort(lost, "Timeout: no answer in 60 s")
    live = world.begin("g4", task_set="math")
    tested = world.begin("", mode="eval", task_id="held-out")
    world.finish(tested, 0.5)
    names = {"low": low, "high": high, "lost": lost, "live": live, "tested": tested}
    return {name: world.swarm.episode(episode.id) for name, episode in names.items()}


def test_filters(world: World) -> None:
    named = played(world)
    ids = {episode.id: name for name, episode in named.items()}

    def names(**query: Any) -> set[str]:
        """The names of the found ones; `g2`'s have none."""
        return {ids.get(episode.id, "") for episode in found(world, **query)}

    assert names() == {*named, ""}
    assert names(status="aborted") == names(reason="Timeout") == names(reason="60 s") == {"lost"}
    assert names(task_set="math") == {"lost", "live"} and names(task_set="mat") == set()
    assert names(task="hard") == names(client="me") == names(code_version="v2") == names(search="ar") == {"lost"}
    assert names(group="g1") == names(group_id=named["low"].group_id) == {"low", "high"}
    assert names(search="g1") == {"low", "high"} and names(search=named["live"].id) == {"live"}
    assert names(mode="eval") == {"tested"} and names(code_version="", mode="eval") == {"tested"}
    assert names(batch=0) == {"low", "high", ""} and names(batch=1) == set()
    assert names(min_version=1) == {"lost", "live", "tested"} and names(max_version=0) == {"low", "high", ""}
    assert names(min_reward=0.5, max_reward=0.5) == {"tested"} and names(max_reward=0.1) == {"low"}
    assert names(batch=0, min_reward=0.5, group="g1") == {"high"}
    world.abort(world.begin("g5"), "not needed: the client's run has its steps")
    assert names(status="aborted") == {"lost"} and names(status="not_needed") == {""}
    assert [e.reason for e in found(world, status="not_needed")] == ["not needed: the client's run has its steps"]
    assert names(status="finished") == {"low", "high", "tested", ""} and names(status="live") == {"live"}
    assert world.journal.find_episodes(EpisodeQuery(task_set="math", count=True, limit=1)).total == 2
    assert world.journal.find_episodes(EpisodeQuery()).total is None


def test_text_of_messages_answers_and_rewards_is_found_and_nothing_else(world: World) -> None:
    asked, answered, other = (world.begin(f"g{n}") for n in range(3))
    question = NewContext(messages=(Message("user", 'She said "grüß dich"\nand left.'),))
    world.call(asked, 5, ask=question)
    world.call(answered, 5, response=Message("assistant", "forty-two"))
    world.call(other, 5)

    def ids(text: str) -> set[str]:
        return {episode.id for episode in found(world, text=text)}

    assert ids('"grüß dich"\nand') == {asked.id}
    assert ids("forty-two") == {answered.id}
    world.finish(other, 0.0, text='expected "grüß dich"\nand left')
    assert ids('expected "grüß dich"\n') == {other.id}
    assert ids('"grüß dich"\nand') == {asked.id, other.id}
    assert ids("reward_text") == ids("prompt_key") == ids("Forty-two") == set()
    assert world.journal.find_episodes(EpisodeQuery(text="forty", count=True)).total == 1


@pytest.mark.parametrize("sort", get_args(EpisodeOrder))
@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_pages_in_every_order(world: World, sort: EpisodeOrder, limit: int) -> None:
    played(world)
    whole = found(world, sort=sort)
    keys = {
        "newest": lambda e: -e.seq, "oldest": lambda e: e.seq, "reward": lambda e: (e.reward, -e.seq),
        "-reward": lambda e: (-e.reward, -e.seq), "-num_tokens": lambda e: (-e.num_tokens, -e.seq),
        "-num_calls": lambda e: (-e.num_calls, -e.seq),
    }  # fmt: skip
    assert whole == sorted(whole, key=keys[sort]) and len(whole) == (5 if "reward" in sort else 7)
    listed: list[EpisodeRecord] = []
    page = world.journal.find_episodes(EpisodeQuery(sort=sort, limit=limit))
    while page.next is not None:
        listed += page.episodes
        assert page.next == page.episodes[-1].id
        page = world.journal.find_episodes(EpisodeQuery(sort=sort, limit=limit, before=page.next))
    assert [*listed, *page.episodes] == whole


def test_a_wrong_place(world: World) -> None:
    named = played(world)
    with pytest.raises(NotFound, match="There is no episode 'gone'"):
        found(world, before="gone")
    with pytest.raises(InvalidRequest, match="it has no reward"):
        found(world, before=named["live"].id, sort="reward")
