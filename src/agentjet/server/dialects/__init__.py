"""The APIs that agents may use, one `Dialect` each.

To add a dialect:

1. Add the table of its keys to `keys`, and the form of its errors to `error_shapes`.
2. Write its module: request bodies, and the functions `to_request`, `to_answer` and `to_events`. `completions` is the
   shortest example; `dialect` has the shared parts.
3. Add its `Dialect` here.
4. Add its route to `server.inference`.
"""

from __future__ import annotations

from typing import Any

from agentjet.server.dialects import chat, completions, keys, messages, responses
from agentjet.server.dialects.dialect import Dialect
from agentjet.server.dialects.error_shapes import ANTHROPIC_ERRORS, OPENAI_ERRORS, RESPONSES_ERRORS, ErrorShape

CHAT = Dialect(
    path="/v1/chat/completions",
    request=chat.ChatBody,
    keys=keys.CHAT_KEYS,
    errors=OPENAI_ERRORS,
    to_request=lambda body, _: chat.to_request(body),
    to_answer=chat.to_answer,
    to_events=chat.to_events,
)
COMPLETIONS = Dialect(
    path="/v1/completions",
    request=completions.CompletionBody,
    keys=keys.COMPLETIONS_KEYS,
    errors=OPENAI_ERRORS,
    to_request=lambda body, _: completions.to_request(body),
    to_answer=completions.to_answer,
    to_events=completions.to_events,
)
MESSAGES = Dialect(
    path="/v1/messages",
    request=messages.MessagesBody,
    keys=keys.MESSAGES_KEYS,
    errors=ANTHROPIC_ERRORS,
    to_request=lambda body, _: messages.to_request(body),
    to_answer=messages.to_answer,
    to_events=messages.to_events,
)
RESPONSES = Dialect(
    path="/v1/responses",
    request=responses.ResponsesBody,
    keys=keys.RESPONSES_KEYS,
    errors=RESPONSES_ERRORS,
    to_request=responses.to_request,
    to_answer=responses.to_answer,
    to_events=responses.to_events,
)
DIALECTS: tuple[Dialect[Any], ...] = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)


def keys_table() -> str:
    """Returns every key of every dialect with its treatment, as Markdown. `docs/dialects.md` ends with it."""
    return "\n\n".join(keys.treatment_table(f"`{dialect.path}`", dialect.keys) for dialect in DIALECTS) + "\n"


def error_shape(path: str) -> ErrorShape:
    """Returns the form of errors on an inference path. A path of no dialect has OpenAI's form."""
    matching = (dialect for dialect in DIALECTS if path == dialect.path or path.startswith(f"{dialect.path}/"))
    return next((dialect.errors for dialect in matching), OPENAI_ERRORS)
