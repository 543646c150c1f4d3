"""Steering: what a person asks of a running study, as lines of a file beside its journal, and where they are taken.

Anybody may append at any time. The study reads the lines at its fixed points only, before each batch of trials, and
writes down which it took there: a study that is resumed takes the same lines at the same points, and ends the same.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

from agentjet.errors import ConfigError
from agentjet.research.journal import Book
from agentjet.research.ledger import Ledger
from agentjet.research.models import Amendment, Origin, Study
from agentjet.research.planner.actions import Request
from agentjet.research.planner.course import Course
from agentjet.research.planner.register import Register

POLL_SECONDS = 1.0


class Steering:
    """`steer.jsonl`, an action a line. `first` is the line a study begins to read at."""

    def __init__(self, path: Path, first: int = 0) -> None:
        self.path = path
        self.first = first

    def append(self, request: Request) -> None:
        """On disk when it returns. Several may append at the same time."""
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            torn = file.read() not in (b"", b"\n")  # by a crash: that line says nothing, and is refused
            file.write(b"\n" * torn + request.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def after(self, taken: int) -> list[str]:
        """The whole lines that follow so many that were taken."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        return lines[self.first + taken : -1]

    def unread(self, books: Sequence[Book]) -> list[str]:
        """The lines that neither a study nor its annexes took."""
        return self.after(sum(amendment.origin == "human" for book in books for amendment in book.amendments))

    def wait(self, taken: int) -> None:
        """Until there is a line that was not taken."""
        while not self.after(taken):
            time.sleep(POLL_SECONDS)


class Helm(Register):
    """Passes the fixed points of a study, and takes there what was asked of it."""

    def __init__(self, study: Study, book: Book, ledger: Ledger, steering: Steering | None) -> None:
        super().__init__(Course(study, begun=True), book, lambda: ledger.left("confirm"))
        self._ledger = ledger
        self._steering = steering

    def pass_point(self) -> None:
        """Take what was asked. Returns when the study is not paused."""
        self.point += 1
        while True:
            while self.recorded("human"):
                self.take(None, "human")
            if self.point < self._book.num_points:
                return
            for line in self._steering.after(self.taken("human")) if self._steering else []:
                self.take(line, "human")
            if not self.course.paused:
                self._book.append("point", {})
                return
            if self._steering is None:
                raise ConfigError("the study is paused: resume it, and run it with its steer file")
            self._steering.wait(self.taken("human"))

    def take(self, said: object, origin: Origin) -> Amendment:
        amendment = super().take(said, origin)
        if self.course.cap is not None:
            self._ledger.cap(self.course.cap)
        return amendment

    def steering_after(self) -> Steering | None:
        """What a study that follows on this one reads."""
        return self._steering and Steering(self._steering.path, self._steering.first + self.taken("human"))
