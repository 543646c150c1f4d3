"""Being asked to end: what is live is aborted first, and children are ended, as after Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signals_unwind() -> Iterator[None]:
    """While inside, a request to end this process (SIGTERM, a closed terminal) raises `SystemExit` in the main thread,
    as Ctrl-C raises `KeyboardInterrupt`. One that the program handles or ignores is left to it; from other threads
    nothing can be done.
    """

    def unwind(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    asking = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    taken = [number for number in asking if signal.getsignal(number) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        taken = []
    for number in taken:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
