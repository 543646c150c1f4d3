"""How log records are written: text or JSON, with the episode and batch they are about, and without secrets.

Episode keys stand in paths (`/k/{key}/`), tokens and keys in headers: whatever part of a record or traceback shows one,
it is replaced before it is written.
"""

from __future__ import annotations

import json
import logging
import re
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal

from agentjet.gateway.log_context import AboutFilter

LogFormat = Literal["text", "json"]

SECRETS = (
    (re.compile(r"/k/[^/\s\"']+"), "/k/…"),
    (re.compile(r"ajk-[\w.~-]+"), "ajk-…"),
    (re.compile(r"(?i)(bearer\s+)[\w.~+/=-]{8,}"), r"\1…"),
)


class LogFile(RotatingFileHandler):
    """A file of log records that only its owner may read, as those are that follow it when it is full."""

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).touch(0o600)
        return super()._open()


def scrubbed(text: str) -> str:
    """`text` without keys and tokens."""
    for pattern, instead in SECRETS:
        text = pattern.sub(instead, text)
    return text


def prepared(handler: logging.Handler, log_format: LogFormat, line: str) -> logging.Handler:
    """`handler`, writing records in a format; `line` is the text's, in `logging`'s percent style."""
    handler.addFilter(AboutFilter())
    handler.addFilter(_says_something)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines(line))
    return handler


def _says_something(record: logging.LogRecord) -> bool:
    """Not so what asyncio warns of when a client left in the midst of an answer, which is counted elsewhere."""
    return not (record.name == "asyncio" and str(record.msg).startswith("socket.send() raised"))


class TextLines(logging.Formatter):
    """A line for people, ending in what it is about."""

    def format(self, record: logging.LogRecord) -> str:
        about = [
            f"{name}={held}"
            for name in ("episode_id", "batch_id")
            if (held := getattr(record, name, None)) not in (None, "") and str(held) not in record.getMessage()
        ]
        first, newline, rest = super().format(record).partition("\n")
        return scrubbed(" ".join([first, *about]) + newline + rest)


class JsonLines(logging.Formatter):
    """A JSON object a line: `time` (Unix seconds), `level`, `logger`, `message`, and `episode_id`, `batch_id`, `event`
    and `traceback` where there are any.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("episode_id", "batch_id", "event"):
            held = getattr(record, name, None)
            if held not in (None, ""):
                line[name] = held
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return scrubbed(json.dumps(line, ensure_ascii=False, default=str))
