"""The error in the log of a replica that explains its end. vLLM's processes share one log, and errors wrap others."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

END_BYTES = 2**18
"""The part of a log that is searched, at its end."""
MAX_CHARACTERS = 300
_ERROR = re.compile(r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?((?:\w+\.)*\w+(?:Error|Exception): .*\S)")
"""The last line of a traceback, which vLLM writes behind the process, the time and the line of its code."""
_WRAPPER = "EngineDeadError"
"""An error that gives no cause: the engine of vLLM ended."""


def cause_of(log_path: Path, start: int) -> str:
    """Returns the first error that a log has after its first `start` bytes, or "". A file that is gone has none."""
    with contextlib.suppress(OSError), log_path.open("rb") as log:
        log.seek(max(start, log.seek(0, os.SEEK_END) - END_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
        found = (match[1] for line in lines if (match := _ERROR.match(line)) is not None)
        return next((error[:MAX_CHARACTERS] for error in found if _WRAPPER not in error), "")
    return ""
