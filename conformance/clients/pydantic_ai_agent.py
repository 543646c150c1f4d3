"""An agent on Pydantic AI: `python pydantic_ai_agent.py chat | streaming | responses | typed`."""

import asyncio
import os
import sys
from collections.abc import AsyncIterable

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

QUESTIONS = ("What is 17 + 25? Use the tool.", "Now double it, and add 1 to it, both at once.")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class Sum(BaseModel):
    """The answer."""

    total: int
    currency: str


async def converse(model: object, streamed: bool) -> str:
    agent = Agent(model, instructions="You reckon.", tools=[add, multiply])
    history = None
    for question in QUESTIONS:
        done = await agent.run(question, message_history=history, event_stream_handler=read if streamed else None)
        history = done.all_messages()
    return done.output


async def read(_: object, events: AsyncIterable[object]) -> None:
    """Reading the events makes the agent stream its requests."""
    async for _ in events:
        pass


async def typed(model: object) -> str:
    """The answer is a tool call too, and there must be one."""
    agent = Agent(model, instructions="You reckon.", tools=[add], output_type=Sum)
    done = (await agent.run(QUESTIONS[0])).output
    return f"{done.total} {done.currency}"


if __name__ == "__main__":
    kind = OpenAIResponsesModel if sys.argv[1] == "responses" else OpenAIChatModel
    model = kind(os.environ["OPENAI_MODEL"])
    print(asyncio.run(typed(model) if sys.argv[1] == "typed" else converse(model, sys.argv[1] == "streaming")))
