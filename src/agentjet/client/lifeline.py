"""A process that ends with whoever started it, however that ended: its standard input ends then."""

from __future__ import annotations

import os
import signal
import threading

STDIN = 0


def end_with_input(number: signal.Signals) -> None:
    """Send this process a signal when its standard input ends."""

    def watch() -> None:
        while os.read(STDIN, 4096):  # Not through Python's buffer, whose lock would be held at the process's end.
            pass
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()
