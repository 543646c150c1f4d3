"""The APIs that agents may use, one `Dialect` each.

To add a dialect, write its module: the table of its noted and refused keys, the bodies of requests, `translate`, the
`Encoder`, the form of its errors, and the `Dialect`. `COMPLETIONS` is the shortest example; `dialect` has the shared
parts. Then add it to `DIALECTS`: `front.inference` makes its route.
"""

from __future__ import annotations

from typing import Any

from agentjet.front.dialects.completions import CHAT, COMPLETIONS
from agentjet.front.dialects.dialect import OPENAI_ERRORS, Dialect, ErrorShape
from agentjet.front.dialects.generate import GENERATE
from agentjet.front.dialects.messages import MESSAGES
from agentjet.front.dialects.responses import RESPONSES

__all__ = ["CHAT", "COMPLETIONS", "DIALECTS", "GENERATE", "MESSAGES", "RESPONSES", "error_shape", "keys_table"]

DIALECTS: tuple[Dialect[Any], ...] = (CHAT, COMPLETIONS, MESSAGES, RESPONSES, GENERATE)


def keys_table() -> str:
    """Returns every key of every dialect with its treatment, as Markdown. `docs/dialects.md` ends with it."""
    return "\n\n".join(dialect.keys_table() for dialect in DIALECTS) + "\n"


def error_shape(path: str) -> ErrorShape:
    """Returns the form of errors on an inference path. A path of no dialect has OpenAI's form."""
    matching = (dialect for dialect in DIALECTS if path == dialect.path or path.startswith(f"{dialect.path}/"))
    return next((dialect.errors for dialect in matching), OPENAI_ERRORS)
