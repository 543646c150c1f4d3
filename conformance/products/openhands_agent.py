"""The agent of OpenHands' SDK with its terminal and its editor: `python openhands_agent.py PROMPT`."""

import os
import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool

llm = LLM(
    model=f"openai/{os.environ['OPENAI_MODEL']}",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    num_retries=0,
)
terminal = Tool(name=TerminalTool.name, params={"terminal_type": "subprocess"})
agent = Agent(llm=llm, tools=[terminal, Tool(name=FileEditorTool.name)])
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(sys.argv[1])
conversation.run()
