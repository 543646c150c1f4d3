"""The policy's turns in an exercise, and the expected content of its prompts.

The policy has SmolLM2's template, or Qwen3's where it thinks, with a tiny tokenizer; both write tool calls in Hermes
form. An agent that sends its history back faithfully adds exactly `asked(...)` or `told(...)` to the policy's tokens.
One that rewrites it begins a timeline, for a reason that the exercise names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentjet.types import Fork

OPENING = "<|im_start|>assistant\n"
WORK = "/WORK"
"""In prompts and turns: the working directory of a product, which is new in every run."""


@dataclass(frozen=True)
class Turn:
    """One call. `fork` is how it must be counted: a call that continues a timeline has none, and nor has the first."""

    says: str
    """The completion's text, as sampled, without the token that ends it."""
    adds: str | None = None
    """Exactly the text that the prompt adds to the calls before. None if the client writes it in its own words."""
    sees: tuple[str, ...] = ()
    """Texts that the prompt must contain, in this order."""
    fork: Fork = ""
    stopped: bool = False
    """`says` ends with a stop string of the client's, so the token that ends a turn is never sampled."""
    asked_by: str = ""
    """Words of the prompt that a side call is recognised by (a title, a summary); empty in the conversation itself."""

    is_trained: bool = True
    """False for a side call that a rule of the job leaves out of training."""

    def within(self, work: str) -> Turn:
        """The turn with the folder `work` for `WORK`."""
        says, adds, sees = (
            self.says.replace(WORK, work),
            self.adds and self.adds.replace(WORK, work),
            tuple(words.replace(WORK, work) for words in self.sees),
        )
        return replace(self, says=says, adds=adds, sees=sees)


def calling(*calls: tuple[str, str], content: str = "") -> str:
    """The text of an answer that calls tools: names, and arguments as JSON text."""
    blocks = [f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in calls]
    return "\n".join([content, *blocks] if content else blocks)


def asked(question: str) -> str:
    """The text that a user's message adds to a conversation."""
    return f"\n<|im_start|>user\n{question}<|im_end|>\n{OPENING}"


def told(*results: str) -> str:
    """The text that the results of tool calls add to a conversation."""
    blocks = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in results)
    return f"\n<|im_start|>user{blocks}<|im_end|>\n{OPENING}"


FIRST = "What is 17 + 25? Use the tool."
SECOND = "Now double it, and add 1 to it, both at once."
ADD = ("add", '{"a":17,  "b": 25}')
"""Spaced differently from every library, so that a client which rewrites the JSON changes it."""
BOTH = (("multiply", '{"a": 42, "b":2}'), ("add", '{"b":1,"a":42.0}'))
ANSWERS = ("17 + 25 = 42 €.", "84 and 43.")

TWO_QUESTIONS = (
    Turn(calling(ADD), sees=("<tools>", '"add"', "<|im_start|>user\n", FIRST)),
    Turn(ANSWERS[0], adds=told("42")),
    Turn(calling(*BOTH, content="Both."), adds=asked(SECOND)),
    Turn(ANSWERS[1], adds=told("84", "43")),
)
"""The conversation of every client that has tools and keeps its history: four calls, one timeline."""
STRICT_ADD = ("add", '{"a":17, "b": 25}')
STRICT_BOTH = (("multiply", '{"a": 42, "b":2}'), ("add", '{"a":42, "b":1}'))
"""Keys in the schema's order, whole numbers, one space at most: what the grammar of a JSON schema allows."""
STRICT_TWO_QUESTIONS = (
    replace(TWO_QUESTIONS[0], says=calling(STRICT_ADD)),
    TWO_QUESTIONS[1],
    replace(TWO_QUESTIONS[2], says=calling(*STRICT_BOTH, content="Both.")),
    TWO_QUESTIONS[3],
)


def thinking(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The same from a policy that thinks before it speaks."""
    return tuple(
        replace(turn, says=f"<think>\nMy thought {i}.\n</think>\n\n{turn.says}") for i, turn in enumerate(turns)
    )


THINKING = thinking(TWO_QUESTIONS)
_ASKED_AGAIN = Turn(THINKING[2].says, sees=(ANSWERS[0], SECOND), fork="template")
FORGETTING = (*THINKING[:2], _ASKED_AGAIN, THINKING[3])
"""Qwen3's template strips what was thought before the last question: the timeline forks there, and there only."""
