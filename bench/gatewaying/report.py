"""Messages between the processes of the bench, as JSON: the load for a server, and its outcome."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Counters:
    """A server process's account of itself; the commits since it was last asked, the others since it began."""

    rss_mb: float
    cpu_s: float
    commits: int
    commit_s: float
    commit_p50_ms: float
    commit_p99_ms: float


@dataclass(frozen=True, slots=True)
class Load:
    """Episodes that are all open at once, each with `calls` calls one after the other, every second one streamed."""

    url: str
    token: str
    """A client's token: episodes are begun and ended. Without `episodes_api` it is the key of every call."""
    model: str
    episodes: int
    calls: int
    rate: float = 0.0
    """Calls a second over all episodes, spread evenly; 0: the next call as soon as the last one is answered."""
    seconds: float = 0.0
    """Duration of the scripted completion, which is not the server's cost."""
    episodes_api: bool = True
    """True for our server; False for a peer, which has calls only."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Load:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a load. Overheads are milliseconds from a request's first byte to its answer's last, less the
    script's own time."""

    calls: int
    errors: int
    first_error: str
    seconds: float
    rps: float
    p50_ms: float
    p99_ms: float
    plain_p50_ms: float
    stream_p50_ms: float
    lag_p99_ms: float
    """Delay of the generator behind its plan."""
    generator_cpu: float
    """Cores that the generator kept busy."""
    begin_s: float = 0.0
    finish_s: float = 0.0
    server_cpu: float = 0.0
    """Cores that the server kept busy while it was called."""
    rss_mb: float = 0.0
    """Resident memory of the server, with all episodes open and their calls done."""
    kb_per_episode: float = 0.0
    commits: int = 0
    commit_share: float = 0.0
    """Share of the wall clock in which the server's thread waited for the disk; its event loop went on."""
    commit_p50_ms: float = 0.0
    commit_p99_ms: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        return cls(**json.loads(text))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed; 0 without any."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)] if ranked else 0.0
