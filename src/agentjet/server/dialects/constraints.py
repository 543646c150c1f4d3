"""The functions on offer, and what dialects ask of an answer's form: what all of them have in common on the way to a
conversation's tools and to a `Constraint`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentjet.errors import InvalidRequest
from agentjet.types import Constraint

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of JSON mode."""


def function_tool(name: str | None, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A tool as chat templates read it; the keys that a request left out are left out."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def named_function(choice: Mapping[str, Any], named: object, form: str) -> str:
    """The function that a tool choice asks for; `named` is the part of it with the name, `form` how the dialect writes
    such a choice.
    """
    name = named.get("name") if choice.get("type") == "function" and isinstance(named, dict) else None
    if not isinstance(name, str) or not name:
        raise InvalidRequest(
            f"tool_choice = {choice!r} is not supported: use 'auto', 'none', 'required' or {form}.",
            code="unsupported_parameter",
            param="tool_choice",
        )
    return name


def checked(constraint: Constraint, offered: Sequence[str], param: str = "tool_choice") -> Constraint:
    """The constraint, if the functions on offer allow it; `param` is what the dialect calls the choice."""
    if constraint.calls == "required" and not offered:
        raise InvalidRequest(f"{param} asks for a tool call, and the request offers no tools.", param=param)
    if constraint.function and constraint.function not in offered:
        raise InvalidRequest(
            f"{param} names the function {constraint.function!r}; offered are {', '.join(offered)}.", param=param
        )
    return constraint
