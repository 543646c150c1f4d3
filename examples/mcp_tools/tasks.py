"""Writes the questions of the example as JSON lines. Items that are held out are in no question to train on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from examples.mcp_tools import server
from examples.mcp_tools.server import COLOURS, THINGS, number

SPLIT_SEED = 1234
NUM_TRAINING, NUM_HELD_OUT = 800, 100
QUESTIONS = {
    "price": ("What is the price of the {item}?", "How many dollars is the {item}?", "What does the {item} cost?"),
    "stock": ("How many of the {item} are in stock?", "How many pieces of the {item} are there?"),
}


def example(column: str, item: str, question: str, answer: str) -> list[dict[str, Any]]:
    """A question, answered with a tool."""
    function = {"name": column, "arguments": json.dumps({"item": item})}
    call = {"id": f"call_{column}", "type": "function", "function": function}
    return [
        {"role": "user", "content": question.format(item=item)},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": getattr(server, column)(item)},
        {"role": "assistant", "content": answer.format(number=number(column, item))},
    ]


EXAMPLES = [
    *example("price", "tan apron", QUESTIONS["price"][2], "It costs {number} dollars."),
    *example("stock", "red kite", QUESTIONS["stock"][0], "There are {number} pieces."),
]
"""Every conversation opens with these. Without them no answer is right, and there is nothing to reward."""
SHOWN = {"tan apron", "red kite"}


def write(path: Path) -> Path:
    """Writes one question about each item, and returns the path."""
    chooser = random.Random(SPLIT_SEED)
    names = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
    items = chooser.sample([name for name in names if name not in SHOWN], NUM_TRAINING + NUM_HELD_OUT)
    rows = []
    for place, item in enumerate(items):
        column = chooser.choice([*QUESTIONS])
        question = chooser.choice(QUESTIONS[column]).format(item=item)
        split = "held_out" if place < NUM_HELD_OUT else "train"
        right = number(column, item)
        rows.append({"id": item, "messages": EXAMPLES, "question": question, "answer": right, "split": split})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
