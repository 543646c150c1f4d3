"""The APIs that agents may use, one `Dialect` each.

To add a dialect:

1. Add the table of its noted and refused keys to `keys`, and the form of its errors to `error_shapes`.
2. Write its module: request bodies, the functions `translate`, `to_answer` and `to_events`, and the `Dialect`.
   `completions` is the shortest example; `dialect` has the shared parts.
3. Add it here, and its route to `server.inference`.
"""

from __future__ import annotations

from typing import Any

from agentjet.server.dialects.chat import CHAT
from agentjet.server.dialects.completions import COMPLETIONS
from agentjet.server.dialects.dialect import Dialect
from agentjet.server.dialects.error_shapes import OPENAI_ERRORS, ErrorShape
from agentjet.server.dialects.keys import treatment_table
from agentjet.server.dialects.messages import MESSAGES
from agentjet.server.dialects.responses import RESPONSES

__all__ = ["CHAT", "COMPLETIONS", "DIALECTS", "MESSAGES", "RESPONSES", "error_shape", "keys_table"]

DIALECTS: tuple[Dialect[Any], ...] = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)


def keys_table() -> str:
    """Returns every key of every dialect with its treatment, as Markdown. `docs/dialects.md` ends with it."""
    return "\n\n".join(treatment_table(each.path, each.request, each.keys) for each in DIALECTS) + "\n"


def error_shape(path: str) -> ErrorShape:
    """Returns the form of errors on an inference path. A path of no dialect has OpenAI's form."""
    matching = (dialect for dialect in DIALECTS if path == dialect.path or path.startswith(f"{dialect.path}/"))
    return next((dialect.errors for dialect in matching), OPENAI_ERRORS)
