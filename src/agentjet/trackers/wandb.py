"""`wandb:PROJECT` or `wandb:ENTITY/PROJECT`: Weights & Biases, online, or offline with WANDB_MODE=offline.

The library writes and sends in a second process, so a kill loses steps that were given to it. Which ones arrived is
asked at the next start: online from W&B, offline from the files of the run.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from agentjet.errors import ConfigError
from agentjet.trackers.sink import Run, Step

FILE_HEADER, BLOCK, CHUNK_HEADER = 7, 32_768, 7
"""Bytes. A `.wandb` file has the format of LevelDB's log: blocks of chunks with checksum, length and type."""
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class WandbSink:
    """Metrics by name; W&B's step is the policy version."""

    def __init__(self, target: str) -> None:
        *entity, self._project = target.split("/")
        if len(entity) > 1 or not self._project:
            raise ConfigError(f"wandb:{target} is not wandb:PROJECT or wandb:ENTITY/PROJECT")
        self._entity = entity[0] if entity else None
        self._run: Any = None

    def begin(self, run: Run) -> int | None:
        # The folder of the run is named after the second. A killed process of this second has left one.
        time.sleep(1 - time.time() % 1)
        self._run = wandb.init(
            entity=self._entity,
            project=self._project,
            id=run.id,
            name=run.name,
            config=dict(run.settings),
            resume="allow",
            settings=wandb.Settings(console="off", x_disable_stats=True),  # The machine is not that of the training.
        )
        if self._run.offline:
            files = Path(self._run.settings.wandb_dir).glob(f"*run-*-{run.id}/run-{run.id}.wandb")
            return max((_newest_step(file) for file in files), default=0)
        return max(0, int(self._run.starting_step) - 1)

    def write(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self._run.log({**step.metrics, "_timestamp": step.time}, step=step.version, commit=True)

    def end(self) -> None:
        self._run.finish()


def _newest_step(file: Path) -> int:
    records = (Record.FromString(record) for record in _records(file.read_bytes()))
    return max((record.history.step.num for record in records if record.HasField("history")), default=0)


def _records(content: bytes) -> Iterator[bytes]:
    """The complete records of a `.wandb` file."""
    record, start = b"", FILE_HEADER
    while start + CHUNK_HEADER <= len(content):
        left = BLOCK - start % BLOCK
        if left < CHUNK_HEADER:  # Such a rest of a block is empty.
            start += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, start)
        end = start + CHUNK_HEADER + length
        if kind == 0 or end > len(content):
            return
        piece = content[start + CHUNK_HEADER : end]
        record = piece if kind in (FULL, FIRST) else record + piece
        if kind in (FULL, LAST):
            yield record
        start = end
