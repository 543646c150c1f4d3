"""What dialects ask of an answer's form, in common: how a forced tool choice and a response format become a
`Constraint`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentjet.errors import InvalidRequest
from agentjet.types import Constraint

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of JSON mode."""


def checked(constraint: Constraint, offered: Sequence[str], param: str = "tool_choice") -> Constraint:
    """The constraint, if the functions on offer allow it; `param` is what the dialect calls the choice."""
    if constraint.calls == "required" and not offered:
        raise InvalidRequest(f"{param} asks for a tool call, and the request offers no tools.", param=param)
    if constraint.function and constraint.function not in offered:
        raise InvalidRequest(
            f"{param} names the function {constraint.function!r}; offered are {', '.join(offered)}.", param=param
        )
    return constraint
