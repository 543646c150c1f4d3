"""An agent on smolagents: `python smolagents_agent.py tools | code`."""

import os
import sys

from smolagents import CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool

QUESTIONS = ("What is 17 + 25? Use the tool.", "Now double it.")


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


if __name__ == "__main__":
    model = OpenAIModel(
        os.environ["OPENAI_MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    kind = {"tools": ToolCallingAgent, "code": CodeAgent}[sys.argv[1]]
    agent = kind(tools=[add, multiply], model=model, verbosity_level=LogLevel.OFF, max_steps=4)
    for number, question in enumerate(QUESTIONS):
        answer = agent.run(question, reset=number == 0)
    print(answer)
