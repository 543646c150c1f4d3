"""A request to Anthropic's Messages API, and how to send it with Anthropic's SDK."""

from __future__ import annotations

from typing import Any

import anthropic

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: list[Any] = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]


async def ask(client: anthropic.AsyncAnthropic, *, stream: bool = False, **body: Any) -> anthropic.types.Message:
    """One message, plain or put together from its events by the SDK."""
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 300, "messages": HELLO, **body}
    if not stream:
        answer: anthropic.types.Message = await client.messages.create(**asked)
        return answer
    async with client.messages.stream(**asked) as events:
        return await events.get_final_message()
