"""Which replica gets a completion. Pinned here:

1. the one with the longest known prefix; among equals the one with the least to do;
2. a prefix that all completions share does not send all of them to one replica;
3. a replica with all places taken gets nothing; new weights forget the prefixes of what does not run;
4. work that lost a replica is alone of its kind on the next one;
5. completions of other processes count, but a process may have a share of the places beside them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from agentjet.compute.fleet import BLOCK_TOKENS, MORE, Load, RoutedCompletion, choose


def work(tokens: Iterable[int], losses: int = 0) -> RoutedCompletion:
    found = RoutedCompletion(np.fromiter(tokens, np.int32), losses=losses)
    found.update_keys()
    return found


def loads(*names: str, places: int = 100, cache_tokens: int = 10_000) -> dict[str, Load]:
    return {name: Load(places, cache_tokens) for name in names}


CONVERSATION = range(10 * BLOCK_TOKENS)


def test_the_next_turn_goes_to_the_replica_of_the_turn_before() -> None:
    among = loads("a", "b", "c")
    first = work(CONVERSATION)
    among["b"].add(first)
    first.sampled = list(range(BLOCK_TOKENS))
    among["b"].remove(first)
    among["b"].add(work(range(50, 60)))
    following = work([*CONVERSATION, *range(BLOCK_TOKENS), *range(90)])
    assert among["b"].known_blocks(following.keys) == 11, "its completion is known, too"
    assert choose(among, following) == "b"
    assert choose(among, work(range(1, 200))) == "a", "an unknown prompt goes to the least busy one"


def test_the_longer_prefix_wins() -> None:
    among = loads("a", "b")
    among["a"].add(work(CONVERSATION[: 3 * BLOCK_TOKENS]))
    among["b"].add(work(CONVERSATION[: 5 * BLOCK_TOKENS]))
    assert choose(among, work(CONVERSATION)) == "b"
    assert choose(among, work(CONVERSATION[: 3 * BLOCK_TOKENS])) == "a", "both know it all"


def test_a_shared_prompt_spreads_over_the_replicas() -> None:
    among = loads("a", "b", "c")
    for number in range(60):
        one = work([*CONVERSATION, *[number] * BLOCK_TOKENS])
        chosen = choose(among, one)
        assert chosen is not None
        among[chosen].add(one)
    counts = sorted(len(load.running) for load in among.values())
    assert counts[-1] - counts[0] <= MORE + 0.25 * counts[0] + 1


def test_places() -> None:
    among = loads("a", "b", places=2)
    running = [work(CONVERSATION) for _ in range(4)]
    for one in running:
        chosen = choose(among, one)
        assert chosen is not None
        among[chosen].add(one)
    assert choose(among, work(CONVERSATION)) is None
    among["b"].remove(next(iter(among["b"].running)))
    assert choose(among, work(range(5))) == "b"


def test_new_weights_and_a_full_cache_forget() -> None:
    load = Load(10, cache_tokens=12 * BLOCK_TOKENS)
    ended, running = work(CONVERSATION), work(range(1, 1 + 4 * BLOCK_TOKENS))
    load.add(ended)
    load.remove(ended)
    assert load.known_blocks(ended.keys) == 10
    load.add(running)
    assert load.known_blocks(ended.keys) == 8, "its end was forgotten first"
    load.forget()
    assert load.known_blocks(ended.keys) == 0 and load.known_blocks(running.keys) == 4


def test_work_that_lost_a_replica_is_alone_of_its_kind() -> None:
    among = loads("a", "b")
    among["a"].add(work(range(5), losses=1))
    for _ in range(3):
        among["b"].add(work(range(5)))
    assert choose(among, work(range(5))) == "a"
    assert choose(among, work(range(5), losses=2)) == "b"
    among["b"].add(work(range(5), losses=1))
    assert choose(among, work(range(5), losses=1)) is None


def test_completions_of_other_processes_count() -> None:
    among = loads("a", "b", places=16)
    among["a"].others = 9
    assert choose(among, work(range(5))) == "b", "it is less busy"
    for load in among.values():
        load.others = 16
    for _ in range(4):
        chosen = choose(among, work(range(5)))
        assert chosen is not None
        among[chosen].add(work(range(5)))
    assert [len(load.running) for load in among.values()] == [2, 2], "an eighth of 16 places, beside all"
    assert choose(among, work(range(5))) is None
    among["b"].others = 11
    assert choose(among, work(range(5))) == "b"
