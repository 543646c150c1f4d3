"""The vocabulary of the project as frozen values. Imports nothing of ours; no torch, no HTTP.

Shape letters used everywhere: B calls or rows, T tokens, N forest nodes, M targets, G episodes of a group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

Mode = Literal["train", "eval"]
EpisodeStatus = Literal["live", "prepared", "finished", "aborted", "expired"]
"""`prepared`: its reward is promised and on disk; whether it counts is decided elsewhere, by `finish` or `abort`."""
EngineState = Literal["offline", "loading", "sampling", "learning", "draining", "failed"]
FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]
Fork = Literal["", "template", "edit", "tools", "retry", "role", "branch"]
"""Why a call began a timeline of its own instead of continuing one; empty when it continues one, or is the first.

`template`: the template writes the known history in other words (stripped thinking). `edit`: the agent changed it.
`tools`: another tool list. `retry`: the same request again, because its answer did not arrive. `role`: another role of
the episode speaks for the first time. `branch`: a legitimate second continuation (a vote, a sub-agent, best of n).
"""

ESCAPE = b"\xff"
"""Encoded text is UTF-8 in which a control token is this byte, which no UTF-8 has, and its id in three bytes (big-
endian).

A sampled byte token may itself be ff: it is written as `ESCAPED_BYTE`, so that encoded text reads one way only.
"""

ESCAPED_BYTE = b"\xff\xff\xff\xff"


MAX_NAME = 256
"""Characters of a task's id, and of a task set's name."""
MAX_NESTING = 256
"""How deep the arguments of a tool call may be nested to count as JSON. More than other parsers read (about 200), and
far from what a walk through them may not take: that depends on who walks, and the same text must always be the same.
"""


@dataclass(frozen=True, slots=True)
class Task:
    """One dataset item a client wants solved. `payload` is the client's business and never leaves it."""

    id: str
    task_set: str = ""
    payload: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not 1 <= len(self.id) <= MAX_NAME:
            raise ValueError(f"the task id {str(self.id)[:60]!r} must be text of 1 to {MAX_NAME} characters")
        if not isinstance(self.task_set, str) or len(self.task_set) > MAX_NAME:
            raise ValueError(f"the task set {str(self.task_set)[:60]!r} must be text of up to {MAX_NAME} characters")


@dataclass(frozen=True, slots=True)
class Reward:
    """What an agent returns for an episode: a number, optionally split by agent role, and metrics to chart."""

    value: float
    by_role: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not hasattr(self.value, "__float__"):  # NumPy's and torch's numbers have it, too
            raise ValueError(f"Reward({self.value!r}): the value must be a number")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an assistant message. `arguments` is JSON text, as sampled."""

    id: str
    name: str
    arguments: str

    def value(self) -> Any:
        """What the arguments are in JSON. Raises `ValueError` where they are none, or are nested too deeply."""
        try:
            value = json.loads(self.arguments)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if self.arguments.count("[") + self.arguments.count("{") > MAX_NESTING and _is_nested_deeply(value):
            raise ValueError("nested too deeply")
        return value


def _is_nested_deeply(value: Any) -> bool:
    layer = [value]
    for _ in range(MAX_NESTING):
        nested = [item for item in layer if isinstance(item, dict | list)]
        layer = [inner for item in nested for inner in (item.values() if isinstance(item, dict) else item)]
    return any(isinstance(item, dict | list) for item in layer)


@dataclass(frozen=True, slots=True)
class Message:
    """One message in canonical form, whatever dialect it came in. Absent text is the empty string."""

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a model is asked to continue: messages, and the tool definitions (JSON-schema dicts) it may use."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """Raw text, or token ids, to be continued as they stand, without the chat template; there are no messages then."""
    instructed: bool = False
    """The first message is meant for this request alone: one that names its call as its past does not inherit it."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must look like, in no dialect; as it stands here, it may be anything."""

    schema: Mapping[str, Any] | None = None
    """The answer's content is JSON that follows this schema (`{"type": "object"}`: any object), or it is tool calls."""
    schema_param: str = "response_format"
    """What the request calls the schema, for errors."""
    calls: Literal["auto", "required"] = "auto"
    """`required`: the answer is tool calls, and their arguments follow the functions' schemas."""
    function: str = ""
    """The only function that may be called; empty for any of the conversation's."""
    strict: frozenset[str] = frozenset()
    """Functions whose arguments follow their schema whenever they are called."""
    parallel: bool = True
    """Whether an answer may hold several tool calls."""


ANY_ANSWER = Constraint()


MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 10.0
"""Of a temperature, but for 0, which is greedy: colder ones choose the same tokens and end up at numbers that are none.
"""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 truncate nothing.

    `grammar` (Lark, as `llguidance` reads it; empty for none) restricts what can be sampled, before temperature and
    truncation. A completion that it is done with ends.

    At most `piece_tokens` tokens are delivered at a time: 1 for whoever reads along, more where only the end counts.
    The reported log-probabilities are those of the distribution sampled from, after temperature and truncation.
    A given (`seed`, prompt, weights) samples the same tokens whatever else runs, up to rounding of batched arithmetic.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    piece_tokens: int = 1
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A piece of a completion. The last piece has a `finish_reason`: `stop` (an end token, included), `length`."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: int
    finish_reason: FinishReason | None = None
    support: tuple[bytes, ...] = ()
    """The tokens that each was chosen among, as `timeline.support` encodes them; empty when it was always all of them.
    """


@dataclass(frozen=True, slots=True)
class PolicyId:
    """The name of a policy on a backend."""

    run: str = "default"
    policy: str = "policy"

    def __str__(self) -> str:
        return f"{self.run}/{self.policy}"


@dataclass(frozen=True, slots=True)
class Op:
    """An operation on a policy. `number` counts the policy's operations from 0."""

    run: str
    policy: str
    number: int

    @classmethod
    def of(cls, policy: PolicyId, number: int) -> Self:
        return cls(policy.run, policy.policy, number)

    @property
    def policy_id(self) -> PolicyId:
        return PolicyId(self.run, self.policy)

    def next(self) -> Self:
        """Returns the policy's next operation."""
        return replace(self, number=self.number + 1)


@dataclass(frozen=True, slots=True)
class CheckpointStamp:
    """A checkpoint as its backend wrote or verified it."""

    policy_version: int
    digest: str
    """Digest of the whole checkpoint; empty for one that AgentJet 0.1 wrote."""
    operation: int = 0
    """Number of the policy's next operation."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probability of a given token at temperature 1, and the likeliest tokens in its place with theirs."""

    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the gateway must know of a model without loading it.

    `tokenizer_path` is a folder with `tokenizer.json`; `chat_template` is Jinja source; `end_tokens` end a
    turn; `shares_prefixes` tells whether a sequence's state may be shared by several continuations; `weights` is a
    fingerprint of the configured model's, which version 0 has, empty where the backend takes none; `threads` are those
    of the CPU that learn, 0 where another device does.
    """

    name: str
    tokenizer_path: str
    chat_template: str
    context_length: int
    end_tokens: tuple[int, ...]
    bos_token: str = ""
    eos_token: str = ""
    shares_prefixes: bool = True
    num_parameters: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    tool_format: str = ""
    weights: str = ""
    threads: int = 0


@dataclass(frozen=True, slots=True)
class NewContext:
    """What an agent asked, in words, as far as it was new."""

    messages: tuple[Message, ...] = ()
    """Those that follow the conversation of call `after` and its response; all of them when that is None."""
    after: str | None = None
    """The newest call whose response the request sends back: proof that this response arrived."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools on offer when `after` is None; else they are as they were there."""
    fingerprint: str = ""
    """Digest of the whole request: the same request sent again has the same one."""
    instructed: bool = False
    """As the conversation was that begins here, when `after` is None."""


@dataclass(frozen=True, slots=True)
class Call:
    """One model request of an episode, as the policy really saw it.

    The prompt is the first `kept` tokens of the parent call's prompt + completion, then `suffix`. With no parent
    `kept` is 0.
    `versions` holds the policy version that sampled each completion token.
    """

    id: str
    episode_id: str
    role: str
    parent: str | None
    kept: int
    suffix: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    temperature: float
    finish_reason: FinishReason
    response: Message
    prompt_key: str
    """Identity by meaning of the conversation asked (hex digest), from `timeline.identity`."""
    created: float
    ask: NewContext = NewContext()
    fork: Fork = ""
    retry_of: str | None = None
    """The call that this one repeats: the agent's SDK sent the same request again because no answer had come."""
    context: bytes = b""
    """Digest of prompt + completion as they were when sampled: what is trained must still have it."""
    support: bytes = b""
    """The set of tokens that each token of the completion was chosen among, packed by `timeline.support.pack_sets`."""
    untrained: str = ""
    """Name of the rule of `job.side_calls` that excludes the call from training; empty for none."""
