"""What is known but not honoured, in any dialect: refused by name, unless it asks for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from agentjet.errors import InvalidRequest
from agentjet.server.dialects.bodies import RequestBody

Neutral = Mapping[str, tuple[Any, ...]]
"""The values of a key that ask for nothing; null always does. Any other value is refused."""


def refuse_unless_neutral(body: BaseModel, neutral: Neutral) -> None:
    """Raises `InvalidRequest` naming the first key of `neutral` that asks for something, and the way out. Keys that the
    body has not are passed over.
    """
    for name, values in neutral.items():
        refuse_value(getattr(body, name, None), values, name)


def refuse_value(value: Any, neutral: tuple[Any, ...], where: str) -> None:
    """The same for one value, which stands at `where`."""
    if value is None or value in neutral:
        return
    either = " or ".join(map(_shown, neutral))
    way_out = f"leave it out or use {either}" if neutral else "leave it out"
    raise InvalidRequest(
        f"{where} = {_shown(value)} is not supported: {way_out}.", code="unsupported_parameter", param=where
    )


def refuse_other_tokens(num_likeliest: int | None, where: str) -> None:
    """Raises `InvalidRequest` for log-probabilities of tokens that were not sampled."""
    if num_likeliest:
        raise InvalidRequest(
            f"{where} = {num_likeliest} is not supported: the sampler reports the log-probability of the token that it "
            "sampled, not those of others. Leave it out or use 0.",
            code="unsupported_parameter",
            param=where,
        )


def refuse_idle_stream_options(body: RequestBody, options: BaseModel | None) -> None:
    """Raises `InvalidRequest` for options of a stream that is not asked for."""
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options need stream = true.", param="stream_options")


def _shown(value: Any) -> str:
    shown = repr(value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
