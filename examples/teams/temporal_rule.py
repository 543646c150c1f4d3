"""A rule in linear temporal logic says which kind of segment may come next. Other segments are refused, and cost.

    f after the segment s, written f':  p' = (p is s),  (X f)' = f,  (F f)' = f' or F f,  (G f)' = f' and G f,
    (f U g)' = g' or (f' and f U g).  A kind may come next if the rule after it is not false.

Source: agents specified by linear temporal logic; formula progression as in Bacchus and Kabanza 1998. The agent and its
costs are ours. Confidence: inspired by. A refused segment is sampled and trained like the others, so no probability
changes. Progression does not prove: some rules that cannot hold any more are not false yet.
"""

from __future__ import annotations

from typing import Any

from agentjet.client import Episode
from agentjet.types import Reward, Task
from examples.teams.asking import ask, question, score

POLICIES = ()
RECIPE = "grpo"
KINDS = ("think", "act", "obs", "fin")
CALLS, COST = 4, 0.1
Formula = Any
"""True, False, a kind, or an operator of `not and or X F G U` with its formulas."""
RULE: Formula = (
    "and",
    ("G", ("or", ("not", "act"), ("X", "obs"))),  # An observation follows each action.
    ("and", ("U", ("not", "act"), "think"), ("F", "fin")),  # No action before a thought; the end comes.
)


def after(formula: Formula, kind: str) -> Formula:
    """Returns what must hold for the segments that follow one of this kind."""
    match formula:
        case bool():
            return formula
        case str():
            return formula == kind
        case ("not", f):
            return _not(after(f, kind))
        case ("and" | "or" as both, f, g):
            return _join(both, after(f, kind), after(g, kind))
        case ("X", f):
            return f
        case ("F", f):
            return _join("or", after(f, kind), formula)
        case ("G", f):
            return _join("and", after(f, kind), formula)
        case ("U", f, g):
            return _join("or", after(g, kind), _join("and", after(f, kind), formula))
    raise ValueError(
        f"{formula!r} is not a formula: give a kind, or a tuple of not, and, or, X, F, G or U and its formulas"
    )


def holds_at_the_end(formula: Formula) -> bool:
    """Returns whether the formula holds for no further segment."""
    match formula:
        case ("not", f):
            return not holds_at_the_end(f)
        case ("and", f, g):
            return holds_at_the_end(f) and holds_at_the_end(g)
        case ("or", f, g):
            return holds_at_the_end(f) or holds_at_the_end(g)
    return formula is True or (isinstance(formula, tuple) and formula[0] == "G")


def allowed(rule: Formula) -> list[str]:
    """Returns the kinds that may come next. Raises `ValueError` if there is none."""
    kinds = [kind for kind in KINDS if after(rule, kind) is not False]
    if not kinds:
        raise ValueError(f"no kind of segment satisfies {rule!r}: change the rule")
    return kinds


def play(task: Task, episode: Episode) -> Reward:
    rule, segments, refused, text = RULE, list[str](), 0, ""
    while len(segments) + refused < CALLS and segments[-1:] != ["fin"]:
        kinds = allowed(rule)
        so_far = " ".join(segments) or "nothing"
        text = ask(episode, episode.model, f"{question(task)} So far: {so_far}. Begin with {' or '.join(kinds)}.").text
        kind = next((kind for kind in kinds if text.lower().startswith(kind)), "")
        if kind:
            rule = after(rule, kind)
            segments.append(kind)
        refused += not kind
    return Reward(score(text, task) - COST * refused, metrics={"refused": refused, "holds": holds_at_the_end(rule)})


def _not(formula: Formula) -> Formula:
    return not formula if isinstance(formula, bool) else ("not", formula)


def _join(both: str, f: Formula, g: Formula) -> Formula:
    """Returns f and g, or f or g, without parts that change nothing."""
    decides = both == "or"  # True decides "or", False decides "and".
    if decides in (f, g):
        return decides
    if isinstance(f, bool) or f == g:
        return g
    return f if isinstance(g, bool) else (both, f, g)
