"""Checks of interventions before anything is made of them. Each raises `Refused` with the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from agentjet.research.campaign.models import Intervention
from agentjet.research.journal import Entry
from agentjet.research.models import Refused
from agentjet.research.records import Value

FIXED = ("job.seed", "job.max_steps", "job.keep_best")
"""Settings of the campaign itself."""
NUMBER = re.compile(r"(?<![\w.])([-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?)\s*(%?)")
CLOSE = 0.02
"""Relative difference within which a cited number counts as that of the evidence."""
TRIVIAL = 3
"""Whole numbers up to this are words, such as "one of two"."""
LONGEST_TEXT = 2_000
"""Maximum characters that are stored of a request."""
LENGTH = ("job.batch_size", "job.group_size")
OFFLINE = (
    "Without a language model the topic is only the title. The campaign asks: what keeps this subject's score from "
    "rising, and which change of its settings, agent, prompt, reward or tasks raises it?"
)


def check_settings(made: Intervention, settings: Mapping[str, Value]) -> None:
    """`settings` are those in effect on the base."""
    for name, value in made.changes.items():
        if not name.startswith("job.") or name in FIXED:
            raise Refused(f"{name} = {value!r}: it is not the proposer's to change; give settings of the job")
    before, after = ({**settings, **changes} for changes in ({}, made.changes))
    if any(name in made.changes for name in LENGTH):
        has, wanted = (episodes(each) for each in (before, after))
        if wanted is None or wanted != has:
            raise Refused(
                f"job.batch_size x job.group_size: the base has {has} episodes a step, and arms are compared at equal "
                "episodes; change both settings"
            )


def episodes(settings: Mapping[str, Value]) -> int | None:
    """Training episodes of a batch; None without both sizes."""
    batch, group = (settings.get(name) for name in LENGTH)
    return batch * group if isinstance(batch, int) and isinstance(group, int) else None


def check_evidence(made: Intervention, entries: list[Entry]) -> None:
    """Every number in `why` must be one of the cited entries."""
    by_number = {entry.number: entry for entry in entries}
    if missing := [number for number in made.evidence if number not in by_number]:
        raise Refused(f"evidence = {missing}: the notebook has no such entries; cite numbers of entries")
    cited = numbers_in(" ".join(json.dumps(by_number[number].content) for number in made.evidence))
    for number in numbers_in(made.why):
        whole = number.is_integer() and abs(number) <= TRIVIAL
        if not whole and not any(close(number, known) for known in cited):
            raise Refused(f"why: {number:g} stands in none of the cited entries; cite the entry that has it")


def as_text(content: object, limit: int = LONGEST_TEXT) -> str:
    """Text of a request for the notebook: valid Unicode of limited length."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return text[:limit].encode("utf-8", "replace").decode()


def numbers_in(text: str) -> list[float]:
    return [float(digits.replace(",", "")) / (100 if percent else 1) for digits, percent in NUMBER.findall(text)]


def close(number: float, known: float) -> bool:
    return abs(number - known) <= CLOSE * max(abs(known), abs(number)) + 1e-12
