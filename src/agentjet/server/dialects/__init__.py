"""How agents' SDKs speak, one module a dialect: bodies to and from `gateway.requests`."""

from __future__ import annotations

from typing import Any

from agentjet.server.dialects import chat, completions, messages, responses
from agentjet.server.dialects.dialect import OPENAI_ERRORS, Dialect, ErrorShape, treatment_table

DIALECTS: tuple[Dialect[Any, Any], ...] = (
    chat.DIALECT,
    completions.DIALECT,
    messages.DIALECT,
    responses.DIALECT,
)


def keys_table() -> str:
    """Markdown: every key of every dialect, with its treatment. The end of `docs/dialects.md`."""
    return "\n\n".join(treatment_table(f"`{dialect.path}`", dialect.keys) for dialect in DIALECTS) + "\n"


def error_shape(path: str) -> ErrorShape:
    """How errors look on an inference path, given without an episode's key; OpenAI's way where nobody else speaks."""
    spoken = (dialect for dialect in DIALECTS if path == dialect.path or path.startswith(f"{dialect.path}/"))
    return next((dialect.errors for dialect in spoken), OPENAI_ERRORS)


__all__ = [
    "DIALECTS",
    "Dialect",
    "ErrorShape",
    "chat",
    "completions",
    "error_shape",
    "keys_table",
    "messages",
    "responses",
]
