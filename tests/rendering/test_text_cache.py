"""A cache with a limit in characters, because clients choose the length of its entries."""

from __future__ import annotations

from agentjet.rendering.grammar import TextCache


def test_the_longest_unused_goes_first() -> None:
    made: list[str] = []

    def make(text: str) -> int:
        made.append(text)
        return len(text)

    cache = TextCache(make, most=3, characters=10)
    assert [cache(text) for text in ("aaaa", "bbbb", "aaaa")] == [4, 4, 4] and made == ["aaaa", "bbbb"]
    assert cache("cccc") == 4  # 12 characters: the one not used for longest is forgotten.
    assert cache("aaaa") == 4 and made == ["aaaa", "bbbb", "cccc"]
    assert cache("bbbb") == 4 and made[3:] == ["bbbb"]
    assert cache("d" * 11) == 11 and cache("d" * 11) == 11 and made.count("d" * 11) == 2  # Too long to be kept.
    for text in ("1", "2", "3", "4", "1"):
        cache(text)
    assert made[-2:] == ["4", "1"]  # Three texts are kept, however short they are.
