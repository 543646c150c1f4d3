"""Agent-R's revision: a bad beginning, a thought that revises it, and the good rest, as a conversation for SFT.

The bad steps are context, and the revision and the good steps are learned. So the model learns to notice its own first
bad step. `agentjet sft` trains the conversations; repeat with episodes of the new policy.

Source: github.com/bytedance/Agent-R at dd8bd1e, without its tree search. Confidence: after it in the splice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

REVISION = "My last step was a mistake. I have to think again and take another way."


@dataclass(frozen=True)
class Step:
    """A step of an episode: an observation and the action that followed."""

    observation: str
    action: str


@dataclass(frozen=True)
class Spliced:
    """The steps of a training conversation, and which of their actions are learned."""

    steps: tuple[Step, ...]
    learned: tuple[bool, ...]


def splice(good: Sequence[Step], bad: Sequence[Step], is_bad: Callable[[Step], bool]) -> Spliced:
    """Returns the bad path up to its first bad step, the revision, and the good path after their common beginning.

    `is_bad` is the judgement of the current policy. The whole bad path is used if no step is judged bad.
    """
    prefix = bad[: next((number for number, step in enumerate(bad, 1) if is_bad(step)), len(bad))]
    num_common = next((i for i, pair in enumerate(zip(good, prefix, strict=False)) if pair[0] != pair[1]), len(prefix))
    rest = good[num_common:]
    return Spliced((*prefix, Step("", REVISION), *rest), (*[False] * len(prefix), *[True] * (1 + len(rest))))


def messages(spliced: Spliced) -> list[dict[str, object]]:
    """Returns the conversation as a line of `agentjet sft FILE.jsonl` has it: bad steps have weight 0."""
    found: list[dict[str, object]] = []
    for step, is_learned in zip(spliced.steps, spliced.learned, strict=True):
        found.append({"role": "user", "content": step.observation or "ok."})
        found.append({"role": "assistant", "content": step.action, **({} if is_learned else {"weight": 0})})
    return found


def is_pair(good: float, bad: float, least_gap: float = 0.2, least_good: float = 0.5) -> bool:
    """True if the value of the good path is high enough, and far enough above that of the bad one."""
    return good - bad > least_gap and good > least_good
