"""What two keys together ask that is not honoured, in any dialect: refused by name."""

from __future__ import annotations

from pydantic import BaseModel

from agentjet.errors import InvalidRequest
from agentjet.server.dialects.bodies import RequestBody


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
