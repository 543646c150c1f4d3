"""Writes the questions of the example as JSON lines. Items that are held out are in no question to train on."""

from __future__ import annotations

import json
import random
from pathlib import Path

from examples.mcp_tools.server import COLOURS, THINGS, number

SPLIT_SEED = 1234
NUM_TRAINING, NUM_HELD_OUT = 800, 200
QUESTIONS = {
    "price": ("What is the price of the {item}?", "How many dollars is the {item}?", "What does the {item} cost?"),
    "stock": ("How many of the {item} are in stock?", "How many pieces of the {item} are there?"),
}


def write(path: Path) -> Path:
    """Writes one question about each of 1000 items, and returns the path."""
    chooser = random.Random(SPLIT_SEED)
    items = chooser.sample([f"{colour} {thing}" for colour in COLOURS for thing in THINGS], NUM_TRAINING + NUM_HELD_OUT)
    rows = []
    for place, item in enumerate(items):
        column = chooser.choice([*QUESTIONS])
        question = chooser.choice(QUESTIONS[column]).format(item=item)
        split = "held_out" if place < NUM_HELD_OUT else "train"
        rows.append({"id": item, "question": question, "answer": number(column, item), "split": split})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
