"""An agent on OpenAI's Agents SDK: `python openai_agents.py responses | chat | streaming | handoff`."""

import asyncio
import os
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, SQLiteSession, function_tool
from openai import AsyncOpenAI

QUESTIONS = ("What is 17 + 25? Use the tool.", "Now double it, and add 1 to it, both at once.")


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def converse(model: object, streamed: bool) -> str:
    agent = Agent(name="reckoner", instructions="You reckon.", tools=[add, multiply], model=model)
    session = SQLiteSession("conversation")
    for question in QUESTIONS:
        if streamed:
            result = Runner.run_streamed(agent, question, session=session)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, question, session=session)
    return str(result.final_output)


async def handoff(model: object) -> str:
    """A second agent, with other instructions and tools, takes over in the middle."""
    reckoner = Agent(name="reckoner", instructions="You reckon.", tools=[add], model=model)
    desk = Agent(name="desk", instructions="You pass questions on.", handoffs=[reckoner], model=model)
    return str((await Runner.run(desk, QUESTIONS[0])).final_output)


if __name__ == "__main__":
    kind = OpenAIResponsesModel if sys.argv[1].startswith("responses") else OpenAIChatCompletionsModel
    model = kind(model=os.environ["OPENAI_MODEL"], openai_client=AsyncOpenAI())
    work = handoff(model) if sys.argv[1] == "handoff" else converse(model, sys.argv[1].endswith("streaming"))
    print(asyncio.run(work))
