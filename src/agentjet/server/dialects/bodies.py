"""What the request bodies of all dialects have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

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
