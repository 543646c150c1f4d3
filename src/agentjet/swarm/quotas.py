"""How the places of a batch are divided among task sets by weight. Pure arithmetic, exact in the long run.

Groups are dealt in turns: with each, every set is owed its share of a group, and the one that is owed the most gets it.
What is owed after a batch is carried over to the next, so that small batches and small weights come out right, too.
Dealing is monotone: the first `n` of a longer deal are the deal of `n`, so that what is begun ahead of a batch is
what the batch will need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

MAX_CARRY = 2.0
"""Groups a set may be owed, or have had too many, at most: rounding owes about one, and what comes of sets that join or
leave in the middle of a batch is not made up for at length.
"""


def deal(weights: Mapping[str, float], carry: Mapping[str, float]) -> Iterator[str]:
    """Whose group is next, without end. Equal claims go by name. `weights` has at least one set."""
    total = sum(weights.values())
    owed = {name: carry.get(name, 0.0) for name in sorted(weights)}
    while True:
        for name in owed:
            owed[name] += weights[name] / total
        name = max(owed, key=owed.__getitem__)
        owed[name] -= 1
        yield name


def quotas(
    weights: Mapping[str, float], carry: Mapping[str, float], held: Mapping[str, int], places: int
) -> dict[str, int]:
    """How many groups each set of `weights` may have, of `places` in all.

    Places that are taken are not given back: `held` may be above a set's due, and counts sets without a weight, too.
    """
    due = dict.fromkeys(weights, 0)
    taken = sum(held.values())
    dealer = deal(weights, carry) if weights else iter(())
    while taken < places and (name := next(dealer, None)) is not None:
        due[name] += 1
        taken += due[name] > held.get(name, 0)
    return {name: max(number, held.get(name, 0)) for name, number in due.items()}


def needs(
    weights: Mapping[str, float], carry: Mapping[str, float], limits: Mapping[str, int], size: int
) -> dict[str, int] | None:
    """How many groups of each set the next `size` have; none has more than its limit. None when those are too few."""
    if sum(limits.values()) < size:
        return None
    needed = dict.fromkeys(weights, 0)
    dealer = deal(weights, carry) if weights else iter(())
    while sum(needed.values()) < size and (name := next(dealer, None)) is not None:
        needed[name] += needed[name] < limits[name]
    return needed


def carried(weights: Mapping[str, float], carry: Mapping[str, float], used: Mapping[str, int]) -> dict[str, float]:
    """What each set of `weights` is owed after a batch with `used` groups of each; in sum nothing."""
    total, size = sum(weights.values()), sum(used.get(name, 0) for name in weights)
    owed = {name: carry.get(name, 0.0) + size * w / total - used.get(name, 0) for name, w in weights.items()}
    surplus = sum(owed.values()) / max(1, len(owed))
    return {name: min(MAX_CARRY, max(-MAX_CARRY, value - surplus)) for name, value in owed.items()}
