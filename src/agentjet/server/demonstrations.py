"""Demonstrations of a request in canonical form. Their messages have the keys of chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from agentjet.errors import InvalidRequest
from agentjet.gateway.demonstrations import Demonstration
from agentjet.protocol import DemonstrationBody
from agentjet.server.dialects.chat import CHAT, ChatBody


def to_demonstration(body: DemonstrationBody) -> Demonstration:
    """Returns a demonstration. Raises `InvalidRequest` for the first thing that cannot be honoured."""
    weights = [_take_weight(message, f"{body.task_id}: messages.{i}.") for i, message in enumerate(body.messages)]
    asked = {"model": "policy", "messages": [message for message, _ in weights], "tools": body.tools or None}
    try:
        chat = ChatBody.model_validate(asked)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"{body.task_id}: {where}: {first['msg']}.", param=where) from None
    try:
        conversation = CHAT.to_request(chat, lambda _: None).conversation
    except InvalidRequest as error:
        raise InvalidRequest(f"{body.task_id}: {error}", code=error.code, param=error.param) from None
    return Demonstration(body.task_id, conversation, frozenset(i for i, (_, weight) in enumerate(weights) if weight))


def _take_weight(message: Mapping[str, Any], where: str) -> tuple[dict[str, Any], bool]:
    """Returns a message without its `weight`, and True if its answer is learned."""
    rest = dict(message)
    weight = rest.pop("weight", 1)
    if weight not in (0, 1):
        raise InvalidRequest(f"{where}weight = {weight!r}: it is 1 to learn the answer, or 0.", param="weight")
    return rest, rest.get("role") == "assistant" and bool(weight)
