"""Checks of proposals before anything is made of them. All proposers pass them, and each refusal names its reason."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from agentjet.errors import ConfigError
from agentjet.research.campaign.models import Intervention
from agentjet.research.campaign.notebook import Entry
from agentjet.research.models import Refused
from agentjet.research.records import Value

FIXED = ("job.seed", "job.max_steps", "job.keep_best")
"""Settings of the campaign itself."""
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?\s*%?")
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


def checked(proposal: object, entries: list[Entry], settings: Mapping[str, Value]) -> Intervention:
    """Returns the proposal as an intervention. Raises `Refused`.

    `settings` are those in effect on the base.
    """
    if isinstance(proposal, str):
        raise Refused(f"the answer is text, not a proposal: {as_text(proposal, 80)!r}")
    if not isinstance(proposal, Mapping):
        raise Refused("a proposal is an object with the fields of an intervention")
    try:
        made = Intervention.from_json(dict(proposal))
    except (ConfigError, ValueError, RecursionError) as error:
        raise Refused(str(error)) from None
    check_settings(made, settings)
    check_evidence(made, entries)
    return made


def check_settings(made: Intervention, settings: Mapping[str, Value]) -> None:
    for name, value in made.changes.items():
        if not name.startswith("job.") or name in FIXED:
            raise Refused(f"{name} = {value!r}: it is not the proposer's to change; give settings of the job")
    before, after = ({**settings, **changes} for changes in ({}, made.changes))
    if any(name in made.changes for name in LENGTH):
        episodes = [product(each) for each in (before, after)]
        if None in episodes or episodes[1] != episodes[0]:
            raise Refused(
                f"job.batch_size x job.group_size = {episodes[1]} episodes a step, and the base has {episodes[0]}: "
                "arms are compared at equal episodes; change both settings"
            )


def product(settings: Mapping[str, Value]) -> float | None:
    sizes = [settings.get(name) for name in LENGTH]
    if not all(isinstance(size, int | float) for size in sizes):
        return None
    return float(sizes[0]) * float(sizes[1])  # type: ignore[arg-type]  # both are numbers


def check_evidence(made: Intervention, entries: list[Entry]) -> None:
    """Every number in `why` must be one of the cited entries."""
    by_number = {entry.number: entry for entry in entries}
    if missing := [number for number in made.evidence if number not in by_number]:
        raise Refused(f"evidence = {missing}: the notebook has no such entries; cite numbers of entries")
    cited = numbers_in(" ".join(json.dumps(by_number[number].content) for number in made.evidence))
    for number in numbers_in(made.why):
        whole = number == int(number) and abs(number) <= TRIVIAL
        if not whole and not any(close(number, known) for known in cited):
            raise Refused(f"why: {number:g} stands in none of the cited entries; cite the entry that has it")


def as_text(content: object, limit: int = LONGEST_TEXT) -> str:
    """Text of a request for the notebook: valid Unicode of limited length."""
    try:
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
    except RecursionError:
        text = "(nested too deeply)"
    return text[:limit].encode("utf-8", "replace").decode()


def storable(proposal: object) -> object:
    """A proposal as the notebook keeps it: an object, or text."""
    if isinstance(proposal, Mapping):
        try:
            text = as_text(dict(proposal), 10**6)
            return {str(key): value for key, value in proposal.items()} if len(text) < 10**6 else as_text(text)
        except (TypeError, ValueError):
            return as_text(str(proposal))
    return as_text(proposal)


def numbers_in(text: str) -> list[float]:
    found = []
    for match in NUMBER.finditer(text):
        digits = match.group().replace(",", "").strip()
        try:
            found.append(float(digits.rstrip("% ")) / (100 if digits.endswith("%") else 1))
        except ValueError:
            continue
    return found


def close(number: float, known: float) -> bool:
    return abs(number - known) <= CLOSE * max(abs(known), abs(number)) + 1e-12


def check_title(topic: str) -> None:
    """Raises `ConfigError` for a topic in another script, which only a language model reads."""
    letters = [character for character in topic if character.isalpha()]
    if 2 * sum(map(str.isascii, letters)) < len(letters):
        raise ConfigError(f"topic = {topic!r}: {OFFLINE} Give an English title, or a language model (--llm)")
