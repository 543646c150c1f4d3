"""Sinks that need no library: `csv:FILE` and `jsonl:FILE`. The file itself shows which steps it has."""

from __future__ import annotations

import csv
import io
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from agentjet.errors import ConfigError
from agentjet.trackers.sink import Run, Step

FIRST_COLUMNS = ["step", "time"]


class JsonlSink:
    """One JSON object a step, as in `metrics.jsonl`."""

    def __init__(self, target: str) -> None:
        self.path = Path(target)

    def begin(self, run: Run) -> int | None:
        """Cuts off a line that is not complete."""
        *_, newest = ["", *_complete_text(self.path).splitlines()]
        return self._version(newest) if newest else 0

    def write(self, steps: Sequence[Step]) -> None:
        _append(self.path, "".join(json.dumps(step.row) + "\n" for step in steps))

    def end(self) -> None: ...

    def _version(self, line: str) -> int:
        return _checked(self.path, lambda: json.loads(line)["step"])


class CsvSink:
    """One row a step and one column a metric. A new metric adds a column: then the file is replaced."""

    def __init__(self, target: str) -> None:
        self.path = Path(target)
        self._columns: list[str] = []

    def begin(self, run: Run) -> int | None:
        """Cuts off a row that is not complete. The header always is, because a new one comes with a new file."""
        rows = self._rows()
        self._columns = next(rows, [])
        if self._columns and self._columns[:2] != FIRST_COLUMNS:
            raise ConfigError(f"{self.path} does not begin with the columns step and time: name another file")
        newest = deque(rows, maxlen=1)
        return _checked(self.path, lambda: int(newest[0][0])) if newest else 0

    def write(self, steps: Sequence[Step]) -> None:
        known = set(self._columns)
        new = [name for name in dict.fromkeys(name for step in steps for name in step.metrics) if name not in known]
        if new or not self._columns:
            self._add_columns(new)
        _append(self.path, self._text(step.row for step in steps))

    def end(self) -> None: ...

    def _rows(self) -> Iterator[list[str]]:
        return csv.reader(io.StringIO(_complete_text(self.path), newline=""))

    def _add_columns(self, new: list[str]) -> None:
        """Replace the file by one that has these columns, too."""
        rows = self._rows()
        before = next(rows, FIRST_COLUMNS)
        self._columns = [*before, *new]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(self._columns)
        text.write(self._text(dict(zip(before, row, strict=False)) for row in rows))
        unfinished = self.path.with_name(f".{self.path.name}.new")
        unfinished.unlink(missing_ok=True)
        _append(unfinished, text.getvalue())
        unfinished.replace(self.path)

    def _text(self, rows: Iterable[Mapping[str, object]]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, restval="", lineterminator="\n").writerows(rows)
        return text.getvalue()


def _complete_text(path: Path) -> str:
    """The text of a file, after the file was cut behind its last line break. Empty if there is no file."""
    try:
        with path.open("r+b") as file:
            text = file.read()
            end = text.rfind(b"\n") + 1
            file.truncate(end)
            return text[:end].decode(errors="replace")
    except FileNotFoundError:
        return ""


def _checked(path: Path, version: Callable[[], object]) -> int:
    try:
        found = version()
    except (ValueError, LookupError, TypeError, RecursionError):
        found = None
    if isinstance(found, int) and found > 0:
        return found
    raise ConfigError(f"the last line of {path} is not a step: name another file, or remove this one")


def _append(path: Path, text: str) -> None:
    """Append text. It is on disk when this returns."""
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
