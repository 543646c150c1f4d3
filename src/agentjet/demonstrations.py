"""Bodies of the request that trains on demonstrations.

A demonstration is a conversation with given answers. The policy learns these answers by supervised fine-tuning (SFT).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from agentjet.protocol import Finite, Int64, Request, Response
from agentjet.types import MAX_NAME

MAX_DEMONSTRATIONS = 4096


class DemonstrationBody(Request):
    """A conversation in OpenAI's chat format. Every assistant message is learned, except those with `"weight": 0`."""

    task_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    """Name of the demonstration in errors and in the list of episodes, such as `answers.jsonl:12`."""
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] = Field([])
    """The tools on offer. They are part of the prompt."""


class SftRequest(Request):
    """Train a policy on demonstrations: one batch, one policy version. 429 with `Retry-After` while another batch is
    being learned."""

    demonstrations: Annotated[list[DemonstrationBody], Field(min_length=1, max_length=MAX_DEMONSTRATIONS)]
    policy: Annotated[str, Field(max_length=64)] = ""
    """The policy, if the run has several."""
    lr: Annotated[Finite, Field(gt=0)] | None = None
    """Constant learning rate of this batch. null: that of the job."""
    check_only: bool = False
    """Check the demonstrations and count their tokens. Nothing is learned."""
    client_id: Annotated[str, Field(min_length=1, max_length=128)] = "anonymous"


class SftResponse(Response):
    """The batch that the demonstrations became, which is on disk."""

    batch: Int64 | None
    """Its id. The policy version after it is one higher. null with `check_only`."""
    last_event: Int64 | None
    """Number of the newest event when it was committed: later ones tell what becomes of it. null with `check_only`."""
    num_answers: int
    """Assistant messages that are learned."""
    num_tokens: int
    """Tokens of these answers, with their end tokens."""
