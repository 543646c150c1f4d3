"""`Section`: the base of every group of settings and of every recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator


def _check_int64(number: int) -> int:
    if not -(2**63) <= number < 2**63:
        raise ValueError("a whole number has 64 bits at most")
    return number


Int64 = Annotated[int, AfterValidator(_check_int64)]
"""An integer that fits the journal and the messages to the worker."""


class Section(BaseModel):
    """Base of every section: immutable, refuses unknown keys, takes field descriptions from docstrings."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_one(cls, value: object, field: ValidationInfo) -> object:
        assert field.field_name is not None
        if isinstance(value, bool) and cls.model_fields[field.field_name].annotation is not bool:
            raise ValueError("true and false are not values of this setting")
        return value
