"""Overlays of `agentjet episodes show --overlay`: colours and marks of an episode's tokens.

Colours are of 256: a sequence like cividis for probabilities, purple and orange for the signs of advantages. Marks in
the text mean the same without colours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

from agentjet.cli import printable

if TYPE_CHECKING:
    from rich.text import Text

    from agentjet.protocol import CallView, EpisodeTree, GroupView

Overlay = Literal["author", "logprob", "version", "advantage"]
PROBABILITIES = (
    (0.01, "color(226) underline"),
    (0.1, "color(220) underline"),
    (0.3, "color(178)"),
    (0.5, "color(144)"),
    (0.7, "color(103)"),
    (0.9, "color(67)"),
    (1.01, "color(25)"),
)
"""Upper bounds of probabilities, with their styles. Unlikely tokens are the brightest."""
MARKED = 0.1
"""Probability below which a token has a mark."""
VERSIONS = ("color(32)", "color(172)", "color(71)", "color(169)")
"""Styles of successive policy versions, in turn."""
POSITIVE, NEGATIVE, NEUTRAL = "color(208)", "color(141)", ""
CONTEXT, UNTRAINED = "dim", "strike dim"
BY_AGENT, BY_POLICY, ORPHAN = "cyan", "bold green", "strike red"
"""Styles of the overlay `author`."""
BAR = 3.0
"""Advantage of a full bar."""
BAR_CELLS = 12

LEGENDS: Mapping[Overlay, str] = {
    "logprob": f"probability of each sampled token: bright is unlikely; ⟨%⟩ follows a token below {MARKED:.0%}",
    "version": "policy version of each sampled token: ⟨v⟩ stands where it changes",
    "advantage": "advantage of each call: orange is above 0, purple below; context is dim",
}


@dataclass(frozen=True)
class EpisodeAdvantages:
    """The advantages of an episode, as far as its group has them."""

    of_episode: float | None = None
    by_role: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    """Why they are unknown."""

    @classmethod
    def of(cls, tree: EpisodeTree, group: GroupView | None) -> Self:
        """`group` is that of the episode; None for an episode without a group."""
        if group is None:
            return cls(note="an episode of an evaluation has no advantage")
        found = next((member for member in group.episodes if member.episode_id == tree.episode_id), None)
        if found is None:
            return cls(note=group.advantages_note)
        return cls(found.advantage, found.advantages, group.advantages_note)

    def of_call(self, call: CallView) -> float | None:
        """The advantage of a call: that of its role, of the role's policy, or of the episode."""
        for name in (call.role, call.role.partition("/")[0]):
            if name in self.by_role:
                return self.by_role[name]
        return self.of_episode

    def heading(self, call: CallView) -> str:
        """The advantage of a call with a bar, or why it is unknown."""
        advantage = self.of_call(call)
        return advantage_bar(advantage) + (f": {self.note}" if advantage is None and self.note else "")


def overlaid(call: CallView, overlay: Overlay, advantage: float | None = None) -> Text:
    """The tokens of a call, in the colours of an overlay. `advantage` is that of the call, if it is known."""
    from rich.text import Text

    body, known = Text(), -1
    context, orphan = (BY_AGENT, ORPHAN) if overlay == "author" else (CONTEXT, UNTRAINED)
    texts = call.texts or [f"<{token}>" for token in call.tokens]
    for text, version, logprob in zip(texts, call.versions, call.logprobs, strict=True):
        if version is None:
            body.append(printable(text), context)
            continue
        style = orphan if call.orphan else ""
        if overlay == "version":
            if version != known:
                body.append(f"⟨v{version}⟩", "bold")
                known = version
            style = style or VERSIONS[version % len(VERSIONS)]
        elif overlay == "advantage":
            style = style or sign_style(advantage)
        elif overlay == "author":
            style = style or BY_POLICY
        elif logprob is not None:
            style = probability_style(math.exp(min(0.0, logprob)))
        body.append(printable(text), style)
        if overlay == "logprob" and logprob is not None and (share := math.exp(min(0.0, logprob))) < MARKED:
            body.append(f"⟨{share:.1%}⟩" if share < 0.01 else f"⟨{share:.0%}⟩", "dim")
    return body


def probability_style(probability: float) -> str:
    return next(style for bound, style in PROBABILITIES if probability < bound)


def sign_style(advantage: float | None) -> str:
    if not advantage:
        return NEUTRAL
    return POSITIVE if advantage > 0 else NEGATIVE


def advantage_bar(advantage: float | None) -> str:
    """The advantage with a bar, such as `advantage +1.23 ▇▇▇▇▇`."""
    if advantage is None:
        return "advantage unknown"
    cells = min(BAR_CELLS, round(BAR_CELLS * abs(advantage) / BAR))
    return f"advantage {advantage:+.3g} {('▇' if advantage > 0 else '░') * cells}".rstrip()
