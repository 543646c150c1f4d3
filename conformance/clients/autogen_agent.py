"""An agent on AutoGen: `python autogen_agent.py plain | streaming`."""

import asyncio
import os
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient

QUESTIONS = ("What is 17 + 25? Use the tool.", "Now double it, and add 1 to it, both at once.")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def converse(stream: bool) -> str:
    agent = AssistantAgent(
        "reckoner",
        OpenAIChatCompletionClient(
            model=os.environ["OPENAI_MODEL"],
            model_info={
                "vision": False,
                "function_calling": True,
                "json_output": True,
                "structured_output": True,
                "family": ModelFamily.UNKNOWN,
            },
        ),
        tools=[add, multiply],
        system_message="You reckon.",
        max_tool_iterations=5,
        model_client_stream=stream,
    )
    for question in QUESTIONS:
        result = await agent.run(task=question)
    return result.messages[-1].to_text()


if __name__ == "__main__":
    print(asyncio.run(converse(sys.argv[1] == "streaming")))
