"""A client's own book: what it did and what the server acknowledged, one line of JSON each, on disk before it goes on.

It is what the journal is held against afterwards, so it is written by somebody else, in another place.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Book:
    """Append only."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, what: str, episode: str, **more: Any) -> None:
        line = json.dumps({"what": what, "episode": episode, "at": time.time(), **more}) + "\n"
        os.write(self._file, line.encode())
        os.fsync(self._file)


@dataclass(slots=True)
class Books:
    """The records of all clients together."""

    begun: set[str] = field(default_factory=set)  # Episodes that a client was given
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)  # Answers that reached an agent, by call id
    failed_calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls that ended with an error after the last attempt of the SDK."""
    scoring: dict[str, list[float | dict[str, float]]] = field(default_factory=dict)
    """Rewards that an agent returned, whether or not they arrived."""
    finished: dict[str, float | dict[str, float]] = field(default_factory=dict)  # Rewards that the server acknowledged
    refused: dict[str, str] = field(default_factory=dict)  # Rewards that came too late, with the reason
    failed: dict[str, str] = field(default_factory=dict)  # Episodes whose agent raised, and how
    aborted: set[str] = field(default_factory=set)  # Aborts that the server acknowledged
    hung: dict[str, float] = field(default_factory=dict)
    """When an agent gave its last sign of life, by the clock of this machine."""


def read(folder: Path) -> Books:
    """All books of a folder. A line that a killed client did not finish is ignored."""
    books = Books()
    for path in sorted(folder.glob("*.jsonl")):
        for line in _lines(path):
            _enter(books, line)
    return books


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def _enter(books: Books, line: dict[str, Any]) -> None:
    what, episode = line["what"], line["episode"]
    if what == "begun":
        books.begun.add(episode)
    elif what == "call":
        books.calls[line["call"]] = line
    elif what == "call failed":
        books.failed_calls.append(line)
    elif what == "scoring":
        books.scoring.setdefault(episode, []).append(line["reward"])
    elif what == "finished":
        books.finished[episode] = line["reward"]
    elif what == "refused":
        books.refused[episode] = line["code"]
    elif what == "failed":
        books.failed[episode] = line["error"]
    elif what == "aborted":
        books.aborted.add(episode)
    elif what == "hung":
        books.hung[episode] = line["at"]
