"""`tensorboard:DIR`: event files of TensorBoard, written by `tensorboardX`, which needs no torch.

A step is one record, so a killed process leaves it whole or not at all. Each process writes a new file, because
TensorBoard reads a file only up to a torn record. TensorBoard stores float32.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.summary import text as text_summary

from agentjet.errors import ConfigError
from agentjet.trackers.sink import Run, Step

SETTINGS = "settings"
"""Tag of the text with the run's settings. It comes with the first step."""


class TensorBoardSink:
    """Scalars by metric name; the step is the policy version."""

    def __init__(self, target: str) -> None:
        self.path = Path(target)
        self._writer: Any = None
        self._settings: Summary | None = None

    def begin(self, run: Run) -> int | None:
        self.path.mkdir(parents=True, exist_ok=True)
        files = sorted(self.path.glob("*.tfevents.*"))
        version = max((event.step for file in files for event in _events(file)), default=0)
        # The names of two processes of the same second differ by the number of files.
        self._writer = EventsWriter(str(self.path / "events"), f".{len(files)}.agentjet")
        if not version:
            table = "\n".join(f"    {name} = {json.dumps(value)}" for name, value in run.settings.items())
            self._settings = text_summary(SETTINGS, f"    run {run.name} ({run.id})\n{table}")
        return version

    def write(self, steps: Sequence[Step]) -> None:
        for step in steps:
            summary = Summary(value=[Summary.Value(tag=name, simple_value=v) for name, v in step.metrics.items()])
            if self._settings is not None:
                summary.MergeFrom(self._settings)
                self._settings = None
            self._writer.write_event(Event(wall_time=step.time, step=step.version, summary=summary))
        self._writer.flush()

    def end(self) -> None:
        self._writer.close()


def _events(file: Path) -> Iterator[Any]:
    """The complete records of an event file: length, its checksum, the event, its checksum."""
    content = file.read_bytes()
    start = 0
    while start + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, start)
        end = start + 12 + length
        if end + 4 > len(content):
            return  # The last record is torn.
        try:
            yield Event.FromString(content[start + 12 : end])
        except Exception as error:  # protobuf's own class differs between its implementations.
            raise ConfigError(f"{file} is damaged ({error}): choose another folder") from None
        start = end + 4
