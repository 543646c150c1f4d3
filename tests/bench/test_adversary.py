"""Attacks on the planner are refused one of each kind, and what is granted is not counted as refused."""

from __future__ import annotations

from bench.researching.adversary import (
    ATTACKS,
    HONEST,
    STUDY,
    StudyLog,
    after_the_data,
    attacks,
    before_the_data,
    ending,
    honest_are_granted,
    see,
)


def test_one_of_each_kind_is_refused() -> None:
    tried = attacks(ways=1)
    assert len({attack.kind for attack in tried}) == 2 * len(ATTACKS) + 3
    assert [attack for attack in tried if not attack.refused] == []


def test_what_is_granted_is_not_counted_as_refused() -> None:
    assert not before_the_data(HONEST)
    assert not after_the_data(HONEST, STUDY, ending(see(STUDY, StudyLog())))
    assert honest_are_granted()
