"""An agent on DSPy: `python dspy_agent.py react | native`."""

import os
import sys

import dspy
from dspy.predict.react_v2 import ReActV2

QUESTION = "What is 17 + 25? Use the tool."


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class ToolCaller(dspy.LM):
    """DSPy has a list of the models that take tools, and this one is not in it."""

    supports_function_calling = True


if __name__ == "__main__":
    kind = ToolCaller if sys.argv[1] == "native" else dspy.LM
    dspy.configure(lm=kind(f"openai/{os.environ['OPENAI_MODEL']}", cache=False, num_retries=0))
    if sys.argv[1] == "native":
        dspy.configure(adapter=dspy.ChatAdapter(use_native_function_calling=True))
    agent = (ReActV2 if sys.argv[1] == "native" else dspy.ReAct)("question -> answer", tools=[add])
    print(agent(question=QUESTION).answer)
