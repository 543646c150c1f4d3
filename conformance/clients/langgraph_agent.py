"""An agent on LangGraph with `langchain-openai`: `python langgraph_agent.py chat | streaming | responses`."""

import os
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

QUESTIONS = ("What is 17 + 25? Use the tool.", "Now double it, and add 1 to it, both at once.")


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


model = ChatOpenAI(
    model=os.environ["OPENAI_MODEL"],
    streaming=sys.argv[1] == "streaming",
    use_responses_api=sys.argv[1] == "responses",
).bind_tools([add, multiply])


def think(state: MessagesState) -> dict[str, list[object]]:
    return {"messages": [model.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("think", think)
graph.add_node("tools", ToolNode([add, multiply]))
graph.add_edge(START, "think")
graph.add_conditional_edges("think", tools_condition)
graph.add_edge("tools", "think")
agent = graph.compile(checkpointer=InMemorySaver())

if __name__ == "__main__":
    for question in QUESTIONS:
        state = agent.invoke(
            {"messages": [{"role": "user", "content": question}]}, {"configurable": {"thread_id": "one"}}
        )
    print(state["messages"][-1].text)
