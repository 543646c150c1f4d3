"""The APIs that agents may use, one `Dialect` each.

To add a dialect:

1. Write its modules: request bodies with a `RequestKeys` table, and the functions `to_request`, `to_answer` and
   `to_events`. `completions` is the shortest example; `dialect` has the shared parts.
2. Add its `Dialect` here.
3. Add its route to `server.inference`.
"""

from __future__ import annotations

from typing import Any

from agentjet.server.dialects import (
    chat,
    completions,
    messages_answers,
    messages_requests,
    responses_answers,
    responses_bodies,
    responses_requests,
)
from agentjet.server.dialects.dialect import OPENAI_ERRORS, Dialect, ErrorShape, treatment_table

CHAT = Dialect(
    path="/v1/chat/completions",
    request=chat.ChatBody,
    answer=chat.ChatCompletion,
    keys=chat.KEYS,
    errors=OPENAI_ERRORS,
    to_request=lambda body, _: chat.to_request(body),
    to_answer=chat.to_answer,
    to_events=chat.to_events,
)
COMPLETIONS = Dialect(
    path="/v1/completions",
    request=completions.CompletionBody,
    answer=completions.TextCompletion,
    keys=completions.KEYS,
    errors=OPENAI_ERRORS,
    to_request=lambda body, _: completions.to_request(body),
    to_answer=completions.to_answer,
    to_events=completions.to_events,
)
MESSAGES = Dialect(
    path="/v1/messages",
    request=messages_requests.MessagesBody,
    answer=messages_answers.MessageAnswer,
    keys=messages_requests.KEYS,
    errors=messages_answers.ANTHROPIC_ERRORS,
    to_request=lambda body, _: messages_requests.to_request(body),
    to_answer=messages_answers.to_answer,
    to_events=messages_answers.to_events,
)
RESPONSES = Dialect(
    path="/v1/responses",
    request=responses_bodies.ResponsesBody,
    answer=responses_answers.ResponseAnswer,
    keys=responses_bodies.KEYS,
    errors=responses_answers.RESPONSES_ERRORS,
    to_request=responses_requests.to_request,
    to_answer=responses_answers.to_answer,
    to_events=responses_answers.to_events,
)
DIALECTS: tuple[Dialect[Any, Any], ...] = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)


def keys_table() -> str:
    """Returns every key of every dialect with its treatment, as Markdown. `docs/dialects.md` ends with it."""
    return "\n\n".join(treatment_table(f"`{dialect.path}`", dialect.keys) for dialect in DIALECTS) + "\n"


def error_shape(path: str) -> ErrorShape:
    """Returns the form of errors on an inference path. A path of no dialect has OpenAI's form."""
    matching = (dialect for dialect in DIALECTS if path == dialect.path or path.startswith(f"{dialect.path}/"))
    return next((dialect.errors for dialect in matching), OPENAI_ERRORS)
