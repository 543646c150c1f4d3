"""A torn tail: the state of SQLite's write-ahead log after a power cut in the middle of a commit.

Only the last commit is torn, which was not yet reported: the part in which the log differs from its earlier copy.
"""

from __future__ import annotations

import random
from pathlib import Path


def tear(wal: Path, before: Path, dice: random.Random) -> str:
    """Damage the log beyond what was acknowledged; returns how. The old log is at `before`, which is removed."""
    new, old = wal.read_bytes(), before.read_bytes()
    before.unlink()
    first, last = _difference(new, old)
    at = dice.randrange(first, last)
    how = dice.choice(("cut off", "zeros", "noise", "old pages"))
    if how == "cut off":
        torn = new[:at]
    elif how == "zeros":
        torn = new[:at] + bytes(last - at) + new[last:]
    elif how == "noise":
        torn = new[:at] + dice.randbytes(last - at) + new[last:]
    else:  # Some pages reached the disk, one in the middle did not.
        stop = min(last, at + 4096)
        torn = new[:at] + old.ljust(len(new), b"\0")[at:stop] + new[stop:]
    wal.write_bytes(torn)
    return how


def _difference(new: bytes, old: bytes) -> tuple[int, int]:
    """Where the new log differs from the old: from the first byte to after the last."""
    old = old.ljust(len(new), b"\0")[: len(new)]
    differing = [i for i in range(0, len(new), 4096) if new[i : i + 4096] != old[i : i + 4096]]
    assert differing, "a commit wrote nothing"
    first, last = differing[0], min(len(new), differing[-1] + 4096)
    while new[first] == old[first]:
        first += 1
    return first, last
