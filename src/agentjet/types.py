"""The terms of the project as frozen dataclasses. Imports no other module of AgentJet, neither torch nor HTTP.

Shape letters: B calls or rows, T tokens, N forest nodes, M targets, G episodes of a group.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

from agentjet.errors import InvalidRequest, Unprocessable, nearest_name

Mode = Literal["train", "eval"]
EpisodeStatus = Literal["live", "finished", "aborted", "expired"]
EpisodeFilter = Literal["live", "finished", "aborted", "expired", "not_needed"]
"""A status by which episodes are found. `aborted` leaves out those that were `not_needed`."""
EpisodeOrder = Literal["newest", "oldest", "reward", "-reward", "-num_tokens", "-num_calls"]
OperationKind = Literal["forward_backward", "optim_step"]
GroupState = Literal["open", "closing", "complete", "dropped", "batched"]
EngineState = Literal["offline", "loading", "sampling", "learning", "draining", "failed"]
FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]
Fork = Literal["", "template", "edit", "tools", "retry", "role", "branch"]
"""Cause of a new timeline. Empty if the call continues a timeline or is the first of its role.

`template`: the template writes the known history differently (stripped reasoning). `edit`: the agent changed it.
`tools`: another tool list. `retry`: the same request again, because its answer did not arrive. `role`: first call of
another role. `branch`: a legitimate second continuation (a vote, a sub-agent, best of n).
"""

ESCAPE = b"\xff"
"""First byte of a control token in encoded text; its id follows in three bytes (big-endian). The rest is UTF-8."""
ESCAPED_BYTE = b"\xff\xff\xff\xff"
"""A sampled byte token ff, so that encoded text is unambiguous."""

MAX_NAME = 256
"""Maximum characters of a task id and of a task set's name."""
MAX_NUMBERS = 64
"""Maximum metrics of an episode, and maximum roles with rewards."""
MAX_REWARD_TEXT = 10_000
"""Maximum characters of the text of a reward."""
LARGEST = 1e12
"""Largest absolute value of a reward or a metric, so that sums of squares stay finite."""
MAX_SHOWN = 60
"""Characters of a wrong value in a message."""
MAX_NESTING = 256
"""Maximum nesting depth for arguments to count as JSON. Fixed, so that the same text always parses the same way."""


@dataclass(frozen=True, slots=True)
class Task:
    """One item that a client wants solved. `payload` stays in the client and is never sent."""

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
    """The result of an episode: a number, optionally one per agent role and per call, metrics to chart, and a text.

    Numbers become floats: those of NumPy and torch are numbers, and True is 1. Raises `Unprocessable` naming the
    value that is not a finite number.
    """

    value: float
    by_role: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    by_turn: Sequence[float] | Mapping[str, Sequence[float]] = ()
    """Rewards of the first, second, ... call; by role if the agent names roles. For recipes that read them."""
    by_call: Mapping[str, float] = field(default_factory=dict)
    """Rewards of single calls, by the `id` of their answers."""
    text: str = ""
    """The reason for the reward, for people: a judge's words, or the expected answer."""

    def __post_init__(self) -> None:
        checked = {
            "value": checked_number(self.value, "reward"),
            "by_role": _checked_map(self.by_role, "by_role"),
            "metrics": _checked_map(self.metrics, "metrics"),
            "by_turn": _checked_turns(self.by_turn),
            "by_call": _checked_map(self.by_call, "by_call"),
            "text": _checked_text(self.text),
        }
        for name, numbers in (("by_role", self.by_role), ("metrics", self.metrics)):
            if len(numbers) > MAX_NUMBERS:
                raise invalid_reward(f"{name} has {len(numbers)} names: {MAX_NUMBERS} are allowed", name)
        if "" in self.metrics:
            raise invalid_reward("metrics has an empty name: give each metric a name", "metrics")
        if len(self.text) > MAX_REWARD_TEXT:
            # The line that made the reward is above the generated `__init__`. Python prints equal warnings of it once.
            warnings.warn(f"the text of a reward is cut to its first {MAX_REWARD_TEXT} characters", stacklevel=3)
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def checked_number(value: Any, name: str) -> float:
    """The number as a float. Raises `Unprocessable` for text, and for a number that is not finite."""
    try:
        if isinstance(value, str | bytes) or len(getattr(value, "shape", ())):  # float() reads text, and arrays of one
            raise TypeError
        number = float(value)
    except OverflowError:  # a whole number beyond every float
        value = number = math.inf
    except (TypeError, ValueError):
        raise invalid_reward(f"{name} is {shown(value)}: an agent returns a number or a Reward", name) from None
    if not math.isfinite(number) or abs(number) > LARGEST:
        text = f"{name} is {shown(value)}: it must be a finite number from -{LARGEST:g} to {LARGEST:g}"
        raise invalid_reward(text, name)
    return number


def _checked_map(numbers: object, name: str) -> dict[str, float]:
    if not isinstance(numbers, Mapping):
        raise invalid_reward(f"{name} is {shown(numbers)}: give numbers by name, such as {{'solved': 1}}", name)
    return {key: checked_number(value, f"{name}[{key!r}]") for key, value in numbers.items()}


def _checked_turns(by_turn: object) -> tuple[float, ...] | dict[str, tuple[float, ...]]:
    """The rewards of turns, or those of each role."""
    if isinstance(by_turn, Mapping):
        return {role: _checked_sequence(rewards, f"by_turn[{role!r}]") for role, rewards in by_turn.items()}
    return _checked_sequence(by_turn, "by_turn")


def _checked_sequence(numbers: object, name: str) -> tuple[float, ...]:
    if not isinstance(numbers, Iterable) or isinstance(numbers, str | bytes | Mapping):
        raise invalid_reward(f"{name} is {shown(numbers)}: give a list of numbers, one a turn", name)
    return tuple(checked_number(value, f"{name}[{turn}]") for turn, value in enumerate(numbers))


def _checked_text(text: object) -> str:
    if not isinstance(text, str):
        raise invalid_reward(f"text is {shown(text)}: give the reason for the reward as text", "text")
    return text[:MAX_REWARD_TEXT].encode("utf-8", "replace").decode()  # JSON has no lone surrogates


def invalid_reward(message: str, param: str) -> InvalidRequest:
    return Unprocessable(message, code="invalid_reward", param=param)


def shown(value: object) -> str:
    """The beginning of a wrong value, for a message."""
    return beginning(repr(value), MAX_SHOWN)


def beginning(text: str, length: int) -> str:
    """Returns a text of at most `length` characters: an ellipsis replaces the end of a longer one."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an assistant message. `arguments` is JSON text, as sampled."""

    id: str
    name: str
    arguments: str

    def value(self) -> Any:
        """Returns the parsed arguments. Raises `ValueError` if they are not JSON or are nested too deeply."""
        try:
            value = json.loads(self.arguments)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if self.arguments.count("[") + self.arguments.count("{") > MAX_NESTING and _is_nested_deeply(value):
            raise ValueError("nested too deeply")
        return value


def _is_nested_deeply(value: Any) -> bool:
    layer = [value]
    for _ in range(MAX_NESTING + 1):
        nested = [item for item in layer if isinstance(item, dict | list)]
        layer = [inner for item in nested for inner in (item.values() if isinstance(item, dict) else item)]
    return bool(nested)


@dataclass(frozen=True, slots=True)
class Message:
    """One message in canonical form, independent of the dialect. Missing text is the empty string."""

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a call: messages, and the definitions of the tools (JSON-schema dicts) that the model may use."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """Raw text or token ids to continue without the chat template. `messages` is then empty."""
    is_exact: bool = False
    """True if `prompt` has the tokens of the context. Else a known text gets the tokens that the policy sampled."""
    instructed: bool = False
    """True if the first message is this request's `instructions`, which `previous_response_id` does not continue."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """The required form of an answer, independent of the dialect. The defaults allow any answer."""

    schema: Mapping[str, Any] | None = None
    """If set, the answer is JSON of this schema (`{"type": "object"}`: any object) or tool calls."""
    schema_param: str = "response_format"
    """Name of the request parameter that has the schema, for errors."""
    calls: Literal["auto", "required"] = "auto"
    """`required`: the answer is tool calls whose arguments follow the schemas of the functions."""
    function: str = ""
    """The only function that may be called. Empty allows all functions of the conversation."""
    strict: frozenset[str] = frozenset()
    """Functions whose arguments must follow their schema."""
    parallel: bool = True
    """True if an answer may have several tool calls."""


ANY_ANSWER = Constraint()

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 10.0
"""Allowed range, beside 0 for greedy. Between 0 and 0.01 the log-probabilities overflow."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one completion.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 truncate nothing. `grammar` (Lark in the syntax of `llguidance`,
    empty for none) restricts the tokens before temperature and truncation, and ends a completion that satisfies it.
    A piece has at most `piece_tokens` tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    """The same seed, prompt and weights give the same tokens, independent of other calls, up to rounding in batches."""
    is_reproducible: bool = False
    """True if a client named the seed, in the request or for the episode. A sampler may ignore other seeds."""
    piece_tokens: int = 1
    stream_seconds: float | None = None
    """Seconds in which the tokens of a stream become one piece: see `is_due`. None if only the end counts."""
    grammar: str = ""
    routes_from: int | None = None
    """Position in the prompt from which routes are reported; None for none."""

    def is_due(self, num_tokens: int, sent_at: float, now: float) -> bool:
        """True if a piece of so many tokens must be sent now; the piece before was sent at `sent_at`, -1 for none.

        The first token of a stream is sent at once. From then on a piece is sent in each period of `stream_seconds` on
        the sampler's clock. The periods of all streams are the same, so that their pieces share a message.
        """
        period = self.stream_seconds
        return num_tokens >= self.piece_tokens or (period is not None and now // period > sent_at // period)


class Sampled(NamedTuple):  # A pickle of one takes a fifth of the time of a frozen dataclass.
    """A piece of a completion. The last piece has a `finish_reason`: `stop` (with the end token) or `length`.

    Log-probabilities belong to the distribution sampled from, after grammar, temperature and truncation.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: int
    finish_reason: FinishReason | None = None
    support: tuple[bytes, ...] = ()
    """Support set of each token, encoded by `timeline.forest`. Empty if each is the whole vocabulary."""
    routes: bytes = b""
    """Routes of the tokens that were computed since the last piece, packed by `timeline.routes`."""


JOURNAL = "journal.sqlite"
"""The journal in the folder of a run."""
DEFAULT_RUN = "default"
"""The run of the paths without a run's name."""
RUN_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""The whole name of a run, which is also that of its folder."""
SOLE_POLICY = "policy"
"""The policy of a run whose settings name none."""


def policy_of(role: str, policies: Sequence[str]) -> str:
    """Returns the policy of a role, which is `POLICY` or `POLICY/NAME` in a run whose settings name `policies`."""
    return role.partition("/")[0] if policies else SOLE_POLICY


def metrics_prefix(policy: str, policies: Sequence[str]) -> str:
    """Returns the start of the names of a policy's metrics."""
    return f"{policy}/" if policies else ""


def wrong_reward_name(names: Iterable[str], policies: Sequence[str]) -> tuple[str, str] | None:
    """Returns the first unknown or missing name of an episode's rewards by role, and a sentence about it.

    None if the names are right: no names, or every policy, with any `POLICY/NAME`.
    """
    known = list(names)
    for name in known:
        policy, slash, role = name.partition("/")
        if slash and not role:
            return name, f"by_role[{name!r}] has no role after the slash: write {policy!r}, or {policy}/ROLE."
        if policy not in policies:
            near = nearest_name(policy, policies)
            hint = f"Did you mean {near!r}?" if near else f"The policies are {', '.join(policies)}."
            return name, f"by_role[{name!r}]: the run has no policy {policy!r}. {hint}"
    missing = [policy for policy in policies if known and policy not in known]
    if missing:
        return missing[0], (
            f"by_role has no reward for policy {missing[0]!r}: give one for each of {', '.join(policies)}, or none at "
            "all, and every policy gets the reward of the episode."
        )
    return None


@dataclass(frozen=True, slots=True)
class CheckpointName:
    """A policy of a run at a checkpoint: `RUN@VERSION`, or `RUN/POLICY@VERSION`."""

    run: str
    policy: str
    """Empty for the only policy of the run."""
    version: str
    """A policy version, or a tag."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Returns None for other text, such as a Hugging Face id."""
        found = re.fullmatch(rf"({RUN_NAME.pattern})(?:/([a-z][a-z0-9_-]*))?@([A-Za-z0-9][A-Za-z0-9._-]*)", text)
        return None if found is None else cls(found[1], found[2] or "", found[3])


@dataclass(frozen=True, slots=True)
class PolicyId:
    """The name of a policy on a backend."""

    run: str = DEFAULT_RUN
    policy: str = SOLE_POLICY

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
    """A checkpoint that the backend wrote or verified. `digest` is that of the whole checkpoint."""

    policy_version: int
    digest: str
    operation: int = 0
    """Number of the policy's next operation."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probability of a given token at temperature 1, and those of the likeliest tokens at its position."""

    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RouteShape:
    """The sizes of the routes of a model with experts."""

    layers: tuple[int, ...]
    """The layer of each router."""
    choices: int
    """Experts that a router chooses for a token."""
    experts: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The facts that the gateway needs about a model."""

    name: str
    tokenizer_path: str
    """Folder with `tokenizer.json`."""
    chat_template: str
    """Jinja source."""
    context_length: int
    end_tokens: tuple[int, ...]
    """Tokens that end a turn."""
    bos_token: str = ""
    eos_token: str = ""
    shares_prefixes: bool = True
    """True if several continuations can share the state of a prefix."""
    num_parameters: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    tool_format: str = ""
    weights: str = ""
    """Fingerprint of the weights of version 0. Empty if the backend computes none."""
    routes: RouteShape | None = None
    """The sizes of its routes; None if they are not recorded."""
    machine: str = ""
    """Kind of the hardware that computes it: GPU and number, or CPU and threads. Empty if the backend does not tell."""


@dataclass(frozen=True, slots=True)
class SlowWork:
    """Work of a process that takes long, and its progress."""

    text: str
    """A phrase such as `downloading the model`."""
    done: float
    total: float
    """0 if it is not known."""
    unit: str
    seconds: float
    """Time that `done` took."""


LOADS_WEIGHTS, WAITS_FOR_BATCH = "loads weights", "waits for a batch"
"""States of a replica that adopts a version, and of a rank that has nothing to do."""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process that hosts weights of a policy."""

    name: str
    kind: Literal["worker", "rank", "replica"]
    """`worker`: learns and samples. `rank`: learns. `replica`: samples."""
    state: str
    """A word or a phrase, such as `sampling` or `loads the model`."""
    place: str = ""
    """Machine and process id, as far as they are known."""
    version: int | None = None
    """Policy version that it samples with. None for a rank, and before the first version."""
    completions: int = 0
    """Completions that it samples now."""
    is_ready: bool = True
    """False while it starts or loads, and before its first weights."""
    work: SlowWork | None = None


@dataclass(frozen=True, slots=True)
class SamplerBounds:
    """Fewest and most sampler replicas of a policy. Their number is fixed if the two are equal."""

    MAX: ClassVar = 4096

    least: int
    most: int

    @classmethod
    def parse(cls, value: object) -> Self:
        """Returns the bounds that `6`, `"6"` or `"2..8"` mean. Raises `ValueError`."""
        if isinstance(value, cls):
            return value
        found = re.fullmatch(r"\s*(\d{1,9})\s*(?:\.\.\s*(\d{1,9})\s*)?", str(value), re.ASCII)
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most <= cls.MAX:
            raise ValueError(f"{value!r} is not a number from 1 to {cls.MAX}, such as 6, nor a range, such as 2..8")
        return cls(least, most)

    def clamp(self, number: int) -> int:
        """Returns the nearest number within the bounds."""
        return max(self.least, min(self.most, number))

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"


@dataclass(frozen=True, slots=True)
class SamplersStatus:
    """The sampler replicas of a policy as a whole."""

    bounds: SamplerBounds
    wanted: int
    """Number of replicas that the policy should have now."""
    running: int
    """Completions that replicas have."""
    waiting: int
    """Completions that wait for a place at a replica."""


@dataclass(frozen=True, slots=True)
class NewContext:
    """The new part of a request: messages that continue an earlier call."""

    messages: tuple[Message, ...] = ()
    """The messages after the response of call `after`. All messages if that is None."""
    after: str | None = None
    """The newest call whose response the request contains, which proves that it arrived."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools, if `after` is None. Else the tools of that call apply."""
    fingerprint: str = ""
    """Digest of the whole request. A retry has the same one."""
    instructed: bool = False
    """`Conversation.instructed`, if `after` is None."""


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded model request of an episode, with the exact tokens that the policy saw.

    The prompt is the first `kept` tokens of the parent call's prompt + completion, then `suffix`. Without a parent
    `kept` is 0. `versions` has the policy version that sampled each completion token.
    """

    id: str
    episode_id: str
    role: str
    parent: str | None
    kept: int
    suffix: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Empty if the completion was given, not sampled: a demonstration."""
    versions: tuple[int, ...]
    temperature: float
    finish_reason: FinishReason
    response: Message
    prompt_key: str
    """Identity of the conversation by meaning (hex digest), from `timeline.tree`."""
    created: float
    ask: NewContext = NewContext()
    fork: Fork = ""
    retry_of: str | None = None
    """The call that this one repeats, because the agent's SDK sent the request again without an answer."""
    context: bytes = b""
    """Digest of prompt + completion at sampling time. Trained tokens must still have it."""
    support: bytes = b""
    """Support set of each completion token, packed by `swarm.journal.pack_sets`."""
    untrained: str = ""
    """Name of the rule of `job.side_calls` that excludes the call from training, or ''."""
    seconds: float | None = None
    """Seconds from the arrival of the request to `created`. None if it was not measured."""

    @property
    def after(self) -> str | None:
        """The newest call whose response the request contains."""
        return self.ask.after
