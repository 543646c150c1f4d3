"""One exception tree. What reaches a user names the key, the value and the way out.

    AgentJetError
    ├── ConfigError          a setting is unknown, malformed or impossible; the process must not start
    ├── RequestError         a request cannot be honoured; `status` and `code` are stable, clients match on `code`
    │   ├── InvalidRequest   400 or 422   malformed, or asks for what cannot be done
    │   │   └── ContextOverflow           the prompt leaves no room for an answer; each dialect has its own words
    │   ├── Unauthorized     401          no key, a wrong one, an expired one
    │   ├── Forbidden        403          a valid key for something else
    │   ├── NotFound         404
    │   ├── Conflict         409          the state does not allow it
    │   ├── TooLarge         413
    │   └── Later            429 or 503   ask again after `retry_after` seconds
    ├── ComputeError         the backend failed to carry out a verb
    │   ├── OutOfCache       the sampler cannot hold so long a sequence
    │   ├── GrammarError     the sampler cannot follow a grammar
    │   └── WorkerDied       the worker process ended; the gateway restarts it
    │       └── WorkerHung   it showed no sign of work and was killed
    ├── CheckpointError      a checkpoint could not be written or is not the one asked for
    └── Unreachable          (client) the server did not answer within the retries

An exception inside an agent is none of these: it aborts that agent's episode and is counted.
"""

from __future__ import annotations


class AgentJetError(Exception):
    """Root of everything AgentJet raises on purpose."""


class ConfigError(AgentJetError):
    """A setting is unknown, malformed or impossible."""


def _encodable(text: str) -> str:
    """Text with half surrogate pairs, which no answer can carry, as escapes."""
    return text.encode(errors="backslashreplace").decode()


class RequestError(AgentJetError):
    """A request that cannot be honoured.

    `message` is one sentence for a person; `code` is stable and for programs; `param` names the offending
    field where there is one.
    """

    status: int = 400
    code: str = "invalid_request"

    def __init__(
        self, message: str, *, code: str | None = None, status: int | None = None, param: str | None = None
    ) -> None:
        self.message = _encodable(message)
        self.param = None if param is None else _encodable(param)
        super().__init__(self.message)
        if code is not None:
            self.code = code
        if status is not None:
            self.status = status


class InvalidRequest(RequestError):
    """The request is malformed or asks for what cannot be done."""


class ContextOverflow(InvalidRequest):
    """The prompt, called `asked` in the request, is longer than the context allows. The message is in OpenAI's words.

    `maximum` is the context length in tokens, of which an answer needs one; `num_tokens` is the prompt's length, or
    the least it can be.
    """

    code = "context_length_exceeded"

    def __init__(self, asked: str, num_tokens: int, maximum: int, *, or_more: bool = False) -> None:
        super().__init__(
            f"This model's maximum context length is {maximum} tokens. However, your {asked} resulted in "
            f"{num_tokens} tokens{' or more' if or_more else ''}, which leaves no room for an answer. "
            f"Please reduce the length of the {asked}.",
            param=asked,
        )
        self.num_tokens = num_tokens
        self.maximum = maximum


class Unauthorized(RequestError):
    """No key, a wrong key or an expired key."""

    status = 401
    code = "unauthorized"


class Forbidden(RequestError):
    """A valid key, but not for this."""

    status = 403
    code = "forbidden"


class NotFound(RequestError):
    """There is no such thing."""

    status = 404
    code = "not_found"


class Conflict(RequestError):
    """The present state does not allow the request."""

    status = 409
    code = "conflict"


class OperationConflict(Conflict):
    """An operation is out of order, or repeats a number with another body."""

    code = "operation_conflict"


class TooLarge(RequestError):
    """The request is larger than the server accepts."""

    status = 413
    code = "too_large"


class Later(RequestError):
    """Not now: ask again after `retry_after` seconds."""

    status = 429
    code = "later"

    def __init__(self, message: str, *, retry_after: float, code: str | None = None, status: int | None = None) -> None:
        super().__init__(message, code=code, status=status)
        self.retry_after = retry_after


class ComputeError(AgentJetError):
    """The backend failed to carry out a verb."""


class OutOfCache(ComputeError):
    """The sampler cannot hold so long a sequence."""


class GrammarError(ComputeError):
    """The sampler cannot follow a grammar."""


class WorkerDied(ComputeError):
    """The worker process ended unexpectedly."""


class WorkerHung(WorkerDied):
    """The worker process showed no sign of work for `server.worker_timeout` seconds and was killed."""


class CheckpointError(AgentJetError):
    """A checkpoint could not be written, or is not the one asked for."""


class Unreachable(AgentJetError):
    """The server did not answer within the retries (client side)."""
