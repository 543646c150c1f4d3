"""The progress of a model's first download: how much the cache of the Hugging Face Hub has grown.

The libraries that load a model download its files themselves, so the size of their cache is measured beside them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agentjet.types import SlowWork

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
INFO_SECONDS = 5.0
"""Limit of the request for the sizes of a model's files."""
SILENT_SECONDS = 10.0
"""Time without a first byte after which the hub is named."""
MEGABYTE = 1e6


@contextmanager
def reported(name: str, report: Callable[[SlowWork], object]) -> Iterator[None]:
    """Context in which a download of the model `name` is reported each second. `report` is called in a thread.

    Nothing is reported for a local folder, and while a cache with files does not grow.
    """
    if Path(name).is_dir() or name.count("/") != 1:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_report, args=(name, report, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _report(name: str, report: Callable[[SlowWork], object], ended: threading.Event) -> None:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "blobs")
    meter = DownloadMeter(name, folder, time.monotonic)
    while not ended.wait(LOOK_SECONDS):
        if (work := meter.look(lambda: size_of_weights(name))) is not None:
            report(work)


class DownloadMeter:
    """Measures the growth of a folder."""

    def __init__(self, name: str, folder: Path, clock: Callable[[], float]) -> None:
        self._text = f"downloading the model {name}"
        self._folder = folder
        self._clock = clock
        self._begun = clock()
        self._before = self._size = size_of(folder)
        self._total: float | None = None

    def look(self, total: Callable[[], float]) -> SlowWork | None:
        """The progress, if the folder has grown since the last look. `total` is called once, when it first grows."""
        before, self._size = self._size, size_of(self._folder)
        if self._size <= before:
            seconds = self._clock() - self._begun
            is_silent = not self._size and seconds >= SILENT_SECONDS
            return (
                SlowWork(f"{self._text} (the hub has sent nothing yet)", 0.0, 0.0, "MB", seconds) if is_silent else None
            )
        if self._total is None:
            self._total = total()
        grown = self._size - self._before
        left = max(0.0, self._total - self._before) if self._total else 0.0
        seconds = self._clock() - self._begun
        total_mb = max(left, grown) / MEGABYTE if left else 0.0
        return SlowWork(self._text, grown / MEGABYTE, total_mb, "MB", seconds)


def size_of(folder: Path) -> int:
    """Bytes of the files of a folder; 0 without the folder. Files may vanish while they are counted."""
    total = 0
    try:
        for path in folder.iterdir():
            total += path.stat().st_size
    except OSError:
        return total
    return total


def size_of_weights(name: str) -> float:
    """Bytes of the files that loading downloads, as the Hub lists them; 0 if the Hub does not answer."""
    from huggingface_hub import HfApi

    try:
        files = HfApi().model_info(name, files_metadata=True, timeout=INFO_SECONDS).siblings or []
    except Exception as error:  # The boundary: the size is only shown, and loading reports its own errors.
        log.info("the size of %s is not known: %s", name, error)
        return 0.0
    sizes = {file.rfilename: file.size or 0 for file in files if "/" not in file.rfilename}
    weights = {name: size for name, size in sizes.items() if name.endswith(".safetensors")}
    weights = weights or {name: size for name, size in sizes.items() if name.endswith(".bin")}
    return float(sum(weights.values()) + sum(size for name, size in sizes.items() if name.endswith(".json")))
