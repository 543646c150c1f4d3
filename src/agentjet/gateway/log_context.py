"""What a log record is about: the episode and the batch at hand, carried by the task that logs.

Set where they become known, read by whoever formats records. Child tasks inherit what was set before they began.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

episode_id: ContextVar[str] = ContextVar("episode_id", default="")
batch_id: ContextVar[int | None] = ContextVar("batch_id", default=None)


@contextmanager
def learning(batch: int) -> Iterator[None]:
    """Records of this task are about `batch` meanwhile."""
    token = batch_id.set(batch)
    try:
        yield
    finally:
        batch_id.reset(token)


class AboutFilter(logging.Filter):
    """Lets every record through, with `episode_id` and `batch_id` (empty and None where there is none) put on it.

    Attach it to handlers: filters of a logger do not see the records of its children.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        for name, held in (("episode_id", episode_id.get()), ("batch_id", batch_id.get())):
            if not hasattr(record, name):
                setattr(record, name, held)
        return True
