"""From the words of a topic to a kind of question and the settings it is about. What was not understood is said.

Word matching, longest phrase first, over the packaged priors: no language model, and no guess either.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentjet.errors import ConfigError
from agentjet.research.planner.priors import priors
from agentjet.research.planner.reading import KIND_WORDS, Kind, Mention, Question, phrases, read

MEANINGS: dict[Kind, str] = {
    "sweep": "does tuning gain anything over the present value?",
    "ablation": "what is lost when a part is taken away?",
    "a_against_b": "which of these scores higher?",
    "reward_shaping": "does another reward in training raise the score that counts?",
    "scaling": "what does more of it bring, step by step?",
    "diagnosis": "which remedy helps a training that goes wrong?",
}
QUESTIONS = re.compile(
    r"[?;!\n]+|(?:\.|,?\s+and)\s+(?=(?:does|do|is|are|should|which|how|why|what|can|will)\s)", re.IGNORECASE
)
"""Where one question ends and another may begin."""


@dataclass(frozen=True)
class Understood:
    kind: Kind
    mentions: tuple[Mention, ...]
    ignored: tuple[str, ...]
    """Words that mean nothing to the planner."""
    rivals: bool = False
    """Different settings are held against each other ("a or b"), not named beside each other ("a and b")."""

    @property
    def asked(self) -> list[Mention]:
        return [mention for mention in self.mentions if not mention.given]

    @property
    def settings(self) -> list[str]:
        """That are asked about, in the order they are first spoken of."""
        return list(dict.fromkeys(mention.setting for mention in self.asked))


def understand(topic: str) -> Understood:
    """Raises `ConfigError` when the topic names neither a known setting nor a question that needs none, more than one
    question, or a value that its setting cannot have.
    """
    questions = [read(text.strip()) for text in QUESTIONS.split(topic) if text.strip()]
    asking = [question for question in questions if question.asks]
    if not asking:
        raise ConfigError(unknown(topic, [word for question in questions for word in question.ignored]))
    check_one(topic, asking)
    beside = [question for question in questions if not question.asks and question.ignored]
    heard = [question for question in questions if question not in beside]
    mentions = tuple(mention for question in heard for mention in question.mentions)
    check_conditions(topic, mentions)
    said = next((kind for kind in KIND_WORDS if any(kind in question.kinds for question in heard)), None)
    rivals = any(question.rivals for question in heard)
    kind = kind_of(said, [mention for mention in mentions if not mention.given], rivals=rivals)
    for mention in mentions:
        for amount in mention.amounts:
            if amount.value is None or amount.is_multiple:
                continue
            if sentence := priors()[mention.setting].refusal(mention.setting, amount.value):
                raise ConfigError(f"topic {topic!r}: {sentence}")
    if kind == "diagnosis":
        mentions = tuple(replace(mention, given=True) for mention in mentions)
    ignored = [word for question in questions for word in ([question.text] if question in beside else question.ignored)]
    return Understood(kind, mentions, tuple(dict.fromkeys(ignored)), rivals)


def check_one(topic: str, asking: Sequence[Question]) -> None:
    """Raises `ConfigError` for two questions, unless one is about nothing else than the other."""
    first, *others = asking
    for other in others:
        ours, theirs = first.settings, other.settings
        if not ours or not theirs or not (ours <= theirs or theirs <= ours):
            raise ConfigError(
                f"topic {topic!r} asks two questions, {first.text!r} and {other.text!r}: one question a study; plan "
                "the other by itself"
            )


def check_conditions(topic: str, mentions: Sequence[Mention]) -> None:
    """Raises `ConfigError` for a condition that has two values."""
    for setting in dict.fromkeys(mention.setting for mention in mentions if mention.given):
        given = [amount for mention in mentions if mention.setting == setting for amount in mention.amounts]
        values = [f"{amount.value:g}" for amount in given if amount.value is not None]
        if len(set(values)) > 1:
            raise ConfigError(
                f"topic {topic!r} gives {setting} two values, {' and '.join(values)}, beside another comparison: one "
                f"setting is compared at a time; ask for '{setting.rpartition('.')[2]} {' vs '.join(values)}', or give "
                "it one value"
            )


def kind_of(said: Kind | None, asked: Sequence[Mention], *, rivals: bool) -> Kind:
    """Named choices and numbers are compared whatever else is said; without a word for it, the setting decides."""
    goes_wrong = said in ("diagnosis", "reward_shaping")
    if said == "ablation" or (said and goes_wrong and not asked):
        return said
    named = any(mention.choice or len(mention.amounts) > goes_wrong for mention in asked)
    if named or (said == "a_against_b" and rivals):
        return "a_against_b"
    prior = priors()[asked[0].setting]
    if prior.choices or prior.switch:
        return "a_against_b"
    if said in ("sweep", "scaling", "diagnosis", "reward_shaping"):
        return said
    return "a_against_b" if prior.off is not None else "scaling"


def unknown(topic: str, words: list[str]) -> str:
    known = [phrase for phrase, meaning in phrases() if meaning]
    near = list(dict.fromkeys(match for word in words for match in difflib.get_close_matches(word, known, 2, 0.5)))
    nearest = near[:5] or [priors()[name].says[0] for name in list(priors())[:5]]
    return (
        f"topic {topic!r} names no setting that the planner knows; the nearest are {', '.join(map(repr, nearest))}. "
        "Say the topic with one of them, or what is to be compared in a file: --space space.toml"
    )
