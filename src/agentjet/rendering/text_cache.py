"""`TextCache`: what was made of texts, as long as the texts together are not too long.

A count of entries would not bound memory: clients choose how long their schemas are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

Made = TypeVar("Made")


class TextCache(Generic[Made]):
    """Calls `make` once for each text while the text is in use; the one not used for longest goes first.

    Threads may share it; two that miss the same text at the same time both make it.
    """

    def __init__(self, make: Callable[[str], Made], *, most: int, characters: int) -> None:
        """Keeps at most `most` texts with so many characters in all."""
        self._make = make
        self._most = most
        self._room = characters
        self._made: OrderedDict[str, Made] = OrderedDict()
        self._lock = Lock()

    def __call__(self, text: str) -> Made:
        with self._lock:
            if text in self._made:
                self._made.move_to_end(text)
                return self._made[text]
        made = self._make(text)
        with self._lock:
            if text not in self._made:
                self._made[text] = made
                self._room -= len(text)
            while self._made and (self._room < 0 or len(self._made) > self._most):
                oldest, _ = self._made.popitem(last=False)
                self._room += len(oldest)
        return made
