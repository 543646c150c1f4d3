"""An agent on DSPy: `python dspy_agent.py react | native`."""

import sys

import dspy
from dspy.predict.react_v2 import ReActV2

QUESTION = "What is 17 + 25? Use the tool."


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


if __name__ == "__main__":
    dspy.configure(lm=dspy.LM("openai/policy", cache=False, num_retries=0, temperature=1.0))
    if sys.argv[1] == "native":
        dspy.configure(adapter=dspy.ChatAdapter(use_native_function_calling=True))
    agent = (dspy.ReAct if sys.argv[1] == "react" else ReActV2)("question -> answer", tools=[add])
    print(agent(question=QUESTION).answer)
