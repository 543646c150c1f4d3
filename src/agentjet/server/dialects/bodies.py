"""What the request bodies of all dialects have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Finite = Annotated[float, Field(allow_inf_nan=False)]


class Body(BaseModel):
    """Part of a request: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RequestBody(Body):
    """A request for an answer of the model."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None
