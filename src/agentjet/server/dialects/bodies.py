"""What the request bodies of all dialects have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import from_json, to_json


def _whole(text: str) -> str:
    """Raises `ValueError` for half a surrogate pair, which JSON's escapes can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("half a surrogate pair is no text") from error
    return text


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """Raises `ValueError` for what only Python's parser takes for JSON, and for what other parsers would give up on."""
    from_json(to_json(value), allow_inf_nan=False)
    return value


Text = Annotated[str, AfterValidator(_whole)]
"""Text in whole characters."""
JsonObject = Annotated[dict[str, Any], AfterValidator(_plain)]
"""An object that any JSON parser reads: without NaN and half characters, nested about 200 deep at most."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Stop = Annotated[str, Field(min_length=1)] | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
"""One text or a list of texts, none of them empty, before which the answer ends. Up to 16 of them: OpenAI allows 4."""


class Body(BaseModel):
    """Part of a request: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RequestBody(Body):
    """A request for an answer of the model."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None


class StreamOptions(Body):
    """What a stream carries besides the answer."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None
