"""An agent on AgentScope: `python agentscope_agent.py plain | streaming`."""

import asyncio
import os
import sys

from agentscope.agent import Agent, InjectionConfig
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit

QUESTIONS = ("What is 17 + 25? Use the tool.", "Now double it, and add 1 to it, both at once.")
ALLOWED = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(int(a + b))


def multiply(a: int, b: int) -> str:
    """Multiply two numbers."""
    return str(int(a * b))


async def converse(stream: bool) -> str:
    agent = Agent(
        name="reckoner",
        system_prompt="You reckon.",
        model=OpenAIChatModel(
            OpenAICredential(api_key=os.environ["OPENAI_API_KEY"], base_url=os.environ["OPENAI_BASE_URL"]),
            os.environ["OPENAI_MODEL"],
            stream=stream,
        ),
        toolkit=Toolkit(tools=[FunctionTool(tool, permission=ALLOWED) for tool in (add, multiply)]),
        injection_config=InjectionConfig(inject_runtime_state=False),
    )
    for question in QUESTIONS:
        answer = await agent.reply(UserMsg("user", question))
    return answer.get_text_content()


if __name__ == "__main__":
    print(asyncio.run(converse(sys.argv[1] == "streaming")))
